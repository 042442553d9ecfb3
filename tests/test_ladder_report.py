"""Laws of the ladder's report: one file that needs nothing else, every figure of which is in ladder.json; what is
simulated is marked; the story of a stage follows from the fields that it moves."""

import re
import typing
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from types import MappingProxyType

import msgspec
import pytest
from test_ladder import FAKE, FAKES

import nanoserve.config
from nanoserve.api.cli import main
from nanoserve.blocks import PrivateBlocks, SharedBlocks, V0CachedBlocks
from nanoserve.execution import Execution
from nanoserve.lab import ladder
from nanoserve.lab.block_history import BlockHistory
from nanoserve.lab.charts import Setting, millisecond_strip
from nanoserve.lab.climb import climb
from nanoserve.lab.ladder_admission import admission_costs
from nanoserve.lab.ladder_figures import traces_of
from nanoserve.lab.ladder_page import change_of
from nanoserve.lab.ladder_report import Effect, LadderReport, StageReport
from nanoserve.lab.ladder_story import EFFECTS, MOVABLE, stage_stories
from nanoserve.lab.ladder_tables import format_value
from nanoserve.lab.workload import random_tokens, shared_system_prompt
from nanoserve.record import describe_config
from nanoserve.request import EngineInfo

LIMIT_BYTES = 3_000_000
FLAGS = [
    "--random-prompts", "--streams=3", "--stream-tokens=30", "--long-prompts=1", "--long-prompt-len=700",
    "--requests=6", "--prefix-len=256", "--tail-len=16", "--rounds=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a climb of engines without a model leaves behind."""
    out = tmp_path_factory.mktemp("ladder")
    with pytest.MonkeyPatch.context() as patch:
        for module in (nanoserve.config, ladder):
            patch.setattr(module, "STAGES", MappingProxyType(FAKES))
        assert main(["ladder", "--out", str(out), *FLAGS]) == 0
    return out


@pytest.fixture(scope="module")
def report(folder: Path) -> LadderReport:
    return msgspec.json.decode((folder / "ladder.json").read_bytes(), type=LadderReport)


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "ladder.html").read_text(encoding="utf-8")


# --- The file


def outside(page: str, folder: Path) -> list[str]:
    """What a page asks for beside itself, and what it links to that is not there."""
    asked = re.findall(r"""(?:src|srcset|data|action|poster)\s*=\s*["']([^"']+)""", page)
    links = re.findall(r"""href\s*=\s*["']([^"']+)""", page)
    words = re.findall(r"https?:|<script|<link|<iframe|@import|url\(|//cdn", page)
    wrong = [source for source in asked if not source.startswith("data:image/png;base64,")]
    there = {f"#{name}" for name in re.findall(r'id="([^"]+)"', page)} | {path.name for path in folder.iterdir()}
    return [*words, *wrong, *(link for link in links if link not in there)]


def test_the_report_is_one_small_file_that_needs_nothing_else(page: str, folder: Path, report: LadderReport) -> None:
    assert outside(page, folder) == []
    assert len(page.encode()) < LIMIT_BYTES
    assert page.count("<img ") == len(report.charts)
    assert page.count('alt=""') == 0
    assert all((folder / name).stat().st_size > 10_000 for name in report.pages)


@pytest.mark.parametrize(
    "planted",
    ['<script src="app.js"></script>', '<img src="chart.png">', '<a href="gone.html">x</a>', "https://example.org"],
)
def test_a_page_that_needs_something_is_found_out(page: str, folder: Path, planted: str) -> None:
    assert outside(page.replace("</body>", f"{planted}</body>"), folder)


# --- Every figure is one of ladder.json


@dataclass
class Found:
    """A cell of the page: its table's load, its row, its column, and what is in it."""

    table: str
    load: str
    key: str
    stage: str
    texts: list[str] = field(default_factory=list)
    is_simulated: bool = False


class Figures(HTMLParser):
    """Reads the cells of a report's tables."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[Found] = []
        self._table = self._load = self._key = ""
        self._cell: Found | None = None
        self._marked = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        kind = given.get("class", "")
        if tag == "table":
            self._table, self._load = kind.split()[0] if kind else "", given.get("data-load", "")
            self._marked = False
        elif tag == "tr" and "data-key" in given:
            self._key = given["data-key"]
            if self._table == "changes":
                self._load, self._marked = given["data-load"], False
        elif tag == "span" and kind == "mark":
            self._marked = True
        elif tag == "td" and self._table in ("figures", "changes") and self._key:
            self._cell = Found(self._table, self._load, self._key, given.get("data-stage", ""), [], self._marked)

    def handle_data(self, data: str) -> None:
        if self._cell and data.strip():
            self._cell.texts.append(data.strip())

    def handle_endtag(self, tag: str) -> None:
        if tag == "td" and self._cell:
            self.cells.append(self._cell)
            self._cell = None
        if tag == "table":
            self._table = self._key = ""


def cells_of(page: str) -> list[Found]:
    reader = Figures()
    reader.feed(page)
    return reader.cells


def foreign_figures(page: str, report: LadderReport) -> list[Found]:
    """Cells of load tables that say something else than the file's row."""
    tables = [*report.tables, *(report.production.loads if report.production else [])]
    rows = {(table.name, row.key): row for table in tables for row in table.rows}
    wrong = []
    for cell in cells_of(page):
        if cell.table == "figures":
            row = rows[cell.load, cell.key]
            if cell.texts[0] != format_value(row, row.values[cell.stage]):
                wrong.append(cell)
    return wrong


