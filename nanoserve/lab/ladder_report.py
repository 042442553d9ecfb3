"""`ladder.json` and the ladder's tables: what was run, where, each round's figures, medians, and the change.

The dataclasses below *are* the schema of `ladder.json` (version 3): `msgspec.json.decode(data, type=LadderReport)`
reads a file back. Times are in seconds, shares in [0, 1], lengths in tokens; null where there is no such value.
docs/ladder.md describes every field (tests/test_ladder_schema.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoserve.lab.boundary import BoundaryCost
from nanoserve.lab.front_end import FrontEndLoad, FrontEndMetrics, FrontEndRun
from nanoserve.lab.ladder_rows import Row, front_end_rows, rows_of
from nanoserve.lab.metrics import RunMetrics, measure, median_of, request_times
from nanoserve.lab.simulator import Host
from nanoserve.machine import Machine
from nanoserve.request import EngineInfo

if TYPE_CHECKING:
    from nanoserve.lab.workload import Workload
    from nanoserve.record import StepRecord

LADDER_VERSION = 3


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage was: its config, filled in by the engine (classes by name), and what the engine said of itself."""

    config: dict[str, str | int | float | bool | None]
    engine: EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReport:
    """What a table of any load is made of."""

    name: str
    claim: str
    headlines: list[str]  # keys of the rows that the claim is about
    parameters: dict[str, int | str]
    num_runs: dict[str, int]  # by stage, in the order of the columns
    rows: list[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredReport(TableReport):
    """The same of real runs, which had to agree."""

    first_difference: str | None  # between the greedy tokens of two runs; null: all identical


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(MeasuredReport):
    """One workload on every stage. `rounds[stage]` has every round's figures, `medians[stage]` each one's median."""

    watched: str  # the group that ITL and TPOT rows are about
    rounds: dict[str, list[RunMetrics]]
    medians: dict[str, RunMetrics]
    replays: dict[str, dict[str, int]]  # stage -> graph -> steps that replayed it, over all rounds; "": none


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndReport(MeasuredReport):
    """A server under many streams, in the stages that move the client and those above them; and what that costs."""

    rounds: dict[str, list[FrontEndMetrics]]
    medians: dict[str, FrontEndMetrics]
    costs: list[BoundaryCost]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedReport(TableReport):
    """A load of production scale on every stage, on a virtual clock: no figure of it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Production:
    """The ladder for a set-up that is not at hand: the real schedulers and block managers, and costs by formula."""

    clock: str  # "simulated"
    setup: str  # model, GPUs and weights, in words
    seed: int
    num_blocks: int
    host: dict[str, Host]  # stage -> what the host adds to a step, in microseconds
    assumptions: list[str]
    not_told_apart: list[str]  # what stages change that this cannot show
    loads: list[SimulatedReport]


@dataclass(frozen=True, slots=True)
class AdmissionCost:
    """Of another block manager: seconds to look up, allocate and commit a prompt that nobody shares."""

    stage: str
    above: str
    prompt_len: int
    seconds: dict[str, float]  # by stage, the two of them; medians


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One figure, in the stage above and in this one."""

    load: str  # "": of the engine, whatever the load
    key: str
    label: str
    unit: str  # as a row's, or "us" (value in seconds), "bytes", "MiB" (value in bytes)
    better: str
    clock: str  # "wall" or "simulated"
    before: float | None
    after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStory:
    """One rung: the classes and modes that moved, the figures that they are for, and the price."""

    stage: str
    above: str | None  # null: the first stage
    moved: dict[str, list[str]]  # field of the config -> from, to
    gains: list[Effect]
    costs: list[Effect]


@dataclass(frozen=True, slots=True)
class LadderReport:
    """The whole file."""

    version: int
    nanoserve: str
    clock: str  # "wall"
    seed: int
    num_rounds: int
    prompts: str  # what the prompts are made of
    machine: Machine
    stages: dict[str, StageReport]
    loads: list[LoadReport]
    front_end: FrontEndReport | None
    admission: list[AdmissionCost]  # of each stage that moves the block manager
    left_out: dict[str, str]  # load -> why it was not run
    production: Production | None  # simulated
    stories: list[StageStory]
    charts: list[str]  # file names, beside this file
    pages: list[str]  # the report first, then timelines

    @property
    def tables(self) -> list[LoadReport | FrontEndReport]:
        """Of all loads that were run."""
        return [*self.loads, *([self.front_end] if self.front_end else [])]

    @property
    def identical(self) -> bool:
        return all(table.first_difference is None for table in self.tables)


@dataclass(frozen=True, slots=True)
class Run:
    """One stage, one workload, one round (counted from 1): everything else is computed from the records."""

    stage: str
    round: int
    records: Sequence[StepRecord]
    warm_up: Sequence[StepRecord] = ()  # that came before, on the same engine: only a replay needs them

    @property
    def duration_s(self) -> float:
        return self.records[-1].end_s - self.records[0].start_s

    @property
    def token_ids(self) -> dict[str, list[int]]:
        """Of every request, by id."""
        return {r.id: r.token_ids for r in request_times(self.records).values()}


@dataclass(frozen=True, slots=True)
class ServerRun:
    """The same of a server's life."""

    stage: str
    round: int
    result: FrontEndRun

    @property
    def duration_s(self) -> float:
        return self.result.duration_s

    @property
    def token_ids(self) -> dict[str, list[int]]:
        return self.result.token_ids


def middle_round(runs: Sequence[Run] | Sequence[ServerRun]) -> int:
    """The round of median length, over all stages: the one to show where only one can be."""
    lengths: dict[int, float] = {}
    for run in runs:
        lengths[run.round] = lengths.get(run.round, 0.0) + run.duration_s
    return sorted(lengths, key=lambda number: lengths[number])[(len(lengths) - 1) // 2]


def report_load(workload: Workload, runs: Sequence[Run]) -> LoadReport:
    """Figures, medians and verdict of all the runs of one workload, stages in order of their first run."""
    rounds: dict[str, list[RunMetrics]] = {}
    for run in runs:
        rounds.setdefault(run.stage, []).append(measure(run.records, workload.groups))
    return LoadReport(
        name=workload.name,
        claim=workload.claim,
        watched=workload.watched,
        headlines=list(workload.headlines),
        parameters=dict(workload.parameters),
        num_runs={stage: len(several) for stage, several in rounds.items()},
        rounds=rounds,
        medians={stage: median_of(several) for stage, several in rounds.items()},
        replays=replays_of(runs),
        rows=rows_of(rounds, workload.watched),
        first_difference=first_difference(runs),
    )


def replays_of(runs: Sequence[Run]) -> dict[str, dict[str, int]]:
    """How often each graph was replayed, in the stages that capture any."""
    counts: dict[str, Counter[str]] = {}
    for run in runs:
        counts.setdefault(run.stage, Counter()).update(r.graph for r in run.records if r.num_scheduled_tokens)
    return {stage: dict(count.most_common()) for stage, count in counts.items() if any(count)}


def report_front_end(load: FrontEndLoad, runs: Sequence[ServerRun], costs: Sequence[BoundaryCost]) -> FrontEndReport:
    """The same of the servers' lives."""
    rounds: dict[str, list[FrontEndMetrics]] = {}
    for run in runs:
        rounds.setdefault(run.stage, []).append(run.result.metrics)
    return FrontEndReport(
        name=load.name,
        claim=load.claim,
        headlines=list(load.headlines),
        parameters=dict(load.parameters),
        num_runs={stage: len(several) for stage, several in rounds.items()},
        rounds=rounds,
        medians={stage: median_of(several) for stage, several in rounds.items()},
        rows=front_end_rows(rounds),
        first_difference=first_difference(runs),
        costs=list(costs),
    )


def first_difference(runs: Sequence[Run] | Sequence[ServerRun]) -> str | None:
    """Where two runs of one load first emitted different tokens, in words; None if all are identical."""
    reference, *others = runs
    expected = reference.token_ids
    for run in others:
        got = run.token_ids
        for request_id, tokens in expected.items():
            if got.get(request_id) == tokens:
                continue
            found = got.get(request_id, [])
            same = 0
            while same < min(len(tokens), len(found)) and tokens[same] == found[same]:
                same += 1
            return (
                f"request {request_id}, output token {same}: {_name(reference)} emitted {_at(tokens, same)}, "
                f"{_name(run)} {_at(found, same)}"
            )
    return None


def _name(run: Run | ServerRun) -> str:
    return f"{run.stage} (round {run.round})"


def _at(tokens: Sequence[int], index: int) -> str:
    return f"id {tokens[index]}" if index < len(tokens) else "none"
