"""Every lesson, as it is shipped: it runs in a fresh kernel and prints what it says; and it has the form of a lesson.

nbval runs in a process of its own, one lesson a test. The notebooks are built from the sources beside them by
scripts/build_lessons.py, which the first law keeps in step.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import socket
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
import pytest

from nanoserve.api import cli, cli_lessons
from nanoserve.lab import results
from nanoserve.lab.gpus import MODELS, get_model
from nanoserve.lab.scale import scale, shape_config
from nanoserve.lab.show import PNG_LIMIT

ROOT = Path(__file__).parent.parent
LESSONS = sorted((ROOT / "lessons").glob("*.ipynb"))
EXERCISES = sorted((ROOT / "exercises").glob("*.ipynb"))
PARTS = ("## Predict", "## Honest history", "## Questions", "## Exercise", "## In vLLM, look at")
PATH = re.compile(r"/(?:home|root|tmp|work|Users|usr|mnt|var)/")
TIMEOUT_S = 240
each_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def build_script() -> Any:
    spec = importlib.util.spec_from_file_location("build_lessons", ROOT / "scripts" / "build_lessons.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_nbval(path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a fresh kernel of this interpreter, away from this suite's own settings."""
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(folder / "pytest.ini"), "-p", "no:cacheprovider"]
    command += ["-p", "no:schemathesis", "--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout", "120", str(path)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def outputs_of(notebook: nbformat.NotebookNode) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def form_faults(notebook: nbformat.NotebookNode) -> list[str]:
    """What a notebook lacks to be a lesson."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    text = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    lengths = [len(cell.source.splitlines()) for cell in code]
    words = sum(len(source.split()) for source in text)
    counts = {
        f"{len(notebook.cells)} cells": 25 <= len(notebook.cells) <= 40,
        f"{words} words": words <= 1500,
        f"median code cell of {statistics.median(lengths)} lines": statistics.median(lengths) <= 6,
        f"code cell of {max(lengths)} lines": max(lengths) <= 20,
        "a code cell that never ran": all(cell.execution_count for cell in code),
        "cells that ran in another order": [cell.execution_count for cell in code] == list(range(1, len(code) + 1)),
        "no question in its title": text[0].startswith("# ") and text[0].splitlines()[0].endswith("?"),
        "questions without 5 to 8 folded answers": 5 <= "\n".join(text).count("<summary>Answer</summary>") <= 8,
        "fewer than 8 asserts": sum(cell.source.count("assert ") for cell in code) >= 8,
        "engine code": not any(re.search(r"^class ", cell.source, re.MULTILINE) for cell in code),
        "`v0 cannot`": not re.search(r"v0 (can ?not|could not|can't)", "\n".join(text), re.IGNORECASE),
    }
    faults = [name for name, holds in counts.items() if not holds]
    faults += [f"no part {part!r}" for part in PARTS if not any(part in source for source in text)]
    return faults + output_faults(notebook)


def output_faults(notebook: nbformat.NotebookNode) -> list[str]:
    faults = []
    outputs = outputs_of(notebook)
    for output in outputs:
        if output.output_type == "error" or output.get("name") == "stderr":
            faults.append("an error or a warning")
        if png := output.get("data", {}).get("image/png"):
            alt = output.metadata.get("image/png", {}).get("alt", "")
            if len(base64.b64decode(png)) > PNG_LIMIT:
                faults.append("a large picture")
            if not re.search(r"load .+, .+, (wall|simulated) clock, seed \d", alt):
                faults.append(f"a picture with the title {alt!r}")
    if not any(output.get("data", {}).get("image/png") for output in outputs):
        faults.append("no picture")
    text = json.dumps([[cell.source for cell in notebook.cells], [_without_pictures(output) for output in outputs]])
    faults += [f"the path {found}" for found in PATH.findall(text)]
    return faults + (["a host name"] if re.search(rf"\b{re.escape(socket.gethostname())}\b", text) else [])


def _without_pictures(output: Any) -> Any:
    return {**output, "data": {kind: data for kind, data in output.get("data", {}).items() if kind != "image/png"}}


def test_there_are_lessons() -> None:
    assert LESSONS


@each_lesson
def test_every_lesson_runs_as_shipped(path: Path, tmp_path: Path) -> None:
    done = run_nbval(path, tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@each_lesson
def test_every_lesson_has_the_form(path: Path) -> None:
    assert form_faults(nbformat.read(path, 4)) == []


@each_lesson
def test_every_lesson_is_what_its_source_says(path: Path) -> None:
    source, notebook = build_script().read_source(path.with_suffix(".py")), nbformat.read(path, 4)
    assert [(c.id, c.cell_type, c.source) for c in notebook.cells] == [
        (c.id, c.cell_type, c.source) for c in source.cells
    ]
    assert notebook.metadata == source.metadata


def test_every_source_has_its_notebook() -> None:
    assert [path.stem for path in sorted((ROOT / "lessons").glob("*.py"))] == [path.stem for path in LESSONS]


def test_a_claim_that_is_not_so_fails_the_lesson(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell("# NBVAL_CHECK_OUTPUT\nprint(2 + 2)", execution_count=1)]
    cells[0].outputs = [nbformat.v4.new_output("stream", name="stdout", text="5\n")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "wrong.ipynb")
    done = run_nbval(tmp_path / "wrong.ipynb", tmp_path)
    assert done.returncode == 1
    assert "1 failed" in done.stdout


def _add(source: str) -> Callable[[nbformat.NotebookNode], None]:
    return lambda notebook: notebook.cells.append(nbformat.v4.new_markdown_cell(source))


def _drop_outputs(notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


def _untitled(notebook: nbformat.NotebookNode) -> None:
    for output in outputs_of(notebook):
        if "image/png" in output.get("data", {}):
            output.metadata = nbformat.NotebookNode()


def _without_history(notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells:
        cell.source = cell.source.replace("## Honest history", "## History")


def _print_path(notebook: nbformat.NotebookNode) -> None:
    outputs_of(notebook)[0].text = "/".join(("written to ", "home", "someone", "x.png\n"))


def _warn(notebook: nbformat.NotebookNode) -> None:
    outputs_of(notebook)[0].name = "stderr"


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (_add("word " * 1500), "words"),
        (_add("v0 cannot chunk"), "v0 cannot"),
        (_drop_outputs, "never ran"),
        (_untitled, "a picture with the title"),
        (_without_history, "Honest history"),
        (_print_path, "the path /home/"),
        (_warn, "a warning"),
    ],
)
def test_every_planted_fault_of_form_is_seen(spoil: Callable[[nbformat.NotebookNode], None], fault: str) -> None:
    notebook = deepcopy(nbformat.read(LESSONS[0], 4))
    assert form_faults(notebook) == []
    spoil(notebook)
    assert any(fault in found for found in form_faults(notebook))


# The command


def test_the_list_names_every_lesson_and_exercise(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lessons", "--list"]) == 0
    told = capsys.readouterr().out
    assert cli.main(["lessons", "--list", "--json"]) == 0
    lessons = json.loads(capsys.readouterr().out)
    assert [lesson["name"] for lesson in lessons] == [path.stem for path in (*LESSONS, *EXERCISES)]
    assert all(all(str(value) in told for value in lesson.values()) for lesson in lessons)


def test_copies_are_the_readers_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    assert cli.main(["lessons", "--copy", "--dir", str(folder)]) == 0
    for originals, copies in ((LESSONS, folder), (EXERCISES, folder / cli_lessons.EXERCISES_DIR)):
        assert [path.read_bytes() for path in sorted(copies.glob("*")) if path.is_file()] == [
            path.read_bytes() for path in originals
        ]
    changed = folder / LESSONS[0].name
    changed.write_text("my notes", encoding="utf-8")
    assert cli.main(["lessons", "--copy", "--dir", str(folder)]) == 0
    assert changed.read_text(encoding="utf-8") == "my notes"
    assert f"{changed} (yours, kept)" in capsys.readouterr().out


def test_an_installed_package_finds_its_own_lessons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "nanoserve"
    monkeypatch.setattr(cli_lessons, "files", lambda name: tmp_path / name)
    with pytest.raises(ValueError, match="not installed"):
        cli_lessons.lessons_dir()
    (package / "lessons").mkdir(parents=True)
    (package / "lessons" / LESSONS[0].name).write_bytes(LESSONS[0].read_bytes())
    assert cli_lessons.lessons_dir() == package / "lessons"
    assert [lesson.name for lesson in cli_lessons.read_lessons()] == [LESSONS[0].stem]


def test_a_wheel_takes_lessons_and_exercises_along() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["force-include"] == {
        "lessons": "nanoserve/lessons",
        "exercises": "nanoserve/exercises",
        "benchmarks/results": "nanoserve/results",
        "examples": "nanoserve/examples",
    }


def test_every_committed_result_is_read_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert results.read_result(path.stem) == json.loads(path.read_text(encoding="utf-8"))
    monkeypatch.setattr(results, "files", lambda name: tmp_path / name)
    with pytest.raises(ValueError, match="no result 'execution' is installed"):
        results.read_result("execution")
    (tmp_path / "nanoserve" / "results").mkdir(parents=True)
    (tmp_path / "nanoserve" / "results" / "execution.json").write_text("{}", encoding="utf-8")
    assert results.read_result("execution") == {}


def test_bad_requests_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["lessons", "--json"]) == cli.BAD_INPUT
    assert "--list" in capsys.readouterr().err
    monkeypatch.setattr(cli_lessons.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["lessons", "--dir", str(tmp_path)]) == cli.BAD_INPUT
    assert capsys.readouterr().err.count("\n") == 1


# Sizes


def test_loads_fit_the_model_of_the_machine() -> None:
    here = scale("cpu")
    limit = get_model("nanostory").vocab_size
    for load in (here.long_prompt(), here.system_prompt()):
        assert load.longest <= 4096
        assert max(max(a.prompt_token_ids) for a in load.arrivals) < limit
    assert scale("cpu") == here


def test_a_shape_is_a_config_that_the_engine_reads(tmp_path: Path) -> None:
    from nanoserve.client import InProcessClient
    from nanoserve.config import EngineConfig

    shape = MODELS["nanostory"]
    (tmp_path / "config.json").write_text(json.dumps(shape_config(shape)), encoding="utf-8")
    config = EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", num_blocks=16, max_model_len=64)
    with InProcessClient(config) as client:
        assert client.info.vocab_size == shape.vocab_size
