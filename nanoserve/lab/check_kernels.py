"""Judges Triton kernels of the reader's on small cases, beside what the package's twins compute in plain torch.

Whatever the machine: a GPU, or Triton's interpreter, which has to be chosen (TRITON_INTERPRET=1) before Triton is
imported. A kernel for the cache takes the place of the package's in the package's own launcher. Laws:
tests/test_exercises.py.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from nanoserve.attention_kernels import paged_attention_twin
from nanoserve.kernels import INTERPRETED, power_of_two, store_kv, store_kv_twin
from nanoserve.lab.check_engine import Fact
from nanoserve.lab.laws import Verdict, broken

UNTOUCHED = 7.0  # what is in the cache before
NUM_BLOCKS = 6
ROOM = 1 << 14  # numbers before and behind each tensor
DEVICE = "cpu" if INTERPRETED else "cuda"
HOLE = re.compile(r"raise NotImplementedError\(\"(.*)\"\)")


@contextmanager
def _quietly() -> Iterator[None]:
    """The interpreter computes with numpy, which warns where a GPU would not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _check_begun(kernel: Any) -> None:
    """A compiler has no use for a `raise`: the hole is told before. RuntimeError where no kernel can run."""
    if hole := HOLE.search(inspect.getsource(kernel.fn)):
        raise NotImplementedError(hole[1])
    if not INTERPRETED and not torch.cuda.is_available():
        raise RuntimeError("there is no GPU; set TRITON_INTERPRET=1 in the environment before Triton is imported")


# The cache's writes


@dataclass(frozen=True, slots=True)
class Store:
    """A case: tokens, heads, dimensions of a head, places in a block; the slots."""

    what: str
    num_heads: int
    head_dim: int
    slots: tuple[int, ...]
    block_size: int = 4
    is_view: bool = False  # k is a part of a fused q, k, v; v is not


_STORES = {
    "slots": [
        Store("two heads of 8", 2, 8, (0, 3, 9, 15)),
        Store("one token", 2, 8, (6,)),
        Store("one head", 1, 16, (5, 4, 7)),
    ],
    "padding": [Store("slots of -1", 2, 8, (2, -1, 8, -1))],
    "shapes": [Store("three heads of 6", 3, 6, (1, 12, 7)), Store("blocks of 16", 2, 8, (17, 30), 16)],
    "strides": [Store("k is a view into a fused q, k, v", 2, 8, (11, 0, 5), 4, True)],
}


def _launcher(kernel: Any) -> Callable[..., None]:
    """The package's, with another kernel."""
    around: dict[str, Any] = {**store_kv.__globals__, "_store_kv": kernel}
    return FunctionType(store_kv.__code__, around, store_kv.__name__, store_kv.__defaults__)


def stores(law: str) -> Callable[[Any], Verdict]:
    def look(kernel: Any) -> Verdict:
        _check_begun(kernel)
        for case in _STORES[law]:
            k, v = _keys_and_values(case)
            slots = torch.tensor(case.slots, device=DEVICE)
            yours, expected = (_Cache(case), _Cache(case)), (_Cache(case), _Cache(case))
            with _quietly():
                _launcher(kernel)(k, v, yours[0].inside, yours[1].inside, slots)
            store_kv_twin(k, v, expected[0].inside, expected[1].inside, slots)
            for name, one, other in zip(("key", "value"), yours, expected, strict=True):
                if (verdict := _compared(law, case, name, one, other)) is not None:
                    return verdict
        return Verdict(law=law)

    return look


class _Cache:
    """A cache with room around it."""

    def __init__(self, case: Store) -> None:
        shape = (NUM_BLOCKS, case.num_heads, case.block_size, case.head_dim)
        self.inside, self.whole = _with_room(torch.full(shape, UNTOUCHED), fill=UNTOUCHED)


def _with_room(tensor: Tensor, fill: float = 0) -> tuple[Tensor, Tensor]:
    """A copy in the middle of a larger buffer, and that buffer: a kernel that misses a tensor by a little harms nobody,
    and is seen."""
    whole = torch.full((tensor.numel() + 2 * ROOM,), fill, dtype=tensor.dtype, device=DEVICE)
    inside = whole[ROOM:-ROOM].view(tensor.shape)
    inside.copy_(tensor)
    return inside, whole


def _keys_and_values(case: Store) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (len(case.slots), 3 * case.num_heads, case.head_dim)
    fused, other = (torch.randn(shape, generator=generator) for _ in range(2))
    mine = slice(case.num_heads, 2 * case.num_heads)
    k = _with_room(fused)[0][:, mine] if case.is_view else _with_room(fused[:, mine])[0]
    return k, _with_room(other[:, mine])[0]


def _compared(law: str, case: Store, name: str, yours: _Cache, other: _Cache) -> Verdict | None:
    got, expected = yours.inside, other.inside
    wrong = (got != expected).nonzero()
    if not len(wrong):
        if torch.equal(yours.whole, other.whole):
            return None
        return broken(law, 0, case.what, "nothing written outside of the cache", f"a {name} written beside it")
    block, head, place, dim = wrong[0].tolist()
    slot = block * case.block_size + place
    token = f"token {case.slots.index(slot)}" if slot in case.slots else "no token"
    where = f"{case.what}: {name}[{block}, {head}, {place}, {dim}], slot {slot}, of {token}"
    values = [f"{t[block, head, place, dim].item():.4f}" for t in (expected, got)]
    values = [f"{value} (untouched)" if float(value) == UNTOUCHED else value for value in values]
    return broken(law, 0, where, *values)


