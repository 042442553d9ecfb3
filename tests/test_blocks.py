"""Laws of the block managers: worked examples, purity and atomicity, sharing, eviction, hashes."""

from __future__ import annotations

import copy
import hashlib
from array import array

import pytest

from nanoserve.block_pool import NO_HIT, BlockPool, PrefixHit, cdiv
from nanoserve.blocks import HASH_SEED, PrivateBlocks, SharedBlocks, V0CachedBlocks
from nanoserve.config import SEAMS
from nanoserve.invariants import check_blocks
from nanoserve.request import ExtraKey, Request, SamplingParams, Status

BLOCK_SIZE = 16
MANAGERS = list(SEAMS["blocks"].values())
PREFIX = list(range(100, 148))  # three blocks


def request(request_id: str, tokens: list[int], **fields) -> Request:
    return Request(
        id=request_id,
        params=SamplingParams(),
        num_prompt_tokens=len(tokens),
        max_tokens=16,
        token_ids=list(tokens),
        **fields,
    )


def compute(blocks, r: Request, num_tokens: int | None = None) -> list[int] | None:
    """Admit or continue a request the way a scheduler does, and run its step. Returns the new blocks."""
    hit = blocks.lookup(r) if not r.block_ids else NO_HIT
    n = (r.num_tokens - r.num_computed_tokens - hit.num_tokens) if num_tokens is None else num_tokens
    new = blocks.allocate(r, n, hit)
    if new is not None:
        r.status = Status.RUNNING
        r.num_computed_tokens += hit.num_tokens + n
        blocks.commit(r, r.num_computed_tokens)
    return new


def finish(blocks, r: Request) -> None:
    r.status = Status.FINISHED_STOPPED
    blocks.free(r)


def queue(blocks) -> list[int]:
    return [block.id for block in blocks.pool]


def snapshot(blocks, *requests: Request):
    """Everything observable, to see that nothing changed."""
    return (
        queue(blocks),
        [(b.ref, b.block_hash) for b in blocks.pool.blocks],
        blocks.num_free_blocks,
        copy.copy(blocks.stats),
        [(list(r.block_ids), r.num_cached_blocks, r.num_computed_tokens) for r in requests],
    )


# The pool


def test_the_free_queue_hands_out_in_order_and_never_the_null_block():
    pool = BlockPool(5)
    assert [pool.pop().id for _ in range(4)] == [1, 2, 3, 4]
    assert pool.num_free == 0
    pool.append(pool.blocks[3])
    pool.append(pool.blocks[1])
    pool.prepend(pool.blocks[2])
    assert [b.id for b in pool] == [2, 3, 1]
    pool.remove(pool.blocks[3])
    assert [b.id for b in pool] == [2, 1]
    assert pool.num_free == 2


def test_a_block_is_never_freed_twice_and_the_null_block_never_at_all():
    pool = BlockPool(3)
    block = pool.pop()
    pool.append(block)
    with pytest.raises(AssertionError, match="block 1 is freed twice"):
        pool.append(block)
    with pytest.raises(AssertionError, match="null block"):
        pool.append(pool.blocks[0])
    pool.pop(), pool.pop()
    with pytest.raises(AssertionError, match="empty pool"):
        pool.pop()
    with pytest.raises(AssertionError, match="not in the free queue"):
        pool.remove(block)


# Worked numbers: blocks of 16, a pool of 11


