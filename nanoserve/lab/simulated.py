"""What a simulated run came to: every figure in whole microseconds, or counts, and none of it measured.

Filled in by the simulator while it runs, without keeping a record of any step. The definitions are those of metrics.py:
TTFT from the arrival, ITL every gap between two tokens, percentiles by nearest rank, the maximum always with them. A
token's time is when the front end has sent it. Laws: tests/test_simulator.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanoserve.lab.metrics import ALL, Spread
from nanoserve.lab.workload import Arrival, Workload
from nanoserve.request import EngineOutput

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig
    from nanoserve.core import EngineCore
    from nanoserve.lab.simulator import Host


def spread_of(counts: Counter[int]) -> Spread | None:
    """`Spread.of` for values that are counted: value -> how often."""
    total = sum(counts.values())
    if not total:
        return None
    ordered = sorted(counts)

    def rank(percent: float) -> int:
        left = math.ceil(percent / 100 * total)
        for value in ordered:
            left -= counts[value]
            if left <= 0:
                return value
        raise AssertionError("ranks end at the total")

    mean = sum(value * count for value, count in counts.items()) / total
    return Spread(total, mean, rank(50), rank(99), ordered[-1])


@dataclass(slots=True)
class Story:
    """One request, as its user sees it."""

    id: str
    group: str
    num_prompt_tokens: int
    arrival_us: int
    gaps: Counter[int] = field(repr=False)  # of its group: shared by its members
    num_tokens: int = 0
    first_us: int = -1
    last_us: int = -1
    worst_gap_us: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None

    @property
    def ttft_us(self) -> int | None:
        return self.first_us - self.arrival_us if self.num_tokens else None

    @property
    def was_refused(self) -> bool:
        """It could never fit, and ended without a token."""
        return self.finish_reason is not None and self.num_tokens == 0


class SimulatedRun:
    """One workload under one config. The simulator writes it, everybody else reads."""

    def __init__(self, workload: Workload, config: EngineConfig, costs: str, host: Host) -> None:
        self.workload = workload
        self.config = config
        self.costs = costs
        self.host = host
        self.stories: dict[str, Story] = {}
        self.end_us = 0
        self.num_steps = 0
        self.num_tokens = 0  # computed: of prompts, of outputs, and again after preemptions
        self.num_request_steps = 0  # requests in a step, summed over steps
        self.busy_us = 0  # of the device
        self.peak_used_blocks = 0
        self.num_preemptions = 0
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._gaps: dict[str, Counter[int]] = {}

    # The simulator's side

    def arrive(self, arrival: Arrival, at_us: int) -> None:
        gaps = self._gaps.setdefault(arrival.group, Counter())
        self.stories[arrival.id] = Story(arrival.id, arrival.group, len(arrival.prompt_token_ids), at_us, gaps)

    def take(self, outputs: list[EngineOutput], now_us: int) -> None:
        """News that the front end has sent at that time. A step brings a request one token at most."""
        stories = self.stories
        for output in outputs:
            story = stories[output.id]
            if output.new_token_ids:
                if story.num_tokens:
                    gap = now_us - story.last_us
                    story.gaps[gap] += 1
                    if gap > story.worst_gap_us:
                        story.worst_gap_us = gap
                else:
                    story.first_us = now_us
                    story.num_cached_tokens = output.num_cached_tokens
                story.num_tokens += 1
                story.last_us = now_us
            if output.finish_reason is not None:
                story.finish_reason = output.finish_reason

    def finish(self, core: EngineCore, end_us: int, num_tokens: int, busy_us: int) -> None:
        stats = core.stats
        self.end_us, self.busy_us = end_us, busy_us
        self.num_steps = stats.num_steps
        self.num_tokens = num_tokens
        self.num_preemptions = stats.num_preemptions
        self.queried_tokens, self.hit_tokens = stats.prefix_cache_queries, stats.prefix_cache_hits

    # The reader's side

    @property
    def groups(self) -> list[str]:
        return list(self._gaps)

    def members(self, group: str = ALL) -> list[Story]:
        return [story for story in self.stories.values() if group in (ALL, story.group)]

    def itl_us(self, group: str = ALL) -> Spread | None:
        if group != ALL:
            return spread_of(self._gaps.get(group, Counter()))
        return spread_of(sum(self._gaps.values(), Counter()))

    def ttfts_us(self, group: str = ALL) -> list[int]:
        """In order of arrival, of those that got a token."""
        return [story.ttft_us for story in self.members(group) if story.ttft_us is not None]

    def ttft_us(self, group: str = ALL) -> Spread | None:
        return Spread.of(self.ttfts_us(group))

    @property
    def output_tokens(self) -> int:
        return sum(story.num_tokens for story in self.stories.values())

    @property
    def output_tokens_per_s(self) -> float:
        """0 where all were refused as they came: no time went by."""
        start_us = min(story.arrival_us for story in self.stories.values())
        return self.output_tokens / (self.end_us - start_us) * 1e6 if self.output_tokens else 0.0

    @property
    def num_refused(self) -> int:
        return sum(story.was_refused for story in self.stories.values())

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def mean_running(self) -> float:
        return self.num_request_steps / self.num_steps if self.num_steps else 0.0


def pooled(runs: Iterable[SimulatedRun], group: str = ALL) -> tuple[Spread | None, Spread | None]:
    """TTFT and ITL of several replicas as their users see them, together."""
    runs = list(runs)
    gaps: Counter[int] = Counter()
    for run in runs:
        for name, counts in run._gaps.items():
            if group in (ALL, name):
                gaps.update(counts)
    return Spread.of(us for run in runs for us in run.ttfts_us(group)), spread_of(gaps)
