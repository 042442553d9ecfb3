"""Attention over a paged cache as one Triton kernel, for any mix of prefill, chunk and decode rows in one launch.

A program handles a tile of queries of one row and one key head: online softmax (Milakov and Gimelshein 2018, the
heart of FlashAttention) over the row's keys, found through its block table. Where a batch is too small to fill the
device, the keys of a tile are split among programs, and a second kernel joins the parts (flash decoding). Grid and
block shapes follow from shapes of tensors alone, never from what is in them: no step waits for the device, and a CUDA
graph can capture the launch. triton_attention.py is the backend made of it. Laws: tests/test_kernels.py.
"""

# Triton, not Python, types the arguments of a kernel, when it is launched.
# pyright: reportMissingParameterType=false, reportCallIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoserve.kernels import Chip, current_chip, power_of_two, warps_for

MAX_SPLITS = 64
SPARE_BYTES = 4096  # of shared memory, for block ids on their way and sums between warps
MIN_KEYS_PER_SPLIT = 256  # fewer are read sooner than a second kernel starts


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "table_stride_r"])
def _paged_attention(
    q_ptr,  # [T, H, D]
    keys_ptr,  # [N, K, P, D]
    values_ptr,  # [N, K, P, D], strides as keys
    block_table_ptr,  # [R, B]
    query_start_loc_ptr,  # [R + 1]
    seq_lens_ptr,  # [R]
    out_ptr,  # [T, H, S, D], contiguous: the result, or with S > 1 the weighted sum of each split, float32
    max_ptr,  # [T, H, S] float32: the greatest score of each split, if S > 1
    sum_ptr,  # [T, H, S] float32: the sum of its weights, if S > 1
    num_tokens,  # T
    num_rows,  # R
    q_stride_t,
    q_stride_h,
    cache_stride_n,
    cache_stride_k,
    cache_stride_p,
    table_stride_r,
    scale,  # log2(e) / sqrt(D)
    GROUP: tl.constexpr,  # G = H / K
    HEAD_DIM: tl.constexpr,  # D
    BLOCK_SIZE: tl.constexpr,  # P
    NUM_SPLITS: tl.constexpr,  # S
    TILE_ROWS: tl.constexpr,  # M: pairs of a query and one of the G heads that read the same keys
    TILE_KEYS: tl.constexpr,  # L
    TILE_DIM: tl.constexpr,  # D, rounded up to a power of two
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_heads = tl.num_programs(1) * GROUP
    TILE_QUERIES: tl.constexpr = TILE_ROWS // GROUP

    # Row r begins at tile start[r] // TILE_QUERIES + r. The + r leaves it one tile more than its share, enough for a
    # last one that is not full, so that no tile has queries of two rows. Ours is the last row that begins by here.
    row = 0
    beyond = num_rows
    while beyond - row > 1:
        middle = (row + beyond) // 2
        first_tile = tl.load(query_start_loc_ptr + middle).to(tl.int32) // TILE_QUERIES + middle
        row = tl.where(first_tile <= tile, middle, row)
        beyond = tl.where(first_tile <= tile, beyond, middle)
    start = tl.load(query_start_loc_ptr + row).to(tl.int32)
    end = tl.load(query_start_loc_ptr + row + 1).to(tl.int32)
    first_token = start + (tile - start // TILE_QUERIES - row) * TILE_QUERIES
    # Tokens behind the last row get zeros, from its programs: the output may start as uninitialised memory.
    out_end = tl.where(row == num_rows - 1, num_tokens, end)
    if first_token >= out_end:
        return

    m_M = tl.arange(0, TILE_ROWS)
    token_M = first_token + m_M // GROUP
    head_M = kv_head * GROUP + m_M % GROUP
    is_out_M = (m_M < TILE_QUERIES * GROUP) & (token_M < out_end)
    is_query_M = is_out_M & (token_M < end)
    dim_D = tl.arange(0, TILE_DIM)
    is_dim_D = dim_D < HEAD_DIM
    q_offset_M = token_M.to(tl.int64) * q_stride_t + head_M * q_stride_h
    q_ptr_MD = q_ptr + q_offset_M[:, None] + dim_D[None, :]
    q_MD = tl.load(q_ptr_MD, mask=is_query_M[:, None] & is_dim_D[None, :], other=0.0)

    seq_len = tl.load(seq_lens_ptr + row).to(tl.int32)
    past = seq_len - (end - start)
    position_M = past + token_M - start
    # The keys that the last query of the tile sees, and of these the ones of our split.
    num_keys = tl.minimum(seq_len, past + first_token - start + TILE_QUERIES)
    split_len = tl.cdiv(num_keys, NUM_SPLITS * TILE_KEYS) * TILE_KEYS
    split_start = split * split_len
    split_end = tl.minimum(split_start + split_len, num_keys)

    table_ptr = block_table_ptr + row * table_stride_r
    keys_head_ptr = keys_ptr + kv_head * cache_stride_k
    values_head_ptr = values_ptr + kv_head * cache_stride_k
    # Weights are relative to the greatest score so far; when that grows, what was summed up shrinks to match. It
    # starts below any score but finite: a query that sees no key of a split would else compute -inf - -inf.
    max_M = tl.full([TILE_ROWS], -1e30, tl.float32)
    sum_M = tl.zeros([TILE_ROWS], tl.float32)
    acc_MD = tl.zeros([TILE_ROWS, TILE_DIM], tl.float32)
    for first_key in range(split_start, split_end, TILE_KEYS):
        position_L = first_key + tl.arange(0, TILE_KEYS)
        # Never read beyond the row's keys: 0 * NaN would be NaN.
        is_key_L = position_L < num_keys
        block_L = tl.load(table_ptr + position_L // BLOCK_SIZE, mask=is_key_L, other=0)
        # 64 bits: a block id times the numbers of a block passes 2^31 in a cache of a few GB.
        offset_L = block_L.to(tl.int64) * cache_stride_n + position_L % BLOCK_SIZE * cache_stride_p
        k_ptr_DL = keys_head_ptr + offset_L[None, :] + dim_D[:, None]
        v_ptr_LD = values_head_ptr + offset_L[:, None] + dim_D[None, :]
        k_DL = tl.load(k_ptr_DL, mask=is_dim_D[:, None] & is_key_L[None, :], other=0.0)
        v_LD = tl.load(v_ptr_LD, mask=is_key_L[:, None] & is_dim_D[None, :], other=0.0)
        score_ML = tl.dot(q_MD, k_DL, input_precision="ieee") * scale
        score_ML = tl.where(position_L[None, :] <= position_M[:, None], score_ML, -float("inf"))
        new_max_M = tl.maximum(max_M, tl.max(score_ML, axis=1))
        rescale_M = tl.exp2(max_M - new_max_M)
        weight_ML = tl.exp2(score_ML - new_max_M[:, None])
        sum_M = sum_M * rescale_M + tl.sum(weight_ML, axis=1)
        acc_MD = tl.dot(weight_ML.to(v_LD.dtype), v_LD, acc_MD * rescale_M[:, None], input_precision="ieee")
        max_M = new_max_M

    acc_MD = tl.where(is_query_M[:, None], acc_MD, 0.0)
    sum_M = tl.where(is_query_M, sum_M, 0.0)
    index_M = (token_M.to(tl.int64) * num_heads + head_M) * NUM_SPLITS + split
    if NUM_SPLITS == 1:
        # The greatest score weighs 1, so a sum is at least that, or 0 without a key: then the result is 0.
        acc_MD = acc_MD / tl.maximum(sum_M, 1.0)[:, None]
    else:
        tl.store(max_ptr + index_M, max_M, mask=is_out_M)
        tl.store(sum_ptr + index_M, sum_M, mask=is_out_M)
    out_ptr_MD = out_ptr + index_M[:, None] * HEAD_DIM + dim_D[None, :]
    tl.store(out_ptr_MD, acc_MD.to(out_ptr.dtype.element_ty), mask=is_out_M[:, None] & is_dim_D[None, :])


@triton.jit
def _join_splits(
    split_out_ptr,  # [T, H, S, D] float32, contiguous
    max_ptr,  # [T, H, S] float32, contiguous
    sum_ptr,  # [T, H, S] float32, contiguous
    out_ptr,  # [T, H, D], contiguous
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    # The same rescaling as between two tiles of keys, for all splits at once.
    head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    dim_D = tl.arange(0, TILE_DIM)
    split_S = head * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    max_S = tl.load(max_ptr + split_S)
    weight_S = tl.exp2(max_S - tl.max(max_S, axis=0))
    total = tl.sum(tl.load(sum_ptr + split_S) * weight_S, axis=0)
    split_ptr_SD = split_out_ptr + split_S[:, None] * HEAD_DIM + dim_D[None, :]
    part_SD = tl.load(split_ptr_SD, mask=(dim_D < HEAD_DIM)[None, :], other=0.0)
    out_D = tl.sum(part_SD * weight_S[:, None], axis=0) / tl.maximum(total, 1.0)
    tl.store(out_ptr + head * HEAD_DIM + dim_D, out_D.to(out_ptr.dtype.element_ty), mask=dim_D < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class Tile:
    """The block shape of `_paged_attention`, and how the compiler spreads it over the device."""

    rows: int  # of queries times heads of a group; a power of two, at least 16 (tensor cores) and the group
    keys: int  # read at a time; a power of two, at least 16
    num_warps: int
    num_stages: int  # loads of keys in flight, in shared memory


def pick_tile(chip: Chip, dtype: torch.dtype, head_dim: int, group: int, queries_per_row: float) -> Tile:
    """As many rows as a typical row of the batch has, for keys that are read once serve them all; not more, for
    rows without a query cost as much. Wider heads get less of both, and float32 the least: its exact products are no
    work for NVIDIA's tensor cores.
    """
    tile_dim = max(16, power_of_two(head_dim))
    at_least = max(16, power_of_two(group))
    if dtype == torch.float32:
        return Tile(at_least, keys=32, num_warps=4, num_stages=1)
    wanted = power_of_two(math.ceil(group * queries_per_row))
    rows = max(at_least, min(wanted, 128 if tile_dim <= 128 else 64))
    keys = 64 if tile_dim <= 128 else 32
    # The accumulator has rows * tile_dim numbers: 1024 a warp are 32 registers a thread of 32.
    num_warps = min(8, max(4, rows * tile_dim // 1024))
    if chip.backend == "hip":
        return Tile(rows, keys, num_warps, num_stages=2)  # more do not fit into 64 KiB
    # Where a tile of keys lies is itself loaded, so a tile takes two stages to arrive: 4 + 1 keep two on their way,
    # and a third in use, if queries and three tiles of keys and values fit.
    shared_bytes = (rows + 3 * 2 * keys) * tile_dim * dtype.itemsize + SPARE_BYTES
    return Tile(rows, keys, num_warps, num_stages=5 if shared_bytes <= chip.shared_bytes else 3)


def pick_num_splits(chip: Chip, num_programs: int, max_keys: int) -> int:
    """Parts that the keys of each tile are cut into: two programs for each core, if the context is long enough."""
    wanted = min(2 * chip.num_cores // num_programs, max_keys // MIN_KEYS_PER_SPLIT, MAX_SPLITS)
    return 1 << max(1, wanted).bit_length() - 1


def paged_attention(
    q_THD: Tensor,
    keys_NKPD: Tensor,
    values_NKPD: Tensor,
    block_table_RB: Tensor,
    query_start_loc_R1: Tensor,
    seq_lens_R: Tensor,
    *,
    tile: Tile | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, causal, over each row's blocks: a new tensor [T, H, D].

    Row r is queries `query_start_loc[r] : query_start_loc[r + 1]`, which stand at the last of `seq_lens[r]` positions.
    Rows of key length 0, and tokens behind the last row, get zeros and read nothing of the cache. Any block size, any
    head dim, any group of query heads to a key head; index tensors are int32 or int64.
    `tile` and `num_splits`, a power of two, are picked by device and shapes; the order of sums, and so the last bits
    of the result, depend on both: fix them for results that are the same in every batch.
    Mirrors vLLM's `triton_unified_attention`, of which the packing of rows and the search for them are taken.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    num_rows, num_kv_heads, block_size = len(seq_lens_R), keys_NKPD.shape[1], keys_NKPD.shape[2]
    if num_tokens == 0 or num_rows == 0:
        return torch.zeros(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    assert q_THD.stride(-1) == keys_NKPD.stride(-1) == block_table_RB.stride(-1) == 1, "gaps inside a vector"
    assert keys_NKPD.stride() == values_NKPD.stride(), (keys_NKPD.stride(), values_NKPD.stride())
    chip = current_chip()
    group = num_heads // num_kv_heads
    tile = tile or pick_tile(chip, q_THD.dtype, head_dim, group, num_tokens / num_rows)
    # Every row may have one tile that is not full.
    num_tiles = num_tokens // (tile.rows // group) + num_rows
    if num_splits is None:
        num_splits = pick_num_splits(chip, num_tiles * num_kv_heads, block_table_RB.shape[1] * block_size)
    assert num_splits == power_of_two(num_splits), f"num_splits is {num_splits}, not a power of two"
    tile_dim = max(16, power_of_two(head_dim))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q_THD.device)

    out_THD = empty(num_tokens, num_heads, head_dim, dtype=q_THD.dtype)
    split_out, maxima, sums = out_THD, None, None
    if num_splits > 1:
        split_out = empty(num_tokens, num_heads, num_splits, head_dim)
        maxima, sums = empty(num_tokens, num_heads, num_splits), empty(num_tokens, num_heads, num_splits)
    _paged_attention[(num_tiles, num_kv_heads, num_splits)](
        q_THD,
        keys_NKPD,
        values_NKPD,
        block_table_RB,
        query_start_loc_R1,
        seq_lens_R,
        split_out,
        maxima,
        sums,
        num_tokens,
        num_rows,
        *q_THD.stride()[:2],
        *keys_NKPD.stride()[:3],
        block_table_RB.stride(0),
        math.log2(math.e) * head_dim**-0.5,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        NUM_SPLITS=num_splits,
        TILE_ROWS=tile.rows,
        TILE_KEYS=tile.keys,
        TILE_DIM=tile_dim,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
        _join_splits[(num_tokens, num_heads)](
            split_out,
            maxima,
            sums,
            out_THD,
            HEAD_DIM=head_dim,
            NUM_SPLITS=num_splits,
            TILE_DIM=tile_dim,
            num_warps=warps_for(num_splits * tile_dim),
        )
    return out_THD


def paged_attention_twin(
    q_THD: Tensor,
    keys_NKPD: Tensor,
    values_NKPD: Tensor,
    block_table_RB: Tensor,
    query_start_loc_R1: Tensor,
    seq_lens_R: Tensor,
) -> Tensor:
    """Row by row and query by query, with the whole softmax at once."""
    num_heads, num_kv_heads, block_size = q_THD.shape[1], keys_NKPD.shape[1], keys_NKPD.shape[2]
    out_THD = torch.zeros(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    starts = query_start_loc_R1.tolist()
    for row, seq_len in enumerate(seq_lens_R.tolist()):
        blocks = block_table_RB[row, : -(-seq_len // block_size)].long()
        k_LKD = keys_NKPD[blocks].transpose(1, 2).flatten(0, 1)[:seq_len].float()
        v_LKD = values_NKPD[blocks].transpose(1, 2).flatten(0, 1)[:seq_len].float()
        k_LHD = k_LKD.repeat_interleave(num_heads // num_kv_heads, dim=1)
        v_LHD = v_LKD.repeat_interleave(num_heads // num_kv_heads, dim=1)
        num_queries = starts[row + 1] - starts[row]
        for i in range(num_queries if seq_len else 0):
            num_seen = seq_len - num_queries + i + 1
            q_HD = q_THD[starts[row] + i].float() * q_THD.shape[2] ** -0.5
            weights_HL = torch.einsum("hd,lhd->hl", q_HD, k_LHD[:num_seen]).softmax(dim=-1)
            out_THD[starts[row] + i] = torch.einsum("hl,lhd->hd", weights_HL, v_LHD[:num_seen]).to(out_THD.dtype)
    return out_THD
