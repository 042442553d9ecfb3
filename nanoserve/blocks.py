"""KV blocks: who holds which block of the cache, and what can be shared. Shift 3 of vLLM v1.

Owns block tables, reference counts, hashes and the free queue; knows block ids and token ids only, no tensors
and no policy. v0: a private copy per request (`PrivateBlocks`), or the opt-in cache bolted on later
(`V0CachedBlocks`: tables change, admission is blind to hits). v1: content-hashed, reference-counted, shared
blocks in append-only tables (`SharedBlocks`). Laws: tests/test_blocks.py.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from typing import ClassVar, Protocol

import msgspec

from nanoserve.block_pool import NO_HIT, Block, BlockEvent, BlockPool, PrefixCacheStats, PrefixHit, cdiv
from nanoserve.request import ExtraKey, Request

HASH_SEED = hashlib.sha256(b"nanoserve block hash, version 1").digest()


class KVCacheManager(Protocol):
    """The seam between a scheduler and the blocks. A full cache is not an error: `allocate` returns None."""

    can_swap: ClassVar[bool]
    block_size: int
    num_blocks: int
    stats: PrefixCacheStats

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        watermark_blocks: int = 0,
        free_order: str = "uncached_first",
        num_swap_blocks: int = 0,
    ) -> None: ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now, cached ones that nobody holds included."""
        ...

    def lookup(self, request: Request) -> PrefixHit:
        """Pure: longest cached prefix that leaves at least one token to compute."""
        ...

    def fits(self, num_tokens: int) -> bool:
        """Pure: could that many tokens ever be held, by a request alone in the pool, watermark included?"""
        ...

    def demand(self, request: Request, num_new_tokens: int, hit: PrefixHit = NO_HIT, *, reserve_tokens: int = 0) -> int:
        """Pure: free blocks that the same call of `allocate` would require. `reserve_tokens`: also demand room for a
        request of that length, without taking it."""
        ...

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        hit: PrefixHit = NO_HIT,
        *,
        reserve_tokens: int = 0,
        watermark_blocks: int = 0,
    ) -> list[int] | None:
        """Atomic: slots for tokens up to `num_computed + hit + new`, appended to `request.block_ids` after the hit's
        blocks. Returns the newly popped blocks, or None with nothing changed."""
        ...

    def commit(self, request: Request, num_computed_tokens: int) -> None:
        """The step that brought the request to that many computed tokens has run: their KV exists now, and so do their
        ids. `request.num_computed_tokens` may be further on."""
        ...

    def forget(self, request: Request, num_computed_tokens: int) -> None:
        """The KV from that token on will not be written after all: no later lookup may find it."""
        ...

    def free(self, request: Request) -> None:
        """Give back all blocks, tail first, so that a prefix is evicted last. Legal when it holds none, and while a
        step in flight still writes to them: a runner executes plans in order, so whoever gets them writes later."""
        ...

    def swap_out(self, request: Request) -> list[tuple[int, int]] | None:
        """Move its blocks to the host: (device, host) pairs; None with nothing changed when the host has no room."""
        ...

    def swap_in(self, request: Request) -> list[tuple[int, int]] | None:
        """The way back: (host, device) pairs; None with nothing changed when the device has no room."""
        ...

    def take_events(self) -> list[BlockEvent]:
        """Events since the last call, in order."""
        ...

    def take_replaced(self) -> dict[str, list[tuple[int, int]]]:
        """Table entries that changed since the last call: request id -> (index, new block id)."""
        ...

    def reset(self) -> bool:
        """Empty the prefix cache; False with nothing changed while any block is held."""
        ...


