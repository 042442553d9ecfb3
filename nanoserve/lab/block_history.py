"""The KV blocks of a recorded run at every step: who holds which, what is in them, what is cached, what is free next.

Tables and reference counts come from the records alone; hashes and the free queue from a replay whose block pool
keeps a journal (`watch`), so that no rule of any block manager is written down twice. What is in a block is told by
the prompts: equal prefixes are one group, also where a manager keeps a copy for everyone. The law, against the
engine's own block map: tests/test_trace.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from nanoserve.block_pool import Block, BlockPool
from nanoserve.blocks import KVCacheManager, PrivateBlocks, V0CachedBlocks
from nanoserve.lab.replay import Replay
from nanoserve.lab.trace import Lane, Moment, Trace, moments
from nanoserve.record import Input, StepRecord
from nanoserve.request import EngineRequest

REMOVE, APPEND, PREPEND, EVICTABLE, CACHED, UNCACHED = range(6)  # what a journal tells; the page knows them by number


class Entry(NamedTuple):
    """One change of the free queue or of a hash. EVICTABLE: free, but behind the queue, by age."""

    kind: int
    block_id: int
    last_accessed: int = 0
    num_hashed_tokens: int = 0


Journal = list[Entry]


class WatchedBlock(Block):
    """A block that tells when its hash comes or goes."""

    __slots__ = ("_hash", "_journal")

    def __init__(self, block_id: int, journal: Journal) -> None:
        self._journal = journal
        self._hash: bytes | int | None = None
        super().__init__(block_id)

    @property
    def block_hash(self) -> bytes | int | None:
        return self._hash

    @block_hash.setter
    def block_hash(self, value: bytes | int | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if (value is None) != (self._hash is None):
            self._journal.append(Entry(UNCACHED if value is None else CACHED, self.id))
        self._hash = value


class WatchedPool(BlockPool):
    """A pool that tells how its free queue changes."""

    def __init__(self, num_blocks: int, journal: Journal) -> None:
        self.journal: Journal = []
        super().__init__(num_blocks)
        while self.num_free:
            self.pop()
        self.blocks = [WatchedBlock(block_id, journal) for block_id in range(num_blocks)]
        self.journal = journal
        for block in self.blocks[1:]:
            super().append(block)

    def append(self, block: Block) -> None:
        super().append(block)
        self.journal.append(Entry(APPEND, block.id))

    def prepend(self, block: Block) -> None:
        super().prepend(block)
        self.journal.append(Entry(PREPEND, block.id))

    def remove(self, block: Block) -> None:
        super().remove(block)
        self.journal.append(Entry(REMOVE, block.id))


class WatchedEvictables(dict[int, Block]):
    """Blocks that v0's cache keeps beside its queue."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal = journal

    def __setitem__(self, block_id: int, block: Block) -> None:
        super().__setitem__(block_id, block)
        self.journal.append(Entry(EVICTABLE, block_id, block.last_accessed, block.num_hashed_tokens))

    def __delitem__(self, block_id: int) -> None:
        super().__delitem__(block_id)
        self.journal.append(Entry(REMOVE, block_id))


def watch(blocks: KVCacheManager, journal: Journal) -> bool:
    """Let a manager that nobody used yet keep the journal; False when it is not built like ours."""
    if not isinstance(blocks, PrivateBlocks):
        return False
    blocks.pool = WatchedPool(blocks.num_blocks, journal)
    if isinstance(blocks, V0CachedBlocks):
        blocks._evictable = WatchedEvictables(journal)
    return True


@dataclass(slots=True)
class Prefixes:
    """Which requests begin alike, by the full blocks of their prompts. Group 0: shares nothing with anybody."""

    block_size: int
    shared: dict[int, tuple[int, int]] = field(default_factory=dict)  # lane -> (group, leading blocks in common)
    num_requests: list[int] = field(default_factory=list)  # of each group from 1 on, the largest first

    @classmethod
    def of(cls, lanes: list[Lane], block_size: int) -> Prefixes:
        chains = {i: _chain(lane.request, block_size) for i, lane in enumerate(lanes) if lane.request and block_size}
        seen = Counter(key for chain in chains.values() for key in chain)
        roots = Counter(chain[0] for chain in chains.values() if chain and seen[chain[0]] > 1)
        groups = {root: number for number, (root, _) in enumerate(roots.most_common(), 1)}
        shared = {
            i: (groups[chain[0]], sum(seen[key] > 1 for key in chain))
            for i, chain in chains.items()
            if chain and chain[0] in groups
        }
        return cls(block_size, shared, [count for _, count in roots.most_common()])

    def content(self, lane: int, place: int) -> int:
        """Of the block at that place of a lane's table: twice the group, and one more where others have it too."""
        group, depth = self.shared.get(lane, (0, 0))
        return 2 * group + (place < depth)


