"""Laws of `nanoserve grade`: whatever a class does, the answer is a verdict in plain words, with load and step."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from nanoserve.api.cli import main
from nanoserve.lab import laws, trial
from nanoserve.lab.faults import FAULTS
from nanoserve.lab.figures import jain
from nanoserve.lab.grading import Grade, Result
from nanoserve.lab.laws import LAWS, Verdict
from nanoserve.lab.policy_file import Found
from nanoserve.lab.trial_loads import FIXED, MEASURED, NUM_RANDOM
from nanoserve.lab.untouched import Untouched
from nanoserve.record import read_trace
from nanoserve.scheduler import BaseScheduler, UnifiedScheduler

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "shortest_first.py"
PAGE = ROOT / "docs" / "grade.md"
IMPORTS = """
from nanoserve.block_pool import NO_HIT
from nanoserve.blocks import PrivateBlocks, SharedBlocks
from nanoserve.scheduler import BaseScheduler, Draft, PhaseSplitScheduler, UnifiedScheduler
"""


def write_policy(folder: Path, body: str, name: str = "my_policy.py") -> str:
    path = folder / name
    path.write_text(IMPORTS + textwrap.dedent(body))
    return str(path)


def in_schedule(line: str) -> str:
    """A scheduler that runs `line` when it decides step 4."""
    return f"""
class Mine(UnifiedScheduler):
    def schedule(self):
        if self._step == 3:
            {line}
        return super().schedule()
"""


class Cli:
    """Runs `nanoserve grade` in this process; the child is a real one."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capfd = folder, capfd

    def __call__(self, body: str, *flags: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr); `body` is a class, or `fault:NAME`."""
        policy = body if body.startswith("fault:") else write_policy(self.folder, body)
        code = main(["grade", policy, *flags])
        out, err = self.capfd.readouterr()
        return code, out, err

    def json(self, body: str, *flags: str) -> tuple[int, dict[str, Any]]:
        code, out, _ = self(body, "--json", *flags)
        return code, json.loads(out)


@pytest.fixture
def grade(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, capfd)


ONE_LOAD = ("--load", "tight-pool", "--time-limit", "20")
GOOD = "class Mine(UnifiedScheduler): pass"


def broken_laws(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {law: v for result in report["results"] for law, v in result["verdicts"].items() if not v["holds"]}


# A class that keeps the laws


def test_every_law_holds_for_a_class_that_changes_nothing(grade):
    code, report = grade.json(GOOD)
    assert code == 0
    assert report["passed"]
    assert [result["load"] for result in report["results"]][: len(FIXED)] == list(FIXED)
    assert len(report["results"]) == len(FIXED) + NUM_RANDOM
    assert all(list(result["verdicts"]) == list(LAWS) for result in report["results"])
    for load in MEASURED:
        mine = next(result["figures"] for result in report["results"] if result["load"] == load)
        assert mine == report["beside"][load]["UnifiedScheduler"]
        assert set(report["beside"][load]) == {"PhaseSplitScheduler", "ChunkedNoMixScheduler", "UnifiedScheduler"}
    beside = report["beside"]["long-prompts"]
    assert beside["PhaseSplitScheduler"] != beside["UnifiedScheduler"]


def test_every_grade_is_the_same_for_the_same_seed_and_another_for_another(grade):
    first, again, other = (grade(GOOD, "--json", "--seed", seed)[1] for seed in ("3", "3", "4"))
    assert first == again
    names = [{result["load"] for result in json.loads(out)["results"]} for out in (first, other)]
    assert names[0] & names[1] == set(FIXED)


OPTIONS = {
    "a scheduler that swaps": """
        class Mine(PhaseSplitScheduler):
            fixed = {**PhaseSplitScheduler.fixed, "preemption_mode": "swap"}
        """,
    "a scheduler with a budget of its own": """
        class Mine(PhaseSplitScheduler):
            @classmethod
            def default_budget(cls, max_model_len, device):
                return 2 * max_model_len
        """,
    "a scheduler for priorities": "class Mine(UnifiedScheduler):\n    fixed = {'policy': 'priority'}",
    "a block manager": "class Mine(SharedBlocks): pass",
    "a block manager that swaps": "class Mine(PrivateBlocks): pass",
    "the last of a family": "class Mine(BaseScheduler): pass\nclass Last(Mine, UnifiedScheduler): pass",
}


@pytest.mark.parametrize("what", OPTIONS)
def test_every_kind_of_class_that_is_right_passes(grade, what):
    code, out, _ = grade(textwrap.dedent(OPTIONS[what]))
    assert code == 0, out
    assert f"All {len(LAWS)} laws hold on {len(FIXED) + NUM_RANDOM} loads." in out


BY_HAND = """
class Mine:
    can_swap = False

    def __init__(self, num_blocks, block_size, **options):
        self.inner = PrivateBlocks(num_blocks, block_size, **options)
        self.num_blocks, self.block_size, self.stats = num_blocks, block_size, self.inner.stats

    num_free_blocks = property(lambda self: self.inner.num_free_blocks)
    lookup = lambda self, request: self.inner.lookup(request)
    fits = lambda self, num_tokens: self.inner.fits(num_tokens)
    demand = lambda self, *a, **k: self.inner.demand(*a, **k)
    allocate = lambda self, *a, **k: self.inner.allocate(*a, **k)
    commit = forget = lambda self, request, num_tokens: None
    swap_out = swap_in = lambda self, request: None
    free = lambda self, request: self.inner.free(request)
    take_events = lambda self: []
    take_replaced = lambda self: {}
    reset = lambda self: self.inner.reset()