class PrivateBlocks:
    """v0's default: every request has its own copy of every block. A plain free queue, no reference counts.

    The one manager that can swap, since no block has two owners. Host block i has the id `num_blocks + i`.
    """

    can_swap: ClassVar[bool] = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        watermark_blocks: int = 0,
        free_order: str = "uncached_first",
        num_swap_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.watermark_blocks = watermark_blocks
        self.uncached_first = free_order == "uncached_first"
        self.pool = BlockPool(num_blocks)
        self.stats = PrefixCacheStats()
        self.record_events = False
        self._events: list[BlockEvent] = []
        self._free_host = list(range(num_blocks + num_swap_blocks - 1, num_blocks - 1, -1))
        self._host_tables: dict[str, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def lookup(self, request: Request) -> PrefixHit:
        return NO_HIT

    def fits(self, num_tokens: int) -> bool:
        return cdiv(num_tokens, self.block_size) + self.watermark_blocks <= self.num_blocks - 1

    def demand(self, request: Request, num_new_tokens: int, hit: PrefixHit = NO_HIT, *, reserve_tokens: int = 0) -> int:
        end = max(request.num_computed_tokens + num_new_tokens, reserve_tokens)
        return max(0, cdiv(end, self.block_size) - len(request.block_ids))

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        hit: PrefixHit = NO_HIT,
        *,
        reserve_tokens: int = 0,
        watermark_blocks: int = 0,
    ) -> list[int] | None:
        assert num_new_tokens > 0, f"request {request.id}: nothing to allocate for"
        demand = self.demand(request, num_new_tokens, reserve_tokens=reserve_tokens)
        if demand + watermark_blocks > self.num_free_blocks:
            return None
        new = [self.pool.pop().id for _ in range(self.demand(request, num_new_tokens))]
        request.block_ids += new
        return new

    def commit(self, request: Request, num_computed_tokens: int) -> None:
        pass

    def forget(self, request: Request, num_computed_tokens: int) -> None:
        pass

    def free(self, request: Request) -> None:
        for block_id in reversed(request.block_ids):
            self._put_back(self.pool.blocks[block_id])
        request.block_ids = []
        self._free_host += reversed(self._host_tables.pop(request.id, []))

    def _put_back(self, block: Block) -> None:
        if self.uncached_first:
            self.pool.prepend(block)
        else:
            self.pool.append(block)

    def swap_out(self, request: Request) -> list[tuple[int, int]] | None:
        table = request.block_ids
        if len(table) > len(self._free_host):
            return None
        host = [self._free_host.pop() for _ in table]
        self.free(request)
        self._host_tables[request.id] = host
        return list(zip(table, host, strict=True))

    def swap_in(self, request: Request) -> list[tuple[int, int]] | None:
        host = self._host_tables[request.id]
        if len(host) > self.num_free_blocks:
            return None
        del self._host_tables[request.id]
        request.block_ids = [self.pool.pop().id for _ in host]
        self._free_host += reversed(host)
        return list(zip(host, request.block_ids, strict=True))

    def take_events(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return events

    def take_replaced(self) -> dict[str, list[tuple[int, int]]]:
        return {}

    def reset(self) -> bool:
        return self.num_free_blocks == self.num_blocks - 1


class V0CachedBlocks(PrivateBlocks):
    """v0's opt-in prefix cache (`--enable-prefix-caching`): blocks are mutable until full, then looked up by content.

    A block that turns out equal to a cached one is released and its table entry *replaced*, so the runner must cope
    with changed ids. Nothing is shared before its step has run. Admission ignores hits. Its hash is Python's, with one
    extra hash for adapters and no salt: a salted request is kept out of the cache. Each step stamps every block of
    every request that ran. Mirrors `vllm/core/block/prefix_caching_block.py` of 0.8.5.
    """

    can_swap: ClassVar[bool] = False

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        watermark_blocks: int = 0,
        free_order: str = "uncached_first",
        num_swap_blocks: int = 0,
    ) -> None:
        super().__init__(num_blocks, block_size, watermark_blocks=watermark_blocks, free_order=free_order)
        self._cached: dict[int, Block] = {}
        self._evictable: dict[int, Block] = {}  # cached, held by nobody; by id
        self._eviction_order: list[tuple[int, int, int]] = []  # heap, entries go stale when a block is hit again
        self._replaced: dict[str, list[tuple[int, int]]] = {}
        self._clock = 0

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free + len(self._evictable)

    def lookup(self, request: Request) -> PrefixHit:
        if request.skip_cache_read or request.cache_salt:
            return NO_HIT
        num_full = (request.num_tokens - 1) // self.block_size
        found: list[int] = []
        for block_hash in self._extend_hashes(request, num_full)[:num_full]:
            block = self._cached.get(block_hash)
            if block is None:
                break
            found.append(block.id)
        return PrefixHit(tuple(found), len(found) * self.block_size)

    def _extend_hashes(self, request: Request, num_full: int) -> list[int]:
        hashes: list[int] = request.block_hashes
        for i in range(len(hashes), num_full):
            hashes.append(self.hash_block(request, i, hashes[-1] if hashes else 0))
        return hashes

    def hash_block(self, request: Request, index: int, parent: int) -> int:
        tokens = request.token_ids[index * self.block_size : (index + 1) * self.block_size]
        extra = hash(tuple((key.tag, key.value, key.start, key.end) for key in request.extra_keys))
        return hash((index == 0, parent, *tokens, extra))

    def demand(self, request: Request, num_new_tokens: int, hit: PrefixHit = NO_HIT, *, reserve_tokens: int = 0) -> int:
        return super().demand(request, hit.num_tokens + num_new_tokens, reserve_tokens=reserve_tokens)

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        hit: PrefixHit = NO_HIT,
        *,
        reserve_tokens: int = 0,
        watermark_blocks: int = 0,
    ) -> list[int] | None:
        assert num_new_tokens > 0, f"request {request.id}: nothing to allocate for"
        demand = self.demand(request, num_new_tokens, hit, reserve_tokens=reserve_tokens)
        if demand + watermark_blocks > self.num_free_blocks:
            return None
        if not request.block_ids and not request.skip_cache_read and not request.cache_salt:
            self.stats.record(request, hit)
        num_new = self.demand(request, num_new_tokens, hit) - len(hit.block_ids)
        for block_id in hit.block_ids:
            self._hold(self.pool.blocks[block_id])
        new = [self._pop() for _ in range(num_new)]
        request.block_ids += [*hit.block_ids, *new]
        request.num_cached_blocks = max(request.num_cached_blocks, len(hit.block_ids))
        return new

    def _hold(self, block: Block) -> None:
        if block.ref == 0:
            del self._evictable[block.id]
        block.ref += 1

    def _pop(self) -> int:
        block = self.pool.pop() if self.pool.num_free else self._evict()
        block.ref = 1
        return block.id

    def _evict(self) -> Block:
        """Least recently accessed; of one age, the block with most tokens before it."""
        while True:
            last_accessed, _, block_id = heapq.heappop(self._eviction_order)
            block = self._evictable.get(block_id)
            if block is not None and block.last_accessed == last_accessed:
                del self._evictable[block_id]
                self._drop_hash(block)
                return block

    def _drop_hash(self, block: Block) -> None:
        assert isinstance(block.block_hash, int)
        del self._cached[block.block_hash]
        if self.record_events:
            self._events.append(BlockEvent("removed", [_int_bytes(block.block_hash)], [block.id]))
        block.block_hash = None

    def commit(self, request: Request, num_computed_tokens: int) -> None:
        num_full = num_computed_tokens // self.block_size
        if not request.cache_salt:
            hashes = self._extend_hashes(request, num_full)
            for i in range(request.num_cached_blocks, num_full):
                self._publish(request, i, hashes[i])
            request.num_cached_blocks = max(request.num_cached_blocks, num_full)
        self._clock += 1
        for block_id in request.block_ids:
            self.pool.blocks[block_id].last_accessed = self._clock

    def _publish(self, request: Request, index: int, block_hash: int) -> None:
        mine = self.pool.blocks[request.block_ids[index]]
        cached = self._cached.get(block_hash)
        if cached is None:
            mine.block_hash = block_hash
            mine.num_hashed_tokens = (index + 1) * self.block_size
            self._cached[block_hash] = mine
            if self.record_events:
                tokens = request.token_ids[index * self.block_size : (index + 1) * self.block_size]
                key = [_int_bytes(block_hash)]
                self._events.append(BlockEvent("stored", key, [mine.id], token_ids=tokens, block_size=self.block_size))
        else:
            self._hold(cached)
            self._release(mine)
            request.block_ids[index] = cached.id
            self._replaced.setdefault(request.id, []).append((index, cached.id))

    def _release(self, block: Block) -> None:
        block.ref -= 1
        assert block.ref >= 0, f"block {block.id} is freed twice"
        if block.ref == 0 and block.block_hash is None:
            self._put_back(block)
        elif block.ref == 0:
            self._evictable[block.id] = block
            heapq.heappush(self._eviction_order, _age(block))
            if len(self._eviction_order) > 4 * self.num_blocks:  # mostly stale
                self._eviction_order = sorted(map(_age, self._evictable.values()))

    def free(self, request: Request) -> None:
        for block_id in reversed(request.block_ids):
            self._release(self.pool.blocks[block_id])
        request.block_ids = []
        request.num_cached_blocks = 0
        self._replaced.pop(request.id, None)

    def take_replaced(self) -> dict[str, list[tuple[int, int]]]:
        replaced, self._replaced = self._replaced, {}
        return replaced

    def reset(self) -> bool:
        if self.num_free_blocks != self.num_blocks - 1:
            return False
        for block in self._evictable.values():
            block.block_hash = None
            self.pool.append(block)
        self._cached, self._evictable, self._eviction_order = {}, {}, []
        if self.record_events:
            self._events.append(BlockEvent("cleared"))
        return True


