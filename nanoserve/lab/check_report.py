"""The verdict on an exercise, and how it reads: a table of laws, the first one that is broken, the step as a picture.

The same text in a terminal and in a notebook, where the picture is drawn (lab/charts.py) instead. Knows neither the
exercises nor how they are judged (check_engine.py and its neighbours). Laws: tests/test_exercises.py.
"""

from __future__ import annotations

import base64
import html
import io
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from nanoserve.lab.laws import LAWS, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nanoserve.lab.block_history import BlockMap
    from nanoserve.lab.trace import Trace
    from nanoserve.record import StepRecord

HOLE = "NotImplementedError: about "
NOT_BEGUN, PASSES = "not begun", "passes"
YOURS, EXPECTED = "yours", "expected"
BOTH = "both"
BEFORE, AFTER = 5, 2  # steps of a picture beside the one that it is about
NEAR = 20  # the same, where it is drawn
MAX_LANES = 8
WIDTH = 100
CELL = "padding:.1em .8em;text-align:left;vertical-align:top"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One law, on all loads of an exercise."""

    law: str
    meaning: str
    verdict: Verdict | None  # None: not looked at, as another one is broken
    load: str = ""  # that shows it broken

    @property
    def state(self) -> str:
        if self.verdict is None:
            return "-"
        if self.verdict.holds:
            return "ok"
        return f"BROKEN, step {self.verdict.step}" if self.verdict.step else "BROKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What was run, to draw the step of a verdict from."""

    load: str
    verdict: Verdict
    runs: dict[str, Trace]  # yours, and what was expected

    def text(self) -> str:
        return (self.verdict.law in ("blocks", "returned") and self._tables()) or self._timeline()

    def _tables(self) -> str:
        """Who holds which blocks."""
        return "\n".join(line for name, blocks in self._maps().items() for line in _table_lines(name, blocks))

    def _timeline(self) -> str:
        step = self.verdict.step
        names = _lanes(self.runs[YOURS].records, step, self.verdict.request)
        lines = [
            line for name, trace in self.shown.items() for line in timeline_lines(name, trace.records, step, names)
        ]
        return "\n".join([*lines, *self.reasons()])

    @property
    def shown(self) -> dict[str, Trace]:
        """Once where the tokens around the step are the same, as two equal tables say nothing."""
        mine, expected = (_tokens_near(self.runs[name].records, self.verdict.step) for name in (YOURS, EXPECTED))
        return {BOTH: self.runs[YOURS]} if mine == expected else self.runs

    def reasons(self) -> Iterator[str]:
        """Of the step, where the tokens are the same and the reasons are not: what each run says of whom."""
        step = self.verdict.step
        told = {name: _reasons_of(trace.records, step) for name, trace in self.runs.items()}
        if len(self.shown) == 1 and told[YOURS] != told[EXPECTED]:
            yield f"  The tokens are the same; the reasons of step {step} are not:"
            for name, text in told.items():
                yield textwrap.fill(f"  {name:<{len(EXPECTED)}}  {text}", WIDTH, subsequent_indent=" " * 12)

    def _maps(self) -> dict[str, BlockMap]:
        from nanoserve.lab.block_history import BlockHistory

        steps = {name: {record.step for record in trace.records} for name, trace in self.runs.items()}
        at = {name: self.verdict.step for name in steps if self.verdict.step in steps[name]}
        try:
            return {name: BlockHistory(self.runs[name]).at(step) for name, step in at.items()}
        except (LookupError, ValueError):  # plans that make no sense
            return {}

    def figure(self) -> Figure:
        """The same step, drawn."""
        from nanoserve.lab.charts import Setting, step_timeline
        from nanoserve.lab.lesson_charts import block_map

        setting = Setting(self.load, "no model", "simulated", 0)
        if self.verdict.law in ("blocks", "returned") and (maps := self._maps()):
            return block_map(maps, self.runs[YOURS].num_blocks, setting)
        figure = step_timeline({name: trace.records for name, trace in self.shown.items()}, setting)
        for ax, trace in zip(figure.axes, self.shown.values(), strict=True):
            times = {record.step: record.start_s - trace.start_s for record in trace.records}
            if self.verdict.step in times:
                ax.axvline(times[self.verdict.step], color="black", linewidth=2)
        near = [record for record in self.runs[YOURS].records if abs(record.step - self.verdict.step) <= NEAR]
        if near and near[-1].end_s > near[0].start_s:
            start_s = self.runs[YOURS].start_s
            figure.axes[-1].set_xlim(near[0].start_s - start_s, near[-1].end_s - start_s)
        figure.supxlabel(f"The black line is where step {self.verdict.step} begins.", x=0.01, ha="left", fontsize=9)
        return figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`first`: the broken law to begin with."""

    exercise: str
    lines: list[Line]
    first: Line | None = None
    notes: list[str] = field(default_factory=list)  # figures worth a look
    scene: Scene | None = None

    @property
    def hole(self) -> str:
        """What the hole says that a run came to; "" for none."""
        got = (line.verdict.got for line in self.lines if line.verdict)
        return next((text.removeprefix("NotImplementedError: ") for text in got if text.startswith(HOLE)), "")

    @property
    def passed(self) -> bool:
        return self.first is None

    @property
    def state(self) -> str:
        if self.hole:
            return NOT_BEGUN
        return f"fails {self.first.law}" if self.first else PASSES

    def as_builtins(self) -> dict[str, Any]:
        """For a program."""
        return {
            "exercise": self.exercise,
            "state": self.state,
            "passed": self.passed,
            "hole": self.hole,
            "first": msgspec.to_builtins(self.first),
            "laws": msgspec.to_builtins(self.lines),
            "notes": self.notes,
            "picture": self._picture(),
        }

    def __str__(self) -> str:
        return "\n".join([self._table(), *self._words(), *([self._picture()] if self.scene and not self.hole else [])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Escaped text, a table, and the picture as a PNG."""
        if self.hole:
            return f"<pre>{html.escape(str(self), quote=False)}</pre>"
        rows = "".join(
            f"<tr><td style='{CELL}'><b>{html.escape(line.law)}</b></td><td style='{CELL}'>{line.state}</td>"
            f"<td style='{CELL}'>{html.escape(line.meaning)}</td></tr>"
            for line in self.lines
        )
        words = html.escape("\n".join(self._words()), quote=False)
        return f"<p>Exercise {self.exercise}</p><table>{rows}</table><pre>{words}</pre>{self._drawn()}"

    def _drawn(self) -> str:
        if self.scene is None:
            return ""
        try:
            figure = self.scene.figure()
        except (LookupError, ValueError):  # plans that make no sense
            return f"<pre>{html.escape(self.scene.text())}</pre>"
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=80)
        reasons = html.escape("\n".join(self.scene.reasons()))
        picture = f"<img alt='the step' src='data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}'>"
        return f"{picture}<pre>{reasons}</pre>" if reasons else picture

    def _table(self) -> str:
        if self.hole:
            return f"Exercise {self.exercise}"
        width = max(len(line.law) for line in self.lines)
        states = max(len(line.state) for line in self.lines)
        rows = [f"  {line.law:<{width}}  {line.state:<{states}}  {line.meaning}" for line in self.lines]
        return "\n".join([f"Exercise {self.exercise}", *rows])

    def _words(self) -> Iterator[str]:
        if self.hole:
            yield f"A hole is left: {self.hole}"
            return
        if self.first and self.first.verdict:
            yield ""
            yield from _explained(self.first, self.first.verdict)
            yield from _others(self.lines, self.first)
        yield from (["", *self.notes] if self.notes else [])
        num_broken = sum(line.verdict is not None and not line.verdict.holds for line in self.lines)
        yield ""
        yield "All laws hold." if self.passed else f"{num_broken} of {len(self.lines)} laws are broken."

    def _picture(self) -> str:
        return f"\n{self.scene.text()}" if self.scene else ""


