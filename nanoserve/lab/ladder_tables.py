"""The ladder in a terminal: one table a load, what moved in a sentence, and what the figures do not say."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from nanoserve.lab.ladder_report import LadderReport, LoadReport, Row
from nanoserve.lab.metrics import SLOW_GAP_FACTOR

if TYPE_CHECKING:
    from rich.table import Table

HISTORY = (
    "Honest history: vLLM v0 could chunk prefill and could cache prefixes; both were off by default, and stage v0 "
    "is that default. v1 made them the one path, on by default."
)


def load_table(load: LoadReport, title: str) -> Table:
    """Rows are figures, columns stages; beside each value its ratio to the first stage's."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption=load.claim, caption_justify="left")
    first, *others = load.medians
    table.add_column(f"median of each figure{f' (x: against {first})' if others else ''}")
    for stage in load.medians:
        table.add_column(stage, justify="right")
    for row in load.rows:
        style = "bold" if row.key in load.headlines else None
        cells = [_cell(row, stage, stage == first) for stage in load.medians]
        table.add_row(f"{row.label}{f' ({_shown_unit(row)})' if row.unit else ''}", *cells, style=style)
    return table


def _shown_unit(row: Row) -> str:
    return {"s": "ms", "share": "%"}.get(row.unit, row.unit)


def _cell(row: Row, stage: str, is_first: bool) -> str:
    ratio = row.ratios[stage]
    text = format_value(row, stage)
    return text if is_first else f"{text}  {'' if ratio is None else format_ratio(ratio):>7}"


def format_ratio(ratio: float) -> str:
    return f"x{ratio:.2f}" if ratio < 100 else f"x{ratio:.0f}"


def format_value(row: Row, stage: str) -> str:
    """In the unit of the table: milliseconds, per cent, or as it is."""
    value = row.values[stage]
    if value is None:
        return "-"
    if row.unit == "s":
        return f"{value * 1e3:,.1f}"
    if row.unit == "share":
        return f"{value * 100:.1f}"
    return f"{value:,.0f}"


def sentences(load: LoadReport) -> list[str]:
    """What moved from each stage to the next, and why TPOT does not show it."""
    rows = {row.key: row for row in load.rows}
    told = []
    for above, stage in pairwise(load.medians):
        moves = [_move(rows[key], above, stage) for key in load.headlines]
        told.append(f"{above} -> {stage}: {'; '.join(moves)}.")
    first = next(iter(load.medians))
    metrics = load.medians[first].groups[load.watched]
    if metrics.itl_s and metrics.tpot_s:
        told.append(
            f"TPOT is a mean per request, so a freeze is spread over all of its tokens: under {first} the worst "
            f"TPOT is {metrics.tpot_s.max * 1e3:,.1f} ms, while the longest gap (ITL max) is "
            f"{metrics.itl_s.max * 1e3:,.1f} ms. The share of gaps over {SLOW_GAP_FACTOR} x the median says how many "
            "are slow, not how slow."
        )
    return told


def _move(row: Row, above: str, stage: str) -> str:
    unit = f" {_shown_unit(row)}" if row.unit else ""
    before, after = row.values[above], row.values[stage]
    change = f" ({format_ratio(after / before)})" if before and after is not None else ""
    return f"{row.label} {format_value(row, above)} -> {format_value(row, stage)}{unit}{change}"


def verdict(report: LadderReport) -> list[str]:
    """Whether all runs emitted the same greedy tokens, one line a load."""
    lines = []
    for load in report.loads:
        runs = sum(len(rounds) for rounds in load.rounds.values())
        if load.first_difference is None:
            lines.append(f"{load.name}: greedy tokens are identical in all {runs} runs ({', '.join(load.medians)}).")
        else:
            coarse = {stage.engine.dtype for stage in report.stages.values()} - {"float32"}
            hint = f" Rounding in {', '.join(sorted(coarse))} may be why: try --dtype float32." if coarse else ""
            lines.append(f"{load.name}: greedy tokens DIFFER: {load.first_difference}.{hint}")
    return lines