"""


def test_every_law_is_looked_at_in_a_block_manager_that_derives_from_none_of_ours(grade):
    assert grade(BY_HAND)[0] == 0
    keeps = BY_HAND.replace(
        "free = lambda self, request: self.inner.free(request)", "free = lambda self, request: None"
    )
    code, report = grade.json(keeps, "--load", "burst")
    assert code == 1
    assert broken_laws(report)["returned"]["expected"] == "79 free blocks when all have ended"


def test_every_seam_beside_can_be_chosen(grade):
    code, report = grade.json("class Mine(SharedBlocks): pass", "--scheduler", "phase_split", "--load", "long-prompts")
    assert code == 0
    assert set(report["beside"]["long-prompts"]) == {"PrivateBlocks", "V0CachedBlocks", "SharedBlocks"}
    with_unified = grade.json("class Mine(SharedBlocks): pass", "--load", "long-prompts")[1]
    assert report["results"][0]["figures"]["itl_max_ms"] > 2 * with_unified["results"][0]["figures"]["itl_max_ms"]


def test_the_example_passes_and_starves_without_its_patience(grade):
    source = EXAMPLE.read_text()
    assert grade(source.replace('"""A policy', '"""x', 1))[0] == 0
    code, out, _ = grade(source.replace("AGEING = 4", "AGEING = 0"), "--load", "stream-of-shorts")
    assert code == 1
    assert "request long: law 'progress' is broken" in out


def test_the_page_shows_what_the_command_prints(capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = PAGE.read_text()
    assert EXAMPLE.read_text().split('"""', 2)[2].strip() in page
    for command in ("examples/shortest_first.py --load burst", "fault:output-means-decode --hint 1"):
        main(["grade", *command.split()])
        printed = capfd.readouterr().out
        block = page.split(f"$ nanoserve grade {command}\n")[1].split("```")[0]
        assert [line.rstrip() for line in printed.splitlines()] == [line.rstrip() for line in block.splitlines()]


