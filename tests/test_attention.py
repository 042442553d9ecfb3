"""Laws of attention over a paged cache, each backend against the definition written out in float64.

The cache starts as NaN, and tables are shuffled: whatever a backend reads beyond a row's own keys shows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nanoserve.attention as attention
from nanoserve.attention import PADDED_NUMBERS, AttentionBackend, AttentionBatch, TorchAttention, padded_groups
from nanoserve.cpu_attention import CpuAttention
from nanoserve.runner import KVCache
from nanoserve.triton_attention import TritonAttention

LAYER = 1  # of 2: a backend that ignores the layer reads NaN
LONGEST = PADDED_NUMBERS // (2 * 16)  # keys that a padded group of Case's default heads may have
MIXED_ROWS = [(5, 5), (1, 9), (1, 1), (3, 20), (1, 70), (16, 16), (7, 260), (1, 17), (2, 2)]  # (queries, keys)

# Of the matrix of (kv heads, group), head dim and block size, Triton's interpreter, 10 ms a program, gets a part here;
# test_kernels.py has the edges of its own.
SHAPES = list(product([(4, 1), (2, 2), (1, 4)], [16, 64, 80], [1, 3, 16, 256]))
compiled = partial(pytest.param, marks=pytest.mark.needs_cxx)
MATRIX = [pytest.param(TorchAttention, *shape) for shape in SHAPES]
MATRIX += [compiled(CpuAttention, *shape) for shape in [*SHAPES, ((3, 5), 1, 16), ((1, 71), 20, 7), ((2, 9), 33, 128)]]
MATRIX += [pytest.param(TritonAttention, *shape) for shape in [((2, 2), 16, 16), ((1, 4), 80, 3), ((1, 1), 64, 256)]]
BACKENDS = [TorchAttention, compiled(CpuAttention), TritonAttention]

Rows = list[tuple[int, int]]


class Case:
    """A batch of rows of random q, k and v, with the keys of earlier steps already in the cache."""

    def __init__(self, rows: Rows, *, num_kv_heads=2, group=2, head_dim=16, block_size=16, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.block_size = rows, block_size
        needed = [-(-seq_len // block_size) for _, seq_len in rows]
        self.cache = KVCache(
            num_layers=2,
            num_blocks=sum(needed) + 3,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            head_dim=head_dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        self.cache.blocks.fill_(torch.nan)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        shuffled = (torch.randperm(sum(needed) + 2, generator=generator) + 1).split([*needed, 2])
        self.tables = [blocks.tolist() for blocks in shuffled[:-1]]
        self.q = [random(n, num_kv_heads * group, head_dim) for n, _ in rows]
        self.k = [random(seq_len, num_kv_heads, head_dim) for _, seq_len in rows]
        self.v = [random(seq_len, num_kv_heads, head_dim) for _, seq_len in rows]

    def slots(self, row: int, first: int, end: int) -> list[int]:
        table, size = self.tables[row], self.block_size
        return [table[position // size] * size + position % size for position in range(first, end)]

    def batch(self) -> AttentionBatch:
        starts = [0]
        slots: list[int] = []
        for row, (n, seq_len) in enumerate(self.rows):
            starts.append(starts[-1] + n)
            slots += self.slots(row, seq_len - n, seq_len)
        widest = max(map(len, self.tables))
        return AttentionBatch(
            query_start_loc_R1=torch.tensor(starts),
            seq_lens_R=torch.tensor([seq_len for _, seq_len in self.rows]),
            block_table_RB=torch.tensor([table + [0] * (widest - len(table)) for table in self.tables]),
            slot_mapping_T=torch.tensor(slots),
            query_starts=starts,
            seq_lens=[seq_len for _, seq_len in self.rows],
        )

    def run(self, backend: AttentionBackend) -> list[Tensor]:
        """The output of each row, after earlier keys went in one by one and the batch's own in one call."""
        for row, (n, seq_len) in enumerate(self.rows):
            past = seq_len - n
            slots = torch.tensor(self.slots(row, 0, past), dtype=torch.int64)
            backend.store(self.k[row][:past], self.v[row][:past], self.cache, LAYER, slots)
        batch = self.batch()
        new_k = torch.cat([k[len(k) - n :] for k, (n, _) in zip(self.k, self.rows, strict=True)])
        new_v = torch.cat([v[len(v) - n :] for v, (n, _) in zip(self.v, self.rows, strict=True)])
        backend.store(new_k, new_v, self.cache, LAYER, batch.slot_mapping_T)
        before = self.cache.blocks.clone()
        out_THD = backend.attend(torch.cat(self.q), self.cache, LAYER, batch)
        assert torch.equal(before.view(torch.int16), self.cache.blocks.view(torch.int16)), "attend wrote to the cache"
        return list(out_THD.split([n for n, _ in self.rows]))

    def expected(self, row: int) -> Tensor:
        """The definition: query i of n sees keys 0 .. m - n + i."""
        q, k, v = (x[row].double() for x in (self.q, self.k, self.v))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        past = len(k) - len(q)
        out = []
        for i, q_HD in enumerate(q):
            seen = past + i + 1
            weights = (torch.einsum("hd,lhd->hl", q_HD, k[:seen]) * q_HD.shape[-1] ** -0.5).softmax(dim=-1)
            out.append(torch.einsum("hl,lhd->hd", weights, v[:seen]))
        return torch.stack(out)

    def rounding(self, row: int) -> Tensor:
        """What float32 may be off by, to first order: a score by the sum of its products' sizes, then the weights, then
        their sum. Of each number of `expected`."""
        q, k, v = (x[row].double() for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        hidden, scale = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1), q.shape[-1] ** -0.5
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        size = torch.einsum("qhd,khd->hqk", q.abs(), k.abs()) * scale
        spread = 1 + size + (weights * size).sum(dim=-1, keepdim=True)
        return 2**-23 * torch.einsum("hqk,khd->qhd", weights * spread, v.abs())


