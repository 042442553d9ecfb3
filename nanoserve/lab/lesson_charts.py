"""The pictures that only lessons draw: a knob and its price, what KV memory holds, and the maps of its blocks.

Colours, captions and titles are those of charts.py. A figure takes what was measured or simulated, and a `Setting`
that its title names. Laws: tests/test_lessons.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nanoserve.lab.charts import OTHER_LOOK, Look, Setting, _figure, _finish, _plain, look_of
from nanoserve.lab.metrics import Spread, request_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    from nanoserve.lab.block_history import BlockMap
    from nanoserve.record import StepRecord

PREFIX_COLOURS = ("#3fa9c9", "#e0b83c", "#a8323e", "#2a8a4a", "#8e6bbf", "#b5440d", "#7fb7e0")
OWN, EMPTY = "#bdbdbd", "#f4f4f4"
COLUMNS = 16  # blocks in a row of the map
CLOUD = 0.025  # powers of ten: how wide dots of one value are spread on a log axis


class KnobPoint(NamedTuple):
    """One setting of the knob; milliseconds."""

    itl_p50_ms: float
    itl_max_ms: float
    ttft_ms: float


def itl_strip(
    runs: Mapping[str, Sequence[StepRecord]], groups: Mapping[str, str], watched: str, setting: Setting
) -> Figure:
    """`charts.itl_strip` for runs that need not be stages; of P50, P99 and max, those at one place share a label, and
    stand above the dots instead of on them."""
    figure = _figure(height=1.7 + 0.85 * len(runs))
    ax = figure.add_subplot()
    gaps_ms: dict[str, list[float]] = {}
    for row, (name, records) in enumerate(runs.items()):
        times = request_times(records).values()
        gaps_ms[name] = [gap * 1e3 for r in times if groups.get(r.id) == watched for gap in r.itl_s]
        _draw_gaps(ax, row, gaps_ms[name], look_of(name))
    ax.set_xscale("log")
    log_ticks(ax.xaxis)
    ax.set_yticks(range(len(runs)), labels=[f"{name}\n{len(gaps):,} gaps" for name, gaps in gaps_ms.items()])
    ax.set_ylim(len(runs) - 0.5, -0.85)
    ax.margins(x=0.1)
    ax.set_xlabel(f"gap between two tokens of a {watched} request (ms, log scale)")
    ax.grid(axis="x", alpha=0.3)
    told = ", ".join(f"{name} {max(gaps):,.0f} ms" for name, gaps in gaps_ms.items())
    caption = f"A dot is one gap, moved a little where dots would meet. A row's last mark is its longest: {told}."
    return _finish(figure, setting, "Inter-token latency", caption)


def log_ticks(axis: Axis, subs: Sequence[float] = (1, 2, 5)) -> None:
    """Of a log axis: a number at each power of ten, and at its multiples by `subs`, however short the axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=subs, numticks=100))
    axis.set_major_formatter(_plain)
    axis.set_minor_formatter(NullFormatter())


def _draw_gaps(ax: Axes, row: int, gaps_ms: Sequence[float], look: Look) -> None:
    spread = Spread.of(gaps_ms)
    assert spread is not None, "there is no gap to draw"
    in_order = sorted(gaps_ms)  # so that gaps of one length are evenly spread over their cloud
    places = [row + ((i * 0.56984) % 1 - 0.5) * 0.6 for i in range(len(in_order))]
    beside = [gap * 10 ** (((i * 0.754878) % 1 - 0.5) * CLOUD) for i, gap in enumerate(in_order)]
    ax.scatter(beside, places, s=8, marker=look.marker, color=look.colour, alpha=0.4, linewidths=look is OTHER_LOOK)
    labels: dict[str, float] = {}
    for name, value in (("P50", spread.p50), ("P99", spread.p99), ("max", spread.max)):
        before = next((known for known, there in labels.items() if value < 1.3 * there), "")
        labels.pop(before, None)
        labels[f"{before}, {name}" if before else name] = value
    ax.vlines(list(labels.values()), row - 0.46, row - 0.34, color="black", linewidth=1.6)
    for name, value in labels.items():
        text = f"{name} {value:,.{2 if value < 10 else 1}f}"
        ax.annotate(text, (value, row - 0.48), ha="center", va="bottom", fontsize=8)


