"""Pictures of runs, each from the runs' own records alone; every function returns a matplotlib `Figure`.

A stage has the same colour, marker and line style in every chart, darker for earlier stages: charts read in
grey and without colour vision. Titles name load, device, clock, seed and round; the caption the one thing to see.
matplotlib is imported when a chart is drawn, through `Figure` and not pyplot: no display and no global state.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from nanoserve.lab.metrics import Activity, Spread, measure, percentile, request_times, spans, step_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nanoserve.record import StepRecord

DPI = 110
Runs = Mapping[str, "Sequence[StepRecord]"]  # stage -> the records of one of its runs


@dataclass(frozen=True, slots=True)
class Look:
    """How a stage is drawn."""

    colour: str
    marker: str
    line: str | tuple[int, tuple[int, ...]]  # matplotlib's linestyle


STAGE_LOOKS: Mapping[str, Look] = MappingProxyType(
    {
        "v0": Look("#332288", "o", "-"),
        "chunked": Look("#a8323e", "s", "--"),
        "multiprocess": Look("#2a8a4a", "^", "-."),
        "shared": Look("#3fa9c9", "D", ":"),
        "v1": Look("#e0b83c", "v", (0, (5, 1, 1, 1, 1, 1))),
    }
)
OTHER_LOOK = Look("#777777", "x", "-")

ACTIVITY_COLOURS: Mapping[Activity, str] = MappingProxyType(
    {
        Activity.PREFILL: "#b5440d",
        Activity.DECODE: "#7fb7e0",
        Activity.WAITING: "#e4e4e4",
        Activity.PREEMPTED: "#222222",
    }
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What every title names: where and on what the runs were made."""

    load: str
    device: str
    clock: str  # "wall" or "simulated"
    seed: int
    round: str = ""  # which of several is shown; "": there is one

    def title(self, what: str) -> str:
        where = f"load {self.load}, {self.device}, {self.clock} clock, seed {self.seed}"
        return f"{what}\n{where}{f', {self.round}' if self.round else ''}"


def look_of(stage: str) -> Look:
    return STAGE_LOOKS.get(stage, OTHER_LOOK)


def itl_strip(runs: Runs, groups: Mapping[str, str], watched: str, setting: Setting) -> Figure:
    """Every gap between two tokens of the watched group, a row a stage, log axis; P50, P99 and max marked."""
    gaps_ms = {stage: _gaps_ms(records, groups, watched) for stage, records in runs.items()}
    xlabel = f"gap between two tokens of a {watched} request (ms, log scale)"
    return millisecond_strip(
        gaps_ms, xlabel, setting, "Inter-token latency", "The last mark of a row is its longest freeze"
    )


def millisecond_strip(
    values_ms: Mapping[str, Sequence[float]], xlabel: str, setting: Setting, what: str, last_mark: str
) -> Figure:
    """The same of any values, stage -> milliseconds; `last_mark` says what the largest is."""
    figure = _strips(values_ms, xlabel)
    longest = ", ".join(f"{stage} {max(values):,.0f} ms" for stage, values in values_ms.items())
    return _finish(figure, setting, what, f"{last_mark}: {longest}.")


def gap_strip(gaps_s: Mapping[str, Sequence[float]], setting: Setting) -> Figure:
    """Every gap between two steps while requests wait (stage -> seconds), drawn in the same way."""
    gaps_ms = {stage: [gap * 1e3 for gap in gaps] for stage, gaps in gaps_s.items()}
    figure = _strips(gaps_ms, "gap between the end of a step and the start of the next (ms, log scale)")
    middle = ", ".join(f"{stage} {percentile(values, 50):,.2f} ms" for stage, values in gaps_ms.items())
    caption = f"In a gap the engine computes nothing, though requests wait for it. P50: {middle}."
    return _finish(figure, setting, "Gap between two steps under a busy front end", caption)


