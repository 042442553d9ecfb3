"""Judges a class of the reader's at a seam of the real engine: the laws on a few loads, then the aim of its exercise.

Runs `Trial` as `nanoserve grade` does, with the built-in class beside it, so that the first broken law comes with what
was expected in that step. `Aim`s are what no law asks for: plans (check_plans.py), hits, a bar for a figure. Laws:
tests/test_exercises.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import msgspec

from nanoserve.lab.check_report import EXPECTED, YOURS, Line, Report, Scene, engine_lines
from nanoserve.lab.fakes import DigestRunner, reference_tokens
from nanoserve.lab.figures import Figures, figures_of
from nanoserve.lab.laws import Verdict, broken
from nanoserve.lab.mishaps import explain
from nanoserve.lab.trace import Trace
from nanoserve.lab.trial import Alone, MakeRunner, Outcome, Trial
from nanoserve.lab.trial_loads import FIXED, Load
from nanoserve.record import ListRecorder

RUNS, RUNS_ALONE = "runs", "It comes to its end in time, and raises nothing."
CELL_FOLDER = "ipykernel"  # where a kernel says that a cell's code is


@dataclass(frozen=True, slots=True)
class Ran:
    """One class on one load."""

    load: Load
    outcome: Outcome
    trace: Trace

    @property
    def figures(self) -> Figures:
        figures = figures_of(self.outcome, self.load)
        assert figures is not None, "a load without requests"
        return figures


Pairs = Mapping[str, tuple[Ran, Ran]]  # load -> yours, the built-in one's
_EXPECTED: dict[tuple[str, str], Ran] = {}  # (exercise, load) -> the built-in one's


@dataclass(frozen=True, slots=True)
class Aim:
    """A law of one exercise. Looked at once all laws of the engine hold, as its figures mean nothing before; `always`:
    in any case, and it is the one to begin with if it is broken first."""

    law: str
    meaning: str
    look: Callable[[type, Pairs], tuple[str, Verdict]]  # load, verdict
    always: bool = False


@dataclass(frozen=True, slots=True)
class Fact:
    """A law of one exercise that needs no run: a method on its own, looked at before all else."""

    law: str
    meaning: str
    look: Callable[[Any], Verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class InEngine:
    """How an exercise is judged. `fields`: of the config, where the load has no other; `plug`: the class that goes into
    the seam, made of the reader's."""

    exercise: str
    seam: str
    built_in: type
    loads: Sequence[Load]
    fields: Mapping[str, Any] = field(default_factory=dict)
    facts: Sequence[Fact] = ()
    aims: Sequence[Aim] = ()
    note: Callable[[type, Pairs], str] | None = None
    plug: Callable[[type], type] = lambda mine: mine
    make_runner: MakeRunner = DigestRunner
    alone: Alone = reference_tokens

    def __call__(self, mine: type) -> Report:
        facts, first = fact_lines(self.facts, mine)
        if any(line.law == RUNS for line in facts):
            return Report(exercise=self.exercise, lines=facts, first=first)
        pairs, found = self._run(mine)
        laws = engine_lines(found)
        is_healthy = not found and not first
        aims = [self._aim_line(aim, mine, pairs if is_healthy or aim.always else None) for aim in self.aims]
        laws, aims = _raised_is_runs(laws, aims)
        scene = None
        if not first and (first := _earliest([*aims, *laws], pairs)):
            scene = _scene(first, pairs)
        notes = [] if first else self._notes(mine, pairs)
        return Report(exercise=self.exercise, lines=[*facts, *laws, *aims], first=first, notes=notes, scene=scene)

    def _run(self, mine: type) -> tuple[dict[str, tuple[Ran, Ran]], dict[str, tuple[str, Verdict]]]:
        """All loads, or those up to the first that is not run to its end; and of each broken law the first verdict."""
        pairs: dict[str, tuple[Ran, Ran]] = {}
        found: dict[str, tuple[str, Verdict]] = {}
        for load in self.loads:
            pairs[load.name] = self._trial(load, self.plug(mine), mine), self._expected(load)
            outcome = pairs[load.name][0].outcome
            for law, verdict in outcome.verdicts.items():
                if not verdict.holds:
                    verdict = _told_plainly(placed(verdict, mine), pairs[load.name][0].trace)
                    found.setdefault(law, (load.name, verdict))
            if outcome.error:
                break
        return pairs, found

    def _expected(self, load: Load) -> Ran:
        """The built-in class does the same each time that a reader asks: one run is enough."""
        key = (self.exercise, load.name)
        if key in _EXPECTED:
            return _EXPECTED[key]
        ran = self._trial(load, self.built_in)
        if not ran.outcome.error:  # such as the end of the reader's time
            _EXPECTED[key] = ran
        return ran

    def _trial(self, load: Load, cls: type, mine: object = None) -> Ran:
        recorder = ListRecorder()
        fields = {**self.fields, **load.fields, self.seam: cls}
        trial = Trial(load, fields, self.make_runner, self.alone, recorder, policy_file=file_of(mine) if mine else "")
        outcome = trial.run()
        return Ran(load, outcome, Trace(recorder.header, recorder.records))

    def _notes(self, mine: type, pairs: Pairs) -> list[str]:
        try:
            return [self.note(mine, pairs)] if self.note else []
        except BaseException as error:
            return [str(mishap(error, mine))]

    def _aim_line(self, aim: Aim, mine: type, pairs: Pairs | None) -> Line:
        if pairs is None:
            return Line(law=aim.law, meaning=aim.meaning, verdict=None)
        load = ""
        try:
            load, verdict = aim.look(mine, pairs)
        except BaseException as error:
            verdict = mishap(error, mine)
        return Line(law=aim.law, meaning=aim.meaning, verdict=verdict, load=load)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnItsOwn:
    """How an exercise is judged whose answer needs no engine."""

    exercise: str
    facts: Sequence[Fact]

    def __call__(self, mine: Any) -> Report:
        lines, first = fact_lines(self.facts, mine)
        return Report(exercise=self.exercise, lines=lines, first=first)


