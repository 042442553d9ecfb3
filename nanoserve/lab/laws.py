"""The laws of scheduling and of blocks, as functions that return a verdict in plain words.

Each looks at one plan, one state or one end, changes nothing, and says the law, the step, the request, what was
expected and what was there instead. Where nanoserve/invariants.py asserts, this explains: for graders and learners.
Knows neither loads nor processes (trial.py, grading.py). Laws: tests/test_faults_lab.py, tests/test_grade.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from nanoserve.block_pool import NULL_BLOCK, PrefixHit, cdiv
from nanoserve.blocks import HASH_SEED, PrivateBlocks, SharedBlocks, V0CachedBlocks
from nanoserve.request import Request, Status, StepPlan, StepResult
from nanoserve.scheduler import BaseScheduler, ChunkedNoMixScheduler, PhaseSplitScheduler, UnifiedScheduler

if TYPE_CHECKING:
    from nanoserve.blocks import KVCacheManager
    from nanoserve.config import EngineConfig

LAWS: Mapping[str, str] = {
    "runs": "It takes every load, and neither raises, hangs, ends the process, eats the memory nor changes the engine.",
    "plan": "A step keeps to budget and seats, and says truthfully why whoever gets nothing gets nothing.",
    "blocks": "Tables, reference counts, the free queue and cache hits agree, and no block has two uses.",
    "work": "Each token is computed once, unless a preemption lost it; a token comes when all known ones are computed.",
    "tokens": "Every request gets the tokens that it would get alone.",
    "progress": "Every step moves someone on, and nobody is passed over for ever.",
    "returned": "An abort ends its request at once, and when all have ended, every block is free again.",
}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Of one law. Where it does not hold: the first step and request that show it."""

    law: str
    holds: bool = True
    step: int = 0
    request: str = ""
    expected: str = ""
    got: str = ""
    where: str = ""  # the line of code that raised or hung, if any did
    traceback: str = ""

    def __str__(self) -> str:
        if self.holds:
            return f"{self.law}: holds"
        who = f", request {self.request}" if self.request else ""
        where = f" ({self.where})" if self.where else ""
        return f"{self.law}: broken in step {self.step}{who}{where}: expected {self.expected}, got {self.got}"


class Row(msgspec.Struct):
    """A request as a runner sees it, from plans and sampled tokens alone."""

    known: int  # tokens; one that a planned step samples counts from then on
    computed: int
    num_outputs: int
    last: int  # tokens at its end: the last of them is never computed

    @property
    def is_complete(self) -> bool:
        return self.computed >= min(self.known, self.last - 1)

    @property
    def is_decode(self) -> bool:
        return self.known - self.computed == 1 and self.num_outputs > 0


def broken(law: str, step: int, request: str, expected: str, got: str) -> Verdict:
    return Verdict(law=law, holds=False, step=step, request=request, expected=expected, got=got)


# The plan


def limits_are_kept(scheduler: BaseScheduler, config: EngineConfig, step: int) -> Verdict:
    """A policy may take less than it is given, not help itself to more."""
    for name, limit in (("budget", config.budget), ("max_num_seqs", config.max_num_seqs)):
        if (taken := getattr(scheduler, name)) > limit:
            return broken("plan", step, "", f"{name} to stay at most {limit}, as configured", f"{taken}")
    return Verdict(law="plan")


def plan_is_legal(plan: StepPlan, scheduler: BaseScheduler) -> Verdict:
    """Budget, seats, counts, and a word about everyone."""
    tokens, step = plan.num_scheduled_tokens, plan.step
    last = next(reversed(tokens), "")
    if plan.num_tokens > scheduler.budget:
        return broken("plan", step, last, f"at most {scheduler.budget} tokens", f"{plan.num_tokens} tokens")
    if len(tokens) > scheduler.max_num_seqs:
        return broken("plan", step, last, f"at most {scheduler.max_num_seqs} requests", f"{len(tokens)} requests")
    for request_id, n in tokens.items():
        if n <= 0:
            return broken("plan", step, request_id, "at least one token for whoever is scheduled", f"{n} tokens")
        if request_id in plan.left_out:
            return broken("plan", step, request_id, "tokens, or a reason why not", f"{n} tokens and a reason")
    for request_id in scheduler.requests:
        if request_id not in tokens and request_id not in plan.left_out:
            return broken("plan", step, request_id, "tokens, or a reason why not", "neither")
    return Verdict(law="plan")


