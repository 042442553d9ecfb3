"""How far a decode step is from its floor, and how much of it is not the model, in one engine where everybody decodes.

Within a round the products of the floor, a read of memory, the model's pass alone, and steps of the engine take turns;
a ratio is the median of the rounds' ratios. `model`: from token ids to the greedy next ones, its inputs made before.
`engine`: all that lies between two answers of a client in this process.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checkpoints_qwen3 import VOCAB_SIZE
from floor import READ_NUMBERS, RECORDED, Products, matrices, rounds_of
from line import Line, median_ratio
from micro import decode_step

from nanoserve.client import InProcessClient
from nanoserve.config import STAGES, EngineConfig
from nanoserve.cpu_attention import CpuAttention
from nanoserve.cpu_ops import CpuOps
from nanoserve.packed_linear import pack_linears
from nanoserve.request import EngineRequest, SamplingParams
from nanoserve.runner import EagerRunner
from nanoserve.weights import load_model

CASES = {1: (512, 1.25), 8: (512, 1.25), 32: (256, 1.3)}  # rows: keys, and what is wanted
HOST_ROWS, HOST_KEYS, HOST_STEPS, HOST_SHARE = 32, 256, 10, 0.03
MAX_TOKENS = 1000  # more than any measurement takes


def served(path: Path, threads: int) -> EngineConfig:
    """As `nanoserve serve` runs it, in this process."""
    stage = list(STAGES.values())[-1]
    return replace(
        stage,
        client=InProcessClient,
        model=str(path),
        num_threads=threads,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=8192,
    )


class Decoding:
    """An engine in which everybody decodes: `step` is one step. `keys` of each request grow with it."""

    def __init__(self, config: EngineConfig) -> None:
        self.client = InProcessClient(config)
        self.keys = 0
        self._ids: list[str] = []

    def begin(self, rows: int, keys: int) -> None:
        """Others than those before. Returns when the last prompt is through."""
        self.client.abort(self._ids)
        rng, params = random.Random(rows), SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        self._ids = [f"{rows} rows, {i}" for i in range(rows)]
        for request_id in self._ids:
            prompt = [rng.randrange(16, VOCAB_SIZE) for _ in range(keys - 8)]
            self.client.submit(EngineRequest(id=request_id, prompt_token_ids=prompt, params=params))
        started: set[str] = set()
        while not started.issuperset(self._ids):
            started |= {output.id for output in self.client.poll(60) if output.new_token_ids}
        self.keys = keys

    def step(self) -> None:
        got = {output.id for output in self.client.poll(60) if output.new_token_ids}
        assert got == set(self._ids), f"{len(got)} of {len(self._ids)} requests got a token"
        self.keys += 1

    def close(self) -> None:
        self.client.close()


def measure_floor(shape: str, path: Path, rounds: int, threads: int) -> list[Line]:
    plain, model = load_model(path), load_model(path)
    pack_linears(model)
    model.ops = CpuOps()
    products, numbers = Products(matrices(plain)), torch.zeros(READ_NUMBERS)
    kv_bytes = plain.config.kv_bytes_per_token(torch.float32)
    lines = []
    engine = Decoding(served(path, threads))
    try:
        for rows, (keys, limit) in CASES.items():
            engine.begin(rows, keys)
            best = products.forms(rows)
            forms = {
                "reading": numbers.sum,
                "model": decode_step(model, CpuAttention(), rows, keys),
                "engine": engine.step,
            }
            times = rounds_of(best | forms, rounds)
            called = [layout for layout in best if layout != RECORDED]
            for name, mean_keys, layouts, floor in (
                ("model", keys, called, "its floor"),
                ("engine", (keys + engine.keys) / 2, called, "its floor"),
                ("engine", (keys + engine.keys) / 2, list(best), "its floor without Python's calls"),
            ):
                reads = rows * mean_keys * kv_bytes / (4 * READ_NUMBERS)  # of what `reading` reads
                floors = [min(times[one][r] for one in layouts) + reads * times["reading"][r] for r in range(rounds)]
                medians = {form: statistics.median(ms) for form, ms in times.items()}
                detail = {"ms": medians, "floor_ms": statistics.median(floors), "mean_keys": mean_keys, "rounds": times}
                what = f"{shape}, {rows} rows of {keys} keys: {name}'s decode step over {floor}"
                ratio = median_ratio(times[name], floors)
                lines.append(Line(what, ratio, "x", "<=", limit, detail))
    finally:
        engine.close()
    return lines


class Inside:
    """Seconds that were spent inside some calls, and how many of them there were."""

    def __init__(self) -> None:
        self.spent_s, self.count = 0.0, 0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start_s = time.perf_counter()
            result = call(*args)
            self.spent_s += time.perf_counter() - start_s
            self.count += 1
            return result

        return run


def measure_host(shape: str, path: Path, rounds: int, threads: int, *, promised: bool) -> list[Line]:
    """Strictly: with layers run one by one, all outside the model's own calls is the host's, sampling as well. As
    served, whatever the runner does once a step's inputs are made is the device's."""
    config = served(path, threads)
    limit = HOST_SHARE if promised else None
    lines = []
    for form, runner in (("layers one by one", EagerRunner), ("as served", config.runner)):
        engine, inside = Decoding(replace(config, runner=runner)), Inside()
        try:
            there: Any = engine.client.core.runner
            if runner is EagerRunner:
                model, calls = there.model, 2
                model.forward, model.logits = inside.timed(model.forward), inside.timed(model.logits)
            else:
                there._run, calls = inside.timed(there._run), 1
            engine.begin(HOST_ROWS, HOST_KEYS)
            steps_ms, host_ms = host_rounds(engine, inside, 1 + rounds, calls)
        finally:
            engine.close()
        steps_ms, host_ms = steps_ms[1:], host_ms[1:]
        detail: dict[str, Any] = {"step_ms": statistics.median(steps_ms), "host_ms": statistics.median(host_ms)}
        detail |= {"rounds": {"step_ms": steps_ms, "host_ms": host_ms}}
        inner = "model" if runner is EagerRunner else "runner's device part"
        what = f"{shape}, {HOST_ROWS} rows, {form}: everything but the {inner}, of a step"
        lines.append(Line(what, median_ratio(host_ms, steps_ms), "%", "<=", limit, detail))
    return lines


def host_rounds(engine: Decoding, inside: Inside, rounds: int, calls: int) -> tuple[list[float], list[float]]:
    """Milliseconds of a step, and of the host in it."""
    steps_ms, host_ms = [], []
    for _ in range(rounds):
        inside.spent_s, inside.count, start_s = 0.0, 0, time.perf_counter()
        for _ in range(HOST_STEPS):
            engine.step()
        lasted_s = time.perf_counter() - start_s
        assert inside.count == calls * HOST_STEPS, f"{inside.count} calls of the model in {HOST_STEPS} steps"
        steps_ms.append(1e3 * lasted_s / HOST_STEPS)
        host_ms.append(1e3 * (lasted_s - inside.spent_s) / HOST_STEPS)
    return steps_ms, host_ms
