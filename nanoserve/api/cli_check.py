"""`nanoserve check`: the exercises of the course, graded in the terminal.

Exit code 0: passed (all of them, without a number); 1: not; 2: there is no such exercise or notebook, or its cells do
not run. How an answer is judged is lab/check_child.py's. Laws: tests/test_exercises.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.api.cli import FAILED
from nanoserve.api.cli_lessons import DEFAULT_DIR, EXERCISES_DIR

if TYPE_CHECKING:
    from nanoserve.lab.check_exercises import Exercise

TIME_LIMIT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("number", nargs="?", type=int, help="of an exercise (default: a table of all)")
    parser.add_argument(
        "--file", metavar="FILE", help="your notebook or Python file (default: the exercise's in --dir)"
    )
    parser.add_argument(
        "--dir",
        metavar="FOLDER",
        help=f"of your copies (default: the one that you are in, else ./{DEFAULT_DIR})",
    )
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, metavar="S", help="default: %(default)g")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")


def run(args: argparse.Namespace) -> int:
    from nanoserve.lab.check_child import judge_file
    from nanoserve.lab.check_exercises import get_exercise

    if not 0.1 <= args.time_limit <= 3600:
        raise ValueError(f"--time-limit must be seconds in [0.1, 3600], got {args.time_limit:g}.")
    folder = copies_at(args.dir) / EXERCISES_DIR
    copy = "nanoserve lessons --copy" + (f" --dir {args.dir}" if args.dir else "")
    elsewhere = "or say with --dir where yours are"
    if args.number is None:
        if args.file:
            raise ValueError("--file means nothing without a number; say which exercise it answers.")
        if not any(folder.glob("*.ipynb")):
            raise ValueError(f"there are no exercises in {folder}; get copies of your own with: {copy}; {elsewhere}.")
        return _show_all(folder, args.time_limit, args.json)
    exercise = get_exercise(args.number)
    path = Path(args.file) if args.file else folder / f"{exercise.name}.ipynb"
    if not path.is_file():
        fix = "give a notebook or a Python file" if args.file else f"copy it with: {copy}; {elsewhere}"
        raise ValueError(f"{path} is not there; {fix}.")
    report = judge_file(exercise, path, args.time_limit)
    print(json.dumps(report.as_builtins(), indent=1) if args.json else report)
    return 0 if report.passed else FAILED


def copies_at(given: str | None) -> Path:
    """The folder of the reader's copies: as given, else the one that the current folder is or lies in, else where
    `nanoserve lessons --copy` puts them."""
    here = Path.cwd()
    around = (f for f in (here, *here.parents) if (f / EXERCISES_DIR).is_dir() and any(f.glob("00_*.ipynb")))
    return Path(given) if given else next(around, Path(DEFAULT_DIR))


def _show_all(folder: Path, time_limit_s: float, as_json: bool) -> int:
    from rich.console import Console
    from rich.table import Table

    from nanoserve.lab.check_exercises import EXERCISES

    rows = []
    console = Console(highlight=False, markup=False)
    with Console(stderr=True).status("checking") as status:
        for exercise in EXERCISES.values():
            status.update(f"checking {exercise.name}")
            rows.append(_row(exercise, folder / f"{exercise.name}.ipynb", time_limit_s))
    num_passed = sum(row["state"] == "passes" for row in rows)
    if as_json:
        print(json.dumps({"folder": str(folder), "exercises": rows, "passed": num_passed == len(rows)}, indent=1))
    else:
        table = Table(title=f"Exercises in {folder}", title_justify="left")
        for heading in ("exercise", "question", "state"):
            table.add_column(heading)
        for row in rows:
            table.add_row(row["exercise"], row["question"], row["state"])
        console.print(table)
        console.print(f"{num_passed} of {len(rows)} pass.")
    return 0 if num_passed == len(rows) else FAILED


def _row(exercise: Exercise, path: Path, time_limit_s: float) -> dict[str, Any]:
    from nanoserve.lab.check_child import is_begun, judge_file
    from nanoserve.lab.check_exercises import question_of
    from nanoserve.lab.check_report import NOT_BEGUN

    try:
        state = judge_file(exercise, path, time_limit_s).state if is_begun(exercise, path) else NOT_BEGUN
    except ValueError as error:
        state = f"does not run: {error}"
    return {"exercise": exercise.name, "question": question_of(exercise), "state": state}
