"""One server's life under many streams: how long the next step waits while the front end is busy.

Three processes beside the engine's own: the server, the load generator (niced), and this one, which asks `/health` all
the while. Gap: from the end of a step to the start of the next one while requests wait for it, told by the core's own
records. Knows layouts only as the config's client class. Laws: tests/test_front_end.py.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from nanoserve.client import EngineDeadError
from nanoserve.lab.arrivals import BenchRequest, Lengths, LoadSpec, PromptSource, Uniform, draw_requests
from nanoserve.lab.front_end_processes import LoadEnd, LoadStart, ServerReady, ServerStart, load_main, server_main
from nanoserve.lab.metrics import Spread, request_times, step_times
from nanoserve.process import ChildDiedError, ChildProcess
from nanoserve.record import StepRecord, read_trace

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig
    from nanoserve.request import EngineInfo

PACKAGES = ("starlette", "uvicorn", "prometheus_client")  # of the `serve` extra
HEALTH_EVERY_S = 0.02
REQUEST_TIMEOUT_S = 120.0
SILENCE_S = 2 * REQUEST_TIMEOUT_S  # of the load generator, in which every request has ended somehow
STOP_TIMEOUT_S = 20.0
SPARE_FILES = 100  # open files of a process beside its connections


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndLoad:
    """A closed loop of streams over HTTP, and what it is meant to show. `requests` are the same in every run."""

    NAME: ClassVar[str] = "busy-front-end"

    name: str = NAME
    claim: str = (
        "Many streams are tokenized, detokenized and written while the engine steps; in one process the next step has "
        "to wait for their interpreter lock."
    )
    headlines: tuple[str, ...] = ("gap_p50", "gap_p99", "output_tokens_per_s")
    num_streams: int
    parameters: Mapping[str, int | str]
    requests: list[BenchRequest] = field(repr=False)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)


def busy_front_end(
    source: PromptSource,
    *,
    seed: int = 0,
    num_streams: int = 120,
    requests_per_stream: int = 3,
    prompt_len: Lengths | None = None,
    output_tokens: int = 32,
) -> FrontEndLoad:
    """`num_streams` clients, each of which sends one request after another. Lengths of prompts are in pieces of
    `source`: words, or tokens. Raises ValueError where this machine allows too few connections."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES
    if limit >= 0 and num_streams > limit:  # RLIM_INFINITY is negative
        raise ValueError(f"{num_streams} streams are more than this shell's open files allow ({limit}); ulimit -n N.")
    prompt_len = prompt_len or Uniform(20, 60)
    num_requests = num_streams * requests_per_stream
    spec = LoadSpec(num_requests=num_requests, prompt_len=prompt_len, output_len=Uniform(output_tokens, output_tokens))
    return FrontEndLoad(
        num_streams=num_streams,
        parameters={
            "num_streams": num_streams,
            "requests_per_stream": requests_per_stream,
            "prompt_len": str(prompt_len),
            "output_tokens": output_tokens,
        },
        requests=list(islice(draw_requests(replace(spec, seed=seed), source), num_requests)),
    )


@dataclass(frozen=True, slots=True)
class FrontEndMetrics:
    """Figures of one server's life. Times in seconds, shares in [0, 1]."""

    gap_s: Spread | None  # the end of a step -> the start of the next, while requests wait
    step_s: Spread | None  # schedule() called -> update() done
    health_s: Spread | None  # GET /health, asked by a process that does nothing else
    output_tokens_per_s: float
    num_steps: int
    client_cpu_share: float  # of a core, by the load generator
    ready_s: float  # from the start of the process to its first answer: interpreter, imports and model included
    num_threads: int  # torch's, in a step


@dataclass(frozen=True, slots=True)
class FrontEndRun:
    """One run: its figures, and what tables, charts and the comparison of tokens need of it."""

    metrics: FrontEndMetrics
    duration_s: float  # of the load, as the engine saw it
    gaps_s: list[float]
    token_ids: dict[str, list[int]]  # of every request, named by the order of the prompts
    config: dict[str, str | int | float | bool | None]  # as the core filled it in
    info: EngineInfo


def missing_packages() -> list[str]:
    """What a server needs and is not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


def with_seats(config: EngineConfig, num_streams: int) -> EngineConfig:
    """The config with a seat for every stream, and a budget in which prompts find room beside them."""
    seats, budget = max(config.max_num_seqs, num_streams), config.max_num_batched_tokens
    return replace(config, max_num_seqs=seats, max_num_batched_tokens=budget and max(budget, 2 * seats))


def step_threads(config: EngineConfig) -> int:
    """Torch's threads in a step, asked of the platform as a runner does."""
    from nanoserve.checkpoint import read_model_config
    from nanoserve.platforms import resolve_platform

    platform = resolve_platform(config.device)
    return config.num_threads or platform.num_threads(read_model_config(config.model).num_parameters)