def fact_lines(facts: Sequence[Fact], mine: Any) -> tuple[list[Line], Line | None]:
    """A line each, and the first that is broken. An error is none of theirs but a line of its own before them; after it
    the rest is not looked at."""
    lines: list[Line] = []
    first = raised = None
    for fact in facts:
        verdict = _look(fact, mine) if raised is None else None
        if verdict and verdict.law == RUNS:
            raised, verdict = Line(law=RUNS, meaning=RUNS_ALONE, verdict=verdict), None
        lines.append(Line(law=fact.law, meaning=fact.meaning, verdict=verdict))
        if first is None and verdict and not verdict.holds:
            first = lines[-1]
    return [raised, *lines] if raised else lines, first or raised


def _raised_is_runs(laws: list[Line], aims: list[Line]) -> tuple[list[Line], list[Line]]:
    """What an aim's look at the class raised says nothing about the aim: it goes to the law of code that runs."""
    raised = [line for line in aims if line.verdict and line.verdict.law == RUNS]
    for place, line in enumerate(laws):
        if raised and line.law == RUNS and line.verdict and line.verdict.holds:
            laws[place] = msgspec.structs.replace(line, verdict=raised[0].verdict)
    return laws, [msgspec.structs.replace(line, verdict=None) if line in raised else line for line in aims]


def _look(fact: Fact, mine: Any) -> Verdict:
    try:
        return fact.look(mine)
    except BaseException as error:
        return mishap(error, mine)


def _earliest(lines: Sequence[Line], pairs: Pairs) -> Line | None:
    """The line to begin with: of the first load that shows a broken law, the one that was broken first; of one step, a
    plan that is not legal, the error that came of it, then a plan that is another."""
    ranks = {"plan": 0, RUNS: 1}
    lines = sorted(lines, key=lambda line: ranks.get(line.law, len(ranks)))
    order = list(pairs)
    broken_ones = [(line, line.verdict) for line in lines if line.verdict and not line.verdict.holds]
    places = {"": len(order)} | {name: place for place, name in enumerate(order)}
    return min(broken_ones, key=lambda one: (places[one[0].load], one[1].step), default=(None, None))[0]


