"""The ladder as one HTML page that needs nothing else: `LadderReport` in, with charts as data URLs; text out.

Owns the order of the page and the words around the figures; every figure in a table is one of ladder.json, shown in the
table's unit. What is simulated is marked wherever it stands. The form is static/ladder.html and ladder.css. Laws:
tests/test_ladder_report.py; tests/ui/test_ladder_page.py looks at it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files

from nanoserve.lab.ladder_history import HISTORY, IN_WORDS
from nanoserve.lab.ladder_report import Effect, LadderReport, StageStory, TableReport
from nanoserve.lab.ladder_rows import Row
from nanoserve.lab.ladder_tables import (
    BUSY_LOAD,
    WORDS,
    executions,
    format_figure,
    format_ratio,
    format_value,
    left_out,
    moved_figures,
    remarks,
    shown_unit,
    told_apart,
    verdict,
)

NOISY = 0.05  # of the median: rounds that are further apart are shown with the figure
SAME = 0.03  # a change by less is none
SHORT = 2  # effects of each kind in the table at the top


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of a table."""

    value: str
    ratio: str = ""
    rounds: str = ""  # lowest to highest, where they are apart


@dataclass(frozen=True, slots=True)
class Line:
    """A row of a table. Rows that repeat one of the same latency are named in `label` and left out."""

    key: str
    label: str
    unit: str
    is_headline: bool
    cells: dict[str, Cell]


@dataclass(frozen=True, slots=True)
class Change:
    """An effect as it is read."""

    load: str
    key: str
    label: str
    unit: str
    before: str
    after: str
    ratio: str
    judgement: str
    is_simulated: bool


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart inside the page."""

    png: bytes = field(repr=False)
    words: str  # for who does not see it

    @property
    def source(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


def ladder_html(report: LadderReport, pictures: Mapping[str, Picture]) -> str:
    """The page. `pictures`: file name -> chart; a name begins with its load's."""
    from jinja2 import Environment, StrictUndefined

    static = files("nanoserve.lab") / "static"
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    template = environment.from_string((static / "ladder.html").read_text(encoding="utf-8"))
    first = next(iter(report.stages.values())).engine
    busy = report.machine.load_average_1m
    return template.render(
        css=(static / "ladder.css").read_text(encoding="utf-8"),
        report=report,
        engine=first,
        machine={
            name.replace("_", " "): f"{value:.1f}" if isinstance(value, float) else value
            for name, value in asdict(report.machine).items()
        },
        busy=busy if busy is not None and busy > BUSY_LOAD else None,
        words=WORDS,
        stages=list(report.stages),
        loads=[_load(load, pictures, report.pages) for load in report.tables],
        production=[_load(load, pictures, ()) for load in report.production.loads] if report.production else [],
        stories=[_story(story, report) for story in report.stories],
        executions=executions(report),
        verdict=verdict(report),
        left_out=left_out(report),
        rounds=f"median of {report.num_rounds} rounds" if report.num_rounds > 1 else "one round",
    )


def _load(load: TableReport, pictures: Mapping[str, Picture], pages: Sequence[str]) -> dict[str, object]:
    return {
        "name": load.name,
        "claim": load.claim,
        "parameters": ", ".join(f"{name} {value}" for name, value in load.parameters.items()),
        "stages": list(load.num_runs),
        "lines": lines_of(load),
        "moved": moved_figures(load),
        "remarks": remarks(load),
        "pictures": [picture for name, picture in pictures.items() if name.startswith(f"{load.name}-")],
        "pages": [page for page in pages if page.startswith(f"{load.name}-")],
    }


def lines_of(load: TableReport) -> list[Line]:
    """The table of a load."""
    first = next(iter(load.num_runs))
    return [
        Line(
            row.key,
            label,
            shown_unit(row.unit),
            bold,
            {stage: _cell(row, stage, stage == first) for stage in row.values},
        )
        for row, label, bold in told_apart(load)
    ]


def _cell(row: Row, stage: str, is_first: bool) -> Cell:
    value, low, high, ratio = row.values[stage], row.lows[stage], row.highs[stage], row.ratios[stage]
    noisy = value and low is not None and high is not None and high - low > NOISY * abs(value)
    rounds = f"{format_value(row, low)} to {format_value(row, high)}" if noisy else ""
    is_compared = bool(row.better) and not is_first and ratio is not None
    return Cell(format_value(row, value), format_ratio(ratio) if is_compared and ratio is not None else "", rounds)


def _story(story: StageStory, report: LadderReport) -> dict[str, object]:
    gains, costs = [change_of(effect) for effect in story.gains], [change_of(effect) for effect in story.costs]
    return {
        "stage": story.stage,
        "above": story.above,
        "moved": story.moved,
        "means": [IN_WORDS[name] for name in story.moved if name in IN_WORDS],
        "gains": gains,
        "costs": costs,
        "short_gains": _short(gains, simulated=False),
        "short_costs": _short(costs, simulated=False),
        "short_simulated": _short(gains, simulated=True),
        "history": [HISTORY[name] for name in story.moved if name in HISTORY],
        "execution": str(report.stages[story.stage].engine.execution),
        "replays": [
            f"{load.name}: {line.partition(': ')[2]}"
            for load in report.loads
            for line in remarks(load)
            if line.startswith(f"{story.stage} replayed")
        ],
    }


def _short(changes: Sequence[Change], *, simulated: bool) -> list[Change]:
    """The first few, of different names."""
    return list({c.label: c for c in reversed(changes) if c.is_simulated == simulated}.values())[::-1][:SHORT]


def change_of(effect: Effect) -> Change:
    """With the unit that a reader has at hand, and whether that is better, worse or the same."""
    before, after = effect.before, effect.after
    largest = max(abs(before or 0), abs(after or 0))
    ratio = after / before if before and after is not None else None
    return Change(
        load=effect.load,
        key=effect.key,
        label=effect.label,
        unit=shown_unit(effect.unit),
        before=format_figure(effect.unit, before, largest),
        after=format_figure(effect.unit, after, largest),
        ratio=format_ratio(ratio) if ratio is not None else "",
        judgement=_judge(effect),
        is_simulated=effect.clock == "simulated",
    )


def _judge(effect: Effect) -> str:
    before, after = effect.before, effect.after
    if before is None or after is None or not effect.better:
        return ""
    if abs(after - before) <= SAME * abs(before):
        return "same"
    return "better" if (after < before) == (effect.better == "lower") else "worse"