def tokens_are_known(plan: StepPlan, rows: Mapping[str, Row]) -> Verdict:
    """`rows`: as they stand before the plan's tokens, those it admits included."""
    for request_id, n in plan.num_scheduled_tokens.items():
        row = rows.get(request_id)
        if row is None:
            return broken("plan", plan.step, request_id, "a request that the runner was told of", "an unknown one")
        if row.computed + n > row.known:
            left = row.known - row.computed
            return broken("plan", plan.step, request_id, f"at most the {left} tokens that it is behind", f"{n} tokens")
    return Verdict(law="plan")


def reasons_are_true(
    plan: StepPlan, scheduler: BaseScheduler, rows: Mapping[str, Row], lengths: Mapping[str, int], chunks: bool
) -> Verdict:
    """`rows`: as in `tokens_are_known`; `lengths`: known tokens of those without one. `chunks`: this policy has cut a
    prompt, so that it has a use for any rest of the budget."""
    left = scheduler.budget - plan.num_tokens
    for request_id, reason in plan.left_out.items():
        whole = not chunks and request_id not in rows
        wanted = lengths.get(request_id, 1) if whole else 1
        if reason.code == "budget" and left >= wanted:
            got = f"{left} of {scheduler.budget} tokens are left over"
            return broken("plan", plan.step, request_id, "no tokens left, as the reason 'budget' says", got)
        if reason.code == "nothing_to_compute" and request_id in rows and not rows[request_id].is_complete:
            got = f"{rows[request_id].known - rows[request_id].computed} of its known tokens are not computed"
            return broken("plan", plan.step, request_id, "nothing to compute, as its reason says", got)
        if reason.code == "seq_cap" and len(scheduler.running) < scheduler.max_num_seqs:
            got = f"{len(scheduler.running)} of {scheduler.max_num_seqs} are taken"
            return broken("plan", plan.step, request_id, "no free seat, as the reason 'seq_cap' says", got)
        if reason.code == "preemption_this_step" and not plan.preempted:
            got = "nobody was preempted"
            return broken("plan", plan.step, request_id, "a preemption, as its reason says", got)
        if reason.code in ("blocks", "watermark") and reason.need <= reason.free:
            got = f"it needs {reason.need} and {reason.free} are free"
            return broken("plan", plan.step, request_id, f"too few blocks, as the reason {reason.code!r} says", got)
    return Verdict(law="plan")


def promises_are_kept(plan: StepPlan, scheduler: BaseScheduler, rows: Mapping[str, Row], before: set[str]) -> Verdict:
    """What the policy's own base class promises. `before`: who had a row, and was not preempted, before this plan;
    whoever has nothing to compute is not passed over (`reasons_are_true` sees to it that this is so)."""
    tokens = plan.num_scheduled_tokens
    if isinstance(scheduler, PhaseSplitScheduler | ChunkedNoMixScheduler):
        decodes = [i for i in tokens if i in before and rows[i].is_decode]
        if decodes and len(decodes) < len(tokens) and not scheduler.swaps:
            prompt = next(i for i in tokens if i not in decodes)
            return broken("plan", plan.step, prompt, "prompts alone, or decodes alone", f"it runs beside {decodes[0]}")
    if isinstance(scheduler, UnifiedScheduler):
        threshold = scheduler.long_prefill_token_threshold
        for request_id, n in tokens.items():
            missing = rows[request_id].known - rows[request_id].computed
            if n < missing and n != threshold and not plan.preempted and plan.num_tokens < scheduler.budget:
                left = scheduler.budget - plan.num_tokens
                expected = f"as many of its {missing} missing tokens as the budget has room for"
                return broken("plan", plan.step, request_id, expected, f"{n} tokens, with {left} left over")
        idle = {i for i, reason in plan.left_out.items() if reason.code == "nothing_to_compute"}
        skipped = [i for i in rows if i in before and i not in tokens and i not in idle and rows[i].is_decode]
        if skipped and not scheduler.by_priority and not plan.preempted:
            return broken("plan", plan.step, skipped[0], "a token in every step, as it decodes", "nothing in this one")
    return Verdict(law="plan")


# Blocks