def test_every_figure_of_a_table_is_one_of_the_file(page: str, report: LadderReport) -> None:
    cells = [cell for cell in cells_of(page) if cell.table == "figures"]
    assert len(cells) > 100
    assert {cell.stage for cell in cells} == set(FAKES)
    assert foreign_figures(page, report) == []


def test_a_figure_of_its_own_is_found_out(page: str, report: LadderReport) -> None:
    row = next(row for row in report.loads[0].rows if row.key == "peak_used_blocks")
    shown = f"<b>{format_value(row, row.values['v0'])}</b>"
    [_, before, after] = re.split(f"({re.escape(shown)})", page, maxsplit=1)
    assert foreign_figures(page.replace(before + after[:40], f"<b>12345</b>{after[:40]}"), report)


def test_every_change_is_that_of_two_figures_of_the_file(page: str, report: LadderReport) -> None:
    tables = [*report.tables, *(report.production.loads if report.production else [])]
    rows = {(table.name, row.key): row for table in tables for row in table.rows}
    effects = [(story, effect) for story in report.stories for effect in [*story.gains, *story.costs]]
    assert len(effects) > 10
    for story, effect in effects:
        if effect.load:
            row = rows[effect.load, effect.key]
            assert (effect.before, effect.after) == (row.values[story.above or ""], row.values[story.stage])
    shown = [cell.texts[0] for cell in cells_of(page) if cell.table == "changes" and cell.texts]
    for _, effect in effects:
        change = change_of(effect)
        assert change.before in shown
        assert change.after in shown


# --- What is simulated is marked


def unmarked(page: str, report: LadderReport) -> list[str]:
    """Simulated cells without the mark, and measured ones with it."""
    simulated = {load.name for load in report.production.loads} if report.production else set()
    return [f"{cell.load} {cell.key}" for cell in cells_of(page) if cell.is_simulated != (cell.load in simulated)]


def test_what_is_simulated_is_marked_wherever_it_stands(page: str, report: LadderReport, folder: Path) -> None:
    assert report.production is not None
    assert unmarked(page, report) == []
    assert len([cell for cell in cells_of(page) if cell.is_simulated]) > 100
    for words in re.findall(r'alt="([^"]*simulated-[^"]*)"', page):
        assert words.startswith("SIMULATED"), words
        assert "simulated clock" in words
    assert all(load.name.startswith("simulated-") for load in report.production.loads)


def test_a_simulated_table_without_its_mark_is_found_out(page: str, report: LadderReport) -> None:
    mark = '<span class="mark">simulated</span>'
    [(start, end)] = [match.span() for match in re.finditer("<caption>[^\n]*Load simulated-long-prompt", page)]
    assert mark in page[start:end]
    assert unmarked(page[:start] + page[start:end].replace(mark, "") + page[end:], report)


def test_the_printed_tables_say_so_too(folder: Path, capsys: pytest.CaptureFixture[str], report: LadderReport) -> None:
    from nanoserve.lab.ladder_tables import show

    show(report, [folder / "ladder.json"], as_json=False)
    shown = capsys.readouterr().out
    assert "SIMULATED, nothing below was measured" in shown
    assert report.production is not None
    for text in [*report.production.assumptions, *report.production.not_told_apart]:
        assert " ".join(text.split())[:60] in " ".join(shown.split())
    assert "v0 cannot" not in shown


# --- The story of a stage


def stage_report(**moved: object) -> StageReport:
    execution = Execution(graph_mode="full", capture_s=2.0, graph_bytes=2**20) if moved.get("graphs") else Execution()
    config = describe_config(FAKE) | {name: value for name, value in moved.items() if name != "graphs"}
    info = EngineInfo(
        model="m", max_model_len=1, vocab_size=1, num_blocks=1, block_size=1, device="cpu", dtype="float32",
        execution=execution,
    )  # fmt: skip
    return StageReport(config, info)  # type: ignore[arg-type]


