"""A lesson as its reader has it: opened in JupyterLab, run from top to bottom, and played with. `make test-ui`.

The server is `nanoserve lessons` on a folder of the test's own; screenshots go to tmp_path.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from nanoserve.lab.scenarios import SCENARIOS
from nanoserve.lab.show import show_figure
from nanoserve.lab.widgets import chunk_slider

pytestmark = pytest.mark.needs_chromium

LESSON = "03_chunked_prefill"
WAIT_S = 60
PERIOD_S = 0.1


def wait_for(what: str, seen: Callable[[], Any], wait_s: float = WAIT_S) -> Any:
    """The first truth that `seen` gives. AssertionError after `wait_s`."""
    end_s = time.monotonic() + wait_s
    while not (found := seen()):
        assert time.monotonic() < end_s, f"{what}: nothing within {wait_s:g} s"
        time.sleep(PERIOD_S)
    return found


@dataclass(frozen=True)
class Lab:
    """A JupyterLab that runs, and the folder that it shows."""

    url: str
    token: str
    folder: Path

    def ask(self, method: str, path: str) -> Any:
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.url}api/{path}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def kernel_states(self) -> list[str]:
        try:
            return [kernel["execution_state"] for kernel in self.ask("GET", "kernels")]
        except urllib.error.HTTPError:  # the server fails when it is asked while a kernel starts
            return []

    def shut(self) -> None:
        """The kernels first: with one alive the server takes a minute to end."""
        for kernel in self.ask("GET", "kernels"):
            self.ask("DELETE", f"kernels/{kernel['id']}")
        assert self.ask("GET", "kernels") == []
        self.ask("POST", "shutdown")


@contextmanager
def lessons_lab(folder: Path) -> Iterator[Lab]:
    """`nanoserve lessons`, with no settings and no state but its own; nothing of it is left afterwards."""
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR", "IPYTHONDIR")
    own = {name: str(folder / name.lower()) for name in (*names, "JUPYTERLAB_WORKSPACES_DIR")}
    script = Path(sys.executable).with_name("nanoserve")
    command = [str(script), "lessons", "--no-browser", "--dir", str(folder / "lessons")]
    with (folder / "lab.log").open("wb") as log:
        lab = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log, start_new_session=True)
    try:
        [told] = wait_for("JupyterLab", lambda: list(Path(own["JUPYTER_RUNTIME_DIR"]).glob("jpserver-*.json")))
        facts = wait_for("its address", lambda: json.loads(told.read_text() or "null"))
        running = Lab(facts["url"].replace("localhost", "127.0.0.1"), facts["token"], folder / "lessons")
        yield running
        running.shut()
        assert lab.wait(timeout=WAIT_S) == 0
    finally:
        if lab.poll() is None:
            os.killpg(lab.pid, signal.SIGKILL)
            lab.wait()


@contextmanager
def opened(browser: Browser, lab: Lab, lesson: str) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    try:
        page = context.new_page()
        page.set_default_timeout(WAIT_S * 1000)
        page.goto(f"{lab.url}lab/tree/{lesson}.ipynb?token={lab.token}", wait_until="commit")
        page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        yield page
    finally:
        context.close()


def run_all(page: Page, lab: Lab) -> None:
    """By the menu, until the kernel has nothing more to do. Before it has one, a page says `idle` too."""
    wait_for("a kernel", lambda: lab.kernel_states() == ["idle"])
    expect(page.locator(".jp-KernelName")).to_contain_text("Python 3", timeout=WAIT_S * 1000)
    kernel = page.locator(".jp-Notebook-ExecutionIndicator")
    expect(kernel).to_have_attribute("data-status", "idle", timeout=WAIT_S * 1000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    expect(kernel).to_have_attribute("data-status", "busy", timeout=WAIT_S * 1000)
    expect(kernel).to_have_attribute("data-status", "idle", timeout=WAIT_S * 1000)


def saved(page: Page, path: Path) -> nbformat.NotebookNode:
    """The notebook as it is on the page."""
    before = path.stat().st_mtime_ns
    page.keyboard.press("Control+s")
    wait_for("a saved notebook", lambda: path.stat().st_mtime_ns != before and path.read_text().endswith("}\n"))
    return nbformat.read(path, 4)


def shown(picture: Locator) -> bytes:
    source = picture.get_attribute("src")
    assert source is not None
    return base64.b64decode(source.partition(",")[2])


def test_every_cell_runs_and_the_slider_moves_the_picture(browser: Browser, tmp_path: Path) -> None:
    drawn = chunk_slider(SCENARIOS["long-prompt"].build(0))
    before, after = (show_figure(drawn.draw(budget)) for budget in (512, 1024))
    with lessons_lab(tmp_path) as lab, opened(browser, lab, LESSON) as page:
        run_all(page, lab)
        notebook = saved(page, lab.folder / f"{LESSON}.ipynb")
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
        assert not [o for cell in code for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"]

        slider = page.locator(".widget-slider")
        handle = slider.locator(".noUi-handle")
        handle.click()  # its cell becomes the active one, which the page keeps in view
        expect(slider).to_be_in_viewport()
        picture = page.locator(".jp-CodeCell", has=slider).locator("img")
        assert shown(picture) == before.data
        page.screenshot(path=tmp_path / "before.png")
        handle.press("ArrowRight")
        expect(slider.locator(".widget-readout")).to_have_text("1024")
        wait_for("the other picture", lambda: shown(picture) == after.data)
        page.screenshot(path=tmp_path / "after.png")


WIDGETS = (
    """
