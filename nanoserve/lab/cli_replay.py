"""`nanoserve replay FILE`: decide a recorded run again, and show the first step that comes out otherwise."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from nanoserve.lab.cli_trace import load, working
from nanoserve.lab.replay import Replay

IDENTICAL, DIFFERENT = 0, 1  # exit codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="what --record wrote, or a crash dump")
    for seam in ("scheduler", "blocks"):
        parser.add_argument(
            f"--{seam}", default="", metavar="CLASS", help="instead of the trace's own; FILE.py:NAME for one of yours"
        )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")


def run(args: argparse.Namespace) -> int:
    with working("deciding again"):
        trace = load(args.file)
        replay = Replay(trace, args.scheduler, args.blocks)
        difference = replay.run()
    who = f"{replay.config.scheduler.__name__} and {replay.config.blocks.__name__}"
    failed = next((record for record in trace.records if record.error), None)
    if args.json:
        verdict = {
            "identical": difference is None,
            "steps": replay.num_steps,
            "difference": asdict(difference) if difference else None,
            "failed_step": failed.step if failed else None,
        }
        print(json.dumps(verdict))
    elif difference:
        print(f"{replay.num_steps} steps are identical, decided again by {who}. The first difference:\n{difference}")
    else:
        print(f"{replay.num_steps} steps decided again by {who}: all are identical.")
        if failed:
            print(f"Step {failed.step} failed when it was recorded: {failed.error.strip().splitlines()[-1]}")
    return DIFFERENT if difference else IDENTICAL