def check_definition(backend: AttentionBackend, case: Case, tolerance: float = 2e-6) -> None:
    for row, out in enumerate(case.run(backend)):
        error = (out.double() - case.expected(row)).abs().max().item()
        assert error < tolerance, f"row {case.rows[row]} (queries, keys) is off by {error}"  # NaN fails too


def check_skipped_slots(backend: AttentionBackend) -> None:
    """A token without a slot leaves no trace, wherever it stands in the batch."""
    case = Case([(4, 4)])
    slots = torch.tensor([-1, *case.slots(0, 1, 3), -1])
    backend.store(case.k[0], case.v[0], case.cache, LAYER, slots)
    written = case.cache.blocks.isfinite().any(dim=-1).nonzero().tolist()
    block = case.tables[0][0]
    assert written == [[LAYER, kv, block, head, place] for kv in (0, 1) for head in (0, 1) for place in (1, 2)]


@pytest.mark.parametrize(("backend", "heads", "head_dim", "block_size"), MATRIX)
def test_every_mix_of_rows_equals_the_definition(backend, heads, head_dim, block_size):
    num_kv_heads, group = heads
    case = Case(MIXED_ROWS, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_size=block_size)
    check_definition(backend(), case)


@pytest.mark.parametrize("backend", [TorchAttention, compiled(CpuAttention)])
@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=12),
    block_size=st.sampled_from([1, 2, 7, 16]),
    seed=st.integers(0, 99),
)
def test_every_random_mix_equals_the_definition(backend, rows, block_size, seed):
    rows = [(n, past + n) for n, past in rows]
    check_definition(backend(), Case(rows, block_size=block_size, seed=seed))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row_alone_equals_itself_in_a_batch(backend):
    rows = [(5, 5), (1, 9), (1, 1), (3, 20), (1, 70), (16, 16)]
    together = Case(rows, num_kv_heads=1)
    for row, out in enumerate(together.run(backend())):
        alone = Case([rows[row]], num_kv_heads=1)
        alone.q, alone.k, alone.v = [together.q[row]], [together.k[row]], [together.v[row]]
        torch.testing.assert_close(alone.run(backend())[0], out, atol=1e-6, rtol=0)


@pytest.mark.parametrize("lens", [range(1, 60), [30] * 40, [1, LONGEST, LONGEST + 1, 3], [500, 3, 500, 4]])
def test_every_single_query_in_a_padded_group_equals_the_definition(lens):
    check_definition(TorchAttention(), Case([(1, seq_len) for seq_len in lens]))


