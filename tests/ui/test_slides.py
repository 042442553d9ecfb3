"""The decks that `make slides` builds: whole, offline, and legible at 1280 x 720 in a real browser."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.needs_chromium

ROOT = Path(__file__).parents[2]
LESSONS = sorted((ROOT / "lessons").glob("*.ipynb"))
SMALLEST_PX = 12
SMALLEST_PICTURE_PX = 240
WAIT_MS = 30_000

# Of the slide that is shown: [title, what is wrong with it ("": nothing)].
LOOK = """([smallest, picture]) => {
  const slide = Reveal.getCurrentSlide(), faults = [];
  if (slide.scrollHeight > slide.clientHeight) faults.push(`${slide.scrollHeight} px high`);
  if (slide.scrollWidth > slide.clientWidth) faults.push(`${slide.scrollWidth} px wide`);
  for (const element of slide.querySelectorAll(":not(aside, aside *)")) {
    const says = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    const size = parseFloat(getComputedStyle(element).fontSize);
    if (says && size < smallest) faults.push(`${size} px: ${element.textContent.slice(0, 30)}`);
    const box = element.getBoundingClientRect();
    if (says && (box.right > 1281 || box.bottom > 721)) faults.push(`outside: ${element.textContent.slice(0, 30)}`);
    if (element.matches("img") && box.height < picture) faults.push(`a picture ${box.height} px high`);
  }
  return [slide.querySelector("h2").textContent, faults.join("; ")];
}"""


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_slides", ROOT / "scripts" / "build_slides.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def decks(build: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all of them."""
    folder = tmp_path_factory.mktemp("slides")
    assert build.main(["--out", str(folder)]) == 0
    return folder


@contextmanager
def opened(browser: Browser, path: Path) -> Iterator[Page]:
    """A deck as a file. It may ask for nothing, and no script of it may fail."""
    context = browser.new_context(viewport={"width": 1280, "height": 720})
    try:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        asked: list[str] = []
        failures: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.goto(path.as_uri(), wait_until="commit")
        page.wait_for_function("window.Reveal && Reveal.isReady()")
        yield page
        assert failures == []
        assert [url for url in asked if not url.startswith(("data:", path.as_uri()))] == []
    finally:
        context.close()


def look(page: Page) -> list[tuple[str, str]]:
    """Every slide in the order of a talk: (title, its faults)."""
    seen: list[tuple[str, str]] = []
    while True:
        seen.append(tuple(page.evaluate(LOOK, [SMALLEST_PX, SMALLEST_PICTURE_PX])))
        if page.evaluate("Reveal.isLastSlide()"):
            return seen
        page.evaluate("Reveal.next()")


def test_every_slide_of_the_workshop_fits_and_can_be_read(browser: Browser, decks: Path, tmp_path: Path) -> None:
    path = decks / "workshop.html"
    with opened(browser, path) as page:
        page.screenshot(path=tmp_path / "agenda.png")
        seen = look(page)
    assert [f"{title}: {fault}" for title, fault in seen if fault] == []
    assert len(seen) == path.read_text(encoding="utf-8").count("<h2>")


def test_a_slide_that_overflows_is_seen(browser: Browser, decks: Path) -> None:
    with opened(browser, decks / "03_chunked_prefill.html") as page:
        page.evaluate("Reveal.getCurrentSlide().insertAdjacentHTML('beforeend', '<pre>' + 'x\\n'.repeat(60))")
        [*_, (_, fault)] = [page.evaluate(LOOK, [SMALLEST_PX, SMALLEST_PICTURE_PX])]
    assert "px high" in fault


def test_every_lesson_has_its_deck_and_is_in_the_workshop(build: ModuleType, decks: Path) -> None:
    assert {path.stem for path in decks.iterdir()} == {"workshop", *(path.stem for path in LESSONS)}
    workshop = (decks / "workshop.html").read_text(encoding="utf-8")
    for path in LESSONS:
        slides = build.render_lesson(build.read_deck(path))
        assert slides in workshop
        assert slides in (decks / path.name).with_suffix(".html").read_text(encoding="utf-8")
        assert len(re.findall("<section", slides)) >= 8


