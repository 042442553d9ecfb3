"""Laws of one step ahead: a step is decided and launched before the results of the one before are taken.

The digest runner runs a plan only when somebody waits for it, so that the scheduler really decides without the tokens.
Random loads in this mode: tests/test_scheduler_properties.py.
"""

from __future__ import annotations

import struct
from itertools import pairwise, product
from typing import Any

import msgspec
import pytest
from engines import TOKEN, Bench, WatchedRunner, engine_request, make_core
from faulty import DiesInStep, RaisesInStep, SlowRunner, StuckInStep, collect, config_of, request
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.block_pool import NO_HIT
from nanoserve.blocks import PrivateBlocks, SharedBlocks, V0CachedBlocks
from nanoserve.client import EngineDeadError
from nanoserve.config import SEAMS, EngineConfig
from nanoserve.core import EngineCore
from nanoserve.lab.fakes import DigestRunner, NullRunner, reference_tokens
from nanoserve.record import ListRecorder, StepRecord, read_trace
from nanoserve.request import NewRequest, Request, SamplingParams, StepPlan, StepResult, TokenLogprobs
from nanoserve.ring import DEFAULT_CAPACITY
from nanoserve.runner_process import RunnerProcess
from nanoserve.scheduler import PhaseSplitScheduler, Share, UnifiedScheduler

SCHEDULERS = list(SEAMS["scheduler"].values())
MANAGERS = list(SEAMS["blocks"].values())
PROMPT = list(range(40))
TIGHT: dict[str, Any] = {"num_blocks": 13, "block_size": 4, "max_model_len": "auto", "watermark": 0.0}
every_combination = pytest.mark.parametrize(
    ("scheduler", "manager"), list(product(SCHEDULERS, MANAGERS)), ids=lambda seam: seam.__name__
)


def make_ahead(
    observer: ListRecorder | None = None, runner: type[DigestRunner] = WatchedRunner, **fields
) -> EngineCore:
    return make_core(observer, runner, async_scheduling=True, **fields)


def run(core: EngineCore) -> dict[str, list[int]]:
    """To the end; the tokens of each request. All blocks are back then, and nothing is in flight."""
    tokens: dict[str, list[int]] = {}
    for _ in range(2000):
        for output in core.step():
            tokens.setdefault(output.id, []).extend(output.new_token_ids)
        if not core.has_work:
            break
    assert not core.has_work
    assert core.scheduler.blocks.num_free_blocks == core.scheduler.blocks.num_blocks - 1
    assert not core.scheduler._in_flight
    return tokens


def scheduled(core: EngineCore) -> dict[str, int]:
    """Tokens ever scheduled for each request, and tokens hit taken as scheduled too."""
    totals: dict[str, int] = {}
    for plan in core.runner.plans:
        for new in plan.new:
            totals[new.id] = totals.get(new.id, 0) + new.num_computed_tokens
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            totals[request_id] = totals.get(request_id, 0) + num_tokens
    return totals


# The tokens


@pytest.mark.parametrize("ahead", [False, True], ids=["in_step", "ahead"])
@pytest.mark.parametrize("preemption", ["none", "recompute", "swap"])
@every_combination
def test_every_combination_emits_the_reference_tokens(scheduler, manager, preemption, ahead):
    fields = {} if preemption == "none" else dict(TIGHT)
    if preemption == "swap":
        if (scheduler, manager) != (PhaseSplitScheduler, PrivateBlocks):
            return  # nothing else can
        fields |= {"preemption_mode": "swap", "num_swap_blocks": 12}
    core = make_core(scheduler=scheduler, blocks=manager, max_num_seqs=3, async_scheduling=ahead, **fields)
    prompts = {f"r{i}": [*range(11), *[100 + i] * i] for i in range(6)}
    for request_id, prompt in prompts.items():
        core.add(engine_request(request_id, prompt, max_tokens=13))
    assert run(core) == {request_id: reference_tokens(prompt, 13) for request_id, prompt in prompts.items()}
    assert (core.stats.num_preemptions > 0) is (preemption != "none")
    assert any(plan.copies for plan in core.runner.plans) is (preemption == "swap")


