"""Laws of the step: schedule, execute, update; aborts, records, crash dumps, utilities; and the in-process client."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from engines import WatchedRunner, engine_request, make_core

from nanoserve.blocks import PrivateBlocks, SharedBlocks
from nanoserve.client import EngineDeadError, InProcessClient
from nanoserve.config import SEAMS, EngineConfig
from nanoserve.core import EngineCore, with_logprobs
from nanoserve.lab.fakes import DigestRunner, reference_tokens
from nanoserve.record import JsonlRecorder, ListRecorder, StepRecord, TraceHeader
from nanoserve.request import EngineOutput, SamplingParams, StepResult, TokenLogprobs
from nanoserve.scheduler import UnifiedScheduler

SCHEDULERS = list(SEAMS["scheduler"].values())
MANAGERS = list(SEAMS["blocks"].values())
PROMPT = list(range(40))


def run(core: EngineCore) -> dict[str, list[int]]:
    """To the end; the tokens of each request."""
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step():
            tokens.setdefault(output.id, []).extend(output.new_token_ids)
    return tokens


class Clock:
    """Every reading is a second later."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


# The step


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("manager", MANAGERS)
def test_every_combination_emits_the_reference_tokens(scheduler, manager):
    core = make_core(scheduler=scheduler, blocks=manager, max_num_seqs=3)
    prompts = {f"r{i}": [*PROMPT, i % 2] for i in range(5)}
    for request_id, prompt in prompts.items():
        core.add(engine_request(request_id, prompt))
    assert run(core) == {request_id: reference_tokens(prompt, 8) for request_id, prompt in prompts.items()}
    core.close()


def test_a_step_without_work_does_nothing():
    core = make_core()
    assert not core.has_work
    assert core.step() == []
    assert core.num_steps == 0
    assert core.runner.plans == []


def test_a_live_id_is_refused_and_the_first_goes_on():
    core = make_core()
    core.add(engine_request("a", PROMPT))
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        core.add(engine_request("a", PROMPT))
    assert run(core) == {"a": reference_tokens(PROMPT, 8)}


def test_the_core_says_what_it_is_and_how_it_fares():
    core = make_core(scheduler=UnifiedScheduler, blocks=SharedBlocks, num_blocks=11, max_model_len=100, max_num_seqs=1)
    info = core.info
    assert (info.max_model_len, info.num_blocks, info.block_size) == (100, 11, 16)
    assert (info.device, info.dtype, info.vocab_size) == ("cpu", "digest", 1000)
    for request_id in "ab":
        core.add(engine_request(request_id, PROMPT, max_tokens=2))
    core.step()
    stats = core.stats
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (1, 1, 1)
    assert stats.kv_cache_usage == pytest.approx(0.3)
    run(core)
    stats = core.stats
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (80, 32)


# Aborts


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_an_abort_before_the_first_step_ends_the_request_at_once(scheduler):
    core = make_core(scheduler=scheduler)
    core.add(engine_request("a", PROMPT))
    core.abort(["a", "a", "unknown"])
    assert core.has_work
    assert core.step() == [EngineOutput(id="a", new_token_ids=[], finish_reason="abort")]
    assert not core.has_work
    assert core.num_steps == 0


def test_an_abort_while_the_step_runs_wins_over_a_natural_end():
    core = make_core()
    core.add(engine_request("a", PROMPT, max_tokens=1)), core.add(engine_request("b", PROMPT, max_tokens=1))
    core.runner.in_flight = lambda: core.abort(["a"])
    outputs = {output.id: output for output in core.step()}
    assert (outputs["a"].finish_reason, outputs["a"].new_token_ids) == ("abort", [])
    assert (outputs["b"].finish_reason, outputs["b"].new_token_ids) == ("length", reference_tokens(PROMPT, 1))
    assert not core.has_work


def test_an_abort_after_the_end_is_ignored():
    core = make_core()
    core.add(engine_request("a", PROMPT, max_tokens=1))
    core.step()
    core.abort(["a"])
    assert core.step() == []
    assert not core.has_work


def test_an_id_may_be_used_again_after_its_abort():
    core = make_core(blocks=SharedBlocks)
    core.add(engine_request("a", PROMPT))
    core.step(), core.step()
    core.abort(["a"])
    core.step()
    other = PROMPT[::-1]
    core.add(engine_request("a", other))
    assert run(core) == {"a": reference_tokens(other, 8)}


# Utilities