# A class that does not: name -> body, (law, step), words of the report
HOSTILE = {
    "raises": (in_schedule("{}['nope']"), ("runs", 4), ["KeyError: 'nope'", "my_policy.py:9, in schedule"]),
    "ends the process": (in_schedule("raise SystemExit(3)"), ("runs", 4), ["ended the process (exit code 3)"]),
    "ends it at once": (in_schedule("import os; os._exit(5)"), ("runs", 4), ["the process exited with code 5"]),
    "kills itself": (in_schedule("import os; os.kill(os.getpid(), 9)"), ("runs", 4), ["was ended by SIGKILL"]),
    "hangs": (in_schedule("while True: pass"), ("runs", 4), ["no end within 3 s", "my_policy.py:9, in schedule"]),
    "waits": (in_schedule("import time; time.sleep(99)"), ("runs", 4), ["no end within 3 s", "my_policy.py:9"]),
    "eats memory": (
        in_schedule("self.eaten = [bytearray(1 << 22) for _ in range(10**6)]"),
        ("runs", 4),
        ["more memory than a trial may use"],
    ),
    "calls itself": (
        "class Mine(UnifiedScheduler):\n    def schedule(self):\n        return self.schedule()",
        ("runs", 1),
        ["RecursionError"],
    ),
    "returns nothing": (
        "class Mine(UnifiedScheduler):\n    def schedule(self):\n        return None",
        ("runs", 1),
        ["schedule() returned None, which is no StepPlan"],
    ),
    "is not written": ("class Mine(BaseScheduler): pass", ("runs", 1), ["schedule() is what a policy writes"]),
    "cannot be made": (
        "class Mine(UnifiedScheduler):\n    def __init__(self, config, blocks):\n        config.nope",
        ("runs", 0),
        ["no attribute 'nope'"],
    ),
    "refuses the config": ("class Mine(UnifiedScheduler):\n    fixed = {'watermark': 7}", ("runs", 0), ["got 7"]),
    "takes too much": (
        "class Mine(UnifiedScheduler):\n    def schedule(self):\n        self.budget = 8 + 4 * (self._step == 0)\n"
        "        plan = super().schedule()\n        self.budget = 8\n        return plan",
        ("plan", 1),
        ["at most 8 tokens", "12 tokens"],
    ),
    "gives nothing": (
        "class Mine(UnifiedScheduler):\n    def schedule(self):\n        return self._seal(Draft(0))",
        ("progress", 11),
        ["request r0", "none in 11 steps"],
    ),
    "never gives back": (
        "class Mine(SharedBlocks):\n    def free(self, request):\n        request.block_ids.pop(0) if request.block_ids"
        " else None\n        super().free(request)",
        ("blocks", 8),
        ["to be in its table or free again", "it is in neither"],
    ),
    "gives one block twice": (
        "class Mine(PrivateBlocks):\n    def allocate(self, request, n, hit=NO_HIT, **limits):\n"
        "        new = super().allocate(request, n, hit, **limits)\n        request.block_ids[-1:] = [1]\n"
        "        return new",
        ("blocks", 1),
        ["request r0", "each block once in a table"],
    ),
    "never ends in C": (
        in_schedule("import re; re.match('(a+)+$', 'a' * 60 + 'b')"),
        ("runs", 4),
        ["no end within 3 s", "my_policy.py:9, in schedule"],
    ),
    "interrupts": (in_schedule("raise KeyboardInterrupt"), ("runs", 4), ["KeyboardInterrupt", "my_policy.py:9"]),
    "hides its message": (
        "class Hidden(Exception):\n    def __str__(self):\n        raise SystemExit(3)\n" + in_schedule("raise Hidden"),
        ("runs", 4),
        ["Hidden: its message cannot be read", "my_policy.py:12, in schedule"],
    ),
    "raises in a thread": (
        in_schedule("import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()"),
        ("runs", 4),
        ["ZeroDivisionError", "my_policy.py:9, in <lambda>"],
    ),
    "raises when it is thrown away": (
        "class Bomb:\n    def __del__(self):\n        raise KeyError('bomb')\n" + in_schedule("Bomb()"),
        ("runs", 4),
        ["KeyError: 'bomb'", "my_policy.py:7, in __del__"],
    ),
    "changes the engine": (
        in_schedule("UnifiedScheduler.abort = lambda self, ids: list(ids)"),
        ("runs", 69),
        ["nanoserve.scheduler.UnifiedScheduler.abort is replaced"],
    ),
    "changes the laws": (
        in_schedule("from nanoserve.lab.trial import Trial; Trial._judge = lambda self, verdict: True"),
        ("runs", 69),
        ["nanoserve.lab.trial.Trial._judge is replaced"],
    ),
    "breaks what it stands on": (
        in_schedule("import os; os.closerange(3, 256)"),
        ("runs", 4),
        ["the process "],
    ),
}
ENDLESS = {"hangs", "waits", "never ends in C"}