@given(seq_lens=st.lists(st.integers(1, 300), max_size=60), max_keys=st.integers(0, 1000))
def test_every_row_is_in_one_group_and_no_group_is_padded_beyond_the_bound(seq_lens, max_keys):
    groups = padded_groups(range(len(seq_lens)), seq_lens, max_keys)
    assert sorted(row for group in groups for row in group) == list(range(len(seq_lens)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(seq_lens[row] for row in group) <= max_keys


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_token_without_a_slot_is_skipped(backend):
    check_skipped_slots(backend())


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_padding_row_is_harmless(backend):
    """Rows of key length 0 behind the live ones: finite output of their own, and no effect on the others."""
    case = Case([(3, 8), (1, 5)])
    live = torch.cat(case.run(backend()))
    batch = case.batch()
    padded = replace(
        batch,
        query_start_loc_R1=torch.tensor([*batch.query_starts, 5, 6]),
        seq_lens_R=torch.tensor([*batch.seq_lens, 0, 0]),
        block_table_RB=torch.cat((batch.block_table_RB, torch.zeros(2, 1, dtype=torch.int64))),
        query_starts=[*batch.query_starts, 5, 6],
        seq_lens=[*batch.seq_lens, 0, 0],
    )
    q = torch.cat((*case.q, torch.full((2, 4, 16), torch.nan)))
    out = backend().attend(q, case.cache, LAYER, padded)
    assert torch.equal(out[:4], live)
    assert out[4:].isfinite().all()


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (TorchAttention, torch.float16),
        compiled(CpuAttention, torch.float32),
        (TritonAttention, torch.float16),
    ],
)
def test_every_offset_into_the_cache_is_64_bit(backend, dtype):
    layer = 0 if dtype is torch.float32 else LAYER
    case = Case([(3, 7), (1, 5)], num_kv_heads=1, head_dim=64, block_size=256, dtype=dtype)
    case.cache = KVCache(
        num_layers=layer + 1,
        num_blocks=2**31 // (256 * 64) + 10,  # uninitialised: only what is written is committed
        num_kv_heads=1,
        block_size=256,
        head_dim=64,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    case.tables = [[case.cache.num_blocks - 1], [case.cache.num_blocks - 3]]
    slots = torch.tensor(case.slots(0, 0, 7))
    assert (slots * 64 > 2**31).all()
    backend().store(case.k[0], case.v[0], case.cache, layer, slots)
    backend().store(case.k[1], case.v[1], case.cache, layer, torch.tensor(case.slots(1, 0, 5)))
    out = backend().attend(torch.cat(case.q), case.cache, layer, case.batch())
    expected = torch.cat((case.expected(0), case.expected(1)))
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=0)


# Products in bfloat16 are wrong in Triton's interpreter, which multiplies their bits as integers.
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [
        (TorchAttention, torch.float16, 4e-3),
        (TorchAttention, torch.bfloat16, 3e-2),
        (TritonAttention, torch.float16, 4e-3),
    ],
)
def test_every_dtype_stays_what_it_was(backend, dtype, tolerance):
    case = Case([(4, 9), (1, 6), (1, 3)], dtype=dtype)
    assert all(out.dtype == dtype for out in case.run(backend()))
    check_definition(backend(), Case([(4, 9), (1, 6), (1, 3)], dtype=dtype), tolerance)


# Planted bugs: each law above must see its own.


class KeysOfThisStepOnly(TorchAttention):
    """Takes the number of new tokens, i.e. the prompt's length on the first step, for the number of keys."""

    def attend(self, q_THD, kv_cache, layer, batch):
        lens = [end - start for start, end in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
        return super().attend(q_THD, kv_cache, layer, replace(batch, seq_lens=lens, seq_lens_R=torch.tensor(lens)))


class WritesEverySlot(TorchAttention):
    """Lets slot -1 wrap around to the last place of the last block."""

    def store(self, k_TKD, v_TKD, kv_cache, layer, slot_mapping_T):
        size = kv_cache.block_size
        keys, values = kv_cache.blocks[layer]
        keys[slot_mapping_T // size, :, slot_mapping_T % size] = k_TKD
        values[slot_mapping_T // size, :, slot_mapping_T % size] = v_TKD


def test_a_planted_wrong_key_length_is_seen():
    check_definition(KeysOfThisStepOnly(), Case([(4, 4)]))
    with pytest.raises(AssertionError, match="off by"):
        check_definition(KeysOfThisStepOnly(), Case([(4, 9)]))


def test_a_planted_write_to_slot_minus_one_is_seen():
    with pytest.raises(AssertionError):
        check_skipped_slots(WritesEverySlot())


def test_a_planted_missing_causal_mask_is_seen(monkeypatch):
    monkeypatch.setattr(attention, "causal_mask", lambda n, m, like: like.new_zeros(n, m))
    with pytest.raises(AssertionError, match="off by"):
        check_definition(TorchAttention(), Case([(4, 9)]))


def test_a_planted_mask_over_uncleared_padding_is_seen(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "masked_fill_", lambda tensor, mask, value: tensor)
    with pytest.raises(AssertionError, match="off by nan"):
        check_definition(TorchAttention(), Case([(1, 9), (1, 3)]))
