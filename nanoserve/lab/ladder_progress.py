"""How far the ladder has come, on standard error: a bar on a terminal, elsewhere a line for each run that has ended.

Knows what a run is called and how many tokens all of them will emit, nothing else.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from nanoserve.lab.climb import Progress


class LadderProgress(Progress):
    """For the length of a `with`."""

    def __init__(self, total_tokens: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as ProgressBar

        console = Console(stderr=True)
        columns = (TextColumn("{task.description:<38}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._is_terminal = console.is_terminal
        self._bar = ProgressBar(*columns, console=console, transient=True, disable=not self._is_terminal)
        self._task = self._bar.add_task("", total=total_tokens)
        self._running: str | None = None
        self._start_s = 0.0

    def __enter__(self) -> LadderProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()
        if kind is None:
            self._report_end()

    def announce(self, what: str) -> None:
        self._report_end()
        self._running, self._start_s = what, time.monotonic()
        self._bar.update(self._task, description=what)

    def on_tokens(self, num_tokens: int) -> None:
        self._bar.advance(self._task, num_tokens)

    def _report_end(self) -> None:
        if self._running is not None and not self._is_terminal:
            print(f"{self._running}: {time.monotonic() - self._start_s:.1f} s", file=sys.stderr, flush=True)
