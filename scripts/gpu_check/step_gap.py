"""Part `step_gap`: in each layout, the gap between steps under many streams, and how soon a request is admitted.

The gap is a server's (`nanoserve.lab.front_end`) with the embedded model, whose steps are so short on a GPU that the
host is all there is to see. Admission is from the records of an engine that decodes, with one step ahead on and off:
how long a request that comes while a step runs waits until a plan that has it goes to the runner.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gpu_check.engines import quick, write_shape
from nanoserve.client import EngineClient
from nanoserve.config import SEAMS, STAGES, EngineConfig
from nanoserve.lab.arrivals import Uniform, story_words
from nanoserve.lab.front_end import FrontEndLoad, busy_front_end, missing_packages, run_front_end
from nanoserve.lab.metrics import Spread
from nanoserve.platforms import resolve_platform
from nanoserve.record import JsonlRecorder, StepRecord, read_trace
from nanoserve.request import EngineRequest, SamplingParams

if TYPE_CHECKING:
    from gpu_check.part import Part

LAYOUTS: Mapping[str, Any] = SEAMS["client"]
WAIT_S = 30.0  # for anything that should take much less


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    num_streams: int = 120
    requests_per_stream: int = 2
    output_tokens: int = 48
    num_decodes: int = 32  # that run when the others arrive
    num_arrivals: int = 40
    pause_s: tuple[float, float] = (0.005, 0.04)  # between two arrivals


DRY = Sizes(num_streams=6, requests_per_stream=1, output_tokens=8, num_decodes=3, num_arrivals=5)


def run(part: Part) -> None:
    sizes = DRY if part.dry else Sizes()
    if missing := missing_packages():
        part.skip("step gap", f"a server needs {', '.join(missing)}")
    else:
        load = busy_front_end(
            story_words,
            num_streams=sizes.num_streams,
            requests_per_stream=sizes.requests_per_stream,
            prompt_len=Uniform(20, 60),
            output_tokens=sizes.output_tokens,
        )
        for layout in LAYOUTS:
            part.attempt(f"gap, {layout}", 12, lambda layout=layout: measure_gap(part, layout, load))
    with TemporaryDirectory() as folder:
        model = write_shape("tiny-llama" if part.dry else "qwen3-0.6b", Path(folder))
        for layout in LAYOUTS:
            for is_ahead in (False, True):
                name = f"admission, {layout}, {'one step ahead' if is_ahead else 'step by step'}"
                config = admission_config(part, model, layout, is_ahead=is_ahead)
                part.attempt(
                    name,
                    11 if layout != "inproc" else 4,
                    lambda name=name, config=config: measure_admission(part, name, config, sizes),
                )
                resolve_platform(config.device).release_memory()


def measure_gap(part: Part, layout: str, load: FrontEndLoad) -> None:
    config = replace(
        STAGES["shared"],
        client=LAYOUTS[layout],
        max_num_batched_tokens=1024,
        max_model_len=2048,
        num_blocks=1024 if part.dry else 16384,  # a small model would get millions of a large device's memory
        device="cpu" if part.dry else "auto",
    )
    metrics = run_front_end(config, load).metrics
    gap, step, health = metrics.gap_s, metrics.step_s, metrics.health_s
    assert gap is not None, "no request waited for a step"
    assert step is not None, "no step was run"
    result = {
        "gap_p50_s": gap.p50,
        "gap_p99_s": gap.p99,
        "gap_max_s": gap.max,
        "step_p50_s": step.p50,
        "health_p99_s": health.p99 if health else None,
        "output_tokens_per_s": metrics.output_tokens_per_s,
        "num_steps": metrics.num_steps,
        "ready_s": metrics.ready_s,
    }
    figure = (
        f"P50 {gap.p50 * 1e3:.2f} ms, P99 {gap.p99 * 1e3:.2f} ms, max {gap.max * 1e3:.1f} ms; "
        f"step P50 {step.p50 * 1e3:.2f} ms; {metrics.output_tokens_per_s:,.0f} tokens/s"
    )
    part.keep(f"gap, {layout}", result, (f"gap between steps, {load.num_streams} streams, {layout}", figure))


def admission_config(part: Part, model: str, layout: str, *, is_ahead: bool) -> EngineConfig:
    config = replace(
        STAGES["shared"],
        model=model,
        client=LAYOUTS[layout],
        async_scheduling=is_ahead,
        max_model_len=4096,
        num_blocks=2048 if part.dry else 8192,
        device="cpu" if part.dry else "auto",
    )
    return quick(config)


def measure_admission(part: Part, name: str, config: EngineConfig, sizes: Sizes) -> None:
    with TemporaryDirectory() as folder:
        recorder = JsonlRecorder(Path(folder) / "trace.jsonl")
        try:
            with config.client(config, observer=recorder) as client:
                arrive_among_decodes(client, sizes)
        finally:
            recorder.close()
        _, records = read_trace(recorder.path)
    waits, step = admission_waits(records), Spread.of(record.end_s - record.start_s for record in records[8:])
    waited = Spread.of(waits)
    assert waited is not None, "no request came while a step ran"
    assert step is not None, "no step was run"
    result = {
        "num_arrivals": waited.count,
        "wait_p50_s": waited.p50,
        "wait_max_s": waited.max,
        "step_p50_s": step.p50,
    }
    figure = f"P50 {waited.p50 * 1e3:.2f} ms, max {waited.max * 1e3:.2f} ms; step P50 {step.p50 * 1e3:.2f} ms"
    part.keep(name, result, (f"arrival to {name}", figure))


def admission_waits(records: list[StepRecord]) -> list[float]:
    """From arrival to the launch of the first plan with it, of probes that came while a step ran. In seconds."""
    arrived_s = {r.id: r.arrival_s for record in records for r in record.arrivals if r.id.startswith("probe")}
    waits = []
    for record in records:
        for request_id in record.hit_tokens:
            at_s = arrived_s.pop(request_id, None)
            if at_s is not None and any(other.start_s <= at_s <= other.end_s for other in records):
                waits.append(record.launched_s - at_s)
    return waits


def arrive_among_decodes(client: EngineClient, sizes: Sizes) -> None:
    """Decodes that never end by themselves; then short requests, one by one, while another thread polls."""
    rng = random.Random(0)
    decodes = [f"decode-{i}" for i in range(sizes.num_decodes)]
    probes = [f"probe-{i}" for i in range(sizes.num_arrivals)]
    for request_id in decodes:
        client.submit(short_request(request_id, rng, client, max_tokens=client.info.max_model_len - 64))
    poller = Poller(client)
    poller.start()
    try:
        poller.wait_for(decodes, "begun")
        for request_id in probes:
            time.sleep(rng.uniform(*sizes.pause_s))  # so that they come at any moment of a step
            client.submit(short_request(request_id, rng, client, max_tokens=2))
        poller.wait_for(probes, "ended")
        client.abort(decodes)
        poller.wait_for(decodes, "ended")
    finally:
        poller.stop()


def short_request(request_id: str, rng: random.Random, client: EngineClient, *, max_tokens: int) -> EngineRequest:
    prompt = [rng.randrange(1, client.info.vocab_size) for _ in range(16)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(id=request_id, prompt_token_ids=prompt, params=params, arrival_s=time.monotonic())


class Poller(threading.Thread):
    """Polls until it is stopped, and tells who has begun and who has ended."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(name="poller", daemon=True)
        self._client = client
        self._news = threading.Condition()
        self._done: dict[str, set[str]] = {"begun": set(), "ended": set()}
        self._stopped = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                outputs = self._client.poll(0.05)
            except Exception as error:
                with self._news:
                    self._error = error
                    self._news.notify_all()
                return
            with self._news:
                self._done["begun"].update(output.id for output in outputs if output.new_token_ids)
                self._done["ended"].update(output.id for output in outputs if output.finish_reason)
                self._news.notify_all()

    def wait_for(self, request_ids: list[str], state: str) -> None:
        with self._news:
            self._news.wait_for(lambda: self._error or self._done[state].issuperset(request_ids), WAIT_S)
            if self._error:
                raise self._error
            absent = set(request_ids) - self._done[state]
        if absent:
            raise TimeoutError(f"{len(absent)} of {len(request_ids)} requests had not {state} after {WAIT_S:g} s")

    def stop(self) -> None:
        self._stopped.set()
        self.join(WAIT_S)
