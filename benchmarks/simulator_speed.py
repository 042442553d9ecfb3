"""How fast the simulator is: scheduled request-steps a second on one core, and a busy hour of a server.

    python benchmarks/simulator_speed.py [--rounds 5] [--hour-s 3600] [--out benchmarks/results/simulator_speed.json]

Decodes: 256 requests that all decode, recording off, with linear costs and with a roofline's; beside them the scheduler
and the block manager alone (`schedule` and `update`), which is the part that no simulator can leave out. Hours: Poisson
arrivals at a rate that keeps about 64 requests running on a 70B server. Times are CPU time of the one thread.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from nanoserve.blocks import SharedBlocks
from nanoserve.config import EngineConfig
from nanoserve.lab.costs import REFERENCE, CostModel, Roofline
from nanoserve.lab.gpus import GPUS, MODELS, Memory
from nanoserve.lab.prompts import PartIds, TokenRuns
from nanoserve.lab.scenarios import poisson_mix
from nanoserve.lab.simulated import SimulatedRun
from nanoserve.lab.simulator import complete_config, simulate
from nanoserve.lab.workload import Arrival, Workload
from nanoserve.machine import describe_machine
from nanoserve.request import Request
from nanoserve.scheduler import UnifiedScheduler

NUM_RUNNING, NUM_STEPS, PROMPT_LEN = 256, 400, 200
HOURS = {"4 x A100": ("a100", 4, 8.7), "8 x H100": ("h100", 8, 29.0)}  # GPU, how many, requests a second


def roofline(gpu: str, tp: int) -> Roofline:
    return Roofline(Memory(model=MODELS["llama-3-70b"], gpu=GPUS[gpu], tp=tp))


def decodes() -> Workload:
    """Prompts differ in length, so that in each step a sixteenth of the requests begins a block."""
    ids = PartIds()
    arrivals = [
        Arrival(
            id=f"request-{i}",
            group="all",
            prompt_token_ids=TokenRuns([(ids.own(), PROMPT_LEN - i % 16)]),
            max_tokens=NUM_STEPS,
        )
        for i in range(NUM_RUNNING)
    ]
    return Workload(name="decodes", claim="", watched="all", seed=0, parameters={}, arrivals=arrivals)


def engine(load: Workload, num_blocks: int, max_num_seqs: int) -> EngineConfig:
    named = EngineConfig(scheduler=UnifiedScheduler, blocks=SharedBlocks, max_num_seqs=max_num_seqs)
    named = replace(named, max_num_batched_tokens=2048)
    return complete_config(named, max_model_len=load.longest, num_blocks=num_blocks)


def simulated(
    load: Workload, costs: CostModel, num_blocks: int = 20_000, seats: int = 256
) -> tuple[float, SimulatedRun]:
    """CPU seconds, and the run."""
    config = engine(load, num_blocks, seats)
    start_s = time.thread_time()
    run = simulate(config, load, costs)
    return time.thread_time() - start_s, run


def scheduler_alone(load: Workload) -> float:
    """Request-steps a second of `schedule` and `update`, with one list of tokens for all: nothing else is done."""
    config = engine(load, 20_000, NUM_RUNNING)
    scheduler = UnifiedScheduler(config, SharedBlocks(20_000, 16))
    for arrival in load.arrivals:
        scheduler.add(Request.from_engine_request(arrival.request(0.0), config.model_len))
    answer, count, start_s = [0], 0, 0.0
    gc.disable()
    while scheduler.has_work:
        plan = scheduler.schedule()
        count += len(plan.num_scheduled_tokens)
        caught_up = [r.id for r in scheduler.running if r.num_computed_tokens >= r.num_tokens]
        if len(caught_up) == NUM_RUNNING and not start_s:
            count, start_s = 0, time.thread_time()
        scheduler.update(plan, dict.fromkeys(caught_up, answer))
    gc.enable()
    return count / (time.thread_time() - start_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hour-s", type=float, default=3600.0, help="virtual seconds of each server; 0: none")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "simulator_speed.json")
    args = parser.parse_args()
    load, rates = decodes(), {}
    forms: dict[str, Callable[[], float]] = {
        "scheduler and blocks alone": lambda: scheduler_alone(load),
        "simulated, linear costs": lambda: _rate(*simulated(load, REFERENCE)),
        "simulated, roofline": lambda: _rate(*simulated(load, roofline("h100", 8))),
    }
    for number in range(1, args.rounds + 1):
        for name, measure in forms.items():
            rates.setdefault(name, []).append(measure())
        print(f"round {number} of {args.rounds} is done", file=sys.stderr, flush=True)
    print(f"| {NUM_RUNNING} running | request-steps a second, median | lowest | highest |\n|---|---|---|---|")
    for name, values in rates.items():
        print(f"| {name} | {statistics.median(values):,.0f} | {min(values):,.0f} | {max(values):,.0f} |")
    hours = [_hour(name, args.hour_s) for name in HOURS] if args.hour_s else []
    if hours:
        print(
            "\n| Llama-3-70B on | virtual s | running | steps | request-steps a second | CPU s |"
            "\n|---|---|---|---|---|---|"
        )
    for row in hours:
        print(
            f"| {row['server']} | {row['virtual_s']:,.0f} | {row['mean_running']:.1f} | {row['steps']:,} | "
            f"{row['request_steps_per_s']:,.0f} | {row['cpu_s']:.1f} |"
        )
    result = {
        "what": "request-steps a second of the simulator on one core, and CPU seconds for a busy hour of a 70B server",
        "command": "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": msgspec.to_builtins(describe_machine()),
        "num_running": NUM_RUNNING,
        "request_steps_per_s": rates,
        "hours": hours,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def _rate(cpu_s: float, run: SimulatedRun) -> float:
    return run.num_request_steps / cpu_s


def _hour(name: str, virtual_s: float) -> dict[str, float | int | str]:
    gpu, tp, rate = HOURS[name]
    costs = roofline(gpu, tp)
    cpu_s, run = simulated(poisson_mix(0, rate, virtual_s), costs, costs.memory.num_blocks)
    return {
        "server": name,
        "virtual_s": run.end_us / 1e6,
        "mean_running": run.mean_running,
        "steps": run.num_steps,
        "request_steps_per_s": run.num_request_steps / cpu_s,
        "cpu_s": cpu_s,
    }


if __name__ == "__main__":
    main()
