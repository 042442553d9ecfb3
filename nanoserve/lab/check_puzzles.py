"""What an exercise asks of one method or function alone: worked examples, each with what was expected.

Small calls on real managers and dispatchers; the engine is check_engine.py's. A verdict's `request` is the example at
which it shows. Laws: tests/test_exercises.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from nanoserve.blocks import HASH_SEED, PrivateBlocks, SharedBlocks
from nanoserve.graphs import Dispatcher, GraphKey, GraphMode, default_sizes
from nanoserve.lab.figures import figures_of
from nanoserve.lab.laws import Verdict, broken
from nanoserve.lab.metrics import percentile, request_times
from nanoserve.lab.trial import Trial
from nanoserve.lab.trial_loads import FIXED
from nanoserve.request import ExtraKey, Request, SamplingParams
from nanoserve.scheduler import UnifiedScheduler

# Blocks


def request_of(request_id: str, token_ids: list[int], **fields: Any) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=1)
    return Request(
        id=request_id,
        params=params,
        num_prompt_tokens=len(token_ids),
        max_tokens=1,
        token_ids=list(token_ids),
        **fields,
    )


def _chain(blocks: Any, request_id: str, token_ids: list[int], **fields: Any) -> list[bytes]:
    """The hashes of a request's full blocks."""
    request, hashes = request_of(request_id, token_ids, **fields), []
    for index in range(len(token_ids) // blocks.block_size):
        hashes.append(blocks.hash_block(request, index, hashes[-1] if hashes else HASH_SEED))
    return hashes


TOKENS = list(range(100, 112))
ADAPTER = (ExtraKey("adapter", "a"),)
IMAGE = (ExtraKey("image", "cat", 5, 7),)  # in the second block of four tokens
SAME, DIFFERENT = "the same hash", "another hash"
_PAIRS: list[tuple[str, dict[str, Any], dict[str, Any], int, str]] = [  # what, one, other, block, expected
    ("the same tokens", {}, {}, 2, SAME),
    ("another token in the block itself", {}, {"token_ids": [*TOKENS[:11], 7]}, 2, DIFFERENT),
    ("another token in a block before it", {}, {"token_ids": [7, *TOKENS[1:]]}, 2, DIFFERENT),
    ("the same tokens in another order", {}, {"token_ids": [101, 100, *TOKENS[2:]]}, 0, DIFFERENT),
    ("tokens 1, 12 and tokens 11, 2", {"token_ids": [1, 12, 3, 4]}, {"token_ids": [11, 2, 3, 4]}, 0, DIFFERENT),
    ("tokens that differ by 2 ** 32", {}, {"token_ids": [*TOKENS[:11], TOKENS[11] + 2**32]}, 2, DIFFERENT),
    ("one with a salt", {}, {"cache_salt": "s"}, 0, DIFFERENT),
    ("one with a salt, in a later block", {}, {"cache_salt": "s"}, 2, DIFFERENT),
    ("one with an adapter", {}, {"extra_keys": ADAPTER}, 2, DIFFERENT),
    ("an image in this block", {}, {"extra_keys": IMAGE}, 1, DIFFERENT),
    ("an image in a later block", {}, {"extra_keys": IMAGE}, 0, SAME),
]


def keys_are_right(mine: type[SharedBlocks]) -> Verdict:
    blocks = mine(16, 4)
    for what, one, other, index, expected in _PAIRS:
        requests = {"one": {"token_ids": TOKENS, **one}, "other": {"token_ids": TOKENS, **other}}
        hashes = [_chain(blocks, name, **fields)[index] for name, fields in requests.items()]
        if not all(isinstance(block_hash, bytes) and len(block_hash) == len(HASH_SEED) for block_hash in hashes):
            return broken("keys", 0, f"block {index}", f"{len(HASH_SEED)} bytes of SHA-256", f"{hashes[0]!r:.60}")
        if (hashes[0] == hashes[1]) != (expected == SAME):
            got = DIFFERENT if expected == SAME else SAME
            return broken("keys", 0, f"block {index}, {what}", expected, got)
    return Verdict(law="keys")


def _admit(blocks: SharedBlocks, request: Request) -> Request:
    hit = blocks.lookup(request)
    new = blocks.allocate(request, request.num_tokens - hit.num_tokens, hit)
    assert new is not None, f"request {request.id}: no room"
    request.num_computed_tokens = request.num_tokens
    return request


COMMON = list(range(1000, 1048))  # three blocks of sixteen
_QUEUES: Mapping[str, list[int]] = {
    "uncached_first": [5, 4, 6, 7, 8, 9, 10, 3, 2, 1],
    "append": [6, 7, 8, 9, 10, 4, 5, 3, 2, 1],
}


def counts_are_right(mine: type[SharedBlocks]) -> Verdict:
    """A has blocks 1 to 4; B finds 1 to 3, and gets 5 for its own end; C finds the three when both have gone."""
    blocks = mine(11, 16)
    a = _admit(blocks, request_of("A", [*COMMON, *range(7)]))
    b = _admit(blocks, request_of("B", [*COMMON, *range(50, 55)]))
    c = request_of("C", [*COMMON, *range(60, 66)])
    stages: list[tuple[str, Callable[[], Any], list[int]]] = [
        ("A and B run", lambda: None, [2, 2, 2, 1, 1]),
        ("A is free", lambda: blocks.free(a), [1, 1, 1, 0, 1]),
        ("B is free too", lambda: blocks.free(b), [0, 0, 0, 0, 0]),
        ("C comes, and finds what A and B left", lambda: _admit(blocks, c), [1, 1, 1]),
    ]
    for what, act, expected in stages:
        act()
        got = [blocks.pool.blocks[block_id].ref for block_id in range(1, len(expected) + 1)]
        if got != expected:
            return broken("counts", 0, what, f"counts {expected} of blocks 1 to {len(expected)}", f"{got}")
        free = {block.id for block in blocks.pool}
        if wrong := [i for i in range(1, len(expected) + 1) if (i in free) != (expected[i - 1] == 0)]:
            there, not_there = "in the free queue", "not in the free queue"
            is_in = wrong[0] in free
            wanted = f"block {wrong[0]}, of count {expected[wrong[0] - 1]}, {not_there if is_in else there}"
            return broken("counts", 0, what, wanted, f"it is {there if is_in else not_there}")
    return Verdict(law="counts")


def queue_is_right(mine: type[SharedBlocks]) -> Verdict:
    for free_order, expected in _QUEUES.items():
        blocks = mine(11, 16, free_order=free_order)
        pair = [
            _admit(blocks, request_of(name, [*COMMON, *own])) for name, own in (("A", range(7)), ("B", range(50, 55)))
        ]
        for request in pair:
            blocks.free(request)
        got = [block.id for block in blocks.pool]
        if got != expected:
            what = f"free_order={free_order!r}, A then B freed"
            return broken("queue", 0, what, f"free blocks in the order {_spaced(expected)}", _spaced(got))
    return Verdict(law="queue")


def _spaced(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def hits_are_as_long_as_they_may(mine: type[SharedBlocks]) -> Verdict:
    """A's 12 tokens are cached, in blocks of 4; then prompts that begin as A does."""
    blocks = mine(40, 4)
    a = _admit(blocks, request_of("A", TOKENS))
    for length in range(1, 16):
        prompt = [*TOKENS, 7, 8, 9][:length]
        expected = min((length - 1) // 4, 3) * 4
        if (got := blocks.lookup(request_of("B", prompt)).num_tokens) != expected:
            return broken("lengths", 0, f"B with {length} tokens", f"a hit of {expected}", f"{got}")
    if got := blocks.lookup(request_of("B", TOKENS, skip_cache_read=True)).num_tokens:
        what = "B with skip_cache_read"
        return broken("lengths", 0, what, "no hit: it needs every position computed", f"{got} tokens")
    if got := blocks.lookup(request_of("B", [7, *TOKENS])).num_tokens:
        return broken("lengths", 0, "B with one token before A's", "no hit", f"{got} tokens")
    blocks._drop_hash(blocks.pool.blocks[a.block_ids[0]])
    if got := blocks.lookup(request_of("B", [*TOKENS, 7])).num_tokens:
        what = "B as A, whose first block is not cached any more"
        return broken("lengths", 0, what, "no hit: a prefix begins at the beginning", f"{got} tokens")
    return Verdict(law="lengths")


def lookups_change_nothing(mine: type[SharedBlocks]) -> Verdict:
    blocks = mine(40, 4)
    blocks.free(_admit(blocks, request_of("A", TOKENS)))
    before = _state(blocks)
    blocks.lookup(request_of("B", TOKENS))
    if (after := _state(blocks)) != before:
        return broken("pure", 0, "B, as long as A", f"free queue and counts as before: {before}", f"{after}")
    return Verdict(law="pure")


def _state(blocks: PrivateBlocks) -> str:
    queue = _spaced([block.id for block in blocks.pool][-4:])
    return f"... {queue}; counts {[block.ref for block in blocks.pool.blocks[1:4]]}"


# The chunk size

PROMISES_MS = (2.01, 2.1, 3.33, 6.5, 9.0)  # longest gap: 2.1 is just kept by a budget, 9 by all; two between budgets
MAX_MEASUREMENTS = 12
LARGEST = 256


class Measured(NamedTuple):
    """Milliseconds of the virtual clock."""

    gap_ms: float  # longest, of all streams
    ttft_ms: float  # of the long prompts, the median


Measure = Callable[[int], Measured]


@cache
def measure_budget(budget: int) -> Measured:
    """Load `long-prompts` with that many tokens a step at most. ValueError for less than the eight seats, or more than
    256."""
    if not 8 <= budget <= LARGEST:
        raise ValueError(f"budget must be in [8, {LARGEST}], got {budget}; a step holds a token for each of 8 seats.")
    load = FIXED["long-prompts"]
    outcome = Trial(load, {"scheduler": UnifiedScheduler, "max_num_batched_tokens": budget}).run()
    figures, times = figures_of(outcome, load), request_times(outcome.records).values()
    assert figures is not None
    assert figures.itl_max_ms is not None
    first = [r.token_s[0] - r.arrival_s for r in times if r.id.startswith("long")]
    return Measured(round(figures.itl_max_ms, 6), round(percentile(first, 50) * 1e3, 6))


class _Counted:
    def __init__(self) -> None:
        self.budgets: list[int] = []

    def __call__(self, budget: int) -> Measured:
        self.budgets.append(budget)
        return measure_budget(budget)


def _picked(mine: Callable[[Measure, float], int]) -> Iterator[tuple[str, float, int, int]]:
    """Promise in words, promise, budget, number of measurements."""
    for promise_ms in PROMISES_MS:
        measure = _Counted()
        budget = mine(measure, promise_ms)
        if not isinstance(budget, int) or isinstance(budget, bool):
            raise TypeError(f"pick_budget returned {budget!r:.60}, which is no number of tokens")
        yield f"no gap over {promise_ms} ms", promise_ms, budget, len(measure.budgets)


def promise_is_kept(mine: Callable[[Measure, float], int]) -> Verdict:
    for what, promise_ms, budget, _ in _picked(mine):
        if (gap_ms := measure_budget(budget).gap_ms) > promise_ms:
            got = f"{gap_ms:.2f} ms with a budget of {budget}"
            return broken("promise", 0, what, f"a longest gap of {promise_ms} ms at most", got)
    return Verdict(law="promise")


def best_budget(promise_ms: float) -> int:
    """A larger budget never has a shorter gap."""
    return 7 + bisect_right(range(8, LARGEST + 1), promise_ms, key=lambda budget: measure_budget(budget).gap_ms)


def first_token_is_soon(mine: Callable[[Measure, float], int]) -> Verdict:
    for what, promise_ms, budget, _ in _picked(mine):
        best = measure_budget(best_budget(promise_ms)).ttft_ms
        if (ttft_ms := measure_budget(budget).ttft_ms) > 1.02 * best:
            got = f"{ttft_ms:.1f} ms with a budget of {budget}"
            return broken(
                "first token", 0, what, f"{best:.1f} ms, as a larger budget that keeps the promise gives", got
            )
    return Verdict(law="first token")


def measures_little(mine: Callable[[Measure, float], int]) -> Verdict:
    for what, _, _, num_measurements in _picked(mine):
        if num_measurements > MAX_MEASUREMENTS:
            expected = f"at most {MAX_MEASUREMENTS} measurements"
            return broken("thrift", 0, what, expected, f"{num_measurements}")
    return Verdict(law="thrift")


# The dispatcher

SIZES = {"explicit": (1, 2, 4, 8, 16), "gaps": (4, 32), "defaults": default_sizes(256, 8192)}


def _steps(mine: type[Dispatcher]) -> Iterator[tuple[str, Dispatcher, int, bool, GraphKey | None, GraphKey | None]]:
    """What, dispatcher, tokens, one in each row?, expected, got."""
    for mode in GraphMode:
        for name, sizes in SIZES.items():
            yours, ours = mine(mode, sizes, 16), Dispatcher(mode, sizes, 16)
            for num_tokens in (1, 2, 3, 4, 5, 9, 16, 17, 32, 33, 100, 250, 257, 264, 500, 513):
                for is_uniform in (True, False):
                    got, expected = yours.dispatch(num_tokens, is_uniform), ours.dispatch(num_tokens, is_uniform)
                    batch = "decodes alone" if is_uniform else "any batch"
                    what = f"mode {mode}, sizes {name}, {num_tokens} tokens, {batch}"
                    yield what, yours, num_tokens, is_uniform, expected, got


def _named(key: GraphKey | None) -> str:
    return f"graph {key!s}" if key is not None else "no graph"


def only_captured_graphs(mine: type[Dispatcher]) -> Verdict:
    for what, dispatcher, _, _, expected, got in _steps(mine):
        if got is not None and got not in dispatcher._keys:
            return broken("captured", 0, what, _named(expected), f"{_named(got)}, which was never captured")
    return Verdict(law="captured")


def graphs_hold_their_steps(mine: type[Dispatcher]) -> Verdict:
    for what, _, num_tokens, is_uniform, expected, got in _steps(mine):
        if got is not None and (got.size < num_tokens or got.is_uniform > is_uniform):
            return broken("fits", 0, what, _named(expected), f"{_named(got)}, which is not made for such a step")
    return Verdict(law="fits")


def best_graph_is_chosen(mine: type[Dispatcher]) -> Verdict:
    for what, _, _, _, expected, got in _steps(mine):
        if got != expected:
            return broken("best", 0, what, _named(expected), _named(got))
    return Verdict(law="best")
