"""`nanoserve replay FILE`: decide a recorded run again, and show the first step that comes out otherwise.

Exit codes: 0 every step is decided as it was, 1 one is not, 2 none that is whole differs, but the file is damaged.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from nanoserve.lab.cli_trace import load, working
from nanoserve.lab.files import file_argument
from nanoserve.lab.replay import Replay
from nanoserve.lab.trace import last_line

IDENTICAL, DIFFERENT, DAMAGED = 0, 1, 2  # exit codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=file_argument, help="what --record wrote, or a crash dump")
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
            "damage": trace.damage,
            "difference": asdict(difference) if difference else None,
            "failed_step": failed.step if failed else None,
        }
        print(json.dumps(verdict))
    elif difference:
        print(f"{replay.num_steps} steps are identical, decided again by {who}. The first difference:\n{difference}")
    else:
        print(f"{replay.num_steps} steps decided again by {who}: all are identical.")
        if trace.damage:
            print("The file is damaged: what came after them is not known.")
        if failed:
            print(f"Step {failed.step} failed when it was recorded: {last_line(failed.error)}")
    if difference:
        return DIFFERENT
    return DAMAGED if trace.damage else IDENTICAL
