"""The pictures of the lessons on processes: steps and gaps, who holds a lock, a ring of bytes, a border's costs.

Colours, captions and titles are those of charts.py. A figure takes what was measured, simulated or computed by a toy,
and a `Setting` that its title names. Laws: tests/test_lesson_charts.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nanoserve.lab.charts import OTHER_LOOK, Setting, _figure, _finish, look_of
from nanoserve.lab.lesson_charts import EMPTY, PREFIX_COLOURS, log_ticks
from nanoserve.lab.metrics import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_BINS, MIN_PER_DECADE = 24, 8  # about so many bins, but no coarser ones
ROUNDING = 1e-9  # of a logarithm: a value at an edge is inside
SHORTEST_MS = 0.01  # what is shorter is counted as this long
LANES: Mapping[str, str] = {"step": "#5b3a8e", "operation": "#cbb9e8", "front end": "#777777"}  # no activity's colours


class Hold(NamedTuple):
    """Somebody does something for a while; milliseconds. `who`: a key of `LANES`."""

    who: str
    start_ms: float
    length_ms: float


class Unread(NamedTuple):
    """Bytes of a ring: `start` counts all that were ever written before them."""

    label: str
    start: int
    length: int


class Border(NamedTuple):
    """What a layout costs, of an engine without a model."""

    bytes_per_step: int  # that cross between processes
    step_us: float
    start_s: float


def gap_histogram(gaps_s: Mapping[str, Sequence[float]], setting: Setting) -> Figure:
    """A panel a run: how many gaps between two steps were how long (log axis), P50 and max marked."""
    figure = _histograms(gaps_s, "gap between the end of a step and the start of the next (ms, log scale)", "gaps")
    caption = (
        f"In a gap the engine computes nothing, though requests wait for it. All gaps together: {_totals(gaps_s)}."
    )
    return _finish(figure, setting, "Gaps between steps", caption)


def step_histogram(steps_s: Mapping[str, Sequence[float]], setting: Setting) -> Figure:
    """The same for how long the steps were."""
    figure = _histograms(steps_s, "time of a step (ms, log scale)", "steps")
    caption = f"A step that waits for the lock computes no more than one that does not. All steps: {_totals(steps_s)}."
    return _finish(figure, setting, "How long the steps were", caption)


def _totals(times_s: Mapping[str, Sequence[float]]) -> str:
    return ", ".join(f"{name} {sum(times) * 1e3:,.0f} ms" for name, times in times_s.items())


def _histograms(times_s: Mapping[str, Sequence[float]], xlabel: str, counted: str) -> Figure:
    figure = _figure(height=1.5 + 1.35 * len(times_s))
    axes = figure.subplots(len(times_s), 1, sharex=True, squeeze=False)[:, 0]
    times_ms = {name: [max(time_s * 1e3, SHORTEST_MS) for time_s in times] for name, times in times_s.items()}
    edges = bin_edges([time_ms for times in times_ms.values() for time_ms in times])
    axes[0].set_xscale("log")
    axes[0].set_xlim(edges[0], edges[-1])
    for ax, (name, times) in zip(axes, times_ms.items(), strict=True):
        spread = Spread.of(times)
        assert spread is not None, f"{name} has nothing to draw"
        ax.hist(times, bins=edges, color=look_of(name).colour, edgecolor="white", linewidth=0.5)
        ax.set_ylabel(f"{name}\n{counted}", fontsize=9)
        ax.margins(y=0.35)
        _mark(ax, "P50", spread.p50)
        if spread.max > 1.5 * spread.p50:
            _mark(ax, "max", spread.max)
    log_ticks(axes[-1].xaxis)
    axes[-1].set_xlabel(xlabel)
    return figure


def bin_edges(values: Sequence[float]) -> list[float]:
    """Equal steps on a log axis, from below the smallest value to above the largest; values > 0."""
    low, high = math.log10(min(values)), math.log10(max(values))
    per_decade = max(MIN_PER_DECADE, min(NUM_BINS, math.ceil(NUM_BINS / max(high - low, 0.1))))
    first, last = math.floor(low * per_decade - ROUNDING), math.floor(high * per_decade + ROUNDING) + 1
    return [10 ** (place / per_decade) for place in range(first, last + 1)]


def _mark(ax: Axes, name: str, value: float) -> None:
    ax.axvline(value, color="black", linewidth=1.2)
    text = f"{name} {value:,.{2 if value < 10 else 1}f}"
    at_edge = ax.transAxes.inverted().transform(ax.transData.transform((value, 0)))[0] > 0.85
    ax.annotate(
        text,
        (value, 0.98),
        (-4 if at_edge else 4, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right" if at_edge else "left",
        va="top",
        fontsize=8,
    )


def lock_lanes(runs: Mapping[str, Sequence[Hold]], setting: Setting) -> Figure:
    """A panel a run, a lane each for the step's Python, its operations and the front end's Python."""
    figure = _figure(height=1.5 + 1.2 * len(runs))
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, holds) in zip(axes, runs.items(), strict=True):
        for row, (who, colour) in enumerate(LANES.items()):
            bars = [(hold.start_ms, hold.length_ms) for hold in holds if hold.who == who]
            ax.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour)
        ax.set_yticks(range(len(LANES)), labels=["step (lock)", "operation", "front end (lock)"], fontsize=8)
        ax.set_ylim(len(LANES) - 0.4, -0.6)
        ax.set_title(name, fontsize=9, loc="left")
        ax.grid(axis="x", alpha=0.3)
    axes[0].set_xlim(left=0)
    axes[-1].set_xlabel("time (ms)")
    ends = ", ".join(f"{name} {step_end(holds):,.1f} ms" for name, holds in runs.items())
    caption = (
        "Dark violet and grey need the lock, so they never overlap; pale violet does not need it. The step ends after: "
        f"{ends}."
    )
    return _finish(figure, setting, "Who holds the interpreter lock", caption)


def step_end(holds: Sequence[Hold]) -> float:
    """When the step has done all of its own; milliseconds."""
    return max(hold.start_ms + hold.length_ms for hold in holds if hold.who != "front end")


def ring_map(moments: Mapping[str, Sequence[Unread]], capacity: int, setting: Setting) -> Figure:
    """A row a moment, from the first to the last byte of the ring: what is unread, coloured by message."""
    figure = _figure(height=1.4 + 0.55 * len(moments))
    ax = figure.add_subplot()
    labels = list(dict.fromkeys(unread.label for row in moments.values() for unread in row))
    for row, messages in enumerate(moments.values()):
        ax.broken_barh([(0, capacity)], (row - 0.35, 0.7), facecolors=EMPTY)
        for message in messages:
            colour = PREFIX_COLOURS[labels.index(message.label) % len(PREFIX_COLOURS)]
            for start, length in parts(message, capacity):
                ax.broken_barh([(start, length)], (row - 0.35, 0.7), facecolors=colour, alpha=0.7, edgecolor="black")
                ax.text(start + length / 2, row, message.label, ha="center", va="center", fontsize=8)
    ax.set_yticks(range(len(moments)), labels=list(moments), fontsize=8)
    ax.set_ylim(len(moments) - 0.5, -0.5)
    ax.set_xlim(0, capacity)
    ax.set_xlabel("byte of the ring")
    caption = "Whoever writes goes on at the beginning when the end is reached: a message may be in two parts."
    return _finish(figure, setting, "A ring of bytes", caption)


def parts(message: Unread, capacity: int) -> list[tuple[int, int]]:
    """Where in the ring it lies: (start, length), in two parts where it goes over the end."""
    start = message.start % capacity
    first = min(message.length, capacity - start)
    return [(start, first), *([(0, message.length - first)] if first < message.length else [])]


BORDER_LABELS = {
    "bytes_per_step": "bytes that cross in a step",
    "step_us": "time of a step (µs)",
    "start_s": "time to start (s)",
}


def border_costs(layouts: Mapping[str, Border], setting: Setting) -> Figure:
    """A bar a layout in each of three panels: bytes a step, microseconds a step, seconds to start. Layouts are three at
    most: those of stages `chunked` and `multiprocess`, in their colours, and one that is no stage's."""
    figure = _figure(height=1.6 + 0.4 * len(layouts))
    panels = figure.subplots(1, len(BORDER_LABELS))
    colours = [look.colour for look in (look_of("chunked"), look_of("multiprocess"), OTHER_LOOK)][: len(layouts)]
    for ax, (field, label) in zip(panels, BORDER_LABELS.items(), strict=True):
        values = [getattr(border, field) for border in layouts.values()]
        ax.barh(list(layouts), values, color=colours, height=0.6)
        for row, value in enumerate(values):
            text = f"{value:.2f}" if field == "start_s" else f"{value:,.0f}"
            ax.annotate(text, (value, row), (3, 0), textcoords="offset points", va="center", fontsize=8)
        ax.invert_yaxis()
        ax.margins(x=0.3)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        ax.set_xlabel(label, fontsize=9)
        ax.tick_params(labelsize=8, labelleft=ax is panels[0])
    caption = "The time is that of everything but the model, which takes milliseconds on top of it in every layout."
    return _finish(figure, setting, "What a border between processes costs", caption)
