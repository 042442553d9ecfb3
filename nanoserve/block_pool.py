"""The pool of KV blocks and its free queue, and the small data that block managers speak in.

Owns which block is handed out next; knows neither requests nor hashing. Block 0 is the null block: never allocated,
freed, hashed or counted as free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from nanoserve.request import Request

NULL_BLOCK = 0


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


class PrefixHit(NamedTuple):
    """Leading blocks of a request that are in the cache. A hit covers full blocks, never the last known token."""

    block_ids: tuple[int, ...]
    num_tokens: int


NO_HIT = PrefixHit((), 0)


class BlockEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """`stored` (hashes, parent, token_ids, block_ids), `removed` (hashes, block_ids) or `cleared`."""

    kind: str
    hashes: list[bytes] = []
    block_ids: list[int] = []
    parent: bytes = b""
    token_ids: list[int] = []
    block_size: int = 0


@dataclass(slots=True)
class PrefixCacheStats:
    """Counted once per admission; admissions after a preemption apart, so that they cannot flatter the hit rate."""

    requests: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    preempted_requests: int = 0
    preempted_queried_tokens: int = 0
    preempted_hit_tokens: int = 0

    def record(self, request: Request, hit: PrefixHit) -> None:
        if request.num_preemptions:
            self.preempted_requests += 1
            self.preempted_queried_tokens += request.num_tokens
            self.preempted_hit_tokens += hit.num_tokens
        else:
            self.requests += 1
            self.queried_tokens += request.num_tokens
            self.hit_tokens += hit.num_tokens

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


class Block:
    """One block of the pool. `prev` and `next` link it into the free queue, None outside of it."""

    __slots__ = ("block_hash", "id", "last_accessed", "next", "num_hashed_tokens", "prev", "ref")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref = 0  # request tables that contain it (managers that share)
        self.block_hash: bytes | int | None = None
        self.prev: Block | None = None
        self.next: Block | None = None
        self.last_accessed = 0  # V0CachedBlocks only
        self.num_hashed_tokens = 0  # V0CachedBlocks only


class BlockPool:
    """A fixed number of blocks and the queue of free ones; every operation is O(1).

        head <-> 1 <-> 2 <-> ... <-> N-1 <-> tail        pop from the head, append at the tail

    The links live in the blocks, so that a free block that is hit again leaves the middle of the queue.
    Mirrors `vllm/v1/core/kv_cache_utils.py: FreeKVCacheBlockQueue`.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"a pool needs the null block and one more, got {num_blocks}"
        self.num_blocks = num_blocks
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.num_free = 0
        self._head, self._tail = Block(-1), Block(-2)
        self._head.next, self._tail.prev = self._tail, self._head
        for block in self.blocks[NULL_BLOCK + 1 :]:
            self.append(block)

    def __iter__(self) -> Iterator[Block]:
        """Free blocks in the order in which they will be handed out."""
        block = self._head.next
        while block is not self._tail:
            assert block is not None
            yield block
            block = block.next

    def pop(self) -> Block:
        block = self._head.next
        assert block is not None
        assert block is not self._tail, "pop from an empty pool"
        self.remove(block)
        return block

    def append(self, block: Block) -> None:
        assert self._tail.prev is not None
        self._link(block, self._tail.prev, self._tail)

    def prepend(self, block: Block) -> None:
        assert self._head.next is not None
        self._link(block, self._head, self._head.next)

    def remove(self, block: Block) -> None:
        assert block.prev is not None, f"block {block.id} is not in the free queue"
        assert block.next is not None
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self.num_free -= 1

    def _link(self, block: Block, before: Block, after: Block) -> None:
        assert block.prev is None, f"block {block.id} is freed twice"
        assert block.id != NULL_BLOCK, "the null block is never freed"
        block.prev, block.next = before, after
        before.next = after.prev = block
        self.num_free += 1
