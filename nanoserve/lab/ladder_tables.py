"""The ladder in a terminal: one table a load, what moved in a sentence, and what the figures do not say."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve.lab.ladder_report import FrontEndReport, LadderReport, LoadReport, Production, TableReport
from nanoserve.lab.ladder_rows import Row
from nanoserve.lab.metrics import SLOW_GAP_FACTOR

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from nanoserve.lab.boundary import BoundaryCost

WORDS = (
    "TTFT: from a request's arrival to its first token. ITL: the gap between two tokens of a request. TPOT: the mean "
    "of a request's gaps. Step gap: from the end of an engine step to the start of the next while requests wait."
)
HISTORY = (
    "Honest history: vLLM v0 could chunk prefill and could cache prefixes; both were off by default, and stage v0 "
    "is that default. v1 made them the one path, on by default."
)
BUSY_LOAD = 1.0
COINCIDE = 0.02  # rows of one latency that differ by no more than that say the same
FINE_MS = 10.0  # rows below that get two decimals


def show(report: LadderReport, written: Sequence[Path], *, as_json: bool) -> None:
    """Print the report, or the file `written[0]` as it is."""
    console = _console(stderr=False)
    if as_json:
        sys.stdout.write(written[0].read_text(encoding="utf-8"))
        errors = _console(stderr=True)
        for line in [*verdict(report), *left_out(report)]:
            errors.print(line)
        return
    first = next(iter(report.stages.values())).engine
    rounds = f"median of {report.num_rounds} rounds" if report.num_rounds > 1 else "one round"
    where = f"{first.model}, {first.device}, {first.dtype}, wall clock, {rounds}, seed {report.seed}"
    console.print(WORDS)
    for load in report.tables:
        console.print()
        sizes = ", ".join(f"{name}={value}" for name, value in load.parameters.items())
        console.print(f"Load {load.name}: {sizes}")
        console.print(load_table(load, where))
        for line in sentences(load):
            console.print(f"- {line}")
    if report.production:
        _show_production(console, report.production)
    console.print()
    for line in executions(report):
        console.print(line)
    for line in [*verdict(report), *left_out(report)]:
        console.print(line)
    if (busy := report.machine.load_average_1m) is not None and busy > BUSY_LOAD:
        console.print(f"Something else was running too (load average {busy:.1f} at the start): read times with care.")
    console.print("Written:", *(str(path) for path in written), sep="\n  ")
    console.print(HISTORY)


def _show_production(console: Console, production: Production) -> None:
    console.print()
    console.print(f"SIMULATED, nothing below was measured: the same stages, {production.setup}")
    for line in [*production.assumptions, *production.not_told_apart]:
        console.print(f"- {line}")
    for load in production.loads:
        console.print()
        console.print(load_table(load, f"{load.name}: {production.setup}, virtual clock, seed {production.seed}"))
        for line in moved_figures(load):
            console.print(f"- simulated, {line}")


def _console(*, stderr: bool) -> Console:
    """rich's console; where there is no terminal to ask, wide enough for the tables."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, markup=False, width=110)


# Tables


def load_table(load: TableReport, title: str) -> Table:
    """Rows are figures, columns stages; beside each value its ratio to the first stage's, below it the rounds'
    lowest and highest."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption=load.claim, caption_justify="left")
    first, *others = load.num_runs
    several = max(load.num_runs.values()) > 1
    heading = ["median of each figure" if several else "figure"]
    heading += [f"x: against {first}"] if others else []
    heading += ["below: lowest - highest"] if several else []
    table.add_column("\n".join(heading))
    for stage in load.num_runs:
        table.add_column(stage, justify="right")
    for row, label, bold in told_apart(load):
        style = "bold" if bold else None
        cells = [_cell(row, stage, stage == first) for stage in load.num_runs]
        table.add_row(f"{label}{f' ({shown_unit(row.unit)})' if row.unit else ''}", *cells, style=style)
    return table


def told_apart(load: TableReport) -> Iterator[tuple[Row, str, bool]]:
    """Rows, their labels, and whether the claim is about them; a row that repeats one of the same latency is only
    named in that one's label."""
    rows = list(load.rows)
    while rows:
        row, *same = [rows.pop(0)]
        while rows and _coincide(row, rows[0]):
            same.append(rows.pop(0))
        label = ", ".join([row.label, *(other.label.rsplit(" ", 1)[-1] for other in same)])
        yield row, label, any(one.key in load.headlines for one in (row, *same))


def _coincide(row: Row, other: Row) -> bool:
    """Two percentiles of one latency that are within a fiftieth of each other in every stage, rounds included."""
    if row.unit != "s" or row.key.rsplit("_", 1)[0] != other.key.rsplit("_", 1)[0]:
        return False
    kinds = [(row.values, other.values), (row.lows, other.lows), (row.highs, other.highs)]
    pairs = [(mine[stage], theirs[stage]) for mine, theirs in kinds for stage in mine]
    return all(a is not None and b is not None and abs(a - b) <= COINCIDE * abs(a) for a, b in pairs)


def shown_unit(unit: str) -> str:
    return {"s": "ms", "share": "%"}.get(unit, unit)


def _cell(row: Row, stage: str, is_first: bool) -> str:
    ratio = row.ratios[stage]
    text = format_value(row, row.values[stage])
    if not is_first and row.better:
        text += f"  {'' if ratio is None else format_ratio(ratio):>7}"
    low, high = (format_value(row, figures[stage]) for figures in (row.lows, row.highs))
    return text if low == high else f"{text}\n{low} - {high}"


