"""What an exercise's answer derives from where the engine has nothing for it: a scheduler with an order of one's own.

Knows no verdicts. Laws: tests/test_exercises.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoserve.request import Request, StepPlan
from nanoserve.scheduler import UnifiedScheduler

if TYPE_CHECKING:
    from nanoserve.blocks import KVCacheManager
    from nanoserve.config import EngineConfig


class RankedScheduler(UnifiedScheduler):
    """v1's policy, but before each step those who wait are put in the order of `rank`, the smallest first."""

    def __init__(self, config: EngineConfig, blocks: KVCacheManager) -> None:
        super().__init__(config, blocks)
        self._came_at: dict[str, int] = {}

    def schedule(self) -> StepPlan:
        waiting = list(self.waiting)
        for request in waiting:
            self.waiting.remove(request)
        for request in sorted(waiting, key=self._rank_now):
            self.waiting.push(request)
        return super().schedule()

    def rank(self, request: Request, waited: int) -> float:
        """`waited`: steps since it came."""
        raise NotImplementedError

    def _rank_now(self, request: Request) -> float:
        return self.rank(request, self._step - self._came_at.setdefault(request.id, self._step))