from nanoserve.config import STAGES
from nanoserve.lab.rehearsal import rehearse
from nanoserve.lab.scale import scale
from nanoserve.lab.scenarios import SCENARIOS
from nanoserve.lab.widgets import memory_calculator, stage_toggle, trace_scrubber
from nanoserve.lab.widgets_live import live_view
from nanoserve.lab.workload import random_tokens, shared_system_prompt

load = SCENARIOS["long-prompt"].build(0)
stage_toggle({s: rehearse(STAGES[s], load, max_num_batched_tokens=n) for s, n in (("v0", 16_384), ("v1", 512))})
""",
    """
sessions = shared_system_prompt(random_tokens(1000), num_requests=4, prefix_len=64, tail_len=16, output_tokens=4)
trace_scrubber(rehearse(STAGES["shared"], sessions, num_blocks=64))
""",
    "memory_calculator()",
    """
here = scale("cpu")
endless = shared_system_prompt(random_tokens(here.vocab_size), num_requests=4, prefix_len=32, output_tokens=3000)
live_view(here.fit(STAGES["shared"]), endless, here.setting(endless))
""",
)


def write_widgets(path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in WIDGETS]
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)


def move(control: Locator) -> None:
    """To another value: the next of a slider, the last of buttons, the first of a list."""
    if control.locator(".noUi-handle").count():
        control.locator(".noUi-handle").press("ArrowRight")
    elif control.locator("button").count():
        control.locator("button").last.click()
    else:
        control.locator("select").select_option(index=0)


def test_every_other_control_moves_its_picture_and_a_live_run_stops(browser: Browser, tmp_path: Path) -> None:
    with lessons_lab(tmp_path) as lab:
        write_widgets(lab.folder / "widgets.ipynb")
        with opened(browser, lab, "widgets") as page:
            run_all(page, lab)
            cells = page.locator(".jp-CodeCell")
            num_moved = 0
            for cell in (cells.nth(place) for place in range(len(WIDGETS) - 1)):
                for control in cell.locator(".widget-slider, .widget-toggle-buttons, .widget-dropdown").all():
                    picture = cell.locator("img")
                    before = shown(picture)
                    move(control)
                    wait_for("the other picture", lambda picture=picture, before=before: shown(picture) != before)
                    num_moved += 1
                    page.screenshot(path=tmp_path / f"moved{num_moved}.png")
            assert num_moved == 2 + 6

            live, button = cells.last.locator("img"), cells.last.locator(".widget-button")
            first = shown(live)
            wait_for("a picture of more steps", lambda: shown(live) != first)
            button.click()
            expect(button).to_have_text("stopped")
            expect(button).to_be_disabled()
            stopped = shown(live)
            page.screenshot(path=tmp_path / "stopped.png")
            assert stopped != first
            notebook = saved(page, lab.folder / "widgets.ipynb")
            [picture] = [o for o in notebook.cells[-1].outputs if "image/png" in o.get("data", {})]
            assert ", stopped: " in picture.metadata["image/png"]["alt"]