@pytest.mark.parametrize(
    ("free_order", "after", "block_of_c"),
    [
        ("uncached_first", [5, 4, 6, 7, 8, 9, 10, 3, 2, 1], 5),
        ("append", [6, 7, 8, 9, 10, 4, 5, 3, 2, 1], 6),
    ],
)
def test_the_worked_example_of_two_requests_with_one_prefix(free_order, after, block_of_c):
    blocks = SharedBlocks(11, BLOCK_SIZE, free_order=free_order)
    a = request("a", PREFIX + [1] * 7)
    assert compute(blocks, a) == [1, 2, 3, 4]
    assert [blocks.pool.blocks[i].block_hash is not None for i in (1, 2, 3, 4)] == [True, True, True, False]
    b = request("b", PREFIX + [2] * 5)
    assert blocks.lookup(b) == PrefixHit((1, 2, 3), 48)
    assert compute(blocks, b) == [5]
    assert [blocks.pool.blocks[i].ref for i in range(1, 6)] == [2, 2, 2, 1, 1]
    assert blocks.num_free_blocks == 5
    finish(blocks, a)
    finish(blocks, b)
    assert queue(blocks) == after
    c = request("c", PREFIX + [3] * 6)
    assert compute(blocks, c) == [block_of_c]
    assert c.block_ids == [1, 2, 3, block_of_c]
    assert blocks.num_free_blocks == 6
    finish(blocks, c)
    order = queue(blocks)
    d = request("d", list(range(500, 660)))
    assert compute(blocks, d) == order
    assert blocks.num_free_blocks == 0


def test_thirty_thousand_tokens_for_a_thousand_sessions_are_one_set_of_blocks():
    prefix, own = list(range(30_000)), 100
    blocks = SharedBlocks(8876, BLOCK_SIZE)
    sessions = [request(f"s{i}", prefix + [40_000 + i] * own) for i in range(1000)]
    assert len(compute(blocks, sessions[0]) or []) == 1882
    for session in sessions[1:]:  # the same hashes; computing them again is not what is tested
        session.block_hashes = sessions[0].block_hashes[:1875]
    assert all(len(compute(blocks, s) or []) == 7 for s in sessions[1:])
    assert blocks.num_free_blocks == 0
    assert all(blocks.pool.blocks[i].ref == 1000 for i in sessions[0].block_ids[:1875])
    private = PrivateBlocks(8876, BLOCK_SIZE)
    admitted = [compute(private, request(s.id, s.token_ids)) is not None for s in sessions[:10]]
    assert sum(admitted) == 4


# Lookup is pure, allocate is atomic


@pytest.mark.parametrize("manager", MANAGERS)
def test_lookup_and_demand_change_nothing(manager):
    blocks = manager(11, BLOCK_SIZE)
    a = request("a", PREFIX + [1] * 7)
    compute(blocks, a)
    finish(blocks, a)
    b = request("b", PREFIX + [2] * 5)
    blocks.lookup(b)  # the first may compute hashes
    before = snapshot(blocks, a, b)
    hit = blocks.lookup(b)
    blocks.demand(b, 5, hit, reserve_tokens=60)
    blocks.fits(10_000)
    assert snapshot(blocks, a, b) == before


@pytest.mark.parametrize("manager", MANAGERS)
def test_allocate_takes_all_or_changes_nothing(manager):
    blocks = manager(8, BLOCK_SIZE)
    a = request("a", PREFIX + [1] * 7)
    compute(blocks, a)
    finish(blocks, a)
    filler = request("f", list(range(300, 340)))
    compute(blocks, filler)
    b = request("b", PREFIX + [2] * 50)
    hit = blocks.lookup(b)
    before = snapshot(blocks, a, b, filler)
    assert blocks.allocate(b, b.num_tokens - hit.num_tokens, hit) is None
    assert blocks.allocate(b, 1, hit, reserve_tokens=b.num_tokens) is None
    assert blocks.allocate(b, 1, hit, watermark_blocks=7) is None
    assert snapshot(blocks, a, b, filler) == before


def test_a_hit_that_nobody_holds_counts_as_a_free_block_that_is_used_up():
    blocks = SharedBlocks(5, BLOCK_SIZE)  # four usable
    a = request("a", [*PREFIX, 1])
    compute(blocks, a)
    finish(blocks, a)
    b = request("b", PREFIX + [2] * 20)  # three hits out of the four free blocks, two more needed
    hit = blocks.lookup(b)
    assert hit.num_tokens == 48
    assert blocks.demand(b, 20, hit) == 5
    assert blocks.allocate(b, 20, hit) is None
    assert blocks.allocate(b, 16, hit) == [4]


@pytest.mark.parametrize("manager", MANAGERS)
def test_nothing_is_allocated_for_nothing(manager):
    with pytest.raises(AssertionError, match="nothing to allocate"):
        manager(5, BLOCK_SIZE).allocate(request("a", PREFIX), 0)


