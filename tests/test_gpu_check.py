"""Laws of `scripts/gpu_check.sh`: a part that hangs, dies or fails is told and stops no other; a dry check runs without
a GPU, and never among results; what it needs and lacks is said."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from gpu_check import graphs
from gpu_check.kernels import check_dtype
from gpu_check.part import Part
from gpu_check.parts import PARTS, TOTAL_S, PartSpec, chosen, is_good, run_parts
from gpu_check.wheels import least_versions, missing, numbers, pinned

from nanoserve.execution import Execution

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MACHINE = {"device": None, "torch": "2.13.0", "triton": None, "python": "3.11.7"}
KEYS = {
    "part", "status", "dry", "machine", "seconds", "limit_s", "results", "lines", "failures", "not_run", "skipped",
}  # fmt: skip


def run_check(folder: Path, *args: str, python: str = sys.executable, **env: str) -> subprocess.CompletedProcess[str]:
    """From a folder of no interest, with hardly anything on PATH."""
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHON": python, "OMP_NUM_THREADS": "1", **env}
    command = [str(ROOT / "scripts" / "gpu_check.sh"), *args]
    return subprocess.run(command, cwd=folder, env=bare, capture_output=True, text=True, timeout=240, check=False)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# A dry check


Checked = tuple[subprocess.CompletedProcess[str], Path]  # and where its reports are


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """The parts that start no servers."""
    folder = tmp_path_factory.mktemp("dry")
    before = sorted(RESULTS.rglob("*"))
    done = run_check(folder, "--dry", "--only", "kernels,ladder,speed", "--out", "out")
    assert sorted(RESULTS.rglob("*")) == before, "a dry check wrote among results"
    return done, folder / "out"


@pytest.mark.slow
def test_every_part_of_a_dry_check_passes_and_leaves_its_report(dry: Checked) -> None:
    done, out = dry
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.iterdir()) == [
        "kernels.json", "ladder.json", "speed.json", "summary.json",
    ]  # fmt: skip
    for name in ("kernels", "ladder", "speed"):
        report = read(out / f"{name}.json")
        assert set(report) == KEYS
        assert (report["part"], report["status"], report["dry"]) == (name, "passed", True)
        assert 0 < report["seconds"] < report["limit_s"]
        assert report["results"]
        assert all(isinstance(cell, str) for line in report["lines"] for cell in line)
        assert report["failures"] == report["not_run"] == {}
        assert report["skipped"], f"{name} does not say what it cannot do without a GPU"
        assert report["machine"]["torch"] == torch.__version__


@pytest.mark.slow
def test_every_line_of_the_reports_is_in_one_table_on_stdout(dry: Checked) -> None:
    done, out = dry
    summary = read(out / "summary.json")
    assert summary["passed"]
    assert summary["dry"]
    assert summary["command"] == "scripts/gpu_check.sh --dry --only kernels,ladder,speed --out out"
    assert list(summary["parts"]) == ["kernels", "ladder", "speed"]
    for name, part in summary["parts"].items():
        assert f"| {name} | **passed** |" in done.stdout
        for what, figure in part["lines"]:
            assert f"| {name} | {what} | {figure} |" in done.stdout
        for what, why in part["skipped"].items():
            assert f"| {name} | {what} | skipped: {why} |" in done.stdout
    assert done.stdout.count("|---|---|---|") == 1


@pytest.mark.slow
def test_every_line_of_progress_says_how_long_it_has_been(dry: Checked) -> None:
    lines = dry[0].stderr.splitlines()
    assert all(re.match(r"\[ *\d+\.\d s\] \S", line) for line in lines), dry[0].stderr
    assert "dry, as asked" in lines[0]


@pytest.mark.slow
def test_every_stage_has_its_figures_in_the_ladder(dry: Checked) -> None:
    results = read(dry[1] / "ladder.json")["results"]
    for stage in ("v0", "chunked", "shared", "v1"):
        assert all(rate > 0 for rate in results[f"tiny-llama, {stage}: decode"].values())
        assert results[f"tiny-llama, {stage}: long prompt"]["itl_max_s"] > 0
    computed = {
        stage: results[f"tiny-llama, {stage}: shared prefix"]["prompt_tokens_computed"] for stage in ("v0", "v1")
    }
    assert computed == {"v0": 3 * (160 + 32), "v1": 160 + 6 * 32}


def test_every_part_runs_dry(tmp_path: Path) -> None:
    done = run_check(tmp_path, "--dry", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert list(read(tmp_path / "out" / "summary.json")["parts"]) == list(PARTS)
    gaps = read(tmp_path / "out" / "step_gap.json")["results"]
    for layout in ("inproc", "core_process", "split_runner"):
        assert gaps[f"gap, {layout}"]["num_steps"] > 0
        for way in ("step by step", "one step ahead"):
            assert gaps[f"admission, {layout}, {way}"]["wait_p50_s"] > 0


# Bad input


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--only", "kernels,speeed"], ["'speeed'", "kernels,graphs,ladder,speed,step_gap"]),
        (["--only", ""], ["''", "kernels,graphs,ladder,speed,step_gap"]),
        (["--limit", "kernel=3"], ["--limit", "'kernel'"]),
        (["--limit", "kernels=soon"], ["kernels=soon", "--limit kernels=60"]),
        (["--limit", "kernels=0"], ["kernels=0", "--limit kernels=60"]),
        (["--dry", "--out", str(RESULTS / "gpu-none")], ["dry", "results"]),
    ],
)
def test_every_refusal_is_one_line_with_the_fix(args: list[str], words: list[str], tmp_path: Path) -> None:
    done = run_check(tmp_path, *args)
    assert done.returncode == 2
    (refusal,) = [line for line in done.stderr.splitlines() if line.startswith("gpu_check: ")]
    assert all(word in refusal for word in words), refusal
    assert done.stdout == ""
    assert not (RESULTS / "gpu-none").exists()


def test_every_missing_package_is_named_with_where_to_get_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    done = run_check(tmp_path, "--dry", python=python)
    assert done.returncode == 2
    assert all(line in done.stderr for line in ("lacks cloudpickle==", "WHEELS is not set", "gpu_wheels.txt"))
    assert "WHEELS=nowhere is no folder" in run_check(tmp_path, python=python, WHEELS="nowhere").stderr
    (tmp_path / "empty").mkdir()
    done = run_check(tmp_path, python=python, WHEELS="empty")
    assert done.returncode == 2
    assert "WHEELS=" in done.stderr.splitlines()[-1]
    assert "did not do" in done.stderr.splitlines()[-1]


def test_every_wheel_has_the_version_of_the_constraints() -> None:
    known = (ROOT / "constraints.txt").read_text().splitlines()
    listed = pinned()
    assert set(listed) <= set(known)
    # Hub ids, hand-written einsum notation, charts and tables of a terminal are no part of the check.
    unneeded = {"torch", "huggingface-hub", "einops", "matplotlib", "rich"}
    assert set(least_versions()) - unneeded <= {line.partition("==")[0] for line in listed}


def test_only_what_is_absent_or_too_old_is_missing() -> None:
    assert missing(["pytest==1.0", "no-such-package-here==1.0"], {}) == ["no-such-package-here==1.0"]
    assert missing(["pytest==1.0"], {"pytest": "9999"}) == ["pytest==1.0"]
    assert numbers("2.11.0+cu130") == (2, 11, 0)
    assert numbers("2.9") < numbers("2.11")


# Parts that go wrong


def run_fakes(tmp_path: Path, limit_s: float = 60.0, **bodies: str) -> dict[str, dict[str, Any]]:
    """Parts whose `run(part)` has these bodies."""
    for name, body in bodies.items():
        (tmp_path / f"fake_{name}.py").write_text(f"import os, subprocess, sys, time\n\ndef run(part):\n    {body}\n")
    parts = {name: PartSpec(f"fake_{name}", limit_s, is_fixed=True) for name in bodies}
    env = {"PYTHONPATH": f"{ROOT / 'scripts'}{os.pathsep}{tmp_path}"}
    return run_parts(parts, tmp_path, machine=MACHINE, dry=True, env=env, cwd=tmp_path, began_s=time.monotonic())


GOOD = "part.keep('a', 1, ('a', 'one'))"


def test_a_part_that_hangs_is_ended_with_all_it_started_and_the_next_one_runs(tmp_path: Path) -> None:
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    hangs = f"part.keep('child', {child}.pid, ('a', 'one')); part.say('waits'); time.sleep(600)"
    started_s = time.monotonic()
    reports = run_fakes(tmp_path, limit_s=5.0, hangs=hangs, good=GOOD)
    assert time.monotonic() - started_s < 30
    assert reports["hangs"]["status"] == "timed out"
    assert reports["hangs"]["failures"] == {"hangs": "was ended after its limit of 5 s"}
    assert reports["hangs"]["lines"] == [["a", "one"]], "what it had found is lost"
    assert reports["good"]["status"] == "passed"
    assert not is_good(reports)
    assert has_ended(reports["hangs"]["results"]["child"])
    assert read(tmp_path / "hangs.json") == reports["hangs"]


def has_ended(pid: int) -> bool:
    """Gone, or dead and waiting for somebody to ask about it."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ("raise RuntimeError('no such luck')", "RuntimeError: no such luck"),
        ("part.keep('a', 1); os._exit(3)", "exited with code 3"),
        ("os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        ("os._exit(0)", "ended before the part did"),
        ("part.fail('a', 'off by 7')", "off by 7"),
        ("part.attempt('a', 0, lambda: 1 / 0)", "ZeroDivisionError"),
    ],
)
def test_every_way_to_fail_is_told_and_the_next_part_runs(body: str, failure: str, tmp_path: Path) -> None:
    reports = run_fakes(tmp_path, bad=body, good=GOOD)
    assert reports["bad"]["status"] == "failed"
    assert failure in " ".join(reports["bad"]["failures"].values())
    assert set(reports["bad"]) == KEYS
    assert reports["good"]["status"] == "passed"
    assert not is_good(reports)