STORE_FACTS = [
    Fact("slots", "Each key and value is where its slot says, and nothing else has changed.", stores("slots")),
    Fact("padding", "A slot of -1 writes nothing.", stores("padding")),
    Fact("shapes", "Heads and dimensions need not be powers of two.", stores("shapes")),
    Fact("strides", "Keys and values may be views with strides.", stores("strides")),
]


# Attention

TOLERANCE = 1e-4
BLOCK_SIZE = 4


@dataclass(frozen=True, slots=True)
class Attend:
    """A case: (queries, keys) of each row."""

    what: str
    rows: tuple[tuple[int, int], ...]
    num_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 8
    magnitude: float = 1.0
    poison: bool = False  # not a number, wherever no row has a key


_ATTENDS = {
    "decode": [Attend("one row, one block", ((1, 3),)), Attend("three rows", ((1, 3), (1, 8), (1, 5)))],
    "causal": [Attend("a prompt", ((6, 6),)), Attend("a chunk, and a decode beside it", ((4, 9), (1, 7)))],
    "groups": [Attend("four heads, two of keys", ((1, 5), (3, 6)), num_heads=4)],
    "shapes": [Attend("heads of 6", ((1, 5), (2, 4)), head_dim=6)],
    "range": [Attend("scores of some hundreds", ((1, 9), (2, 6)), magnitude=20.0)],
    "strangers": [Attend("not a number behind the last key", ((1, 5), (2, 3)), poison=True)],
}


class Batch:
    """Tensors of a case; each row's blocks lie in the cache in disorder."""

    def __init__(self, case: Attend) -> None:
        generator = torch.Generator().manual_seed(1)
        num_tokens = sum(n for n, _ in case.rows)
        num_blocks = 1 + sum(-(-length // BLOCK_SIZE) for _, length in case.rows)
        shape = (num_blocks, case.num_kv_heads, BLOCK_SIZE, case.head_dim)
        self.q = case.magnitude * torch.randn(num_tokens, case.num_heads, case.head_dim, generator=generator)
        self.keys, self.values = (torch.randn(shape, generator=generator) for _ in range(2))
        self.table = torch.zeros(len(case.rows), max(-(-n // BLOCK_SIZE) for _, n in case.rows), dtype=torch.int64)
        ids = iter(reversed(range(1, num_blocks)))
        self.rows, self.positions = [], []
        has_key = torch.zeros(num_blocks, BLOCK_SIZE, dtype=torch.bool)
        for row, (num_queries, length) in enumerate(case.rows):
            for index in range(-(-length // BLOCK_SIZE)):
                self.table[row, index] = block = next(ids)
                has_key[block, : length - index * BLOCK_SIZE] = True
            self.rows += [row] * num_queries
            self.positions += range(length - num_queries, length)
        starts = [sum(n for n, _ in case.rows[:row]) for row in range(len(case.rows) + 1)]
        lengths = torch.tensor([length for _, length in case.rows])
        twin = (self.q, self.keys, self.values, self.table, torch.tensor(starts), lengths)
        self.expected = paged_attention_twin(*twin)
        if case.poison:
            for cache in (self.keys, self.values):
                cache.masked_fill_(~has_key[:, None, :, None], float("nan"))

    def launch(self, kernel: Any, case: Attend) -> Tensor:
        out = _with_room(torch.zeros_like(self.q))[0]
        tensors = (self.q, self.keys, self.values, self.table, torch.tensor(self.rows), torch.tensor(self.positions))
        kernel[(len(self.rows), case.num_heads)](
            *(_with_room(tensor)[0] for tensor in tensors),
            out,
            self.table.shape[1],
            case.head_dim**-0.5,
            GROUP=case.num_heads // case.num_kv_heads,
            HEAD_DIM=case.head_dim,
            BLOCK_SIZE=BLOCK_SIZE,
            TILE_DIM=power_of_two(case.head_dim),
        )
        return out.cpu()


def attends(law: str) -> Callable[[Any], Verdict]:
    def look(kernel: Any) -> Verdict:
        _check_begun(kernel)
        for case in _ATTENDS[law]:
            batch = Batch(case)
            with _quietly():
                got = batch.launch(kernel, case)
            wrong = [place for place in _places(got) if not _is_close(got[place], batch.expected[place])]
            if wrong:
                token, head = wrong[0]
                where = f"{case.what}: query {token}, at position {batch.positions[token]} of its row, head {head}"
                told = (" ".join(f"{x:.3f}" for x in t[wrong[0]][:4].tolist()) for t in (batch.expected, got))
                return broken(law, 0, where, *(f"{text} ..." for text in told))
        return Verdict(law=law)

    return look


def _places(out: Tensor) -> Iterator[tuple[int, int]]:
    return ((token, head) for token in range(out.shape[0]) for head in range(out.shape[1]))


def _is_close(one: Tensor, other: Tensor) -> bool:
    return bool(torch.allclose(one, other, atol=TOLERANCE, rtol=TOLERANCE))


ATTENTION_FACTS = [
    Fact("decode", "A query sees all keys of its row, through the block table.", attends("decode")),
    Fact("causal", "It sees none behind its own position.", attends("causal")),
    Fact("groups", "Several heads of queries may share one of keys.", attends("groups")),
    Fact("shapes", "The dimensions of a head need not be a power of two.", attends("shapes")),
    Fact("range", "Scores of any size are weighed without overflow.", attends("range")),
    Fact("strangers", "What lies behind the last key has no influence.", attends("strangers")),
]