def _chain(request: EngineRequest, block_size: int) -> list[int]:
    """A key for each full block of a prompt that stands for all tokens up to its end, and what else its KV is of."""
    keys, parent = [], hash((request.cache_salt, request.extra_keys))
    for end in range(block_size, len(request.prompt_token_ids) + 1, block_size):
        parent = hash((parent, *request.prompt_token_ids[end - block_size : end]))
        keys.append(parent)
    return keys


class TableChange(NamedTuple):
    """From `place` on a lane's table holds these blocks: it grew, or an entry was replaced. None: it was given back."""

    lane: int
    place: int
    block_ids: tuple[int, ...] = ()


class Tables:
    """Every lane's block table, from the records alone."""

    def __init__(self, lanes: list[Lane]) -> None:
        self.by_lane: dict[int, list[int]] = {}
        self.changes: list[TableChange] = []
        self._lanes = {id(lane.request): i for i, lane in enumerate(lanes) if lane.request}
        self._older = {lane.id: i for i, lane in enumerate(lanes) if not lane.request}
        self._alive: dict[str, int] = {}

    def decide(self, record: StepRecord) -> None:
        """To the state while the step runs. ValueError where it tells of a request that is not there."""
        arrivals = {r.id: self._lanes[id(r)] for r in record.arrivals}
        for i in record.before or [Input("add", request_id) for request_id in arrivals]:
            self._take(i, arrivals)
        self._alive |= {request_id: lane for request_id, lane in arrivals.items() if request_id not in self._alive}
        for request_id in record.preempted:
            self._give_back(self._lane("preempted", request_id))
        for request_id, entries in record.replaced_blocks.items():
            for place, block_id in entries:
                self._replace(self._lane("replaced_blocks", request_id), place, block_id)
        for request_id, block_ids in record.new_blocks.items():
            self._grow(self._lane("new_blocks", request_id), block_ids, is_whole=request_id in record.hit_tokens)

    def take(self, record: StepRecord) -> None:
        """Ends of the step's requests, and aborts before its tokens were taken."""
        for i in record.meanwhile:
            self._take(i, {})
        for request_id, reason in record.finished.items():
            if reason != "abort" and request_id in self._alive:
                self._give_back(self._alive.pop(request_id))

    def _lane(self, name: str, request_id: str) -> int:
        if request_id not in self._alive:
            if request_id not in self._older:
                raise ValueError(f"{name} names {request_id!r:.60}, which is no request that is alive then")
            self._alive[request_id] = self._older[request_id]
        return self._alive[request_id]

    def _take(self, one: Input, arrivals: dict[str, int]) -> None:
        if one.kind == "add" and one.id in arrivals:
            self._alive[one.id] = arrivals[one.id]
        elif one.kind == "abort" and one.id in self._alive:
            self._give_back(self._alive.pop(one.id))
        elif one == Input("reset", "force"):
            for lane in list(self.by_lane):
                self._give_back(lane)

    def _give_back(self, lane: int) -> None:
        if self.by_lane.pop(lane, None):
            self.changes.append(TableChange(lane, 0))

    def _grow(self, lane: int, block_ids: list[int], is_whole: bool) -> None:
        if is_whole:
            self._give_back(lane)
        table = self.by_lane.setdefault(lane, [])
        self.changes.append(TableChange(lane, len(table), tuple(block_ids)))
        table += block_ids

    def _replace(self, lane: int, place: int, block_id: int) -> None:
        table = self.by_lane.get(lane, [])
        if place < len(table) and table[place] != block_id:
            table[place] = block_id
            self.changes.append(TableChange(lane, place, (block_id,)))


@dataclass(slots=True)
class BlockMap:
    """The blocks while a step runs. `free` is the order in which they will be handed out, and `cached` who has a hash;
    both None from the step on where the replay does not agree with the trace any more."""

    step: int
    refs: dict[int, int]  # of blocks that are in a table: in how many
    holders: dict[int, list[str]]
    content: dict[int, int]  # as of `Prefixes.content`, of all blocks that were ever in a table
    free: list[int] | None
    cached: set[int] | None