def step_timeline(runs: Runs, setting: Setting) -> Figure:
    """A panel a stage, a lane a request, a cell a step: prefill (or a chunk), decode, waiting, preempted."""
    lanes = max(len(request_times(records)) for records in runs.values())
    figure = _figure(height=1.6 + len(runs) * min(0.9 + 0.13 * lanes, 3.2))
    seen: set[Activity] = set()
    for index, (stage, records) in enumerate(runs.items()):
        ax = figure.add_subplot(len(runs), 1, index + 1, sharex=figure.axes[0] if index else None)
        seen |= _timeline(ax, records)
        ax.set_ylabel(stage, fontweight="bold")
        ax.tick_params(labelbottom=index == len(runs) - 1)
    figure.axes[-1].set_xlabel("time since the first arrival (s)")
    figure.axes[-1].set_xlim(0, max(records[-1].end_s - _start_s(records) for records in runs.values()))
    _activity_legend(figure, [activity for activity in Activity if activity in seen])
    widest = {stage: max(step_times(records)) for stage, records in runs.items()}
    steps = ", ".join(f"{stage} {width * 1e3:,.0f} ms" for stage, width in widest.items())
    caption = f"A wide cell is a long step, which all of its lanes sit through. Longest step: {steps}."
    return _finish(figure, setting, "What every request did in every step", caption)


def blocks_in_use(runs: Runs, setting: Setting) -> Figure:
    """KV blocks in use over time, a line a stage; a step's blocks are taken at its start."""
    figure = _figure(height=3.6)
    ax = figure.add_subplot()
    peaks = {}
    for stage, records in runs.items():
        look, start_s = look_of(stage), _start_s(records)
        blocks = [record.num_used_blocks for record in records]
        peaks[stage] = max(blocks)
        times = [record.start_s - start_s for record in records] + [records[-1].end_s - start_s]
        ax.step(
            times,
            [*blocks, 0],
            where="post",
            color=look.colour,
            linestyle=look.line,
            linewidth=1.8,
            label=stage,
        )
    ax.set_xlabel("time since the first arrival (s)")
    ax.set_ylabel("KV blocks in use")
    ax.set_ylim(bottom=0)
    ax.set_xlim(left=0)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    caption = "The height of a line is memory. Peak: " + ", ".join(f"{s} {n:,}" for s, n in peaks.items()) + " blocks."
    return _finish(figure, setting, "KV blocks in use", caption)


def tokens_computed(runs: Runs, setting: Setting) -> Figure:
    """Prompt tokens computed, a bar a stage; hatched, those that were found in the cache instead."""
    figure = _figure(height=1.6 + 0.6 * len(runs))
    ax = figure.add_subplot()
    computed = {}
    for row, (stage, records) in enumerate(runs.items()):
        metrics = measure(records)
        computed[stage] = metrics.prompt_tokens_computed
        saved = max(metrics.prompt_tokens - computed[stage], 0)
        colour = look_of(stage).colour
        ax.barh(row, computed[stage], color=colour, height=0.6)
        ax.barh(row, saved, left=computed[stage], facecolor="none", edgecolor=colour, hatch="///", height=0.6)
        ax.annotate(
            f"{computed[stage]:,}",
            (computed[stage] + saved, row),
            (5, 0),
            textcoords="offset points",
            va="center",
        )
    ax.set_yticks(range(len(runs)), labels=list(runs))
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.set_xlabel("prompt tokens: computed (solid), found in the cache (hatched)")
    (first, most), *others = computed.items()
    caption = f"{first} computed {most:,} tokens."
    if others:
        last, least = others[-1]
        caption = f"Compare the solid parts: {last} computed {least / most:.0%} of what {first} did."
    return _finish(figure, setting, "Prompt tokens computed", caption)


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(9, height), dpi=DPI, layout="constrained")


def _strips(values_ms: Mapping[str, Sequence[float]], xlabel: str) -> Figure:
    """A row of dots a stage."""
    figure = _figure(height=1.7 + 0.9 * len(values_ms))
    ax = figure.add_subplot()
    for row, (stage, values) in enumerate(values_ms.items()):
        _strip(ax, row, values, look_of(stage))
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(_plain)
    ax.set_yticks(range(len(values_ms)), labels=list(values_ms))
    ax.set_ylim(len(values_ms) - 0.4, -0.7)
    ax.margins(x=0.1)
    ax.set_xlabel(xlabel)
    ax.grid(axis="x", alpha=0.3)
    return figure