def chunk_tradeoff(points: Mapping[int, KnobPoint], setting: Setting) -> Figure:
    """Over the token budget: gaps of who decodes (left), first token of the long prompt (right)."""
    figure = _figure(height=3.6)
    gaps, first = figure.subplots(1, 2)
    budgets, look = list(points), look_of("chunked")
    gaps.plot(budgets, [p.itl_max_ms for p in points.values()], color=look.colour, marker="s", label="longest gap")
    gaps.plot(budgets, [p.itl_p50_ms for p in points.values()], color="#7fb7e0", marker="o", ls=":", label="P50")
    gaps.set_ylabel("gap between two tokens (ms)")
    gaps.legend(frameon=False)
    first.plot(budgets, [p.ttft_ms for p in points.values()], color="#b5440d", marker="D")
    first.set_ylabel("TTFT of the long prompt, P50 (ms)")
    first.set_ylim(bottom=0)
    first.yaxis.set_major_formatter(_plain)
    for ax in (gaps, first):
        ax.set_xscale("log", base=2)
        ax.set_xticks(budgets, labels=[f"{budget:,}" for budget in budgets], fontsize=8)
        ax.set_xlabel("max_num_batched_tokens: tokens a step, at most")
        ax.grid(alpha=0.3)
    gaps.set_yscale("log")
    log_ticks(gaps.yaxis)
    small, large = points[min(points)], points[max(points)]
    caption = (
        f"From {min(points)} to {max(points):,} tokens a step: longest gap {small.itl_max_ms:,.0f} to "
        f"{large.itl_max_ms:,.0f} ms, first token of the long prompt {small.ttft_ms:,.0f} to {large.ttft_ms:,.0f} ms."
    )
    return _finish(figure, setting, "The chunk size is a knob", caption)


def waits(ttft_ms: Mapping[str, Sequence[float]], group: str, setting: Setting) -> Figure:
    """A line a run, a point a request of the group, in order of arrival: how long until its first token."""
    figure = _figure(height=3.6)
    ax = figure.add_subplot()
    for name, values in ttft_ms.items():
        look = look_of(name)
        ax.plot(
            range(1, len(values) + 1), values, color=look.colour, ls=look.line, marker=look.marker, ms=4, label=name
        )
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"{group} requests, in order of arrival")
    ax.set_ylabel("time to first token (ms)")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    middle = ", ".join(f"{name} {sorted(values)[(len(values) - 1) // 2]:,.0f} ms" for name, values in ttft_ms.items())
    caption = f"The area below a line is what all of them waited together. P50: {middle}."
    return _finish(figure, setting, "Time to first token", caption)


