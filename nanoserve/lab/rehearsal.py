"""A simulated run of one config in one line: what the lessons' figures are made from.

Puts together a complete config, a run of the simulator and the records of its steps. What a step costs is the cost
model's (costs.py); everything that is decided, the engine's own scheduler and blocks decide. Laws:
tests/test_lessons.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nanoserve.config import EngineConfig
from nanoserve.lab.charts import Setting
from nanoserve.lab.costs import REFERENCE, CostModel, Linear, parse_costs
from nanoserve.lab.simulator import Host, complete_config, simulate
from nanoserve.lab.trace import Trace
from nanoserve.record import ListRecorder, StepRecord

if TYPE_CHECKING:
    from nanoserve.lab.simulated import SimulatedRun
    from nanoserve.lab.workload import Workload

NUM_BLOCKS = 20_000  # as in the reference table of the simulator: no load of it runs out of blocks


@dataclass(frozen=True)
class Rehearsal:
    """What came of it: `run` has the figures in microseconds, `records` every step."""

    run: SimulatedRun
    recorder: ListRecorder = field(repr=False)

    @property
    def records(self) -> list[StepRecord]:
        return self.recorder.records

    @cached_property
    def trace(self) -> Trace:
        return Trace(self.recorder.header, self.records)

    @property
    def setting(self) -> Setting:
        return Setting(self.run.workload.name, _in_words(self.run.costs), "simulated", self.run.workload.seed)


def rehearse(
    config: EngineConfig,
    load: Workload,
    costs: CostModel = REFERENCE,
    *,
    host: Host | None = None,
    num_blocks: int = NUM_BLOCKS,
    **fields: Any,
) -> Rehearsal:
    """The load on that config, on a virtual clock; `fields` override the config's. Raises ValueError as the config
    does, but for what only a real engine must refuse (`complete_config`)."""
    recorder = ListRecorder()
    complete = complete_config(replace(config, **fields), max_model_len=load.longest, num_blocks=num_blocks)
    return Rehearsal(simulate(complete, load, costs, host, observer=recorder), recorder)


def _in_words(costs: str) -> str:
    """What a step costs, as the title of a picture says it to those who know no command line."""
    if not costs.startswith("linear:"):
        return f"costs {costs}"
    linear = parse_costs(costs)
    assert isinstance(linear, Linear)
    return f"steps of {linear.base_us / 1000:g} ms + {linear.token_us:g} µs a token"
