"""Laws of `nanoserve ladder`: one file that says it all, one verdict on the tokens, every stage treated alike."""

import io
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import msgspec
import pytest
from fakes_records import FakeRunner, WrongRunner
from rich.console import Console

import nanoserve.config
from nanoserve.api.cli import main
from nanoserve.blocks import SharedBlocks
from nanoserve.config import EngineConfig
from nanoserve.lab import ladder, ladder_figures, ladder_files
from nanoserve.lab.charts import STAGE_LOOKS, Setting, look_of, step_timeline
from nanoserve.lab.climb import Progress, run_once
from nanoserve.lab.climb import climb as run_all
from nanoserve.lab.ladder_report import LadderReport, Row, Run, TableReport, first_difference, middle_round
from nanoserve.lab.ladder_tables import load_table
from nanoserve.lab.metrics import median_of
from nanoserve.lab.workload import long_prompt_among_decodes, random_tokens, shared_system_prompt
from nanoserve.record import StepRecord
from nanoserve.scheduler import UnifiedScheduler

PNG = b"\x89PNG\r\n\x1a\n"
SMALL = [
    "--no-simulated", "--random-prompts", "--streams=3", "--stream-tokens=30", "--long-prompts=2",
    "--long-prompt-len=700", "--requests=10", "--prefix-len=512", "--tail-len=16",
]  # fmt: skip
FAKE = EngineConfig(runner=FakeRunner)
FAKES = {
    "v0": FAKE,
    "chunked": replace(FAKE, scheduler=UnifiedScheduler),
    "shared": replace(FAKE, scheduler=UnifiedScheduler, blocks=SharedBlocks),
}


