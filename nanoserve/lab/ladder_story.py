"""What moved from each stage to the next, the figures that it is for, and what it costs: from the report's own figures.

Knows fields of a config, never stages by name: a stage of your own gets the story of the fields that it moves. Which
figure speaks for a field is a table here; the figure itself is a row of a load, the boundary's cost, an admission, or
what the engine said of itself. Nothing is chosen by how it came out. Laws: tests/test_ladder_report.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from nanoserve.lab.boundary import BoundaryCost
from nanoserve.lab.ladder_report import (
    AdmissionCost,
    Effect,
    FrontEndReport,
    LoadReport,
    Production,
    StageReport,
    StageStory,
    TableReport,
)

LONG, SYSTEM, BUSY = "long-prompt", "system-prompt", "busy-front-end"
SIM_LONG, SIM_SYSTEM, SIM_BUSY = (f"simulated-{name}" for name in (LONG, SYSTEM, BUSY))
MOVABLE = ("scheduler", "client", "blocks", "runner", "graph_mode", "batch", "compile", "async_scheduling")

Key = tuple[str, str]  # load, row


@dataclass(frozen=True, slots=True)
class Speaks:
    """The rows that a field is for, and those that pay for it."""

    gains: tuple[Key, ...] = ()
    costs: tuple[Key, ...] = ()


EFFECTS: Mapping[str, Speaks] = MappingProxyType(
    {
        "scheduler": Speaks(
            gains=((LONG, "itl_p99"), (LONG, "itl_max"), (SIM_LONG, "itl_max")),
            costs=(
                (LONG, "ttft_long_p50"), (LONG, "output_tokens_per_s"), (LONG, "num_steps"),
                (SYSTEM, "ttft_session_p50"), (SIM_LONG, "ttft_long_p50"), (SIM_LONG, "itl_p99"),
            ),
        ),
        "client": Speaks(
            gains=(
                (BUSY, "gap_p50"), (BUSY, "gap_p99"), (BUSY, "health_p99"), (BUSY, "output_tokens_per_s"),
                (SIM_BUSY, "itl_p50"), (SIM_BUSY, "output_tokens_per_s"),
            ),
            costs=((BUSY, "ready"), (LONG, "itl_p50")),
        ),
        "blocks": Speaks(
            gains=(
                (SYSTEM, "prompt_tokens_computed"), (SYSTEM, "ttft_session_p50"), (SYSTEM, "peak_used_blocks"),
                (SIM_SYSTEM, "tokens_computed"), (SIM_SYSTEM, "ttft_session_p50"), (SIM_SYSTEM, "peak_used_blocks"),
            ),
            costs=((LONG, "host_p50"), (LONG, "host_p99")),
        ),
        "runner": Speaks(gains=((LONG, "host_p50"), (SYSTEM, "host_p50")), costs=((LONG, "padding_share"),)),
        "batch": Speaks(gains=((LONG, "host_p50"), (SYSTEM, "host_p50"))),
        "compile": Speaks(gains=((LONG, "itl_p50"),)),
        "async_scheduling": Speaks(
            gains=(
                (LONG, "itl_p50"), (LONG, "output_tokens_per_s"), (SYSTEM, "output_tokens_per_s"),
                (SIM_BUSY, "device_busy"), (SIM_BUSY, "itl_p50"), (SIM_BUSY, "output_tokens_per_s"),
            ),
            costs=((LONG, "num_steps"), (SIM_SYSTEM, "ttft_session_p50")),
        ),
    }
)  # fmt: skip


def stage_stories(
    stages: Mapping[str, StageReport],
    loads: Sequence[LoadReport],
    front_end: FrontEndReport | None,
    admission: Sequence[AdmissionCost],
    production: Production | None,
) -> list[StageStory]:
    """One a stage, in order. A figure that was not taken in both stages is left out."""
    tables: list[tuple[TableReport, str]] = [(load, "wall") for load in loads]
    tables += [(front_end, "wall")] if front_end else []
    tables += [(load, "simulated") for load in production.loads] if production else []
    first = next(iter(stages))
    stories = [StageStory(stage=first, above=None, moved={}, gains=[], costs=[])]
    for above, stage in pairwise(stages):
        moved = moves(stages[above], stages[stage])
        gains = _rows(tables, [key for field in moved for key in _of(field).gains], above, stage)
        costs = _preparation(stages[above], stages[stage])
        for cost in front_end.costs if front_end else ():
            costs += _boundary(cost) if cost.stage == stage else []
        for paid in admission:
            costs += [_admission(paid)] if paid.stage == stage else []
        costs += _rows(tables, [key for field in moved for key in _of(field).costs], above, stage)
        stories.append(StageStory(stage=stage, above=above, moved=moved, gains=gains, costs=costs))
    return stories


def moves(above: StageReport, stage: StageReport) -> dict[str, list[str]]:
    """Fields of the config that differ, and what the runner resolved them to where the config leaves it open."""
    before, after = _resolved(above), _resolved(stage)
    return {name: [before[name], after[name]] for name in MOVABLE if before[name] != after[name]}


def _resolved(stage: StageReport) -> dict[str, str]:
    execution = stage.engine.execution
    said = {"compile": execution.compile, "graph_mode": execution.graph_mode, "batch": execution.batch}
    return {name: str(said.get(name) or stage.config.get(name)) for name in MOVABLE}


def _of(field: str) -> Speaks:
    return EFFECTS.get(field, Speaks())


def _rows(tables: Sequence[tuple[TableReport, str]], keys: Sequence[Key], above: str, stage: str) -> list[Effect]:
    """In the order of the keys, each once."""
    rows = {(table.name, row.key): (row, clock) for table, clock in tables for row in table.rows}
    found = []
    for load, key in dict.fromkeys(keys):
        row, clock = rows.get((load, key), (None, ""))
        if row is not None and stage in row.values and above in row.values:
            before, after = row.values[above], row.values[stage]
            found.append(
                Effect(
                    load=load, key=key, label=row.label, unit=row.unit, better=row.better, clock=clock,
                    before=before, after=after,
                )
            )  # fmt: skip
    return found


def _engine(key: str, label: str, unit: str, before: float | None, after: float | None) -> Effect:
    return Effect(
        load="", key=key, label=label, unit=unit, better="lower", clock="wall", before=before, after=after
    )  # fmt: skip


def _boundary(cost: BoundaryCost) -> list[Effect]:
    above, stage, n = cost.above, cost.stage, cost.num_running
    crossing = cost.bytes_per_request_step
    return [
        _engine("boundary_step", f"a step of {n} requests, no model", "us", cost.step_s[above], cost.step_s[stage]),
        _engine("boundary_request", "added for each request in a step", "us", 0.0, cost.added_per_request_s),
        _engine(
            "boundary_bytes", "between processes, for each request in a step", "bytes", crossing[above], crossing[stage]
        ),
        _engine("boundary_start", "start-up, no model", "s", cost.start_s[above], cost.start_s[stage]),
    ]


def _admission(paid: AdmissionCost) -> Effect:
    label = f"admitting {paid.prompt_len:,} tokens that nobody shares (hashing)"
    return _engine("admission", label, "us", paid.seconds[paid.above], paid.seconds[paid.stage])


def _preparation(above: StageReport, stage: StageReport) -> list[Effect]:
    """What getting ready takes where anything is captured or compiled."""
    a, b = above.engine.execution, stage.engine.execution

    def taken() -> Iterator[Effect]:
        if a.graph_mode != b.graph_mode:
            yield _engine("capture", "capturing graphs", "s", a.capture_s, b.capture_s)
            yield _engine("graph_bytes", "graphs and their static memory", "MiB", a.graph_bytes, b.graph_bytes)
            yield _engine("num_graphs", "sizes of graphs", "", len(a.graph_sizes), len(b.graph_sizes))
        if a.compile != b.compile:
            yield _engine("compile", "compiling", "s", a.compile_s, b.compile_s)

    return list(taken())
