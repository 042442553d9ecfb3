"""The pictures behind the widgets: what one position of a control shows. Pure: the same value, the same picture.

Axes do not move with a control, so that the eye sees what does. The parts are those of charts.py and
lesson_charts.py. Knows neither ipywidgets nor a notebook. Laws: tests/test_widgets.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from nanoserve.lab.charts import (
    ACTIVITY_COLOURS,
    Setting,
    _activity_legend,
    _figure,
    _finish,
    _plain,
    _timeline,
    look_of,
)
from nanoserve.lab.gpus import Memory, format_bytes, session_blocks
from nanoserve.lab.lesson_charts import COLUMNS, OWN, PREFIX_COLOURS, _draw_gaps, _draw_map, log_ticks
from nanoserve.lab.metrics import Activity, request_times, spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nanoserve.lab.block_history import BlockMap
    from nanoserve.lab.rehearsal import Rehearsal
    from nanoserve.record import StepRecord

Range = tuple[float, float]


def gap_range_ms(runs: Iterable[Rehearsal]) -> Range:
    """Around every gap of the watched requests of all these runs, with room for labels."""
    gaps_us = [gap for run in runs for member in run.run.members(run.run.workload.watched) for gap in member.gaps]
    return 0.75 * min(gaps_us) / 1000, 1.8 * max(gaps_us) / 1000


def run_picture(stage: str, label: str, run: Rehearsal, window_s: Range, gaps_ms: Range) -> Figure:
    """A part of a run, a lane a request and a cell a step; below it every gap of the run between two tokens of a
    watched request. `stage` gives the colour."""
    load = run.run.workload
    others = sorted({group for group in load.groups.values() if group != load.watched})
    figure = _figure(height=4.9)
    lanes, strip = figure.subplots(2, 1, height_ratios=(3, 1))
    seen = _timeline(lanes, run.records)
    _activity_legend(figure, [activity for activity in Activity if activity in seen])
    lanes.set_xlim(window_s)
    lanes.set_xlabel(f"time since the first arrival (s){_part_of(run, window_s)}")
    times = request_times(run.records).values()
    gaps = [gap * 1e3 for r in times if load.groups[r.id] == load.watched for gap in r.itl_s]
    _draw_gaps(strip, 0, gaps, look_of(stage))
    strip.set_xscale("log")
    strip.set_xlim(gaps_ms)
    log_ticks(strip.xaxis)
    strip.set_ylim(0.5, -0.95)
    strip.set_yticks([])
    strip.set_xlabel(f"gap between two tokens of a {load.watched} request, all of the run (ms, log scale)")
    told = [f"longest gap {max(gaps):,.1f} ms"]
    for group in others:
        first = run.run.ttft_us(group)
        told += [f"TTFT of {group} prompts {first.p50 / 1000:,.0f} ms"] if first else []
    caption = (
        "Grey lanes wait. A dot below is a gap; the last mark is the longest: a wide cell above, which all sit through."
    )
    return _finish(figure, run.setting, f"{label}: {', '.join(told)}", caption)


def _part_of(run: Rehearsal, window_s: Range) -> str:
    """What of a run is in the window, where that is not all."""
    start_s = min(each.arrival_s for record in run.records for each in record.arrivals)
    end_s = run.records[-1].end_s - start_s
    if window_s[0] <= 0 and window_s[1] >= end_s:
        return ""
    first = f"from {window_s[0]:.1f} to" if window_s[0] > 0 else "the first"
    return f": {first} {window_s[1]:.1f} s of {end_s:.1f} s, the rest is not shown"


def step_picture(
    records: Sequence[StepRecord], place: int, blocks: BlockMap, num_blocks: int, setting: Setting
) -> Figure:
    """The run with one of its steps marked, and beside it the first `num_blocks` KV blocks during that step."""
    record = records[place]
    start_s = min(r.arrival_s for each in records for r in each.arrivals)
    rows = -(-num_blocks // COLUMNS)
    figure = _figure(height=max(3.4, 1.7 + 0.27 * rows))
    lanes, squares = figure.subplots(1, 2, width_ratios=(1, 1))
    seen = _timeline(lanes, records)
    lanes.axvspan(record.start_s - start_s, record.end_s - start_s, facecolor="none", edgecolor="black", linewidth=1.6)
    lanes.set_xlim(0, records[-1].end_s - start_s)
    lanes.set_xlabel("time since the first arrival (s)")
    _activity_legend(figure, [activity for activity in Activity if activity in seen])
    _draw_map(squares, blocks, num_blocks)
    squares.set_aspect(1.5, anchor="N")
    squares.set_xlabel("KV blocks; number: tables that hold it", fontsize=9)
    held, cached = len(blocks.refs), len(blocks.cached - set(blocks.refs)) if blocks.cached else 0
    computed = sum(record.num_scheduled_tokens.values())
    what = f"Step {record.step}: {computed:,} tokens computed, {held} blocks held, {cached} only cached"
    caption = (
        "The framed column is the step. A coloured block holds a common beginning, a grey one what one request has to "
        "itself; '-' is held by nobody and can still be found."
    )
    _finish(figure, setting, what, caption)
    squares.spines[:].set_visible(False)
    return figure


def memory_picture(memory: Memory, num_sessions: int, prefix_len: int, own_len: int) -> Figure:
    """What the weights take, and what the KV of so many sessions would: a copy of the prefix each, or one for all."""
    total = memory.use * memory.total_bytes
    weights = memory.model.weight_bytes(memory.dtype)
    alone, own = session_blocks(prefix_len, own_len, memory.block_size)
    needs = {
        "private": num_sessions * alone * memory.block_bytes,
        "shared": (prefix_len // memory.block_size + num_sessions * own) * memory.block_bytes,
    }
    figure = _figure(height=2.9)
    ax = figure.add_subplot()
    end = 1.6 * max(total, weights)
    for row, (name, kv_bytes) in enumerate(needs.items()):
        _memory_bar(ax, row, (weights, kv_bytes), end, OWN if name == "private" else PREFIX_COLOURS[0])
    ax.axvline(total, color="black", linewidth=1.6)
    ax.annotate(f" {format_bytes(total)} may be used", (total, -0.62), va="center", fontsize=8)
    ax.set_xlim(0, end)
    ax.set_ylim(1.5, -0.8)
    ax.set_yticks(range(2), labels=[f"{name}\nKV {format_bytes(size)}" for name, size in needs.items()])
    ax.xaxis.set_major_formatter(lambda value, _: f"{value / 1e9:,.0f}")
    ax.set_xlabel("GB: weights (dark), KV of all sessions (light; an arrow where it goes on)")
    load = f"{num_sessions:,} sessions of {prefix_len:,} + {own_len} tokens"
    setting = Setting(load, f"{memory.tp} x {memory.gpu.name}, {memory.dtype}", "simulated", 0)
    return _finish(figure, setting, f"{memory.model.name}: {_fitting(memory, prefix_len, own_len)}", _left(memory))


def _memory_bar(ax: Axes, row: int, sizes: tuple[float, float], end: float, colour: str) -> None:
    weights, kv_bytes = sizes
    ax.barh(row, weights, color="#555555", height=0.6)
    ax.barh(row, min(kv_bytes, end - weights), left=weights, color=colour, height=0.6)
    if weights + kv_bytes > end:
        ax.annotate("\N{BLACK RIGHT-POINTING TRIANGLE}", (end * 0.985, row), ha="center", va="center", fontsize=14)


def _fitting(memory: Memory, prefix_len: int, own_len: int) -> str:
    try:
        private, shared = memory.sessions(prefix_len, own_len)
    except ValueError:
        return "the weights alone do not fit"
    return f"{private:,} sessions fit with private copies, {shared:,} with a shared prefix"


def _left(memory: Memory) -> str:
    try:
        return f"{memory.num_blocks:,} blocks of {memory.block_size} tokens fit beside the weights."
    except ValueError as error:
        return str(error)


def live_picture(records: Sequence[StepRecord], num_blocks: int, setting: Setting, is_stopped: bool = False) -> Figure:
    """A run so far: KV blocks in use, tokens of each step, gaps between tokens; over the time since it began."""
    figure = _figure(height=5)
    blocks, batch, gaps = figure.subplots(3, 1, sharex=True)
    start_s = records[0].start_s if records else 0.0
    ends = [record.end_s - start_s for record in records]
    blocks.step(ends, [record.num_used_blocks for record in records], where="post", color=PREFIX_COLOURS[0])
    blocks.set_ylabel(f"KV blocks\nof {num_blocks - 1:,}" if records else "KV blocks")
    blocks.set_ylim(bottom=0)
    if records:
        blocks.yaxis.set_major_formatter(_plain)
    else:
        blocks.set_yticks([0])
    _draw_batch(batch, records, ends)
    batch.set_ylabel("tokens\na step (log)")
    times = list(request_times(records).values())
    points = [(t - start_s, gap * 1e3) for r in times for t, gap in zip(r.token_s[1:], r.itl_s, strict=True)]
    gaps.set_yscale("log")
    gaps.scatter(*zip(*points, strict=True) if points else ((), ()), s=4, color="#332288", alpha=0.4, linewidths=0)
    gaps.set_ylabel("gap between\ntokens (ms, log)")
    gaps.set_ylim(0.1, 2 * max([50.0, *(gap for _, gap in points)]))
    log_ticks(gaps.yaxis, subs=(1,))
    gaps.set_xlabel("time since the first step (s)")
    gaps.set_xlim(left=0, right=None if records else 1)
    for ax in figure.axes:
        ax.grid(alpha=0.3)
    caption = (
        "Blocks and tokens rise and fall with who is there; a dot in the lowest panel is a gap that a user sat through."
    )
    return _finish(figure, setting, _told_so_far(records, is_stopped), caption)


def _told_so_far(records: Sequence[StepRecord], is_stopped: bool) -> str:
    if not records:
        return "Stopped before its first step" if is_stopped else "No step yet: the engine is getting ready"
    times = request_times(records).values()
    done = sum(r.finish_reason is not None for r in times)
    gaps = [gap * 1e3 for r in times for gap in r.itl_s]
    told = [
        f"{len(records):,} steps{', stopped' if is_stopped else ''}: {done} of the {len(times)} that came are done",
        f"{records[-1].num_running} running",
        f"{records[-1].num_waiting} waiting",
    ]
    return ", ".join([*told, *([f"longest gap {max(gaps):,.1f} ms"] if gaps else [])])


def _draw_batch(ax: Axes, records: Sequence[StepRecord], ends: Sequence[float]) -> None:
    tokens: Mapping[Activity, dict[int, int]] = {Activity.PREFILL: {}, Activity.DECODE: {}}
    for span in spans(records):
        if span.num_tokens:
            tokens[span.activity][span.step] = tokens[span.activity].get(span.step, 0) + span.num_tokens
    ax.set_yscale("log")
    for (activity, counts), marker in zip(tokens.items(), ("s", "o"), strict=True):
        places = [(end, counts[r.step]) for r, end in zip(records, ends, strict=True) if r.step in counts]
        colour = ACTIVITY_COLOURS[activity]
        ax.scatter(*zip(*places, strict=True) if places else ((), ()), s=7, marker=marker, color=colour, label=activity)
    log_ticks(ax.yaxis, subs=(1,))
    ax.legend(loc="upper right", ncols=2, frameon=False, fontsize=8, bbox_to_anchor=(1, 1.28))