def _told_plainly(verdict: Verdict, trace: Trace) -> Verdict:
    """Two plans in words that say what was written: reasons under keys that are no ids; and tokens for whoever was
    preempted in the same step, as a list was copied before."""
    request_id = verdict.request
    record = next((record for record in trace.records if record.step == verdict.step), None)
    if verdict.law != "plan" or record is None:
        return verdict
    strange = [key for key in record.left_out if not isinstance(key, str)]
    if strange:
        name, got = str(getattr(strange[0], "id", "")), f"a key that is a {type(strange[0]).__name__}"
        return msgspec.structs.replace(verdict, request=name, expected="left_out by id: request.id -> Reason", got=got)
    if request_id not in record.preempted:
        return verdict
    if not (n := record.num_scheduled_tokens.get(request_id)):
        return verdict
    expected = f"no tokens for {request_id}: it was preempted in this very step, and has left self.running"
    return msgspec.structs.replace(verdict, expected=expected, got=f"{n} tokens, as from a copy of the list")


def _scene(line: Line, pairs: Pairs) -> Scene | None:
    if not line.load or not line.verdict or not line.verdict.step:
        return None
    yours, expected = pairs[line.load]
    return Scene(load=line.load, verdict=line.verdict, runs={YOURS: yours.trace, EXPECTED: expected.trace})


def mishap(error: BaseException, mine: object, step: int = 0, request_ids: Sequence[str] = ()) -> Verdict:
    """An error that the reader's code caused, as a verdict. KeyboardInterrupt goes on."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if type(error).__name__ == "InterpreterError" and error.__cause__ is not None:  # Triton's, around the kernel's own
        error = error.__cause__
    return placed(explain(error, step, request_ids, file_of(mine)), mine)


def file_of(mine: object) -> str:
    """Where the reader's code is: a file, or what a notebook calls a cell's."""
    held = getattr(mine, "fn", mine)  # a Triton kernel has its function in it
    names = getattr(held, "__dict__", {})
    functions = [held] if isinstance(held, FunctionType) else [f for f in names.values() if inspect.isfunction(f)]
    return functions[0].__code__.co_filename if functions else ""


def placed(verdict: Verdict, mine: object) -> Verdict:
    """The line in words that a reader of a notebook knows."""
    path = Path(file_of(mine))
    name = "your cell" if CELL_FOLDER in str(path) else path.name
    where = verdict.where.replace(f"{path.name}:", f"{name}, line ") if path.name else verdict.where
    return msgspec.structs.replace(verdict, where=where)


def fixed(*names: str) -> tuple[Load, ...]:
    return tuple(FIXED[name] for name in names)


# Aims


def same_hits(mine: type, pairs: Pairs) -> tuple[str, Verdict]:
    """Requests find as many tokens in the cache as with the built-in class."""
    for load, (yours, expected) in pairs.items():
        hits = [{i: n for r in ran.trace.records for i, n in r.hit_tokens.items()} for ran in (yours, expected)]
        for request_id, num_tokens in hits[1].items():
            if hits[0].get(request_id, 0) < num_tokens:
                step = next(r.step for r in yours.trace.records if request_id in r.hit_tokens)
                got = f"{hits[0].get(request_id, 0)}"
                return load, broken("hits", step, request_id, f"{num_tokens} of its tokens found in the cache", got)
    return "", Verdict(law="hits")


def same_evictions(mine: type, pairs: Pairs) -> tuple[str, Verdict]:
    """Blocks are evicted in the order in which the built-in class evicts them."""
    for load, (yours, expected) in pairs.items():
        for one, other in zip(yours.trace.records, expected.trace.records, strict=False):
            if one.evicted != other.evicted:
                wanted, got = (f"blocks {r.evicted} evicted" if r.evicted else "none evicted" for r in (other, one))
                return load, broken("order", one.step, "", wanted, got)
    return "", Verdict(law="order")