@dataclass(slots=True)
class StepBlocks:
    """What changed up to a step's decision."""

    place: int
    tables: list[TableChange]
    journal: Journal | None  # None: the replay ended before


class BlockHistory:
    """Walks through a trace once; `changes` yields what each step changed, and the state is then as it was."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.prefixes = Prefixes.of(trace.lanes, trace.block_size)
        self.tables = Tables(trace.lanes)
        self.content: dict[int, int] = {}
        self.complaint = ""  # why there is no queue, or no more of it
        self.replay: Replay | None = None

    def changes(self) -> Iterator[StepBlocks]:
        """ValueError for a record that tells of a request that is not there."""
        journal: Journal = []
        decisions = iter(self._replayed(journal))
        for moment in moments(self.trace.records):
            self._read(moment)
            if not moment.is_decision:
                continue
            agrees = next(decisions, None) is not None
            if not agrees and not self.complaint:
                self.complaint = self._why()
            self._watch_again(journal)
            changes, self.tables.changes = self.tables.changes, []
            yield StepBlocks(moment.place, changes, list(journal) if agrees else None)
            journal.clear()

    def at(self, step: int) -> BlockMap:
        """The blocks while that step ran. ValueError when the trace has no such step; use a new history each time."""
        for change in self.changes():
            if self.trace.records[change.place].step == step:
                return self._map(step, change.journal is not None)
        first, last = (self.trace.records[i].step for i in (0, -1)) if self.trace.records else (0, 0)
        raise ValueError(f"step {step} is not in the trace; it has steps {first} to {last}.")

    def _replayed(self, journal: Journal) -> Iterable[StepRecord]:
        try:
            self.replay = Replay(self.trace)
        except ValueError as error:
            self.complaint = str(error)
            return ()
        if not watch(self.replay.blocks, journal):
            self.complaint = f"{type(self.replay.blocks).__name__} keeps its blocks in a way of its own"
            return ()
        return self.replay.decisions()

    def _watch_again(self, journal: Journal) -> None:
        """A reset of v0's cache makes it a new dict, and puts all that was in the old one into the queue."""
        blocks = self.replay.blocks if self.replay else None
        if isinstance(blocks, V0CachedBlocks) and not isinstance(blocks._evictable, WatchedEvictables):
            unwatched, blocks._evictable = blocks._evictable, WatchedEvictables(journal)
            for block_id, block in unwatched.items():
                blocks._evictable[block_id] = block

    def _why(self) -> str:
        assert self.replay is not None, "a complaint would be there"
        return f"the replay does not agree: {self.replay.difference}" if self.replay.difference else "the engine died"

    def _read(self, moment: Moment) -> None:
        num_seen = len(self.tables.changes)
        if moment.is_decision:
            try:
                self.tables.decide(moment.record)
            except ValueError as error:
                raise ValueError(f"{self.trace.line(moment.place)}: {error}; record the run again.") from None
        else:
            self.tables.take(moment.record)
        for lane, place, block_ids in self.tables.changes[num_seen:]:
            self.content |= {b: self.prefixes.content(lane, place + i) for i, b in enumerate(block_ids)}

    def _map(self, step: int, agrees: bool) -> BlockMap:
        holders: dict[int, list[str]] = {}
        for lane, table in self.tables.by_lane.items():
            for block_id in table:
                holders.setdefault(block_id, []).append(self.trace.lanes[lane].id)
        blocks = self.replay.blocks if self.replay and agrees else None
        assert blocks is None or isinstance(blocks, PrivateBlocks), "watch() saw to it"
        return BlockMap(
            step,
            {block_id: len(ids) for block_id, ids in holders.items()},
            holders,
            dict(self.content),
            free_order(blocks) if blocks else None,
            {block.id for block in blocks.pool.blocks if block.block_hash is not None} if blocks else None,
        )


def free_order(blocks: PrivateBlocks) -> list[int]:
    """The free blocks, in the order in which they will be handed out."""
    queue = [block.id for block in blocks.pool]
    if isinstance(blocks, V0CachedBlocks):
        evictable = blocks._evictable.values()
        queue += [b.id for b in sorted(evictable, key=lambda b: (b.last_accessed, -b.num_hashed_tokens, b.id))]
    return queue