def test_a_part_that_finds_nothing_has_not_passed(tmp_path: Path) -> None:
    reports = run_fakes(tmp_path, empty="pass", skips="part.skip('all', 'no GPU')")
    assert [report["status"] for report in reports.values()] == ["failed", "skipped"]


def test_what_does_not_fit_into_the_time_is_not_begun(tmp_path: Path) -> None:
    body = "part.keep('a', 1); part.attempt('b', 100, lambda: part.fail('b', 'was begun'))"
    report = run_fakes(tmp_path, late=body)["late"]
    assert report["status"] == "passed"
    assert list(report["not_run"]) == ["b"]
    assert "takes about 100 s" in report["not_run"]["b"]


def test_a_limit_of_the_user_holds(tmp_path: Path) -> None:
    done = run_check(tmp_path, "--dry", "--only", "kernels", "--limit", "kernels=0.2", "--out", "out")
    assert done.returncode == 1
    assert "| kernels | **timed out** |" in done.stdout
    assert not read(tmp_path / "out" / "summary.json")["passed"]


def test_all_parts_fit_into_nine_minutes() -> None:
    assert sum(spec.share_s for spec in PARTS.values()) <= TOTAL_S < 8.75 * 60
    assert list(chosen(None, [])) == list(PARTS)
    assert chosen("speed", ["speed=7"])["speed"].share_s == 7


# Planted bugs


def make_part(tmp_path: Path) -> Part:
    return Part(
        name="p", module="", path=tmp_path / "p.json", machine=MACHINE, dry=True, limit_s=60, began_s=time.monotonic()
    )


def test_every_kernel_that_is_off_is_seen(tmp_path: Path) -> None:
    part = make_part(tmp_path)
    errors = {"right": lambda device: 1e-7, "wrong": lambda device: 0.1, "nan": lambda device: math.nan}
    cases = [("k", name, case) for name, case in errors.items()]
    check_dtype(part, "float32", [*cases, ("k", "raises", lambda device: 1 / 0)], torch.device("cpu"))
    assert sorted(part.failures) == ["k, float32, nan", "k, float32, raises", "k, float32, wrong"]


def test_every_other_token_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = make_part(tmp_path)
    for name, tokens in {"same": [1, 2], "other": [1, 3], "short": [1]}.items():
        monkeypatch.setattr(graphs, "run_engine", lambda config, tokens=tokens: ({"r0": tokens}, Execution()))
        graphs.compare(part, name, graphs.base_config(part, "nanostory"), {"r0": [1, 2]}, 0)
    assert sorted(part.failures) == ["other", "short"]