def hit_is_legal(request: Request, blocks: KVCacheManager, step: int) -> Verdict:
    """Looking up changes nothing, covers whole blocks, and leaves a token to compute."""
    free = blocks.num_free_blocks
    hit = blocks.lookup(request)
    again: PrefixHit = blocks.lookup(request)
    if again != hit or blocks.num_free_blocks != free:
        got = f"{hit.num_tokens} tokens, then {again.num_tokens}; free blocks went {free} -> {blocks.num_free_blocks}"
        return broken("blocks", step, request.id, "a lookup that changes nothing", got)
    if hit.num_tokens >= request.num_tokens:
        expected = f"a hit of at most {request.num_tokens - 1} of its {request.num_tokens} tokens, so that one is left"
        return broken("blocks", step, request.id, expected, f"a hit of {hit.num_tokens}")
    if hit.num_tokens != len(hit.block_ids) * blocks.block_size:
        expected = f"{len(hit.block_ids)} whole blocks of {blocks.block_size} tokens"
        return broken("blocks", step, request.id, expected, f"a hit of {hit.num_tokens} tokens")
    return Verdict(law="blocks")


def tables_are_right(requests: Iterable[Request], blocks: KVCacheManager, step: int) -> Verdict:
    """As long as its computed tokens need; never the null block; one block twice only where blocks are shared."""
    owners: dict[int, str] = {}
    shares = isinstance(blocks, SharedBlocks | V0CachedBlocks)
    for request in requests:
        table, need = request.block_ids, cdiv(request.num_computed_tokens, blocks.block_size)
        if request.status is Status.RUNNING and len(table) != need:
            expected = f"{need} blocks for {request.num_computed_tokens} computed tokens"
            return broken("blocks", step, request.id, expected, f"{len(table)} blocks")
        if NULL_BLOCK in table:
            return broken("blocks", step, request.id, "no null block in a table", f"table {table}")
        if len(set(table)) < len(table):
            return broken("blocks", step, request.id, "each block once in a table", f"table {table}")
        for block_id in () if shares or request.num_hit_tokens else table:
            other = owners.setdefault(block_id, request.id)
            if other != request.id and not _is_hit(request, block_id, blocks):
                got = f"block {block_id} is in the tables of {other} and {request.id}"
                return broken("blocks", step, request.id, "blocks of its own", got)
    return Verdict(law="blocks")


def _is_hit(request: Request, block_id: int, blocks: KVCacheManager) -> bool:
    """A manager that is none of ours may share, but only what it says it found."""
    return block_id in blocks.lookup(request).block_ids


def references_are_right(requests: Sequence[Request], blocks: SharedBlocks | V0CachedBlocks, step: int) -> Verdict:
    """A block's count is the number of tables that hold it, and what is held is not free."""
    held = Counter(block_id for request in requests for block_id in request.block_ids)
    free = {block.id for block in blocks.pool}
    for request in requests:
        for block_id in request.block_ids:
            ref = blocks.pool.blocks[block_id].ref
            if block_id in free:
                got = "it is in the free queue: whoever comes next will overwrite it"
                expected = f"block {block_id} of its table to be held"
                return broken("blocks", step, request.id, expected, got)
            if ref != held[block_id]:
                expected = f"block {block_id} to count the {held[block_id]} tables that hold it"
                return broken("blocks", step, request.id, expected, f"reference count {ref}")
    return Verdict(law="blocks")


def none_is_lost(
    requests: Sequence[Request], blocks: PrivateBlocks, last_owners: Mapping[int, str], step: int
) -> Verdict:
    """A block that no table holds is one that can be handed out. `last_owners`: block -> who got it last."""
    kept = {block_id for request in requests for block_id in request.block_ids}
    kept |= {block.id for block in blocks.pool}
    kept |= set(blocks._evictable) if isinstance(blocks, V0CachedBlocks) else set()
    for block_id, request_id in last_owners.items():
        if block_id not in kept:
            expected = f"block {block_id}, which it got last, to be in its table or free again"
            return broken("blocks", step, request_id, expected, "it is in neither")
    return Verdict(law="blocks")


# Work


def sampled_when_caught_up(plan: StepPlan, result: StepResult, scheduler: BaseScheduler) -> Verdict:
    """The scheduler counts on a token exactly of the rows that have caught up, by the runner's own count."""
    shares, _ = scheduler._in_flight.get(plan.step, ([], []))
    for share in shares:
        request_id, was_sampled = share.request.id, share.request.id in result.token_ids
        if share.samples and not was_sampled:
            expected = "no token yet: some of its known tokens are not computed"
            return broken("work", plan.step, request_id, expected, "the scheduler takes it for caught up")
        if was_sampled and not share.samples:
            expected = "its token to be counted on, as all its known tokens are computed"
            return broken("work", plan.step, request_id, expected, "the scheduler takes it for a partial prompt")
    return Verdict(law="work")