@pytest.mark.parametrize("layout", SEAMS["client"].values())
def test_every_layout_emits_the_reference_tokens(layout):
    for scheduler, blocks in ((PhaseSplitScheduler, PrivateBlocks), (UnifiedScheduler, SharedBlocks)):
        config = config_of(scheduler=scheduler, blocks=blocks, max_num_seqs=4, async_scheduling=True)
        with layout(config) as client:
            requests = [request(f"r{i % 3}-{i}", num_prompt=17 + 7 * i) for i in range(8)]
            for r in requests:
                client.submit(r)
            tokens, ends = collect(client, len(requests))
            client.submit(request("again"))  # from idle
            assert collect(client, 1)[0] == {"again": reference_tokens(request("again").prompt_token_ids, 10)}
        assert set(ends.values()) == {"length"}
        for r in requests:
            assert tokens[r.id] == reference_tokens(r.prompt_token_ids, 10), r.id


def test_each_step_is_launched_before_the_results_of_the_one_before():
    core = make_ahead(scheduler=UnifiedScheduler)
    depths: list[int] = []
    core.runner.in_flight = lambda: depths.append(len(core.runner.launched))
    core.add(engine_request("a", PROMPT, max_tokens=5))
    assert core.step() == []
    assert [core.step()[0].new_token_ids for _ in range(5)] == [[t] for t in reference_tokens(PROMPT, 5)]
    assert depths == [1, 2, 2, 2, 2]  # the last call launches nothing: the last token is never computed
    assert not core.has_work


def test_a_runner_that_computes_nothing_may_have_two_steps_in_flight():
    core = EngineCore.build(EngineConfig(runner=NullRunner, async_scheduling=True, check_invariants=True))
    for request_id in "ab":
        core.add(engine_request(request_id, PROMPT, max_tokens=6))
    assert run(core) == {"a": [1] * 6, "b": [1] * 6}


def test_only_true_and_false_are_taken():
    with pytest.raises(ValueError, match="async_scheduling must be True or False, got 1"):
        EngineConfig(async_scheduling=1)  # pyright: ignore[reportArgumentType]


# The work


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9, None])
@every_combination
def test_a_request_that_ends_on_its_length_computes_nothing_past_its_last_token(scheduler, manager, max_tokens):
    core = make_ahead(scheduler=scheduler, blocks=manager, max_model_len=56, block_size=4, num_blocks=100)
    for i in range(4):
        core.add(engine_request(f"r{i}", [*PROMPT, i % 2], max_tokens=max_tokens))
    run(core)
    total = len(PROMPT) + 1 + (56 - 41 if max_tokens is None else max_tokens) - 1
    assert scheduled(core) == {f"r{i}": total for i in range(4)}


@pytest.mark.parametrize("stops_at", [1, 2, 5, 7, 8])
@every_combination
def test_a_stop_wastes_one_token_unless_it_comes_with_the_last(scheduler, manager, stops_at):
    core = make_ahead(scheduler=scheduler, blocks=manager, block_size=4)
    tokens = reference_tokens(PROMPT, 8)
    params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=[tokens[stops_at - 1]])
    core.add(engine_request("a", PROMPT, params=params))
    core.add(engine_request("b", PROMPT[:9], max_tokens=20))  # lives on while the wasted token is computed
    assert run(core) == {"a": tokens[:stops_at], "b": reference_tokens(PROMPT[:9], 20)}
    assert scheduled(core)["a"] == len(PROMPT) + stops_at - 1 + (stops_at < 8)


# Aborts


