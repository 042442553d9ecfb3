"""How far a simulation with fitted costs is from runs that the fit has not seen.

A recorded run is simulated: its arrivals at their times, with their tokens and as many answers, through an engine of
its config. Both runs are measured from step records by the same code (metrics.py), so that an error is one of the costs
and of nothing else. Knows no engine that runs. Laws: tests/test_costs.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nanoserve.config import SEAMS, EngineConfig
from nanoserve.lab.costs import Table
from nanoserve.lab.metrics import ALL, RunMetrics, measure, request_times
from nanoserve.lab.replay import replay_config
from nanoserve.lab.simulator import Host, complete_config, simulate
from nanoserve.lab.workload import Arrival, Workload
from nanoserve.record import ListRecorder, StepRecord, TraceHeader


@dataclass(frozen=True, slots=True)
class Figures:
    """What is compared. Milliseconds, and tokens a second; None: no request had two tokens."""

    mean_itl_ms: float | None
    p99_itl_ms: float | None
    mean_ttft_ms: float | None
    p99_ttft_ms: float | None
    output_tokens_per_s: float
    num_steps: int
    hit_rate: float

    @classmethod
    def of(cls, metrics: RunMetrics) -> Figures:
        itl, ttft = metrics.groups[ALL].itl_s, metrics.groups[ALL].ttft_s
        return cls(
            mean_itl_ms=itl and itl.mean * 1e3,
            p99_itl_ms=itl and itl.p99 * 1e3,
            mean_ttft_ms=ttft and ttft.mean * 1e3,
            p99_ttft_ms=ttft and ttft.p99 * 1e3,
            output_tokens_per_s=metrics.output_tokens_per_s,
            num_steps=metrics.num_steps,
            hit_rate=metrics.hit_rate,
        )


COMPARED = ("mean_itl_ms", "p99_itl_ms", "mean_ttft_ms", "output_tokens_per_s")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One recorded run beside the same arrivals simulated."""

    real: Figures
    simulated: Figures

    @property
    def errors(self) -> dict[str, float | None]:
        """`simulated / real - 1` of each figure in `COMPARED`."""
        return {name: error(getattr(self.simulated, name), getattr(self.real, name)) for name in COMPARED}

    def __str__(self) -> str:
        told = []
        for name, off in self.errors.items():
            real, simulated = getattr(self.real, name), getattr(self.simulated, name)
            told.append(f"{name} {real:,.2f} -> {simulated:,.2f} ({off:+.1%})" if off is not None else f"{name} -")
        return "; ".join(told)


def error(simulated: float | None, real: float | None) -> float | None:
    return simulated / real - 1 if simulated and real else None


def compare(header: TraceHeader, records: Sequence[StepRecord], table: Table) -> Comparison:
    """A recorded run, and its simulation. ValueError for a trace that lacks its config or any request."""
    real = Figures.of(measure(records))
    simulated = Figures.of(measure(simulated_again(header, records, table)))
    return Comparison(real, simulated)


def simulated_again(header: TraceHeader, records: Sequence[StepRecord], table: Table) -> list[StepRecord]:
    """The records of the recorded arrivals on an engine of the recorded config, in virtual seconds."""
    recorder = ListRecorder()
    load = recorded_load(records)
    simulate(recorded_config(header), load, table, Host(step_us=round(table.gap_us)), observer=recorder)
    return recorder.records


def recorded_config(header: TraceHeader) -> EngineConfig:
    """The recorded engine's scheduling, pool and layout, for the simulator. ValueError where the trace lacks any."""
    config = replay_config(header)
    clients = {client.__name__: client for client in SEAMS["client"].values()}
    ahead = bool(header.config.get("async_scheduling"))
    config = replace(config, client=clients[str(header.config["client"])], async_scheduling=ahead)
    assert config.num_blocks is not None, "replay_config insists"
    return complete_config(config, max_model_len=config.model_len, num_blocks=config.num_blocks)


def recorded_load(records: Sequence[StepRecord]) -> Workload:
    """Every request that got a token, due when it was due, counted from the first of them, to end after as many tokens.

    A simulated answer is made of one token, so a later turn's prompt finds only what was prompt before in the cache.
    """
    prompts: Mapping[str, list[int]] = {r.id: r.prompt_token_ids for record in records for r in record.arrivals}
    times = [r for r in request_times(records).values() if r.token_s]
    if not times:
        raise ValueError("the trace has no request that got a token, so there is nothing to simulate.")
    start_s = min(r.arrival_s for r in times)
    arrivals = [
        Arrival(
            id=r.id,
            group=ALL,
            prompt_token_ids=prompts[r.id],
            max_tokens=len(r.token_ids),
            at_s=r.arrival_s - start_s,
        )
        for r in times
    ]
    return Workload(name="recorded", claim="A recorded load.", watched=ALL, seed=0, parameters={}, arrivals=arrivals)
