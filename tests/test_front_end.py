"""Laws of the lock experiment: a real server a run, figures that follow from the records, and nothing left behind."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import msgspec
import pytest
from fakes_served import DiesInStep, FakeRunner, WrongRunner
from faulty import RefusesToStart, children_of, wait_until

import nanoserve.config
from nanoserve.api.cli import main
from nanoserve.blocks import SharedBlocks
from nanoserve.client import CoreProcessClient, EngineDeadError, InProcessClient, SplitRunnerClient
from nanoserve.config import STAGES, EngineConfig
from nanoserve.lab import front_end, ladder
from nanoserve.lab.arrivals import Uniform, story_words
from nanoserve.lab.boundary import boundary_cost, crossing_bytes, measure_step
from nanoserve.lab.climb import client_moves, moving_stages
from nanoserve.lab.front_end import FrontEndLoad, busy_front_end, run_front_end, step_gaps, step_threads, with_seats
from nanoserve.lab.ladder_report import LadderReport, ServerRun, first_difference
from nanoserve.record import StepRecord
from nanoserve.scheduler import UnifiedScheduler

FAKE = EngineConfig(runner=FakeRunner, scheduler=UnifiedScheduler)
FAKES = {
    "v0": EngineConfig(runner=FakeRunner),
    "alone": FAKE,
    "apart": replace(FAKE, client=CoreProcessClient),
    "shared": replace(FAKE, client=CoreProcessClient, blocks=SharedBlocks),
}
TINY = [
    "--rounds=2", "--streams=2", "--stream-tokens=12", "--long-prompts=1", "--long-prompt-len=300", "--requests=3",
    "--prefix-len=64", "--tail-len=8", "--front-end-streams=5", "--front-end-requests=2", "--front-end-tokens=6",
    "--front-end-prompt-words=8", "--no-simulated",
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process and no file after any run, whatever its end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = set(children_of(os.getpid()))
    yield
    wait_until(lambda: not set(children_of(os.getpid())) - before, 5.0, "all children are gone")
    left = [path for path in folder.iterdir() if "crash" not in path.name]  # a dump is kept on purpose
    assert not left


@pytest.fixture
def use_stages(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    def use(stages: Mapping[str, EngineConfig]) -> None:
        monkeypatch.setattr(nanoserve.config, "STAGES", MappingProxyType(stages))
        monkeypatch.setattr(ladder, "STAGES", MappingProxyType(stages))

    return use


def small_load(**sizes: int) -> FrontEndLoad:
    sizes = {"num_streams": 4, "requests_per_stream": 2, "output_tokens": 6} | sizes
    return busy_front_end(story_words, prompt_len=Uniform(5, 15), **sizes)


def climb(out: Path, *flags: str) -> LadderReport:
    assert main(["ladder", "--out", str(out), "--no-charts", *TINY, *flags]) in (0, 1)
    return msgspec.json.decode((out / "ladder.json").read_bytes(), type=LadderReport)


# --- Figures


def test_every_gap_is_between_two_steps_while_a_request_waits() -> None:
    def step(start_s: float, end_s: float, running: int, waiting: int = 0) -> StepRecord:
        return StepRecord(
            step=0, start_s=start_s, launched_s=start_s, end_s=end_s, num_running=running, num_waiting=waiting
        )

    records = [step(0.0, 1.0, 1), step(1.25, 2.0, 0, 1), step(4.0, 5.0, 0), step(9.0, 10.0, 1)]
    assert step_gaps(records) == [0.25, 2.0]  # between the last two there was nothing to do
    assert step_gaps(records[:1]) == []


@pytest.mark.parametrize("client", [InProcessClient, CoreProcessClient, SplitRunnerClient])
def test_every_layout_serves_the_same_load_with_the_same_tokens(client) -> None:
    load, heard = small_load(), []
    run = run_front_end(replace(FAKE, client=client), load, on_tokens=heard.append)
    assert sum(heard) == load.num_output_tokens == 4 * 2 * 6
    assert heard == [6] * 8
    assert [len(tokens) for tokens in run.token_ids.values()] == [6] * 8
    for spread in (run.metrics.gap_s, run.metrics.step_s):
        assert spread is not None
        assert 0 <= spread.p50 <= spread.p99 <= spread.max < run.duration_s
    assert run.metrics.gap_s.count == len(run.gaps_s) < run.metrics.num_steps
    assert run.config["client"] == client.__name__
    assert run.metrics.ready_s > 0
    assert 0 < run.metrics.client_cpu_share < 1.5
    alone = run_front_end(FAKE, load)
    assert first_difference([ServerRun("alone", 1, alone), ServerRun("other", 1, run)]) is None


def test_a_server_with_other_tokens_is_seen() -> None:
    load = small_load(output_tokens=40)
    right, wrong = (run_front_end(replace(FAKE, runner=runner), load) for runner in (FakeRunner, WrongRunner))
    told = first_difference([ServerRun("a", 1, right), ServerRun("b", 1, wrong)])
    assert told is not None
    assert "a (round 1) emitted id" in told


def test_every_stream_has_a_seat_and_prompts_have_room_beside_them() -> None:
    config = with_seats(replace(FAKE, max_num_seqs=8, max_num_batched_tokens=32), 100)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (100, 200)
    assert with_seats(FAKE, 4) == FAKE


def test_the_threads_of_a_step_are_those_that_a_runner_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_threads(replace(FAKE, num_threads=3)) == 3
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert step_threads(replace(FAKE, device="cpu")) == 1  # the embedded model is small


# --- Ends


def test_a_config_that_cannot_be_served_is_bad_input() -> None:
    with pytest.raises(ValueError, match="at most"):
        run_front_end(replace(FAKE, max_model_len=10**6), small_load())
    with pytest.raises(ValueError, match="http_400"):
        run_front_end(replace(FAKE, max_model_len=8), small_load())
    with pytest.raises(ValueError, match=r".+"):
        run_front_end(replace(FAKE, runner=RefusesToStart), small_load())


@pytest.mark.parametrize("client", [InProcessClient, CoreProcessClient])
def test_a_server_that_dies_under_load_is_a_dead_engine(client) -> None:
    with pytest.raises(EngineDeadError, match=r"busy-front-end: (. of 8 requests failed|the )"):
        run_front_end(replace(FAKE, runner=DiesInStep, client=client), small_load())


@pytest.mark.parametrize("client", [InProcessClient, CoreProcessClient])
def test_an_interrupt_under_load_ends_every_process(client) -> None:
    pids: list[int] = []

    def interrupt(num_tokens: int) -> None:
        pids.extend(children_of(os.getpid()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_front_end(replace(FAKE, client=client), small_load(), on_tokens=interrupt)
    assert len(pids) >= 2  # a server and a load generator; `nothing_is_left` sees them gone


def test_more_streams_than_open_files_are_refused() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with pytest.raises(ValueError, match="ulimit"):
        small_load(num_streams=limit, requests_per_stream=1)


# --- What the split costs


def test_bytes_cross_where_processes_part() -> None:
    inside, core, split = (crossing_bytes(c, 64) for c in (InProcessClient, CoreProcessClient, SplitRunnerClient))
    assert inside == 0
    assert core is not None
    assert split is not None
    assert 64 * 10 < core < split < 64 * 100
    assert crossing_bytes(type("Other", (), {}), 64) is None  # a layout of a user's own


def test_a_cost_is_the_median_of_the_rounds_differences() -> None:
    stages = [("alone", FAKES["alone"]), ("apart", FAKES["apart"])]
    rounds = [{name: measure_step(config, 4, 20) for name, config in stages} for _ in range(3)]
    cost = boundary_cost(*stages, rounds, 4)
    differences = sorted(one["apart"].step_s - one["alone"].step_s for one in rounds)
    assert cost.added_step_s == differences[1]
    assert cost.added_per_request_s == differences[1] / 4
    assert cost.start_s["apart"] == sorted(one["apart"].start_s for one in rounds)[1]
    assert (cost.bytes_per_step["alone"], cost.stage, cost.above) == (0, "apart", "alone")


# --- In the ladder


def test_the_load_goes_to_stages_that_move_the_client_and_to_those_above() -> None:
    assert client_moves(FAKES) == [("alone", "apart")]
    assert list(moving_stages(FAKES)) == ["alone", "apart"]
    assert list(moving_stages(STAGES)) == ["chunked", "multiprocess"]
    back = {**FAKES, "back": FAKE}
    assert client_moves(back) == [("alone", "apart"), ("shared", "back")]


def test_a_ladder_serves_and_says_what_the_split_costs(
    use_stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_stages(FAKES)
    report = climb(tmp_path / "out")
    served = report.front_end
    assert served is not None
    assert report.identical
    assert list(served.medians) == ["alone", "apart"]
    assert [len(rounds) for rounds in served.rounds.values()] == [2, 2]
    rows = {row.key: row for row in served.rows}
    assert set(served.headlines) <= set(rows)
    for stage, rounds in served.rounds.items():
        gaps = [one.gap_s.p50 for one in rounds if one.gap_s]
        assert (rows["gap_p50"].lows[stage], rows["gap_p50"].highs[stage]) == (min(gaps), max(gaps))
        assert rows["num_threads"].values[stage] == served.medians[stage].num_threads
    assert [(cost.above, cost.stage, cost.num_running) for cost in served.costs] == [("alone", "apart", 5)]
    shown = capsys.readouterr()
    for text in ["Load busy-front-end: num_streams=5", "step gap P50", "/health P50", "What apart costs against alone"]:
        assert text in shown.out
    assert shown.err.count("busy-front-end, round ") == 4
    assert "busy-front-end: greedy tokens are identical in all 4 runs" in shown.out


def test_the_gaps_of_every_server_are_drawn(use_stages, tmp_path: Path) -> None:
    use_stages({name: FAKES[name] for name in ("alone", "apart")})
    assert main(["ladder", "--out", str(tmp_path / "out"), *TINY, "--rounds=1"]) == 0
    assert (tmp_path / "out" / "busy-front-end-gaps.png").stat().st_size > 10_000


def test_a_server_with_other_tokens_fails_the_climb(use_stages, tmp_path: Path) -> None:
    use_stages({"alone": FAKE, "apart": replace(FAKES["apart"], runner=WrongRunner)})
    report = climb(tmp_path / "out", "--front-end-tokens=40", "--rounds=1")
    assert report.front_end is not None
    assert report.front_end.first_difference is not None
    assert not report.identical


def test_a_load_that_cannot_be_served_is_left_out_and_says_why(
    use_stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_stages({name: FAKES[name] for name in ("alone", "apart")})
    monkeypatch.setattr(front_end, "PACKAGES", ("starlette", "no_such_package"))
    report = climb(tmp_path / "out", "--rounds=1")
    assert report.front_end is None
    assert "no_such_package" in report.left_out["busy-front-end"]
    assert "busy-front-end: left out, a server needs no_such_package; pip install" in capsys.readouterr().out


def test_every_run_sends_the_same_requests() -> None:
    first, again = (busy_front_end(story_words, num_streams=3, seed=5).requests for _ in range(2))
    assert first == again
    assert first != busy_front_end(story_words, num_streams=3, seed=6).requests
    assert isinstance(first[0].prompt, str)  # text, so that the server has something to tokenize


@pytest.mark.slow
def test_a_core_of_its_own_steps_on_while_the_front_end_is_busy() -> None:
    """The experiment itself, at the size of the ladder: a lock that is shared makes the usual gap 3 x longer."""
    load = busy_front_end(story_words)
    stages = moving_stages(STAGES)
    gaps = {name: run_front_end(replace(config, max_num_batched_tokens=256), load) for name, config in stages.items()}
    alone, apart = (run.metrics.gap_s for run in gaps.values())
    assert alone is not None
    assert apart is not None
    assert alone.p50 > 3 * apart.p50