def run_front_end(
    config: EngineConfig, load: FrontEndLoad, *, on_tokens: Callable[[int], None] | None = None
) -> FrontEndRun:
    """A server of that config from its start to its end, under the load. `on_tokens` hears of tokens that arrived.

    Nothing is left running afterwards, whatever happens. Raises ValueError for a config or a load that cannot be
    served, EngineDeadError when the server or the load generator dies, RuntimeError for any other failed request.
    """
    config = with_seats(config, load.num_streams)
    with ExitStack() as stack:
        trace = Path(stack.enter_context(TemporaryDirectory())) / "trace.jsonl"
        start_s = time.monotonic()
        server = ChildProcess("server", server_main)
        stack.callback(server.stop, STOP_TIMEOUT_S)
        ready = _await_ready(server, ServerStart(config, trace), config.start_timeout_s)
        ready_s = time.monotonic() - start_s
        probe = stack.enter_context(HealthProbe(ready.url))
        end = _put_load_on(ready, load, stack, on_tokens)
        health_s = probe.stop()
        server.stop(STOP_TIMEOUT_S)
        header, records = read_trace(trace)
    records = [record for record in records if record.start_s >= end.start_s]
    gaps_s = step_gaps(records)
    metrics = FrontEndMetrics(
        gap_s=Spread.of(gaps_s),
        step_s=Spread.of(step_times(records)),
        health_s=Spread.of(health_s),
        output_tokens_per_s=end.metrics.output_tokens_per_s,
        num_steps=len(records),
        client_cpu_share=end.cpu_share,
        ready_s=ready_s,
        num_threads=step_threads(config),
    )
    duration_s = records[-1].end_s - records[0].start_s
    return FrontEndRun(metrics, duration_s, gaps_s, tokens_by_prompt(records), header.config, ready.info)


def step_gaps(records: Sequence[StepRecord]) -> list[float]:
    """From the end of each step to the start of the next, in seconds, where requests were left that wait for it."""
    return [max(0.0, b.start_s - a.end_s) for a, b in pairwise(records) if a.num_running + a.num_waiting > 0]


def tokens_by_prompt(records: Sequence[StepRecord]) -> dict[str, list[int]]:
    """The tokens of every request, named by the order of the prompts: ids differ from run to run."""
    prompts = {r.id: r.prompt_token_ids for record in records for r in record.arrivals}
    times = request_times(records)
    answers = sorted((prompt, times[request_id].token_ids) for request_id, prompt in prompts.items())
    return {f"{number} (in order of prompts)": token_ids for number, (_, token_ids) in enumerate(answers)}


def _await_ready(server: ChildProcess, start: ServerStart, timeout_s: float) -> ServerReady:
    server.link.send(start)
    try:
        ok, value = server.recv(timeout_s)
    except ChildDiedError as error:
        raise EngineDeadError(str(error)) from None
    if not ok:
        raise value
    return value


def _put_load_on(
    ready: ServerReady, load: FrontEndLoad, stack: ExitStack, on_tokens: Callable[[int], None] | None
) -> LoadEnd:
    """Every request has come to a good end when this returns."""
    generator = ChildProcess("load generator", load_main)
    stack.callback(generator.stop)
    generator.link.send(LoadStart(ready.url, ready.model, load.requests, load.num_streams, REQUEST_TIMEOUT_S))
    try:
        while isinstance(news := generator.link.recv(SILENCE_S), int):
            if on_tokens is not None:
                on_tokens(news)
    except EOFError:
        raise EngineDeadError(f"load {load.name}: the load generator died before the load ended.") from None
    _check_ends(load, news.metrics)
    return news


def _check_ends(load: FrontEndLoad, metrics: Any) -> None:
    if not metrics.errors:
        return
    kind, number = next(iter(metrics.errors.items()))
    message = (
        f"load {load.name}: {number} of {metrics.num_requests} requests failed ({kind}): "
        f"{metrics.error_examples.get(kind, 'no detail')}"
    )
    raise (ValueError if kind.startswith("http_4") else EngineDeadError)(message)


class HealthProbe:
    """Asks `/health` again and again, on a connection of its own each time, from a thread of this idle process."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, f"{url} names no host"
        self._address = (parts.hostname, parts.port)
        self._latencies_s: list[float] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health-probe", daemon=True)

    def __enter__(self) -> HealthProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def stop(self) -> list[float]:
        """How long each answer took, in seconds."""
        self._done.set()
        self._thread.join(REQUEST_TIMEOUT_S)
        return self._latencies_s

    def _run(self) -> None:
        """Ends when told to, or when there is no server to ask any more: the load then says why."""
        while not self._done.wait(HEALTH_EVERY_S):
            connection = HTTPConnection(*self._address, timeout=REQUEST_TIMEOUT_S)
            start_s = time.monotonic()
            try:
                connection.request("GET", "/health")
                answer = connection.getresponse()
                answer.read()
            except (OSError, HTTPException):
                return
            finally:
                connection.close()
            if answer.status == 200:
                self._latencies_s.append(time.monotonic() - start_s)
