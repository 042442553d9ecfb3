"""Holds a step of a core until a message is in its inbox, so that it is certain what came while the step ran.

The runner holds the first step of a request whose id says so; the inbox lets it go. Both live in the child of
check_core.py. Laws: tests/test_exercises.py.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from nanoserve.lab.fakes import DigestRunner, DigestStep
from nanoserve.messages import UtilityCall
from nanoserve.request import StepPlan, StepResult

HELD = "held"  # in the id of a request whose first step is held; and what the child says then
RELEASE, SHUT_DOWN = 20, 21  # numbers of calls: the step goes on; and the server is told to shut down, too
PATIENCE_S = 5.0


class HeldStep(DigestStep):
    """Goes on once the gate is open, or after `PATIENCE_S`: a server may lose the message."""

    def __init__(self, runner: HoldingRunner, plan: StepPlan) -> None:
        super().__init__(runner, plan)
        self._gate, self._tell = runner.gate, runner.tell

    def wait(self) -> StepResult:
        self._gate.clear()
        self._tell()
        self._gate.wait(PATIENCE_S)
        return super().wait()


class HoldingRunner(DigestRunner):
    """Both are set before its first step. `tell`: called when a step is held."""

    gate: threading.Event
    tell: Callable[[], None]

    def launch(self, plan: StepPlan) -> DigestStep:
        if not any(HELD in new.id for new in plan.new):
            return super().launch(plan)
        step = HeldStep(self, plan)
        self.launched.append(step)
        return step


class WatchedInbox(queue.SimpleQueue[tuple[bytes, Any]]):
    """Opens the gate when a call that says so is in, behind all that came before it."""

    def __init__(self, gate: threading.Event, shut_down: Callable[[], None]) -> None:
        super().__init__()
        self._gate, self._shut_down = gate, shut_down

    def put(self, item: tuple[bytes, Any], block: bool = True, timeout: float | None = None) -> None:
        number = item[1].call_id if isinstance(item[1], UtilityCall) else 0
        if number == SHUT_DOWN:
            self._shut_down()
        super().put(item)
        if number in (RELEASE, SHUT_DOWN):
            self._gate.set()
