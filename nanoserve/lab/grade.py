"""`nanoserve grade`: a scheduler or block manager of yours against the laws, and beside the built-in ones.

Exit code 0: all laws hold; 1: some law is broken; 2: there is no such class, or an option is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.api.cli import FAILED
from nanoserve.config import SEAMS

if TYPE_CHECKING:
    from nanoserve.lab.trial_loads import Load

FAULT = "fault:"
FILE_S, FAULT_S = 10.0, 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", metavar="FILE", help=f"a Python file with the class, or {FAULT}NAME: a planted bug")
    parser.add_argument("--class", dest="class_name", default="", metavar="NAME", help="where the file has several")
    parser.add_argument("--seed", type=int, metavar="N", help="of the loads that are drawn (default: 0)")
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="S",
        help=f"for each load (default: {FILE_S:g}, of a planted bug {FAULT_S:g}, which may load a model)",
    )
    parser.add_argument("--load", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--scheduler", choices=SEAMS["scheduler"], help="beside a block manager (default: unified)")
    parser.add_argument("--blocks", choices=SEAMS["blocks"], help="beside a scheduler (default: shared)")
    parser.add_argument("--record", metavar="FOLDER", help="write the trace of each load there")
    parser.add_argument("--hint", type=int, default=0, choices=(1, 2, 3), help="of a planted bug, from vague to plain")
    parser.add_argument("--traceback", action="store_true", help="also where an error came from")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")


def run(args: argparse.Namespace) -> int:
    import msgspec

    from nanoserve.lab.faults import get_fault
    from nanoserve.lab.grade_tables import show
    from nanoserve.lab.grading import grade
    from nanoserve.lab.policy_file import Policy
    from nanoserve.lab.trial_loads import find_loads, grading_loads

    fault = get_fault(args.policy.removeprefix(FAULT)) if args.policy.startswith(FAULT) else None
    _check(args, fault is not None)
    if fault:
        loads = [fault.load]
        policy = Policy(fault=fault.name)
    else:
        loads = find_loads(args.load, args.seed) if args.load else grading_loads(args.seed)
        policy = Policy(path=_path(args.policy), class_name=args.class_name)
    folder = _record_folder(args.record, loads) if args.record is not None else ""
    with _progress(len(loads)) as advance:
        grade_ = grade(
            policy,
            loads,
            seed=args.seed,
            fields=_fields(args),
            time_limit_s=args.time_limit,
            record_folder=folder,
            on_result=advance,
        )
    if args.json:
        report = msgspec.to_builtins(grade_) | {"passed": grade_.passed}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    else:
        show(grade_, traceback=args.traceback, fault=fault)
        if fault and args.hint:
            print(f"Hint {args.hint}: {fault.hints[args.hint - 1]}")
    return 0 if grade_.passed else FAILED


@contextmanager
def _progress(num_loads: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, on a terminal only."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("loads", total=num_loads)
        yield lambda: progress.advance(task)


def _check(args: argparse.Namespace, is_fault: bool) -> None:
    if args.time_limit is None:
        args.time_limit = FAULT_S if is_fault else FILE_S
    if not 0.1 <= args.time_limit <= 3600:
        raise ValueError(f"--time-limit must be seconds in [0.1, 3600], got {args.time_limit:g}.")
    for flag, value in (("--class", args.class_name), ("--load", args.load)):
        if is_fault and value:
            raise ValueError(f"{flag} means nothing with {args.policy}, which names its class and load; leave it out.")
    if is_fault and args.seed is not None:
        raise ValueError(f"--seed means nothing with {args.policy}, whose load is always the same; leave it out.")
    args.seed = args.seed or 0
    for flag, value in (("--scheduler", args.scheduler), ("--blocks", args.blocks)):
        if is_fault and value:
            raise ValueError(f"{flag} means nothing with {args.policy}, which names its engine; leave it out.")
    if args.hint and not is_fault:
        raise ValueError(f"--hint={args.hint} is for planted bugs ({FAULT}NAME); leave it out.")


def _path(given: str) -> str:
    path = Path(given)
    if not path.is_file():
        raise ValueError(f"{given} is not a file; give a Python file with a class, or {FAULT}NAME.")
    return str(path.resolve())


def _record_folder(given: str, loads: Sequence[Load]) -> str:
    """Absolute, made where it is missing, and one that traces can be written to."""
    if not given:
        raise ValueError("--record is empty; name a folder for the traces.")
    folder = Path(given).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        for path in (folder / f"{load.name}.jsonl" for load in loads):
            if path.exists():
                path.open("ab").close()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"--record {given}: no trace can be written there ({reason}); give another folder.") from None
    return str(folder)


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    given = {"scheduler": args.scheduler, "blocks": args.blocks}
    return {seam: SEAMS[seam][name] for seam, name in given.items() if name}
