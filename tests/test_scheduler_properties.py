"""Laws that hold for every schedule: random loads over every scheduler, block manager and setting.

A load is run through the real core by every combination of scheduler and block manager, over the digest runner, whose
tokens betray a wrong block, in step and one step ahead. The core checks its invariants after every step; a `Ledger`
reads the plans as a runner would, knowing neither queues nor blocks, and checks what they promise.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import msgspec
import pytest
from engines import WatchedRunner, make_core
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from nanoserve.block_pool import NO_HIT
from nanoserve.blocks import PrivateBlocks, SharedBlocks, V0CachedBlocks
from nanoserve.config import SEAMS
from nanoserve.core import EngineCore
from nanoserve.lab.fakes import START, DigestRunner, mix, next_token, reference_tokens
from nanoserve.request import EngineOutput, EngineRequest, Reason, SamplingParams, StepPlan
from nanoserve.scheduler import BaseScheduler, ChunkedNoMixScheduler, Draft, PhaseSplitScheduler, UnifiedScheduler

SCHEDULERS = list(SEAMS["scheduler"].values())
MANAGERS = list(SEAMS["blocks"].values())
EVERYTHING = list(product(SCHEDULERS, MANAGERS))
MODES = {"in_step": False, "ahead": True}  # async_scheduling
every_mode = pytest.mark.parametrize("ahead", MODES.values(), ids=MODES)
REASONS = {"budget", "seq_cap", "blocks", "fcfs_behind", "watermark", "preemption_this_step", "paused"}

reference = functools.lru_cache(100_000)(lambda prompt, n: reference_tokens(list(prompt), n))


@dataclass(frozen=True)
class Job:
    """One request: when it arrives, and when it is aborted (counted in steps), if at all."""

    prompt: tuple[int, ...]
    max_tokens: int
    arrives: int = 0
    priority: int = 0
    stops_after: int = 0  # its end-of-sequence id is the token that it emits at this place; 0: none
    min_tokens: int = 0
    salt: str = ""
    skips_cache: bool = False
    aborted_at: int = -1
    while_running: bool = False  # the abort comes between launch and update

    def request(self, i: int) -> EngineRequest:
        eos = reference(self.prompt, self.stops_after)[-1] if self.stops_after else None
        return EngineRequest(
            id=f"r{i}",
            prompt_token_ids=list(self.prompt),
            params=params_of(self.max_tokens, min(self.min_tokens, self.max_tokens), self.skips_cache),
            eos_token_id=eos,
            arrival_s=float(self.arrives),
            priority=self.priority,
            cache_salt=self.salt,
        )

    def answer(self, model_len: int) -> tuple[list[int], str]:
        """The tokens and the finish reason of a right engine."""
        tokens = reference(self.prompt, min(self.max_tokens, model_len - len(self.prompt)))
        eos = reference(self.prompt, self.stops_after)[-1] if self.stops_after else None
        for k in range(max(1, min(self.min_tokens, self.max_tokens)), len(tokens) + 1):
            if tokens[k - 1] == eos:
                return tokens[:k], "stop"
        return tokens, "length"


@functools.cache
def params_of(max_tokens: int, min_tokens: int, skips_cache: bool) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=0 if skips_cache else None
    )


@dataclass(frozen=True)
class Load:
    jobs: list[Job]
    config: dict[str, Any]
    budget: int
    model_len: int
    swap_blocks: int = 0  # > 0: where the combination can, it preempts by swapping
    reset_at: int = -1  # the step before which the prefix cache is emptied by force

    def fields(self, scheduler: type[BaseScheduler], manager: type[PrivateBlocks]) -> dict[str, Any]:
        whole = issubclass(scheduler, PhaseSplitScheduler)
        fields = {**self.config, **scheduler.fixed, "scheduler": scheduler, "blocks": manager}
        fields["max_num_batched_tokens"] = self.budget
        if whole:
            fields["max_num_batched_tokens"] = max(self.budget, self.model_len - 1)
        if whole and manager.can_swap and self.swap_blocks:
            fields |= {"preemption_mode": "swap", "num_swap_blocks": self.swap_blocks}
        return fields


@st.composite
def loads(draw: st.DrawFn, **forced: Any) -> Load:
    """Up to seven requests whose prompts share blocks, in a pool that two or three of them fill."""

    def number(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    block_size, usable = number(1, 4), number(3, 8)
    watermark = draw(st.sampled_from([0.0, 0.0, 0.25]))
    model_len = (usable - int(watermark * (usable + 1))) * block_size
    seats = number(1, 5)
    config = {
        "block_size": block_size,
        "num_blocks": usable + 1,
        "watermark": watermark,
        "max_model_len": "auto",
        "max_num_seqs": seats,
        "free_order": draw(st.sampled_from(["uncached_first", "append"])),
        "reserve_full_prompt": draw(st.booleans()),
        "long_prefill_token_threshold": min(model_len, draw(st.sampled_from([0, 0, 1, 3, 5]))),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
    }
    jobs = []
    for _ in range(draw(st.sampled_from([5, 6, 7, 3, 4, 1]))):
        pieces = draw(st.lists(st.integers(0, 2), max_size=3))  # whole blocks; a tail of up to one more
        tokens = [100 * piece + j for piece in pieces for j in range(block_size)] + [300] * number(0, block_size)
        kind = number(0, 9)
        job = Job(
            prompt=tuple((tokens or [1])[: model_len - 1]),
            max_tokens=number(1, 12),
            arrives=number(0, 6),
            priority=number(0, 3),
            stops_after=max(0, number(-6, 5)),
            min_tokens=max(0, number(-4, 4)),
            salt="s" if kind == 9 else "",
            skips_cache=kind == 8,
            aborted_at=number(0, 15) if kind in (6, 7) else -1,
            while_running=kind == 7,
        )
        jobs.append(job)
    return Load(jobs, config | forced, seats + number(0, 12), model_len, max(0, number(-2, 6)), number(-20, 20))


@dataclass
class Row:
    """What a runner knows of a request. A token that it will have sampled when it is asked for more is known."""

    known: int
    computed: int
    num_outputs: int


@dataclass
class Ledger:
    """Reads plans and outputs, and keeps them to their promises."""

    core: EngineCore
    jobs: dict[str, Job]
    rows: dict[str, Row] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)  # of all admissions
    scheduled: dict[str, int] = field(default_factory=dict)
    preempted: dict[str, int] = field(default_factory=dict)  # computed tokens at the last preemption
    num_counted: int = 0  # admissions that asked the cache

    def take_plan(self, plan: StepPlan) -> None:
        for request_id in plan.preempted:
            self.preempted[request_id] = self.rows.pop(request_id).computed
        for request_id in plan.finished:
            self.rows.pop(request_id, None)
        running = dict(self.rows)
        decodes = {i for i, row in running.items() if row.known - row.computed == 1 and row.num_outputs}
        for new in plan.new:
            self._admit(new.id, Row(len(new.token_ids), new.num_computed_tokens, len(self.tokens.get(new.id, []))))
        self._check_shape(plan, running, decodes)
        self._check_reasons(plan)
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            row = self.rows[request_id]
            row.computed += num_tokens
            assert row.computed <= row.known, f"{request_id}: {row}"
            if row.computed == row.known:
                row.known, row.num_outputs = row.known + 1, row.num_outputs + 1
            self.scheduled[request_id] = self.scheduled.get(request_id, 0) + num_tokens

    def _has_its_last_token(self, request_id: str) -> bool:
        """Known to the runner; perhaps not yet to the scheduler."""
        job, row = self.jobs[request_id], self.rows[request_id]
        return row.known >= min(len(job.prompt) + job.max_tokens, self.core.config.model_len)

    def _admit(self, request_id: str, row: Row) -> None:
        assert request_id not in self.rows
        assert row.known == len(self.jobs[request_id].prompt) + row.num_outputs, f"{request_id} is not sent whole"
        self.rows[request_id] = row
        if self.core.scheduler.swaps and request_id in self.preempted:
            assert row.computed == self.preempted[request_id], "swapping recomputes nothing"
            return
        assert row.computed % self.core.config.block_size == 0
        self.hits[request_id] = self.hits.get(request_id, 0) + row.computed
        job, blocks = self.jobs[request_id], self.core.scheduler.blocks
        asks = not job.skips_cache and not (job.salt and isinstance(blocks, V0CachedBlocks))
        assert asks or row.computed == 0
        self.num_counted += asks and type(blocks) is not PrivateBlocks

    def _check_shape(self, plan: StepPlan, running: dict[str, Row], decodes: set[str]) -> None:
        scheduler, tokens = self.core.scheduler, plan.num_scheduled_tokens
        if isinstance(scheduler, PhaseSplitScheduler):
            new = {new.id for new in plan.new}
            whole = all(i in new and self.rows[i].computed + n == self.rows[i].known for i, n in tokens.items())
            assert whole or set(tokens.values()) == {1}, f"{tokens} mixes prompts and decodes"
        elif isinstance(scheduler, ChunkedNoMixScheduler):
            assert tokens.keys() <= decodes or not tokens.keys() & decodes, f"{tokens} mixes prompts and decodes"
        else:
            assert not (plan.preempted and plan.new), "a step with a preemption admits nobody"
            threshold = scheduler.long_prefill_token_threshold
            cut = [i for i, n in tokens.items() if self.rows[i].computed + n < self.rows[i].known and n != threshold]
            assert not cut or plan.preempted or plan.num_tokens == scheduler.budget, f"{cut} cut, budget is left"
            if not scheduler.by_priority:
                skipped = {i for i in running.keys() - tokens.keys() if not self._has_its_last_token(i)}
                assert not skipped, f"{skipped} skipped"

    def _check_reasons(self, plan: StepPlan) -> None:
        scheduler = self.core.scheduler
        for request_id, reason in plan.left_out.items():
            if reason.code == "nothing_to_compute" and self.core.config.async_scheduling:
                # its last token is on its way, or it lost its blocks to a reset while its step runs
                assert request_id not in self.rows or self._has_its_last_token(request_id)
                continue
            assert reason.code in REASONS, f"{request_id}: {reason}"
            if reason.code in ("blocks", "watermark"):
                assert reason.need > reason.free
            if reason.code == "fcfs_behind":
                assert reason.behind in plan.left_out
            if reason.code == "seq_cap":
                assert len(self.rows) == scheduler.max_num_seqs
            if reason.code == "preemption_this_step":
                assert plan.preempted
            if reason.code == "budget":
                wanted = 1
                if isinstance(scheduler, PhaseSplitScheduler) and request_id not in self.rows:
                    wanted = len(self.jobs[request_id].prompt) + len(self.tokens.get(request_id, []))
                assert plan.num_tokens + wanted > scheduler.budget, f"{request_id}: there is budget left"

    def note_reset(self) -> None:
        """All that run have lost everything; the next plan names them as finished."""
        self.preempted |= dict.fromkeys(self.rows, 0)

    def take_outputs(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            assert output.id not in self.ends, f"{output.id} has news after its end"
            self.tokens.setdefault(output.id, []).extend(output.new_token_ids)
            if output.finish_reason:
                self.ends[output.id] = output.finish_reason
                self._check_end(output)

    def _check_end(self, output: EngineOutput) -> None:
        request_id, job, reason = output.id, self.jobs[output.id], self.ends[output.id]
        row, tokens = self.rows.pop(request_id, None), self.tokens[request_id]
        expected, expected_reason = job.answer(self.core.config.model_len)
        if reason == "abort":
            assert job.aborted_at >= 0
            assert tokens == expected[: len(tokens)]
        elif reason == "error":
            assert self.core.scheduler.swaps
            assert tokens == expected[: len(tokens)]
        else:
            assert (tokens, reason) == (expected, expected_reason)
            needed = len(job.prompt) + len(tokens) - 1  # the last token is never computed
            wasted = {0, 1} if self.core.config.async_scheduling and reason == "stop" else {0}
            if row is None:
                assert request_id in self.preempted, "it lost its row while its last step ran"
            else:
                assert row.computed - needed in wasted
            if request_id not in self.preempted:
                assert self.scheduled[request_id] - (needed - self.hits[request_id]) in wasted
                assert output.num_cached_tokens == self.hits[request_id]

    def close(self) -> None:
        scheduler, blocks = self.core.scheduler, self.core.scheduler.blocks
        assert self.ends.keys() == self.jobs.keys()
        assert not scheduler.running
        assert len(scheduler.waiting) + len(scheduler.swapped) == 0
        assert blocks.num_free_blocks == blocks.num_blocks - 1
        assert len(blocks._free_host) == self.core.config.num_swap_blocks
        assert self.core.runner.num_tokens == sum(self.scheduled.values())
        stats = blocks.stats
        assert stats.requests + stats.preempted_requests == self.num_counted
        assert stats.hit_tokens + stats.preempted_hit_tokens == sum(self.hits.values())


def play(
    load: Load,
    scheduler: type[BaseScheduler],
    manager: type[PrivateBlocks],
    runner: type[DigestRunner] = WatchedRunner,
    *,
    ahead: bool = False,
) -> list[StepPlan]:
    """Run a load to its end, all laws checked. Returns the plans."""
    core = make_core(runner=runner, async_scheduling=ahead, **load.fields(scheduler, manager))
    assert isinstance(core.runner, WatchedRunner)
    assert core.config.model_len == load.model_len
    requests = [job.request(i) for i, job in enumerate(load.jobs)]
    ledger = Ledger(core, {r.id: job for r, job in zip(requests, load.jobs, strict=True)})
    last_arrival = max(job.arrives for job in load.jobs)
    limit = last_arrival + 5 * sum(len(job.prompt) + job.max_tokens for job in load.jobs) + 20
    step = 0
    while core.has_work or step <= last_arrival:
        assert step < limit, f"no end after {step} steps"
        aborts: tuple[list[str], list[str]] = ([], [])
        for request, job in zip(requests, load.jobs, strict=True):
            if job.arrives == step:
                core.add(request)
            if job.aborted_at == step:
                aborts[job.while_running].append(request.id)
        core.abort(aborts[False])
        if load.reset_at == step:
            assert core.call("reset_prefix_cache", [True])
            ledger.note_reset()
        core.runner.in_flight = functools.partial(core.abort, aborts[True] * 2)
        num_plans = len(core.runner.plans)
        outputs = core.step()
        if len(core.runner.plans) > num_plans:
            ledger.take_plan(core.runner.plans[-1])
        ledger.take_outputs(outputs)
        step += 1
    ledger.close()
    return core.runner.plans


def play_everywhere(load: Load, ahead: bool) -> None:
    for scheduler, manager in EVERYTHING:
        play(load, scheduler, manager, ahead=ahead)


@every_mode
@settings(max_examples=560)  # of nine schedules each, in each mode: ten thousand
@given(load=loads())
def test_every_schedule_keeps_every_law(load, ahead):
    play_everywhere(load, ahead)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@every_mode
@settings(max_examples=12_000)
@given(load=loads())
def test_every_schedule_keeps_every_law_for_long(load, ahead):
    play_everywhere(load, ahead)


@every_mode
@settings(max_examples=60)
@given(load=loads(), combination=st.sampled_from(EVERYTHING))
def test_every_schedule_is_the_same_when_it_is_repeated(load, combination, ahead):
    assert play(load, *combination, ahead=ahead) == play(load, *combination, ahead=ahead)


# Planted bugs die


def assert_seen(
    complaint: str | None,
    scheduler: type[BaseScheduler] = UnifiedScheduler,
    manager: type[PrivateBlocks] = SharedBlocks,
    runner: type[DigestRunner] = WatchedRunner,
    **forced: Any,
) -> None:
    """Some random load breaks a law. `complaint`: its message; None for a wrong token or any other."""

    @settings(max_examples=1000, database=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
    @given(loads(**forced))
    def law(load):
        play(load, scheduler, manager, runner)

    with pytest.raises(AssertionError, match=complaint):
        law()


def test_a_hit_that_is_not_held_is_seen():
    class ForgetsToTouch(SharedBlocks):
        def _hold(self, block):
            pass

    assert_seen("reference counts|held and free", manager=ForgetsToTouch)


def test_a_hit_of_the_whole_prompt_is_seen():
    class HitsEverything(SharedBlocks):
        def lookup(self, request):
            request.token_ids.append(0)
            hit = super().lookup(request)
            request.token_ids.pop()
            return hit

    assert_seen("nothing to allocate for", manager=HitsEverything)


def test_a_hash_of_a_block_alone_is_seen_in_the_tokens():
    class NoParent(SharedBlocks):
        def hash_block(self, request, index, parent):
            return super().hash_block(request, index, b"")

    assert_seen(None, manager=NoParent)


def test_a_kept_hash_of_kv_that_was_never_written_is_seen_in_the_tokens():
    class NeverForgets(SharedBlocks):
        def forget(self, request, num_computed_tokens):
            request.num_cached_blocks = min(request.num_cached_blocks, num_computed_tokens // self.block_size)

    config = {"block_size": 4, "num_blocks": 9, "watermark": 0.0, "max_model_len": "auto", "max_num_seqs": 3}
    config |= {"long_prefill_token_threshold": 8, "policy": "priority"}
    victim, small = Job(tuple(range(30)), 2, priority=9), Job((1,), 1, priority=9)
    urgent = Job(tuple(range(100, 108)), 2, arrives=1)
    load = Load([victim, small, urgent], config, budget=16, model_len=32)
    plans = play(load, UnifiedScheduler, SharedBlocks)
    assert plans[2].preempted == ["r0"]
    assert plans[2].num_scheduled_tokens == {"r2": 1}  # two blocks' worth was taken back from r0
    with pytest.raises(AssertionError):
        play(load, UnifiedScheduler, NeverForgets)


def test_a_stale_block_table_after_a_resume_is_seen():
    class StaleTable(WatchedRunner):
        def launch(self, plan):
            old = {i: self.rows[i].block_ids for i in plan.preempted}
            self.old = {**getattr(self, "old", {}), **old}
            new = [
                msgspec.structs.replace(n, block_ids=[*self.old[n.id][:1], *n.block_ids[1:]]) if n.id in self.old else n
                for n in plan.new
            ]
            return super().launch(msgspec.structs.replace(plan, new=new))

    assert_seen(None, manager=PrivateBlocks, runner=StaleTable)


def test_keys_as_long_as_the_prompt_are_seen():
    class ShortKeys(WatchedRunner):
        def execute(self, plan):
            self.num_prompt_tokens = {
                **getattr(self, "num_prompt_tokens", {}),
                **{n.id: n.num_prompt_tokens for n in plan.new},
            }
            return super().execute(plan)

        def _run(self, request_id, num_tokens):
            if not super()._run(request_id, num_tokens):
                return []
            row, state = self.rows[request_id], START
            for position in range(self.num_prompt_tokens[request_id]):
                state = mix(state, self.cells[self._slot(row, request_id, position)])
            row.token_ids[-1] = next_token(state)
            return row.token_ids[-1:]

    assert_seen(None, runner=ShortKeys)


def test_chunking_for_the_first_prompt_only_is_seen():
    class OnlyTheFirst(UnifiedScheduler):
        def _admit(self, request, num_tokens, hit, draft, watermark_blocks):
            if draft.new and num_tokens < request.num_tokens - hit.num_tokens:
                draft.stopped_by = Reason("budget")
                return False
            return super()._admit(request, num_tokens, hit, draft, watermark_blocks)

    assert_seen("there is budget left", OnlyTheFirst)


def test_a_replaced_block_that_the_runner_is_not_told_of_is_seen():
    class NotTold(V0CachedBlocks):
        def take_replaced(self):
            super().take_replaced()
            return {}

    assert_seen(None, manager=NotTold)


def test_sharing_within_a_step_is_seen_in_the_cache_of_v0():
    class TooEarly(V0CachedBlocks):
        def allocate(self, request, num_new_tokens, hit=NO_HIT, **limits):
            new = super().allocate(request, num_new_tokens, hit, **limits)
            if new is not None and not request.num_computed_tokens:
                request.num_computed_tokens = hit.num_tokens + num_new_tokens
                self.commit(request, request.num_computed_tokens)
                request.num_computed_tokens = 0
            return new

    config = {"block_size": 4, "num_blocks": 9, "watermark": 0.0, "max_model_len": "auto", "max_num_seqs": 3}
    twins = Load([Job(tuple(range(9)), 2), Job(tuple(range(9)), 2)], config, budget=32, model_len=32)
    play(twins, UnifiedScheduler, V0CachedBlocks)
    with pytest.raises(AssertionError, match="r1 hits blocks of its own step"):
        play(twins, UnifiedScheduler, TooEarly)


def test_blocks_freed_twice_are_seen():
    class FreesTwice(UnifiedScheduler):
        def _close(self, request, status):
            table = list(request.block_ids)
            super()._close(request, status)
            request.block_ids = table
            self.blocks.free(request)

    assert_seen("freed twice", FreesTwice)


def test_a_decode_that_is_skipped_is_seen():
    class NewestFirst(UnifiedScheduler):
        def schedule(self):
            self.running.reverse()
            return super().schedule()

    assert_seen("skipped", NewestFirst, policy="fcfs", long_prefill_token_threshold=0)


def test_a_decode_beside_a_whole_prompt_is_seen():
    class Mixes(PhaseSplitScheduler):
        def schedule(self):
            draft = Draft(self.budget)
            self._decode_everyone(draft)
            if not draft.preempted:
                self._prefill(draft)
            return self._seal(draft)

    assert_seen("mixes prompts and decodes", Mixes, PrivateBlocks)


def test_a_prompt_that_starts_over_and_over_is_seen():
    class Starves(UnifiedScheduler):
        def schedule(self):
            draft = Draft(0)
            for request in [r for r in self.running if not r.num_output_tokens]:
                self._preempt(request, draft)
            self._finished += draft.preempted
            return super().schedule()

    assert_seen("no end after", Starves, PrivateBlocks)
