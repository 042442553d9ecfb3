"""A policy of one's own: short prompts first, with patience for long ones. See docs/grade.md.

nanoserve grade examples/shortest_first.py
"""

from nanoserve.request import Request, StepPlan
from nanoserve.scheduler import UnifiedScheduler

AGEING = 4  # tokens that a prompt counts as shorter for every step that it has waited; with 0, a long one can starve


class ShortestFirst(UnifiedScheduler):
    """v1's scheduler, but the queue is ordered by length before each step."""

    def schedule(self) -> StepPlan:
        if not self.by_priority:
            self._order_waiting()
        return super().schedule()

    def _order_waiting(self) -> None:
        waiting = list(self.waiting)
        for request in waiting:
            self.waiting.remove(request)
        for request in sorted(waiting, key=self._length):
            self.waiting.push(request)

    def _length(self, request: Request) -> int:
        self.came_at = getattr(self, "came_at", {})
        waited = self._step - self.came_at.setdefault(request.id, self._step)
        return request.num_tokens - AGEING * waited
