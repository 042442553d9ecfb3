"""Laws of the simulated ladder: equal seeds give equal figures, sums come out as by hand, and no gain is made up."""

from dataclasses import replace

import msgspec
import pytest

from nanoserve.config import STAGES, EngineConfig
from nanoserve.graph_runner import GraphRunner
from nanoserve.lab import ladder_production
from nanoserve.lab.ladder_production import (
    ANSWER_LEN,
    IN_PROCESS,
    LONG_PROMPT_LEN,
    MEMORY,
    QUESTION_LEN,
    SEATS,
    SPLIT,
    SYSTEM_PROMPT_LEN,
    busy_front_end,
    long_prompts,
    production_ladder,
    run_stage,
    system_prompt,
)
from nanoserve.lab.ladder_report import Production
from nanoserve.persistent_batch import PersistentBatch
from nanoserve.scheduler import PhaseSplitScheduler


@pytest.fixture(scope="module")
def report() -> Production:
    return production_ladder(STAGES, seed=0).report


def figures(report: Production, load: str, key: str) -> dict[str, float | None]:
    [table] = [table for table in report.loads if table.name == f"simulated-{load}"]
    [row] = [row for row in table.rows if row.key == key]
    return row.values


def test_equal_seeds_give_equal_bytes_and_another_seed_other_ones(report: Production) -> None:
    again, other = production_ladder(STAGES, seed=0).report, production_ladder({"v0": STAGES["v0"]}, seed=1).report
    assert msgspec.json.encode(again) == msgspec.json.encode(report)
    for mine, theirs in zip(report.loads, other.loads, strict=True):
        assert [row.values["v0"] for row in mine.rows] != [row.values["v0"] for row in theirs.rows], mine.name


def test_every_stage_and_every_load_is_there_and_says_that_it_is_simulated(report: Production) -> None:
    assert report.clock == "simulated"
    assert [load.name for load in report.loads] == [
        "simulated-long-prompt", "simulated-system-prompt", "simulated-busy-front-end",
    ]  # fmt: skip
    for load in report.loads:
        assert list(load.num_runs) == list(STAGES)
        assert set(load.headlines) <= {row.key for row in load.rows}
        assert all(value is not None for row in load.rows for value in row.values.values())


def test_what_is_assumed_is_said(report: Production) -> None:
    said = " ".join([report.setup, *report.assumptions])
    for figure in [IN_PROCESS.step_us, IN_PROCESS.front_end_us, SPLIT.step_us - IN_PROCESS.step_us, SEATS]:
        assert f"{figure:g} " in said, figure
    for text in ["llama-3-70b", "fp8", "8 x h100", "60% of the operations", "80% of the bandwidth", "2,048"]:
        assert text in said, text
    assert report.num_blocks == MEMORY.num_blocks
    assert report.host == {name: IN_PROCESS if name in ("v0", "chunked") else SPLIT for name in STAGES}


def test_chunks_end_the_freeze_and_cost_the_long_prompt_time(report: Production) -> None:
    longest, first = figures(report, "long-prompt", "itl_max"), figures(report, "long-prompt", "ttft_long_p50")
    assert longest["v0"] > 10 * longest["chunked"]
    assert longest["v0"] > 0.28  # a prompt of 16,384 tokens alone: semantics.md, section 10
    assert first["chunked"] > first["v0"]
    assert len([a for a in long_prompts().arrivals if len(a.prompt_token_ids) == LONG_PROMPT_LEN]) == 6


def test_a_shared_prefix_is_computed_once(report: Production) -> None:
    computed, num = figures(report, "system-prompt", "tokens_computed"), len(system_prompt().arrivals)
    own = QUESTION_LEN + ANSWER_LEN - 1  # the last token of an answer is not computed
    assert computed["multiprocess"] == num * (SYSTEM_PROMPT_LEN + own)
    assert computed["shared"] == SYSTEM_PROMPT_LEN + num * own


def test_in_one_process_the_next_step_waits_for_the_front_end_and_in_two_it_does_not(report: Production) -> None:
    gap = figures(report, "busy-front-end", "gap_max")
    assert gap["chunked"] == pytest.approx(SEATS * IN_PROCESS.front_end_us / 1e6)
    assert gap["multiprocess"] == 0


def test_no_gain_is_made_up_for_what_the_costs_have_no_term_for() -> None:
    """Runner, batch and compile change nothing; only a step ahead does."""
    shared, load = STAGES["shared"], system_prompt(num_sessions=6)
    captured = replace(shared, runner=GraphRunner, batch=PersistentBatch, compile="layers")
    plain, other, ahead = (run_stage(c, load)[0] for c in (shared, captured, replace(captured, async_scheduling=True)))
    assert (plain.end_us, plain.num_steps, plain.itl_us()) == (other.end_us, other.num_steps, other.itl_us())
    assert ahead.end_us < other.end_us


def test_a_front_end_that_costs_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: the host of the wrong layout."""

    def host_of(stage: EngineConfig) -> object:
        return replace(IN_PROCESS, front_end_us=0.0)

    monkeypatch.setattr(ladder_production, "host_of", host_of)
    _, gaps = run_stage(STAGES["chunked"], busy_front_end(num_streams=32))
    assert max(gaps) == 0  # test_in_one_process_... would not have it


def test_a_scheduler_that_does_not_cut_is_found_out() -> None:
    """A planted bug: the stage that should cut prompts takes them whole."""
    uncut, _ = run_stage(replace(STAGES["chunked"], scheduler=PhaseSplitScheduler), long_prompts(num_long=1))
    longest = uncut.itl_us("stream")
    assert longest is not None
    assert longest.max > 280_000