# The last token is always computed


@pytest.mark.parametrize("manager", [V0CachedBlocks, SharedBlocks])
@pytest.mark.parametrize(("length", "hit_tokens"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)])
def test_a_hit_leaves_at_least_one_token_to_compute(manager, length, hit_tokens):
    blocks = manager(11, BLOCK_SIZE)
    a = request("a", PREFIX + [1] * 7)
    compute(blocks, a)
    assert blocks.lookup(request("b", PREFIX[:length])).num_tokens == hit_tokens


# Hashes


def chain(blocks: SharedBlocks, r: Request) -> list[bytes]:
    return list(blocks._extend_hashes(r, r.num_tokens // BLOCK_SIZE))


def test_a_block_hash_digests_its_whole_prefix():
    blocks = SharedBlocks(11, BLOCK_SIZE)
    a = chain(blocks, request("a", PREFIX))
    other = [7, *PREFIX[1:]]
    assert chain(blocks, request("b", PREFIX)) == a
    assert all(x != y for x, y in zip(a, chain(blocks, request("c", other)), strict=True))
    swapped = PREFIX[16:32] + PREFIX[:16] + PREFIX[32:]  # the same blocks in another order
    assert not set(a) & set(chain(blocks, request("d", swapped)))


def test_a_salt_enters_block_zero_and_every_later_block_through_its_parent():
    blocks = SharedBlocks(11, BLOCK_SIZE)
    plain = chain(blocks, request("a", PREFIX))
    salted = chain(blocks, request("b", PREFIX, cache_salt="tenant"))
    assert not set(plain) & set(salted)
    assert chain(blocks, request("c", PREFIX, cache_salt="")) == plain
    assert chain(blocks, request("d", PREFIX, cache_salt="tenant")) == salted
    assert not set(chain(blocks, request("e", PREFIX, cache_salt="other"))) & set(salted)


def test_an_adapter_enters_every_block_and_a_span_the_blocks_it_overlaps():
    blocks = SharedBlocks(11, BLOCK_SIZE)
    plain = chain(blocks, request("a", PREFIX))
    adapter = chain(blocks, request("b", PREFIX, extra_keys=(ExtraKey("adapter", "x"),)))
    assert not set(plain) & set(adapter)
    image = chain(blocks, request("c", PREFIX, extra_keys=(ExtraKey("image", "y", 20, 30),)))
    assert [x == y for x, y in zip(plain, image, strict=True)] == [True, False, False]
    moved = chain(blocks, request("d", PREFIX, extra_keys=(ExtraKey("image", "y", 21, 31),)))
    assert moved[1] != image[1]
    tagged = chain(blocks, request("e", PREFIX, extra_keys=(ExtraKey("audio", "y", 20, 30),)))
    assert tagged[1] != image[1]


def test_hashes_are_the_same_in_every_process():
    expected, parent = [], HASH_SEED
    for i in range(3):
        parent = hashlib.sha256(parent + array("q", PREFIX[16 * i : 16 * i + 16]).tobytes()).digest()
        expected.append(parent)
    assert chain(SharedBlocks(11, BLOCK_SIZE), request("a", PREFIX)) == expected
    assert HASH_SEED.hex().startswith(hashlib.sha256(b"nanoserve block hash, version 1").hexdigest())


@pytest.mark.parametrize("manager", [V0CachedBlocks, SharedBlocks])
def test_a_salted_request_never_shares_with_another_salt(manager):
    blocks = manager(20, BLOCK_SIZE)
    compute(blocks, request("a", [*PREFIX, 1], cache_salt="one"))
    assert blocks.lookup(request("b", [*PREFIX, 1], cache_salt="two")) == NO_HIT
    assert blocks.lookup(request("c", [*PREFIX, 1])) == NO_HIT


@pytest.mark.parametrize("manager", [V0CachedBlocks, SharedBlocks])
def test_a_request_that_skips_the_cache_still_feeds_it(manager):
    blocks = manager(20, BLOCK_SIZE)
    compute(blocks, request("a", [*PREFIX, 1], skip_cache_read=True))
    assert blocks.lookup(request("b", [*PREFIX, 1])).num_tokens == 48
    c = request("c", [*PREFIX, 1], skip_cache_read=True)
    assert blocks.lookup(c) == NO_HIT
    assert blocks.stats.requests == 0  # neither asked


def test_outputs_are_cached_too():
    blocks = SharedBlocks(20, BLOCK_SIZE)
    a = request("a", PREFIX[:20])
    compute(blocks, a)
    for token_id in PREFIX[20:40]:
        a.token_ids.append(token_id)
        compute(blocks, a)
    finish(blocks, a)
    assert blocks.lookup(request("b", PREFIX)).num_tokens == 32


# Sharing within a step, and taking it back


def test_requests_of_one_step_share_blocks():
    blocks = SharedBlocks(20, BLOCK_SIZE)
    a, b = request("a", [*PREFIX, 1]), request("b", [*PREFIX, 2])
    assert blocks.allocate(a, 49, blocks.lookup(a)) is not None  # its step has not run
    assert blocks.lookup(b).num_tokens == 48
    v0 = V0CachedBlocks(20, BLOCK_SIZE)
    a, b = request("a", [*PREFIX, 1]), request("b", [*PREFIX, 2])
    assert v0.allocate(a, 49) is not None
    assert v0.lookup(b) == NO_HIT
    a.num_computed_tokens = 49
    v0.commit(a, 49)
    assert v0.lookup(b).num_tokens == 48


def test_forgotten_blocks_are_never_hit():
    blocks = SharedBlocks(20, BLOCK_SIZE)
    a = request("a", [*PREFIX, 1])
    compute(blocks, a, num_tokens=20)  # one full block exists
    assert blocks.allocate(a, 29) is not None  # two more are promised
    assert blocks.lookup(request("b", [*PREFIX, 2])).num_tokens == 48
    blocks.forget(a, a.num_computed_tokens)
    blocks.free(a)
    assert blocks.lookup(request("c", [*PREFIX, 2])).num_tokens == 16
    check_blocks(blocks, [], 4096)


def test_two_equal_blocks_both_stay_and_the_older_is_handed_out():
    blocks = SharedBlocks(20, BLOCK_SIZE)
    a, b = request("a", [*PREFIX[:16], 1], skip_cache_read=True), request("b", [*PREFIX[:16], 2], skip_cache_read=True)
    compute(blocks, a), compute(blocks, b)
    assert a.block_ids[0] != b.block_ids[0]
    c = request("c", [*PREFIX[:16], 3])
    assert blocks.lookup(c).block_ids == (a.block_ids[0],)
    first, second = a.block_ids[0], b.block_ids[0]
    finish(blocks, a)
    finish(blocks, b)
    eater = request("e", list(range(900, 900 + 16 * 17)))
    compute(blocks, eater)  # 17 of 19: everything but the two, oldest cached first
    assert blocks.lookup(c).block_ids == (first,)
    compute(blocks, request("f", list(range(2000, 2010))))
    assert blocks.lookup(c).block_ids == (second,)


# v0's cache


def test_v0_replaces_a_block_that_turns_out_equal():
    blocks = V0CachedBlocks(20, BLOCK_SIZE)
    a, b = request("a", [*PREFIX, 1]), request("b", [*PREFIX, 2])
    assert blocks.allocate(a, 49) == [1, 2, 3, 4]
    assert blocks.allocate(b, 49) == [5, 6, 7, 8]
    a.num_computed_tokens = b.num_computed_tokens = 49
    blocks.commit(a, 49)
    blocks.commit(b, 49)
    assert blocks.take_replaced() == {"b": [(0, 1), (1, 2), (2, 3)]}
    assert blocks.take_replaced() == {}
    assert b.block_ids == [1, 2, 3, 8]
    assert blocks.num_free_blocks == 14
    a.status = b.status = Status.RUNNING
    check_blocks(blocks, [a, b], 4096)


def test_v0_admission_is_blind_to_hits_and_v1_is_not():
    for manager, admitted in ((V0CachedBlocks, False), (SharedBlocks, True)):
        blocks = manager(7, BLOCK_SIZE)  # six usable, four held by a, three of them would be hits
        a, b = request("a", [*PREFIX, 1]), request("b", [*PREFIX, 2])
        compute(blocks, a)
        hit = blocks.lookup(b)
        assert hit.num_tokens == 48
        assert (blocks.allocate(b, 1, hit) is not None) is admitted


def test_v0_evicts_the_least_recently_used_and_of_one_age_the_deepest():
    blocks = V0CachedBlocks(9, BLOCK_SIZE)
    a = request("a", PREFIX)
    b = request("b", list(range(700, 732)))
    compute(blocks, a), compute(blocks, b)
    b.token_ids.append(1)
    compute(blocks, b)  # b is younger
    a_table, b_table = list(a.block_ids), list(b.block_ids)
    finish(blocks, b), finish(blocks, a)
    new = compute(blocks, request("c", list(range(800, 880))))
    assert new is not None
    unhashed = b_table[2]
    assert set(new[:3]) >= {unhashed}
    assert new[3:] == [a_table[2], a_table[1]]
    assert blocks.lookup(request("d", [*PREFIX, 1])).num_tokens == 16
    assert blocks.lookup(request("e", [*range(700, 732), 1])).num_tokens == 32


def hits_while_evicting(manager) -> list[int]:
    """Tokens of a freed prefix of three blocks that are still cached, as the blocks are taken away one by one."""
    blocks = manager(6, BLOCK_SIZE)
    a = request("a", [*PREFIX, 1])
    compute(blocks, a)
    finish(blocks, a)
    hits = []
    for i in range(5):
        hits.append(blocks.lookup(request("b", [*PREFIX, 2])).num_tokens)
        compute(blocks, request(f"e{i}", [900 + i]))
    return hits


@pytest.mark.parametrize("manager", [V0CachedBlocks, SharedBlocks])
def test_a_prefix_is_evicted_from_its_end(manager):
    assert hits_while_evicting(manager) == [48, 48, 48, 32, 16]


def test_the_eviction_order_of_v0_does_not_grow_with_every_hit():
    blocks = V0CachedBlocks(6, BLOCK_SIZE)
    for i in range(100):
        r = request(f"r{i}", [*PREFIX, i])
        compute(blocks, r)
        finish(blocks, r)
    assert len(blocks._eviction_order) <= 4 * 6
    assert len(compute(blocks, request("e", list(range(900, 980)))) or []) == 5  # all of it can still be evicted


# Swapping


def test_a_swapped_request_gets_its_blocks_back_and_the_host_its_own():
    blocks = PrivateBlocks(6, BLOCK_SIZE, num_swap_blocks=4)
    a = request("a", PREFIX)
    compute(blocks, a)
    assert blocks.swap_out(a) == [(1, 6), (2, 7), (3, 8)]
    assert a.block_ids == []
    assert blocks.num_free_blocks == 5
    b = request("b", list(range(32)))
    compute(blocks, b)
    assert blocks.swap_out(b) is None  # one host block is left
    assert len(b.block_ids) == 2
    pairs = blocks.swap_in(a)
    assert pairs is not None
    assert [host for host, _ in pairs] == [6, 7, 8]
    assert [device for _, device in pairs] == a.block_ids
    assert blocks.swap_out(b) is not None
    c = request("c", list(range(20)))
    compute(blocks, c)
    assert blocks.swap_in(b) is None
    finish(blocks, a), finish(blocks, b), finish(blocks, c)
    assert blocks.num_free_blocks == 5
    assert len(blocks._free_host) == 4


# Reset, events, statistics


@pytest.mark.parametrize("manager", MANAGERS)
def test_reset_empties_the_cache_only_when_nothing_is_held(manager):
    blocks = manager(11, BLOCK_SIZE)
    a = request("a", [*PREFIX, 1])
    compute(blocks, a)
    before = snapshot(blocks, a)
    assert not blocks.reset()
    assert snapshot(blocks, a) == before
    finish(blocks, a)
    assert blocks.reset()
    assert blocks.lookup(request("b", [*PREFIX, 2])) == NO_HIT
    assert blocks.num_free_blocks == 10
    check_blocks(blocks, [], 4096)


@pytest.mark.parametrize("manager", [V0CachedBlocks, SharedBlocks])
def test_events_tell_the_cache_contents(manager):
    """Whoever follows the events knows which blocks are cached."""
    blocks = manager(8, BLOCK_SIZE)
    blocks.record_events = True
    cached: set[int] = set()
    kinds: set[str] = set()

    def follow() -> None:
        for event in blocks.take_events():
            kinds.add(event.kind)
            if event.kind == "stored":
                assert len(event.hashes) == len(event.block_ids)
                assert len(event.token_ids) == len(event.hashes) * event.block_size
                cached.update(event.block_ids)
            elif event.kind == "removed":
                cached.difference_update(event.block_ids)
            else:
                cached.clear()
        assert cached == {b.id for b in blocks.pool.blocks if b.block_hash is not None}

    for i in range(12):
        r = request(f"r{i}", [*range(i % 5 * 100, i % 5 * 100 + 40)])
        compute(blocks, r)
        follow()
        finish(blocks, r)
        follow()
    r = request("f", [*range(900, 940)])
    blocks.allocate(r, 40)
    blocks.forget(r, 20)  # its step will not run
    follow()
    blocks.free(r)
    blocks.reset()
    follow()
    assert blocks.take_events() == []
    assert kinds == {"stored", "removed", "cleared"}


def test_a_preempted_request_counts_apart_in_the_statistics():
    blocks = SharedBlocks(20, BLOCK_SIZE)
    a = request("a", [*PREFIX, 1])
    compute(blocks, a)
    assert (blocks.stats.requests, blocks.stats.queried_tokens, blocks.stats.hit_tokens) == (1, 49, 0)
    blocks.free(a)
    a.num_computed_tokens, a.num_preemptions = 0, 1
    compute(blocks, a)
    assert (blocks.stats.requests, blocks.stats.hit_rate) == (1, 0.0)
    assert (blocks.stats.preempted_requests, blocks.stats.preempted_hit_tokens) == (1, 48)
    compute(blocks, request("b", [*PREFIX, 2]))
    assert blocks.stats.hit_rate == 48 / 98


@pytest.mark.parametrize("manager", MANAGERS)
def test_fits_counts_the_watermark_and_not_the_null_block(manager):
    blocks = manager(11, BLOCK_SIZE, watermark_blocks=2)
    assert blocks.fits(8 * BLOCK_SIZE)
    assert not blocks.fits(8 * BLOCK_SIZE + 1)
    assert cdiv(33, 16) == 3


# Planted bugs die


def test_a_reference_count_that_forgets_a_hit_is_caught():
    class ForgetsToTouch(SharedBlocks):
        def _hold(self, block):
            pass

    blocks = ForgetsToTouch(11, BLOCK_SIZE)
    a, b = request("a", [*PREFIX, 1]), request("b", [*PREFIX, 2])
    compute(blocks, a), compute(blocks, b)
    with pytest.raises(AssertionError, match="reference counts"):
        check_blocks(blocks, [a, b], 4096)


def test_a_prefix_that_is_freed_head_first_is_caught():
    class HeadFirst(SharedBlocks):
        def free(self, request):
            request.block_ids.reverse()
            super().free(request)

    assert hits_while_evicting(HeadFirst) == [48, 48, 48, 0, 0]


def test_a_hash_without_its_parent_is_caught():
    class NoParent(SharedBlocks):
        def _extend_hashes(self, r, num_full):
            for i in range(len(r.block_hashes), num_full):
                r.block_hashes.append(self.hash_block(r, i, b"0" * 32))
            return r.block_hashes

    blocks = NoParent(11, BLOCK_SIZE)
    a = request("a", [*PREFIX, 1])
    compute(blocks, a)
    with pytest.raises(AssertionError, match="hashed for other tokens"):
        check_blocks(blocks, [a], 4096)


def test_a_double_free_is_caught():
    blocks = SharedBlocks(11, BLOCK_SIZE)
    a = request("a", [*PREFIX, 1])
    compute(blocks, a)
    table = list(a.block_ids)
    finish(blocks, a)
    a.block_ids = table
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.free(a)