@pytest.mark.parametrize("manager", MANAGERS)
def test_work_is_left_as_long_as_a_step_is_in_flight(manager):
    core = make_ahead(blocks=manager)
    core.add(engine_request("a", PROMPT)), core.add(engine_request("b", PROMPT))
    core.step(), core.step()
    core.abort(["a", "b"])
    assert {(o.id, o.finish_reason) for o in core.step()} == {("a", "abort"), ("b", "abort")}
    assert not core.has_work  # that call took in what was in flight, and launched nothing
    assert len(core.runner.plans) == 2
    assert not core.runner.launched
    core.add(engine_request("a", PROMPT))
    core.step()
    core.scheduler.abort(["a"])
    assert core.has_work
    assert run(core) == {}


def test_an_abort_while_a_step_is_awaited_wins_over_a_natural_end():
    core = make_ahead(scheduler=UnifiedScheduler)
    core.add(engine_request("a", PROMPT, max_tokens=2)), core.add(engine_request("b", PROMPT, max_tokens=3))
    core.step(), core.step()
    core.runner.in_flight = lambda: core.abort(["a"])
    outputs = {output.id: output for output in core.step()}
    assert (outputs["a"].finish_reason, outputs["a"].new_token_ids) == ("abort", [])
    assert outputs["b"].new_token_ids == reference_tokens(PROMPT, 3)[1:2]
    assert run(core)["b"] == reference_tokens(PROMPT, 3)[2:]


@pytest.mark.parametrize("manager", MANAGERS)
def test_an_id_that_is_used_again_gets_none_of_the_tokens_in_flight(manager):
    core = make_ahead(scheduler=UnifiedScheduler, blocks=manager)
    core.add(engine_request("a", PROMPT)), core.add(engine_request("b", PROMPT[:7], max_tokens=30))
    core.step(), core.step()
    core.scheduler.abort(["a"])
    core.add(engine_request("a", PROMPT[::-1]))  # the old one's step is in flight
    assert run(core)["a"] == reference_tokens(PROMPT[::-1], 8)


# Preemption while a step is in flight


def test_a_request_comes_back_only_when_the_token_in_flight_is_known():
    bench = Bench()
    a = bench.add("a", 20)
    first = bench.scheduler.schedule()
    assert bench.scheduler.reset_prefix_cache(force=True)
    second = bench.scheduler.schedule()
    assert (second.finished, second.num_scheduled_tokens) == (["a"], {})
    assert str(second.left_out["a"]) == "nothing_to_compute"
    assert not bench.scheduler.can_schedule
    bench.take(bench.scheduler.update(first, {"a": [TOKEN]}))
    assert (bench.tokens("a"), a.block_ids, a.num_computed_tokens) == ([TOKEN], [], 0)
    (new,) = bench.scheduler.schedule().new
    assert len(new.token_ids) == 21


@pytest.mark.parametrize("manager", MANAGERS)
def test_the_results_of_a_chunk_say_nothing_of_a_request_that_lost_its_blocks_since(manager):
    bench = Bench(manager=manager, budget=48)
    a = bench.add("a", 60)
    first = bench.scheduler.schedule()
    assert bench.scheduler.reset_prefix_cache(force=True)
    bench.scheduler.budget = 16
    second = bench.scheduler.schedule()
    assert [new.num_computed_tokens for new in second.new] == [0]
    bench.update(first)
    bench.check_state()
    assert bench.tokens("a") == []
    assert a.num_cached_blocks == (1 if manager is SharedBlocks else 0)


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_emptying_the_cache_while_a_step_is_in_flight_changes_no_token(scheduler, manager):
    core = make_ahead(scheduler=scheduler, blocks=manager, **TIGHT | {"num_blocks": 50})
    prompts = {f"r{i}": [*PROMPT, i] for i in range(3)}
    for request_id, prompt in prompts.items():
        core.add(engine_request(request_id, prompt))
    tokens: dict[str, list[int]] = {}
    step = 0
    while core.has_work:
        if step in (1, 4, 7):
            assert core.call("reset_prefix_cache", []) is False
            assert core.call("reset_prefix_cache", [True]) is True
        for output in core.step():
            tokens.setdefault(output.id, []).extend(output.new_token_ids)
        step += 1
    assert tokens == {request_id: reference_tokens(prompt, 8) for request_id, prompt in prompts.items()}
    assert core.call("reset_prefix_cache", []) is True