@pytest.mark.parametrize("manager", MANAGERS)
def test_emptying_the_cache_by_force_changes_no_token(manager):
    core = make_core(scheduler=UnifiedScheduler, blocks=manager)
    prompts = {f"r{i}": [*PROMPT, i] for i in range(3)}
    for request_id, prompt in prompts.items():
        core.add(engine_request(request_id, prompt))
    tokens: dict[str, list[int]] = {}
    for step in range(30):
        if step in (1, 4):
            assert core.call("reset_prefix_cache", []) is False
            assert core.call("reset_prefix_cache", [True]) is True
        for output in core.step():
            tokens.setdefault(output.id, []).extend(output.new_token_ids)
    assert tokens == {request_id: reference_tokens(prompt, 8) for request_id, prompt in prompts.items()}
    assert core.stats.num_preemptions == 6


def test_an_unknown_utility_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="utility 'explode' is not known; use one of reset_prefix_cache"):
        make_core().call("explode", [])


@pytest.mark.parametrize("manager", MANAGERS)
def test_the_block_map_accounts_for_every_block(manager):
    core = make_core(scheduler=UnifiedScheduler, blocks=manager, num_blocks=20, max_model_len="auto")
    core.add(engine_request("old", PROMPT, max_tokens=1))
    core.step()
    core.add(engine_request("a", [*PROMPT, 1])), core.add(engine_request("b", [*PROMPT, 2]))
    core.step()
    blocks = core.call("block_map", [])
    free = [first + i for first, count in blocks["free"] for i in range(count)]
    used = {block_id: holders for block_id, holders, _ in blocks["used"]}
    cached = [block_id for block_id, _ in blocks["cached"]]
    assert used.keys() | set(free) | set(cached) == set(range(1, 20))
    assert not used.keys() & {*free, *cached}
    assert blocks["num_free_blocks"] == len({*free, *cached}) == 19 - len(used)
    assert sum(used.values()) == sum(len(table) for table in blocks["tables"].values())
    shares = manager is not PrivateBlocks
    assert max(used.values()) == (2 if shares else 1)
    assert any(block_hash for _, _, block_hash in blocks["used"]) is shares


def test_the_recent_steps_are_those_of_the_plans():
    core = make_core()
    assert core.call("recent_steps", []) == []
    core.add(engine_request("a", PROMPT, max_tokens=40))
    run(core)
    assert [step["step"] for step in core.call("recent_steps", [])] == list(range(9, 41))
    (last,) = core.call("recent_steps", [1])
    assert last["num_scheduled_tokens"] == {"a": 1}
    assert last["end_s"] >= last["launched_s"] >= last["start_s"]
    assert "error" not in last


# Records


def test_the_records_tell_the_whole_run():
    recorder = ListRecorder()
    core = make_core(
        recorder,
        scheduler=UnifiedScheduler,
        blocks=SharedBlocks,
        num_blocks=7,
        block_size=4,
        max_model_len="auto",
        max_num_seqs=3,
        max_num_batched_tokens=16,
    )
    core.clock = Clock()
    assert recorder.header == TraceHeader(
        config=recorder.header.config, device="cpu", execution=recorder.header.execution
    )
    assert recorder.header.config["scheduler"] == "UnifiedScheduler"
    requests = [engine_request(request_id, [*range(8), ord(request_id)], max_tokens=9) for request_id in "abc"]
    core.add(requests[0]), core.add(requests[1])
    core.step()
    core.add(requests[2])
    core.abort(["b"])
    run(core)
    records = recorder.records
    assert [record.step for record in records] == list(range(1, core.num_steps + 1))
    assert all(r.start_s < r.launched_s < r.end_s for r in records)
    assert all(a.end_s < b.start_s for a, b in pairwise(records))
    assert [[r.id for r in record.arrivals] for record in records[:2]] == [["a", "b"], ["c"]]
    assert [record.aborts for record in records[:2]] == [[], ["b"]]
    assert records[1].finished == {"b": "abort"}
    assert records[0].hit_tokens == {"a": 0, "b": 8}
    for plan, record in zip(core.runner.plans, records, strict=True):
        assert record.num_scheduled_tokens == plan.num_scheduled_tokens
        assert record.left_out == plan.left_out
        assert record.preempted == plan.preempted
        assert record.num_free_blocks + record.num_used_blocks == 6
        assert record.budget == 16
    preempted = [i for record in records for i in record.preempted]
    assert preempted
    assert [i for record in records for i in record.resumed] == preempted
    for request in (requests[0], requests[2]):
        sampled = [t for record in records for t in record.sampled.get(request.id, [])]
        assert sampled == reference_tokens(request.prompt_token_ids, 9)
        assert records[-1].finished.get(request.id) in (None, "length")
    assert records[-1].num_free_blocks == 6
    assert records[-1].num_running + records[-1].num_waiting == 0


