"""Every exercise in its three forms: as shipped a hole says what to write, solved it passes, and a plausible wrong
answer is refused by a verdict that names the law, the step, and expected against got.

Cells run in this process here, without a kernel; in a kernel of their own in the tests marked slow. Wrong answers are
in tests/wrong_solutions.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from test_lessons import build_script, outputs_of, run_nbval
from wrong_solutions import WRONG, Wrong

from nanoserve.api import cli, cli_check
from nanoserve.blocks import SharedBlocks
from nanoserve.lab import check_child, check_report
from nanoserve.lab.check import NoEnd, check, show_solution
from nanoserve.lab.check_child import Cell, read_cells, run_cells
from nanoserve.lab.check_engine import InEngine
from nanoserve.lab.check_exercises import EXERCISES, Exercise, exercises_dir, get_exercise, solution_source
from nanoserve.lab.check_report import NOT_BEGUN, PASSES, Report
from nanoserve.lab.laws import Verdict

HOLE = "raise NotImplementedError("
SLOW = {11, 14}  # seconds each: a model, and an interpreted kernel
SLOW_WRONG = {4, 11, 12, 14, 16}  # seconds for each


def _cases(slow: set[int], wrongs: bool) -> list[Any]:
    """An exercise, or one with a wrong answer; those of `slow` are marked so."""
    cases = []
    for number, exercise in EXERCISES.items():
        marks = [pytest.mark.slow] if number in slow else []
        if wrongs:
            cases += [pytest.param(exercise, w, marks=marks, id=f"{exercise.name}-{w.what}") for w in WRONG[number]]
        else:
            cases.append(pytest.param(exercise, marks=marks, id=exercise.name))
    return cases


each_exercise = pytest.mark.parametrize("exercise", _cases(set(), False))
each_exercise_here = pytest.mark.parametrize("exercise", _cases(SLOW, False))
each_wrong = pytest.mark.parametrize(("exercise", "wrong"), _cases(set(), True))
each_wrong_here = pytest.mark.parametrize(("exercise", "wrong"), _cases(SLOW_WRONG, True))


def notebook_of(exercise: Exercise) -> Path:
    return exercises_dir() / f"{exercise.name}.ipynb"


def cells_with(exercise: Exercise, answer: str | None) -> list[Cell]:
    """Of the notebook as shipped; with an answer instead of the cell with the holes."""
    cells = read_cells(notebook_of(exercise))
    assert sum(HOLE in cell.source for cell in cells) == 1
    if answer is None:
        return cells
    return [Cell(cell.name, answer) if HOLE in cell.source else cell for cell in cells]


def verdict_on(exercise: Exercise, answer: str | None) -> Report:
    return check(exercise.number, run_cells(cells_with(exercise, answer))[exercise.answer])


def is_helpful(report: Report, wrong: Wrong) -> bool:
    """Names the law, where it shows, and expected against got."""
    if report.first is None or report.first.verdict is None:
        return False
    verdict, text = report.first.verdict, str(report)
    where = f"step {verdict.step}" if verdict.step else f"request {verdict.request}" if verdict.request else wrong.law
    parts = (f"Law '{wrong.law}' is broken", where, "expected:", "got:")
    return report.first.law == wrong.law and verdict.expected != verdict.got and all(part in text for part in parts)


# In this process


def test_there_are_at_least_ten_and_each_has_wrong_answers() -> None:
    assert len(EXERCISES) >= 10
    assert set(WRONG) == set(EXERCISES)
    assert all(len(wrongs) >= 2 for wrongs in WRONG.values())


@each_exercise_here
def test_every_exercise_as_shipped_says_what_is_to_be_written(exercise: Exercise) -> None:
    report = verdict_on(exercise, None)
    assert report.state == NOT_BEGUN
    assert re.match(r"about \d+ lines?: ", report.hole)
    assert any(f'{HOLE}"{report.hole}")' in cell.source for cell in read_cells(notebook_of(exercise)))


@each_exercise_here
def test_every_solution_passes(exercise: Exercise) -> None:
    report = verdict_on(exercise, solution_source(exercise))
    assert report.state == PASSES, str(report)
    assert str(report).endswith("All laws hold.")


@each_wrong_here
def test_every_wrong_answer_is_refused_in_words(exercise: Exercise, wrong: Wrong) -> None:
    report = verdict_on(exercise, wrong.of(solution_source(exercise)))
    assert is_helpful(report, wrong), str(report)


def test_a_verdict_without_its_law_would_be_seen() -> None:
    exercise, wrong = EXERCISES[7], WRONG[7][0]
    report = verdict_on(exercise, wrong.of(solution_source(exercise)))
    assert not is_helpful(report, wrong._replace(law="hits"))
    assert not is_helpful(verdict_on(exercise, solution_source(exercise)), wrong)


def test_every_step_that_breaks_a_law_has_its_picture() -> None:
    exercise = EXERCISES[3]
    report = verdict_on(exercise, WRONG[3][2].of(solution_source(exercise)))
    assert report.scene is not None
    assert report.first is not None
    assert report.first.verdict is not None
    text = report.scene.text()
    assert f">{report.first.verdict.step}" in text
    assert "yours" in text
    assert "expected" in text
    assert "data:image/png" in report._repr_html_()
    tables = verdict_on(EXERCISES[8], WRONG[8][1].of(solution_source(EXERCISES[8])))
    assert "block tables in step" in str(tables)


@pytest.mark.parametrize(
    ("number", "what", "told"),
    [
        (1, "no-watermark", "r1 nothing: watermark(need 7, free 6)"),
        (1, "longest-ignored", "a budget of 32, and blocks for 160"),
        (1, "reasons-by-request", "left_out by id: request.id -> Reason"),
        (1, "stops-at-the-ignored", "; 17-tokens, before it, ignored in that step"),
        (2, "admits-after-a-preemption", "long nothing: preemption_this_step"),
        (2, "one-behind-means-decode", "r3 1 (the end of its prompt)"),
        (
            2,
            "output-means-decode",
            "r1 8 (of what its preemption in step 25 lost, the 17 tokens of its answer included)",
        ),
        (3, "walks-over-a-copy", "no tokens for r4: it was preempted in this very step, and has left self.running"),
    ],
)
def test_every_other_plan_is_told_by_its_rule(number: int, what: str, told: str) -> None:
    wrong = next(wrong for wrong in WRONG[number] if wrong.what == what)
    report = verdict_on(EXERCISES[number], wrong.of(solution_source(EXERCISES[number])))
    assert report.first is not None
    assert report.first.verdict is not None
    assert told in report.first.verdict.expected


def test_tokens_for_whoever_was_just_preempted_are_in_the_picture() -> None:
    wrong = next(wrong for wrong in WRONG[3] if wrong.what == "walks-over-a-copy")
    told = str(verdict_on(EXERCISES[3], wrong.of(solution_source(EXERCISES[3]))))
    assert re.search(r"^  r4 .* x\+6$", told, re.MULTILINE)
    assert "Also broken, perhaps by the same mistake:\n  runs, load tight-pool, step 42, request r4: " in told


def unexplained(report: Report, text: str) -> list[str]:
    """Broken laws of which the words behind the table do not say what was expected."""
    words = " ".join(text.partition("\n\n")[2].split())
    broken = [line for line in report.lines if line.verdict and not line.verdict.holds]
    return [line.law for line in broken if line.verdict and " ".join(line.verdict.expected.split()) not in words]


def test_every_broken_law_has_a_line_of_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    report = verdict_on(EXERCISES[8], WRONG[8][1].of(solution_source(EXERCISES[8])))
    assert sum(line.state.startswith("BROKEN") for line in report.lines) == 2
    assert unexplained(report, str(report)) == []
    monkeypatch.setattr(check_report, "_others", lambda lines, first: iter(()))
    assert unexplained(report, str(report)) == ["tokens"]


def test_plans_that_differ_in_reasons_alone_are_shown_once() -> None:
    wrong = next(wrong for wrong in WRONG[1] if wrong.what == "reasons-of-now")
    report = verdict_on(EXERCISES[1], wrong.of(solution_source(EXERCISES[1])))
    assert report.scene is not None
    text = report.scene.text()
    assert text.count("  step ") == 1
    assert "yours     stream-0: paused(stream-0)" in text
    assert "expected  none" in text
    assert "<pre>  The tokens are the same; the reasons of step 1 are not:" in report._repr_html_()


@pytest.mark.parametrize(
    "line", ["pass", "return StepPlan(1, {'nobody': 3})", "raise SystemExit(3)", "self.running = None", "1 / 0"]
)
def test_whatever_a_policy_does_is_a_verdict_with_a_picture(line: str) -> None:
    names: dict[str, Any] = {}
    text = f"from nanoserve.scheduler import *\nclass Mine(UnifiedScheduler):\n    def schedule(self):\n        {line}"
    exec(text, names)
    report = check(3, names["Mine"])
    assert report.state.startswith("fails ")
    assert "Traceback" not in str(report)
    assert "Law '" in report._repr_html_()


def test_what_is_no_class_at_all_is_a_verdict() -> None:
    assert all(check(number, 5).state.startswith("fails ") for number in EXERCISES if number not in (11, 12))


def test_an_endless_loop_is_a_verdict() -> None:
    loop = solution_source(EXERCISES[7]).replace(
        "found: list[int] = []", "found: list[int] = []\n        while True: pass"
    )
    answer = run_cells(cells_with(EXERCISES[7], loop))[EXERCISES[7].answer]
    report = check(7, answer, time_limit_s=0.4)
    assert report.state == "fails runs"
    assert [line.state for line in report.lines if line.law in ("lengths", "pure")] == ["-", "-"]
    assert "no end within 0.4 s" in str(report)
    assert "07_last_token.ipynb, cell 2, line" in str(report)


def test_an_endless_loop_in_an_aim_is_no_verdict_on_the_aim() -> None:
    def endless(mine: type, pairs: object) -> tuple[str, Verdict]:
        raise NoEnd("no end within 1 s")

    judge = get_exercise(7).judge()
    assert isinstance(judge, InEngine)
    report = replace(judge, aims=[replace(aim, look=endless) for aim in judge.aims])(SharedBlocks)
    assert report.state == "fails runs"
    assert {line.law: line.state for line in report.lines}["hits"] == "-"


def test_every_line_of_the_readers_own_is_named() -> None:
    broken = solution_source(EXERCISES[1]).replace("draft = Draft(self.budget)", "draft = Draft(self.budgets)")
    report = verdict_on(EXERCISES[1], broken)
    assert report.state == "fails runs"
    assert "has no attribute 'budgets'" in str(report)
    assert "at:       01_phase_split.ipynb, cell 3, line 3, in schedule" in str(report)
    assert "Traceback" not in str(report)


def test_a_solution_is_folded_and_whole() -> None:
    folded = show_solution(3)
    assert "<details>" in folded._repr_html_()
    assert "def schedule" not in repr(folded)
    assert "def schedule" in str(folded.source)


def test_an_unknown_exercise_is_one_line() -> None:
    with pytest.raises(ValueError, match="use one of 1 to 16"):
        get_exercise(99)


# The notebooks


def output_of_check(notebook: nbformat.NotebookNode, exercise: Exercise) -> str:
    """What the cell that calls `check` shows, as text."""
    cells = [cell for cell in notebook.cells if f"check({exercise.number}, " in cell.source]
    assert len(cells) == 1
    [output] = cells[0].outputs
    return output.data["text/plain"]


@each_exercise
def test_every_exercise_has_the_form(exercise: Exercise) -> None:
    notebook = nbformat.read(notebook_of(exercise), 4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert text.splitlines()[0].endswith("?")
    for number, what in enumerate(("the question to ask", "the invariant", "pseudo-code"), 1):
        assert f"<details><summary>Hint {number}: {what}</summary>" in text
    assert "## Your turn" in text
    assert any(f"show_solution({exercise.number})" in cell.source for cell in notebook.cells)
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs_of(notebook))
    assert "A hole is left: about " in output_of_check(notebook, exercise)


@each_exercise
def test_every_exercise_is_what_its_source_says(exercise: Exercise) -> None:
    notebook = nbformat.read(notebook_of(exercise), 4)
    source = build_script().read_source(notebook_of(exercise).with_suffix(".py"))
    assert [(c.id, c.cell_type, c.source) for c in notebook.cells] == [
        (c.id, c.cell_type, c.source) for c in source.cells
    ]
    assert notebook.metadata == source.metadata


def test_every_notebook_is_an_exercise_and_every_other_solution_has_a_file() -> None:
    folder = exercises_dir()
    assert sorted(path.stem for path in folder.glob("*.ipynb")) == [e.name for e in EXERCISES.values()]
    without = [e.name for e in EXERCISES.values() if not e.twin]
    assert sorted(path.stem for path in (folder / "solutions").glob("*.py")) == without


def executed(exercise: Exercise, answer: str) -> str:
    """The verdict in a fresh kernel."""
    notebook = nbformat.read(notebook_of(exercise), 4)
    for cell in notebook.cells:
        if HOLE in cell.source:
            cell.source = answer
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": exercises_dir()}}).execute()
    return output_of_check(notebook, exercise)


def test_one_exercise_runs_as_shipped_in_a_kernel(tmp_path: Path) -> None:
    done = run_nbval(notebook_of(EXERCISES[7]), tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
@each_exercise
def test_every_exercise_runs_as_shipped_in_a_kernel(exercise: Exercise, tmp_path: Path) -> None:
    done = run_nbval(notebook_of(exercise), tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
@each_exercise
def test_every_solution_passes_in_a_kernel(exercise: Exercise) -> None:
    assert executed(exercise, solution_source(exercise)).endswith("All laws hold.")


@pytest.mark.slow
@each_wrong
def test_every_wrong_answer_is_refused_in_a_kernel(exercise: Exercise, wrong: Wrong) -> None:
    told = executed(exercise, wrong.of(solution_source(exercise)))
    assert f"Law '{wrong.law}' is broken" in told
    assert re.search(r"^  expected: \S", told, re.MULTILINE)
    assert re.search(r"^  got:      \S", told, re.MULTILINE)


# The command


class Cli:
    """`nanoserve check` on a folder of copies."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        assert cli.main(["lessons", "--copy", "--dir", str(folder)]) == 0

    def __call__(self, *words: str) -> tuple[int, str]:
        self.capsys.readouterr()
        code = cli.main(["check", *words, "--dir", str(self.folder)])
        out, err = self.capsys.readouterr()
        return code, out + err

    def answer(self, number: int, answer: str) -> None:
        path = self.folder / cli_check.EXERCISES_DIR / f"{EXERCISES[number].name}.ipynb"
        notebook = nbformat.read(path, 4)
        for cell in notebook.cells:
            if HOLE in cell.source:
                cell.source = answer
        nbformat.write(notebook, path)


