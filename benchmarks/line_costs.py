"""What a prefix cache that finds nothing costs, and what recording does: W1 in turns, and the cost by itself.

W1's prompts have nothing in common. Throughput is that of engines in this process which take turns, each round in
another order, on KV caches that were written before: private blocks are the same few again and again, shared ones would
be new memory of the kernel's. A cost is the median of the rounds' ratios, and a busy machine blurs it. By itself: the
processor time that the same load takes without a model, with and without, over the seconds that it takes with one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints_qwen3 import VOCAB_SIZE
from line import Line, median_ratio
from line_steps import served
from offline import Engine
from peers.loads import Load, make_load

from nanoserve.blocks import PrivateBlocks
from nanoserve.config import EngineConfig
from nanoserve.core import EngineCore
from nanoserve.lab.fakes import NullRunner
from nanoserve.record import JsonlRecorder
from nanoserve.request import EngineRequest, SamplingParams

SERVED, NO_CACHE, RECORDED = "as served", "no prefix cache", "recorded"
CACHE_SHARE, RECORDING_SHARE = 0.01, 0.02
POOL_BYTES = 2**30  # more than W1 of the 150M model needs
NULL_ROUNDS = 21  # of W1 without a model: a few hundredths of a second each


def measure_costs(shape: str, path: Path, rounds: int, threads: int) -> list[Line]:
    load = make_load("w1", VOCAB_SIZE)
    config = served(path, threads)
    with tempfile.TemporaryDirectory() as folder:
        with_model_s = in_turns(config, load, rounds, Path(folder))
        alone_s = {form: [] for form in with_model_s}
        for number in range(1 + NULL_ROUNDS):
            for form in in_order(list(alone_s), number):
                alone_s[form].append(host_alone(config_of(config, form), recorder_of(form, Path(folder)), load))
    step_count = count_steps(config, load)
    lasted_s = statistics.median(with_model_s[SERVED])
    lines = []
    for what, over, under, limit in (
        ("a prefix cache that finds nothing", SERVED, NO_CACHE, CACHE_SHARE),
        ("recording", RECORDED, SERVED, RECORDING_SHARE),
    ):
        cost = median_ratio(with_model_s[over], with_model_s[under]) - 1
        detail: dict[str, Any] = {
            "output_tok_per_s": {f: sum(load.num_tokens) / statistics.median(s) for f, s in with_model_s.items()},
            "rounds_s": {form: with_model_s[form] for form in (over, under)},
        }
        lines.append(Line(f"{shape}, W1: throughput that {what} costs", cost, "%", "<=", limit, detail))
        added_s = statistics.median(a - b for a, b in zip(alone_s[over][1:], alone_s[under][1:], strict=True))
        detail = {
            "added_us_per_step": 1e6 * added_s / step_count,
            "steps": step_count,
            "without_model_s": {form: statistics.median(alone_s[form][1:]) for form in (over, under)},
            "w1_s": lasted_s,
        }
        lines.append(Line(f"{shape}, W1: {what} by itself, of W1", added_s / lasted_s, "%", "<=", limit, detail))
    return lines


def in_order(forms: list[str], number: int) -> list[str]:
    """Each round begins with another one, and every other round goes the other way."""
    first = number % len(forms)
    turned = forms[first:] + forms[:first]
    return turned if number % 2 else turned[::-1]


def config_of(config: EngineConfig, form: str) -> EngineConfig:
    return replace(config, blocks=PrivateBlocks) if form == NO_CACHE else config


def recorder_of(form: str, folder: Path) -> JsonlRecorder | None:
    return JsonlRecorder(folder / "trace.jsonl") if form == RECORDED else None


def in_turns(config: EngineConfig, load: Load, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of the load in each form."""
    forms = (SERVED, NO_CACHE, RECORDED)
    config = replace(config, kv_cache_memory_bytes=POOL_BYTES)
    engines = {form: Engine(config_of(config, form), recorder_of(form, folder)) for form in forms}
    lasted_s: dict[str, list[float]] = {form: [] for form in forms}
    try:
        for engine in engines.values():
            engine.write_pool()
            engine.run(replace(load, num_tokens=[4] * len(load.prompts)))  # warms up
        for number in range(rounds):
            for form in in_order(list(forms), number):
                lasted_s[form].append(engines[form].run(load)[0])
    finally:
        for engine in engines.values():
            engine.close()
    return lasted_s


def host_alone(config: EngineConfig, recorder: JsonlRecorder | None, load: Load) -> float:
    """Seconds of processor time that the load takes without a model."""
    core = null_core(config, recorder)
    add_all(core, load)
    start_s = time.process_time()
    while core.has_work:
        core.step()
    lasted_s = time.process_time() - start_s
    core.close()
    return lasted_s


def count_steps(config: EngineConfig, load: Load) -> int:
    core = null_core(config, None)
    add_all(core, load)
    while core.has_work:
        core.step()
    return core.num_steps


def null_core(config: EngineConfig, recorder: JsonlRecorder | None) -> EngineCore:
    return EngineCore.build(replace(config, runner=NullRunner, num_blocks=2**12, max_model_len=2048), recorder)


def add_all(core: EngineCore, load: Load) -> None:
    for i, (prompt, count) in enumerate(zip(load.prompts, load.num_tokens, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        core.add(EngineRequest(id=str(i), prompt_token_ids=prompt, params=params))
