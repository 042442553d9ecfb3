"""Laws of the simulator: the real core on a virtual clock, exact figures, and nothing random."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.blocks import PrivateBlocks, SharedBlocks, V0CachedBlocks
from nanoserve.client import CoreProcessClient, InProcessClient
from nanoserve.config import SEAMS, EngineConfig
from nanoserve.lab.costs import REFERENCE, Linear, StepLoad
from nanoserve.lab.metrics import Spread, measure
from nanoserve.lab.prompts import PartIds, TokenRuns
from nanoserve.lab.scenarios import SCENARIOS, chat, long_prompt
from nanoserve.lab.simulated import SimulatedRun, spread_of
from nanoserve.lab.simulator import CostRunner, Host, VirtualClock, complete_config, simulate
from nanoserve.lab.workload import Arrival, Progress, Workload
from nanoserve.record import JsonlRecorder, ListRecorder, read_trace
from nanoserve.request import StepPlan
from nanoserve.scheduler import PhaseSplitScheduler, UnifiedScheduler


def workload(*arrivals: Arrival) -> Workload:
    return Workload(name="load", claim="", watched="all", seed=0, parameters={}, arrivals=list(arrivals))


def arrival(name: str, num_prompt: int = 10, max_tokens: int = 4, at_s: float = 0.0, **fields) -> Arrival:
    ids = sum(name.encode()) + 1000 * len(name)
    prompt = TokenRuns([(ids, num_prompt)])
    return Arrival(id=name, group=name[0], prompt_token_ids=prompt, max_tokens=max_tokens, at_s=at_s, **fields)


def config(
    scheduler: type = UnifiedScheduler,
    budget: int = 512,
    *,
    num_blocks: int = 2000,
    max_model_len: int = 20_000,
    **fields,
) -> EngineConfig:
    named = replace(EngineConfig(scheduler=scheduler), max_num_batched_tokens=budget, check_invariants=True, **fields)
    return complete_config(named, max_model_len=max_model_len, num_blocks=num_blocks)


def run(load: Workload, host: Host | None = None, costs=REFERENCE, **fields) -> SimulatedRun:
    return simulate(config(**fields), load, costs, host)


# The reference of semantics.md, section 10

REFERENCE_TABLE = [
    (PhaseSplitScheduler, 16_384, (8240, 507_790, 507_790), [502_960, 507_450, 503_700, 499_950], 3_651_000),
    (UnifiedScheduler, 256, (15_680, 15_680, 15_680), [1_054_000, 1_288_880, 1_508_080, 1_710_910], 4_235_000),
    (UnifiedScheduler, 512, (23_360, 23_360, 23_360), [766_880, 771_610, 768_100, 764_590], 3_619_000),
    (UnifiedScheduler, 1024, (8240, 38_720, 38_720), [635_040, 639_770, 636_260, 632_750], 3_619_000),
    (UnifiedScheduler, 2048, (8240, 69_440, 69_440), [569_120, 573_850, 570_340, 566_830], 3_619_000),
]


def reference(scheduler: type, budget: int, manager: type = PrivateBlocks, **fields) -> SimulatedRun:
    load = long_prompt()
    full = config(scheduler, budget, num_blocks=20_000, max_model_len=load.longest, blocks=manager, **fields)
    return simulate(replace(full, check_invariants=False), load, REFERENCE)


@pytest.mark.parametrize(("scheduler", "budget", "itl", "ttfts", "end"), REFERENCE_TABLE)
def test_the_reference_load_gives_the_reference_figures(scheduler, budget, itl, ttfts, end):
    simulated = reference(scheduler, budget)
    gaps = simulated.itl_us()
    assert gaps is not None
    assert (gaps.p50, gaps.p99, gaps.max) == itl
    assert simulated.ttfts_us("long") == ttfts
    assert simulated.end_us == end


@pytest.mark.parametrize("manager", [V0CachedBlocks, SharedBlocks])
def test_without_common_prefixes_the_block_manager_changes_no_figure(manager):
    shared, private = reference(UnifiedScheduler, 512, manager), reference(UnifiedScheduler, 512)
    assert shared.itl_us() == private.itl_us()
    assert shared.end_us == private.end_us


def test_a_planted_bug_moves_the_reference_figures():
    class PromptsFirst(UnifiedScheduler):
        def schedule(self):
            self.running.sort(key=lambda request: -request.num_prompt_tokens)
            return super().schedule()

    gaps = reference(PromptsFirst, 512).itl_us()
    assert gaps is not None
    assert gaps.max > 23_360


# The clock


def test_a_token_is_stamped_with_the_end_of_its_step():
    simulated = run(workload(arrival("a", 10, 3, at_s=0.5)))
    [story] = simulated.members()
    assert (story.arrival_us, story.first_us) == (500_000, 500_000 + 8000 + 300)
    assert story.gaps == Counter({8030: 2})
    assert simulated.end_us == 500_000 + 8300 + 2 * 8030
    assert simulated.busy_us == 8300 + 2 * 8030


def test_an_idle_engine_jumps_to_the_next_arrival():
    simulated = run(workload(arrival("a", 10, 1), arrival("b", 10, 1, at_s=3600)))
    assert simulated.num_steps == 2
    assert simulated.end_us == 3600 * 10**6 + 8300


def test_who_arrives_during_a_step_waits_for_its_end():
    simulated = run(workload(arrival("a", 10, 2), arrival("b", 10, 1, at_s=0.001)))
    assert simulated.stories["b"].first_us == 8300 + 8000 + 30 * 11


def test_a_turn_comes_after_the_answer_it_follows_and_its_pause():
    first, second = arrival("a", 10, 2), arrival("b", 10, 1, at_s=1.5, follows="a")
    simulated = run(workload(first, second))
    end_us = simulated.stories["a"].last_us
    assert simulated.stories["b"].arrival_us == end_us + 1_500_000


def test_an_arrival_can_wait_for_the_progress_of_a_group():
    streams = [arrival("s1", 10, 5), arrival("s2", 10, 5)]
    simulated = run(workload(*streams, arrival("long", 100, 1, after=Progress("s", 3))))
    third = sorted([simulated.stories["s1"].first_us + 2 * 8060, simulated.stories["s2"].first_us + 2 * 8060])[-1]
    assert simulated.stories["long"].arrival_us == third


# The host


def test_in_one_process_the_front_end_holds_up_the_next_step():
    load, host = workload(arrival("a", 10, 3), arrival("b", 10, 3)), Host(front_end_us=500)
    inproc = run(load, host, client=InProcessClient)
    apart = run(load, host, client=CoreProcessClient)
    assert inproc.itl_us().max == 8060 + 1000
    assert apart.itl_us().max == 8060
    assert inproc.end_us == apart.end_us + 2 * 1000


def test_a_front_end_of_its_own_that_is_slower_than_the_steps_is_the_limit():
    host = Host(front_end_us=9000)
    simulated = run(workload(arrival("a", 10, 5)), host, client=CoreProcessClient)
    assert simulated.itl_us() == Spread(4, 9000, 9000, 9000, 9000)


def test_one_step_ahead_hides_the_host_behind_the_device():
    host, load = Host(step_us=2000, request_us=100), workload(arrival("a", 10, 6))
    in_step = run(load, host)
    ahead = run(load, host, async_scheduling=True)
    assert in_step.itl_us().p50 == 8030 + 2100
    assert ahead.itl_us().p50 == 8030
    assert ahead.output_tokens == in_step.output_tokens == 6


def test_one_step_ahead_a_slow_host_is_the_limit():
    simulated = run(workload(arrival("a", 10, 6)), Host(step_us=20_000), async_scheduling=True)
    assert simulated.itl_us().p50 == 20_000


# Bookkeeping

LOADS = st.lists(
    st.tuples(st.integers(1, 80), st.integers(1, 12), st.integers(0, 100_000), st.integers(0, 2)),
    min_size=1,
    max_size=9,
)


@settings(max_examples=40, deadline=None)
@given(
    load=LOADS,
    scheduler=st.sampled_from(sorted(SEAMS["scheduler"])),
    manager=st.sampled_from(sorted(SEAMS["blocks"])),
    num_blocks=st.integers(14, 40),
    ahead=st.booleans(),
)
def test_every_request_gets_all_its_tokens_and_the_records_tell_the_same(load, scheduler, manager, num_blocks, ahead):
    arrivals = [
        Arrival(
            id=f"r{i}",
            group=f"g{i % 2}",
            prompt_token_ids=TokenRuns([(7 + prefix, n)]),
            max_tokens=k,
            at_s=at_us / 1e6,
        )
        for i, (n, k, at_us, prefix) in enumerate(load)
    ]
    recorder = ListRecorder()
    full = config(
        SEAMS["scheduler"][scheduler],
        128,
        num_blocks=num_blocks,
        max_model_len=130,
        blocks=SEAMS["blocks"][manager],
        async_scheduling=ahead,
        block_size=8,
    )
    simulated = simulate(full, workload(*arrivals), Linear(1000, 7), observer=recorder)
    assert [s.num_tokens for s in simulated.members()] == [simulated.workload.arrivals[int(s.id[1:])].max_tokens
                                                           for s in simulated.members()]  # fmt: skip
    metrics = measure(recorder.records, simulated.workload.groups)
    for group in ("all", *simulated.groups):
        assert_same(metrics.groups[group].itl_s, simulated.itl_us(group))
        assert_same(metrics.groups[group].ttft_s, simulated.ttft_us(group))
    assert metrics.output_tokens == simulated.output_tokens
    assert metrics.peak_used_blocks <= num_blocks - 1
    assert sum(len(record.num_scheduled_tokens) for record in recorder.records) == simulated.num_request_steps
    assert sum(len(record.preempted) for record in recorder.records) == simulated.num_preemptions


def assert_same(seconds: Spread | None, micros: Spread | None) -> None:
    assert (seconds is None) == (micros is None)
    if seconds and micros:
        assert seconds.count == micros.count
        for name in ("mean", "p50", "p99", "max"):
            assert getattr(seconds, name) * 1e6 == pytest.approx(getattr(micros, name), abs=0.01)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=300))
def test_a_counted_spread_is_the_spread_of_the_values(values):
    counted, plain = spread_of(Counter(values)), Spread.of(values)
    assert counted is not None
    assert plain is not None
    assert (counted.count, counted.p50, counted.p99, counted.max) == (plain.count, plain.p50, plain.p99, plain.max)
    assert counted.mean == pytest.approx(plain.mean)


def test_a_cost_model_hears_the_context_of_every_row():
    heard = []

    class Listening(Linear):
        needs_context = True

        def step_us(self, load: StepLoad) -> int:
            heard.append(load)
            return super().step_us(load)

    run(workload(arrival("a", 10, 3)), costs=Listening(100, 1), budget=128)
    assert heard == [StepLoad(10, 1, 10, 55), StepLoad(1, 1, 11, 11), StepLoad(1, 1, 12, 12)]


def test_a_request_that_could_never_fit_is_refused_and_counted():
    simulated = run(workload(arrival("a", 5000, 4), arrival("b", 10, 2)), num_blocks=100)
    assert simulated.num_refused == 1
    assert simulated.stories["a"].was_refused
    assert simulated.stories["b"].num_tokens == 2


def test_an_arrival_that_waits_for_a_refused_request_is_an_error():
    load = workload(arrival("s", 5000, 4), arrival("long", 10, 1, after=Progress("s", 3)))
    with pytest.raises(ValueError, match="long waits for tokens of requests that were refused"):
        run(load, num_blocks=100)


def test_steps_that_do_nothing_for_ever_are_an_error():
    class Lazy(UnifiedScheduler):
        def schedule(self) -> StepPlan:
            plan, self.waiting = self.waiting, type(self.waiting)()
            empty = super().schedule()
            self.waiting = plan
            return empty

    load = workload(arrival("a"))
    with pytest.raises(RuntimeError, match="did nothing"):
        simulate(replace(config(Lazy), check_invariants=False), load, REFERENCE)


def test_a_budget_below_the_seats_is_refused():
    with pytest.raises(ValueError, match="max_num_batched_tokens=64 is smaller than max_num_seqs=128"):
        config(budget=64)


# Nothing random


def recorded(path: Path, seed: int = 3) -> bytes:
    recorder = JsonlRecorder(path)
    load = chat(seed, num_sessions=3)
    simulate(
        config(blocks=SharedBlocks, num_blocks=400, max_model_len=load.longest), load, REFERENCE, observer=recorder
    )
    recorder.close()
    return path.read_bytes()


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    first, second = recorded(tmp_path / "a.jsonl"), recorded(tmp_path / "b.jsonl")
    assert first == second
    assert recorded(tmp_path / "c.jsonl", seed=4) != first
    header, records = read_trace(tmp_path / "a.jsonl")
    assert header.device == "simulated, linear:8000,30"
    assert records


def test_recording_changes_nothing():
    load = SCENARIOS["long-prompt"].build(0)
    full = config(num_blocks=20_000)
    plain = simulate(full, load, REFERENCE)
    told = simulate(full, load, REFERENCE, observer=ListRecorder())
    assert (plain.end_us, plain.itl_us(), plain.num_steps) == (told.end_us, told.itl_us(), told.num_steps)


def test_a_clock_that_runs_on_by_itself_is_seen(tmp_path, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(VirtualClock, "__call__", lambda clock: clock.now_us / 1e6 + next(ticks) * 1e-9)
    assert recorded(tmp_path / "a.jsonl") != recorded(tmp_path / "b.jsonl")


def test_a_runner_that_forgets_to_wait_for_the_device_is_seen(monkeypatch):
    launch = CostRunner.launch

    def at_once(runner: CostRunner, plan: StepPlan):
        runner._free_us = 0
        return launch(runner, plan)

    load, host = workload(arrival("a", 10, 6)), Host(step_us=2000)
    right = run(load, host, async_scheduling=True).end_us
    monkeypatch.setattr(CostRunner, "launch", at_once)
    assert run(load, host, async_scheduling=True).end_us < right


def test_named_parts_are_equal_and_own_parts_are_not():
    ids = PartIds()
    assert ids.named("a") == ids.named("a")
    assert len({ids.named("a"), ids.named("b"), ids.own(), ids.own()}) == 4