# Blocks


def test_a_block_is_hashed_when_its_last_token_is_known_and_not_before():
    bench = Bench(manager=SharedBlocks, block_size=4)
    a = bench.add("a", 7)
    plans = [bench.scheduler.schedule(), bench.scheduler.schedule()]  # the second fills block 1 with a token to come
    assert a.num_computed_tokens == 8
    assert a.num_cached_blocks == 1
    bench.update(plans[0])
    assert a.num_cached_blocks == 1
    plans.append(bench.scheduler.schedule())
    bench.update(plans[1])
    assert a.num_cached_blocks == 2
    bench.check_state()


def test_the_cache_of_v0_publishes_what_was_computed_and_no_more():
    bench = Bench(manager=V0CachedBlocks, block_size=4, budget=8)
    a = bench.add("a", 16)
    first, second = bench.scheduler.schedule(), bench.scheduler.schedule()
    bench.update(first)
    assert (a.num_computed_tokens, a.num_cached_blocks) == (16, 2)
    bench.update(second)
    assert a.num_cached_blocks == 4


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[str, int]]:
    """What happens between, and during, the steps."""
    actions = st.sampled_from(["add", "add", "step", "step", "step", "abort", "abort_in_flight", "reset"])
    return draw(st.lists(st.tuples(actions, st.integers(0, 9)), min_size=5, max_size=60))


@settings(max_examples=300)
@given(script=scripts(), combination=st.sampled_from(list(product(SCHEDULERS, MANAGERS))))
def test_adds_aborts_and_resets_at_any_moment_keep_every_invariant(script, combination):
    scheduler, manager = combination
    core = make_ahead(scheduler=scheduler, blocks=manager, max_num_seqs=4, **TIGHT)
    prompts: dict[str, list[int]] = {}
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str] = {}

    def step() -> None:
        for output in core.step():
            assert output.id not in ends
            tokens.setdefault(output.id, []).extend(output.new_token_ids)
            if output.finish_reason:
                ends[output.id] = output.finish_reason

    for action, number in script:
        if action == "add":
            request_id = f"r{len(prompts)}"
            prompts[request_id] = [*range(number % 4 * 4), number]
            core.add(engine_request(request_id, prompts[request_id], max_tokens=1 + number % 7))
        elif action == "step":
            step()
        elif action == "abort":
            core.abort([f"r{number}"])
        elif action == "abort_in_flight":
            core.runner.in_flight = lambda number=number: core.abort([f"r{number}", f"r{number + 2}"])
            step()
            core.runner.in_flight = lambda: None
        else:
            assert core.call("reset_prefix_cache", [True])
    for _ in range(500):
        if not core.has_work:
            break
        step()
    assert ends.keys() == prompts.keys()
    assert run(core) == {}  # all blocks are back
    for request_id, prompt in prompts.items():
        got = tokens.get(request_id, [])
        assert got == reference_tokens(prompt, len(got))
        assert ends[request_id] in ("length", "abort")


# Records and log-probabilities


def recorded(ahead: bool) -> tuple[ListRecorder, EngineCore]:
    """A run with arrivals, hits, preemptions, and aborts at several moments."""
    recorder = ListRecorder()
    fields = {**TIGHT, "num_blocks": 9, "scheduler": UnifiedScheduler, "blocks": SharedBlocks, "max_num_seqs": 3}
    core = make_core(recorder, async_scheduling=ahead, max_num_batched_tokens=16, **fields)
    for i in range(8):
        core.add(engine_request(f"r{i}", [*range(8), *[50 + i] * (4 + i % 3)], max_tokens=9))
        if i == 4:
            core.runner.in_flight = lambda: core.abort(["r4"])
        if i == 6:
            core.abort(["r3", "r6"])
        core.step()
        core.runner.in_flight = lambda: None
    run(core)
    return recorder, core