def _some_now() -> list[Any]:
    """Each is a process of its own, for a second or more: every third in `make test`, all in `make test-long`."""
    return [pytest.param(what, marks=pytest.mark.slow) if i % 3 else what for i, what in enumerate(HOSTILE)]


@pytest.mark.parametrize("what", _some_now())
def test_every_class_that_breaks_a_law_gets_a_verdict_and_no_traceback(grade, what):
    body, (law, step), words = HOSTILE[what]
    limit = "3" if what in ENDLESS else "20"
    code, out, err = grade(body, "--load", "tight-pool", "--time-limit", limit)
    assert code == 1
    assert f"Load tight-pool, step {step}" in out
    assert f"law '{law}' is broken." in out
    assert all(word in out for word in words), out
    assert "expected: " in out
    assert "Traceback" not in out + err
    assert "1 of 1 loads break a law" in out


def test_every_traceback_is_there_for_whoever_asks(grade):
    _, out, _ = grade(in_schedule("{}['nope']"), *ONE_LOAD, "--traceback")
    assert "Traceback (most recent call last)" in out


def test_every_load_is_tried_by_a_class_that_ends_its_process(grade):
    code, report = grade.json(in_schedule("import os; os._exit(5)"), "--load", "tight-pool", "--load", "burst")
    assert code == 1
    assert [result["load"] for result in report["results"]] == ["tight-pool", "burst"]
    assert not report["left_out"]


def test_a_class_that_hangs_is_not_tried_on_all_loads(grade):
    loads = ("--load", "tight-pool", "--load", "burst", "--load", "repeats")
    code, out, _ = grade(in_schedule("while True: pass"), "--time-limit", "2", *loads)
    assert code == 1
    assert "not run" in out
    assert "1 load was not run" in out


def test_every_print_of_a_class_stays_out_of_the_report(grade):
    code, out, err = grade(in_schedule("print('here')"), *ONE_LOAD, "--json")
    assert code == 0
    assert json.loads(out)["passed"]
    assert "here" in err


THREE = ("tight-pool", "burst", "repeats")
OUTPUT = {
    "closes it": "import sys; sys.stdout.close(); sys.stderr.close()",
    "replaces it": "import sys; sys.stdout = 5",
    "forks": "import os; os.fork()",
    "forks behind Python's back": "import ctypes; ctypes.CDLL(None).fork()",
    "goes elsewhere": "import os; os.chdir('/')",
}


@pytest.mark.parametrize("what", OUTPUT)
def test_every_load_has_one_answer_and_its_own(grade, what):
    """One process answers, to what it was asked, whatever the class does with it and with what is printed."""
    body = in_schedule(OUTPUT[what])
    code, out, err = grade(body, "--json", *(word for name in THREE for word in ("--load", name)))
    report = json.loads(out)
    assert [result["load"] for result in report["results"]] == list(THREE)
    assert (code, err, broken_laws(report)) == (0, "", {})


def test_every_answer_comes_from_the_process_that_was_asked(grade):
    """Not from its fork, which lives on where the process itself raises."""
    body = in_schedule("import os; pid = os.fork(); pid and (os.waitpid(pid, 0), {}['nope'])")
    code, report = grade.json(body, "--load", "burst", "--load", "repeats", "--time-limit", "5")
    assert code == 1
    assert [result["verdicts"]["runs"]["got"] for result in report["results"]] == 2 * ["KeyError: 'nope'"]


