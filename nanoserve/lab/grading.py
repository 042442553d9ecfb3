"""Grades a class: its trials run in a child process, each within a time limit, so that whatever it does is a verdict.

The parent hands out the loads one by one and takes an answer to each, from that process alone. Where the process hangs
or ends, it says in which step, and a new one takes the rest; with a process ends what it has left running. Built-in
classes run here, for the figures beside. The child: grading_child.py. Laws: tests/test_grade.py.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from nanoserve.config import SEAMS
from nanoserve.lab.figures import Figures, figures_of
from nanoserve.lab.grading_child import STEP, TOLD, Job, Result, Told, run_child
from nanoserve.lab.laws import LAWS, Verdict
from nanoserve.lab.leftovers import end_group, end_marked, new_mark
from nanoserve.lab.mishaps import RUNS, place_in_dump
from nanoserve.lab.policy_file import Found, Policy
from nanoserve.lab.trial import Trial
from nanoserve.lab.trial_loads import MEASURED, Load
from nanoserve.process import ChildProcess

START_S = 60.0  # for a child's interpreter; the file's own import has the time limit of a load
GRACE_S = 3.0  # for the watchdog in the child to say where it hangs
MAX_STUCK = 2  # loads that may run into the limit before the others are left out


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """All of it; `beside`: load -> built-in class -> its figures."""

    policy: Found
    seed: int
    results: list[Result]
    beside: dict[str, dict[str, Figures]]
    left_out: list[str] = []  # loads that were not run

    @property
    def passed(self) -> bool:
        """Every law was looked at on every load, and holds."""
        is_whole = not self.left_out and all(list(result.verdicts) == list(LAWS) for result in self.results)
        return bool(self.results) and is_whole and all(result.first is None for result in self.results)


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
    """ValueError when there is no such class, OSError for a folder that cannot be written to; everything that a class
    does is in the grade. `fields`: classes of the other seam, by field of the config."""
    found, results, num_stuck = None, [], 0
    rest = list(loads)
    folder = Path(record_folder).resolve() if record_folder else None
    job = Job(policy=policy, fields=fields, time_limit_s=time_limit_s, is_recorded=folder is not None)
    while rest and num_stuck < MAX_STUCK:
        with _Grader(job, folder) as grader:
            found = grader.found
            if found.seam in fields:
                raise ValueError(f"--{found.seam} means nothing to {found.name}, which is one; leave it out.")
            for result in grader.results(rest):
                results.append(result)
                rest = rest[1:]
                num_stuck += result.stopped == "stuck"
                on_result()
    if found is None:
        raise ValueError("there are no loads to grade it on; give one.")
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


class _Grader:
    """One child, with the files that outlive it: its step, the line on which it hangs, the trace of its load."""

    def __init__(self, job: Job, folder: Path | None) -> None:
        self._job, self._folder = job, folder
        self._stack = ExitStack()

    def __enter__(self) -> _Grader:
        with ExitStack() as stack:
            self._step, self._dump, self._trace = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            fds = [os.dup(file.fileno()) for file in (self._step, self._dump, self._trace)]
            mark = new_mark()
            self._child = ChildProcess("grading", run_child, pass_fds=fds, env=mark, on_exit=lambda: end_marked(mark))
            stack.callback(end_marked, mark)
            stack.callback(end_group, self._child.pid)
            stack.callback(self._child.stop, 0.5)
            self.found = self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start(self) -> Found:
        """ValueError."""
        name, limit_s = Path(self._job.policy.path).name, self._job.time_limit_s
        try:
            self._child.link.send(self._job)
            self._hear(START_S)  # it is up
            told = self._hear(limit_s + GRACE_S)
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            self._child.stop(0.5)
            dump = _read(self._dump)
            if dump or isinstance(error, TimeoutError):
                at = place_in_dump(dump, self._job.policy.path)
                where = f" ({at})" if at else ""
                raise ValueError(
                    f"{name}: importing it takes more than {limit_s:g} s{where}; mend it, or raise --time-limit."
                ) from None
            how = self._child.describe_exit()
            raise ValueError(f"{name}: importing it ends the process ({how}); mend it.") from None
        if told.found is None:
            raise ValueError(told.refused)
        return told.found

    def results(self, loads: Sequence[Load]) -> Iterator[Result]:
        """Of one load after another, until all are done or one has stopped the child."""
        for load in loads:
            result = self._result(load)
            if self._folder and (trace := _read(self._trace)):
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / f"{load.name}.jsonl").write_bytes(trace)
            yield result
            if result.stopped:
                return

    def _result(self, load: Load) -> Result:
        limit_s = self._job.time_limit_s
        try:
            self._child.link.send(load)
            while True:
                told = self._hear(limit_s + GRACE_S)
                if told.refused:
                    return self._stopped("gone", load, told.refused)
                if told.result and told.result.load == load.name:
                    return told.result
        except TimeoutError:
            got = f"no end within {limit_s:g} s, and not a line of Python that could be named"
            return self._stopped("stuck", load, got)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._child.stop(0.5)
            if dump := _read(self._dump):
                where = place_in_dump(dump, self._job.policy.path)
                return self._stopped("stuck", load, f"no end within {limit_s:g} s", where)
            return self._stopped("gone", load, f"the process {self._child.describe_exit()}")

    def _hear(self, timeout_s: float) -> Told:
        """What that very process says next. TimeoutError; EOFError, also for what is no message."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                told = TOLD.decode(self._child.link.recv(max(0.01, deadline_s - time.monotonic())))
            except (TimeoutError, EOFError):
                raise
            except Exception as error:
                raise EOFError("it said something that is no message") from error
            if told.pid == self._child.pid:
                return told

    def _stopped(self, how: Literal["stuck", "gone"], load: Load, got: str, where: str = "") -> Result:
        """A trial that came to no end of its own: only this one law is known of."""
        law, expected = RUNS
        data = _read(self._step)
        step = STEP.unpack(data)[0] if len(data) == STEP.size else 0
        verdict = Verdict(law=law, holds=False, step=step, expected=expected, got=got, where=where)
        return Result(load=load.name, verdicts={law: verdict}, stopped=how)


def _read(file: IO[bytes]) -> bytes:
    """From its start: its place in the file is the child's as well."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
