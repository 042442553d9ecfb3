"""Builds lessons/*.ipynb and exercises/*.ipynb from the *.py beside them, in jupytext's percent format, and runs them.

    python scripts/build_lessons.py [NAME ...]

Text and code are edited and reviewed in the .py; the .ipynb is what is read, with the outputs of a run in a fresh
kernel. Nothing but the outputs and the notebook's frame is added. A marker that ends in `slide` puts its cell on a
slide (scripts/build_slides.py). tests/test_lessons.py and tests/test_exercises.py keep the two in step.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
FOLDERS = (ROOT / "lessons", ROOT / "exercises")
MARKER = re.compile(r"^# %%(?P<markdown> \[markdown\])?(?P<slide> slide)?$")
TIMEOUT_S = 300


def read_source(path: Path) -> nbformat.NotebookNode:
    """The notebook that a source says, without outputs. ValueError for a line that belongs to no cell."""
    lines = path.read_text(encoding="utf-8").splitlines()
    header, cells = {}, []
    for number, line in enumerate(lines, 1):
        if marker := MARKER.match(line):
            cells.append((bool(marker["markdown"]), bool(marker["slide"]), []))
        elif cells:
            cells[-1][-1].append(line)
        elif field := re.match(r"# (\w+): (.+)", line):
            header[field[1]] = field[2]
        elif line.strip():
            raise ValueError(f"{path.name}:{number}: {line!r} stands before the first cell; begin it with '# %%'.")
    notebook = nbformat.v4.new_notebook()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "nanoserve": _facts(path, header),
    }
    notebook.cells = [_cell(f"{path.stem[:2]}-{i:02}", *cell) for i, cell in enumerate(cells)]
    return notebook


def _facts(path: Path, header: dict[str, str]) -> dict[str, object]:
    """What `nanoserve lessons --list` shows."""
    missing = [name for name in ("title", "question", "minutes", "seams", "needs") if name not in header]
    if missing:
        raise ValueError(f"{path.name} does not say its {', '.join(missing)}; begin it with lines like '# title: ...'.")
    return {**header, "minutes": int(header["minutes"])}


def _cell(cell_id: str, is_markdown: bool, is_slide: bool, lines: list[str]) -> nbformat.NotebookNode:
    metadata = {"slideshow": {"slide_type": "slide"}} if is_slide else {}
    if is_markdown:
        text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines).strip("\n")
        return nbformat.v4.new_markdown_cell(text, id=cell_id, metadata=metadata)
    return nbformat.v4.new_code_cell("\n".join(lines).strip("\n"), id=cell_id, metadata=metadata)


def build(path: Path) -> float:
    """Run it and write it; returns the seconds that it took."""
    notebook = read_source(path)
    start_s = time.monotonic()
    NotebookClient(
        notebook, timeout=TIMEOUT_S, record_timing=False, resources={"metadata": {"path": path.parent}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata = {name: value for name, value in cell.metadata.items() if name == "slideshow"}
        if cell.cell_type == "code":
            cell.outputs = list(_joined(cell.outputs))
    notebook.metadata.language_info = {"name": "python"}
    path.with_suffix(".ipynb").write_text(nbformat.writes(notebook, indent=1) + "\n", encoding="utf-8")
    return time.monotonic() - start_s


def _joined(outputs: list[nbformat.NotebookNode]) -> Iterator[nbformat.NotebookNode]:
    """A kernel sends what is printed in pieces of any size."""
    for is_printed, group in groupby(outputs, lambda output: output.output_type == "stream"):
        pieces = list(group)
        if is_printed:
            assert {piece.name for piece in pieces} == {"stdout"}, f"a notebook warns: {pieces}"
            pieces = [nbformat.v4.new_output("stream", name="stdout", text="".join(piece.text for piece in pieces))]
        yield from pieces


def main(names: list[str]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("JPY_SESSION_NAME", None)  # in JupyterLab's terminal too: nobody moves a control here
    for path in (path for folder in FOLDERS for path in sorted(folder.glob("*.py"))):
        if not names or path.stem in names:
            seconds = build(path)
            print(f"{path.stem}: {seconds:.1f} s, {path.with_suffix('.ipynb').stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