@pytest.fixture
def checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "mine", capsys)


def test_the_table_has_the_state_of_every_exercise(checks: Cli) -> None:
    right, wrong = solution_source(EXERCISES[7]), WRONG[5][0].of(solution_source(EXERCISES[5]))
    checks.answer(7, right)
    checks.answer(5, wrong)
    checks.answer(6, "class Other: pass")
    code, out = checks("--json")
    table: dict[str, Any] = json.loads(out)
    states = {row["exercise"]: row["state"] for row in table["exercises"]}
    assert code == cli.FAILED
    assert not table["passed"]
    assert states.pop("07_last_token") == PASSES
    assert states.pop("05_hash_chain") == "fails keys"
    assert states.pop("06_reference_counts").startswith("does not run: 06_reference_counts.ipynb defines no MyCounts")
    assert set(states.values()) == {NOT_BEGUN}
    assert len(states) == len(EXERCISES) - 3


def test_the_exit_code_is_the_verdict(checks: Cli, tmp_path: Path) -> None:
    code, out = checks("7")
    assert code == cli.FAILED
    assert "A hole is left: about 10 lines" in out
    checks.answer(7, solution_source(EXERCISES[7]))
    code, out = checks("7")
    assert code == 0
    assert "All laws hold." in out
    wrong = tmp_path / "mine.py"
    wrong.write_text(
        "\n".join(cell.source for cell in cells_with(EXERCISES[7], WRONG[7][0].of(solution_source(EXERCISES[7]))))
    )
    code, out = checks("7", "--file", str(wrong), "--json")
    report = json.loads(out)
    assert code == cli.FAILED
    assert report["state"] == "fails lengths"
    assert report["first"]["verdict"]["expected"]


