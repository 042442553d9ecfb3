"""One interpreter lock or two: the gap between two engine steps while the front end is busy, in each layout.

    python benchmarks/step_gap.py [--rounds 3] [--streams 300] [--out benchmarks/results/step_gap.json]

Each run is a real server (the embedded model) with that many concurrent streams from one niced process; another one
asks `/health` all the while. The gap is from the end of a step to the start of the next while requests are waiting for
it, from the records of the core itself. Layouts take turns; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from nanoserve.config import SEAMS, STAGES
from nanoserve.lab.arrivals import Uniform, story_words
from nanoserve.lab.front_end import FrontEndLoad, FrontEndMetrics, busy_front_end, run_front_end
from nanoserve.lab.metrics import median_of
from nanoserve.machine import describe_machine

LAYOUTS = SEAMS["client"]
PROMPT_WORDS = Uniform(100, 500)
OUTPUT_TOKENS = 64
BUDGET = 1024  # tokens of a step


def measure(layout: str, load: FrontEndLoad) -> FrontEndMetrics:
    """One server's life: its figures."""
    config = replace(STAGES["shared"], client=LAYOUTS[layout], max_num_batched_tokens=BUDGET)
    return run_front_end(config, load).metrics


def figures(metrics: FrontEndMetrics) -> dict[str, float]:
    gap, step, health = metrics.gap_s, metrics.step_s, metrics.health_s
    assert gap is not None, "no request waited for a step"
    assert step is not None, "no step was run"
    assert health is not None, "/health never answered"
    return {
        "gap_p50_ms": gap.p50 * 1e3,
        "gap_p99_ms": gap.p99 * 1e3,
        "gap_max_ms": gap.max * 1e3,
        "step_p50_ms": step.p50 * 1e3,
        "step_p99_ms": step.p99 * 1e3,
        "health_p50_ms": health.p50 * 1e3,
        "health_p99_ms": health.p99 * 1e3,
        "output_tokens_per_s": metrics.output_tokens_per_s,
        "client_cpu_share": metrics.client_cpu_share,
        "num_steps": metrics.num_steps,
        "num_threads": metrics.num_threads,
        "ready_s": metrics.ready_s,
    }


HEADINGS = {
    "gap_p50_ms": "gap P50",
    "gap_p99_ms": "P99",
    "gap_max_ms": "max",
    "step_p50_ms": "step P50",
    "step_p99_ms": "P99",
    "health_p50_ms": "/health P50",
    "health_p99_ms": "P99",
    "output_tokens_per_s": "tokens/s",
    "client_cpu_share": "client's CPU",
    "num_threads": "threads of a step",
    "ready_s": "ready, s",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step_gap.json")
    args = parser.parse_args()
    machine = describe_machine()
    load = busy_front_end(
        story_words,
        num_streams=args.streams,
        requests_per_stream=2,
        prompt_len=PROMPT_WORDS,
        output_tokens=OUTPUT_TOKENS,
    )
    rounds: list[dict[str, FrontEndMetrics]] = []
    for number in range(1, args.rounds + 1):
        rounds.append({})
        for layout in args.layouts:
            rounds[-1][layout] = measure(layout, load)
            print(f"round {number}, {layout}: {json.dumps(figures(rounds[-1][layout]))}", file=sys.stderr, flush=True)
    medians = {layout: figures(median) for layout, median in median_of(rounds).items()}
    print(f"| {args.streams} streams | " + " | ".join(HEADINGS.values()) + " |")
    print("|---" * (len(HEADINGS) + 1) + "|")
    for layout, shown in medians.items():
        print(f"| {layout} | " + " | ".join(f"{shown[figure]:,.2f}" for figure in HEADINGS) + " |")
    result = {
        "what": "gap between two engine steps under many concurrent streams, per layout (ms)",
        "command": f"python benchmarks/step_gap.py --rounds {args.rounds} --streams {args.streams}",
        "machine": msgspec.to_builtins(machine),
        "medians": medians,
        "rounds": [{layout: figures(metrics) for layout, metrics in one.items()} for one in rounds],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