def work_is_accounted(request_id: str, row: Row | None, num_prompt: int, num_outputs: int, step: int) -> Verdict:
    """At an end that its length brought: all tokens but the last were computed or hit, each once."""
    needed = num_prompt + num_outputs - 1  # the last token is never computed
    if row is not None and row.computed != needed:
        return broken("work", step, request_id, f"{needed} tokens computed or hit", f"{row.computed}")
    return Verdict(law="work")


def cache_is_reachable(
    blocks: SharedBlocks | V0CachedBlocks, chains: Mapping[object, tuple[object, str, int]], step: int
) -> Verdict:
    """A prefix outlives what follows it: a cached block without the one before it is never found again.

    `chains`: hash -> (hash of the block before, a request that has both, index), of every block seen so far."""
    for block_hash in blocks._cached:
        parent, request_id, index = chains.get(block_hash, (HASH_SEED, "", 0))
        if index and parent not in blocks._cached:
            size = blocks.block_size
            expected = f"its prefix to stay cached longer than its tokens {index * size} to {(index + 1) * size - 1}"
            got = f"the block before them was evicted: those {size} tokens take room and can never be hit"
            return broken("work", step, request_id, expected, got)
    return Verdict(law="work")


# Tokens, progress, the end


def tokens_are_those_alone(request_id: str, step: int, num_before: int, new: list[int], alone: list[int]) -> Verdict:
    """`alone`: all that a right engine answers to this request; `num_before`: how many it had before this step."""
    for place, token_id in enumerate(new, num_before):
        if place >= len(alone):
            return broken("tokens", step, request_id, f"an end after {len(alone)} tokens", f"token {place + 1}")
        if token_id != alone[place]:
            expected = f"{alone[place]} as its token {place + 1}"
            return broken("tokens", step, request_id, expected, f"{token_id}")
    return Verdict(law="tokens")


def all_tokens_came(
    request_id: str, step: int, num_tokens: int, alone: list[int], reason: str, is_aborted: bool = False
) -> Verdict:
    """At its end; `reason`: as it was reported, "" where the load is over and none was. `is_aborted`: by the load."""
    if is_aborted and reason == "abort":
        return Verdict(law="tokens")
    if num_tokens != len(alone) or not reason or reason == "abort":
        got = f"{num_tokens}, with reason {reason!r}" if reason else f"{num_tokens}, and no end"
        return broken("tokens", step, request_id, f"{len(alone)} tokens", got)
    return Verdict(law="tokens")


def nothing_comes_after_the_end(request_id: str, step: int, end: str) -> Verdict:
    """`end`: the reason with which it ended before this news of it."""
    law = "returned" if end == "abort" else "tokens"
    if end:
        return broken(law, step, request_id, f"nothing more after its end, with reason {end!r}", "news of it")
    return Verdict(law=law)


def abort_is_an_end(request_id: str, scheduler: BaseScheduler, step: int) -> Verdict:
    """In the step after an abort, and ever after, nothing holds the request."""
    places = {
        "waiting": scheduler.waiting,
        "running": scheduler.running,
        "swapped": scheduler.swapped,
        "requests": scheduler.requests.values(),
    }
    for place, held in places.items():
        if any(request.id == request_id for request in held):
            expected = "an aborted request to be gone in the step after its abort"
            return broken("returned", step, request_id, expected, f"it is still in {place!r}")
    return Verdict(law="returned")


def nothing_is_computed_for(request_id: str, plan: StepPlan) -> Verdict:
    """An aborted request gets no tokens."""
    if n := plan.num_scheduled_tokens.get(request_id):
        return broken("returned", plan.step, request_id, "no tokens for an aborted request", f"{n} tokens")
    return Verdict(law="returned")


def blocks_came_back(blocks: KVCacheManager, last_owners: Mapping[int, str], step: int) -> Verdict:
    """`last_owners`: block -> who got it last."""
    if blocks.num_free_blocks == blocks.num_blocks - 1:
        return Verdict(law="returned")
    free = {block.id for block in blocks.pool} if isinstance(blocks, PrivateBlocks) else set()
    lost = [block_id for block_id in last_owners if block_id not in free]
    owner = last_owners[lost[0]] if free and lost else ""
    expected = f"{blocks.num_blocks - 1} free blocks when all have ended"
    return broken("returned", step, owner, expected, f"{blocks.num_free_blocks}")
