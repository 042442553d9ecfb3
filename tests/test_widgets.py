"""What a widget shows is a pure function of its controls, and says what the engine's own figures say.

A control that is moved is tested in a kernel of its own, as JupyterLab has one, and with a browser in
tests/ui/test_lessons_ui.py.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from matplotlib.figure import Figure
from nbclient import NotebookClient
from PIL import Image

from nanoserve.config import STAGES
from nanoserve.lab import charts, widgets, widgets_charts, widgets_live
from nanoserve.lab.charts import Setting
from nanoserve.lab.gpus import GPUS, MODELS, Memory, get_gpu, get_model
from nanoserve.lab.metrics import Activity
from nanoserve.lab.rehearsal import Rehearsal, rehearse
from nanoserve.lab.scale import scale
from nanoserve.lab.scenarios import SCENARIOS
from nanoserve.lab.show import PNG_LIMIT, show_figure
from nanoserve.lab.widgets import Control, Interactive
from nanoserve.lab.widgets_charts import live_picture
from nanoserve.lab.widgets_live import LiveEngine, LiveView, live_view
from nanoserve.lab.workload import Workload, random_tokens, shared_system_prompt

LOAD = SCENARIOS["long-prompt"].build(0)
SESSIONS = shared_system_prompt(random_tokens(1000), num_requests=4, prefix_len=64, tail_len=16, output_tokens=4)
WIDGET = "application/vnd.jupyter.widget-view+json"
WAIT_S = 60.0


def toggled() -> dict[str, Rehearsal]:
    budgets = {"v0": 16_384, "v1": 512}
    return {stage: rehearse(STAGES[stage], LOAD, max_num_batched_tokens=n) for stage, n in budgets.items()}


def scrubbed() -> Interactive:
    late = replace(SESSIONS, arrivals=[replace(a, at_s=0.02 * i) for i, a in enumerate(SESSIONS.arrivals)])
    return widgets.trace_scrubber(rehearse(STAGES["shared"], late, num_blocks=64))


EVERY: dict[str, Callable[[], Interactive]] = {
    "chunk_slider": lambda: widgets.chunk_slider(LOAD, budgets=(512, 8192)),
    "stage_toggle": lambda: widgets.stage_toggle(toggled()),
    "trace_scrubber": scrubbed,
    "memory_calculator": widgets.memory_calculator,
}


def starts(widget: Interactive) -> dict[str, Any]:
    return {name: control.value for name, control in widget.controls.items()}


def title(figure: Figure) -> str:
    return figure.get_suptitle()


def impure(widget: Interactive, values: dict[str, Any], others: dict[str, Any]) -> str:
    """What is wrong with a picture; "": the same values give the same one, whatever was drawn between."""
    first, second, third = (show_figure(widget.draw(**each)) for each in (values, others, values))
    if max(map(len, (first.data, second.data))) > PNG_LIMIT:
        return "too large"
    if first.data != third.data:
        return "the same values, another picture"
    return "other values, the same picture" if first.data == second.data else ""


@pytest.mark.parametrize("name", EVERY)
def test_every_picture_follows_its_controls_and_nothing_else(name: str) -> None:
    widget = EVERY[name]()
    first = starts(widget)
    control = next(iter(widget.controls))
    others = first | {control: widget.controls[control].options[-1]}
    assert others != first
    assert impure(widget, first, others) == ""


def test_a_picture_that_remembers_is_seen() -> None:
    drawn: list[int] = []

    def draw(value: int) -> Figure:
        drawn.append(value)
        figure = Figure()
        figure.suptitle(f"{len(drawn)}")
        return figure

    assert "another picture" in impure(Interactive(draw, {}), {"value": 1}, {"value": 2})


@pytest.mark.parametrize("budget", [128, 512, 8192])
def test_every_chunk_size_shows_the_figures_of_its_run(budget: int) -> None:
    told = title(widgets.chunk_slider(LOAD).draw(budget))
    run = rehearse(STAGES["chunked"], LOAD, max_num_batched_tokens=budget).run
    gaps, first = run.itl_us("stream"), run.ttft_us("long")
    assert gaps is not None
    assert first is not None
    assert f"longest gap {gaps.max / 1000:,.1f} ms" in told
    assert f"TTFT of long prompts {first.p50 / 1000:,.0f} ms" in told
    assert "steps of 8 ms + 30 µs a token, simulated clock, seed 0" in told


def lane_names(widget: Interactive) -> list[str]:
    """Of the picture at its start, from the top."""
    ax = widget.draw(**starts(widget)).axes[0]
    low, high = ax.get_ylim()
    names = [label.get_text() for label in ax.get_yticklabels()]
    return names if low > high else names[::-1]


def test_every_timeline_is_drawn_once_and_in_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = [arrival.id for arrival in sorted(LOAD.arrivals, key=lambda arrival: arrival.at_s)]
    for name in ("chunk_slider", "stage_toggle"):
        assert lane_names(EVERY[name]()) == arrived
    draw = widgets_charts._timeline
    monkeypatch.setattr(widgets_charts, "_timeline", lambda ax, records: draw(ax, records) and draw(ax, records))
    assert lane_names(EVERY["chunk_slider"]()) != arrived  # one that is drawn twice stands on its head


def overlaps(figure: Figure) -> int:
    """Cells of a lane that stand on each other."""
    lanes: dict[int, list[tuple[float, float]]] = {}
    for cells in figure.axes[0].collections:
        for path in cells.get_paths():
            box = path.get_extents()
            lanes.setdefault(round((box.y0 + box.y1) / 2), []).append((box.x0, box.x1))
    return sum(second[0] < first[1] - 1e-9 for lane in lanes.values() for first, second in pairwise(sorted(lane)))


def test_no_step_ahead_hides_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    toggle = EVERY["stage_toggle"]()
    assert overlaps(toggle.draw(stage="v1")) == 0
    monkeypatch.setattr(charts, "_begins", lambda records: dict.fromkeys((r.step for r in records), 0.0))
    assert overlaps(toggle.draw(stage="v1")) > 0


def test_every_picture_keeps_the_colour_of_a_single_prefill() -> None:
    records = rehearse(STAGES["v0"], LOAD, max_num_batched_tokens=16_384).records[:10]
    shown = Image.open(io.BytesIO(show_figure(live_picture(records, 64, live_setting(LOAD))).data)).convert("RGB")
    colours = {f"#{red:02x}{green:02x}{blue:02x}" for _, (red, green, blue) in shown.getcolors(1 << 24)}
    assert {charts.ACTIVITY_COLOURS[a] for a in (Activity.PREFILL, Activity.DECODE)} <= colours
    few = shown.quantize(8, dither=Image.Dither.NONE).convert("RGB")
    assert (0xB5, 0x44, 0x0D) not in {colour for _, colour in few.getcolors(1 << 24)}


def test_every_part_of_a_run_says_what_it_leaves_out() -> None:
    end_s = toggled()["v0"].records[-1].end_s
    label = EVERY["stage_toggle"]().draw(stage="v0").axes[0].get_xlabel()
    assert f"the first 1.0 s of {end_s:.1f} s, the rest is not shown" in label
    whole = widgets.stage_toggle({"shared": rehearse(STAGES["shared"], SESSIONS, num_blocks=64)})
    assert whole.draw(stage="shared").axes[0].get_xlabel() == "time since the first arrival (s)"


def numbered_ticks(figure: Figure) -> list[int]:
    """Of each log axis with something on it: how many numbers stand within its limits."""
    figure.draw_without_rendering()
    axes = [
        (axis, limits) for ax in figure.axes for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim()))
    ]
    logs = [(axis, sorted(limits)) for axis, limits in axes if axis.get_scale() == "log"]
    return [
        sum(low <= tick.get_loc() <= high and bool(tick.label1.get_text()) for tick in axis.get_major_ticks())
        for axis, (low, high) in logs
    ]


def test_every_log_axis_has_numbers_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    records = rehearse(STAGES["v0"], LOAD, max_num_batched_tokens=16_384).records
    draws = [lambda: live_picture(records, 64, live_setting(LOAD)), lambda: EVERY["stage_toggle"]().draw(stage="v0")]
    assert all(count >= 3 for draw in draws for count in numbered_ticks(draw()))
    monkeypatch.setattr(widgets_charts, "log_ticks", lambda axis, subs=(): None)
    assert any(count < 3 for count in numbered_ticks(draws[0]()))


def test_no_axis_moves_with_a_slider() -> None:
    slider = widgets.chunk_slider(LOAD)
    limits = {tuple((ax.get_xlim(), ax.get_ylim()) for ax in slider.draw(b).axes) for b in (128, 512, 8192)}
    assert len(limits) == 1


def test_every_step_shows_the_blocks_that_the_records_count() -> None:
    scrubber = scrubbed()
    late = replace(SESSIONS, arrivals=[replace(a, at_s=0.02 * i) for i, a in enumerate(SESSIONS.arrivals)])
    records = rehearse(STAGES["shared"], late, num_blocks=64).records
    assert list(scrubber.controls["step"].options) == [record.step for record in records]
    for record in records:
        told = title(scrubber.draw(record.step))
        assert f"{sum(record.num_scheduled_tokens.values()):,} tokens computed" in told
        if not record.finished:
            assert f" {record.num_used_blocks} blocks held" in told


def test_every_choice_of_the_calculator_has_an_answer() -> None:
    calculator = widgets.memory_calculator()
    first = starts(calculator)
    for model in MODELS:
        for gpu in GPUS:
            told = title(calculator.draw(**first | {"model": model, "gpu": gpu}))
            memory = Memory(model=get_model(model), gpu=get_gpu(gpu), tp=8)
            try:
                private, shared = memory.sessions(30_000, 100)
            except ValueError:
                assert "the weights alone do not fit" in told
            else:
                assert f"{private:,} sessions fit with private copies, {shared:,} with" in told


def test_bad_starts_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot start at 300; use one of 128, 256"):
        widgets.chunk_slider(LOAD, start=300)
    with pytest.raises(ValueError, match="stage_toggle needs runs of one load, got 0"):
        widgets.stage_toggle({})
    with pytest.raises(ValueError, match="GPU cannot start at 'tpu'"):
        widgets.memory_calculator(gpu="tpu")
    with pytest.raises(ValueError, match="step cannot start at 99"):
        widgets.trace_scrubber(rehearse(STAGES["shared"], SESSIONS, num_blocks=64), start=99)


# In a kernel

CELLS = (
    """
