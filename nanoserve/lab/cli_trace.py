"""`nanoserve trace FILE [FILE]`: one or two recorded runs as one HTML file, and as Chrome-trace JSON."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from nanoserve.lab.files import check_inputs, check_outputs, file_argument, write_file
from nanoserve.lab.perfetto import perfetto
from nanoserve.lab.timeline import timeline_html
from nanoserve.lab.trace import Trace

MOST_FILES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", type=file_argument, help="what --record wrote; two: on one time axis"
    )
    parser.add_argument(
        "--out", type=file_argument, metavar="FILE.html", help="default: the first file's name, with .html"
    )
    parser.add_argument("--perfetto", type=file_argument, metavar="FILE.json", help="also as Chrome-trace JSON")
    parser.add_argument(
        "--no-blocks", dest="blocks", action="store_false", help="leave the block map out: a smaller file"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(args: argparse.Namespace) -> int:
    if len(args.files) > MOST_FILES:
        raise ValueError(f"{len(args.files)} files were given; a timeline shows at most {MOST_FILES} runs.")
    check_inputs(args.files)
    out: Path = args.out or args.files[0].with_suffix(".html")
    check_outputs([("--out", out), ("--perfetto", args.perfetto)], args.files)
    with working("reading and replaying"):
        traces = [load(file) for file in args.files]
        write_file(out, timeline_html(traces, args.blocks))
    written = [out]
    if args.perfetto:
        write_file(args.perfetto, json.dumps(perfetto(traces), separators=(",", ":")))
        written.append(args.perfetto)
    if args.json:
        runs = [{"file": t.name, "steps": len(t.records), "requests": len(t.lanes), "damage": t.damage} for t in traces]
        print(json.dumps({"runs": runs, "written": [str(path) for path in written]}))
    else:
        for trace in traces:
            print(f"{trace.name}: {len(trace.lanes):,} requests, {len(trace.records):,} steps")
        for path in written:
            print(f"written: {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def working(what: str) -> AbstractContextManager[object]:
    """Says so on a terminal, until it is done."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(what)


def load(path: Path) -> Trace:
    """The trace; a warning when only a part of the file is whole. ValueError, OSError."""
    trace = Trace.load(path)
    if trace.damage:
        warnings.warn(f"{trace.damage} The {len(trace.records)} steps before it are shown.", stacklevel=2)
    if not trace.records:
        raise ValueError(f"{path} holds no step; record a run that has one.")
    return trace
