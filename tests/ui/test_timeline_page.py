"""Laws of the timeline page, in a headless browser: it draws the run, says why a request got nothing, shows the blocks
of any step as the engine had them, answers to mouse and keys, and stays quick on a long run. It asks nobody anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import engine_request, make_core
from playwright.sync_api import Browser, Page, expect

from nanoserve.blocks import PrivateBlocks, SharedBlocks, V0CachedBlocks
from nanoserve.lab.block_history import BlockHistory
from nanoserve.lab.reasons import in_words
from nanoserve.lab.timeline import timeline_html
from nanoserve.lab.trace import Lane, Run, Trace
from nanoserve.record import ListRecorder, StepRecord, TraceHeader
from nanoserve.request import Reason
from nanoserve.scheduler import PhaseSplitScheduler, UnifiedScheduler

pytestmark = pytest.mark.needs_chromium

WAIT_MS = 20_000
SIZE = {"width": 1280, "height": 800}
FLUID_MS = 100  # to draw a frame: ten times what an idle core takes, for a loaded machine

# How many colours a rectangle of a canvas has, of those that cover at least 20 pixels.
COLOURS = """([id, x, y, w, h]) => {
  const canvas = document.getElementById(id), ratio = devicePixelRatio;
  const data = canvas.getContext("2d").getImageData(x * ratio, y * ratio, w * ratio, h * ratio).data;
  const seen = {};
  for (let i = 0; i < data.length; i += 4) {
    const key = (data[i] << 16) + (data[i + 1] << 8) + data[i + 2];
    seen[key] = (seen[key] ?? 0) + 1;
  }
  return Object.values(seen).filter((n) => n >= 20).length;
}"""

# Where a request is drawn in a step, in pixels of the window.
WHERE = """([run, id, place]) => {
  const chart = timeline.chart, r = chart.runs[run], lane = r.ids.indexOf(id);
  const panel = chart.panels().find((p) => p.kind === "lanes" && p.run === run), rows = chart.rows(panel);
  const y = panel.top + (rows.lanes.indexOf(lane) + 0.5) * rows.height - chart.scroll[run];
  const box = chart.canvas.getBoundingClientRect();
  return [box.left + chart.x((r.x0[place] + r.x1[place]) / 2), box.top + y];
}"""

BLOCKS = """(place) => {
  const state = timeline.histories[0].at(place);
  return {
    free: state.free(),
    refs: Object.fromEntries([...state.refs].map((n, id) => [id, n]).filter(([, n]) => n)),
    cached: [...state.cached].map((on, id) => on ? id : -1).filter((id) => id >= 0),
    content: Object.fromEntries([...state.content].map((n, id) => [id, n]).filter(([, n]) => n >= 0)),
  };
}"""

# Where a block of the first row is drawn, in pixels of its canvas.
CELL = """([id]) => {
  const grid = timeline.map.measure(timeline.runs[0].num_blocks);
  return [grid.left + (id + 0.4) * grid.size, grid.size * 0.4];
}"""

OVERLAPS = """() => {
  const parts = ["header", "#legend", "#time", "#status", "#map", "#queue"].map((s) => document.querySelector(s));
  const boxes = parts.map((part) => part.getBoundingClientRect());
  const apart = boxes.every((box, i) => i === 0 || box.top >= boxes[i - 1].bottom - 0.5);
  const buttons = [...document.querySelectorAll("header > *")].map((e) => e.getBoundingClientRect());
  const beside = buttons.every((box, i) => i === 0 || box.left >= buttons[i - 1].right - 0.5);
  const inside = boxes.at(-1).bottom <= innerHeight + 0.5 && document.documentElement.scrollWidth <= innerWidth;
  return { apart, beside, inside };
}"""


def make_trace(name: str = "run.jsonl", clock_step_s: float = 0.01, **fields: Any) -> Trace:
    """Waits, hits, evictions and preemptions; a step takes what its tokens cost."""
    given = {
        "scheduler": UnifiedScheduler, "blocks": SharedBlocks, "num_blocks": 12, "block_size": 4, "max_num_seqs": 4,
        "max_model_len": "auto", "max_num_batched_tokens": 16,
    }  # fmt: skip
    core = make_core(recorder := ListRecorder(), **given | fields)
    now = [0.0]

    def clock() -> float:
        now[0] += clock_step_s / 4
        return now[0]

    core.clock = clock
    for i in range(9):
        core.add(engine_request(f"r{i}", [*range(8 if i % 2 else 4), *[50 + i] * 6], max_tokens=9, arrival_s=now[0]))
        core.step()
    while core.has_work:
        core.step()
    return Trace(recorder.header, recorder.records, name)


@contextmanager
def opened(browser: Browser, path: Path, html: str) -> Iterator[Page]:
    """The page from disk, once it has read its data. No script of it may fail, and it may ask nobody."""
    path.write_text(html, encoding="utf-8")
    context = browser.new_context(viewport=SIZE)  # type: ignore[arg-type]
    try:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        asked: list[str] = []
        failures: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.goto(path.as_uri(), wait_until="commit")
        page.wait_for_function("window.timeline?.times.length > 0")
        yield page
        assert asked == [path.as_uri()]
        assert failures == []
    finally:
        context.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "timeline.html"


def test_the_page_draws_the_run_and_nothing_overlaps(browser, file):
    with opened(browser, file, timeline_html([make_trace()])) as page:
        assert page.evaluate(OVERLAPS) == {"apart": True, "beside": True, "inside": True}
        panels = page.evaluate("timeline.chart.panels()")
        assert [panel["kind"] for panel in panels] == ["itl", "budget", "lanes"]
        for panel in panels:
            assert page.evaluate(COLOURS, ["chart", 100, panel["top"], 1100, panel["height"]]) >= 3
        assert page.evaluate(COLOURS, ["blocks", 96, 0, 1100, 60]) >= 3
        legend = page.locator("#legend").inner_text()
        for word in ("prefill", "decode", "waiting", "preempted"):
            assert word in legend
        assert len(page.screenshot()) > 20_000
        expect(page.locator("#notes")).to_be_hidden()


@pytest.mark.parametrize("ahead", [False, True], ids=["in_step", "ahead"])
@pytest.mark.parametrize("manager", [PrivateBlocks, V0CachedBlocks, SharedBlocks])
def test_the_blocks_of_every_step_are_the_engines(browser, file, manager, ahead):
    trace = make_trace(blocks=manager, async_scheduling=ahead)
    with opened(browser, file, timeline_html([trace])) as page:
        check_blocks(page, trace)


def check_blocks(page: Page, trace: Trace) -> None:
    """Forward, and then backward, where the page starts from what it kept."""
    page.evaluate("timeline.histories[0].kept.length = 1")
    places = range(len(trace.records))
    for place in (*places, *reversed(places)):
        own = BlockHistory(trace).at(trace.records[place].step)
        found = page.evaluate(BLOCKS, place)
        assert found["free"] == own.free
        assert found["refs"] == {str(block_id): n for block_id, n in own.refs.items()}
        assert found["cached"] == sorted(own.cached or ())
        assert found["content"] == {str(block_id): n for block_id, n in own.content.items()}


def test_a_page_that_gets_the_queue_wrong_is_seen(browser, file):
    trace = make_trace()
    html = timeline_html([trace])
    planted = html.replace("this.link(id, run.num_blocks)", "this.link(id, this.prev[run.num_blocks])")
    assert planted != html
    with opened(browser, file, planted) as page:
        with pytest.raises(AssertionError):
            check_blocks(page, trace)


def test_hovering_says_what_a_request_did_and_why_it_got_nothing(browser, file):
    trace = make_trace()
    with opened(browser, file, timeline_html([trace])) as page:
        tip = page.locator("#tip")
        codes = set()
        for lane in trace.lanes:
            for run in lane.runs:
                page.mouse.move(*page.evaluate(WHERE, [0, lane.id, run.first]))
                step = trace.records[run.first].step
                if run.reason:
                    expect(tip).to_contain_text(
                        f"{lane.id}: {run.activity}; it got nothing in step {step}, because {in_words(run.reason)}"
                    )
                    codes.add(run.reason.code)
                else:
                    expect(tip).to_contain_text(f"{lane.id}: {run.activity}, {run.num_tokens} token")
        assert {"fcfs_behind", "preemption_this_step"} <= codes
        page.mouse.move(640, 5)
        expect(tip).to_be_hidden()


def test_hovering_a_block_says_who_holds_it_and_when_it_is_next(browser, file):
    trace = make_trace()
    with opened(browser, file, timeline_html([trace])) as page:
        page.keyboard.press("ArrowRight")
        own = BlockHistory(trace).at(2)
        box = page.locator("#blocks").bounding_box()
        assert box is not None
        assert own.free
        held = next(iter(own.refs))
        x, y = page.evaluate(CELL, [held])
        page.mouse.move(box["x"] + x, box["y"] + y)
        expect(page.locator("#tip")).to_contain_text(f"block {held}: in {own.refs[held]} table")
        expect(page.locator("#tip")).to_contain_text(f"held by {own.holders[held][0]}")
        x, y = page.evaluate(CELL, [own.free[1]])
        page.mouse.move(box["x"] + x, box["y"] + y)
        expect(page.locator("#tip")).to_contain_text(f"number 2 of {len(own.free)} in the free queue")
        expect(page.locator("#queue")).to_contain_text("next to be handed out: " + " ".join(map(str, own.free)))


def test_keys_scrub_zoom_and_walk_through_the_requests(browser, file):
    trace = make_trace()
    last = trace.records[-1].step
    with opened(browser, file, timeline_html([trace])) as page:
        status = page.locator("#status")
        expect(status).to_contain_text("step 1 at")
        page.keyboard.press("ArrowRight")
        expect(status).to_contain_text("step 2 at")
        page.keyboard.press("Shift+ArrowRight")
        expect(status).to_contain_text("step 12 at")
        page.keyboard.press("ArrowLeft")
        expect(status).to_contain_text("step 11 at")
        page.keyboard.press("End")
        page.keyboard.press("ArrowRight")
        expect(status).to_contain_text(f"step {last} at")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowDown")
        expect(status).to_contain_text("r0: prefill, ")
        page.keyboard.press("ArrowDown")
        expect(status).to_contain_text("r1: ")
        whole = span(page)
        for _ in range(3):
            page.keyboard.press("+")
        assert span(page) == pytest.approx(whole / 8)
        page.keyboard.press("-")
        assert span(page) == pytest.approx(whole / 4)
        page.keyboard.press("End")  # the chosen step stays in view
        assert page.evaluate("timeline.chart.view.t1") == pytest.approx(whole)
        page.keyboard.press("0")
        assert span(page) == pytest.approx(whole)
        page.keyboard.press("?")
        expect(page.locator("#keys")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#keys")).to_be_hidden()


def span(page: Page) -> float:
    return page.evaluate("timeline.chart.view.t1 - timeline.chart.view.t0")


def test_the_mouse_scrubs_zooms_and_pans(browser, file):
    trace = make_trace()
    with opened(browser, file, timeline_html([trace])) as page:
        box = page.locator("#chart").bounding_box()
        assert box is not None
        place = len(trace.records) // 2
        x, _ = page.evaluate(WHERE, [0, "r0", place])
        page.mouse.move(x - 200, box["y"] + 60)
        page.mouse.down()
        page.mouse.move(x, box["y"] + 60)
        expect(page.locator("#status")).to_contain_text(f"step {trace.records[place].step} at")
        page.mouse.up()
        whole = span(page)
        page.mouse.move(700, box["y"] + 300)
        page.mouse.wheel(0, -1200)
        page.wait_for_function("whole => timeline.chart.view.t1 - timeline.chart.view.t0 < whole / 4", arg=whole)
        before = page.evaluate("timeline.chart.view")
        page.mouse.down()
        page.mouse.move(600, box["y"] + 300, steps=4)
        page.mouse.up()
        after = page.evaluate("timeline.chart.view")
        assert after["t0"] > before["t0"]
        assert after["t1"] - after["t0"] == pytest.approx(before["t1"] - before["t0"])
        page.locator("#fit").click()
        assert span(page) == pytest.approx(whole)


def test_two_runs_share_one_time_axis(browser, file):
    old = make_trace("v0.jsonl", 0.02, scheduler=PhaseSplitScheduler, blocks=PrivateBlocks, max_num_batched_tokens=64)
    new = make_trace("v1.jsonl")
    with opened(browser, file, timeline_html([old, new])) as page:
        assert page.evaluate(OVERLAPS) == {"apart": True, "beside": True, "inside": True}
        kinds = page.evaluate("timeline.chart.panels().map((p) => p.kind + p.run)")
        assert kinds == ["itl-1", "budget0", "budget1", "lanes0", "lanes1"]
        end = max(trace.records[-1].end_s - trace.start_s for trace in (old, new))
        assert span(page) == pytest.approx(end)
        for panel in page.evaluate("timeline.chart.panels()"):
            assert page.evaluate(COLOURS, ["chart", 100, panel["top"], 1100, panel["height"]]) >= 2
        page.keyboard.press("ArrowRight")
        expect(page.locator("#status")).to_contain_text("v0.jsonl, step 2 at")
        page.keyboard.press("r")
        expect(page.locator("#status")).to_contain_text("v1.jsonl, step")
        page.mouse.move(*page.evaluate(WHERE, [1, "r0", 0]))
        expect(page.locator("#tip")).to_contain_text("r0: prefill")


def test_a_damaged_file_and_a_lost_queue_are_said_on_the_page(browser, file):
    trace = make_trace()
    trace.damage = "run.jsonl, line 99: not a step record."
    trace.header.config["scheduler"] = "Mine"
    with opened(browser, file, timeline_html([trace])) as page:
        expect(page.locator("#notes")).to_contain_text("line 99: not a step record")
        expect(page.locator("#notes")).to_contain_text("'Mine' is none of")
        expect(page.locator("#queue")).to_contain_text("free queue: not known here")


def long_trace(num_requests: int, num_steps: int) -> Trace:
    """Lanes by hand: each waits, is prefilled in chunks, decodes, is preempted now and then, and decodes on."""
    records = [
        StepRecord(
            step=i + 1, start_s=i * 0.02, launched_s=i * 0.02, end_s=i * 0.02 + 0.005 + 0.01 * (i % 3),
            num_scheduled_tokens={"r": 1 + i % 512}, budget=512,
        )
        for i in range(num_steps)
    ]  # fmt: skip
    trace = Trace(TraceHeader(config={"num_blocks": 0}), records, "long.jsonl")
    behind = Reason("fcfs_behind", behind="r0")
    lanes = []
    for number in range(num_requests):
        first = number * (num_steps - 1300) // num_requests
        runs = [Run(first, 40, "waiting", 0, behind), *(Run(first + 40 + i, 1, "prefill", 200 + i) for i in range(4))]
        runs += [Run(first + 44 + 60 * i, 50, "decode", 1) for i in range(20)]
        runs += [Run(first + 94 + 60 * i, 10, "preempted", 0, behind) for i in range(20)]
        lane = Lane(f"r{number}", first * 0.02, engine_request(f"r{number}", [1, 2]), sorted(runs))
        lane.token_s = [records[first + i].end_s for i in range(60, 1200, 100)]
        lanes.append(lane)
    trace.__dict__["lanes"] = lanes
    return trace


def test_two_thousand_requests_of_twenty_thousand_steps_stay_fluid(browser, file):
    html = timeline_html([long_trace(2000, 20_000)], with_blocks=False)
    assert len(html) < 5_000_000
    with opened(browser, file, html) as page:
        measured = page.evaluate("timeline.measure(60)")
        print({name: round(value, 1) for name, value in measured.items()})
        assert measured["draw_p50"] < FLUID_MS
        assert page.evaluate(COLOURS, ["chart", 100, 200, 1100, 300]) >= 2