def replay(records: list[StepRecord], ahead: bool) -> list[StepRecord]:
    """The same arrivals and aborts at the same decisions; whoever is in the plan was aborted after it was made."""
    recorder = ListRecorder()
    fields = {**TIGHT, "num_blocks": 9, "scheduler": UnifiedScheduler, "blocks": SharedBlocks, "max_num_seqs": 3}
    core = make_core(recorder, async_scheduling=ahead, max_num_batched_tokens=16, **fields)
    for record in records:
        for arrival in record.arrivals:
            core.add(arrival)
        planned = record.num_scheduled_tokens.keys() | record.left_out.keys()
        late = [i for i in record.aborts if i in planned]
        core.abort([i for i in record.aborts if i not in planned])
        core.runner.in_flight = lambda late=late: core.abort(late)
        core.step()
        core.runner.in_flight = lambda: None
    run(core)
    return recorder.records


@pytest.mark.parametrize("ahead", [False, True], ids=["in_step", "ahead"])
def test_the_records_tell_the_plans_and_can_be_replayed(ahead):
    recorder, core = recorded(ahead)
    records = recorder.records
    assert [record.step for record in records] == list(range(1, core.num_steps + 1))
    for plan, record in zip(core.runner.plans, records, strict=True):
        assert record.num_scheduled_tokens == plan.num_scheduled_tokens
        assert record.left_out == plan.left_out
        assert record.preempted == plan.preempted
        assert record.sampled.keys() <= plan.num_scheduled_tokens.keys()
    assert core.stats.num_preemptions > 0
    assert [i for record in records for i in record.resumed]
    assert [r.id for record in records for r in record.arrivals] == [f"r{i}" for i in range(8)]
    ends = {i: reason for record in records for i, reason in record.finished.items()}
    assert ends == {f"r{i}": "abort" if i in (3, 4, 6) else "length" for i in range(8)}
    for i in (0, 1, 2, 5, 7):
        prompt = [*range(8), *[50 + i] * (4 + i % 3)]
        assert [t for r in records for t in r.sampled.get(f"r{i}", [])] == reference_tokens(prompt, 9)
    overlap = [a.end_s > b.launched_s for a, b in pairwise(records)]
    assert any(overlap) is ahead

    def decisions(records: list[StepRecord]) -> list[StepRecord]:
        return [msgspec.structs.replace(record, start_s=0, launched_s=0, end_s=0, host_s=0) for record in records]

    assert decisions(replay(records, ahead)) == decisions(records)


def test_a_request_that_never_ran_ends_in_the_record_of_the_step_that_dropped_it():
    class Dropping(UnifiedScheduler):
        def schedule(self):
            if "b" in self.requests:
                self._ignore(self.requests["b"])
            return super().schedule()

    recorder = ListRecorder()
    core = make_ahead(recorder, scheduler=Dropping)
    core.add(engine_request("a", PROMPT))
    core.step()
    core.add(engine_request("b", PROMPT))
    run(core)
    assert [record.finished for record in recorder.records[:2]] == [{}, {"b": "length"}]
    assert [[r.id for r in record.arrivals] for record in recorder.records[:2]] == [["a"], ["b"]]