def test_a_swapped_request_is_recorded_as_waiting():
    recorder = ListRecorder()
    core = make_core(
        recorder,
        num_blocks=5,
        block_size=4,
        max_model_len="auto",
        watermark=0.0,
        preemption_mode="swap",
        num_swap_blocks=4,
    )
    core.add(engine_request("a", list(range(8)))), core.add(engine_request("b", list(range(7))))
    core.step(), core.step()
    assert recorder.records[-1].preempted == ["b"]
    assert recorder.records[-1].num_waiting == core.stats.num_waiting == 1
    assert run(core)["b"] == reference_tokens(list(range(7)), 8)[1:]


def test_an_observer_is_closed_with_the_core():
    closed = []

    class Closing(ListRecorder):
        def close(self) -> None:
            closed.append(True)

    core = make_core(Closing())
    core.close()
    assert closed == [True]


# Log-probabilities


def test_log_probabilities_cover_exactly_the_accepted_tokens():
    entry = TokenLogprobs([1], [-0.5], [1])
    result = StepResult({"a": [1, 2], "b": [3], "c": [4]}, logprobs={"a": [entry] * 2}, prompt_logprobs={"b": [None]})
    outputs = [
        EngineOutput(id="a", new_token_ids=[1], finish_reason="stop", stop_reason=1, num_cached_tokens=3),
        EngineOutput(id="b", new_token_ids=[3]),
        EngineOutput(id="c", new_token_ids=[], finish_reason="error", error="broken"),
    ]
    a, b, c = with_logprobs(outputs, result)
    assert (a.logprobs, a.prompt_logprobs) == ([entry], None)
    assert (a.finish_reason, a.stop_reason, a.num_cached_tokens) == ("stop", 1, 3)
    assert (b.logprobs, b.prompt_logprobs) == (None, [None])
    assert c == outputs[2]


def test_log_probabilities_of_a_step_reach_its_outputs():
    entry = TokenLogprobs([1], [-0.5], [1])

    class WithLogprobs(WatchedRunner):
        def execute(self, plan) -> StepResult:
            result = super().execute(plan)
            return msgspec.structs.replace(result, logprobs={i: [entry] for i in result.token_ids})

    core = make_core(runner=WithLogprobs)
    core.add(engine_request("a", PROMPT))
    assert [output.logprobs for output in core.step()] == [[entry]]


# A step that fails


class Broken(WatchedRunner):
    """Dies in its third step."""

    def launch(self, plan):
        if plan.step == 3:
            raise RuntimeError("out of luck")
        return super().launch(plan)


def read_trace(path: str) -> tuple[TraceHeader, list[StepRecord]]:
    lines = Path(path).read_bytes().splitlines()
    return msgspec.json.decode(lines[0], type=TraceHeader), [
        msgspec.json.decode(line, type=StepRecord) for line in lines[1:]
    ]


