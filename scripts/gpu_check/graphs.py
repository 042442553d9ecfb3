"""Part `graphs`: replayed graphs and compiled layers give the tokens of eager steps; what capturing takes.

Greedy tokens in float32 of requests that come one by one, so that batches are mixed and padded; on the embedded model
and on a tiny random Llama. Then the memory budget of an engine at the shape of Qwen3-0.6B. Dry: on the CPU, where
graphs are the same calls on static memory.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from gpu_check.engines import Engine, quick, with_engine, write_shape
from nanoserve.config import STAGES, EngineConfig
from nanoserve.execution import Execution
from nanoserve.graph_runner import GraphRunner
from nanoserve.graphs import GraphMode
from nanoserve.platforms import resolve_platform

if TYPE_CHECKING:
    from gpu_check.part import Part

SIZES = (1, 2, 4, 8, 16, 32)
NUM_REQUESTS, OUTPUT_TOKENS = 12, 24
COMPILE_S = 30.0  # of one model, with nothing in the cache


def run(part: Part) -> None:
    with TemporaryDirectory() as folder:
        models = {"nanostory": "nanostory", "tiny llama": write_shape("tiny-llama", Path(folder))}
        expected: dict[str, Any] = {}
        for label, model in models.items():
            check_modes(part, label, base_config(part, model), expected)
        if part.dry:
            part.skip("compiled layers", "half a minute of compiling on a CPU; `make test` has them there")
            part.skip("memory of graphs", "a CPU has none to measure; below is the budget of a tiny engine")
        else:
            check_compiled(part, "nanostory", base_config(part, "nanostory"), expected)
        shape = "tiny-llama" if part.dry else "qwen3-0.6b"
        part.attempt("memory budget", 20, lambda: show_budget(part, write_shape(shape, Path(folder)), shape))
        if not part.dry:
            check_compiled(part, "tiny llama", base_config(part, models["tiny llama"]), expected)


def base_config(part: Part, model: str) -> EngineConfig:
    """Stage `shared`, eager, in float32; the embedded model has weights of its own."""
    return replace(
        STAGES["shared"],
        model=model,
        load_format="auto" if model == "nanostory" else "dummy",
        device="cpu" if part.dry else "auto",
        dtype="float32",
        max_model_len=512,
        num_blocks=1024,
        max_num_seqs=16,
        max_num_batched_tokens=64,
    )


def greedy_tokens(engine: Engine) -> dict[str, list[int]]:
    """Requests join at different steps: prompts, chunks of prompts and decodes, alone and together."""
    rng = random.Random(0)
    tokens: dict[str, list[int]] = {}
    for i in range(NUM_REQUESTS):
        prompt = [rng.randrange(1, engine.info.vocab_size) for _ in range(rng.randrange(1, 100))]
        engine.submit(f"r{i}", prompt, OUTPUT_TOKENS)
        for _ in range(rng.randrange(4)):
            for request_id, token_ids in engine.poll():
                tokens.setdefault(request_id, []).extend(token_ids)
    for request_id, token_ids in engine.drain().items():
        tokens.setdefault(request_id, []).extend(token_ids)
    return tokens


def run_engine(config: EngineConfig) -> tuple[dict[str, list[int]], Execution]:
    return with_engine(config, lambda engine: (greedy_tokens(engine), engine.execution))


def check_modes(part: Part, label: str, config: EngineConfig, expected: dict[str, Any]) -> None:
    found = part.attempt(f"{label}, eager", 8, lambda: run_engine(config))
    if found is None:
        return
    expected[label] = found[0]
    num_tokens = sum(map(len, found[0].values()))
    if num_tokens != NUM_REQUESTS * OUTPUT_TOKENS:
        part.fail(f"{label}, eager", f"{num_tokens} tokens instead of {NUM_REQUESTS * OUTPUT_TOKENS}")
    graphs = replace(config, runner=GraphRunner, graph_sizes=SIZES)
    for mode in GraphMode:
        sizes = None if mode is GraphMode.NONE else SIZES
        moded = replace(graphs, graph_mode=mode, graph_sizes=sizes)
        compare(part, f"{label}, graphs {mode}", moded, expected[label], 5)
    ahead = replace(graphs, batch=STAGES["v1"].batch, async_scheduling=True)
    compare(part, f"{label}, graphs, persistent batch, one step ahead", ahead, expected[label], 5)


def check_compiled(part: Part, label: str, config: EngineConfig, expected: dict[str, Any]) -> None:
    if label not in expected:
        part.not_run[f"{label}, compiled"] = "eager did not run, so that there is nothing to compare with"
        return
    compiled = replace(config, compile="layers")
    compare(part, f"{label}, compiled layers", compiled, expected[label], COMPILE_S)
    graphs = replace(compiled, runner=GraphRunner, graph_sizes=SIZES)
    compare(part, f"{label}, compiled layers, graphs", graphs, expected[label], COMPILE_S / 2)


def compare(part: Part, name: str, config: EngineConfig, expected: dict[str, list[int]], needs_s: float) -> None:
    found = part.attempt(name, needs_s, lambda: run_engine(config))
    if found is None:
        return
    tokens, execution = found
    differing = sorted(request_id for request_id in expected if tokens.get(request_id) != expected[request_id])
    result = {
        "same_tokens": not differing,
        "differing_requests": differing,
        "graph_mode": execution.graph_mode,
        "graph_sizes": list(execution.graph_sizes),
        "capture_s": execution.capture_s,
        "compile_s": execution.compile_s,
        "graph_bytes": execution.graph_bytes,
        "execution": str(execution),
    }
    took = [f"{kind} {seconds:.1f} s" for kind, seconds in took_s(execution).items()]
    verdict = f"{len(differing)} of {len(expected)} requests DIFFER" if differing else "same tokens as eager"
    part.keep(name, result, (name, ", ".join([verdict, *took])))
    if differing:
        part.fail(name, f"other tokens than eager in {', '.join(differing)}")


def took_s(execution: Execution) -> dict[str, float]:
    spent = {"compiling": execution.compile_s, "capturing": execution.capture_s}
    return {kind: seconds for kind, seconds in spent.items() if seconds}


def show_budget(part: Part, model: str, shape: str) -> None:
    """With the default sizes; graphs are measured before the pool is sized, and all of it against what is free."""
    config = quick(replace(STAGES["v1"], model=model, compile="none", max_num_seqs=256))
    platform = resolve_platform("cpu" if part.dry else "auto")
    if part.dry:
        config = replace(config, max_num_seqs=8, max_model_len=512, device="cpu")
    platform.release_memory()
    free_before = platform.free_bytes()
    execution, free_after = with_engine(config, lambda engine: (engine.execution, platform.free_bytes()))
    total = free_before if part.dry else torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    taken = {
        "weights": execution.weight_bytes,
        "graphs": execution.graph_bytes,
        "KV pool": execution.kv_cache_bytes,
    }
    result = {
        "shape": shape,
        "total_bytes": total,
        "free_before_bytes": free_before,
        "free_after_bytes": free_after,
        "taken_bytes": taken,
        "graph_sizes": list(execution.graph_sizes),
        "capture_s": execution.capture_s,
    }
    budget = ", ".join(f"{name} {num_bytes / 2**30:.2f} GiB" for name, num_bytes in taken.items())
    lines = [
        (f"{shape}, {len(execution.graph_sizes)} sizes, captured in", f"{execution.capture_s:.1f} s"),
        (f"{shape}, memory budget", f"{budget}, then free {free_after / 2**30:.2f} GiB"),
    ]
    part.keep("memory budget", result, *lines)
    if free_after <= 0:
        part.fail("memory budget", "nothing is left for activations")
