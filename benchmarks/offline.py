"""Three loads on models of 30M and 150M parameters, and how far each run is from what the machine could do.

    python benchmarks/offline.py --cache FOLDER [--models 30m 150m] [--loads w1 w2 w3] [--rounds 5] [--threads 2]
        [--forms ...] [--out benchmarks/results/offline.json]

Checkpoints with random weights are made in FOLDER once. Engines live in this process and take turns within a round;
figures are medians over the rounds. The floor of a run adds up that of its steps (floor.py), as the machine was before
its round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from checkpoints_qwen3 import VOCAB_SIZE, make_checkpoint
from floor import Floor, measure_rates
from peers.loads import Ids, Load, Stamps, gaps, make_load, run_steps

from nanoserve.client import InProcessClient
from nanoserve.config import STAGES, EngineConfig
from nanoserve.machine import describe_machine
from nanoserve.persistent_batch import PersistentBatch
from nanoserve.record import ListRecorder, Observer, StepRecord
from nanoserve.request import EngineRequest, SamplingParams
from nanoserve.runner import EagerRunner
from nanoserve.weights import load_model

FORMS: dict[str, dict[str, Any]] = {
    "shared": {},
    "persistent batch": {"batch": PersistentBatch},
    "one step ahead": {"batch": PersistentBatch, "async_scheduling": True},
    "v1": {"batch": PersistentBatch, "async_scheduling": True, "runner": STAGES["v1"].runner},
}


class Engine:
    """One engine in this process, and the load it runs."""

    def __init__(self, config: EngineConfig, observer: Observer | None = None) -> None:
        self._client = InProcessClient(config, observer)
        self.execution = self._client.info.execution

    def write_pool(self) -> None:
        """All of the KV cache, once: until each page of it was written, steps wait for the kernel to find memory, which
        is 5 % of W1. vLLM clears its own at start. For a config that says how large it is."""
        runner = self._client.core.runner
        assert isinstance(runner, EagerRunner)
        runner.cache.blocks.zero_()

    def run(self, load: Load) -> tuple[float, dict[int, Ids], Stamps]:
        """Seconds, tokens of each request, and when they came. The prefix cache is empty before."""
        self._client.call("reset_prefix_cache")
        tokens: dict[int, Ids] = {}

        def add(i: int, prompt: Ids, num_tokens: int) -> None:
            tokens[i] = []
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            self._client.submit(EngineRequest(id=str(i), prompt_token_ids=prompt, params=params))

        def step() -> dict[int, int]:
            outputs = self._client.poll(60)
            for output in outputs:
                tokens[int(output.id)] += output.new_token_ids
            return {int(output.id): len(output.new_token_ids) for output in outputs}

        start_s = time.perf_counter()
        stamps = run_steps(load, add, step)
        lasted_s = time.perf_counter() - start_s
        while self._client.core.has_work:
            self._client.poll(1)
        return lasted_s, tokens, stamps

    def close(self) -> None:
        self._client.close()


def decode_steps(records: list[StepRecord], floor: Floor) -> dict[str, dict[str, float]]:
    """Steps in which everybody decodes, by how many: their time, that of the host, and their floor."""
    found: dict[int, list[tuple[float, float, float]]] = {}
    for before, record, least_ms in zip(records, records[1:], floor.of_steps(records)[1:], strict=False):
        counts = list(record.num_scheduled_tokens.values())
        if counts and max(counts) == 1:
            took_ms = (record.end_s - max(before.end_s, record.start_s if not record.ahead else 0)) * 1e3
            found.setdefault(len(counts), []).append((took_ms, record.host_s * 1e3, least_ms))
    names = ("step_ms", "host_ms", "floor_ms")
    return {
        str(rows): dict(zip(names, map(statistics.median, zip(*steps, strict=True)), strict=True))
        for rows, steps in sorted(found.items())
        if len(steps) >= 8
    }


def figures(name: str, lasted_s: float, load: Load, stamps: Stamps, records: list[StepRecord], floor: Floor) -> Any:
    floor_s = sum(floor.of_steps(records)) / 1e3
    found: dict[str, float] = {"seconds": lasted_s, "floor_s": floor_s, "over_floor": lasted_s / floor_s}
    found["output_tok_per_s"] = sum(load.num_tokens) / lasted_s
    return found | (gaps(stamps) if name == "w3" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--models", nargs="+", default=["30m", "150m"])
    parser.add_argument("--loads", nargs="+", choices=("w1", "w2", "w3"), default=["w1", "w2", "w3"])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "offline.json")
    args = parser.parse_args()
    machine = describe_machine()
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {
        "what": "seconds of three loads, and of their steps, beside what the machine could do",
        "command": "python "
        + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]).replace(str(args.cache), "FOLDER"),
        "machine": msgspec.to_builtins(machine),
        "threads": args.threads,
        "models": {},
    }
    base = replace(STAGES["shared"], client=InProcessClient, num_threads=args.threads, max_num_seqs=64)
    base = replace(base, max_num_batched_tokens=512, max_model_len=8192, runner=EagerRunner)
    for shape in args.models:
        path = make_checkpoint(shape, args.cache)
        plain, floors = load_model(path), []
        recorders = {form: ListRecorder() for form in args.forms}
        engines = {
            form: Engine(replace(base, model=str(path), **FORMS[form]), recorder)
            for form, recorder in recorders.items()
        }
        rounds: dict[str, dict[str, list[Any]]] = {load: {form: [] for form in engines} for load in args.loads}
        steps: dict[str, Any] = {}
        tokens: dict[str, dict[int, Ids]] = {}
        for number in range(args.rounds):
            # a neighbour of the round's runs: what the machine does changes from minute to minute
            with torch.inference_mode():
                rates = measure_rates()
                floor = Floor(plain, rates, 3)
            floors.append({"rates": asdict(rates), "products_ms": floor.products_ms})
            for name in args.loads:
                load = make_load(name, VOCAB_SIZE)
                for form, engine in engines.items():
                    if not number:
                        engine.run(replace(load, num_tokens=[4] * len(load.prompts), after=2))  # warms up
                    recorders[form].records.clear()
                    lasted_s, ids, stamps = engine.run(load)
                    records = recorders[form].records
                    assert tokens.setdefault(name, ids) == ids, f"{form} has other tokens than {args.forms[0]}"
                    rounds[name][form].append(figures(name, lasted_s, load, stamps, records, floor))
                    steps.setdefault(form, {})[name] = decode_steps(records, floor)
        medians = {
            name: {form: {key: statistics.median(r[key] for r in runs) for key in runs[0]} for form, runs in by.items()}
            for name, by in rounds.items()
        }
        gemm, read = (
            statistics.median(one["rates"][key] for one in floors) for key in ("gemm_gflops", "read_gb_per_s")
        )
        print(f"\n{shape}, {args.threads} threads, products {gemm:.0f} GFLOP/s, reading {read:.1f} GB/s, "
              f"one minute's load {machine.load_average_1m}")  # fmt: skip
        print(
            "| load | form | output tok/s | over the floor | decode ms | max gap ms | late TTFT ms |\n"
            + "|---" * 7
            + "|"
        )
        for name, by in medians.items():
            for form, found in by.items():
                cells = [f"{found[key]:.1f}" for key in ("decode_ms", "max_gap_ms", "late_ttft_ms") if key in found]
                cells += [""] * (3 - len(cells))
                line = [name, form, f"{found['output_tok_per_s']:.1f}", f"{found['over_floor']:.2f}", *cells]
                print("| " + " | ".join(line) + " |", flush=True)
        result["models"][shape] = {
            "floors": floors,
            "medians": medians,
            "decode_steps": steps,
            "rounds": rounds,
            "execution": {form: msgspec.to_builtins(engine.execution) for form, engine in engines.items()},
        }
        for engine in engines.values():
            engine.close()
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