from nanoserve.lab import widgets
from matplotlib.figure import Figure

def draw(n):
    figure = Figure(figsize=(1, 1))
    figure.suptitle(f"n is {n}")
    return figure

made = []
make = widgets.Control.widget
widgets.Control.widget = lambda control: made.append(make(control)) or made[-1]
widgets.Interactive(draw, {"n": widgets.Control("n", (1, 2, 3), 1)})
""",
    "if made:\n    made[0].value = 3",
)


def outputs_in_kernel() -> list[Any]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    NotebookClient(notebook, timeout=int(WAIT_S), store_widget_state=False).execute()
    return notebook.cells[0].outputs


def pictures(outputs: list[Any]) -> list[str]:
    return [o.metadata["image/png"]["alt"] for o in outputs if "image/png" in o.get("data", {})]


def test_without_a_front_end_there_is_the_picture_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    outputs = outputs_in_kernel()
    assert pictures(outputs) == ["n is 1"]
    assert len(outputs) == 1


def test_a_control_that_moves_replaces_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "JPY_SESSION_NAME", "a lesson")
    outputs = outputs_in_kernel()
    assert pictures(outputs) == ["n is 3"]
    assert [WIDGET in output.data for output in outputs] == [False, True]


def test_without_ipywidgets_there_is_no_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "a lesson")
    assert widgets.has_front_end()
    monkeypatch.setattr(widgets.importlib.util, "find_spec", lambda name: None)
    assert not widgets.has_front_end()


@pytest.mark.parametrize("kind", ["slider", "buttons", "list"])
def test_every_kind_of_control_holds_its_options(kind: Any) -> None:
    control: Any = Control("n", (1, 2, 3), 2, kind).widget()
    assert control.value == 2
    assert tuple(control.options) == (1, 2, 3)


# A running engine


def live_load(output_tokens: int) -> Workload:
    return shared_system_prompt(
        random_tokens(2048), num_requests=4, prefix_len=32, tail_len=8, output_tokens=output_tokens
    )


def live_setting(load: Workload) -> Setting:
    return Setting(load.name, "cpu", "wall", load.seed)


def live_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("live-")]


def test_a_live_run_has_every_record_of_its_load() -> None:
    load = live_load(6)
    engine = LiveEngine(scale("cpu").fit(STAGES["shared"]), load)
    engine.wait(WAIT_S)
    assert engine.error is None
    assert not engine.is_stopped
    assert sum(len(t) for record in engine.records for t in record.sampled.values()) == load.num_output_tokens
    told = title(live_picture(engine.records, engine.num_blocks, live_setting(load)))
    assert "4 of the 4 that came are done, 0 running, 0 waiting" in told
    assert live_threads() == []


def test_a_stopped_run_ends_between_two_steps_and_leaves_nothing() -> None:
    load = live_load(2000)
    engine = LiveEngine(scale("cpu").fit(STAGES["shared"]), load)
    seen = threading.Event()
    for _ in range(int(WAIT_S / 0.05)):
        if engine.records or seen.wait(0.05):
            break
    engine.stop()
    engine.stop()
    assert engine.done.is_set()
    assert engine.error is None
    assert engine.is_stopped
    assert ", stopped: " in title(live_picture(engine.records, engine.num_blocks, live_setting(load), True))
    assert sum(len(t) for record in engine.records for t in record.sampled.values()) < load.num_output_tokens
    assert live_threads() == []


def test_an_engine_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    view = live_view(
        replace(scale("cpu").fit(STAGES["shared"]), max_model_len=32), live_load(6), Setting("", "", "", 0)
    )
    with pytest.raises(ValueError, match="max_model_len=32"):
        view._ipython_display_()
    assert live_threads() == []


def test_a_picture_of_no_steps_and_of_each_beginning_can_be_drawn() -> None:
    records = rehearse(STAGES["v0"], SESSIONS, num_blocks=64).records
    for end in range(len(records) + 1):
        told = title(live_picture(records[:end], 64, live_setting(SESSIONS)))
        assert told.startswith(f"{end} steps:" if end else "No step yet")


def test_a_view_in_a_front_end_is_drawn_until_its_engine_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    over = threading.Event()

    class Seen:
        def __init__(self, figure: Figure) -> None:
            shown.append(title(figure))

        def replace(self, figure: Figure) -> None:
            shown.append(title(figure))
            if "4 of the 4 that came are done" in shown[-1]:
                over.set()

    monkeypatch.setattr(widgets_live, "Picture", Seen)
    monkeypatch.setattr(widgets_live, "has_front_end", lambda: True)
    button = SimpleNamespace(disabled=False, description="stop")
    monkeypatch.setattr(LiveView, "_show_button", lambda self, engine: button)
    load = live_load(6)
    view = live_view(scale("cpu").fit(STAGES["shared"]), load, live_setting(load))
    view._ipython_display_()
    assert over.wait(WAIT_S)
    view.stop()
    for thread in threading.enumerate():
        if thread.name == "live-view":
            thread.join(WAIT_S)
    assert shown[0].startswith("No step yet")
    assert (button.disabled, button.description) == (True, "over")