NEAR = 1.6  # on a log axis: labels of values that are closer run into each other
CAPTION_WIDTH = 120  # characters across a figure


def _finish(figure: Figure, setting: Setting, what: str, caption: str) -> Figure:
    figure.suptitle(setting.title(what), x=0.01, ha="left", fontsize=11)
    lines = textwrap.fill(caption, CAPTION_WIDTH)
    figure.supxlabel(lines, x=0.01, ha="left", fontsize=9, style="italic")
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def _plain(value: float, _: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _start_s(records: Sequence[StepRecord]) -> float:
    return min(r.arrival_s for record in records for r in record.arrivals)


def _gaps_ms(records: Sequence[StepRecord], groups: Mapping[str, str], watched: str) -> list[float]:
    return [gap * 1e3 for r in request_times(records).values() if groups.get(r.id) == watched for gap in r.itl_s]


def _strip(ax: Axes, row: int, gaps_ms: Sequence[float], look: Look) -> None:
    spread = Spread.of(gaps_ms)
    assert spread is not None, "there is no gap to draw"
    jitter = [((i * 0.618034) % 1 - 0.5) * 0.5 for i in range(len(gaps_ms))]  # evenly spread, the same every time
    ax.scatter(
        gaps_ms,
        [row + j for j in jitter],
        s=9,
        marker=look.marker,
        color=look.colour,
        alpha=0.35,
        linewidths=0,
    )
    ax.vlines([spread.p50, spread.p99, spread.max], row - 0.36, row + 0.36, color="black", linewidth=1.2)
    for text, value in _mark_labels(spread):
        ax.annotate(text, (value, row - 0.38), ha="center", va="bottom", fontsize=8)


def _mark_labels(spread: Spread) -> list[tuple[str, float]]:
    """What stands above the marks of a strip, and where. Those that would run into each other are one, each with its
    number; equal ones share it."""
    labels: list[tuple[str, float]] = []
    for name, value in (("P50", spread.p50), ("P99", spread.p99), ("max", spread.max)):
        number = f" {value:,.{2 if value < 10 else 1}f}"
        text = name + number
        if labels and value < NEAR * labels[-1][1]:
            text = f"{labels.pop()[0].removesuffix(number)}, {text}"
        labels.append((text, value))
    return labels


def _timeline(ax: Axes, records: Sequence[StepRecord]) -> set[Activity]:
    """Draws one run; returns the activities in it."""
    start_s = _start_s(records)
    rows = {request_id: row for row, request_id in enumerate(request_times(records))}
    cells: dict[tuple[int, Activity], list[tuple[float, float]]] = {}
    begins = _begins(records)
    for span in spans(records):
        begin_s = max(span.start_s, begins[span.step])
        cell = (begin_s - start_s, span.end_s - begin_s)
        cells.setdefault((rows[span.request_id], span.activity), []).append(cell)
    for (row, activity), cell_list in cells.items():
        ax.broken_barh(
            cell_list,
            (row - 0.42, 0.84),
            facecolors=ACTIVITY_COLOURS[activity],
            edgecolors="white",
            linewidths=0.2,
        )
    labels = [request_id if len(rows) <= 12 or row % 4 == 0 else "" for request_id, row in rows.items()]
    ax.set_yticks(range(len(rows)), labels=labels, fontsize=7)
    ax.invert_yaxis()
    return {activity for _, activity in cells}


def _begins(records: Sequence[StepRecord]) -> dict[int, float]:
    """Step -> when it began to run: one that was decided ahead stands behind the step before it, and not on it."""
    begins: dict[int, float] = {}
    free_s = float("-inf")
    for record in records:
        begins[record.step] = min(max(record.start_s, free_s), record.end_s)
        free_s = record.end_s
    return begins


def _activity_legend(figure: Figure, activities: Sequence[Activity]) -> None:
    from matplotlib.patches import Patch

    names = {Activity.PREFILL: "prefill, whole or a chunk"}
    handles = [Patch(color=ACTIVITY_COLOURS[a], label=names.get(a, a.value)) for a in activities]
    figure.axes[0].legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
    )