def test_log_probabilities_go_with_the_tokens_of_their_step():
    class WithLogprobs(WatchedRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            logprobs = {i: [TokenLogprobs(ids, [-0.5], [1])] for i, ids in result.token_ids.items()}
            return msgspec.structs.replace(result, logprobs=logprobs)

    core = make_ahead(runner=WithLogprobs)
    core.add(engine_request("a", PROMPT))
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert [o.logprobs[0].token_ids for o in outputs if o.logprobs] == [[t] for t in reference_tokens(PROMPT, 8)]


# A step that fails


class FailsWhenAwaited(WatchedRunner):
    """The third step fails while the fourth is behind it."""

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step == 3:
            raise RuntimeError("out of luck")
        return super().execute(plan)


class FailsAtLaunch(WatchedRunner):
    def launch(self, plan: StepPlan):
        if plan.step == 3:
            raise RuntimeError("out of luck")
        return super().launch(plan)


@pytest.mark.parametrize(
    ("runner", "steps", "errors"),
    [(FailsWhenAwaited, [1, 2, 3, 4], [0, 0, 1, 0]), (FailsAtLaunch, [1, 2, 3], [0, 0, 1])],
)
def test_a_crash_dump_blames_the_step_that_failed(runner, steps, errors, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    core = make_ahead(runner=runner)
    core.add(engine_request("a", PROMPT))
    with pytest.raises(RuntimeError) as crash:
        run(core)
    _, records = read_trace(core.dump_crash(crash.value))
    assert [record.step for record in records] == steps
    assert ["out of luck" in record.error for record in records] == [bool(e) for e in errors]
    core.close()


@pytest.mark.parametrize("runner", [DiesInStep, RaisesInStep, StuckInStep])
def test_a_runner_that_dies_or_hangs_with_two_steps_in_flight_ends_the_engine(runner):
    config = config_of(runner, async_scheduling=True, execute_timeout_s=2.0, client=SEAMS["client"]["split_runner"])
    with config.client(config) as client:
        client.submit(request("a", max_tokens=500))
        with pytest.raises(EngineDeadError):
            collect(client, 1)


@pytest.mark.parametrize("layout", SEAMS["client"].values())
def test_an_engine_closes_with_a_step_in_flight(layout):
    client = layout(config_of(SlowRunner, async_scheduling=True))
    client.submit(request("a", max_tokens=500))
    client.poll(5), client.poll(5)
    client.close()
    with pytest.raises(EngineDeadError):
        client.poll(0)


# A runner in another process


def plan_of(step: int, prompt: list[int]) -> StepPlan:
    """A request of its own, finished with the next plan."""
    params = SamplingParams(temperature=0.0)
    new = NewRequest(f"r{step}", prompt, len(prompt), [0] * len(prompt), 0, params, None)
    return StepPlan(step, {new.id: len(prompt)}, [new], finished=[f"r{step - 1}"])


@pytest.fixture
def remote():
    runner = RunnerProcess(config_of(block_size=1, client=SEAMS["client"]["split_runner"], execute_timeout_s=20.0))
    yield runner
    runner.close()


def start(runner: RunnerProcess) -> RunnerProcess:
    config = config_of(block_size=1)
    runner.allocate(config.resolve(model_len=runner.model_len, pool_blocks=runner.pool_blocks(1), device=runner.device))
    return runner


def test_results_go_to_the_handles_of_their_plans_whoever_is_asked_first(remote):
    start(remote)
    first, second = remote.launch(plan_of(1, [5])), remote.launch(plan_of(2, [6]))
    assert second.wait().token_ids == {"r2": reference_tokens([6], 1)}
    assert first.wait().token_ids == {"r1": reference_tokens([5], 1)}
    assert first.wait() is first.wait()


class Verbose(DigestRunner):
    """Its results are larger than a ring."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        num_entries = DEFAULT_CAPACITY // 8
        entry = TokenLogprobs([2**30] * num_entries, [-0.5] * num_entries, [1] * num_entries)
        return msgspec.structs.replace(result, logprobs={i: [entry] for i in result.token_ids})


def test_a_plan_larger_than_the_ring_never_meets_a_result_larger_than_the_ring():
    runner = start(
        RunnerProcess(config_of(Verbose, block_size=1, client=SEAMS["client"]["split_runner"], execute_timeout_s=20.0))
    )
    try:
        handles = []
        for step in (1, 2, 3):
            plan = plan_of(step, [step])
            large = msgspec.structs.replace(plan, copies=[(0, 2**40)] * (DEFAULT_CAPACITY // 8))
            handles.append(runner.launch(large))
        assert [handle.wait().token_ids for handle in handles] == [
            {f"r{step}": reference_tokens([step], 1)} for step in (1, 2, 3)
        ]
    finally:
        runner.close()


# Planted bugs die


def test_a_placeholder_that_is_not_counted_is_seen():
    class DoesNotCount(UnifiedScheduler):
        def _count(self, request, num_tokens):
            share = super()._count(request, num_tokens)
            request.num_placeholders -= share.samples
            return share

    core = make_ahead(scheduler=DoesNotCount)
    core.add(engine_request("a", PROMPT)), core.add(engine_request("b", PROMPT))
    with pytest.raises(AssertionError, match="placeholders"):
        run(core)


def test_computing_past_the_last_token_is_seen(monkeypatch):
    behind = property(lambda r: r.num_tokens + r.num_placeholders - r.num_computed_tokens)
    monkeypatch.setattr(Request, "num_behind", behind)
    with pytest.raises(AssertionError):
        test_a_request_that_ends_on_its_length_computes_nothing_past_its_last_token(UnifiedScheduler, PrivateBlocks, 3)


def test_a_hash_of_an_unknown_id_is_seen():
    class HashesAll(SharedBlocks):
        def allocate(self, request, num_new_tokens, hit=NO_HIT, **limits):
            new = super().allocate(request, num_new_tokens, hit, **limits)
            if new is not None:
                end = request.num_computed_tokens + hit.num_tokens + num_new_tokens
                self._register(request, end // self.block_size)
            return new

    class PublishesAll(V0CachedBlocks):
        def commit(self, request, num_computed_tokens):
            super().commit(request, request.num_computed_tokens)

    for manager, error in ((HashesAll, struct.error), (PublishesAll, AssertionError)):
        core = make_ahead(scheduler=UnifiedScheduler, blocks=manager, block_size=1)
        core.add(engine_request("a", PROMPT)), core.add(engine_request("b", PROMPT))
        with pytest.raises(error):
            run(core)


def test_coming_back_before_the_token_in_flight_is_known_is_seen():
    class Hasty(UnifiedScheduler):
        def _admit(self, request, num_tokens, hit, draft, watermark_blocks):
            coming, request.num_placeholders = request.num_placeholders, 0
            admitted = super()._admit(request, num_tokens, hit, draft, watermark_blocks)
            request.num_placeholders = coming
            return admitted

    core = make_ahead(scheduler=Hasty)
    core.add(engine_request("a", PROMPT))
    core.step(), core.step()
    core.call("reset_prefix_cache", [True])
    core.add(engine_request("b", PROMPT))  # so that there is something to schedule at once
    with pytest.raises(AssertionError, match="had caught up"):
        run(core)


def test_results_that_are_taken_by_id_are_seen():
    class ById(UnifiedScheduler):
        def update(self, plan, sampled):
            shares, outputs = self._in_flight[plan.step]
            now = [Share(self.requests.get(share.request.id, share.request), *share[1:]) for share in shares]
            self._in_flight[plan.step] = (now, outputs)
            return super().update(plan, sampled)

    core = make_ahead(scheduler=ById)
    core.add(engine_request("a", PROMPT)), core.add(engine_request("b", PROMPT[:7], max_tokens=30))
    core.step(), core.step()
    core.scheduler.abort(["a"])
    core.add(engine_request("a", PROMPT[::-1]))
    with pytest.raises(AssertionError):
        assert run(core)["a"] == reference_tokens(PROMPT[::-1], 8)