def test_every_grade_that_lacks_a_verdict_is_no_pass():
    whole = Result(load="burst", verdicts={law: Verdict(law=law) for law in LAWS})
    lacking = Result(load="burst", verdicts={law: Verdict(law=law) for law in list(LAWS)[1:]})
    found = Found(name="Mine", seam="scheduler", base="")
    grades = [Grade(policy=found, seed=0, results=results, beside={}) for results in ([whole], [lacking], [])]
    assert [one.passed for one in grades] == [True, False, False]
    assert not Grade(policy=found, seed=0, results=[whole], beside={}, left_out=["repeats"]).passed


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.parametrize("end", ["pass", "import os; os._exit(3)"])
def test_every_process_that_a_class_leaves_running_is_ended(grade, tmp_path, end):
    note = tmp_path / "pids"
    start = (
        "import subprocess as s; open({!r}, 'a').write(f'{{s.Popen([\"sleep\", \"600\"], start_new_session={}).pid}} ')"
    )
    lines = [start.format(str(note), is_new) for is_new in (False, True)]
    grade(in_schedule(f"{lines[0]}; {lines[1]}; {end}"), *ONE_LOAD)
    pids = [int(pid) for pid in note.read_text().split()]
    assert len(pids) == 2
    assert not [pid for pid in pids if is_running(pid)]


def test_every_change_of_the_package_is_seen(monkeypatch):
    untouched = Untouched()
    assert untouched.changed() == ""
    changes = {
        "nanoserve.lab.laws.plan_is_legal": (laws, "plan_is_legal", lambda *a: Verdict(law="plan")),
        "nanoserve.lab.trial.PATIENCE": (trial, "PATIENCE", 10**6),
        "nanoserve.scheduler.UnifiedScheduler.abort": (UnifiedScheduler, "abort", lambda self, ids: []),
        "nanoserve.scheduler.UnifiedScheduler.has_work": (UnifiedScheduler, "has_work", False),
        "nanoserve.scheduler.BaseScheduler._seal": (BaseScheduler, "_seal", lambda self, draft: None),
    }
    for name, (owner, part, value) in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, part, value, raising=False)
            assert untouched.changed() == name
    with monkeypatch.context() as patch:
        patch.setattr(laws.broken, "__code__", laws.all_tokens_came.__code__)
        assert untouched.changed() == "nanoserve.lab.laws.broken"
    assert untouched.changed() == ""


# The trace


def test_every_trace_is_where_the_user_asked_for_it(grade, tmp_path, monkeypatch):
    """Whatever the class does with folders and files meanwhile."""
    monkeypatch.chdir(tmp_path)
    wrecks = f"import os, shutil; os.chdir('/'); shutil.rmtree({str(tmp_path / 'traces')!r})"
    assert grade(in_schedule(wrecks), *ONE_LOAD, "--record", "traces")[0] == 0
    assert read_trace(tmp_path / "traces" / "tight-pool.jsonl")[1]


def test_a_trace_is_there_of_a_class_that_ends_the_process(grade, tmp_path):
    grade(in_schedule("import os; os._exit(5)"), *ONE_LOAD, "--record", str(tmp_path))
    assert [record.step for record in read_trace(tmp_path / "tight-pool.jsonl")[1]] == [1, 2, 3]


@pytest.mark.parametrize("place", ["a file", "under a file", "a folder of that name", "/proc", ""])
def test_every_place_that_no_trace_can_be_written_to_is_refused_before_any_run(grade, tmp_path, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "tight-pool.jsonl").mkdir(parents=True)
    own = {"a file": "file", "under a file": "file/traces", "a folder of that name": "taken"}
    folder = str(tmp_path / own[place]) if place in own else place
    code, out, err = grade(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + GOOD, *ONE_LOAD, "--record", folder)
    assert (code, out) == (2, "")
    assert "--record" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "ran").exists()


# Bad input

