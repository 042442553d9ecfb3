"""What recording costs: the same load with and without it, taking turns, in every layout.

    python benchmarks/recording.py [--rounds 5] [--requests 16] [--tokens 120] [--model nanostory] [--out FILE]

A round runs the load twice in each layout, without and with a trace file, in an order that alternates; one warm-up
before. The figure is a step's time, the median over the decodes of a run, and over rounds the median of the ratios of
neighbours. The host alone, with no model at all, says what a record costs in microseconds of processor time, which a
busy machine blurs less; beside the time of a step with as many rows it is the share that recording takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from nanoserve.blocks import SharedBlocks
from nanoserve.client import CoreProcessClient, InProcessClient, SplitRunnerClient
from nanoserve.config import STAGES, EngineConfig
from nanoserve.core import EngineCore
from nanoserve.lab.fakes import NullRunner
from nanoserve.machine import describe_machine
from nanoserve.record import JsonlRecorder
from nanoserve.request import EngineRequest, SamplingParams
from nanoserve.scheduler import UnifiedScheduler

LAYOUTS = {"inproc": InProcessClient, "core_process": CoreProcessClient, "split_runner": SplitRunnerClient}
NUM_STEPS = 400  # of the host alone


def run(layout: str, args: argparse.Namespace, path: Path | None) -> float:
    """Milliseconds a step of the load, from its first token to its last."""
    config = replace(STAGES["v1"], client=LAYOUTS[layout], model=args.model, device=args.device, max_model_len="auto")
    recorder = JsonlRecorder(path) if path else None
    with LAYOUTS[layout](config, recorder) as client:
        for i in range(args.requests):
            client.submit(request(f"r{i}", 24, args.tokens))
        ended, start_s, start_step = 0, 0.0, 0
        while ended < args.requests:
            outputs = client.poll(30)
            if not start_s and client.stats.num_running == args.requests:
                start_s, start_step = time.perf_counter(), client.stats.num_steps
            ended += sum(output.finish_reason is not None for output in outputs)
        lasted_s = time.perf_counter() - start_s
        return lasted_s / (client.stats.num_steps - start_step) * 1e3


def request(request_id: str, num_prompt: int, max_tokens: int) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    prompt = [5 + (sum(request_id.encode()) + i) % 500 for i in range(num_prompt)]
    return EngineRequest(id=request_id, prompt_token_ids=prompt, params=params, arrival_s=time.monotonic())


def host_alone(num_rows: int, path: Path | None) -> float:
    """Microseconds of processor time a decode step of so many rows, without a model."""
    config = EngineConfig(
        scheduler=UnifiedScheduler, blocks=SharedBlocks, runner=NullRunner, num_blocks=2**14, max_model_len=2048
    )
    core = EngineCore.build(config, JsonlRecorder(path) if path else None)
    for i in range(num_rows):
        core.add(request(f"r{i}", 16, 2 * NUM_STEPS))
    while len(core.scheduler.running) < num_rows:
        core.step()
    start_s = time.process_time()
    for _ in range(NUM_STEPS):
        core.step()
    lasted_s = time.process_time() - start_s
    core.close()
    return lasted_s / NUM_STEPS * 1e6


def pairs(measure: Callable[[Path | None], float], rounds: int, folder: Path) -> list[tuple[float, float]]:
    """(off, on) of each round; every other round begins with `on`."""
    found = []
    for number in range(rounds):
        both: dict[bool, float] = {}
        for on in (False, True) if number % 2 == 0 else (True, False):
            both[on] = measure(folder / "trace.jsonl" if on else None)
        found.append((both[False], both[True]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nanostory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recording.json")
    args = parser.parse_args()
    rounds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for num_rows in (args.requests, 128):
            measure = partial(host_alone, num_rows)
            rounds[f"host alone, {num_rows} rows, us"] = pairs(measure, max(9, args.rounds), folder)
        for layout in args.layouts.split(","):
            run(layout, args, None)
            rounds[f"{layout}, ms"] = pairs(partial(run, layout, args), args.rounds, folder)
            print(f"{layout} is done", file=sys.stderr, flush=True)
    summary = {}
    print("| a step | off | on | added | median of ratios |\n|---|---|---|---|---|")
    for what, both in rounds.items():
        off, on = (statistics.median(values) for values in zip(*both, strict=True))
        ratio = statistics.median(with_it / without for without, with_it in both) - 1
        summary[what] = {"off": off, "on": on, "share_added": ratio}
        print(f"| {what} | {off:.2f} | {on:.2f} | {on - off:+.2f} | {ratio:+.1%} |")
    own = summary[f"host alone, {args.requests} rows, us"]
    for layout in args.layouts.split(","):
        share = (own["on"] - own["off"]) / 1e3 / summary[f"{layout}, ms"]["off"]
        summary[f"{layout}, ms"]["share_of_processor_time"] = share
        print(f"{layout}: the record's own processor time is {share:.2%} of a step")
    result = {
        "what": "time of a decode step without and with --record",
        "command": "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": msgspec.to_builtins(describe_machine()),
        "medians": summary,
        "rounds": rounds,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