def _where(line: Line, verdict: Verdict) -> list[str]:
    where = [f"load {line.load}"] if line.load else []
    where += [f"step {verdict.step}"] if verdict.step else []
    return where + ([f"request {verdict.request}"] if verdict.request else [])


def _explained(line: Line, verdict: Verdict) -> Iterator[str]:
    where = _where(line, verdict)
    yield f"Law '{line.law}' is broken{': ' if where else ''}{', '.join(where)}."
    for label, text in (("expected", verdict.expected), ("got", verdict.got), ("at", verdict.where)):
        if text:
            yield textwrap.fill(f"  {label + ':':<9} {text}", WIDTH, subsequent_indent=" " * 12)


def _others(lines: list[Line], first: Line) -> Iterator[str]:
    """A line for each law that is broken besides: often by the same mistake."""
    others = [(line, line.verdict) for line in lines if line is not first and line.verdict and not line.verdict.holds]
    if others:
        yield "Also broken, perhaps by the same mistake:"
    for line, verdict in others:
        where = ", ".join([line.law, *_where(line, verdict)])
        text = f"  {where}: expected {verdict.expected}; got {verdict.got}"
        yield textwrap.fill(text, WIDTH, subsequent_indent=" " * 4)


def engine_lines(broken: dict[str, tuple[str, Verdict]]) -> list[Line]:
    """A line for each law of the engine; `broken`: law -> load, verdict."""
    lines = []
    for law, meaning in LAWS.items():
        load, verdict = broken.get(law, ("", Verdict(law=law)))
        lines.append(Line(law=law, meaning=meaning, verdict=verdict, load=load))
    return lines


