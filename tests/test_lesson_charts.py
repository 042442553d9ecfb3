"""Laws of the pictures of lessons 01, 04 and 05: they count what is there, name their setting, and can be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from nanoserve.config import STAGES
from nanoserve.lab import lesson_charts, process_charts
from nanoserve.lab.charts import Setting
from nanoserve.lab.lesson_charts import KnobPoint, chunk_tradeoff, itl_strip, kv_fill, kv_held, table_map
from nanoserve.lab.metrics import request_times
from nanoserve.lab.process_charts import (
    Border,
    Hold,
    Unread,
    bin_edges,
    border_costs,
    gap_histogram,
    lock_lanes,
    parts,
    ring_map,
    step_end,
    step_histogram,
)
from nanoserve.lab.rehearsal import Rehearsal, rehearse
from nanoserve.lab.show import PNG_LIMIT, show_figure
from nanoserve.lab.workload import Workload, long_prompt_among_decodes, random_tokens
from nanoserve.record import StepRecord
from nanoserve.ring import HEADER_BYTES, Ring

SETTING = Setting("some requests", "cpu", "wall", 3)
MEMORY = 1024  # tokens: too little for the load, so that requests are preempted


def load() -> Workload:
    return long_prompt_among_decodes(
        random_tokens(1000), num_streams=12, stream_tokens=120, num_long=1, long_prompt_len=90
    )


def run(block_size: int, memory: int = MEMORY) -> Rehearsal:
    sizes = {"block_size": block_size, "num_blocks": 1 + memory // block_size}
    return rehearse(STAGES["v0"], load(), max_num_batched_tokens=2048, **sizes)


# --- What the KV memory holds


def held_enough(records: Sequence[StepRecord], block_size: int) -> bool:
    """No run stores more than the blocks in use have room for, nor wastes a whole block a request."""
    stored, held = kv_held(records, block_size)
    return 0 <= held - stored < 13 * block_size


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_every_run_stores_what_its_blocks_hold(block_size: int) -> None:
    tight = run(block_size)
    assert tight.run.num_preemptions > 0
    assert held_enough(tight.records, block_size)
    if block_size == 1:
        stored, held = kv_held(tight.records, 1)
        assert stored == held


def test_a_run_that_keeps_what_it_lost_is_seen() -> None:
    records = run(16).records
    for record in records:
        record.preempted = []
        record.hit_tokens = {}
    assert not held_enough(records, 16)


def test_one_slab_for_everyone_is_mostly_empty() -> None:
    slab, paged = (kv_held(run(size, memory=8 * 1024).records, size) for size in (1024, 16))
    assert slab.stored / slab.held < 0.2
    assert paged.stored / paged.held > 0.85


# --- Every gap a dot


def strip() -> Figure:
    return itl_strip({"v0": run(16, 8192).records}, load().groups, "stream", SETTING)


def dots_and_marks(figure: Figure) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(milliseconds, height) of every dot, and of every end of a mark."""
    dots, marks = figure.axes[0].collections
    ends = [point for segment in marks.get_segments() for point in segment]  # type: ignore[attr-defined]
    return [(float(x), float(y)) for x, y in dots.get_offsets()], [(float(x), float(y)) for x, y in ends]


def misplaced(figure: Figure) -> str:
    """A dot stands at its gap, or next to it; and no mark stands on dots."""
    times = request_times(run(16, 8192).records).values()
    gaps_ms = sorted(gap * 1e3 for r in times if load().groups[r.id] == "stream" for gap in r.itl_s)
    dots, marks = dots_and_marks(figure)
    if len(dots) != len(gaps_ms):
        return "a gap without a dot"
    if max(y for _, y in marks) >= min(y for _, y in dots):
        return "a mark on the dots"
    far = [x for (x, _), gap in zip(dots, gaps_ms, strict=True) if not 0.97 < x / gap < 1.03]
    return "a dot far from its gap" if far else ""


def test_every_gap_has_a_dot_next_to_it_below_the_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert misplaced(strip()) == ""
    monkeypatch.setattr(lesson_charts, "CLOUD", 0.2)
    assert misplaced(strip()) == "a dot far from its gap"


# --- Gaps, locks, rings


def bar_heights(figure: Figure) -> list[list[float]]:
    return [[bar.get_height() for bar in ax.patches] for ax in figure.axes]  # type: ignore[attr-defined]


GAPS = {"chunked": [0.003, 0.0031, 0.02, 0.0], "multiprocess": [0.0001, 0.00012]}


def test_what_is_counted_stands_beside_the_axis() -> None:
    for draw, counted in ((gap_histogram, "gaps"), (step_histogram, "steps")):
        assert [ax.get_ylabel() for ax in draw(GAPS, SETTING).axes] == [f"{stage}\n{counted}" for stage in GAPS]