class SharedBlocks(PrivateBlocks):
    """v1: a full block is known by the hash of all tokens up to its end; equal prefixes are one set of blocks.

        request A  [ 1 | 2 | 3 | 4 ]        ref of 1, 2, 3 is 2; block 4 and 5 are private tails
        request B  [ 1 | 2 | 3 | 5 ]        hash(3) covers the tokens of 1, 2 and 3

    Tables are append-only: ids never change. Blocks are hashed when scheduled, so that requests of one step share, or,
    one step ahead, as soon as their last token is known; `forget` undoes it when the step will not run. A block that
    nobody holds keeps its hash until it is popped again: that is eviction. Mirrors `vllm/v1/core/kv_cache_manager.py`
    and `block_pool.py`.
    """

    can_swap: ClassVar[bool] = False

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        watermark_blocks: int = 0,
        free_order: str = "uncached_first",
        num_swap_blocks: int = 0,
    ) -> None:
        super().__init__(num_blocks, block_size, watermark_blocks=watermark_blocks, free_order=free_order)
        self._cached: dict[bytes, dict[int, Block]] = {}  # a hash may have several blocks; the oldest is handed out
        self._pack = struct.Struct(f"<{block_size}q").pack

    def lookup(self, request: Request) -> PrefixHit:
        if request.skip_cache_read:
            return NO_HIT
        num_full = (request.num_tokens - 1) // self.block_size  # at least one token is left to compute
        found: list[int] = []
        for block_hash in self._extend_hashes(request, num_full)[:num_full]:
            same = self._cached.get(block_hash)
            if same is None:
                break
            found.append(next(iter(same)))
        return PrefixHit(tuple(found), len(found) * self.block_size)

    def _extend_hashes(self, request: Request, num_full: int) -> list[bytes]:
        """The request's hash chain, up to that many blocks at least; each is computed once in its life."""
        hashes: list[bytes] = request.block_hashes
        for i in range(len(hashes), num_full):
            hashes.append(self.hash_block(request, i, hashes[-1] if hashes else HASH_SEED))
        return hashes

    def hash_block(self, request: Request, index: int, parent: bytes) -> bytes:
        """SHA-256 over parent hash, token ids (64 bits each, so all fields have fixed width) and extra keys."""
        start = index * self.block_size
        body = parent + self._pack(*request.token_ids[start : start + self.block_size])
        if extra := extra_keys_of_block(request, start, start + self.block_size):
            body += msgspec.msgpack.encode(extra)
        return hashlib.sha256(body).digest()

    def demand(self, request: Request, num_new_tokens: int, hit: PrefixHit = NO_HIT, *, reserve_tokens: int = 0) -> int:
        new = super().demand(request, hit.num_tokens + num_new_tokens, reserve_tokens=reserve_tokens)
        evictable = sum(self.pool.blocks[block_id].ref == 0 for block_id in hit.block_ids)
        return max(0, new - len(hit.block_ids)) + evictable  # a hit that nobody holds leaves the free queue too

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        hit: PrefixHit = NO_HIT,
        *,
        reserve_tokens: int = 0,
        watermark_blocks: int = 0,
    ) -> list[int] | None:
        assert num_new_tokens > 0, f"request {request.id}: nothing to allocate for"
        end = request.num_computed_tokens + hit.num_tokens + num_new_tokens
        num_full = min(end, len(request.token_ids)) // self.block_size
        if num_full <= request.num_cached_blocks and end <= len(request.block_ids) * self.block_size:
            return []  # inside its last block, as most decodes are: nothing changes
        demand = self.demand(request, num_new_tokens, hit, reserve_tokens=reserve_tokens)
        if demand + watermark_blocks > self.num_free_blocks:
            return None
        if not request.block_ids and not request.skip_cache_read:
            self.stats.record(request, hit)
        num_new = cdiv(end, self.block_size) - len(request.block_ids) - len(hit.block_ids)
        for block_id in hit.block_ids:
            self._hold(self.pool.blocks[block_id])
        new = [self._pop() for _ in range(num_new)]
        request.block_ids += [*hit.block_ids, *new]
        request.num_cached_blocks = max(request.num_cached_blocks, len(hit.block_ids))
        self._register(request, num_full)
        return new

    def commit(self, request: Request, num_computed_tokens: int) -> None:
        """Hash the blocks that had an unknown id in them when they were allocated, one step ahead."""
        if (num_full := num_computed_tokens // self.block_size) > request.num_cached_blocks:
            self._register(request, num_full)

    def _hold(self, block: Block) -> None:
        if block.ref == 0:
            self.pool.remove(block)
        block.ref += 1

    def _pop(self) -> int:
        block = self.pool.pop()
        if block.block_hash is not None:
            self._drop_hash(block)
        block.ref = 1
        return block.id

    def _register(self, request: Request, num_full: int) -> None:
        """Hash the blocks that are full of known tokens. An equal block may be cached already: both stay."""
        first = request.num_cached_blocks
        if num_full <= first:
            return
        hashes = self._extend_hashes(request, num_full)
        for i in range(first, num_full):
            block = self.pool.blocks[request.block_ids[i]]
            block.block_hash = hashes[i]
            self._cached.setdefault(hashes[i], {})[block.id] = block
        request.num_cached_blocks = num_full
        if self.record_events:
            self._events.append(
                BlockEvent(
                    "stored",
                    hashes[first:num_full],
                    request.block_ids[first:num_full],
                    parent=hashes[first - 1] if first else HASH_SEED,
                    token_ids=request.token_ids[first * self.block_size : num_full * self.block_size],
                    block_size=self.block_size,
                )
            )

    def _drop_hash(self, block: Block) -> None:
        assert isinstance(block.block_hash, bytes)
        same = self._cached[block.block_hash]
        del same[block.id]
        if not same:
            del self._cached[block.block_hash]
        if self.record_events:
            self._events.append(BlockEvent("removed", [block.block_hash], [block.id]))
        block.block_hash = None

    def forget(self, request: Request, num_computed_tokens: int) -> None:
        first = num_computed_tokens // self.block_size
        for block_id in request.block_ids[first : request.num_cached_blocks]:
            self._drop_hash(self.pool.blocks[block_id])
        request.num_cached_blocks = min(request.num_cached_blocks, first)

    def free(self, request: Request) -> None:
        for block_id in reversed(request.block_ids):
            block = self.pool.blocks[block_id]
            block.ref -= 1
            assert block.ref >= 0, f"block {block_id} is freed twice"
            if block.ref == 0 and block.block_hash is None:
                self._put_back(block)
            elif block.ref == 0:
                self.pool.append(block)
        request.block_ids = []
        request.num_cached_blocks = 0

    def reset(self) -> bool:
        if self.num_free_blocks != self.num_blocks - 1:
            return False
        for block in self.pool.blocks:
            block.block_hash = None
        self._cached.clear()
        if self.record_events:
            self._events.append(BlockEvent("cleared"))
        return True


def extra_keys_of_block(request: Request, start: int, end: int) -> list[tuple[str, str, int]]:
    """What beside tokens a block at positions [start, end) depends on: the salt in block 0 only (later blocks inherit
    it from their parent), an adapter in every block, a span's content with its offset where it overlaps."""
    extra = [_key_in_block(key, start) for key in request.extra_keys if key.start < end and _end(key) > start]
    if request.cache_salt and start == 0:
        extra.append(("salt", request.cache_salt, 0))
    return extra


def _age(block: Block) -> tuple[int, int, int]:
    """Heap entry of V0CachedBlocks: the smallest is evicted first."""
    return (block.last_accessed, -block.num_hashed_tokens, block.id)


def _end(key: ExtraKey) -> float:
    return float("inf") if key.end is None else key.end


def _key_in_block(key: ExtraKey, start: int) -> tuple[str, str, int]:
    return (key.tag, key.value, 0 if key.end is None else key.start - start)


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)