@pytest.mark.parametrize(
    ("line", "told"),
    [("while True: pass", "no end within"), ("import os; os._exit(3)", "exited with code 3")],
)
def test_whatever_an_answer_does_is_a_verdict(checks: Cli, line: str, told: str) -> None:
    checks.answer(4, f"def pick_budget(measure, max_gap_ms):\n    {line}")
    code, out = checks("4", "--time-limit", "0.5")
    assert code == cli.FAILED
    assert told in out


def test_what_cells_print_is_no_part_of_a_verdict(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lessons", "--copy", "--dir", str(tmp_path)]) == 0
    mine = tmp_path / "mine.py"
    mine.write_text("print('a table')\ndef pick_budget(measure, max_gap_ms):\n    print('my own')\n    return 8\n")
    for words in (("4",), ("4", "--file", str(mine))):
        capfd.readouterr()
        assert cli.main(["check", *words, "--dir", str(tmp_path)]) == cli.FAILED
        out, err = capfd.readouterr()
        assert out.startswith("Exercise 04_chunk_size")
        assert not any(printed in out + err for printed in ("Measured(", "a table"))
        assert ("my own" in err) == (len(words) > 1)


def test_a_folder_without_copies_is_told_how_to_get_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("3",)):
        assert cli.main(["check", *words, "--dir", str(tmp_path)]) == cli.BAD_INPUT
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert f"nanoserve lessons --copy --dir {tmp_path}" in told


