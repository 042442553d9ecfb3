"""`ladder.json` and the ladder's tables: what was run, where, each round's figures, medians, and the change.

The dataclasses below *are* the schema of `ladder.json` (version 1): `msgspec.json.decode(data, type=LadderReport)`
reads a file back. Times are in seconds, shares in [0, 1], lengths in tokens; null where there is no such value.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve.lab.metrics import ALL, SLOW_GAP_FACTOR, RunMetrics, Spread, measure, median_of, request_times
from nanoserve.request import EngineInfo

if TYPE_CHECKING:
    from nanoserve.lab.workload import Workload
    from nanoserve.record import StepRecord

LADDER_VERSION = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the runs were made; a wall-clock figure means little without it."""

    system: str
    processor: str
    cores: int
    usable_cores: int  # that this process may run on
    load_average_1m: float | None  # when the ladder began: above 0 something else was running too
    python: str
    torch: str
    torch_threads: int


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
    better: str  # "lower" or "higher"
    values: dict[str, float | None]
    ratios: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One workload on every stage. `rounds[stage]` has every round's figures, `medians[stage]` each one's median."""

    name: str
    claim: str
    watched: str  # the group that ITL and TPOT rows are about
    headlines: list[str]  # keys of the rows that the claim is about
    parameters: dict[str, int]
    rounds: dict[str, list[RunMetrics]]
    medians: dict[str, RunMetrics]
    rows: list[Row]
    first_difference: str | None  # between the greedy tokens of two runs; null: all identical


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
    charts: list[str]  # file names, beside this file

    @property
    def identical(self) -> bool:
        return all(load.first_difference is None for load in self.loads)


@dataclass(frozen=True, slots=True)
class Run:
    """One stage, one workload, one round (counted from 1): everything else is computed from the records."""

    stage: str
    round: int
    records: Sequence[StepRecord]

    @property
    def name(self) -> str:
        return f"{self.stage} (round {self.round})"


def report_load(workload: Workload, runs: Sequence[Run]) -> LoadReport:
    """Figures, medians and verdict of all the runs of one workload, stages in order of their first run."""
    rounds: dict[str, list[RunMetrics]] = {}
    for run in runs:
        rounds.setdefault(run.stage, []).append(measure(run.records, workload.groups))
    medians = {stage: median_of(metrics) for stage, metrics in rounds.items()}
    return LoadReport(
        name=workload.name,
        claim=workload.claim,
        watched=workload.watched,
        headlines=list(workload.headlines),
        parameters=dict(workload.parameters),
        rounds=rounds,
        medians=medians,
        rows=rows_of(medians, workload.watched),
        first_difference=first_difference(runs),
    )


def first_difference(runs: Sequence[Run]) -> str | None:
    """Where two runs of one workload first emitted different tokens, in words; None if all are identical."""
    reference, *others = runs
    expected = {r.id: r.token_ids for r in request_times(reference.records).values()}
    for run in others:
        got = {r.id: r.token_ids for r in request_times(run.records).values()}
        for request_id, tokens in expected.items():
            if got.get(request_id) == tokens:
                continue
            found = got.get(request_id, [])
            same = 0
            while same < min(len(tokens), len(found)) and tokens[same] == found[same]:
                same += 1
            return (
                f"request {request_id}, output token {same}: {reference.name} emitted {_at(tokens, same)}, "
                f"{run.name} {_at(found, same)}"
            )
    return None


def _at(tokens: Sequence[int], index: int) -> str:
    return f"id {tokens[index]}" if index < len(tokens) else "none"


def rows_of(medians: Mapping[str, RunMetrics], watched: str) -> list[Row]:
    """The table of a load: gaps of the watched group, first tokens of every group, then work and memory."""

    def row(key: str, label: str, unit: str, better: str, value: Callable[[RunMetrics], float | None]) -> Row:
        values = {stage: value(metrics) for stage, metrics in medians.items()}
        base = next(iter(values.values()))
        ratios = {stage: v / base if v is not None and base else None for stage, v in values.items()}
        return Row(key, label, unit, better, values, ratios)

    def latency(key: str, label: str, spread: Callable[[RunMetrics], Spread | None]) -> list[Row]:
        def figure(pick: Callable[[Spread], float]) -> Callable[[RunMetrics], float | None]:
            return lambda metrics: None if (found := spread(metrics)) is None else pick(found)

        return [
            row(f"{key}_p50", f"{label} P50", "s", "lower", figure(lambda s: s.p50)),
            row(f"{key}_p99", f"{label} P99", "s", "lower", figure(lambda s: s.p99)),
            row(f"{key}_max", f"{label} max", "s", "lower", figure(lambda s: s.max)),
        ]

    def first_token(group: str) -> list[Row]:
        return latency(f"ttft_{group}", f"TTFT {group}", lambda m: m.groups[group].ttft_s)[::2]  # P50 and max

    groups = [label for label in next(iter(medians.values())).groups if label != ALL]
    slow = f"gaps over {SLOW_GAP_FACTOR} x the median"
    return [
        *latency("itl", f"ITL {watched}", lambda m: m.groups[watched].itl_s),
        row("slow_gap_share", slow, "share", "lower", lambda m: m.groups[watched].slow_gap_share),
        *latency("tpot", f"TPOT {watched}", lambda m: m.groups[watched].tpot_s)[:2],
        *(found for group in groups for found in first_token(group)),
        row("output_tokens_per_s", "throughput", "tokens/s", "higher", lambda m: m.output_tokens_per_s),
        row("num_steps", "steps", "", "lower", lambda m: m.num_steps),
        row("prompt_tokens_computed", "prompt tokens computed", "", "lower", lambda m: m.prompt_tokens_computed),
        row("hit_rate", "prefix cache hit rate", "share", "higher", lambda m: m.hit_rate),
        row("peak_used_blocks", "peak KV blocks", "", "lower", lambda m: m.peak_used_blocks),
    ]


def describe_machine() -> Machine:
    """This machine, now; without its name."""
    import torch

    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load_average_1m=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        python=platform.python_version(),
        torch=str(torch.__version__),
        torch_threads=torch.get_num_threads(),
    )


def _processor() -> str:
    """The processor's model name, as well as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
