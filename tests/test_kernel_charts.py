"""Laws of what the lessons on kernels and graphs draw: programs read what the kernel reads, lanes keep order, and a
picture has its title, its caption and a size that a notebook can hold. Needs TRITON_INTERPRET=1 (tests/conftest.py)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import PagedCase
from matplotlib.figure import Figure

from nanoserve.attention_kernels import Tile
from nanoserve.graphs import Dispatcher, GraphMode, default_sizes
from nanoserve.kernels import Chip
from nanoserve.lab import kernel_charts
from nanoserve.lab.charts import Setting
from nanoserve.lab.gpus import get_model
from nanoserve.lab.kernel_charts import (
    Program,
    decode_grid,
    grid_sizes,
    input_costs,
    lanes,
    launch_lanes,
    operations,
    padding_chart,
    programs,
    read_map,
    replays,
)
from nanoserve.lab.show import show_figure
from nanoserve.record import StepRecord

SETTING = Setting("a load", "cpu", "simulated", 0)
MIXED = [(9, 9), (6, 40), (1, 33), (0, 0), (1, 20), (1, 0)]
TABLES = [[3, 0, 0], [7, 1, 5], [2, 9, 4], [0, 0, 0], [8, 6, 0], [0, 0, 0]]
TILE = Tile(rows=16, keys=16, num_warps=4, num_stages=1)
ROWS = st.lists(
    st.integers(0, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 90) | st.just(0))), min_size=1, max_size=8
)


def seen_keys(grid: list[Program]) -> dict[tuple[int, int], set[int]]:
    """(row, position of a query) -> the keys that its programs read."""
    found: dict[tuple[int, int], set[int]] = {}
    for p in grid:
        for query in range(p.first_query, p.first_query + p.num_queries):
            found.setdefault((p.row, query), set()).update(range(p.first_key, p.first_key + p.num_keys))
    return found


@given(ROWS, st.sampled_from([1, 3, 8]), st.sampled_from([16, 32]), st.sampled_from([1, 2, 8]))
def test_every_query_has_one_program_a_split_and_sees_its_keys(rows, tile_queries, tile_keys, num_splits) -> None:
    grid = programs(rows, tile_queries=tile_queries, tile_keys=tile_keys, num_splits=num_splits)
    assert len(grid) == (sum(n for n, _ in rows) // tile_queries + len(rows)) * num_splits
    covered = [(p.row, q) for p in grid[::num_splits] for q in range(p.first_query, p.first_query + p.num_queries)]
    assert covered == [(row, q) for row, (n, m) in enumerate(rows) for q in range(m - n, m)]
    for (row, query), keys in seen_keys(grid).items():
        assert keys >= set(range(min(query + 1, rows[row][1]))), "a key that it needs is nobody's"
        assert not keys or max(keys) < rows[row][1], "a key behind the row's end"
    for i in range(0, len(grid), num_splits):
        parts = grid[i : i + num_splits]
        assert sum(p.num_keys for p in parts) == len(
            {k for p in parts for k in range(p.first_key, p.first_key + p.num_keys)}
        )


def programs_of(case: PagedCase) -> list[Program]:
    return programs(case.rows, tile_queries=16 // case.group, tile_keys=16, num_splits=case.num_splits or 1)


def check_reads(grid: list[Program], case: PagedCase) -> None:
    """A key that is NaN spoils the result of whoever reads it, for NaN times the weight 0 is NaN: so the kernel itself
    tells which of its programs read a key."""
    clean = case.cache.clone()
    reads = seen_keys(grid)
    queries = [(row, q) for row, (n, m) in enumerate(case.rows) for q in range(m - n, m)]
    for row, (_, num_keys) in enumerate(case.rows):
        for key in range(0, num_keys, 7):
            case.cache = clean.clone()
            case.cache[1, case.table[row, key // case.block_size], :, key % case.block_size] = torch.nan
            spoiled = case.run().isnan().flatten(1).any(1).tolist()
            expected = [r == row and key in reads[r, q] for r, q in queries]
            assert spoiled == expected, f"key {key} of row {row}"


@pytest.mark.parametrize("num_splits", [1, 2])
def test_every_program_reads_what_the_kernel_reads(num_splits: int) -> None:
    case = PagedCase([(9, 9), (6, 24), (1, 20), (1, 0)], num_kv_heads=1, tile=TILE, num_splits=num_splits)
    check_reads(programs_of(case), case)


def test_a_program_that_reads_too_little_is_seen() -> None:
    case = PagedCase([(9, 24)], num_kv_heads=1, tile=TILE)
    grid = [p._replace(num_keys=min(p.num_keys, 20)) for p in programs_of(case)]
    with pytest.raises(AssertionError, match="key 21 of row 0"):
        check_reads(grid, case)


def test_every_core_has_work_where_keys_are_split() -> None:
    h100, model = Chip("cuda", num_cores=132, shared_bytes=227 * 1024), get_model("llama-3-8b")
    for num_rows in range(1, 40):
        whole, split = decode_grid(h100, model, num_rows, 32_000)
        assert whole == (num_rows // 4 + num_rows) * model.num_kv_heads
        assert split % whole == 0
        assert split >= 132
    assert decode_grid(h100, model, 1, 32_000) == (8, 256)
    assert decode_grid(h100, model, 1, 300) == (8, 8), "few keys are not worth a second kernel"


@given(st.lists(st.tuples(st.floats(0.1, 9), st.lists(st.floats(0.1, 9), min_size=1, max_size=5)), min_size=1))
def test_no_kernel_runs_before_its_launch_or_beside_another(launches) -> None:
    way = lanes([us for us, _ in launches], [kernels for _, kernels in launches])
    assert [length for _, length in way.device] == [kernel for _, kernels in launches for kernel in kernels]
    ends = [0.0]
    launched = [
        start + length for (start, length), (_, kernels) in zip(way.host, launches, strict=True) for _ in kernels
    ]
    for (start, length), ready in zip(way.device, launched, strict=True):
        assert start == max(ready, ends[-1]), "a device waits for its host and for itself, and for nothing else"
        ends.append(start + length)
    assert way.end_us == ends[-1]
    assert 0 < way.busy <= 1


def test_one_launch_keeps_the_device_busy() -> None:
    eager = lanes([5.0] * 100, [[2.0]] * 100)
    graph = lanes([10.0], [[2.0] * 100])
    assert eager.end_us == 502
    assert graph.end_us == 210
    assert eager.busy < 0.4 < 0.95 < graph.busy


def records() -> list[StepRecord]:
    kinds = [("piecewise 8", 2), ("full decode 4", 1), ("", 0), ("full 16", 3)]
    return [
        StepRecord(
            step=i, start_s=i, launched_s=i, end_s=i + 1, num_scheduled_tokens={"a": 3}, graph=g, num_padding_tokens=n
        )
        for i, (g, n) in enumerate(kinds)
    ]


def figures() -> dict[str, Figure]:
    grid = programs(MIXED, tile_queries=8, tile_keys=32)
    split = programs(MIXED, tile_queries=8, tile_keys=32, num_splits=2)
    dispatcher = Dispatcher(GraphMode.FULL_AND_PIECEWISE, default_sizes(256, 8192), 256)
    ways = {"eager": lanes([5.0] * 9, [[2.0]] * 9), "graph": lanes([9.0], [[2.0] * 9])}
    return {
        "read_map": read_map({"whole": grid, "split": split}, [f"row {i}" for i in range(6)], 16, SETTING, TABLES),
        "grid_sizes": grid_sizes({1: (8, 256), 2: (16, 256), 64: (640, 640)}, 132, SETTING),
        "launch_lanes": launch_lanes(ways, 30.0, SETTING),
        "padding_chart": padding_chart(dispatcher, 520, SETTING),
        "replays": replays(records(), SETTING),
        "input_costs": input_costs({"rebuilt": {1: 20.0, 64: 440.0}, "persistent": {1: 40.0, 64: 70.0}}, SETTING),
    }


def test_every_picture_has_a_title_and_a_caption_and_fits_a_notebook() -> None:
    for name, figure in figures().items():
        image = show_figure(figure)
        assert image.alt == figure.get_suptitle().replace("\n", ", "), name
        assert figure.get_suptitle().endswith("load a load, cpu, simulated clock, seed 0"), name
        assert figure.get_supxlabel().endswith("."), name
        for ax in figure.axes[-1:]:
            assert ax.get_xlabel(), name


def test_every_picture_draws_what_it_is_given() -> None:
    drawn = figures()
    whole, split = drawn["read_map"].axes
    assert len(whole.patches) * 2 == len(split.patches) == 2 * (18 // 8 + 6)
    assert sum(patch.get_width() for patch in whole.patches) == 8 + 9 + 40 + 33 + 20
    assert [text.get_text() for text in whole.texts] == list("33715294" + "86")
    padded = drawn["padding_chart"].axes[0].lines[0].get_ydata()
    assert padded[99] == 104
    assert padded[512] == 513, "larger than any graph: as it is"
    bars = [patch for patch in drawn["replays"].axes[0].patches if patch.get_height()]
    assert [patch.get_height() for patch in bars if not patch.get_hatch()] == [3] * 4
    assert sorted(patch.get_height() for patch in bars if patch.get_hatch()) == [1, 2, 3]
    rebuilt, persistent = drawn["input_costs"].axes[0].lines
    assert rebuilt.get_ydata()[0] == 20.0
    assert persistent.get_ydata()[1] == 70.0 / 64
    assert "8 programs, and 256" in drawn["grid_sizes"].get_supxlabel()


def test_every_replayed_graph_has_a_colour() -> None:
    kinds = {kernel_charts.graph_kind(record) for record in records()}
    assert kinds == set(kernel_charts.GRAPH_COLOURS)


def test_operations_are_counted_without_views() -> None:
    x = torch.ones(4, 6)
    assert operations(lambda: (x.view(24) + 1)[3:] * 2) == {"add": 1, "mul": 1}