@pytest.fixture
def use_stages(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """The ladder's stages are those given."""

    def use(stages: Mapping[str, EngineConfig]) -> None:
        monkeypatch.setattr(nanoserve.config, "STAGES", MappingProxyType(stages))
        monkeypatch.setattr(ladder, "STAGES", MappingProxyType(stages))

    return use


def climb(out: Path, *flags: str) -> int:
    return main(["ladder", "--out", str(out), *SMALL, *flags])


def climb_undrawn(out: Path, *flags: str) -> int:
    return climb(out, "--no-charts", *flags)


def read(out: Path) -> LadderReport:
    return msgspec.json.decode((out / "ladder.json").read_bytes(), type=LadderReport)


# --- What a climb leaves behind


def test_a_climb_writes_its_file_and_its_charts_and_prints_a_table_a_load(
    use_stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_stages(FAKES)
    assert climb(tmp_path) == 0
    report = read(tmp_path)
    assert (report.version, report.clock, report.num_rounds) == (3, "wall", 3)
    assert list(report.stages) == list(FAKES)
    assert report.machine.cores >= 1
    assert len(report.charts) == 9
    assert report.pages == ["ladder.html", "long-prompt-timeline.html", "system-prompt-timeline.html"]
    for name in report.charts:
        data = (tmp_path / name).read_bytes()
        assert data.startswith(PNG)
        assert len(data) > 10_000  # more than an empty frame
    shown = capsys.readouterr()
    for text in ["Load long-prompt: num_streams=3, ", "Load system-prompt", *FAKES, "ITL stream P50", "TTFT long P50"]:
        assert text in shown.out
    assert shown.out.startswith("TTFT: from a request's arrival")
    assert "below: lowest - highest" in shown.out
    assert "busy-front-end: left out, no stage here moves the client." in shown.out
    assert shown.out.count("greedy tokens are identical in all 9 runs") == 2
    assert "v0 could chunk" in shown.out
    assert all(str(tmp_path / name) in shown.out for name in ["ladder.json", *report.pages, *report.charts])


def test_every_median_and_every_row_follows_from_the_rounds(use_stages, tmp_path: Path) -> None:
    use_stages(FAKES)
    climb_undrawn(tmp_path, "--rounds=2")
    for load in read(tmp_path).loads:
        rows = {row.key: row for row in load.rows}
        assert set(load.headlines) <= set(rows)
        for stage, rounds in load.rounds.items():
            assert len(rounds) == 2
            assert load.medians[stage] == median_of(rounds)
            assert rows["peak_used_blocks"].values[stage] == load.medians[stage].peak_used_blocks
            itl = load.medians[stage].groups[load.watched].itl_s
            assert itl is not None
            assert rows["itl_max"].values[stage] == itl.max
        for row in load.rows:
            base = row.values["v0"]
            for stage, value in row.values.items():
                assert row.ratios[stage] == (value / base if base and value is not None else None)
                low, high = row.lows[stage], row.highs[stage]
                assert value is None or low <= value <= high
        for stage, rounds in load.rounds.items():
            seen = [one.output_tokens_per_s for one in rounds]
            row = rows["output_tokens_per_s"]
            assert (row.lows[stage], row.highs[stage]) == (min(seen), max(seen))


def test_sharing_computes_the_prefix_once(use_stages, tmp_path: Path) -> None:
    use_stages(FAKES)
    climb_undrawn(tmp_path, "--rounds=1")
    medians = read(tmp_path).loads[1].medians
    assert medians["v0"].prompt_tokens_computed == 10 * 528
    assert medians["chunked"].prompt_tokens_computed == 10 * 528
    assert medians["shared"].prompt_tokens_computed == 512 + 10 * 16
    assert medians["shared"].peak_used_blocks < 0.2 * medians["v0"].peak_used_blocks


def test_json_on_standard_output_is_the_file(use_stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use_stages(FAKES)
    assert climb_undrawn(tmp_path, "--json", "--rounds=1") == 0
    shown = capsys.readouterr().out
    assert shown == (tmp_path / "ladder.json").read_text()
    assert json.loads(shown)["stages"]["shared"]["config"]["blocks"] == "SharedBlocks"


class Announced(Progress):
    """Remembers the names of the runs."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def announce(self, what: str) -> None:
        self.order.append(what)


def test_rounds_are_interleaved() -> None:
    progress = Announced()
    load = shared_system_prompt(random_tokens(900), num_requests=2, prefix_len=32, tail_len=4, output_tokens=2)
    runs, _ = run_all(FAKES, [load], 2, progress)
    assert [name.split()[-1] for name in progress.order] == ["v0", "chunked", "shared"] * 2
    assert [(run.stage, run.round) for run in runs[load.name]][2:4] == [("shared", 1), ("v0", 2)]


def test_every_run_that_has_ended_is_a_line_where_there_is_no_terminal(
    use_stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_stages(FAKES)
    climb_undrawn(tmp_path, "--rounds=2", "--stages=v0,shared")
    loads = ("long-prompt", "system-prompt")
    expected = [f"{load}, round {n}, {stage}" for load in loads for n in (1, 2) for stage in ("v0", "shared")]
    lines = capsys.readouterr().err.splitlines()
    assert [line.rsplit(": ", 1)[0] for line in lines] == expected
    assert all(re.fullmatch(r"\d+\.\d s", line.rsplit(": ", 1)[1]) for line in lines)


def table_of(figures: Mapping[str, Mapping[str, float]], headlines: list[str]) -> list[str]:
    """The lines of a table whose rows are latencies of one round."""
    rows = []
    for key, by_stage in figures.items():
        values = dict(by_stage)
        label = f"ITL {key.rsplit('_', 1)[1]}"
        rows.append(Row(key, label, "s", "lower", values, dict.fromkeys(values, 1.0), values, values))
    load = TableReport(
        name="a load", claim="", headlines=headlines, parameters={}, num_runs=dict.fromkeys(rows[0].values, 1),
        rows=rows,
    )  # fmt: skip
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(load_table(load, "title"))
    return [line for line in console.export_text().splitlines() if "ITL" in line]


def test_rows_that_coincide_in_every_stage_are_one() -> None:
    same = {"itl_p50": {"a": 0.01, "b": 0.02}, "itl_p99": {"a": 0.9, "b": 0.5}, "itl_max": {"a": 0.905, "b": 0.505}}
    lines = table_of(same, headlines=["itl_max"])
    assert [line.split("(ms)")[0].strip("│ ") for line in lines] == ["ITL p50", "ITL p99, max"]
    assert "900.0" in lines[1]
    apart = {**same, "itl_max": {"a": 0.905, "b": 0.9}}
    assert len(table_of(apart, headlines=[])) == 3


@pytest.mark.parametrize("stage", FAKES)
def test_every_stage_climbs_alone(stage, use_stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use_stages(FAKES)
    assert climb(tmp_path, "--rounds=1", f"--stages={stage}") == 0
    report = read(tmp_path)
    assert list(report.stages) == [stage]
    assert "long-prompt-tokens.png" in report.charts
    assert {*report.charts, *report.pages, "ladder.json"} == {path.name for path in tmp_path.iterdir()}
    assert f"{stage} " in capsys.readouterr().out


def check_file_survives_a_chart_that_fails(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr(ladder, "draw", fail)
    with pytest.raises(RuntimeError, match="no ink"):
        climb(out, "--rounds=1", "--stages=v0")
    assert (out / "ladder.json").exists()
    assert read(out).loads[0].medians["v0"]


def test_what_was_measured_is_written_before_anything_is_drawn(use_stages, tmp_path: Path, monkeypatch) -> None:
    use_stages(FAKES)
    check_file_survives_a_chart_that_fails(tmp_path, monkeypatch)


def test_a_planted_ladder_that_draws_first_is_seen(use_stages, tmp_path: Path, monkeypatch) -> None:
    use_stages(FAKES)
    only_at_the_end = lambda report, drawn, out: ladder_files.write(report, drawn, out) if drawn.charts else []  # noqa: E731
    monkeypatch.setattr(ladder, "write", only_at_the_end)
    with pytest.raises(AssertionError, match=r"ladder\.json"):
        check_file_survives_a_chart_that_fails(tmp_path, monkeypatch)


def test_a_new_stage_joins_by_being_in_stages(use_stages, tmp_path: Path) -> None:
    use_stages({**FAKES, "mine": replace(FAKES["shared"], max_num_seqs=4)})
    assert climb_undrawn(tmp_path, "--rounds=1", "--stages=v0,mine") == 0
    report = read(tmp_path)
    assert list(report.stages) == ["v0", "mine"]
    assert report.stages["mine"].config["max_num_seqs"] == 4
    assert list(report.loads[0].medians) == ["v0", "mine"]


def test_the_budget_is_that_of_the_stages_that_cut_prompts(use_stages, tmp_path: Path) -> None:
    use_stages(FAKES)
    climb_undrawn(tmp_path, "--rounds=1", "--max-num-batched-tokens=160")
    budgets = {name: stage.config["max_num_batched_tokens"] for name, stage in read(tmp_path).stages.items()}
    assert budgets == {"v0": 4096, "chunked": 160, "shared": 160}


# --- The verdict on the tokens


def test_a_stage_with_other_tokens_fails_the_climb(
    use_stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_stages({**FAKES, "chunked": replace(FAKES["chunked"], runner=WrongRunner)})
    assert climb_undrawn(tmp_path, "--rounds=1") == 1
    first = read(tmp_path).loads[0].first_difference
    assert first is not None
    assert "request stream-0, output token 25: v0 (round 1) emitted id" in first  # 16 + 25 tokens are known there
    assert "chunked (round 1) id" in first
    assert "greedy tokens DIFFER" in capsys.readouterr().out


def test_the_first_difference_may_be_a_missing_token() -> None:
    load = shared_system_prompt(random_tokens(900), num_requests=2, prefix_len=32, tail_len=4, output_tokens=3)
    records, _ = run_once(FAKE, load)
    cut = [*records[:-1], msgspec.structs.replace(records[-1], sampled={})]
    told = first_difference([Run("a", 1, records), Run("a", 2, records), Run("b", 1, cut)])
    assert told is not None
    assert told.startswith("request session-0, output token 2: a (round 1) emitted id ")
    assert told.endswith(", b (round 1) none")
    assert first_difference([Run("a", 1, records), Run("b", 1, records)]) is None


# --- Bad input


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--stages=v0,v7"], "stage 'v7' is not known; use one of v0, chunked, shared"),
        (["--stages=v0,v0"], "names v0 twice"),
        (
            ["--max-num-batched-tokens=0", "--stages=v0"],
            "to stages that take prompts whole (v0); leave it out",
        ),
        (["--max-num-batched-tokens=0"], "--max-num-batched-tokens must be >= 128 (max_num_seqs"),
        (["--max-num-batched-tokens=127", "--stages=v0,shared"], "must be >= 128"),
        (["--max-num-batched-tokens=99999999999999999999"], "<= 9223372036854775807, got 99999999999999999999"),
        (["--rounds=0"], "--rounds must be an integer >= 1 and <= 1000000, got 0"),
        (["--long-prompt-len=5000"], "holds a sequence of 5008 tokens, longer than max_model_len=4096"),
        (["--model=no/such-model"], "no/such-model"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    use_stages, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str
) -> None:
    use_stages(FAKES)
    assert climb_undrawn(tmp_path, *flags) == 2
    assert not list(tmp_path.iterdir())
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert complaint in shown


def test_asking_for_help_loads_neither_torch_nor_a_drawing_library() -> None:
    code = (
        "import sys, argparse, nanoserve.lab.ladder as ladder; ladder.add_arguments(argparse.ArgumentParser());"
        "print([m for m in ('torch', 'numpy', 'matplotlib', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# --- Charts


def luminance(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2


def test_every_stage_can_be_told_apart_in_grey() -> None:
    greys = [luminance(look.colour) ** (1 / 2.2) for look in STAGE_LOOKS.values()]
    assert all(later - earlier > 0.08 for earlier, later in itertools.pairwise(greys))
    assert len({look.marker for look in STAGE_LOOKS.values()}) == len(STAGE_LOOKS)
    assert set(nanoserve.config.STAGES) <= set(STAGE_LOOKS)


def test_every_chart_says_where_and_when_and_has_units() -> None:
    load = long_prompt_among_decodes(
        random_tokens(900), num_streams=2, stream_tokens=24, num_long=1, long_prompt_len=300
    )
    runs, _ = run_all(FAKES, [load], 1)
    charts = ladder_figures.draw_load(load, runs[load.name], Setting("", "cpu", "wall", 7))
    for name, figure in charts.items():
        assert figure.get_suptitle().endswith("load long-prompt, cpu, wall clock, seed 7, round 1 of 1"), name
        assert len(figure.get_supxlabel()) > 30, name
        assert (
            all(word in figure.axes[-1].get_xlabel() for word in ["(", ")"]) or "tokens" in figure.axes[-1].get_xlabel()
        )
    strip = charts["long-prompt-itl.png"].axes[0]
    assert strip.get_xscale() == "log"
    assert [label.get_text() for label in strip.get_yticklabels()] == list(FAKES)
    colours = {tuple(dots.get_facecolor()[0][:3]) for dots in strip.collections if len(dots.get_offsets()) > 10}
    assert len(colours) == len(FAKES)


def test_every_chart_shows_the_round_of_median_length() -> None:
    load = shared_system_prompt(random_tokens(900), num_requests=2, prefix_len=32, tail_len=4, output_tokens=2)
    records, _ = run_once(FAKE, load)

    def lasting(seconds: float) -> list[StepRecord]:
        return [*records[:-1], msgspec.structs.replace(records[-1], end_s=records[0].start_s + seconds)]

    lengths = {1: (5.0, 1.0), 2: (1.0, 1.0), 3: (1.0, 2.0)}
    runs = [Run(stage, n, lasting(s)) for n, both in lengths.items() for stage, s in zip("ab", both, strict=True)]
    assert middle_round(runs) == 3


def test_the_timeline_has_a_panel_a_stage_and_a_lane_a_request() -> None:
    load = shared_system_prompt(random_tokens(900), num_requests=3, prefix_len=32, tail_len=4, output_tokens=2)
    runs, _ = run_all(FAKES, [load], 1)
    shown = {run.stage: run.records for run in runs[load.name]}
    figure = step_timeline(shown, Setting(load.name, "cpu", "wall", 0))
    assert [ax.get_ylabel() for ax in figure.axes] == list(FAKES)
    assert all(len(ax.get_yticks()) == 3 for ax in figure.axes)
    assert look_of("never heard of").colour not in {look.colour for look in STAGE_LOOKS.values()}


# --- On a model


def test_the_embedded_model_climbs_with_identical_tokens(tmp_path: Path) -> None:
    flags = ["--quick", "--out", str(tmp_path), "--streams=2", "--stream-tokens=24", "--long-prompt-len=700"]
    flags += ["--front-end-streams=6", "--front-end-requests=1", "--front-end-tokens=6"]
    assert main(["ladder", *flags, "--no-charts", "--no-simulated", "--requests=4", "--prefix-len=128"]) == 0
    report = read(tmp_path)
    assert (report.production, report.pages) == (None, [])
    assert report.identical
    assert report.front_end is not None
    assert list(report.front_end.medians) == ["chunked", "multiprocess"]
    assert report.prompts == "stories in the model's own tokens"
    assert [load.name for load in report.loads] == ["long-prompt", "system-prompt"]
