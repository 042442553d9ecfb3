"""`ladder.json` and the ladder's tables: what was run, where, each round's figures, medians, and the change.

The dataclasses below *are* the schema of `ladder.json` (version 2): `msgspec.json.decode(data, type=LadderReport)`
reads a file back. Times are in seconds, shares in [0, 1], lengths in tokens; null where there is no such value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from nanoserve.lab.boundary import BoundaryCost
from nanoserve.lab.front_end import FrontEndLoad, FrontEndMetrics, FrontEndRun
from nanoserve.lab.metrics import ALL, SLOW_GAP_FACTOR, RunMetrics, Spread, measure, median_of, request_times
from nanoserve.machine import Machine
from nanoserve.request import EngineInfo

if TYPE_CHECKING:
    from nanoserve.lab.workload import Workload
    from nanoserve.record import StepRecord

LADDER_VERSION = 2

M = TypeVar("M", RunMetrics, FrontEndMetrics)


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage was: its config, filled in by the engine (classes by name), and what the engine said of itself."""

    config: dict[str, str | int | float | bool | None]
    engine: EngineInfo


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table. `ratios` compare with the first stage; null where that is 0 or has no value."""

    key: str
    label: str
    unit: str  # "s", "share", "tokens/s" or "" for a count
    better: str  # "lower", "higher", or "" for a fact
    values: dict[str, float | None]  # of the medians
    ratios: dict[str, float | None]
    lows: dict[str, float | None]  # over the rounds
    highs: dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReport:
    """What a table of any load is made of."""

    name: str
    claim: str
    headlines: list[str]  # keys of the rows that the claim is about
    parameters: dict[str, int | str]
    num_runs: dict[str, int]  # by stage, in the order of the columns
    rows: list[Row]
    first_difference: str | None  # between the greedy tokens of two runs; null: all identical


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(TableReport):
    """One workload on every stage. `rounds[stage]` has every round's figures, `medians[stage]` each one's median."""

    watched: str  # the group that ITL and TPOT rows are about
    rounds: dict[str, list[RunMetrics]]
    medians: dict[str, RunMetrics]
    replays: dict[str, dict[str, int]]  # stage -> graph -> steps that replayed it, over all rounds; "": none


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndReport(TableReport):
    """A server under many streams, in the stages that move the client and those above them; and what that costs."""

    rounds: dict[str, list[FrontEndMetrics]]
    medians: dict[str, FrontEndMetrics]
    costs: list[BoundaryCost]


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
    left_out: dict[str, str]  # load -> why it was not run
    charts: list[str]  # file names, beside this file

    @property
    def tables(self) -> list[TableReport]:
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


@dataclass(frozen=True, slots=True)
class _Rows(Generic[M]):
    """Makes rows from the figures of all rounds."""

    rounds: Mapping[str, Sequence[M]]

    def row(self, key: str, label: str, unit: str, better: str, value: Callable[[M], float | None]) -> Row:
        values = {stage: value(median_of(several)) for stage, several in self.rounds.items()}
        seen = {stage: [value(one) for one in several] for stage, several in self.rounds.items()}
        base = next(iter(values.values()))
        return Row(
            key,
            label,
            unit,
            better,
            values,
            ratios={stage: v / base if v is not None and base else None for stage, v in values.items()},
            lows={stage: min((v for v in vs if v is not None), default=None) for stage, vs in seen.items()},
            highs={stage: max((v for v in vs if v is not None), default=None) for stage, vs in seen.items()},
        )

    def latency(self, key: str, label: str, spread: Callable[[M], Spread | None]) -> list[Row]:
        """P50, P99, maximum."""

        def figure(pick: Callable[[Spread], float]) -> Callable[[M], float | None]:
            return lambda metrics: None if (found := spread(metrics)) is None else pick(found)

        return [
            self.row(f"{key}_p50", f"{label} P50", "s", "lower", figure(lambda s: s.p50)),
            self.row(f"{key}_p99", f"{label} P99", "s", "lower", figure(lambda s: s.p99)),
            self.row(f"{key}_max", f"{label} max", "s", "lower", figure(lambda s: s.max)),
        ]


def rows_of(rounds: Mapping[str, Sequence[RunMetrics]], watched: str) -> list[Row]:
    """The table of a load: gaps of the watched group, first tokens of every group, then work and memory."""
    rows = _Rows(rounds)
    row, latency = rows.row, rows.latency

    def first_token(group: str) -> list[Row]:
        return latency(f"ttft_{group}", f"TTFT {group}", lambda m: m.groups[group].ttft_s)[::2]  # P50 and max

    groups = [label for label in next(iter(rounds.values()))[0].groups if label != ALL]
    pads = any(metrics.padding_share for several in rounds.values() for metrics in several)
    slow = f"gaps over {SLOW_GAP_FACTOR} x the median"
    return [
        *latency("itl", f"ITL {watched}", lambda m: m.groups[watched].itl_s),
        row("slow_gap_share", slow, "share", "lower", lambda m: m.groups[watched].slow_gap_share),
        *latency("tpot", f"TPOT {watched}", lambda m: m.groups[watched].tpot_s)[:2],
        *(found for group in groups for found in first_token(group)),
        row("output_tokens_per_s", "throughput", "tokens/s", "higher", lambda m: m.output_tokens_per_s),
        row("num_steps", "steps", "", "lower", lambda m: m.num_steps),
        *latency("host", "host time of a step", lambda m: m.host_s)[:2],
        *(row("padding_share", "padding, of all tokens", "share", "lower", lambda m: m.padding_share),) * pads,
        row("prompt_tokens_computed", "prompt tokens computed", "", "lower", lambda m: m.prompt_tokens_computed),
        row("hit_rate", "prefix cache hit rate", "share", "higher", lambda m: m.hit_rate),
        row("peak_used_blocks", "peak KV blocks", "", "lower", lambda m: m.peak_used_blocks),
    ]


def front_end_rows(rounds: Mapping[str, Sequence[FrontEndMetrics]]) -> list[Row]:
    """The table of a server under many streams: the engine's steps, the front end, and what ran beside them."""
    rows = _Rows(rounds)
    row, latency = rows.row, rows.latency
    return [
        *latency("gap", "step gap", lambda m: m.gap_s),
        *latency("step", "step", lambda m: m.step_s)[:2],
        *latency("health", "/health", lambda m: m.health_s)[:2],
        row("output_tokens_per_s", "throughput", "tokens/s", "higher", lambda m: m.output_tokens_per_s),
        row("num_steps", "steps", "", "lower", lambda m: m.num_steps),
        row("ready", "server ready after", "s", "lower", lambda m: m.ready_s),
        row("num_threads", "torch threads of a step", "", "", lambda m: m.num_threads),
        row("client_cpu_share", "load generator, of a core", "share", "", lambda m: m.client_cpu_share),
    ]