REFUSED = {
    "x = 1": "my_policy.py has no class to grade",
    "class A(UnifiedScheduler): pass\nclass B(SharedBlocks): pass": "name one with --class: A, B",
    "def f(:": "line 5: invalid syntax",
    "1 / 0": "my_policy.py, line 5: importing it ends in ZeroDivisionError: division by zero",
    "import os; os._exit(4)": "importing it ends the process (exited with code 4)",
    "while True: pass": "importing it takes more than 2 s (my_policy.py:5, in <module>)",
    "x = 1\0": "my_policy.py: source code string cannot contain null bytes",
    "compile('def (', 'other', 'exec')": "my_policy.py, line 5: importing it ends in SyntaxError",
    "raise KeyboardInterrupt": "my_policy.py, line 5: importing it ends in KeyboardInterrupt",
    "class E(Exception):\n    def __str__(self): raise E\nraise E": "line 7: importing it ends in E: its message",
    "UnifiedScheduler.abort = 0\nclass A(UnifiedScheduler): pass": "replaces nanoserve.scheduler.UnifiedScheduler",
    "class A:\n    add = abort = schedule = update = lambda *a: None": "let it derive from BaseScheduler",
}


@pytest.mark.parametrize("body", REFUSED)
def test_every_file_without_a_class_to_grade_is_one_line(grade, body):
    code, out, err = grade(body, "--time-limit", "2" if body.startswith("while") else "20")
    assert (code, out) == (2, "")
    assert REFUSED[body] in err
    assert len(err.splitlines()) == 1


FLAGS = {
    ("nope.py",): "nope.py is not a file",
    ("fault:nope",): "fault 'nope' is not known; use one of untouched-hit",
    ("fault:double-free", "--class", "A"): "--class means nothing with fault:double-free",
    ("fault:double-free", "--seed", "1"): "--seed means nothing with fault:double-free",
    ("fault:double-free", "--blocks", "shared"): "--blocks means nothing with fault:double-free",
    (str(EXAMPLE), "--load", "nope"): "load 'nope' is not known; use one of long-prompts",
    (str(EXAMPLE), "--class", "Nope"): "has no scheduler or block manager of that name; it has ShortestFirst",
    (str(EXAMPLE), "--time-limit", "0"): "--time-limit must be seconds in [0.1, 3600], got 0",
    (str(EXAMPLE), "--hint", "1"): "--hint=1 is for planted bugs",
    (str(EXAMPLE), "--scheduler", "unified"): "--scheduler means nothing to ShortestFirst, which is one",
}


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_every_wrong_option_is_one_line(capfd, flags):
    assert main(["grade", *flags]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert FLAGS[flags] in err
    assert len(err.splitlines()) == 1


# Planted faults


def _fault_cases() -> list[Any]:
    """One that needs the model runs with the others; the rest of those take seconds each."""
    slow = [name for name, fault in FAULTS.items() if fault.needs_model][1:]
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in FAULTS]


@pytest.mark.parametrize("name", _fault_cases())
def test_every_planted_fault_is_reported_in_plain_words(grade, name, tmp_path):
    fault = FAULTS[name]
    code, out, err = grade(f"fault:{name}", "--hint", "3", "--record", str(tmp_path / "traces"))
    assert code == 1
    assert "Traceback" not in out + err
    assert f"Planted fault {name}: " in out
    assert f"law '{fault.law}' is broken.\n  expected: " in out
    assert any(f"request {job.id}: law '{fault.law}'" in out for job in fault.load.jobs)
    assert f"Hint 3: {fault.hints[2]}" in out
    assert read_trace(tmp_path / "traces" / f"{fault.load.name}.jsonl")[1]


def test_a_prefix_that_is_evicted_first_costs_hits(grade):
    _, report = grade.json("fault:head-first-free")
    mine, right = report["results"][0]["figures"], report["beside"]["shared-prefix"]["SharedBlocks"]
    assert mine["hit_rate"] == 0
    assert right["hit_rate"] > 0.4


def test_every_fairness_is_between_one_for_all_and_all_for_one():
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([]) is None