def test_a_stage_of_your_own_gets_the_story_of_the_fields_that_it_moves(report: LadderReport) -> None:
    load = report.loads[1]
    renamed = dict(zip(["v0", "chunked", "shared"], ["a", "b", "mine"], strict=True))
    rows = [
        replace(row, values={renamed[s]: v for s, v in row.values.items()}) for row in load.rows
    ]  # the same figures under other names
    load = replace(load, rows=rows)
    stages = {"b": stage_report(), "mine": stage_report(blocks="MyBlocks")}
    [first, story] = stage_stories(stages, [load], None, [], None)
    assert (first.above, first.moved, first.gains, first.costs) == (None, {}, [], [])
    assert story.moved == {"blocks": ["PrivateBlocks", "MyBlocks"]}
    assert [effect.key for effect in story.gains] == ["prompt_tokens_computed", "ttft_session_p50", "peak_used_blocks"]
    assert {effect.clock for effect in story.gains} == {"wall"}
    assert set(EFFECTS) <= set(MOVABLE)


def test_capturing_and_its_memory_are_costs_of_the_stage_that_captures() -> None:
    [_, story] = stage_stories({"a": stage_report(), "b": stage_report(graphs=True)}, [], None, [], None)
    assert story.moved == {"graph_mode": ["none", "full"]}
    assert {e.key: e.after for e in story.costs} == {"capture": 2.0, "graph_bytes": 2**20, "num_graphs": 0}


def test_a_prompt_that_nobody_shares_costs_more_where_it_is_hashed() -> None:
    stages = {"a": FAKE, "b": replace(FAKE, blocks=SharedBlocks), "c": replace(FAKE, blocks=V0CachedBlocks)}
    costs = admission_costs(stages, 2048)
    assert [(cost.above, cost.stage, list(cost.seconds)) for cost in costs] == [
        ("a", "b", ["a", "b"]),
        ("b", "c", ["b", "c"]),
    ]
    assert costs[0].seconds["b"] > costs[0].seconds["a"] > 0
    assert admission_costs({"a": FAKE, "b": replace(FAKE, max_num_seqs=4)}, 64) == []


def effect(before: float, after: float, better: str = "lower") -> Effect:
    return Effect(load="", key="", label="", unit="", better=better, clock="wall", before=before, after=after)


def test_a_change_is_judged_by_its_figures_whichever_way_it_went() -> None:
    assert change_of(effect(10, 9)).judgement == "better"
    assert change_of(effect(9, 10)).judgement == "worse"
    assert change_of(effect(9, 10, "higher")).judgement == "better"
    assert change_of(effect(100, 102)).judgement == "same"
    assert change_of(effect(0, 3)).judgement == "worse"
    assert change_of(effect(0, 3)).ratio == ""


def test_history_is_honest(page: str) -> None:
    text = " ".join(page.split())
    for fact in ["v0 could cut prompts", "v0 could cache prefixes", "SARATHI", "9.83 TB", "ZMQ"]:
        assert fact in text, fact
    assert "v0 cannot" not in text
    assert "v0 could not" not in text


# --- Charts


@pytest.mark.parametrize(
    ("values_ms", "labels"),
    [
        ([5.0] * 98 + [900.0, 950.0], ["P50 5.00", "P99 900.0, max 950.0"]),
        ([5.0] * 97 + [950.0] * 3, ["P50 5.00", "P99, max 950.0"]),
        ([5.0] * 97 + [6.0, 6.0, 900.0], ["P50 5.00, P99 6.00", "max 900.0"]),
        ([5.0] * 97 + [60.0, 60.0, 900.0], ["P50 5.00", "P99 60.0", "max 900.0"]),
        ([5.0] * 99 + [6.0], ["P50, P99 5.00, max 6.00"]),
    ],
)
def test_marks_of_a_strip_that_are_near_share_a_label(values_ms: list[float], labels: list[str]) -> None:
    figure = millisecond_strip({"v0": values_ms}, "ms", Setting("load", "cpu", "wall", 0), "What", "Last")
    assert [text.get_text() for text in figure.axes[0].texts] == labels


# --- Block maps


def test_the_block_maps_are_of_the_runs_with_queue_and_cache_replayed() -> None:
    load = shared_system_prompt(random_tokens(900), num_requests=4, prefix_len=64, tail_len=8, output_tokens=4)
    runs, built = climb(FAKES, [load], 1)
    traces = traces_of(runs[load.name], built)
    for run in runs[load.name]:
        trace = traces[run.stage]
        history = BlockHistory(trace)
        blocks = history.at(trace.records[-1].step)
        assert history.complaint == "", run.stage  # or the replay would have begun with another pool
        assert blocks.free is not None
        assert trace.start_s == run.records[0].arrivals[0].arrival_s  # and not the warm-up's
    held = {stage: BlockHistory(trace).at(_widest(trace.records).step).refs for stage, trace in traces.items()}
    assert max(held["chunked"].values()) == 1
    assert max(held["shared"].values()) == 4
    assert PrivateBlocks.__name__ == traces["chunked"].header.config["blocks"]


def _widest(records: typing.Sequence[typing.Any]) -> typing.Any:
    return max(records, key=lambda record: len(record.num_scheduled_tokens))
