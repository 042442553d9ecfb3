"""The process in which a class is graded: loads it, runs one load after another, and tells what became of each.

It is a session of its own; a fork of it ends at once, so that nobody answers twice. Where it hangs, C code included, a
watchdog writes down the line and ends it. Knows nothing of the parent but its messages (grading.py). Laws:
tests/test_grade.py.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from nanoserve.lab.figures import Figures, figures_of
from nanoserve.lab.laws import Verdict, broken
from nanoserve.lab.memory_limit import lift_memory_limit, limit_memory
from nanoserve.lab.mishaps import described, explain
from nanoserve.lab.policy_file import Found, Policy, describe, load_class
from nanoserve.lab.trial import Outcome, Trial
from nanoserve.lab.trial_loads import Load
from nanoserve.lab.untouched import Untouched
from nanoserve.process import Link
from nanoserve.record import Observer, StepRecord, TraceHeader

MEMORY_BYTES = 1 << 29  # that a policy may take on top of the engine
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


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is asked to do; the loads come one by one, then None."""

    policy: Policy
    fields: dict[str, Any]  # of the config: the seam on the other side
    time_limit_s: float
    is_recorded: bool


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One message to the parent: it is up, what it found, the result of a load, or `refused`: why there is none."""

    pid: int
    found: Found | None = None
    refused: str = ""
    result: Result | None = None


TOLD = msgspec.msgpack.Decoder(Told)
_encode = msgspec.msgpack.Encoder().encode


def run_child(link: Link, step_fd: int, dump_fd: int, trace_fd: int) -> int:
    """`step_fd`: the step that a trial has come to; `dump_fd`: where it hangs; `trace_fd`: the trace of a load."""
    os.setsid()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a policy prints must not mix with the report
    os.register_at_fork(after_in_child=lambda: os._exit(0))
    link.on_gone = _let_go_of_output
    try:
        return _Child(link, link.recv(), step_fd, dump_fd, trace_fd).run()
    except BaseException as error:  # the policy has broken what this process stands on
        with suppress(Exception):
            link.send(_encode(Told(pid=os.getpid(), refused=f"the process ended in {described(error)}")))
        return 1
    finally:
        _let_go_of_output()


def _let_go_of_output() -> None:
    """The process ends with a flush, and a policy may have closed or replaced what is flushed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    sys.stdout = sys.stderr = io.StringIO()


class _Child:
    def __init__(self, link: Link, job: Job, step_fd: int, dump_fd: int, trace_fd: int) -> None:
        self._link, self._job = link, job
        self._step_fd, self._dump_fd = step_fd, dump_fd
        self._trace = _TraceWriter(trace_fd)
        self._pid = os.getpid()

    def run(self) -> int:
        self._tell()
        self._untouched, name = Untouched(), Path(self._job.policy.path).name
        try:
            with self._watchdog():
                seam, cls = load_class(self._job.policy)
                found = describe(seam, cls)
        except ValueError as error:
            self._tell(refused=str(error))
            return 1
        except BaseException as error:  # of a class whose own machinery raises while it is looked at
            self._tell(refused=f"{name}: to look for its class ends in {described(error)}; mend it.")
            return 1
        if changed := self._changed():
            self._tell(refused=f"{name}: importing it replaces {changed}; override that in a class of your own.")
            return 1
        self._tell(found=found)
        while (load := self._link.recv()) is not None:
            self._send(self._grade(seam, cls, load))
            gc.collect()
        return 0

    def _tell(self, *, found: Found | None = None, refused: str = "") -> None:
        self._send(_encode(Told(pid=os.getpid(), found=found, refused=refused)))

    def _send(self, message: bytes) -> None:
        if os.getpid() != self._pid:  # a fork that Python was not told of
            os._exit(0)
        self._link.send(message)

    def _grade(self, seam: str, cls: type, load: Load) -> bytes:
        """The message with the result."""
        trial, stray = self._trial(seam, cls, load), list[Verdict]()
        try:
            with self._watchdog(), caught_elsewhere(lambda error: stray.append(self._explain(error, trial))):
                outcome = trial.run()
            verdicts = outcome.verdicts
            if stray and verdicts["runs"].holds:
                verdicts["runs"] = stray[0]
            if changed := self._changed():
                got = f"{changed} is replaced"
                verdicts = {"runs": broken("runs", trial.step, "", "an engine and laws that stay what they are", got)}
            return self._result(Result(load=load.name, verdicts=verdicts, figures=_figures(outcome, load)))
        except BaseException as error:
            lift_memory_limit()
            verdict = self._explain(error, trial)
            return self._result(Result(load=load.name, verdicts={verdict.law: verdict}))

    def _result(self, result: Result) -> bytes:
        """TypeError, ValidationError where a policy has left in it what is no plain data."""
        message = _encode(Told(pid=os.getpid(), result=result))
        TOLD.decode(message)
        return message

    def _explain(self, error: BaseException, trial: Trial) -> Verdict:
        return explain(error, trial.step, list(trial.fates), trial.policy_file)

    def _changed(self) -> str:
        """Of a planted fault nothing: its classes are nanoserve's own."""
        return "" if self._job.policy.fault else self._untouched.changed()

    def _trial(self, seam: str, cls: type, load: Load) -> Trial:
        job = self._job
        self._note_step(0)
        self._trace.empty()
        observer = self._trace if job.is_recorded else None
        if job.policy.fault:
            from nanoserve.lab.faults import fault_trial, get_fault

            trial = fault_trial(get_fault(job.policy.fault), observer, load=load)
        else:
            limit_memory(MEMORY_BYTES)
            trial = Trial(load, {**job.fields, seam: cls}, observer=observer, policy_file=job.policy.path)
        trial.note_step = self._note_step
        return trial

    def _note_step(self, step: int) -> None:
        os.pwrite(self._step_fd, STEP.pack(step), 0)

    @contextmanager
    def _watchdog(self) -> Iterator[None]:
        """Ends the process when that takes too long, with the line on which it is. A thread of Python's could not, as
        long as C code holds the interpreter lock."""
        faulthandler.dump_traceback_later(self._job.time_limit_s, exit=True, file=self._dump_fd)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


@contextmanager
def caught_elsewhere(note: Callable[[BaseException], object]) -> Iterator[None]:
    """Errors that no call returns: of other threads, and of finalisers."""
    hooks = threading.excepthook, sys.unraisablehook

    def hook(args: Any) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            note(args.exc_value)

    threading.excepthook = sys.unraisablehook = hook
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = hooks


def _figures(outcome: Outcome, load: Load) -> Figures | None:
    """None of a trial with broken laws whose records do not add up."""
    try:
        return figures_of(outcome, load)
    except Exception:
        if outcome.first is None:
            raise
        return None


@dataclass
class _TraceWriter(Observer):
    """A trace, line by line, in a file that is open already: wherever the policy goes, and whatever it deletes."""

    fd: int
    size: int = 0

    def empty(self) -> None:
        os.ftruncate(self.fd, 0)
        self.size = 0

    def on_start(self, header: TraceHeader) -> None:
        self._write(header)

    def on_step(self, record: StepRecord) -> None:
        self._write(record)

    def close(self) -> None:
        pass

    def _write(self, item: msgspec.Struct) -> None:
        self.size += os.pwrite(self.fd, msgspec.json.encode(item) + b"\n", self.size)
