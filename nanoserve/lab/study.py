"""What a study is made of: one replica to run it on, what a good service is, and a table with what it rests on.

An `Slo` is judged request by request, so that a few very slow ones cannot hide in a percentile of many gaps. The
studies themselves are in studies.py. Laws: tests/test_scenarios.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nanoserve.config import EngineConfig
from nanoserve.lab.costs import CostModel
from nanoserve.lab.policies import parse_policy
from nanoserve.lab.simulated import Story
from nanoserve.lab.simulator import Host, complete_config

Value = float | int | str | None
SHARE_REQUIRED = 0.99  # of the requests that must meet an SLO


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One replica, and the seed of the traffic."""

    costs: CostModel
    num_blocks: int
    host: Host = field(default_factory=Host)
    seed: int = 0
    block_size: int = 16
    max_num_seqs: int = 128

    def config(self, policy: str, max_model_len: int, num_blocks: int | None = None) -> EngineConfig:
        named = parse_policy(policy, block_size=self.block_size, max_num_seqs=self.max_num_seqs).config
        return complete_config(named, max_model_len=max_model_len, num_blocks=num_blocks or self.num_blocks)

    def assumptions(self) -> list[str]:
        host = self.host
        return [
            f"a replica's device: {self.costs}; a pool of {self.num_blocks:,} blocks of {self.block_size}",
            f"host: {host.step_us} us a step, {host.request_us:g} us a request in it, {host.front_end_us:g} us a token "
            "that goes out",
            f"at most {self.max_num_seqs} requests in a step; lengths of outputs are known to nobody; seed {self.seed}",
        ]


@dataclass(frozen=True, slots=True)
class Slo:
    """What one request must get; milliseconds."""

    ttft_ms: int
    gap_ms: int  # the longest gap between two of its tokens

    def is_met(self, story: Story) -> bool:
        ttft_us = story.ttft_us
        return ttft_us is not None and ttft_us <= self.ttft_ms * 1000 and story.worst_gap_us <= self.gap_ms * 1000

    def share(self, stories: Sequence[Story]) -> float:
        return sum(map(self.is_met, stories)) / len(stories) if stories else 1.0

    def __str__(self) -> str:
        return f"TTFT <= {self.ttft_ms} ms, no gap over {self.gap_ms} ms"


@dataclass(frozen=True, slots=True)
class Column:
    key: str
    label: str
    unit: str = ""  # "us" (shown in ms), "share" (shown in %), "text", or as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A table, what it rests on, and what it says."""

    name: str
    question: str
    assumptions: list[str]
    columns: list[Column]
    rows: list[dict[str, Value]]
    findings: list[str]