def format_ratio(ratio: float) -> str:
    if 0 < ratio < 0.005:
        return f"x{ratio:.1g}"
    return f"x{ratio:.2f}" if ratio < 100 else f"x{ratio:.0f}"


def format_value(row: Row, value: float | None) -> str:
    """In the unit of the table: milliseconds, per cent, or as it is."""
    return format_figure(row.unit, value, max((v for v in row.values.values() if v is not None), default=0.0))


def format_figure(unit: str, value: float | None, largest: float) -> str:
    """A figure of that unit, as fine as the largest that it stands beside."""
    if value is None:
        return "-"
    if unit == "s":
        return f"{value * 1e3:,.{2 if largest * 1e3 < FINE_MS else 1}f}"
    scale, decimals = {"us": (1e6, 1), "share": (100, 1), "bytes": (1, 1), "MiB": (2**-20, 1)}.get(unit, (1, 0))
    return f"{value * scale:,.{decimals}f}"


# Sentences


def sentences(load: TableReport) -> list[str]:
    """What moved from each stage to the next, and what it cost, or why TPOT does not show it."""
    return [*moved_figures(load), *remarks(load)]


def moved_figures(load: TableReport) -> list[str]:
    """The headlines of each stage beside those of the one above."""
    rows = {row.key: row for row in load.rows}
    moves = [(c.above, c.stage) for c in load.costs] if isinstance(load, FrontEndReport) else pairwise(load.num_runs)
    return [
        f"{above} -> {stage}: {'; '.join(_move(rows[key], above, stage) for key in load.headlines)}."
        for above, stage in moves
    ]


def remarks(load: TableReport) -> list[str]:
    """What the table does not say."""
    if isinstance(load, FrontEndReport):
        return [_cost(cost, load) for cost in load.costs]
    if isinstance(load, LoadReport):
        return [*(_replays(stage, load) for stage in load.replays), *_why_not_tpot(load)]
    return []


def _move(row: Row, above: str, stage: str) -> str:
    unit = f" {shown_unit(row.unit)}" if row.unit else ""
    before, after = row.values[above], row.values[stage]
    change = f" ({format_ratio(after / before)})" if before and after is not None else ""
    return f"{row.label} {format_value(row, before)} -> {format_value(row, after)}{unit}{change}"


def _why_not_tpot(load: LoadReport) -> list[str]:
    first = next(iter(load.medians))
    metrics = load.medians[first].groups[load.watched]
    if not metrics.itl_s or not metrics.tpot_s:
        return []
    return [
        f"TPOT is a mean per request, so a freeze is spread over all of its tokens: under {first} the worst "
        f"TPOT is {metrics.tpot_s.max * 1e3:,.1f} ms, while the longest gap (ITL max) is "
        f"{metrics.itl_s.max * 1e3:,.1f} ms. The share of gaps over {SLOW_GAP_FACTOR} x the median says how many "
        "are slow, not how slow."
    ]


def _cost(cost: BoundaryCost, load: FrontEndReport) -> str:
    """What the split costs: a step, a request, bytes, start-up."""
    above, stage = cost.above, cost.stage
    crossing = ""
    if (num_bytes := cost.bytes_per_request_step[stage]) is not None:
        before = cost.bytes_per_request_step[above] or 0
        crossing = f"{num_bytes:.1f} bytes a request cross between processes in a step, {before:.1f} before; "
    ready = load.medians
    return (
        f"What {stage} costs against {above}, of an engine without a model and {cost.num_running} requests: a step "
        f"takes {cost.step_s[above] * 1e6:,.0f} -> {cost.step_s[stage] * 1e6:,.0f} us, {cost.added_step_s * 1e6:+,.0f} "
        f"us a step, {cost.added_per_request_s * 1e6:+,.1f} us a request; {crossing}it is up after "
        f"{cost.start_s[above]:.2f} -> {cost.start_s[stage]:.2f} s (the server with its model after "
        f"{ready[above].ready_s:.2f} -> {ready[stage].ready_s:.2f} s)."
    )


def _replays(stage: str, load: LoadReport) -> str:
    graphs = dict(load.replays[stage])
    eager = graphs.pop("", 0)
    counts = ", ".join(f"{graph} ({count:,} times)" for graph, count in graphs.items())
    return f"{stage} replayed, over {load.num_runs[stage]} runs: {counts}; {eager:,} steps ran as they were."


def executions(report: LadderReport) -> list[str]:
    """How the stages execute, those that do alike in one line."""
    alike: dict[str, list[str]] = {}
    for name, stage in report.stages.items():
        alike.setdefault(str(stage.engine.execution), []).append(name)
    return [f"{', '.join(names)}: {execution}." for execution, names in alike.items()]


def verdict(report: LadderReport) -> list[str]:
    """Whether all runs emitted the same greedy tokens, one line a load."""
    lines = []
    for load in report.tables:
        runs = sum(load.num_runs.values())
        if load.first_difference is None:
            lines.append(f"{load.name}: greedy tokens are identical in all {runs} runs ({', '.join(load.num_runs)}).")
        else:
            coarse = {stage.engine.dtype for stage in report.stages.values()} - {"float32"}
            hint = f" Rounding in {', '.join(sorted(coarse))} may be why: try --dtype float32." if coarse else ""
            lines.append(f"{load.name}: greedy tokens DIFFER: {load.first_difference}.{hint}")
    return lines


def left_out(report: LadderReport) -> list[str]:
    return [f"{load}: left out, {why}" for load, why in report.left_out.items()]
