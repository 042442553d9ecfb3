"""The attention backend made of Triton kernels: one launch to store, one or two to attend, for any mix of rows.

Unlike `TorchAttention` it never looks at the batch's lists on the host: what it launches follows from shapes, so
that it can be captured in a CUDA graph and replayed for another batch of these shapes. Runs on NVIDIA and AMD, and
on a CPU in Triton's interpreter, to be tested. Imports neither torch nor triton before it is built.
Laws: tests/test_attention.py, where every backend has the same ones, and tests/test_kernels.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nanoserve.graphs import GraphSupport

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve.attention import AttentionBatch
    from nanoserve.attention_kernels import Tile
    from nanoserve.kv_cache import KVCache


class TritonAttention:
    """`tile` and `num_splits` fix the order of sums, for results that are the same in every batch; None: as fits."""

    platforms: ClassVar[tuple[str, ...]] = ("cuda", "rocm")
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16")
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    def __init__(self, *, tile: Tile | None = None, num_splits: int | None = None) -> None:
        from nanoserve.attention_kernels import paged_attention
        from nanoserve.kernels import store_kv

        self._paged_attention, self._store_kv = paged_attention, store_kv
        self._tile, self._num_splits = tile, num_splits

    def store(self, k_TKD: Tensor, v_TKD: Tensor, kv_cache: KVCache, layer: int, slot_mapping_T: Tensor) -> None:
        keys_NKPD, values_NKPD = kv_cache.blocks[layer]
        self._store_kv(k_TKD, v_TKD, keys_NKPD, values_NKPD, slot_mapping_T)

    def attend(self, q_THD: Tensor, kv_cache: KVCache, layer: int, batch: AttentionBatch) -> Tensor:
        keys_NKPD, values_NKPD = kv_cache.blocks[layer]
        return self._paged_attention(
            q_THD,
            keys_NKPD,
            values_NKPD,
            batch.block_table_RB,
            batch.query_start_loc_R1,
            batch.seq_lens_R,
            tile=self._tile,
            num_splits=self._num_splits,
        )
