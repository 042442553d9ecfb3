"""Grades a class: its trials run in a child process, each within a time limit, so that whatever it does is a verdict.

The child runs the loads one after another and reports each. Where it hangs, a watch in the child says on which line;
where it ends or is stuck beyond that, the parent says in which step (the child notes each in a file), and a new child
takes the rest. Built-in classes run here, for the figures beside. Laws: tests/test_grade.py.
"""

from __future__ import annotations

import gc
import os
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from nanoserve.config import SEAMS
from nanoserve.lab.figures import Figures, figures_of
from nanoserve.lab.laws import Verdict
from nanoserve.lab.memory_limit import limit_memory
from nanoserve.lab.mishaps import RUNS, place_in
from nanoserve.lab.policy_file import Found, Policy, describe, load_class
from nanoserve.lab.trial import Trial
from nanoserve.lab.trial_loads import MEASURED, Load
from nanoserve.process import ChildDiedError, ChildProcess, Link
from nanoserve.record import JsonlRecorder

START_S = 60.0  # for a child's interpreter; the file's own import has the time limit of a load
GRACE_S = 3.0  # for the watch in the child to say where it hangs
MEMORY_BYTES = 1 << 29  # that a policy may take on top of the engine
MAX_STUCK = 2  # loads that may run into the limit before the others are left out
STEP = struct.Struct("<q")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One class on one load. `verdicts`: by law, in the order of LAWS; of a stopped trial only what is known."""

    load: str
    verdicts: dict[str, Verdict]
    figures: Figures | None = None
    stopped: Literal["", "stuck", "gone"] = ""  # past the time limit; or its process ended

    @property
    def first(self) -> Verdict | None:
        bad = [verdict for verdict in self.verdicts.values() if not verdict.holds]
        return min(bad, key=lambda verdict: verdict.step, default=None)


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """All of it; `beside`: load -> built-in class -> its figures."""

    policy: Found
    seed: int
    results: list[Result]
    beside: dict[str, dict[str, Figures]]
    left_out: list[str] = []  # loads that were not run

    @property
    def passed(self) -> bool:
        return not self.left_out and all(result.first is None for result in self.results)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is asked to do."""

    policy: Policy
    fields: dict[str, Any]  # of the config: the seam on the other side
    loads: list[Load]
    time_limit_s: float
    record_folder: str


def grade(
    policy: Policy,
    loads: Sequence[Load],
    *,
    seed: int,
    fields: dict[str, Any],
    time_limit_s: float,
    record_folder: str = "",
    on_result: Callable[[], None] = lambda: None,
) -> Grade:
    """ValueError when there is no such class; everything that a class does is in the grade. `fields`: classes of the
    other seam, by field of the config."""
    found, results, num_stuck = None, [], 0
    rest = list(loads)
    while rest and num_stuck < MAX_STUCK:
        job = Job(policy=policy, fields=fields, loads=rest, time_limit_s=time_limit_s, record_folder=record_folder)
        for item in _run_child(job):
            if isinstance(item, Found):
                found = item
                if found.seam in fields:
                    raise ValueError(f"--{found.seam} means nothing to {found.name}, which is one; leave it out.")
                continue
            results.append(item)
            rest = rest[1:]
            num_stuck += item.stopped == "stuck"
            on_result()
    assert found is not None
    beside = {load.name: _built_in(found.seam, load, fields) for load in loads if load.name in MEASURED}
    return Grade(policy=found, seed=seed, results=results, beside=beside, left_out=[load.name for load in rest])


def _built_in(seam: str, load: Load, fields: dict[str, Any]) -> dict[str, Figures]:
    if seam not in ("scheduler", "blocks"):
        return {}
    rows = {}
    for cls in SEAMS[seam].values():
        outcome = Trial(load, {**fields, seam: cls}).run()
        if figures := figures_of(outcome, load):
            rows[cls.__name__] = figures
    return rows


# The parent