@pytest.fixture
def crash_dir(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_crash_dump_ends_with_the_failing_plan(crash_dir):
    core = make_core(runner=Broken)
    core.add(engine_request("a", PROMPT))
    core.step(), core.step()
    with pytest.raises(RuntimeError) as crash:
        core.step()
    path = core.dump_crash(crash.value)
    assert Path(path).parent == crash_dir
    header, records = read_trace(path)
    assert header.config["runner"] == "Broken"
    assert [record.step for record in records] == [1, 2, 3]
    assert [bool(record.error) for record in records] == [False, False, True]
    assert "RuntimeError: out of luck" in records[-1].error
    assert records[-1].num_scheduled_tokens == {"a": 1}


def test_a_crash_dump_of_a_scheduler_that_failed_ends_with_an_empty_plan(crash_dir):
    class Undecided(UnifiedScheduler):
        def schedule(self):
            raise RuntimeError("no idea")

    core = make_core(scheduler=Undecided)
    core.add(engine_request("a", PROMPT))
    with pytest.raises(RuntimeError) as crash:
        core.step()
    _, records = read_trace(core.dump_crash(crash.value))
    assert [record.step for record in records] == [1]
    assert "no idea" in records[0].error
    assert records[0].num_scheduled_tokens == {}


def test_a_crash_dump_goes_back_a_limited_way(crash_dir):
    core = make_core()
    core.add(engine_request("a", PROMPT, max_tokens=50))
    run(core)
    _, records = read_trace(core.dump_crash(RuntimeError("late")))
    assert [record.step for record in records] == list(range(19, 51))


def test_a_broken_invariant_fails_the_step():
    class TakesTooMuch(UnifiedScheduler):
        def schedule(self):
            plan = super().schedule()
            self.budget = plan.num_tokens - 1
            return plan

    core = make_core(scheduler=TakesTooMuch)
    core.add(engine_request("a", PROMPT))
    with pytest.raises(AssertionError, match="step 1: 40 tokens > 39"):
        core.step()
    core = EngineCore.build(EngineConfig(runner=WatchedRunner, scheduler=TakesTooMuch))  # nobody looks
    core.add(engine_request("a", PROMPT))
    core.step()


# What a build leaves behind


class Closing(DigestRunner):
    closed = 0

    def close(self) -> None:
        type(self).closed += 1


def cannot_start(*_, **__) -> None:
    raise OSError("disk full")


@pytest.mark.parametrize(
    ("changes", "observer", "error"),
    [
        ({"max_num_seqs": 10_000}, None, ValueError),
        ({"scheduler": type("NoScheduler", (UnifiedScheduler,), {"__init__": cannot_start})}, None, OSError),
        ({"blocks": type("NoBlocks", (SharedBlocks,), {"__init__": cannot_start})}, None, OSError),
        ({}, JsonlRecorder("/no/such/folder/trace.jsonl"), OSError),
    ],
)
def test_a_build_that_fails_closes_the_runner(changes, observer, error):
    Closing.closed = 0
    with pytest.raises(error):
        EngineCore.build(EngineConfig(runner=Closing, **changes), observer)
    assert Closing.closed == 1


def test_a_runner_that_lives_elsewhere_takes_the_place_of_the_configured_one():
    core = EngineCore.build(EngineConfig(), make_runner=WatchedRunner)
    assert isinstance(core.runner, WatchedRunner)


# The client in the same process


def client(**fields) -> InProcessClient:
    return InProcessClient(EngineConfig(runner=fields.pop("runner", WatchedRunner), check_invariants=True, **fields))


def test_a_poll_is_a_step():
    with client() as engine:
        engine.submit(engine_request("a", PROMPT, max_tokens=3))
        outputs = [engine.poll(timeout=0) for _ in range(3)]
        assert [o.new_token_ids for (o,) in outputs] == [[t] for t in reference_tokens(PROMPT, 3)]
        assert engine.stats.num_steps == 3
        assert engine.poll(timeout=0) == []
        assert engine.info.num_blocks == engine.core.info.num_blocks


def test_a_poll_waits_for_a_request():
    with client() as engine:
        news: list[EngineOutput] = []
        poller = threading.Thread(target=lambda: news.extend(engine.poll(timeout=30)))
        poller.start()
        engine.submit(engine_request("a", PROMPT))
        poller.join(30)
        assert [o.new_token_ids for o in news] == [reference_tokens(PROMPT, 1)]


def test_an_id_is_in_use_until_its_end_is_polled():
    with client() as engine:
        engine.submit(engine_request("a", PROMPT, max_tokens=1))
        with pytest.raises(ValueError, match="request id 'a' is in use"):
            engine.submit(engine_request("a", PROMPT))
        engine.poll(timeout=0)
        engine.submit(engine_request("a", PROMPT))
        engine.abort(["a"])  # before anything took it in
        assert [o.finish_reason for o in engine.poll(timeout=0)] == ["abort"]


def test_what_no_wire_could_carry_is_refused():
    with client() as engine, pytest.raises(ValueError, match="more than 64 bits"):
        engine.submit(engine_request("a", [2**70]))


def test_a_step_that_fails_is_the_death_of_the_engine(crash_dir):
    engine = client(runner=Broken)
    engine.submit(engine_request("a", PROMPT))
    engine.poll(timeout=0), engine.poll(timeout=0)
    with pytest.raises(EngineDeadError, match="out of luck") as death:
        engine.poll(timeout=0)
    (dump,) = crash_dir.glob("*.jsonl")
    assert str(dump) in str(death.value)
    for call in (lambda: engine.poll(timeout=0), lambda: engine.submit(engine_request("b", PROMPT))):
        with pytest.raises(EngineDeadError, match="out of luck"):
            call()
    with pytest.raises(EngineDeadError):
        engine.call("reset_prefix_cache")
    engine.close()


def test_a_closed_engine_is_dead_and_closing_twice_is_fine():
    engine = client()
    engine.close(), engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.submit(engine_request("a", PROMPT))


def test_a_utility_answers_or_raises_in_its_caller():
    with client() as engine:
        assert engine.call("reset_prefix_cache") is True
        with pytest.raises(RuntimeError, match="ValueError: utility 'explode' is not known"):
            engine.call("explode")
        engine.submit(engine_request("a", PROMPT, params=SamplingParams(max_tokens=1)))
        assert engine.poll(timeout=0)[0].new_token_ids == reference_tokens(PROMPT, 1)
