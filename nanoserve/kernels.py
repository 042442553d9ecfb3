"""Triton kernels of the element-wise steps between matrix products, and of writing to the KV cache.

For each: the kernel, `name(...)` that launches it, and `name_twin(...)`, which says in plain torch what it computes.
A program is one token unless its kernel says otherwise: between two products a GPU waits for memory, so what counts
is that each number is read and written once. Sums and roots are float32, whatever the tensors are. Launching asks
nothing of the device's memory, so a CUDA graph can capture it. Knows no model; ops.py offers these to it, and
attention_kernels.py holds the one kernel that is not element-wise. Laws: tests/test_kernels.py.
"""

# Triton, not Python, types the arguments of a kernel, when it is launched.
# pyright: reportMissingParameterType=false, reportCallIssue=false

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import driver

# Decided when a kernel is defined, i.e. when this module is imported: a process interprets kernels or compiles them.
INTERPRETED: bool = bool(knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Chip:
    """What a launch function wants to know of the device that it launches on."""

    backend: str  # "cuda", "hip" (AMD), or "cpu" for Triton's interpreter
    num_cores: int  # streaming multiprocessors, compute units
    shared_bytes: int  # that one program may use


def current_chip() -> Chip:
    """The device that a launch would go to. RuntimeError where there is none and kernels are not interpreted."""
    if INTERPRETED:
        return Chip("cpu", num_cores=1, shared_bytes=2**40)
    active: Any = driver.active
    return _chip(active.get_current_device())


@functools.cache
def _chip(device_index: int) -> Chip:
    active: Any = driver.active
    properties = active.utils.get_device_properties(device_index)
    backend = active.get_current_target().backend
    return Chip(backend, properties["multiprocessor_count"], properties["max_shared_mem"])


def power_of_two(at_least: int) -> int:
    """The size of a tile that holds so many numbers: Triton's tiles are powers of two, and masked where they end."""
    return 1 << (at_least - 1).bit_length()


def warps_for(num_elements: int) -> int:
    """For a program that handles so many numbers at a time: about 8 a lane, which is one 16-byte load in 16 bits."""
    return min(8, max(1, num_elements // 256))


# The KV cache


@triton.jit
def _store_kv(
    k_ptr,  # [T, K, D]
    v_ptr,  # [T, K, D]
    keys_ptr,  # [N, K, P, D]
    values_ptr,  # [N, K, P, D], strides as keys
    slot_mapping_ptr,  # [T]
    k_stride_t,
    k_stride_k,
    v_stride_t,
    v_stride_k,
    cache_stride_n,
    cache_stride_k,
    cache_stride_p,
    NUM_HEADS: tl.constexpr,  # K
    HEAD_DIM: tl.constexpr,  # D
    BLOCK_SIZE: tl.constexpr,  # P
    TILE_HEADS: tl.constexpr,  # K and D, rounded up to powers of two
    TILE_DIM: tl.constexpr,
):
    # A slot times the numbers of a token passes 2^31 in a cache of a few GB.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head_K = tl.arange(0, TILE_HEADS)[:, None]
    dim_D = tl.arange(0, TILE_DIM)[None, :]
    is_there_KD = (head_K < NUM_HEADS) & (dim_D < HEAD_DIM)
    k_KD = tl.load(k_ptr + token * k_stride_t + head_K * k_stride_k + dim_D, mask=is_there_KD)
    v_KD = tl.load(v_ptr + token * v_stride_t + head_K * v_stride_k + dim_D, mask=is_there_KD)
    place = slot // BLOCK_SIZE * cache_stride_n + slot % BLOCK_SIZE * cache_stride_p
    offset_KD = place + head_K * cache_stride_k + dim_D
    tl.store(keys_ptr + offset_KD, k_KD, mask=is_there_KD)
    tl.store(values_ptr + offset_KD, v_KD, mask=is_there_KD)


def store_kv(k_TKD: Tensor, v_TKD: Tensor, keys_NKPD: Tensor, values_NKPD: Tensor, slot_mapping_T: Tensor) -> None:
    """Write each token's key and value to its slot of the cache; nothing where the slot is -1.

    slot = block_id * block_size + offset, int32 or int64. k and v may be views into a fused q, k, v, as long as the
    numbers of a head are side by side. Mirrors vLLM's `reshape_and_cache_flash`, in another layout.
    """
    num_tokens, num_heads, head_dim = k_TKD.shape
    if num_tokens == 0:
        return
    assert k_TKD.stride(-1) == v_TKD.stride(-1) == 1, (k_TKD.stride(), v_TKD.stride())
    assert keys_NKPD.stride() == values_NKPD.stride(), (keys_NKPD.stride(), values_NKPD.stride())
    assert keys_NKPD.stride(-1) == 1, keys_NKPD.stride()
    tile_heads, tile_dim = power_of_two(num_heads), power_of_two(head_dim)
    _store_kv[(num_tokens,)](
        k_TKD,
        v_TKD,
        keys_NKPD,
        values_NKPD,
        slot_mapping_T,
        *k_TKD.stride()[:2],
        *v_TKD.stride()[:2],
        *keys_NKPD.stride()[:3],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=keys_NKPD.shape[2],
        TILE_HEADS=tile_heads,
        TILE_DIM=tile_dim,
        num_warps=warps_for(tile_heads * tile_dim),
    )


def store_kv_twin(k_TKD: Tensor, v_TKD: Tensor, keys_NKPD: Tensor, values_NKPD: Tensor, slot_mapping_T: Tensor) -> None:
    block_size = keys_NKPD.shape[2]
    for token, slot in enumerate(slot_mapping_T.tolist()):
        if slot >= 0:
            keys_NKPD[slot // block_size, :, slot % block_size] = k_TKD[token]
            values_NKPD[slot // block_size, :, slot % block_size] = v_TKD[token]


# RMSNorm


@triton.jit
def _rms_norm(
    x_ptr,  # [T, N, E]: N vectors a token, each normed by itself
    residual_ptr,  # [T, N, E], contiguous; None: nothing is added
    weight_ptr,  # [E]
    normed_ptr,  # [T, N, E], contiguous
    sum_ptr,  # [T, N, E], contiguous: x + residual; None as residual is
    x_stride_t,
    x_stride_n,
    eps,
    NUM_VECTORS: tl.constexpr,  # N
    SIZE: tl.constexpr,  # E
    TILE_VECTORS: tl.constexpr,  # N and E, rounded up to powers of two
    TILE_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    vector_N = tl.arange(0, TILE_VECTORS)[:, None]
    dim_E = tl.arange(0, TILE_SIZE)[None, :]
    is_there_NE = (vector_N < NUM_VECTORS) & (dim_E < SIZE)
    offset_NE = token * NUM_VECTORS * SIZE + vector_N * SIZE + dim_E
    x_NE = tl.load(x_ptr + token * x_stride_t + vector_N * x_stride_n + dim_E, mask=is_there_NE, other=0.0)
    dtype = x_NE.dtype
    if residual_ptr is not None:
        residual_NE = tl.load(residual_ptr + offset_NE, mask=is_there_NE, other=0.0)
        # Rounded before it is normed: the stream that goes on is the one that was looked at.
        x_NE = (x_NE.to(tl.float32) + residual_NE.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + offset_NE, x_NE, mask=is_there_NE)
    x_NE = x_NE.to(tl.float32)
    square_N1 = tl.sum(x_NE * x_NE, axis=1, keep_dims=True) / SIZE
    normed_NE = (x_NE * tl.rsqrt(square_N1 + eps)).to(dtype).to(tl.float32)
    weight_1E = tl.load(weight_ptr + dim_E, mask=dim_E < SIZE, other=0.0).to(tl.float32)
    tl.store(normed_ptr + offset_NE, (normed_NE * weight_1E).to(dtype), mask=is_there_NE)


def rms_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019), as a new tensor.

    x is [T, E], or [T, H, D] with a weight of D, then perhaps a view into a fused q, k, v. Computed in float32 and
    rounded before the weight is applied, as in transformers.
    """
    return _launch_rms_norm(x, None, weight_E, eps)[0]


def rms_norm_twin(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight_E.shape, None, eps).to(x.dtype) * weight_E


def add_rms_norm(x: Tensor, residual: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """rms_norm(x + residual), and x + residual, which is the residual from here on. Both are new tensors."""
    return _launch_rms_norm(x, residual, weight_E, eps)


def add_rms_norm_twin(x: Tensor, residual: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual = x + residual
    return rms_norm_twin(residual, weight_E, eps), residual


def _launch_rms_norm(x: Tensor, residual: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_TNE = x[:, None] if x.dim() == 2 else x
    num_tokens, num_vectors, size = x_TNE.shape
    assert x.stride(-1) == 1, x.stride()
    assert weight_E.shape == (size,), f"weight of {tuple(weight_E.shape)} for vectors of {size}"
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape), "residual is not as x"
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = normed if residual is None else torch.empty_like(normed)
    if num_tokens == 0:
        return normed, new_residual
    tile_vectors, tile_size = power_of_two(num_vectors), power_of_two(size)
    _rms_norm[(num_tokens,)](
        x,
        residual,
        weight_E,
        normed,
        None if residual is None else new_residual,
        *x_TNE.stride()[:2],
        eps,
        NUM_VECTORS=num_vectors,
        SIZE=size,
        TILE_VECTORS=tile_vectors,
        TILE_SIZE=tile_size,
        num_warps=warps_for(tile_vectors * tile_size),
    )
    return normed, new_residual


# Rotary embedding


@triton.jit
def _rotate_heads(
    x_ptr,  # [N, D]: the heads of one token
    out_ptr,  # [N, D], contiguous
    x_stride_n,
    cos_1I,
    sin_1I,
    pair_1I,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    head_N1 = tl.arange(0, TILE_HEADS)[:, None]
    is_there_NI = (head_N1 < NUM_HEADS) & (pair_1I < HALF)
    x_ptr_NI = x_ptr + head_N1 * x_stride_n + pair_1I
    out_ptr_NI = out_ptr + head_N1 * 2 * HALF + pair_1I
    first_NI = tl.load(x_ptr_NI, mask=is_there_NI).to(tl.float32)
    second_NI = tl.load(x_ptr_NI + HALF, mask=is_there_NI).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr_NI, (first_NI * cos_1I - second_NI * sin_1I).to(dtype), mask=is_there_NI)
    tl.store(out_ptr_NI + HALF, (second_NI * cos_1I + first_NI * sin_1I).to(dtype), mask=is_there_NI)


@triton.jit
def _rotary(
    q_ptr,  # [T, H, D]
    k_ptr,  # [T, K, D]
    cos_ptr,  # [T, D/2]: one for each pair of dimensions
    sin_ptr,  # [T, D/2], strides as cos
    q_out_ptr,  # [T, H, D], contiguous
    k_out_ptr,  # [T, K, D], contiguous
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_k,
    cos_stride_t,
    NUM_HEADS: tl.constexpr,  # H
    NUM_KV_HEADS: tl.constexpr,  # K
    HALF: tl.constexpr,  # D/2
    TILE_HEADS: tl.constexpr,  # H, K and D/2, rounded up to powers of two
    TILE_KV_HEADS: tl.constexpr,
    TILE_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pair_1I = tl.arange(0, TILE_HALF)[None, :]
    cos_1I = tl.load(cos_ptr + token * cos_stride_t + pair_1I, mask=pair_1I < HALF).to(tl.float32)
    sin_1I = tl.load(sin_ptr + token * cos_stride_t + pair_1I, mask=pair_1I < HALF).to(tl.float32)
    q_token_ptr, k_token_ptr = q_ptr + token * q_stride_t, k_ptr + token * k_stride_t
    q_out_token_ptr = q_out_ptr + token * NUM_HEADS * 2 * HALF
    k_out_token_ptr = k_out_ptr + token * NUM_KV_HEADS * 2 * HALF
    _rotate_heads(q_token_ptr, q_out_token_ptr, q_stride_h, cos_1I, sin_1I, pair_1I, NUM_HEADS, HALF, TILE_HEADS)
    _rotate_heads(k_token_ptr, k_out_token_ptr, k_stride_k, cos_1I, sin_1I, pair_1I, NUM_KV_HEADS, HALF, TILE_KV_HEADS)


def rotary(q_THD: Tensor, k_TKD: Tensor, cos_TI: Tensor, sin_TI: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with each head's pair (i, i + D/2) turned by its angle (Su et al. 2021), as new contiguous tensors.

    cos and sin hold one column for each of the I = D/2 pairs. q and k may be views into a fused q, k, v. In float32,
    rounded once at the end.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = k_TKD.shape[1]
    assert q_THD.stride(-1) == k_TKD.stride(-1) == 1, (q_THD.stride(), k_TKD.stride())
    assert cos_TI.stride() == sin_TI.stride() == (cos_TI.stride(0), 1), (cos_TI.stride(), sin_TI.stride())
    q_out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    k_out_TKD = torch.empty(k_TKD.shape, dtype=k_TKD.dtype, device=k_TKD.device)
    if num_tokens == 0:
        return q_out_THD, k_out_TKD
    tile_heads, tile_half = power_of_two(num_heads), power_of_two(head_dim // 2)
    _rotary[(num_tokens,)](
        q_THD,
        k_TKD,
        cos_TI,
        sin_TI,
        q_out_THD,
        k_out_TKD,
        *q_THD.stride()[:2],
        *k_TKD.stride()[:2],
        cos_TI.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        TILE_HEADS=tile_heads,
        TILE_KV_HEADS=power_of_two(num_kv_heads),
        TILE_HALF=tile_half,
        num_warps=warps_for(tile_heads * tile_half),
    )
    return q_out_THD, k_out_TKD


def rotary_twin(q_THD: Tensor, k_TKD: Tensor, cos_TI: Tensor, sin_TI: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x_TND: Tensor) -> Tensor:
        first, second = x_TND.float().chunk(2, dim=-1)
        cos_T1I, sin_T1I = cos_TI[:, None].float(), sin_TI[:, None].float()
        turned = torch.cat((first * cos_T1I - second * sin_T1I, second * cos_T1I + first * sin_T1I), dim=-1)
        return turned.to(x_TND.dtype)

    return turned(q_THD), turned(k_TKD)


# SwiGLU

SILU_TILE = 1024


@triton.jit
def _silu_and_mul(
    gate_up_ptr,  # [T, 2 * I]: gate, then up
    out_ptr,  # [T, I], contiguous
    stride_t,
    SIZE: tl.constexpr,  # I
    TILE: tl.constexpr,
):
    # A program is a part of a token here: I is several times the width of the model.
    token = tl.program_id(0).to(tl.int64)
    i_I = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate_I = tl.load(gate_up_ptr + token * stride_t + i_I, mask=i_I < SIZE).to(tl.float32)
    up_I = tl.load(gate_up_ptr + token * stride_t + SIZE + i_I, mask=i_I < SIZE).to(tl.float32)
    out_I = gate_I / (1 + tl.exp(-gate_I)) * up_I
    tl.store(out_ptr + token * SIZE + i_I, out_I.to(out_ptr.dtype.element_ty), mask=i_I < SIZE)


def silu_and_mul(gate_up_TI2: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2 * I], whose first half is gate: [T, I] (Shazeer 2020). In float32, rounded once."""
    num_tokens, size = gate_up_TI2.shape[0], gate_up_TI2.shape[1] // 2
    assert gate_up_TI2.stride(-1) == 1, gate_up_TI2.stride()
    out_TI = torch.empty((num_tokens, size), dtype=gate_up_TI2.dtype, device=gate_up_TI2.device)
    if num_tokens == 0:
        return out_TI
    tile = min(SILU_TILE, power_of_two(size))
    grid = (num_tokens, triton.cdiv(size, tile))
    _silu_and_mul[grid](gate_up_TI2, out_TI, gate_up_TI2.stride(0), SIZE=size, TILE=tile, num_warps=warps_for(tile))
    return out_TI


def silu_and_mul_twin(gate_up_TI2: Tensor) -> Tensor:
    gate_TI, up_TI = gate_up_TI2.float().chunk(2, dim=-1)
    return (F.silu(gate_TI) * up_TI).to(gate_up_TI2.dtype)