def test_every_gap_is_counted_once() -> None:
    heights = bar_heights(gap_histogram(GAPS, SETTING))
    assert [sum(panel) for panel in heights] == [len(gaps) for gaps in GAPS.values()]


def test_a_bin_too_few_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_charts, "bin_edges", lambda values: bin_edges(values)[:-1])
    heights = bar_heights(gap_histogram(GAPS, SETTING))
    assert [sum(panel) for panel in heights] != [len(gaps) for gaps in GAPS.values()]


@example([10 ** (place / 24) for place in range(-48, 121)])  # each at an edge
@given(st.lists(st.floats(0.01, 1e5), min_size=1))
def test_every_value_has_a_bin(values: list[float]) -> None:
    edges = bin_edges(values)
    assert edges[0] <= min(values)
    assert max(values) < edges[-1]
    assert edges == sorted(set(edges))


def test_a_step_ends_with_its_own_last_operation() -> None:
    holds = [Hold("step", 0, 1), Hold("operation", 1, 2), Hold("front end", 1, 9)]
    assert step_end(holds) == 3


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_every_message_lies_where_a_real_ring_puts_it(lengths: list[int]) -> None:
    capacity, written = 64, 0
    memory = bytearray(HEADER_BYTES + capacity)
    ring = Ring(memoryview(memory))
    for number, length in enumerate(lengths, 1):
        assert ring.put(memoryview(bytes([number]) * length)) == length
        places = parts(Unread("a message", written, length), capacity)
        assert sum(n for _, n in places) == length
        for start, n in places:
            assert memory[HEADER_BYTES + start : HEADER_BYTES + start + n] == bytes([number]) * n
        ring.take(memoryview(bytearray(length)))
        written += length


# --- Every picture

LANES = {
    "alone": [Hold("step", 0, 1), Hold("operation", 1, 2)],
    "beside": [Hold("step", 0, 1), Hold("front end", 1, 5)],
}
MOMENTS = {"one": [Unread("plan 1", 0, 24)], "two": [Unread("plan 1", 0, 24), Unread("plan 2", 48, 30)]}
BORDERS = {"in process": Border(0, 310.0, 0.11), "core process": Border(1291, 365.0, 0.15)}
PICTURES: dict[str, Callable[[], Figure]] = {
    "kv_fill": lambda: kv_fill({"slabs": kv_held(run(1024, 8192).records, 1024)}, 8192, SETTING),
    "itl_strip": strip,
    "chunk_tradeoff": lambda: chunk_tradeoff({n: KnobPoint(8.2, 12 + n / 30, 2e5 / n) for n in (128, 8192)}, SETTING),
    "table_map": lambda: table_map({"A": [1, 2, 9], "B": [17, 3]}, 20, SETTING),
    "gap_histogram": lambda: gap_histogram(GAPS, SETTING),
    "step_histogram": lambda: step_histogram(GAPS, SETTING),
    "lock_lanes": lambda: lock_lanes(LANES, SETTING),
    "ring_map": lambda: ring_map(MOMENTS, 64, SETTING),
    "border_costs": lambda: border_costs(BORDERS, SETTING),
}
each_picture = pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)


def labels_outside(figure: Figure) -> list[str]:
    """Texts that are cut off at the figure's edge. (Ticks beyond an axis are there, and not drawn.)"""
    figure.draw_without_rendering()
    frame = figure.bbox.padded(1)
    texts = list(figure.texts)
    for ax in figure.axes:
        low, high = sorted(ax.get_ylim())
        ticks = [tick.label1 for tick in ax.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
        texts += [*ax.texts, ax.xaxis.label, ax.yaxis.label, ax.title, *ticks]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_visible()]
    return [
        label
        for label, box in boxes
        if label and (box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1)
    ]


@each_picture
def test_every_picture_names_its_setting_and_is_small(draw: Callable[[], Figure]) -> None:
    image = show_figure(draw())
    assert len(image.data) < PNG_LIMIT
    assert "load some requests, cpu, wall clock, seed 3" in image.alt


@each_picture
def test_every_label_is_inside_the_picture(draw: Callable[[], Figure]) -> None:
    assert labels_outside(draw()) == []


def test_a_label_that_is_cut_off_is_seen() -> None:
    figure = gap_histogram({"a name that is far too long for the left margin of a picture" * 4: [0.001]}, SETTING)
    figure.set_layout_engine("none")
    assert labels_outside(figure)


def test_a_table_map_shows_every_block_of_every_table() -> None:
    figure = table_map({"A": [1, 2, 9], "B": [17, 3]}, 20, SETTING)
    labels = {text.get_text() for text in figure.axes[0].texts}
    assert {"A[0]", "A[1]", "A[2]", "B[0]", "B[1]"} <= labels
    assert {str(block_id) for block_id in range(1, 20)} <= labels
