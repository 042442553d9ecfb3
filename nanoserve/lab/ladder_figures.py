"""The ladder's pictures: which chart of which run.

Measured loads are shown by their round of median length. Of the block managers one run each, in the step in which most
requests run. What is simulated says so in its title. matplotlib and numpy are imported when something is drawn. Laws:
tests/test_ladder.py, tests/test_ladder_report.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from nanoserve.lab.block_history import BlockHistory, BlockMap
from nanoserve.lab.charts import (
    Setting,
    _figure,
    _finish,
    _plain,
    blocks_in_use,
    gap_strip,
    itl_strip,
    look_of,
    millisecond_strip,
    step_timeline,
    tokens_computed,
)
from nanoserve.lab.ladder_report import Production, Run, ServerRun, StageReport, middle_round
from nanoserve.lab.trace import Trace
from nanoserve.record import TraceHeader

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nanoserve.lab.front_end import FrontEndLoad
    from nanoserve.lab.simulated import SimulatedRun
    from nanoserve.lab.workload import Workload

COMMON, OWN, KEPT, FREE = "#1f5f7a", "#b9b9b9", "#8fb6c6", "#f3f3f3"
MAP_COLUMNS = 48  # blocks in a row of a map
MANY_ROWS = 40  # of a map; more are cut


def draw_load(workload: Workload, runs: Sequence[Run], setting: Setting) -> dict[str, Figure]:
    """File name -> chart, of the round of median length."""
    number = middle_round(runs)
    shown = {one.stage: one.records for one in runs if one.round == number}
    setting = replace(setting, load=workload.name, round=_which(number, runs))
    return {
        f"{workload.name}-itl.png": itl_strip(shown, workload.groups, workload.watched, setting),
        f"{workload.name}-timeline.png": step_timeline(shown, setting),
        f"{workload.name}-blocks.png": blocks_in_use(shown, setting),
        f"{workload.name}-tokens.png": tokens_computed(shown, setting),
    }


def draw_gaps(load: FrontEndLoad, runs: Sequence[ServerRun], setting: Setting) -> dict[str, Figure]:
    number = middle_round(runs)
    shown = {one.stage: one.result.gaps_s for one in runs if one.round == number}
    return {f"{load.name}-gaps.png": gap_strip(shown, replace(setting, load=load.name, round=_which(number, runs)))}


def _which(number: int, runs: Sequence[Run] | Sequence[ServerRun]) -> str:
    return f"round {number} of {max(run.round for run in runs)}"


# Recorded runs as traces: what needs a replay


class LoadTrace(Trace):
    """From the engine's first step on, as a replay needs it; but time begins with the load, not with the warm-up, so
    that stages are compared from one moment on."""

    def __init__(self, run: Run, header: TraceHeader) -> None:
        super().__init__(header, [*run.warm_up, *run.records], run.stage)
        self._load_start_s = Trace(header, run.records).start_s

    @property
    def start_s(self) -> float:
        return self._load_start_s


def traces_of(runs: Sequence[Run], built: Mapping[str, StageReport]) -> dict[str, Trace]:
    """Of the same round, a stage each."""
    number = middle_round(runs)
    return {run.stage: LoadTrace(run, _header(built[run.stage])) for run in runs if run.round == number}


def _header(stage: StageReport) -> TraceHeader:
    return TraceHeader(config=stage.config, device=stage.engine.device, execution=str(stage.engine.execution))


def overlay_page(traces: Mapping[str, Trace]) -> str:
    """The first stage and the last one as an interactive timeline on one time axis."""
    from nanoserve.lab.timeline import timeline_html

    first, *_, last = [*traces.values()] * 2
    return timeline_html([first] if first is last else [first, last])


def draw_block_maps(traces: Mapping[str, Trace], setting: Setting) -> dict[str, Figure]:
    """One map a block manager: the last stage with the first of them, the first stage with each other. None where no
    two requests begin alike: there is nothing to share then."""
    managers = {stage: str(trace.header.config["blocks"]) for stage, trace in traces.items()}
    chosen = [b for a, b in pairwise(managers) if managers[a] != managers[b]]
    first = next(iter(managers))
    before = [stage for stage, manager in managers.items() if manager == managers[first]][-1]
    maps = {stage: _fullest(traces[stage]) for stage in [before, *(stage for stage in chosen if stage != before)]}
    if not any(_is_common(blocks, block_id) for blocks in maps.values() for block_id in blocks.refs):
        return {}
    return {f"{setting.load}-map.png": block_maps(maps, managers, setting)}


def _fullest(trace: Trace) -> BlockMap:
    record = max(trace.records, key=lambda r: (len(r.num_scheduled_tokens), r.num_used_blocks))
    return BlockHistory(trace).at(record.step)


def block_maps(maps: Mapping[str, BlockMap], managers: Mapping[str, str], setting: Setting) -> Figure:
    """A panel a manager, a square a block: what is in it by colour, and in how many tables it is where in several."""
    rows = {stage: _rows_of(blocks) for stage, blocks in maps.items()}
    figure = _figure(height=1.7 + sum(0.45 + 0.18 * count for count in rows.values()))
    panels = figure.subplots(len(maps), 1, squeeze=False, height_ratios=list(rows.values()))[:, 0]
    for ax, (stage, blocks) in zip(panels, maps.items(), strict=True):
        _draw_map(ax, blocks, rows[stage])
        held, tables = len(blocks.refs), sum(blocks.refs.values())
        ax.set_title(
            f"{stage} ({managers[stage]}), step {blocks.step}: {held:,} blocks in use, {tables:,} entries of tables",
            loc="left", fontsize=9, fontweight="bold",
        )  # fmt: skip
    _map_legend(panels[0])
    times = ", ".join(f"{stage} x{sum(b.refs.values()) / max(len(b.refs), 1):.1f}" for stage, b in maps.items())
    caption = f"The step in which most requests run, of each. Tables that a block in use is in, on average: {times}."
    return _finish(figure, setting, "What is in the KV blocks", caption)


def _is_common(blocks: BlockMap, block_id: int) -> bool:
    """Others begin with what is in it."""
    return bool(blocks.content.get(block_id, 0) % 2)


def _rows_of(blocks: BlockMap) -> int:
    used = max([1, *blocks.refs, *(blocks.cached or ())])
    return min(used // MAP_COLUMNS + 1, MANY_ROWS)


def _draw_map(ax: Axes, blocks: BlockMap, num_rows: int) -> None:
    from matplotlib.patches import Rectangle

    for block_id in range(1, num_rows * MAP_COLUMNS):
        row, column = divmod(block_id, MAP_COLUMNS)
        refs = blocks.refs.get(block_id, 0)
        cached = bool(blocks.cached and block_id in blocks.cached)
        in_use = COMMON if _is_common(blocks, block_id) else OWN
        colour = in_use if refs else KEPT if cached else FREE
        ax.add_patch(Rectangle((column, row), 0.88, 0.88, facecolor=colour, linewidth=0))
        if refs > 1:
            ax.text(column + 0.44, row + 0.47, str(refs), ha="center", va="center", fontsize=7, color="white")
    ax.set_xlim(0, MAP_COLUMNS)
    ax.set_ylim(num_rows, 0)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)


def _map_legend(ax: Axes) -> None:
    from matplotlib.patches import Patch

    kinds = {
        COMMON: "text that others begin with, too (number: tables it is in, if several)",
        OWN: "a request's own text", KEPT: "in no table, still cached", FREE: "free",
    }  # fmt: skip
    ax.legend(
        handles=[Patch(color=colour, label=label) for colour, label in kinds.items()],
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(kinds), frameon=False, fontsize=7.5,
        borderaxespad=2.2,
    )  # fmt: skip


# Simulated runs


def draw_production(production: Production, runs: Mapping[str, Mapping[str, SimulatedRun]]) -> dict[str, Figure]:
    """File name -> chart: gaps where gaps are watched, first tokens where sessions queue."""
    figures = {}
    for load in production.loads:
        setting = Setting(load.name, production.setup, "simulated", production.seed)
        simulated, watched = runs[load.name], next(iter(runs[load.name].values())).workload.watched
        if any(key.startswith("itl") for key in load.headlines):
            gaps_ms = {stage: gaps_of(run, watched) for stage, run in simulated.items()}
            figures[f"{load.name}-itl.png"] = millisecond_strip(
                gaps_ms, f"gap between two tokens of a {watched}, simulated (ms, log scale)", setting,
                "SIMULATED inter-token latency", "The last mark of a row is its longest freeze, simulated",
            )  # fmt: skip
        else:
            figures[f"{load.name}-ttft.png"] = first_tokens(
                {stage: [us / 1e6 for us in run.ttfts_us(watched)] for stage, run in simulated.items()},
                watched,
                setting,
            )
    return figures


def gaps_of(run: SimulatedRun, group: str) -> list[float]:
    """Milliseconds, one for each gap of that group, whose members count them together."""
    return [us / 1e3 for us in run.members(group)[0].gaps.elements()]


def first_tokens(ttft_s: Mapping[str, Sequence[float]], group: str, setting: Setting) -> Figure:
    """Time to first token over the order of arrival, a line a stage."""
    figure = _figure(height=3.8)
    ax = figure.add_subplot()
    for stage, values in ttft_s.items():
        look = look_of(stage)
        ax.plot(
            range(1, len(values) + 1), values, color=look.colour, linestyle=look.line, marker=look.marker,
            markersize=3.5, linewidth=1.2, label=stage,
        )  # fmt: skip
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(_plain)
    ax.set_xlabel(f"{group}s, in order of arrival")
    ax.set_ylabel("time to first token, simulated (s, log)")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, ncols=len(ttft_s), loc="lower right", bbox_to_anchor=(1, 1), fontsize=8)
    last = ", ".join(f"{stage} {values[-1]:,.3g} s" for stage, values in ttft_s.items())
    caption = f"A line that rises is a queue that grows. First token of the last {group}, simulated: {last}."
    return _finish(figure, setting, "SIMULATED time to first token", caption)


# For a page


def words_of(figure: Figure) -> str:
    """What a chart shows, for who does not see it."""
    return f"{figure.get_suptitle()}. {figure.get_supxlabel()}".replace("\n", " ")
