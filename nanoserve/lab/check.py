"""What the last cells of an exercise call: `check(3, MyMix)` is the verdict, `show_solution(3)` the folded answer.

The same judge as `nanoserve check 3` (check_child.py), in this process, within a time limit that an alarm keeps, so
that an endless loop is a verdict too. The exercises are listed in check_exercises.py. Laws: tests/test_exercises.py.
"""

from __future__ import annotations

import html
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from nanoserve.lab.check_exercises import get_exercise, solution_source
from nanoserve.lab.check_report import Report
from nanoserve.lab.show import Source

TIME_LIMIT_S = 30.0


class NoEnd(BaseException):
    """Raised in code that takes too long; nothing that catches errors catches it by accident."""


@dataclass(frozen=True, slots=True)
class Folded:
    """A source that is shown when it is asked for."""

    source: Source

    def __repr__(self) -> str:
        return "The solution is folded: open the notebook in JupyterLab, or call show_solution(...).source."

    def _repr_html_(self) -> str:
        name = html.escape(self.source.name)
        return f"<details><summary>Solution: {name}</summary>{self.source._repr_html_()}</details>"


def check(number: int, mine: Any, *, time_limit_s: float = TIME_LIMIT_S) -> Report:
    """The verdict on `mine`, the answer to exercise `number`. Raises nothing on account of it; ValueError for an
    unknown number."""
    judge = get_exercise(number).judge()
    with limit_time(time_limit_s):
        return judge(mine)


def show_solution(number: int) -> Folded:
    """As it stands in the package, or in exercises/solutions where the package has no such thing."""
    exercise = get_exercise(number)
    return Folded(Source(exercise.solution_name, solution_source(exercise)))


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise `NoEnd` after so long; not outside of the main thread. Whoever else waits for the alarm gets it back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise NoEnd(f"no end within {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, ring)
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
        signal.signal(signal.SIGALRM, handler)
