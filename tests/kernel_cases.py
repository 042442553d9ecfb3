"""What the kernels are compared on: small tensors for each kernel, and its law as a function of that kernel.

A law takes the kernels' modules as arguments, so that a planted bug, an edited copy of their source, meets the same
one. All run in Triton's interpreter, where a program costs about 10 ms: heads are few, and contexts short.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
import torch.utils.deterministic
from torch import Tensor

from nanoserve import attention_kernels, kernels
from nanoserve.attention_kernels import Tile

# Errors of results of about 1. In bfloat16 the interpreter's matrix products are wrong, so that only element-wise
# kernels are compared in it, and it cuts bits off where a GPU rounds.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

Rows = list[tuple[int, int]]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fused_qkv(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype):
    """q, k and v as the model has them: views into one product, with gaps between the tokens of each."""
    qkv = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    return qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)


def check_close(out: Tensor, expected: Tensor, what: str) -> None:
    assert out.dtype == expected.dtype, what
    assert out.shape == expected.shape, what
    error = ((out.double() - expected.double()).abs() / expected.double().abs().clamp_min(1)).max().item()
    assert error < TOLERANCE[out.dtype], f"{what} is off by {error}"  # NaN fails too


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """What a kernel leaves out of an uninitialised output shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass
class PagedCase:
    """Rows of (queries, keys) over a cache in which every place that no row owns is NaN."""

    rows: Rows
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    stray_tokens: int = 0  # behind the last row
    tile: Tile | None = None
    num_splits: int | None = None
    q: Tensor = field(init=False)
    cache: Tensor = field(init=False)  # [2, N, K, P, D]
    table: Tensor = field(init=False)
    starts: Tensor = field(init=False)
    lens: Tensor = field(init=False)

    def __post_init__(self) -> None:
        needed = [-(-keys // self.block_size) for _, keys in self.rows]
        num_blocks = sum(needed) + 2
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1  # block 0 is nobody's
        shape = (2, num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        self.cache = torch.full(shape, torch.nan, dtype=self.dtype)
        self.table = torch.zeros(len(self.rows), max([1, *needed]), dtype=self.index_dtype)
        for row, (_, keys) in enumerate(self.rows):
            blocks, order = order[: needed[row]], order[needed[row] :]
            self.table[row, : needed[row]] = blocks
            for position in range(keys):
                place = (slice(None), blocks[position // self.block_size], slice(None), position % self.block_size)
                self.cache[place] = random(2, self.num_kv_heads, self.head_dim, dtype=self.dtype, seed=position)
        queries = torch.tensor([0, *(queries for queries, _ in self.rows)])
        self.starts = queries.cumsum(0).to(self.index_dtype)
        self.lens = torch.tensor([keys for _, keys in self.rows], dtype=self.index_dtype)
        num_tokens = int(self.starts[-1]) + self.stray_tokens
        self.q = fused_qkv(num_tokens, self.num_kv_heads * self.group, self.num_kv_heads, self.head_dim, self.dtype)[0]

    @property
    def args(self) -> tuple[Tensor, ...]:
        return (self.q, *self.cache, self.table, self.starts, self.lens)

    def run(self, module: ModuleType = attention_kernels) -> Tensor:
        with fresh_memory_is_nan():
            return module.paged_attention(*self.args, tile=self.tile, num_splits=self.num_splits)

    def check(self, module: ModuleType = attention_kernels) -> None:
        before = self.cache.clone()
        out = self.run(module)
        check_close(out, attention_kernels.paged_attention_twin(*self.args), f"attention of {self.rows}")
        assert out[int(self.starts[-1]) :].eq(0).all(), "tokens of no row are not zero"
        assert torch.equal(before.view(torch.uint8), self.cache.view(torch.uint8)), "attention wrote to the cache"


def check_store(
    slots: list[int],
    *,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int64,
    module: ModuleType = kernels,
) -> None:
    """Each token where the twin puts it, and not a bit changed elsewhere, before and behind the cache included."""
    _, k_TKD, v_TKD = fused_qkv(len(slots), 3, 3, head_dim, dtype)
    memory = torch.full((2, 7, 3, block_size, head_dim), torch.nan, dtype=dtype)
    expected = memory.clone()
    slot_mapping_T = torch.tensor(slots, dtype=index_dtype)
    module.store_kv(k_TKD, v_TKD, *memory[:, 1:6], slot_mapping_T)
    kernels.store_kv_twin(k_TKD, v_TKD, *expected[:, 1:6], slot_mapping_T)
    assert torch.equal(memory.view(torch.uint8), expected.view(torch.uint8)), f"slots {slots} are not as written"


def check_far_block(
    index_dtype: torch.dtype, store: ModuleType = kernels, attention: ModuleType = attention_kernels
) -> None:
    """A row in the last block of a cache of 2^31 numbers.

    It is memory that is asked for and hardly touched. As much stands before the cache: an offset that has wrapped
    around to below zero goes there, not into other memory of this process.
    """
    block_size, head_dim = 256, 64
    num_blocks = 2**31 // (block_size * head_dim) + 4
    shape = (2 * num_blocks, 1, block_size, head_dim)
    keys_NKPD, values_NKPD = (torch.empty(shape, dtype=torch.float16)[num_blocks:] for _ in range(2))
    q_THD, k_TKD, v_TKD = fused_qkv(2, 2, 1, head_dim, torch.float16)
    far = num_blocks - 1
    slots_T = torch.tensor([far * block_size, far * block_size + 1], dtype=index_dtype)
    store.store_kv(k_TKD, v_TKD, keys_NKPD, values_NKPD, slots_T)
    assert torch.equal(keys_NKPD[far, 0, :2], k_TKD[:, 0]), "keys are not in the far block"
    assert torch.equal(values_NKPD[far, 0, :2], v_TKD[:, 0]), "values are not in the far block"
    table, starts, lens = (torch.tensor(numbers, dtype=index_dtype) for numbers in ([[far]], [0, 2], [2]))
    args = (q_THD, keys_NKPD, values_NKPD, table, starts, lens)
    check_close(attention.paged_attention(*args), attention_kernels.paged_attention_twin(*args), "a far block")


def check_norms(dtype: torch.dtype, size: int, module: ModuleType = kernels) -> None:
    x, residual = 3 * random(3, size, dtype=dtype), random(3, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    before = (x.clone(), residual.clone())
    check_close(module.rms_norm(x, weight, 1e-5), kernels.rms_norm_twin(x, weight, 1e-5), "norm")
    normed, stream = module.add_rms_norm(x, residual, weight, 1e-5)
    expected_normed, expected_stream = kernels.add_rms_norm_twin(x, residual, weight, 1e-5)
    if dtype == torch.bfloat16:
        check_close(stream, expected_stream, "x + residual")
    else:
        assert torch.equal(stream, expected_stream), "the stream is not x + residual"
    check_close(normed, expected_normed, "norm of a sum")
    assert torch.equal(x, before[0]), "x changed"
    assert torch.equal(residual, before[1]), "residual changed"


def check_rotary(dtype: torch.dtype, head_dim: int, module: ModuleType = kernels) -> None:
    q_THD, k_TKD, _ = fused_qkv(3, 6, 2, head_dim, dtype)
    angles_TI = 10 * random(3, head_dim // 2, seed=3)
    cos_TI, sin_TI = angles_TI.cos().to(dtype), angles_TI.sin().to(dtype)
    out = module.rotary(q_THD, k_TKD, cos_TI, sin_TI)
    for name, turned, expected in zip("qk", out, kernels.rotary_twin(q_THD, k_TKD, cos_TI, sin_TI), strict=True):
        check_close(turned, expected, f"turned {name}")


def check_silu(dtype: torch.dtype, size: int, module: ModuleType = kernels) -> None:
    gate_up_TI2 = 4 * random(3, 2 * size, dtype=dtype)
    check_close(module.silu_and_mul(gate_up_TI2), kernels.silu_and_mul_twin(gate_up_TI2), "SwiGLU")


def mutant(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """A copy of the module with one piece of its source replaced. The piece must be there, and once."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {module.__name__}"
    name = f"mutant_of_{module.__name__.rpartition('.')[2]}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy  # dataclasses look their module up
    spec.loader.exec_module(copy)
    return copy