@pytest.mark.parametrize("inside", [".", "exercises"])
def test_a_reader_in_the_copies_need_not_name_them(
    checks: Cli, monkeypatch: pytest.MonkeyPatch, inside: str, tmp_path: Path
) -> None:
    monkeypatch.chdir(checks.folder / inside)
    assert cli_check.copies_at(None) == checks.folder
    assert cli_check.copies_at(str(tmp_path)) == tmp_path
    assert cli.main(["check", "7"]) == cli.FAILED
    assert "A hole is left" in checks.capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "7"]) == cli.BAD_INPUT
    assert "say with --dir where yours are" in checks.capsys.readouterr().err


def test_bad_requests_are_one_line(checks: Cli, tmp_path: Path) -> None:
    checks.answer(4, "1 / 0")
    checks.answer(5, "class MyHashes(:")
    for words, told in {
        ("99",): "use one of 1 to 16",
        ("--file", "x.py"): "--file means nothing without a number",
        ("3", "--file", str(tmp_path / "none.py")): "is not there",
        ("3", "--time-limit", "0"): "--time-limit must be",
        ("4",): "04_chunk_size.ipynb, cell 3, line 1: ZeroDivisionError",
        ("5",): "05_hash_chain.ipynb, cell 3, line 1: ",
    }.items():
        code, out = checks(*words)
        assert code == cli.BAD_INPUT, out
        assert out.count("\n") == 1
        assert told in out


def test_a_file_that_is_no_notebook_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ipynb"
    path.write_text("[]")
    with pytest.raises(ValueError, match="neither a notebook"):
        check_child.read_cells(path)


def test_the_list_and_the_judges_need_no_torch() -> None:
    code = "import sys, nanoserve.lab.check_exercises, nanoserve.api.cli_check; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