def _run_child(job: Job) -> Iterator[Found | Result]:
    """What one child reports, until it has done all or one load has stopped it."""
    with tempfile.TemporaryFile() as steps:
        child = ChildProcess("grading", run_child, pass_fds=[os.dup(steps.fileno())])
        try:
            child.link.send(job)
            try:
                child.link.recv(START_S)  # it is up
                found = child.recv(job.time_limit_s + GRACE_S)
            except TimeoutError:
                raise ValueError(_import_is_stuck(job)) from None
            except (ChildDiedError, EOFError):
                child.stop()
                name = Path(job.policy.path).name
                raise ValueError(f"{name}: importing it ends the process ({child.describe_exit()}); mend it.") from None
            if isinstance(found, str):
                raise ValueError(found)
            yield found
            for load in job.loads:
                yield (result := _next_result(child, load, job, steps))
                if result.stopped:
                    return
        finally:
            child.stop(0.5)


def _next_result(child: ChildProcess, load: Load, job: Job, steps: IO[bytes]) -> Result:
    try:
        return child.link.recv(job.time_limit_s + GRACE_S)
    except TimeoutError:
        got = f"no end within {job.time_limit_s:g} s, and not a line of Python that could be named"
        return _stopped("stuck", load, _last_step(steps), got)
    except EOFError:
        child.stop()
        return _stopped("gone", load, _last_step(steps), f"the process {child.describe_exit()}")


def _last_step(steps: IO[bytes]) -> int:
    data = os.pread(steps.fileno(), STEP.size, 0)
    return STEP.unpack(data)[0] if len(data) == STEP.size else 0


def _stopped(how: Literal["stuck", "gone"], load: Load, step: int, got: str, where: str = "") -> Result:
    """A trial that came to no end of its own: only this one law is known of."""
    law, expected = RUNS
    verdict = Verdict(law=law, holds=False, step=step, expected=expected, got=got, where=where)
    return Result(load=load.name, verdicts={law: verdict}, stopped=how)


def _import_is_stuck(job: Job) -> str:
    name = Path(job.policy.path).name
    return f"{name}: importing it takes more than {job.time_limit_s:g} s; mend it, or raise --time-limit."


# The child


def run_child(link: Link, steps_fd: int) -> int:
    """Load the class, run the loads, report each."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a policy prints must not mix with the report
    job: Job = link.recv()
    link.send("up")
    try:
        seam, cls = load_class(job.policy)
    except ValueError as error:
        link.send(str(error))
        return 1
    link.send(describe(seam, cls))
    for load in job.loads:
        os.pwrite(steps_fd, STEP.pack(0), 0)
        trial = _trial(job, seam, cls, load, lambda step: os.pwrite(steps_fd, STEP.pack(step), 0))
        watch = _Watch(link, load, job, steps_fd)
        outcome = trial.run()
        if not watch.ended():
            return 1
        link.send(Result(load=load.name, verdicts=outcome.verdicts, figures=figures_of(outcome, load)))
        gc.collect()
    return 0


def _trial(job: Job, seam: str, cls: type, load: Load, note_step: Callable[[int], Any]) -> Trial:
    observer = JsonlRecorder(Path(job.record_folder) / f"{load.name}.jsonl") if job.record_folder else None
    if job.policy.fault:
        from nanoserve.lab.faults import PLANTED_FILE, fault_trial, get_fault

        trial = fault_trial(get_fault(job.policy.fault), observer, load=load)
        trial.policy_file = PLANTED_FILE
    else:
        limit_memory(MEMORY_BYTES)
        trial = Trial(load, {**job.fields, seam: cls}, observer=observer, policy_file=job.policy.path)
    trial.note_step = note_step
    return trial


class _Watch:
    """Reports a trial that takes too long, with the line on which it is, and ends the process."""

    def __init__(self, link: Link, load: Load, job: Job, steps_fd: int) -> None:
        self._link, self._load, self._job, self._steps_fd = link, load, job, steps_fd
        self._main = threading.get_ident()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._reported = False
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def ended(self) -> bool:
        """The trial came to its end; False when it was too late."""
        self._done.set()
        with self._lock:
            return not self._reported

    def _run(self) -> None:
        if self._done.wait(self._job.time_limit_s):
            return
        with self._lock:
            if self._done.is_set():
                return
            self._reported = True
            step = STEP.unpack(os.pread(self._steps_fd, STEP.size, 0))[0]
            got = f"no end within {self._job.time_limit_s:g} s"
            self._link.send(_stopped("stuck", self._load, step, got, self._where()))
            os._exit(1)

    def _where(self) -> str:
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            if place := place_in(frame, frame.f_lineno, self._job.policy.path):
                return place
            frame = frame.f_back
        return ""
