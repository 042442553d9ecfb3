"""What must hold between any two steps, as assertions with values. Checked in debug mode, by tests and by graders.

Knows the schedulers and block managers from outside; changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from nanoserve.block_pool import NULL_BLOCK, cdiv
from nanoserve.blocks import HASH_SEED, PrivateBlocks, SharedBlocks, V0CachedBlocks
from nanoserve.request import Request, Status, StepPlan, StepResult

if TYPE_CHECKING:
    from nanoserve.blocks import KVCacheManager
    from nanoserve.scheduler import BaseScheduler


def check_plan(plan: StepPlan, scheduler: BaseScheduler) -> None:
    """Within budget and seats, every count positive, a hit leaves a token to compute, and whoever gets nothing is told
    why. Some progress, unless a step in flight makes it. Of the plan made last: whoever came since is not in it."""
    tokens, step = plan.num_scheduled_tokens, plan.step
    assert plan.num_tokens <= scheduler.budget, f"step {step}: {plan.num_tokens} tokens > {scheduler.budget}"
    assert len(tokens) <= scheduler.max_num_seqs, f"step {step}: {len(tokens)} > {scheduler.max_num_seqs} seats"
    assert all(n > 0 for n in tokens.values()), f"step {step}: empty rows in {tokens}"
    for new in plan.new:
        computed, n, known = new.num_computed_tokens, tokens[new.id], len(new.token_ids)
        assert computed + n <= known, f"step {step}: {new.id} has {computed} + {n} tokens of {known}"
    assert not tokens.keys() & plan.left_out.keys(), f"step {step}: {tokens.keys() & plan.left_out.keys()}"
    unexplained = scheduler.requests.keys() - tokens.keys() - plan.left_out.keys()
    assert not unexplained, f"step {step} does not say why {unexplained} got nothing"
    in_flight = any(request.num_placeholders for request in scheduler.requests.values())
    progress = tokens or plan.preempted or plan.finished or not plan.left_out or in_flight
    assert progress, f"step {step} makes no progress: {plan.left_out}"


def check_result(plan: StepPlan, result: StepResult, scheduler: BaseScheduler) -> None:
    """The runner sampled for exactly the rows that the scheduler took for caught up. To be called before `update`."""
    shares, _ = scheduler._in_flight[plan.step]
    promised = {share.request.id for share in shares if share.samples}
    sampled = set(result.token_ids)
    assert sampled == promised, f"step {plan.step}: {sampled} were sampled, {promised} had caught up"


def check_queues(scheduler: BaseScheduler) -> None:
    """Every live request is in exactly one queue, with the status of that queue, and waits for as many tokens as the
    steps in flight will sample for it."""
    waiting, running, swapped = list(scheduler.waiting), scheduler.running, list(scheduler.swapped)
    ids = [request.id for request in (*waiting, *running, *swapped)]
    assert Counter(ids) == Counter(list(scheduler.requests)), f"queues hold {ids}, alive are {list(scheduler.requests)}"
    assert len(running) <= scheduler.max_num_seqs, f"{len(running)} running > {scheduler.max_num_seqs}"
    shares = chain.from_iterable(shares for shares, _ in scheduler._in_flight.values())
    promised = Counter(share.request for share in shares if share.samples)
    expected = {Status.WAITING: waiting, Status.PREEMPTED: waiting, Status.RUNNING: running, Status.SWAPPED: swapped}
    for request in scheduler.requests.values():
        assert any(r is request for r in expected[request.status]), f"{request.id} is {request.status.name} elsewhere"
        computed, known, coming = request.num_computed_tokens, request.num_tokens, request.num_placeholders
        assert computed <= known + coming, f"{request.id}: computed {computed} of {known} tokens"
        assert coming == promised[request], f"{request.id}: {coming} placeholders, {promised[request]} are sampled"
        if request.status in (Status.WAITING, Status.PREEMPTED):
            assert computed == 0, f"{request.id} waits with {computed} computed tokens"
            assert not request.block_ids, f"{request.id} waits with blocks {request.block_ids}"


def check_blocks(blocks: KVCacheManager, requests: Iterable[Request], max_model_len: int) -> None:
    """Tables, reference counts, the free queue and the hash map agree with each other and with the tokens."""
    assert isinstance(blocks, PrivateBlocks)
    requests = list(requests)
    held = Counter(block_id for request in requests for block_id in request.block_ids)
    queue = [block.id for block in blocks.pool]
    evictable = list(blocks._evictable) if isinstance(blocks, V0CachedBlocks) else []
    free = queue + evictable
    assert len(set(free)) == len(free) == blocks.num_free_blocks, f"free queue {free}, {blocks.num_free_blocks} counted"
    assert NULL_BLOCK not in held, "the null block is in a table"
    assert NULL_BLOCK not in free, "the null block is free"
    assert blocks.pool.blocks[NULL_BLOCK].block_hash is None, "the null block is hashed"
    assert not held.keys() & set(free), f"held and free: {held.keys() & set(free)}"
    assert len(held) + len(free) == blocks.num_blocks - 1, f"{len(held)} held + {len(free)} free of {blocks.num_blocks}"
    if isinstance(blocks, SharedBlocks | V0CachedBlocks):
        refs = {block.id: block.ref for block in blocks.pool.blocks if block.ref}
        assert refs == dict(held), f"reference counts {refs}, tables hold {dict(held)}"
    else:
        assert all(n == 1 for n in held.values()), f"shared private blocks: {held}"
    for request in requests:
        _check_table(request, blocks.block_size, max_model_len)
    if isinstance(blocks, SharedBlocks | V0CachedBlocks):
        _check_hash_map(blocks, requests)
    _check_host_tables(blocks, requests)


def _check_table(request: Request, block_size: int, max_model_len: int) -> None:
    if request.status is Status.RUNNING:
        num_blocks = len(request.block_ids)
        expected = cdiv(request.num_computed_tokens, block_size)
        assert num_blocks == expected, f"{request.id}: {num_blocks} blocks, {request.num_computed_tokens} tokens"
        assert num_blocks <= cdiv(max_model_len, block_size), f"{request.id}: {num_blocks} blocks"
        cached = request.num_cached_blocks
        assert cached <= request.num_computed_tokens // block_size, f"{request.id}: {cached} cached blocks"
        known = request.num_tokens
        assert cached <= known // block_size, f"{request.id}: {cached} cached blocks, {known} known tokens"


def _check_hash_map(blocks: SharedBlocks | V0CachedBlocks, requests: list[Request]) -> None:
    parent: Any
    if isinstance(blocks, SharedBlocks):
        seed, in_map = HASH_SEED, {block_id: key for key, same in blocks._cached.items() for block_id in same}
    else:
        seed, in_map = 0, {block.id: key for key, block in blocks._cached.items()}
    in_blocks = {block.id: block.block_hash for block in blocks.pool.blocks if block.block_hash is not None}
    assert in_map == in_blocks, f"hash map {in_map.keys()}, hashed blocks {in_blocks.keys()}"
    for request in requests:
        parent = seed
        for i in range(request.num_cached_blocks):
            parent = blocks.hash_block(request, i, parent)
            found = blocks.pool.blocks[request.block_ids[i]].block_hash
            assert found == parent, f"{request.id}: block {request.block_ids[i]} is hashed for other tokens"


def _check_host_tables(blocks: PrivateBlocks, requests: list[Request]) -> None:
    swapped = {request.id for request in requests if request.status is Status.SWAPPED}
    tables = blocks._host_tables
    assert tables.keys() == swapped, f"host tables of {set(tables)}, swapped are {swapped}"
    host = [*blocks._free_host, *chain.from_iterable(tables.values())]
    assert len(set(host)) == len(host), f"host blocks {host} have two owners"
