"""Judges a reader's notebook (or file) in a child process: whatever its code does, the answer is a verdict.

The child runs the cells up to the one that calls `check`, takes the name that the exercise asks for, and judges it as
`check` does. Where it hangs or ends beyond that, the parent says so. ValueError in one line for a notebook that has no
answer, or whose cells do not run. Laws: tests/test_exercises.py.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from nanoserve.lab.check import NoEnd, check, limit_time
from nanoserve.lab.check_exercises import Exercise, exercises_dir, get_exercise
from nanoserve.lab.check_report import Line, Report
from nanoserve.lab.laws import LAWS, broken
from nanoserve.lab.memory_limit import limit_memory
from nanoserve.process import ChildDiedError, ChildProcess, Link

START_S, GRACE_S = 60.0, 5.0
CELLS_S = 30.0  # for the cells before `check`, at least
MEMORY_BYTES = 1 << 31  # that an answer may take on top of what is loaded
CHECK = "check"


class Cell(NamedTuple):
    """Code, and what a traceback calls the place that it is in."""

    name: str
    source: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is asked to do."""

    number: int
    path: str
    time_limit_s: float


def judge_file(exercise: Exercise, path: Path, time_limit_s: float) -> Report:
    """The verdict on the answer in that file. ValueError, OSError."""
    read_cells(path)  # complaints that need no child
    child = ChildProcess("check", run_child)
    try:
        child.link.send(Job(number=exercise.number, path=str(path.resolve()), time_limit_s=time_limit_s))
        report = child.recv(START_S + CELLS_S + 2 * time_limit_s + GRACE_S)
    except TimeoutError:
        return _stopped(exercise, f"no end within {time_limit_s:g} s, and not a line of Python that could be named")
    except ChildDiedError:
        child.stop()
        return _stopped(exercise, f"the process {child.describe_exit()}")
    finally:
        child.stop(0.5)
    if isinstance(report, str):
        raise ValueError(report)
    return report


def _stopped(exercise: Exercise, got: str) -> Report:
    verdict = broken("runs", 0, "", "code that runs to the end", got)
    line = Line(law="runs", meaning=LAWS["runs"], verdict=verdict)
    return Report(exercise=exercise.name, lines=[line], first=line)


def run_child(link: Link) -> int:
    """Run the cells, judge the answer, report."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what an answer prints must not mix with the report
    job: Job = link.recv()
    exercise, path = get_exercise(job.number), Path(job.path)
    sys.path.insert(0, str(path.parent))
    try:
        with limit_time(max(job.time_limit_s, CELLS_S)):
            answer = answer_in(path, exercise)
    except (ValueError, NoEnd) as error:
        link.send(str(error) if isinstance(error, ValueError) else f"{path.name}: {error}; mend its cells.")
        return 0
    limit_memory(MEMORY_BYTES)
    link.send(check(job.number, answer, time_limit_s=job.time_limit_s))
    return 0


def answer_in(path: Path, exercise: Exercise) -> Any:
    """What the file defines under the exercise's name. Runs its code, whose prints are for readers of the notebook and
    are dropped here. ValueError."""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        names = run_cells(read_cells(path))
    if exercise.answer not in names:
        raise ValueError(f"{path.name} defines no {exercise.answer}; exercise {exercise.number} asks for it.")
    return names[exercise.answer]


def run_cells(cells: list[Cell]) -> dict[str, Any]:
    """The names that they define, up to the first statement that calls `check`. ValueError for an error in one."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        source = _without_magics(cell.source)
        linecache.cache[cell.name] = (len(source), None, source.splitlines(keepends=True), cell.name)
        try:
            tree = ast.parse(source, cell.name)
            before = [*_before_check(tree)]
            exec(compile(ast.Module(before, []), cell.name, "exec"), names)
        except SyntaxError as error:
            raise ValueError(f"{cell.name}, line {error.lineno}: {error.msg}; it is not valid Python.") from error
        except Exception as error:
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == cell.name]
            where = f", line {lines[-1]}" if lines else ""
            raise ValueError(f"{cell.name}{where}: {type(error).__name__}: {error}; mend the cell first.") from error
        if len(before) < len(tree.body):
            break
    return names


def _without_magics(source: str) -> str:
    """IPython's own lines become empty ones."""
    lines = source.splitlines()
    if lines and lines[0].startswith("%%"):
        return ""
    return "\n".join("" if line.startswith(("%", "!")) else line for line in lines) + "\n"


def _before_check(tree: ast.Module) -> Iterator[ast.stmt]:
    for statement in tree.body:
        calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
        if any(isinstance(name, ast.Name) and name.id == CHECK for name in calls):
            return
        yield statement


def read_cells(path: Path) -> list[Cell]:
    """Of a notebook its cells of code; a Python file is one. ValueError, OSError."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return [Cell(str(path), text)]
    try:
        cells = json.loads(text)["cells"]
        return [
            Cell(f"{path.name}, cell {number}", "".join(cell["source"]))
            for number, cell in enumerate((c for c in cells if c["cell_type"] == "code"), 1)
        ]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path.name} is neither a notebook nor a Python file; give one of both.") from None


def is_begun(exercise: Exercise, path: Path) -> bool:
    """Whether there is a file whose code is not as shipped."""
    if not path.is_file():
        return False
    shipped = exercises_dir() / f"{exercise.name}.ipynb"
    return [cell.source for cell in read_cells(path)] != [cell.source for cell in read_cells(shipped)]
