"""Laws of the ladder's report, in a headless browser: opened from disk it asks nobody anything, everything is inside
the page at 1280 x 800 and on a narrow screen, nothing overlaps, and the interactive timelines are where it says.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from test_ladder import FAKES
from test_ladder_report import FLAGS

import nanoserve.config
from nanoserve.api.cli import main
from nanoserve.lab import ladder

pytestmark = pytest.mark.needs_chromium

SIZE = {"width": 1280, "height": 800}
PARTS = ["short", "machine", "long-prompt", "system-prompt", "stages", "production"]

# Elements that stick out of the page or of their table cell, and neighbours in the flow that overlap.
FAULTS = """() => {
  const name = (e) => `${e.tagName} ${e.className} ${(e.textContent || e.alt || "").trim().slice(0, 40)}`;
  const wide = document.documentElement.scrollWidth > innerWidth ? ["the page"] : [];
  const texts = [...document.querySelectorAll("th, td, li, p, h1, h2, h3")];
  const cells = texts.filter((e) => e.scrollWidth > e.clientWidth + 1);
  const flow = [...document.querySelectorAll("section > *, article > *, .pair > *")];
  const boxes = new Map(flow.map((e) => [e, e.getBoundingClientRect()]));
  const over = flow.filter((e) => {
    const before = e.previousElementSibling, box = boxes.get(e), other = boxes.get(before);
    return other && box.top < other.bottom - 0.5 && box.left < other.right - 0.5;
  });
  const empty = [...document.images].filter((i) => !i.complete || i.naturalWidth < 400);
  return [...wide, ...[...cells, ...over, ...empty].map(name)];
}"""

# Of every line of text: its size in pixels, and how far its colour is from the white behind it (WCAG's ratio).
TEXTS = """() => [...document.querySelectorAll("body *")].filter((e) =>
    [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())).map((e) => {
  const style = getComputedStyle(e);
  const part = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = style.color.match(/[0-9.]+/g).map(Number).map(part);
  return [parseFloat(style.fontSize), 1.05 / (0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05)];
})"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ladder")
    with pytest.MonkeyPatch.context() as patch:
        for module in (nanoserve.config, ladder):
            patch.setattr(module, "STAGES", MappingProxyType(FAKES))
        assert main(["ladder", "--out", str(out), *FLAGS]) == 0
    return out


@pytest.fixture
def page(browser: Browser, folder: Path) -> Any:
    """The report, from disk; whatever it complained about or asked for fails the test."""
    context = browser.new_context(viewport=SIZE, color_scheme="light")
    page = context.new_page()
    heard: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: heard.append(request.url) if request.url.startswith("http") else None)
    page.goto((folder / "ladder.html").as_uri())
    yield page
    context.close()
    assert heard == []


@pytest.mark.parametrize("width", [1280, 1024, 700])
def test_everything_is_inside_and_nothing_overlaps(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate(FAULTS) == []


def test_a_column_that_is_too_wide_is_found_out(page: Page) -> None:
    page.add_style_tag(content=".figures { width: 1600px; }")
    assert "the page" in page.evaluate(FAULTS)


def test_a_paragraph_over_another_is_found_out(page: Page) -> None:
    page.add_style_tag(content="#long-prompt > .claim { margin-bottom: -30px; }")
    assert page.evaluate(FAULTS)


def test_every_text_is_legible(page: Page) -> None:
    texts = page.evaluate(TEXTS)
    assert len(texts) > 200
    assert min(size for size, _ in texts) >= 11
    assert min(contrast for _, contrast in texts) >= 4.5


def test_every_part_is_a_link_away_and_can_be_seen(page: Page, tmp_path: Path) -> None:
    for part in PARTS:
        page.click(f"nav a[href='#{part}']")
        top = page.evaluate("(id) => document.getElementById(id).getBoundingClientRect().top", part)
        assert 0 <= top < 800, part
        shot = tmp_path / f"{part}.png"
        page.screenshot(path=shot)
        assert shot.stat().st_size > 20_000, part
    page.screenshot(path=tmp_path / "whole.png", full_page=True)


def test_the_timelines_open_and_draw(page: Page) -> None:
    page.click("#long-prompt .page a")
    page.wait_for_function("window.timeline !== undefined || typeof timeline !== 'undefined'", timeout=20_000)
    assert page.evaluate("timeline.runs.length") == 2
    assert page.evaluate("timeline.histories.every((history) => history !== null)")


def test_it_prints(page: Page) -> None:
    page.emulate_media(media="print")
    assert not page.is_visible("nav")
    assert page.is_visible("#production h2")
    assert page.pdf(format="A4").startswith(b"%PDF")