def block_map(maps: Mapping[str, BlockMap], num_blocks: int, setting: Setting) -> Figure:
    """A panel a run, a square a block: coloured by the prefix that it holds, labelled with how many tables hold it."""
    rows = -(-num_blocks // COLUMNS)
    figure = _figure(height=1.3 + len(maps) * (0.35 + 0.3 * rows))
    axes = figure.subplots(len(maps), 1, squeeze=False)[:, 0]
    for ax, (stage, blocks) in zip(axes, maps.items(), strict=True):
        _draw_map(ax, blocks, num_blocks)
        ax.set_ylabel(stage, color=look_of(stage).colour, fontweight="bold")
    held = ", ".join(f"{stage} {len(blocks.refs)}" for stage, blocks in maps.items())
    caption = (
        "A square is a block: coloured where others begin with the same text; its number: the tables that it is in; "
        f"'-': none, but still cached. The first place is empty: block 0 is nobody's. Blocks held: {held}."
    )
    return _finish(figure, setting, f"The KV blocks in step {next(iter(maps.values())).step}", caption)


def _draw_map(ax: Axes, blocks: BlockMap, num_blocks: int) -> None:
    for block_id in range(1, num_blocks):
        row, column = divmod(block_id, COLUMNS)
        refs, cached = blocks.refs.get(block_id, 0), bool(blocks.cached and block_id in blocks.cached)
        colour = _colour(blocks.content.get(block_id, 0)) if refs or cached else EMPTY
        ax.add_patch(_square(column, row, colour, alpha=1 if refs else 0.45))
        label = str(refs) if refs else "-" if cached else ""
        ax.text(column + 0.46, row + 0.5, label, ha="center", va="center", fontsize=7)
    _frame(ax, num_blocks)


def _square(column: int, row: int, colour: str, alpha: float = 1) -> Rectangle:
    from matplotlib.patches import Rectangle

    return Rectangle((column, row), 0.92, 0.92, facecolor=colour, alpha=alpha)


def _frame(ax: Axes, num_blocks: int) -> None:
    ax.set_xlim(0, COLUMNS)
    ax.set_ylim(-(-num_blocks // COLUMNS), 0)
    ax.set_xticks([])
    ax.set_yticks([])


def _colour(content: int) -> str:
    """`Prefixes.content`: odd where others begin alike, by group from 1 on."""
    group, is_common = divmod(content, 2)
    return PREFIX_COLOURS[(group - 1) % len(PREFIX_COLOURS)] if is_common else OWN


class KVHeld(NamedTuple):
    """Tokens, each a mean over the steps of a run."""

    stored: float  # whose keys and values are in the pool
    held: float  # that the blocks in use have room for


def kv_held(records: Sequence[StepRecord], block_size: int) -> KVHeld:
    """At the ends of the steps of a run with private blocks that was not one step ahead."""
    computed: dict[str, int] = {}
    stored = held = 0
    for record in records:
        for request_id, n in record.num_scheduled_tokens.items():
            computed[request_id] = record.hit_tokens.get(request_id, computed.get(request_id, 0)) + n
        for request_id in (*record.preempted, *record.finished):
            computed.pop(request_id, None)
        stored += sum(computed.values())
        held += record.num_used_blocks * block_size
    return KVHeld(stored / len(records), held / len(records))


def kv_fill(fills: Mapping[str, KVHeld], num_tokens: int, setting: Setting) -> Figure:
    """A bar a run, in tokens: stored (solid), held and empty (hatched), of a pool of that size (dashed)."""
    figure = _figure(height=1.8 + 0.6 * len(fills))
    ax = figure.add_subplot()
    for row, fill in enumerate(fills.values()):
        ax.barh(row, fill.stored, color=look_of("v0").colour, height=0.6)
        ax.barh(
            row,
            fill.held - fill.stored,
            left=fill.stored,
            facecolor="none",
            edgecolor="#777777",
            hatch="///",
            height=0.6,
        )
        text = f"{fill.stored:,.0f} of {fill.held:,.0f}"
        ax.annotate(text, (fill.held, row), (6, 0), textcoords="offset points", va="center", fontsize=9)
    ax.axvline(num_tokens, color="black", linestyle="--", linewidth=1)
    ax.set_yticks(range(len(fills)), labels=list(fills))
    ax.invert_yaxis()
    ax.margins(x=0.16)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.set_xlabel("tokens, mean over steps: stored (solid), held and empty (hatched); dashed: the pool")
    shares = ", ".join(f"{name} {fill.stored / fill.held:.0%}" for name, fill in fills.items())
    return _finish(
        figure, setting, "What the KV memory holds", f"Hatched memory is held for nothing. Filled: {shares}."
    )


def table_map(tables: Mapping[str, Sequence[int]], num_blocks: int, setting: Setting) -> Figure:
    """A square a block, coloured by the request whose table it is in, labelled with its place in that table."""
    figure = _figure(height=1.7 + 0.42 * -(-num_blocks // COLUMNS))
    ax = figure.add_subplot()
    owners = {
        block_id: (row, place) for row, table in enumerate(tables.values()) for place, block_id in enumerate(table)
    }
    names = list(tables)
    for block_id in range(1, num_blocks):
        row, column = divmod(block_id, COLUMNS)
        owner, place = owners.get(block_id, (None, 0))
        colour = EMPTY if owner is None else PREFIX_COLOURS[owner % len(PREFIX_COLOURS)]
        ax.add_patch(_square(column, row, colour, alpha=0.6))
        label = "" if owner is None else f"{names[owner]}[{place}]"
        ax.text(column + 0.46, row + 0.38, label, ha="center", va="center", fontsize=9)
        ax.text(column + 0.46, row + 0.76, str(block_id), ha="center", va="center", fontsize=7, color="#333333")
    _frame(ax, num_blocks)
    ax.spines[["left", "bottom"]].set_visible(False)
    caption = (
        "A square is a block, its id below. A[1] is the second block of A: a request's blocks may lie anywhere, and "
        "in any order. Pale: free."
    )
    return _finish(figure, setting, "Which block is in whose table", caption)
