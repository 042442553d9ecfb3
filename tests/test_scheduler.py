"""Laws of the schedulers, one worked example each: who gets how many tokens, who is preempted, who ends and why.

A bare scheduler is driven by hand; every step is checked against the invariants (engines.Bench).
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from engines import EOS, TOKEN, Bench, reasons

from nanoserve.blocks import SharedBlocks, V0CachedBlocks
from nanoserve.config import SEAMS
from nanoserve.request import Status
from nanoserve.scheduler import (
    BaseScheduler,
    ChunkedNoMixScheduler,
    Draft,
    PhaseSplitScheduler,
    UnifiedScheduler,
)

POLICIES = [PhaseSplitScheduler, ChunkedNoMixScheduler, UnifiedScheduler]
MANAGERS = list(SEAMS["blocks"].values())
CHUNKING = [ChunkedNoMixScheduler, UnifiedScheduler]


def phase_split(**fields) -> Bench:
    return Bench(PhaseSplitScheduler, **fields)


def swapping(**fields) -> Bench:
    fields = {"num_swap_blocks": 10, **fields}
    return Bench(PhaseSplitScheduler, block_size=4, preemption_mode="swap", **fields)


def scheduled(plan) -> dict[str, int]:
    return plan.num_scheduled_tokens


# Phase split: whole prompts first, decodes wait


def test_a_waiting_prompt_goes_first_and_whole_and_every_decode_waits():
    bench = phase_split(budget=64)
    bench.add("a", 10), bench.add("b", 20)
    assert scheduled(bench.step()) == {"a": 10, "b": 20}
    assert scheduled(bench.step()) == {"a": 1, "b": 1}
    bench.add("c", 60)
    plan = bench.step()
    assert scheduled(plan) == {"c": 60}
    assert reasons(plan) == {"a": "paused(c)", "b": "paused(c)"}
    assert scheduled(bench.step()) == {"a": 1, "b": 1, "c": 1}


def test_prompts_are_batched_up_to_the_budget_in_order_of_arrival():
    bench = phase_split(budget=64)
    bench.add("a", 30), bench.add("b", 34), bench.add("c", 1), bench.add("d", 1)
    plan = bench.step()
    assert scheduled(plan) == {"a": 30, "b": 34}
    assert reasons(plan) == {"c": "budget", "d": "fcfs_behind(c)"}
    bench.add("e", 63)  # does not fit beside c and d, and nobody skips ahead
    plan = bench.step()
    assert scheduled(plan) == {"c": 1, "d": 1}
    assert reasons(plan) == {"a": "paused(c)", "b": "paused(c)", "e": "budget"}


@pytest.mark.parametrize("policy", POLICIES)
def test_no_more_requests_run_than_there_are_seats(policy):
    bench = Bench(policy, max_num_seqs=2)
    bench.add("a", 5, max_tokens=2), bench.add("b", 5), bench.add("c", 5), bench.add("d", 5)
    plan = bench.step()
    assert scheduled(plan) == {"a": 5, "b": 5}
    assert reasons(plan) == {"c": "seq_cap", "d": "fcfs_behind(c)"}
    bench.step()  # a ends
    assert "c" in scheduled(bench.step())


def test_a_prompt_waits_while_admitting_it_would_eat_the_watermark():
    bench = phase_split(num_blocks=11, block_size=4, watermark=0.2)  # 10 usable, 2 kept free
    bench.add("a", 20)
    bench.step()
    bench.add("b", 16), bench.add("c", 4)
    plan = bench.step()
    assert scheduled(plan) == {"a": 1}
    assert reasons(plan) == {"b": "watermark(need 6, free 5)", "c": "fcfs_behind(b)"}
    bench.scheduler.abort("a")
    assert scheduled(bench.step()) == {"b": 16, "c": 4}


def test_a_prompt_that_needs_more_than_is_free_waits_for_blocks():
    bench = phase_split(num_blocks=11, block_size=4)
    bench.add("a", 24)
    bench.step()
    bench.add("b", 20)
    assert reasons(bench.step())["b"] == "blocks(need 5, free 4)"


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_could_never_fit_ends_at_once_and_those_behind_it_are_served(policy, manager):
    bench = Bench(policy, manager, num_blocks=11, block_size=4, watermark=0.2, budget=64)
    bench.add("a", 33)  # 9 blocks + 2 of the watermark > 10
    bench.add("b", 32, max_tokens=1)
    plan = bench.step()
    assert scheduled(plan) == {"b": 32}
    assert bench.end("a") == ("length", None)
    assert bench.tokens("a") == []
    assert bench.end("b") == ("length", None)
    assert plan.finished == ["a"]


@pytest.mark.parametrize(("policy", "length"), [(PhaseSplitScheduler, 65), *((p, 100) for p in CHUNKING)])
def test_a_prompt_longer_than_a_step_or_than_the_model_is_ignored(policy, length):
    bench = Bench(policy, budget=64, max_model_len=100)
    bench.add("a", length), bench.add("b", length - 1)
    plan = bench.step()
    assert scheduled(plan) == {"b": 64}
    assert bench.end("a") == ("length", None)


def test_when_a_decode_cannot_grow_the_rightmost_is_preempted_and_comes_back_first():
    bench = phase_split(num_blocks=7, block_size=4)
    bench.add("a", 7), bench.add("b", 7), bench.add("c", 7)
    bench.step()  # two blocks each: the pool is full
    bench.step()
    plan = bench.step()  # a needs a third block: c goes; then b takes c's other block
    assert scheduled(plan) == {"a": 1, "b": 1}
    assert plan.preempted == ["c"]
    assert reasons(plan) == {"c": "preemption_this_step"}
    d = bench.add("d", 5)
    c = bench.scheduler.requests["c"]
    assert (c.status, c.num_computed_tokens, c.num_tokens, c.num_preemptions) == (Status.PREEMPTED, 0, 9, 1)
    assert bench.ids("waiting") == "cd"
    assert d.status is Status.WAITING
    bench.scheduler.abort("b")
    plan = bench.step()
    assert scheduled(plan) == {"c": 9}  # prompt and kept output in one go
    assert [(new.id, new.num_prompt_tokens, len(new.token_ids)) for new in plan.new] == [("c", 7, 9)]
    assert bench.tokens("c") == [TOKEN] * 3


def test_of_several_preempted_the_last_is_the_first_to_wait():
    bench = phase_split(num_blocks=4, block_size=4)
    bench.add("a", 4), bench.add("b", 2), bench.add("c", 2)
    bench.step()
    bench.step()  # a: needs a second block, c goes
    assert bench.ids("waiting") == "c"
    for _ in range(4):  # c may not come back: b grows into its block
        bench.step()
    assert bench.ids("running") == "a"
    assert bench.ids("waiting") == "bc"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_one_that_cannot_grow_preempts_itself(policy):
    bench = Bench(policy, num_blocks=3, block_size=4)
    bench.add("a", 8, max_tokens=2)
    bench.step()
    plan = bench.step()
    assert plan.preempted == ["a"]
    assert scheduled(plan) == {}
    bench.step()  # with its token it is longer than the pool
    assert bench.end("a") == ("length", None)
    assert bench.tokens("a") == [TOKEN]


# Swapping


def test_a_swapped_out_request_keeps_its_kv_and_beats_those_that_wait():
    bench = swapping(num_blocks=5)
    a, b = bench.add("a", 8, max_tokens=6), bench.add("b", 7)
    bench.step()
    tables = list(b.block_ids)
    plan = bench.step()
    assert scheduled(plan) == {"a": 1}
    assert plan.preempted == ["b"]
    assert plan.copies == list(zip(tables, (5, 6), strict=True))
    assert (b.status, b.num_computed_tokens) == (Status.SWAPPED, 7)
    bench.add("c", 2)
    plan = bench.step()
    assert scheduled(plan) == {"a": 1}
    assert reasons(plan) == {"b": "blocks(need 2, free 1)", "c": "paused(b)"}
    while a.id in bench.scheduler.requests:
        bench.step()
    plan = bench.step()
    assert scheduled(plan) == {"b": 1}  # it decodes in the step that brings it back
    assert [host for host, _ in plan.copies] == [5, 6]
    assert [device for _, device in plan.copies] == b.block_ids
    assert [(new.id, new.num_computed_tokens) for new in plan.new] == [("b", 7)]
    assert reasons(plan) == {"c": "paused(b)"}
    assert scheduled(bench.step()) == {"c": 2}
    bench.run()
    assert len(bench.blocks._free_host) == 10


def test_swapped_requests_come_back_in_order_while_seats_and_budget_last():
    bench = swapping(num_blocks=9, max_num_seqs=3, budget=9)
    bench.add("a", 3), bench.add("b", 3), bench.add("c", 3)
    bench.step()
    draft = Draft(0)
    for request in list(bench.scheduler.running[1:]):
        bench.scheduler._preempt(request, draft)
    assert bench.ids("swapped") == "bc"
    bench.scheduler.max_num_seqs = 2
    plan = bench.step()
    assert scheduled(plan) == {"a": 1, "b": 1}
    assert reasons(plan) == {"c": "seq_cap"}
    bench.scheduler.max_num_seqs = 3
    bench.scheduler.budget = 2
    assert reasons(bench.step()) == {"c": "budget"}
    bench.scheduler.budget = 3
    assert scheduled(bench.step()) == {"a": 1, "b": 1, "c": 1}


def test_behind_a_swapped_request_that_does_not_fit_nobody_comes_back():
    bench = swapping(num_blocks=7)
    bench.add("a", 8), bench.add("b", 12), bench.add("c", 3)
    bench.step()
    for request in list(bench.scheduler.running[1:]):
        bench.scheduler._preempt(request, Draft(0))
    assert bench.ids("swapped") == "bc"
    bench.add("d", 1)
    plan = bench.step()
    assert scheduled(plan) == {"a": 1}
    assert reasons(plan) == {"b": "blocks(need 4, free 3)", "c": "fcfs_behind(b)", "d": "paused(b)"}


def test_without_room_on_the_host_the_victim_ends_with_an_error_and_the_others_go_on():
    bench = swapping(num_blocks=5, num_swap_blocks=1)
    bench.add("a", 8, max_tokens=3), bench.add("b", 7)
    bench.step()
    plan = bench.step()
    assert scheduled(plan) == {"a": 1}
    assert bench.end("b") == ("error", None)
    assert bench.outputs["b"][-1].error == "not enough swap space for 2 blocks; raise num_swap_blocks."
    assert "b" not in bench.scheduler.requests
    bench.run()
    assert bench.end("a") == ("length", None)


def test_a_swapped_request_that_has_outgrown_the_watermark_ends():
    bench = swapping(num_blocks=11, watermark=0.2)  # 8 of 10 blocks for one request
    b = bench.add("b", 32)
    bench.step()
    bench.step()  # a decode may grow into the watermark
    assert len(b.block_ids) == 9
    bench.scheduler._preempt(b, Draft(0))
    bench.step()
    assert bench.end("b") == ("length", None)
    assert len(bench.blocks._free_host) == 10


def test_a_step_that_swaps_out_brings_nobody_back():
    bench = swapping(num_blocks=5)
    bench.add("a", 8), bench.add("b", 4), bench.add("c", 3)
    bench.step()
    bench.scheduler._preempt(bench.scheduler.running[-1], Draft(0))
    plan = bench.step()  # a takes c's block, so that b cannot grow; what b leaves would do for c
    assert scheduled(plan) == {"a": 1}
    assert plan.preempted == ["b"]
    assert bench.blocks.num_free_blocks == 1
    assert reasons(plan) == {"b": "preemption_this_step", "c": "preemption_this_step"}
    plan = bench.step()
    assert scheduled(plan) == {"a": 1, "c": 1}
    assert reasons(plan) == {"b": "blocks(need 2, free 0)"}


@pytest.mark.parametrize("moment", ["swapped", "back"])
def test_an_abort_reaches_a_swapped_request(moment):
    bench = swapping(num_blocks=5)
    bench.add("a", 8), bench.add("b", 7)
    bench.step(), bench.step()
    assert bench.ids("swapped") == "b"
    if moment == "back":
        bench.scheduler.abort("a")
        bench.step()
    assert bench.scheduler.abort("b") == ["b"]
    bench.run()
    assert len(bench.blocks._free_host) == 10


# Chunking without mixing


def test_chunks_without_mixing_keep_the_decodes_waiting_for_the_whole_prompt():
    bench = Bench(ChunkedNoMixScheduler, budget=16)
    bench.add("a", 4)
    bench.step()
    bench.add("b", 40)
    for n in (16, 16, 8):
        plan = bench.step()
        assert scheduled(plan) == {"b": n}
        assert reasons(plan) == {"a": "paused(b)"}
    assert scheduled(bench.step()) == {"a": 1, "b": 1}


def test_chunks_without_mixing_start_the_next_prompt_in_what_is_left():
    bench = Bench(ChunkedNoMixScheduler, budget=16)
    bench.add("a", 20), bench.add("b", 30), bench.add("c", 1)
    assert scheduled(bench.step()) == {"a": 16}
    plan = bench.step()
    assert scheduled(plan) == {"a": 4, "b": 12}
    assert reasons(plan) == {"c": "budget"}
    assert scheduled(bench.step()) == {"b": 16}
    assert scheduled(bench.step()) == {"b": 2, "c": 1}


def test_chunks_without_mixing_decode_when_the_only_prompt_has_preempted_itself():
    bench = Bench(ChunkedNoMixScheduler, budget=8, num_blocks=5, block_size=4, reserve_full_prompt=False)
    bench.add("a", 4), bench.add("b", 16)
    assert scheduled(bench.step()) == {"a": 4, "b": 4}
    bench.step()  # b: 8 more
    plan = bench.step()
    assert plan.preempted == ["b"]
    assert scheduled(plan) == {"a": 1}
    assert reasons(plan) == {"b": "preemption_this_step"}


def test_a_chunk_without_mixing_may_preempt_a_decode():
    bench = Bench(
        ChunkedNoMixScheduler, budget=8, num_blocks=6, block_size=4, reserve_full_prompt=False, policy="priority"
    )
    bench.add("b", 4, priority=5)
    bench.step()
    bench.add("a", 20, priority=0, max_tokens=1)
    bench.step(), bench.step()
    plan = bench.step()
    assert plan.preempted == ["b"]
    assert scheduled(plan) == {"a": 4}


# Unified: running first, one budget


def test_running_requests_go_first_and_a_prompt_gets_what_is_left():
    bench = Bench(budget=16)
    bench.add("a", 4), bench.add("b", 4)
    bench.step()
    bench.add("c", 40)
    for n in (14, 14, 12):
        plan = bench.step()
        assert scheduled(plan) == {"a": 1, "b": 1, "c": n}
        assert list(scheduled(plan)) == ["a", "b", "c"]
        assert plan.left_out == {}
    assert scheduled(bench.step()) == {"a": 1, "b": 1, "c": 1}


def test_a_chunk_samples_nothing_before_the_last():
    bench = Bench(budget=16)
    bench.add("a", 40)
    bench.step(), bench.step()
    assert bench.outputs["a"] == []
    bench.step()
    assert bench.tokens("a") == [TOKEN]


def test_the_threshold_caps_every_chunk_but_a_lone_request_takes_the_whole_budget():
    bench = Bench(budget=64, long_prefill_token_threshold=8)
    bench.add("a", 100)
    assert scheduled(bench.step()) == {"a": 64}
    bench.add("b", 30)
    assert scheduled(bench.step()) == {"a": 8, "b": 8}
    bench.scheduler.abort("a")
    assert scheduled(bench.step()) == {"b": 22}


def test_admission_stops_at_the_first_that_finds_no_room():
    bench = Bench(num_blocks=11, block_size=4)
    bench.add("a", 24), bench.add("b", 20), bench.add("c", 4)
    plan = bench.step()
    assert scheduled(plan) == {"a": 24}
    assert reasons(plan) == {"b": "blocks(need 5, free 4)", "c": "fcfs_behind(b)"}


def test_the_watermark_counts_only_while_something_runs():
    bench = Bench(num_blocks=11, block_size=4, watermark=0.2)
    bench.add("a", 32), bench.add("b", 4)
    plan = bench.step()
    assert scheduled(plan) == {"a": 32}
    assert reasons(plan) == {"b": "watermark(need 3, free 2)"}


def test_a_chunk_is_admitted_only_with_room_for_its_whole_prompt_unless_told_otherwise():
    for reserve, tokens in ((True, {"a": 24}), (False, {"a": 24, "b": 8})):
        bench = Bench(num_blocks=11, block_size=4, budget=32, reserve_full_prompt=reserve)
        bench.add("a", 24), bench.add("b", 20)
        assert scheduled(bench.step()) == tokens


@pytest.mark.parametrize("policy", CHUNKING)
def test_a_step_with_a_preemption_admits_nobody(policy):
    bench = Bench(policy, num_blocks=7, block_size=4)
    bench.add("a", 7), bench.add("b", 7), bench.add("c", 7)
    bench.step(), bench.step()
    bench.add("d", 1)
    plan = bench.step()
    assert plan.preempted == ["c"]
    assert scheduled(plan) == {"a": 1, "b": 1}
    assert reasons(plan) == {"c": "preemption_this_step", "d": "preemption_this_step"}
    assert bench.ids("waiting") == "cd"


def test_a_resumed_request_recomputes_prompt_and_output_in_chunks():
    bench = Bench(num_blocks=7, block_size=4)
    bench.add("a", 7), bench.add("b", 7), bench.add("c", 7)
    bench.step(), bench.step()
    assert bench.step().preempted == ["c"]
    bench.scheduler.abort("b")
    bench.scheduler.budget = 8
    plan = bench.step()
    assert scheduled(plan) == {"a": 1, "c": 7}
    assert [(new.num_prompt_tokens, len(new.token_ids)) for new in plan.new] == [(7, 9)]
    assert scheduled(bench.step()) == {"a": 1, "c": 2}
    assert bench.tokens("c") == [TOKEN] * 3


def test_a_request_scheduled_again_before_its_result_computes_the_token_that_is_on_its_way():
    bench = Bench()
    bench.add("a", 10)
    first, second = bench.scheduler.schedule(), bench.scheduler.schedule()
    assert (scheduled(first), scheduled(second)) == ({"a": 10}, {"a": 1})
    bench.update(first)
    assert bench.tokens("a") == [TOKEN]
    assert scheduled(bench.scheduler.schedule()) == {"a": 1}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_whose_last_token_is_on_its_way_has_nothing_to_compute(policy):
    bench = Bench(policy)
    bench.add("a", 10, max_tokens=1), bench.add("b", 10)
    first, second = bench.scheduler.schedule(), bench.scheduler.schedule()
    assert (scheduled(first), scheduled(second)) == ({"a": 10, "b": 10}, {"b": 1})
    assert reasons(second) == {"a": "nothing_to_compute"}
    bench.update(first)
    assert bench.end("a") == ("length", None)


# Priority


def test_the_most_urgent_is_admitted_first_whatever_the_order_of_arrival():
    bench = Bench(max_num_seqs=1, policy="priority")
    bench.add("a", 4, priority=1, arrival_s=0.0, max_tokens=1)
    bench.add("b", 4, priority=0, arrival_s=2.0, max_tokens=1)
    bench.add("c", 4, priority=0, arrival_s=1.0, max_tokens=1)
    bench.add("d", 4, priority=0, arrival_s=1.0, max_tokens=1)
    assert bench.ids("waiting") == "cdba"
    bench.scheduler.abort("b")
    assert [next(iter(scheduled(plan))) for plan in bench.run()] == ["c", "d", "a"]


def test_by_priority_a_victim_that_was_already_scheduled_gives_its_tokens_back():
    bench = Bench(policy="priority", num_blocks=7, block_size=4)
    bench.add("c", 5, priority=9)
    bench.step()
    bench.add("a", 8, priority=0), bench.add("b", 8, priority=1)
    bench.step()
    assert bench.ids("running") == "cab"
    assert bench.blocks.num_free_blocks == 0
    bench.scheduler.budget = 2
    plan = bench.step()  # c got a token, then a needs a block: c's, and its token serves b
    assert plan.preempted == ["c"]
    assert scheduled(plan) == {"a": 1, "b": 1}
    assert "c" not in plan.new_blocks
    assert reasons(plan) == {"c": "preemption_this_step"}


def promise_broken(manager) -> tuple[Bench, list[int]]:
    """c is given two full blocks' worth of tokens, then loses everything in the same call. Returns c's prompt."""
    bench = Bench(
        policy="priority", manager=manager, num_blocks=9, block_size=4, budget=16, long_prefill_token_threshold=8
    )
    prompt = list(range(500, 530))
    bench.add("c", prompt, priority=9), bench.add("z", 1, priority=10, max_tokens=1)
    bench.step()
    bench.add("a", 8, priority=0)
    assert scheduled(bench.step()) == {"c": 8, "a": 8}
    plan = bench.scheduler.schedule()
    assert plan.preempted == ["c"]
    assert scheduled(plan) == {"a": 1}
    bench.update(plan)
    return bench, prompt


def hit_after_broken_promise(manager) -> int:
    bench, prompt = promise_broken(manager)
    bench.check_state()
    probe = bench.add("p", prompt)
    return bench.blocks.lookup(probe).num_tokens


@pytest.mark.parametrize("manager", [V0CachedBlocks, SharedBlocks])
def test_by_priority_a_victim_of_its_own_step_leaves_no_hash_of_kv_that_was_never_written(manager):
    assert hit_after_broken_promise(manager) == 16


def test_by_priority_one_that_preempts_itself_ends_the_step_for_those_behind_it():
    bench = Bench(policy="priority", num_blocks=7, block_size=4)
    bench.add("a", 5, priority=0), bench.add("c", 7, priority=9)
    bench.step()
    bench.add("b", 5, priority=1)
    bench.step()
    assert bench.ids("running") == "acb"
    plan = bench.step()
    assert scheduled(plan) == {"a": 1}
    assert plan.preempted == ["c"]
    assert reasons(plan) == {"b": "preemption_this_step", "c": "preemption_this_step"}
    assert scheduled(bench.step()) == {"a": 1, "b": 1}


def test_by_priority_a_preempted_request_takes_its_old_place():
    bench = Bench(policy="priority", num_blocks=5, block_size=4)
    bench.add("b", 7, priority=5), bench.add("a", 7, priority=1)
    bench.step(), bench.step()
    bench.add("c", 1, priority=3)
    assert bench.step().preempted == ["b"]
    assert bench.ids("waiting") == "cb"


# Aborts


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("manager", MANAGERS)
def test_an_abort_is_legal_at_any_time_and_idempotent(policy, manager):
    bench = Bench(policy, manager)
    bench.add("a", 20), bench.add("b", 20), bench.add("c", 20)
    assert bench.scheduler.abort(["c", "c", "unknown"]) == ["c"]  # before its first scheduling
    plan = bench.scheduler.schedule()
    assert plan.finished == ["c"]
    assert bench.scheduler.abort(["b"]) == ["b"]  # while its step runs
    bench.take(bench.scheduler.update(plan, {"a": [TOKEN], "b": [TOKEN]}))
    assert bench.outputs["b"] == []
    plan = bench.step()
    assert plan.finished == ["b"]
    assert scheduled(plan) == {"a": 1}
    assert bench.scheduler.abort(["a", "b"]) == ["a"]
    assert not bench.scheduler.has_work
    assert bench.blocks.num_free_blocks == bench.blocks.num_blocks - 1
    bench.add("a", 20)  # its id is free again
    assert scheduled(bench.step()) == {"a": 20}


@pytest.mark.parametrize("policy", POLICIES)
def test_an_abort_reaches_a_preempted_request(policy):
    bench = Bench(policy, num_blocks=5, block_size=4)
    bench.add("a", 8), bench.add("b", 7)
    bench.step()
    assert bench.step().preempted == ["b"]
    assert bench.scheduler.abort(["b"]) == ["b"]
    bench.run()


def test_a_live_id_is_refused():
    bench = Bench()
    bench.add("a", 4)
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        bench.add("a", 4)


# Stopping


def test_the_end_of_sequence_stops_even_at_the_last_allowed_token():
    bench = Bench()
    bench.add("a", 4, max_tokens=2), bench.add("b", 4, max_tokens=2)
    bench.step()
    bench.step(a=[EOS])
    assert bench.end("a") == ("stop", None)
    assert bench.tokens("a") == [TOKEN, EOS]
    assert bench.end("b") == ("length", None)


def test_a_stop_token_is_kept_and_named():
    bench = Bench()
    bench.add("a", 4, stop_token_ids=[50, 60])
    bench.step(a=[60])
    assert bench.end("a") == ("stop", 60)
    assert bench.tokens("a") == [60]


def test_nothing_stops_below_min_tokens_and_ignore_eos_ignores_only_that():
    bench = Bench()
    bench.add("a", 4, min_tokens=3, stop_token_ids=[50])
    bench.add("b", 4, ignore_eos=True, max_tokens=3, stop_token_ids=[50])
    for token_id in (50, EOS):
        bench.step(a=[token_id], b=[EOS])
    bench.step(a=[EOS], b=[50])
    assert bench.tokens("a") == [50, EOS, EOS]
    assert bench.end("a") == ("stop", None)
    assert bench.end("b") == ("stop", 50)


def test_an_end_of_sequence_below_min_tokens_does_not_stop_but_the_length_does():
    bench = Bench()
    bench.add("a", 4, min_tokens=2, max_tokens=2)
    bench.step(a=[EOS])
    bench.step()
    assert bench.end("a") == ("length", None)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_ends_at_the_model_length(policy):
    bench = Bench(policy, max_model_len=20, budget=20)
    bench.add("a", 17, max_tokens=None)
    bench.run()
    assert bench.tokens("a") == [TOKEN] * 3
    assert bench.end("a") == ("length", None)


def test_tokens_after_the_one_that_stops_are_dropped():
    bench = Bench()
    bench.add("a", 4, max_tokens=3)
    bench.step(a=[TOKEN, EOS, 9, 9])
    assert bench.tokens("a") == [TOKEN, EOS]
    bench.add("b", 4, max_tokens=3)
    bench.step(b=[8, 8, 8, 8])
    assert bench.tokens("b") == [8] * 3


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("last", [False, True])
def test_a_request_preempted_while_its_step_runs_still_gets_its_token(manager, last):
    bench = Bench(manager=manager)
    a = bench.add("a", 20, max_tokens=1 if last else 3)
    plan = bench.scheduler.schedule()
    assert bench.scheduler.reset_prefix_cache(force=True)
    bench.take(bench.scheduler.update(plan, {"a": [TOKEN]}))
    assert bench.tokens("a") == [TOKEN]
    if last:
        assert bench.end("a") == ("length", None)
    else:
        assert (a.num_tokens, a.num_computed_tokens, a.block_ids) == (21, 0, [])
        assert [len(new.token_ids) for new in bench.step().new] == [21]
    bench.run()


# Order effects (unified, fcfs)


def test_a_running_decode_is_never_skipped():
    """(a)"""
    bench = Bench(budget=8, max_num_seqs=8, long_prefill_token_threshold=3)
    decodes = [bench.add(f"d{i}", 1).id for i in range(6)]
    bench.step()
    for i in range(10):
        bench.add(f"p{i}", 30)
        assert set(decodes) <= scheduled(bench.step()).keys()


def test_with_a_threshold_a_long_prompt_leaves_room_for_those_behind_it_but_no_more():
    """(b)"""
    bench = Bench(budget=8, long_prefill_token_threshold=6)
    bench.add("p", 60), bench.add("a", 1), bench.add("b", 1), bench.add("c", 1)
    plan = bench.step()
    assert scheduled(plan) == {"p": 6, "a": 1, "b": 1}
    for _ in range(5):
        plan = bench.step()
        assert scheduled(plan) == {"p": 6, "a": 1, "b": 1}
        assert reasons(plan) == {"c": "budget"}


def test_without_a_threshold_new_arrivals_wait_for_the_last_chunk():
    """(c)"""
    bench = Bench(budget=8)
    bench.add("p", 20), bench.add("a", 1)
    for n in (8, 8):
        plan = bench.step()
        assert scheduled(plan) == {"p": n}
        assert reasons(plan) == {"a": "budget"}
    assert scheduled(bench.step()) == {"p": 4, "a": 1}


# The prefix cache


@pytest.mark.parametrize("policy", POLICIES)
def test_reset_is_refused_while_requests_run_and_forced_by_preempting_them(policy):
    bench = Bench(policy, SharedBlocks)
    for request_id in "abc":
        bench.add(request_id, [*range(16), ord(request_id)])
    bench.step()
    bench.add("d", 4)
    assert not bench.scheduler.reset_prefix_cache()
    assert bench.ids("running") == "abc"
    assert bench.scheduler.reset_prefix_cache(force=True)
    assert bench.ids("waiting") == "abcd"
    assert bench.blocks.num_free_blocks == bench.blocks.num_blocks - 1
    plan = bench.step()
    assert plan.finished == ["c", "b", "a"]  # the runner drops their rows before it gets them anew
    assert plan.new[0].id == "a"
    assert plan.new[0].num_computed_tokens == 0
    bench.run()
    assert bench.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("manager", [V0CachedBlocks, SharedBlocks])
def test_an_admission_is_counted_once_however_often_it_was_tried(manager):
    bench = Bench(manager=manager, num_blocks=5, block_size=4)
    prefix = list(range(8))
    bench.add("a", [*prefix, 1, 2, 3], max_tokens=3)
    bench.step()
    bench.add("b", [*prefix, *range(50, 58)], max_tokens=1)
    for _ in range(2):
        assert "b" not in scheduled(bench.step())
    assert bench.blocks.stats.requests == 1
    plan = bench.step()
    assert scheduled(plan) == {"b": 8}
    assert (bench.blocks.stats.requests, bench.blocks.stats.queried_tokens, bench.blocks.stats.hit_tokens) == (2, 27, 8)
    assert bench.outputs["b"][0].num_cached_tokens == 8


def test_a_resumed_request_is_counted_apart_and_keeps_its_first_hit():
    bench = Bench(manager=SharedBlocks, num_blocks=7, block_size=4)
    bench.add("a", 7), bench.add("b", 5), bench.add("c", 7)
    while not bench.scheduler.num_preemptions:
        bench.step()
    bench.scheduler.abort(["a", "b"])
    bench.step()
    stats = bench.blocks.stats
    assert (stats.requests, stats.hit_tokens) == (3, 0)
    assert (stats.preempted_requests, stats.preempted_hit_tokens) == (1, 4)
    assert bench.outputs["c"][-1].num_cached_tokens == 0


# The table of reference: latencies of a linear cost on a virtual clock, in microseconds

MODEL_LEN = 16_388


def simulate(policy: type[BaseScheduler], budget: int) -> tuple[list[int], list[int], int]:
    """8 short decodes from the start, then 4 long prompts. Returns all token gaps, the TTFTs of the long, the end."""
    bench = Bench(policy, num_blocks=20_000, budget=budget, max_model_len=MODEL_LEN)
    arrivals = [(0, f"d{i}", 20, 200) for i in range(8)]
    arrivals += [(100_000 + 800_000 * q, f"p{q}", 16_384, 4) for q in range(4)]
    now = 0
    times: dict[str, list[int]] = {}  # arrival, then each token
    while arrivals or bench.scheduler.has_work:
        while arrivals and (arrivals[0][0] <= now or not bench.scheduler.has_work):
            arrival, request_id, length, max_tokens = arrivals.pop(0)
            bench.add(request_id, [TOKEN] * length, max_tokens)
            now, times[request_id] = max(now, arrival), [arrival]
        plan = bench.scheduler.schedule()
        now += 8000 + 30 * plan.num_tokens
        for request_id in bench.update(plan):
            times[request_id].append(now)
    gaps = [b - a for t in times.values() for a, b in pairwise(t[1:])]
    return sorted(gaps), [times[f"p{q}"][1] - times[f"p{q}"][0] for q in range(4)], now


def nearest_rank(values: list[int], percent: int) -> int:
    return values[math.ceil(percent / 100 * len(values)) - 1]


@pytest.mark.parametrize(
    ("policy", "budget", "itl", "ttft", "end"),
    [
        (PhaseSplitScheduler, 16_384, (8240, 507_790, 507_790), [502_960, 507_450, 503_700, 499_950], 3_651_000),
        (UnifiedScheduler, 256, (15_680, 15_680, 15_680), [1_054_000, 1_288_880, 1_508_080, 1_710_910], 4_235_000),
        (UnifiedScheduler, 512, (23_360, 23_360, 23_360), [766_880, 771_610, 768_100, 764_590], 3_619_000),
        (UnifiedScheduler, 1024, (8240, 38_720, 38_720), [635_040, 639_770, 636_260, 632_750], 3_619_000),
        (UnifiedScheduler, 2048, (8240, 69_440, 69_440), [569_120, 573_850, 570_340, 566_830], 3_619_000),
    ],
)
def test_the_latencies_of_the_reference_load(policy, budget, itl, ttft, end):
    gaps, first_tokens, now = simulate(policy, budget)
    assert (nearest_rank(gaps, 50), nearest_rank(gaps, 99), gaps[-1]) == itl
    assert first_tokens == ttft
    assert now == end


def test_a_planted_bug_moves_the_latencies_of_the_reference_load():
    class PromptsFirst(UnifiedScheduler):
        """The head of the queue before the decodes: chunks, but no mixing in favour of those that run."""

        def schedule(self):
            self.running.sort(key=lambda request: -request.num_prompt_tokens)
            return super().schedule()

    gaps, _, _ = simulate(PromptsFirst, 512)
    assert gaps[-1] > 23_360


# Planted bugs die


def test_kept_hashes_of_a_broken_promise_are_seen():
    class NeverForgets(SharedBlocks):
        def forget(self, request, num_computed_tokens):
            request.num_cached_blocks = min(request.num_cached_blocks, num_computed_tokens // self.block_size)

    assert hit_after_broken_promise(NeverForgets) > 16


def test_tokens_that_a_victim_keeps_are_seen():
    class Keeps(UnifiedScheduler):
        def _withdraw(self, victim, draft):
            num_tokens = draft.tokens.get(victim.id, 0)
            super()._withdraw(victim, draft)
            draft.budget -= num_tokens

    bench = Bench(Keeps, policy="priority", num_blocks=7, block_size=4)
    bench.add("c", 5, priority=9)
    bench.step()
    bench.add("a", 8, priority=0), bench.add("b", 8, priority=1)
    bench.step()
    bench.scheduler.budget = 2
    assert scheduled(bench.step()) != {"a": 1, "b": 1}


def test_a_count_that_advances_twice_is_seen():
    class Twice(UnifiedScheduler):
        def _seal(self, draft):
            plan = super()._seal(draft)
            for request_id, num_tokens in plan.num_scheduled_tokens.items():
                self.requests[request_id].num_computed_tokens += num_tokens
            return plan

    bench = Bench(Twice)
    bench.add("a", 10)
    with pytest.raises(AssertionError, match="computed 20 of 11 tokens"):
        bench.step()


@pytest.mark.parametrize("manager", MANAGERS)
def test_blocks_that_an_abort_frees_twice_are_seen(manager):
    class FreesTwice(UnifiedScheduler):
        def _close(self, request, status):
            table = list(request.block_ids)
            super()._close(request, status)
            request.block_ids = table
            self.blocks.free(request)

    bench = Bench(FreesTwice, manager)
    bench.add("a", 10)
    bench.step()
    with pytest.raises(AssertionError, match="freed twice"):
        bench.scheduler.abort("a")


def test_a_request_left_out_without_a_reason_is_seen():
    class Silent(UnifiedScheduler):
        def _explain(self, draft):
            pass

    bench = Bench(Silent, budget=8)
    bench.add("a", 10), bench.add("b", 10)
    with pytest.raises(AssertionError, match=r"does not say why \{'b'\} got nothing"):
        bench.step()
