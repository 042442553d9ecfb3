"""Which captured graph a step replays: modes, sizes, and the dispatcher, the only one who decides.

A graph is recorded work on fixed memory: replaying it costs the host one call instead of one for each operation, but it
fits one shape only, so that a step is padded to the next size there is. v0 captured decodes; v1 also captures, for any
batch, everything between the attention calls. Imports no torch. Laws: tests/test_graphs.py.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LARGEST_DEFAULT_SIZE = 512  # tokens; a larger step keeps the device busy without help


class GraphMode(enum.StrEnum):
    """What is captured. Mirrors `vllm/config/compilation.py: CUDAGraphMode`."""

    NONE = "none"
    PIECEWISE = "piecewise"  # everything but attention, any batch
    FULL = "full"  # the whole forward pass, any batch
    FULL_DECODE_ONLY = "full_decode_only"  # the whole pass where every row has one token; else nothing
    FULL_AND_PIECEWISE = "full_and_piecewise"  # the whole pass where every row has one token; else piecewise


class GraphSupport(enum.IntEnum):
    """Which batches an attention backend can be captured with. Mirrors vLLM's `AttentionCGSupport`."""

    NEVER = 0  # it looks at the batch on the host
    UNIFORM_DECODE = 1  # rows of one token each
    ALWAYS = 2


def supported(mode: GraphMode, support: GraphSupport) -> GraphMode:
    """The mode that comes closest to `mode` with such a backend."""
    if support is GraphSupport.ALWAYS or mode in (GraphMode.NONE, GraphMode.PIECEWISE):
        return mode
    if support is GraphSupport.UNIFORM_DECODE:
        return GraphMode.FULL_AND_PIECEWISE if mode is GraphMode.FULL else mode
    return GraphMode.NONE if mode is GraphMode.FULL_DECODE_ONLY else GraphMode.PIECEWISE


@dataclass(frozen=True, slots=True)
class GraphKey:
    """One graph: the whole pass (`FULL`) or its pieces, for `size` tokens; `is_uniform`: one token in each row."""

    mode: GraphMode
    size: int
    is_uniform: bool = False

    def __str__(self) -> str:
        return f"{self.mode}{' decode' if self.is_uniform else ''} {self.size}"


def default_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8th up to 248 and every 16th from 256, up to twice `max_num_seqs`, the budget, or 512,
    whichever is least; `max_num_seqs` itself is one of them, if it is no larger. As in `vllm/config/vllm.py`."""
    largest = min(2 * max_num_seqs, LARGEST_DEFAULT_SIZE, max_num_batched_tokens)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= largest))


def given_sizes(sizes: Iterable[int], max_num_batched_tokens: int) -> tuple[int, ...]:
    """A list of the user's own: each once, in order, without those that no step can have. ValueError: none is left."""
    kept = sorted({size for size in sizes if 1 <= size <= max_num_batched_tokens})
    if not kept:
        raise ValueError(
            f"graph_sizes={list(sizes)} holds no size from 1 to max_num_batched_tokens={max_num_batched_tokens}; name "
            "one at least, or use graph_mode='none'."
        )
    return tuple(kept)


class Dispatcher:
    """Tells for every batch which graph it replays, padded to how many tokens."""

    def __init__(self, mode: GraphMode, sizes: Sequence[int], max_num_seqs: int) -> None:
        self.mode = mode
        self.sizes = sizes = () if mode is GraphMode.NONE else tuple(sorted(sizes))
        # No step has more tokens that sample than there are seats: up to the size that the fullest one is padded to.
        self.sampling_sizes = rows = sizes[: bisect_left(sizes, max_num_seqs) + 1]
        keys: set[GraphKey] = set()
        if mode in (GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE):
            keys |= {GraphKey(GraphMode.PIECEWISE, size) for size in sizes}
        if mode is GraphMode.FULL:
            keys |= {GraphKey(GraphMode.FULL, size) for size in sizes}
        if mode in (GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE):
            keys |= {GraphKey(GraphMode.FULL, size, is_uniform=True) for size in rows}
        self._keys = frozenset(keys)

    @property
    def keys(self) -> list[GraphKey]:
        """All graphs, in the order of capture: the largest first, so that the others fit in its memory."""
        return sorted(self._keys, key=lambda key: (-key.size, key.mode, key.is_uniform))

    def sampling_size(self, num_sampling: int) -> int:
        """To how many the tokens that sample are padded after the last attention call."""
        return self.sampling_sizes[bisect_left(self.sampling_sizes, num_sampling)]

    def dispatch(self, num_tokens: int, is_uniform: bool) -> GraphKey | None:
        """The graph of a step with that many tokens; `is_uniform`: one in each row. None: run it as it is."""
        place = bisect_left(self.sizes, num_tokens)
        if place == len(self.sizes):
            return None
        size = self.sizes[place]
        candidates = (
            GraphKey(GraphMode.FULL, size, is_uniform=is_uniform),
            GraphKey(GraphMode.FULL, size),
            GraphKey(GraphMode.PIECEWISE, size),
        )
        return next((key for key in candidates if key in self._keys), None)
