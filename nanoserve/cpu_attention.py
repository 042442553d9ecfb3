"""The attention backend of a CPU: one call of compiled C++ to store, one to attend, for any mix of rows, in float32.

Unlike `TorchAttention` it reads keys where they lie, through the block table, and copies none. It looks only at the
batch's tensors, so that a graph's static memory serves it as well. native/attention.cpp has the arithmetic and
native.py gets it compiled. Imports torch inside functions. Laws: tests/test_attention.py, where every backend has the
same ones, and tests/test_cpu_attention.py.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar

from nanoserve.graphs import GraphSupport
from nanoserve.native_calls import INTEGER, POINTER, Function, members

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve.attention import AttentionBatch
    from nanoserve.kv_cache import KVCache


class Batch(ctypes.Structure):
    """`Batch` of attention.cpp."""

    _fields_ = (
        *members(POINTER, "q keys values out query_starts seq_lens table"),
        *members(INTEGER, "rows heads kv_heads dim block_size"),
        *members(INTEGER, "q_token q_head block head table_row threads"),
    )


class New(ctypes.Structure):
    """`New` of attention.cpp."""

    _fields_ = (
        *members(POINTER, "k v keys values slots"),
        *(
            (name, INTEGER)
            for name in ("tokens", "heads", "dim", "block_size", "k_token", "k_head", "v_token", "v_head", "threads")
        ),
    )


class CpuAttention:
    """Raises native.BuildError without a compiler.

    A row's result does not depend on what else is in the batch, nor on the number of threads, to the last bit.
    """

    platforms: ClassVar[tuple[str, ...]] = ("cpu",)
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    def __init__(self) -> None:
        import torch

        self._store, self._attend = Function("attention", "store"), Function("attention", "attend")
        self._num_threads = torch.get_num_threads

    def store(self, k_TKD: Tensor, v_TKD: Tensor, kv_cache: KVCache, layer: int, slot_mapping_T: Tensor) -> None:
        k_TKD, v_TKD, slots_T = _packed(k_TKD), _packed(v_TKD), slot_mapping_T.contiguous()
        keys, values, _ = _places(kv_cache, layer)
        _, num_heads, head_dim = k_TKD.shape
        pointers = k_TKD.data_ptr(), v_TKD.data_ptr(), keys, values, slots_T.data_ptr()
        strides = *k_TKD.stride()[:2], *v_TKD.stride()[:2]
        sizes = len(slots_T), num_heads, head_dim, kv_cache.block_size
        self._store(New(*pointers, *sizes, *strides, self._num_threads()))

    def attend(self, q_THD: Tensor, kv_cache: KVCache, layer: int, batch: AttentionBatch) -> Tensor:
        out_THD = q_THD.new_zeros(q_THD.shape)
        q_THD, table_RB = _packed(q_THD), _packed(batch.block_table_RB)
        starts_R1, seq_lens_R = batch.query_start_loc_R1.contiguous(), batch.seq_lens_R.contiguous()
        keys, values, (block_stride, head_stride) = _places(kv_cache, layer)
        _, num_heads, head_dim = q_THD.shape
        q_token, q_head, _ = q_THD.stride()
        self._attend(
            Batch(
                q_THD.data_ptr(),
                keys,
                values,
                out_THD.data_ptr(),
                starts_R1.data_ptr(),
                seq_lens_R.data_ptr(),
                table_RB.data_ptr(),
                len(seq_lens_R),
                num_heads,
                kv_cache.blocks.shape[3],
                head_dim,
                kv_cache.block_size,
                q_token,
                q_head,
                block_stride,
                head_stride,
                table_RB.stride(0),
                self._num_threads(),
            )
        )
        return out_THD


def _packed(x: Tensor) -> Tensor:
    """With the numbers of its last axis side by side, which is all that the code asks for."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _places(kv_cache: KVCache, layer: int) -> tuple[int, int, tuple[int, int]]:
    """Addresses of a layer's keys and values, and how many numbers lie between its blocks, and between their heads."""
    blocks = kv_cache.blocks
    assert blocks.element_size() == 4, f"a cache of {blocks.dtype}, not of float32"
    layer_stride, kind_stride, block_stride, head_stride, _, _ = blocks.stride()
    keys = blocks.data_ptr() + 4 * layer * layer_stride
    return keys, keys + 4 * kind_stride, (block_stride, head_stride)