def test_every_tag_of_a_source_is_in_its_notebook(build: ModuleType) -> None:
    for path in LESSONS:
        markers = re.findall(r"^# %%(?: \[markdown\])?( slide)?$", path.with_suffix(".py").read_text(), re.MULTILINE)
        assert [build.is_tagged(cell) for cell in nbformat.read(path, 4).cells] == [bool(tag) for tag in markers]


def without_tags(path: Path) -> list[Any]:
    cells = nbformat.read(path, 4).cells
    for cell in cells:
        cell.metadata = nbformat.NotebookNode()
    return cells


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_without_tags_gives_its_question_its_predictions_and_its_pictures(
    path: Path, build: ModuleType
) -> None:
    cells = without_tags(path)
    slides = build.slides_of(cells)
    titles = [slide.title for slide in slides]
    assert titles[0].endswith("?")
    assert {"Predict", "Honest history", "Questions"} <= set(titles)
    assert not {"Exercise", "Solution"} & {title for title in titles if title.startswith("Solution")}
    num_pictures = sum("image/png" in output.get("data", {}) for cell in cells for output in cell.get("outputs", ()))
    assert sum("<img" in slide.shown for slide in slides) == num_pictures


def test_no_word_of_a_text_is_lost(build: ModuleType) -> None:
    """What a slide has no room for is in the speaker's notes; an answer is there and not on the slide."""
    for path in LESSONS:
        cells = nbformat.read(path, 4).cells
        slides = build.slides_of(cells)
        told = "\n".join("\n".join([slide.title, slide.text, *slide.notes]) for slide in slides)
        first = next(i for i, cell in enumerate(cells) if cell.cell_type == "markdown")
        for cell in cells[first:]:
            if cell.cell_type == "markdown" and build.is_tagged(cell):
                missing = set(re.findall(r"\w+", cell.source)) - set(re.findall(r"\w+", told))
                assert missing == set(), path.stem
        assert not any("<details>" in slide.text for slide in slides)


def test_a_long_text_is_its_first_sentences(build: ModuleType) -> None:
    long = "One two three four five six seven eight nine. " + "More words follow it. " * 20
    [slide] = build.slides_of(
        [tagged(f"## A title\n\n{long}\n\n- **Bold. Still bold** and so on to nine words. Gone.")]
    )
    assert slide.text.splitlines()[0] == "One two three four five six seven eight nine."
    assert "Gone" not in slide.text
    assert slide.text.count("**") == 2
    assert "Gone" in slide.notes[0]


def tagged(source: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_markdown_cell(source, metadata={"slideshow": {"slide_type": "slide"}})


def test_a_long_listing_is_cut_and_nothing_of_it_is_lost(build: ModuleType) -> None:
    lines = [f"line {i}" for i in range(3 * build.LINES)]
    output = nbformat.v4.new_output("stream", name="stdout", text="\n".join(lines))
    cell = nbformat.v4.new_code_cell("run()", outputs=[output], metadata={"slideshow": {"slide_type": "slide"}})
    slides = build.slides_of([cell])
    assert len(slides) == 4
    assert re.findall(r"line \d+", "".join(slide.shown for slide in slides)) == lines


def test_another_archive_than_the_pinned_one_is_refused(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "reveal.js-5.2.1.tgz").write_bytes(b"something else")
    with pytest.raises(RuntimeError, match=r"is not reveal\.js 5\.2\.1"):
        build.fetch_reveal(tmp_path)


def test_a_name_that_is_no_lesson_is_refused(build: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        build.main(["--out", str(tmp_path), "99_nothing"])
    assert list(tmp_path.iterdir()) == []
