"""Pictures that follow a control: ipywidgets in JupyterLab, and everywhere else the picture alone.

A picture is an ordinary output of its cell, which a control replaces: so it is there without a kernel, without
ipywidgets and in exported HTML. What a position shows is `Interactive.draw`, a pure function (widgets_charts.py). A
running engine is in widgets_live.py. Laws: tests/test_widgets.py; in a browser: tests/ui/test_lessons_ui.py.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from nanoserve.config import STAGES
from nanoserve.lab.block_history import BlockHistory
from nanoserve.lab.costs import REFERENCE, CostModel
from nanoserve.lab.gpus import DTYPE_BYTES, GPUS, MODELS, Memory, get_gpu, get_model
from nanoserve.lab.rehearsal import Rehearsal, rehearse
from nanoserve.lab.show import show_figure
from nanoserve.lab.widgets_charts import Range, gap_range_ms, memory_picture, run_picture, step_picture

if TYPE_CHECKING:
    from ipywidgets import Widget
    from matplotlib.figure import Figure

    from nanoserve.lab.workload import Workload

BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
BEFORE_S, AFTER_S = 0.1, 0.9  # of a run: around the first request that is not watched
SLIDER_WIDTH = "32em"
LEFT = {"description_width": "initial"}


def has_front_end() -> bool:
    """Whether somebody can move a control: a session of a Jupyter server, and ipywidgets. nbclient, nbconvert and
    nbval run a notebook without a session."""
    return "JPY_SESSION_NAME" in os.environ and importlib.util.find_spec("ipywidgets") is not None


class Picture:
    """A figure as an output of the cell that runs, with another one put in its place later; from any thread."""

    def __init__(self, figure: Figure) -> None:
        from IPython.display import display

        self._handle: Any = display(show_figure(figure), display_id=True)

    def replace(self, figure: Figure) -> None:
        self._handle.update(show_figure(figure))


@dataclass(frozen=True, slots=True)
class Control:
    """What can be chosen. ValueError when `value` is not among the options."""

    label: str
    options: Sequence[Any]
    value: Any
    kind: Literal["slider", "buttons", "list"] = "slider"

    def __post_init__(self) -> None:
        if self.value not in self.options:
            raise ValueError(
                f"{self.label} cannot start at {self.value!r}; use one of {', '.join(map(str, self.options))}."
            )

    def widget(self) -> Widget:
        import ipywidgets

        makers = {
            "slider": ipywidgets.SelectionSlider,
            "buttons": ipywidgets.ToggleButtons,
            "list": ipywidgets.Dropdown,
        }
        extra = {"continuous_update": False, "layout": {"width": SLIDER_WIDTH}} if self.kind == "slider" else {}
        return makers[self.kind](
            options=list(self.options), value=self.value, description=self.label, style=dict(LEFT), **extra
        )


@dataclass(frozen=True, slots=True)
class Interactive:
    """Show it as the last line of a cell. `draw` takes a value for each control, by name, and returns a Figure."""

    draw: Callable[..., Figure]
    controls: Mapping[str, Control]

    def _ipython_display_(self) -> None:
        picture = Picture(self.draw(**{name: control.value for name, control in self.controls.items()}))
        if has_front_end():
            self._show_controls(picture)

    def _show_controls(self, picture: Picture) -> None:
        import ipywidgets
        from IPython.display import display

        widgets: dict[str, Any] = {name: control.widget() for name, control in self.controls.items()}

        def redraw(_: object) -> None:
            picture.replace(self.draw(**{name: widget.value for name, widget in widgets.items()}))

        for widget in widgets.values():
            widget.observe(redraw, names="value")
        display(ipywidgets.HBox(list(widgets.values()), layout={"flex_flow": "row wrap"}))


def chunk_slider(
    load: Workload, *, costs: CostModel = REFERENCE, budgets: Sequence[int] = BUDGETS, start: int = 512
) -> Interactive:
    """Stage `chunked` with `max_num_batched_tokens` at each of the budgets, rehearsed when it is asked for.

    `draw(budget)`. ValueError for a start that is no budget.
    """

    @cache
    def run(budget: int) -> Rehearsal:
        return rehearse(STAGES["chunked"], load, costs, max_num_batched_tokens=budget)

    def draw(budget: int) -> Figure:
        gaps_ms = gap_range_ms([run(budgets[0]), run(budgets[-1])])
        return run_picture("chunked", f"{budget:,} tokens a step", run(budget), _window_s(load), gaps_ms)

    return Interactive(draw, {"budget": Control("max_num_batched_tokens", budgets, start)})


def stage_toggle(runs: Mapping[str, Rehearsal]) -> Interactive:
    """The same load in several stages, under the names given, one at a time. `draw(stage)`. ValueError without runs,
    and for runs of different loads."""
    loads = {run.run.workload.name for run in runs.values()}
    if len(loads) != 1:
        raise ValueError(f"stage_toggle needs runs of one load, got {len(loads)}: {', '.join(loads) or 'none'}.")
    first = next(iter(runs))

    def draw(stage: str) -> Figure:
        run = runs[stage]
        return run_picture(stage, stage, run, _window_s(run.run.workload), gap_range_ms(runs.values()))

    return Interactive(draw, {"stage": Control("stage", list(runs), first, "buttons")})


def trace_scrubber(run: Rehearsal, start: int = 1) -> Interactive:
    """The timeline of a run beside its KV blocks, step by step. `draw(step)`. ValueError for a step that the run does
    not have, and where it took no block."""
    records = run.records
    places = {record.step: place for place, record in enumerate(records)}
    ids = [b for record in records for block_ids in record.new_blocks.values() for b in block_ids]
    if not ids:
        raise ValueError("trace_scrubber needs a run that took KV blocks; this one took none.")
    num_blocks = max(ids) + 1

    def draw(step: int) -> Figure:
        blocks = BlockHistory(run.trace).at(step)
        return step_picture(records, places[step], blocks, num_blocks, run.setting)

    return Interactive(draw, {"step": Control("step", list(places), start)})


def memory_calculator(
    *,
    model: str = "llama-3-70b",
    gpu: str = "h100",
    tp: int = 8,
    dtype: str = "bf16",
    num_sessions: int = 1000,
    prefix_len: int = 30_000,
    own_len: int = 100,
) -> Interactive:
    """How many sessions fit at once: gpus.py's arithmetic with everything to choose but `own_len`, the tokens that a
    session has to itself. `draw(model, gpu, tp, dtype, num_sessions, prefix_len)`. ValueError for a start that is not
    among the choices."""

    def draw(model: str, gpu: str, tp: int, dtype: str, num_sessions: int, prefix_len: int) -> Figure:
        memory = Memory(model=get_model(model), gpu=get_gpu(gpu), tp=tp, dtype=dtype)
        return memory_picture(memory, num_sessions, prefix_len, own_len)

    return Interactive(
        draw,
        {
            "model": Control("model", list(MODELS), model, "list"),
            "gpu": Control("GPU", list(GPUS), gpu, "list"),
            "tp": Control("GPUs", (1, 2, 4, 8, 16), tp),
            "dtype": Control("dtype", list(DTYPE_BYTES), dtype, "buttons"),
            "num_sessions": Control("sessions", (1, 10, 100, 300, 1000, 3000, 10_000), num_sessions),
            "prefix_len": Control("common prefix", (0, 1000, 4000, 16_000, 30_000, 100_000), prefix_len),
        },
    )


def _window_s(load: Workload) -> Range:
    """The seconds around the first request that is not watched, or from the start."""
    at_s = min((a.at_s for a in load.arrivals if a.group != load.watched), default=BEFORE_S)
    return max(0.0, at_s - BEFORE_S), at_s + AFTER_S
