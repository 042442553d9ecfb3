"""The pictures of the lessons on kernels and graphs, and the small models that they draw.

Which keys each program of an attention launch reads, as `_paged_attention` shares them out; when a host launches and a
device works; what padding, replays and the making of inputs cost. Colours, captions and titles are those of charts.py.
Imports torch inside functions. Laws: tests/test_kernel_charts.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nanoserve.block_pool import cdiv
from nanoserve.lab.charts import Setting, _figure, _finish, _plain
from nanoserve.lab.lesson_charts import PREFIX_COLOURS, log_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nanoserve.graphs import Dispatcher
    from nanoserve.kernels import Chip
    from nanoserve.lab.gpus import ModelSize
    from nanoserve.record import StepRecord

HOST, DEVICE = "#cbb9e8", "#5b3a8e"  # no activity's colours
GRAPH_COLOURS = {"full decode": "#3fa9c9", "full": "#2a8a4a", "piecewise": "#e0b83c", "no graph": "#a8323e"}
GREY = "#888888"


class Program(NamedTuple):
    """One program of a launch of `_paged_attention`, for one key head. Without queries it returns at once."""

    row: int
    first_query: int  # position in the sequence
    num_queries: int
    first_key: int
    num_keys: int


def programs(
    rows: Sequence[tuple[int, int]], *, tile_queries: int, tile_keys: int, num_splits: int = 1
) -> list[Program]:
    """Of rows (queries, keys), in the order of the grid, split by split within a tile.

    The arithmetic of attention_kernels.py: a row begins at tile `start // tile_queries + row`, so that no tile has
    queries of two rows, and the grid has a tile for each row more than the tokens fill.
    """
    starts = [sum(n for n, _ in rows[:i]) for i in range(len(rows) + 1)]
    first_tiles = [starts[row] // tile_queries + row for row in range(len(rows))]
    found = []
    for tile in range(starts[-1] // tile_queries + len(rows)):
        row = max(r for r, first in enumerate(first_tiles) if first <= tile)
        num_queries, seq_len = rows[row]
        first = (tile - first_tiles[row]) * tile_queries  # of the row's queries
        here = max(0, min(tile_queries, num_queries - first))
        past = seq_len - num_queries
        num_keys = max(0, min(seq_len, past + first + tile_queries)) if here else 0
        split_len = cdiv(num_keys, num_splits * tile_keys) * tile_keys
        for split in range(num_splits):
            key = min(split * split_len, num_keys)
            found.append(Program(row, past + first, here, key, min(split_len, num_keys - key)))
    return found


def read_map(
    grids: Mapping[str, Sequence[Program]],
    names: Sequence[str],
    block_size: int,
    setting: Setting,
    tables: Sequence[Sequence[int]] | None = None,
) -> Figure:
    """A panel a launch, a line a program: the keys that it reads, in the colour of its row; `names` of the rows, and
    their block `tables`: each block with its id."""
    counts = [len(grid) for grid in grids.values()]
    figure = _figure(height=1.5 + 0.5 * len(grids) + 0.23 * sum(counts))
    axes = figure.subplots(len(grids), 1, squeeze=False, height_ratios=counts, sharex=True)[:, 0]
    longest = max(p.first_key + p.num_keys for grid in grids.values() for p in grid)
    for ax, (name, grid) in zip(axes, grids.items(), strict=True):
        _draw_programs(ax, grid, names)
        if tables is not None:
            _label_blocks(ax, grid, tables, block_size)
        ax.set_title(name, fontsize=9, loc="left")
        ax.set_xticks(range(0, longest + block_size, block_size))
        ax.set_xlim(0, longest + 1)
        ax.grid(axis="x", alpha=0.5)
    axes[-1].set_xlabel(f"position of the key in its sequence (a grid line: a block of {block_size})")
    idle = sum(not p.num_keys for grid in grids.values() for p in grid)
    inside = " (inside: ids of their blocks)" if tables is not None else ""
    caption = (
        f"A line is a program: its row, the positions of its queries, and the keys that it reads for them{inside}. "
        f"Programs without keys: {idle}."
    )
    return _finish(figure, setting, "Which keys each program reads", caption)


def _draw_programs(ax: Axes, grid: Sequence[Program], names: Sequence[str]) -> None:
    labels = []
    for line, p in enumerate(grid):
        colour = PREFIX_COLOURS[p.row % len(PREFIX_COLOURS)]
        ax.barh(line, p.num_keys, left=p.first_key, height=0.72, color=colour)
        last = p.first_query + p.num_queries - 1
        queries = f"{p.first_query}" if p.num_queries == 1 else f"{p.first_query}-{last}"
        missing = "no keys" if p.num_queries else "no queries"
        labels.append(f"{names[p.row]}: {queries if p.num_keys else missing}")
    ax.set_yticks(range(len(grid)), labels=labels, fontsize=8)
    ax.set_ylim(len(grid) - 0.4, -0.6)


def _label_blocks(ax: Axes, grid: Sequence[Program], tables: Sequence[Sequence[int]], block_size: int) -> None:
    for line, p in enumerate(grid):
        end = p.first_key + p.num_keys
        for start in range(p.first_key, end, block_size):
            middle = (start + min(start + block_size, end)) / 2
            ax.text(
                middle,
                line,
                str(tables[p.row][start // block_size]),
                ha="center",
                va="center",
                fontsize=8,
                bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1.2},
            )


def grid_sizes(points: Mapping[int, tuple[int, int]], num_cores: int, setting: Setting) -> Figure:
    """Decode rows -> programs of one launch, (whole, split): against the cores that there are."""
    figure = _figure(height=3.6)
    ax = figure.add_subplot()
    rows = list(points)
    looks = (("whole", "o", "-", GREY), ("keys split", "s", "--", DEVICE))
    for index, (label, marker, line, colour) in enumerate(looks):
        sizes = [pair[index] for pair in points.values()]
        ax.plot(rows, sizes, marker=marker, linestyle=line, color=colour, label=label)
    ax.axhline(num_cores, color="black", linewidth=1, linestyle=":")
    ax.annotate(f"{num_cores} cores", (rows[-1], num_cores), (0, -4), textcoords="offset points", ha="right", va="top")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(rows, labels=[str(n) for n in rows])
    ax.yaxis.set_major_formatter(_plain)
    ax.set_xlabel("requests that decode together")
    ax.set_ylabel("programs in the grid")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    whole, split = points[rows[0]]
    caption = (
        f"Below the dotted line cores stand idle. With one request the grid has {whole} programs, and {split} where "
        "the keys of each are split."
    )
    return _finish(figure, setting, "Is there work for every core?", caption)


def decode_grid(chip: Chip, model: ModelSize, num_rows: int, num_keys: int) -> tuple[int, int]:
    """Programs of one launch for so many answers in bfloat16, behind so many keys each: (whole, as split there)."""
    import torch

    from nanoserve.attention_kernels import pick_num_splits, pick_tile

    group = model.num_heads // model.num_kv_heads
    tile = pick_tile(chip, torch.bfloat16, model.head_dim, group, queries_per_row=1)
    rows = [(1, num_keys)] * num_rows
    whole = len(programs(rows, tile_queries=tile.rows // group, tile_keys=tile.keys)) * model.num_kv_heads
    return whole, whole * pick_num_splits(chip, whole, num_keys)


class Lanes(NamedTuple):
    """(start, length) in microseconds: what the host launches, and what the device then runs."""

    host: list[tuple[float, float]]
    device: list[tuple[float, float]]

    @property
    def end_us(self) -> float:
        start_us, length_us = self.device[-1]
        return start_us + length_us

    @property
    def busy(self) -> float:
        """Share of the time, from the first launch to the end, in which the device works."""
        return sum(length_us for _, length_us in self.device) / self.end_us


def lanes(launch_us: Sequence[float], kernels_us: Sequence[Sequence[float]]) -> Lanes:
    """One launch after the other; what launch i brings, kernels i, runs in order, as soon as it is there."""
    host, device, now_us, free_us = [], [], 0.0, 0.0
    for launch, kernels in zip(launch_us, kernels_us, strict=True):
        host.append((now_us, launch))
        now_us += launch
        for kernel in kernels:
            start_us = max(now_us, free_us)
            device.append((start_us, kernel))
            free_us = start_us + kernel
    return Lanes(host, device)


def launch_lanes(ways: Mapping[str, Lanes], until_us: float, setting: Setting) -> Figure:
    """A panel a way to run the same step: host above, device below, over its first `until_us`."""
    figure = _figure(height=1.4 + 1.15 * len(ways))
    axes = figure.subplots(len(ways), 1, squeeze=False, sharex=True)[:, 0]
    for ax, (name, way) in zip(axes, ways.items(), strict=True):
        for line, (spans, colour) in enumerate(((way.host, HOST), (way.device, DEVICE))):
            seen = [span for span in spans if span[0] < until_us]
            ax.broken_barh(seen, (line - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidths=0.8)
        ax.set_yticks([0, 1], labels=["host launches", "device works"])
        ax.set_ylim(1.55, -0.55)
        ax.set_title(f"{name}: {way.end_us / 1000:.1f} ms a step, device busy {way.busy:.0%}", fontsize=9, loc="left")
        ax.set_xlim(0, until_us)
    axes[-1].set_xlabel(f"time since the step began (µs; the first {until_us:g} of it)")
    caption = "White in the lower lane is a device that waits for its host."
    return _finish(figure, setting, "Who waits for whom", caption)


def padding_chart(dispatcher: Dispatcher, up_to: int, setting: Setting) -> Figure:
    """Over the tokens of a step: the size that it is padded to (left), and the share that is padding (right)."""
    tokens = list(range(1, up_to + 1))
    keys = [dispatcher.dispatch(n, is_uniform=False) for n in tokens]
    sizes = [key.size if key else n for n, key in zip(tokens, keys, strict=True)]
    waste = [(size - n) / size for n, size in zip(tokens, sizes, strict=True)]
    figure = _figure(height=3.5)
    left, right = figure.subplots(1, 2)
    left.plot(tokens, sizes, color=GRAPH_COLOURS["piecewise"], drawstyle="steps-mid")
    left.plot(tokens, tokens, color=GREY, linewidth=0.8, linestyle=":", label="no padding")
    left.set_ylabel("tokens computed")
    left.legend(frameon=False)
    right.fill_between(tokens, [100 * share for share in waste], step="mid", color=GRAPH_COLOURS["piecewise"])
    right.set_ylabel("of them padding (%)")
    for ax in (left, right):
        ax.set_xlabel("tokens of the step")
        ax.grid(alpha=0.3)
    worst = max(range(len(waste)), key=waste.__getitem__)
    caption = (
        f"Most is wasted where little is computed: {waste[worst]:.0%} at {tokens[worst]} tokens; over all steps up to "
        f"{up_to} tokens, {sum(sizes) / sum(tokens) - 1:.1%} more is computed than there is."
    )
    return _finish(figure, setting, "What padding costs", caption)


def replays(records: Sequence[StepRecord], setting: Setting) -> Figure:
    """A bar a step: its tokens, in the colour of the graph that it replayed, and hatched what only pads."""
    figure = _figure(height=3.6)
    ax = figure.add_subplot()
    kinds = Counter(graph_kind(record) for record in records)
    for kind in kinds:
        ours = [i for i, record in enumerate(records) if graph_kind(record) == kind]
        tokens = [sum(records[i].num_scheduled_tokens.values()) for i in ours]
        padding = [records[i].num_padding_tokens for i in ours]
        colour = GRAPH_COLOURS[kind]
        ax.bar(ours, tokens, width=0.85, color=colour, label=kind)
        ax.bar(ours, padding, width=0.85, bottom=tokens, facecolor="none", edgecolor=colour, hatch="////", linewidth=0)
    ax.set_yscale("log", base=2)
    ax.set_ylim(bottom=0.5)
    ax.yaxis.set_major_formatter(_plain)
    ax.set_xlabel("step")
    ax.set_ylabel("tokens (log scale; hatched: padding)")
    ax.margins(x=0.01)
    ax.legend(frameon=False, ncols=len(kinds), loc="lower right", bbox_to_anchor=(1, 1), fontsize=8)
    told = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    return _finish(figure, setting, "Which graph each step replays", f"Steps: {told}.")


def graph_kind(record: StepRecord) -> str:
    """Of the graph that the step replayed, without its size."""
    return record.graph.rpartition(" ")[0] or "no graph"


def input_costs(us: Mapping[str, Mapping[int, float]], setting: Setting) -> Figure:
    """Form of the batch -> running requests -> microseconds of the host in a step; drawn for each request."""
    figure = _figure(height=3.4)
    ax = figure.add_subplot()
    looks = (("o", "-", "#332288"), ("v", "--", "#e0b83c"))
    for (name, points), (marker, line, colour) in zip(us.items(), looks, strict=True):
        each = [value / n for n, value in points.items()]
        ax.plot(list(points), each, marker=marker, linestyle=line, color=colour, label=name)
    counts = list(next(iter(us.values())))
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(counts, labels=[str(n) for n in counts])
    log_ticks(ax.yaxis)
    ax.set_xlabel("requests that decode together")
    ax.set_ylabel("µs a request and step (log scale)")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    most = counts[-1]
    told = ", ".join(f"{name} {points[most] / 1000:.2f} ms" for name, points in us.items())
    caption = f"A line that falls does work for the whole batch at once. A step of {most} requests: {told}."
    return _finish(figure, setting, "Making a step's inputs", caption)


def operations(run: Callable[[], object]) -> Counter[str]:
    """What torch computes on this thread while `run` runs, by operation; views, which compute nothing, left out."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counted: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view:
                counted[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        run()
    return counted
