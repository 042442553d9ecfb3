"""What a process boundary costs: a step without a model, in each layout, at several numbers of running requests.

    python benchmarks/boundary.py [--rounds 5] [--steps 200] [--out benchmarks/results/boundary.json]

Layouts take turns within a round. A step's time is from one `schedule()` to the next as the core's own records tell
it; bytes are those of the messages that cross, encoded as the layouts encode them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from nanoserve.config import SEAMS, STAGES
from nanoserve.lab.boundary import BoundaryCost, boundary_cost, measure_step
from nanoserve.machine import describe_machine

LAYOUTS = {layout: replace(STAGES["shared"], client=client) for layout, client in SEAMS["client"].items()}
BASE = "inproc"
RUNNING = (1, 64, 256)


@dataclass
class Point:
    """Medians over the rounds."""

    layout: str
    num_running: int
    step_us: float
    us_per_request: float
    added_us: float  # against inproc, in the same rounds
    added_us_per_request: float
    start_s: float
    bytes_per_step: int | None  # messages that cross
    bytes_per_request: float | None

    @classmethod
    def of(cls, cost: BoundaryCost) -> Point:
        layout, step_us = cost.stage, cost.step_s[cost.stage] * 1e6
        return cls(
            layout,
            cost.num_running,
            step_us,
            step_us / cost.num_running,
            cost.added_step_s * 1e6,
            cost.added_per_request_s * 1e6,
            cost.start_s[layout],
            cost.bytes_per_step[layout],
            cost.bytes_per_request_step[layout],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "boundary.json")
    args = parser.parse_args()
    machine = describe_machine()
    points = []
    print("| running | layout | step, us | us per request | added by the boundary, us | bytes a step | start-up, s |")
    print("|---|---|---|---|---|---|---|")
    for num_running in RUNNING:
        rounds = [
            {layout: measure_step(config, num_running, args.steps) for layout, config in LAYOUTS.items()}
            for _ in range(args.rounds)
        ]
        for layout, config in LAYOUTS.items():
            point = Point.of(boundary_cost((BASE, LAYOUTS[BASE]), (layout, config), rounds, num_running))
            points.append(point)
            print(
                f"| {num_running} | {layout} | {point.step_us:,.0f} | {point.us_per_request:.1f} | "
                f"{point.added_us:,.0f} | {point.bytes_per_step:,} | {point.start_s:.2f} |",
                flush=True,
            )
    result = {
        "what": "step of a null runner, per layout",
        "command": f"python benchmarks/boundary.py --rounds {args.rounds} --steps {args.steps}",
        "machine": msgspec.to_builtins(machine),
        "points": [asdict(point) for point in points],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