# The picture in plain text


def timeline_lines(name: str, records: list[StepRecord], step: int, names: list[str]) -> Iterator[str]:
    """A row a request, a column a step: its tokens; '.' for none, 'x' where it was preempted, 'x+6' where it got tokens
    all the same."""
    window = [record for record in records if step - BEFORE <= record.step <= step + AFTER]
    width = max(map(len, [*names, name, EXPECTED]))
    marks = [f">{record.step}" if record.step == step else str(record.step) for record in window]
    yield f"  {name:<{width}}  step" + "".join(f"{mark:>6}" for mark in marks)
    for request_id in names:
        cells = "".join(f"{_cell(record, request_id):>6}" for record in window)
        yield f"  {request_id:<{width}}      {cells}".rstrip()


def _cell(record: StepRecord, request_id: str) -> str:
    lost = "x" if request_id in record.preempted else ""
    if request_id in record.num_scheduled_tokens:
        return f"{lost}{'+' if lost else ''}{record.num_scheduled_tokens[request_id]}"
    return lost or ("." if request_id in record.left_out else "")


def _tokens_near(records: list[StepRecord], step: int) -> list[tuple[int, dict[str, int], list[str]]]:
    """What a picture shows of each step around that one."""
    near = (record for record in records if step - BEFORE <= record.step <= step + AFTER)
    return [(record.step, record.num_scheduled_tokens, record.preempted) for record in near]


def _reasons_of(records: list[StepRecord], step: int) -> str:
    reasons = (record.left_out for record in records if record.step == step)
    told = (f"{_name(key)}: {reason}" for left in reasons for key, reason in left.items())
    return ", ".join(dict.fromkeys(told)) or "none"


def _name(key: object) -> str:
    return key if isinstance(key, str) else f"(a {type(key).__name__})"


def _lanes(records: list[StepRecord], step: int, first: str) -> list[str]:
    """Who had a part in the steps around that one, the request in question before all. A policy may have filled its
    plan with anything: what is no id has no lane."""
    window = [record for record in records if step - BEFORE <= record.step <= step + AFTER]
    seen = [i for record in window for i in (*record.num_scheduled_tokens, *record.left_out) if isinstance(i, str)]
    names = [first, *seen] if first else seen
    return list(dict.fromkeys(names))[:MAX_LANES]


def _table_lines(name: str, blocks: BlockMap) -> Iterator[str]:
    tables: dict[str, list[int]] = {}
    for block_id, holders in blocks.holders.items():
        for request_id in holders:
            tables.setdefault(request_id, []).append(block_id)
    yield f"  {name}, block tables in step {blocks.step}:"
    width = max(map(len, tables), default=0)
    for request_id, table in tables.items():
        yield f"    {request_id:<{width}}  {' '.join(map(str, table))}"
    shared = [f"{block_id} (in {ref} tables)" for block_id, ref in blocks.refs.items() if ref > 1]
    yield f"    shared: {', '.join(shared) or 'none'}"
