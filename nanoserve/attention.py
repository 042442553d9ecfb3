"""Attention over a paged KV cache: where keys and values are kept, and how a batch attends to them.

A backend gets any mix of prefill, chunk and decode rows in one call: each row is n queries that end at key
`seq_len`, so a decode is n = 1 and a whole prompt is n = seq_len; no phase is known here. `TorchAttention` is the
exact oracle that other backends are compared with. Axes of its own: N blocks of the pool, P places in a block, L keys
of a row, G query heads per key head. Imports no torch. Laws: tests/test_attention.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from nanoserve.graphs import GraphSupport

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve.kv_cache import KVCache

# Rows of one query are attended to together while their keys, padded to the longest, are at most this many numbers:
# below, the calls cost more than the work; above, what was gathered no longer fits a CPU's cache.
PADDED_NUMBERS = 2**16


@dataclass(frozen=True)
class AttentionBatch:
    """What a backend needs to know of a step's batch, the same for every layer.

    Queries of row r are `query_starts[r] : query_starts[r + 1]` of the T tokens and stand at the last positions of
    its `seq_lens[r]` keys. Rows and tokens that only pad the batch have key length 0 and slot -1. The index tensors
    are int64: a slot times the bytes of a token does not fit 32 bits. Mirrors vLLM's `CommonAttentionMetadata`.
    """

    query_start_loc_R1: Tensor
    seq_lens_R: Tensor
    block_table_RB: Tensor
    slot_mapping_T: Tensor  # block_id * block_size + offset of each token; -1: not stored
    query_starts: list[int]  # query_start_loc_R1 on the host
    seq_lens: list[int]  # seq_lens_R on the host

    def newest(self, rows_S: Tensor, rows: Sequence[int]) -> AttentionBatch:
        """Of the last query in each of these rows (`rows`: the same, on the host), as if they were decodes."""
        import torch

        return AttentionBatch(
            query_start_loc_R1=torch.arange(len(rows) + 1, device=rows_S.device),
            seq_lens_R=self.seq_lens_R[rows_S],
            block_table_RB=self.block_table_RB[rows_S],
            slot_mapping_T=self.slot_mapping_T[:0],
            query_starts=list(range(len(rows) + 1)),
            seq_lens=[self.seq_lens[row] for row in rows],
        )


class AttentionBackend(Protocol):
    """`store` for the whole batch comes before `attend`, in every layer: rows may read what others just wrote."""

    platforms: ClassVar[tuple[str, ...]]  # that it runs on
    dtypes: ClassVar[tuple[str, ...]]  # of the model and its cache
    graph_support: ClassVar[GraphSupport]  # the batches with which a device can capture it

    def store(self, k_TKD: Tensor, v_TKD: Tensor, kv_cache: KVCache, layer: int, slot_mapping_T: Tensor) -> None:
        """Write each token's key and value to its slot. A token whose slot is -1 is skipped."""
        ...

    def attend(self, q_THD: Tensor, kv_cache: KVCache, layer: int, batch: AttentionBatch) -> Tensor:
        """softmax(q k^T / sqrt(D)) v over each row's own blocks: [T, H, D]. Changes nothing.

        Query i of n in a row of key length m sees keys 0 .. m - n + i. Query heads h * G to h * G + G - 1 share
        key head h, with G = H / K. Whatever lies in slots beyond a row's keys, NaN included, has no effect.
        """
        ...


class TorchAttention:
    """Gather each row's blocks, then torch's scaled_dot_product_attention: exact, and runs on every platform."""

    platforms: ClassVar[tuple[str, ...]] = ("cpu", "cuda", "rocm")
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16")
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER  # what it launches depends on the lists of the batch

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int], Tensor] = {}  # of this step, by queries and keys: for all of its layers

    def store(self, k_TKD: Tensor, v_TKD: Tensor, kv_cache: KVCache, layer: int, slot_mapping_T: Tensor) -> None:
        is_stored_T = slot_mapping_T >= 0
        slots = slot_mapping_T[is_stored_T]
        block_ids, offsets = slots // kv_cache.block_size, slots % kv_cache.block_size
        keys_NKPD, values_NKPD = kv_cache.blocks[layer]
        keys_NKPD[block_ids, :, offsets] = k_TKD[is_stored_T]
        values_NKPD[block_ids, :, offsets] = v_TKD[is_stored_T]

    def attend(self, q_THD: Tensor, kv_cache: KVCache, layer: int, batch: AttentionBatch) -> Tensor:
        out_THD = q_THD.new_zeros(q_THD.shape)
        blocks_2NKPD = kv_cache.blocks[layer]
        if layer == 0:
            self._masks = {}
        singles = []
        for row, seq_len in enumerate(batch.seq_lens):
            start, end = batch.query_starts[row : row + 2]
            if end - start == 1 and seq_len:
                singles.append(row)
            elif seq_len:
                shape = end - start, seq_len
                if end - start < seq_len and shape not in self._masks:
                    self._masks[shape] = causal_mask(end - start, seq_len, q_THD)
                table_1B = batch.block_table_RB[row : row + 1]
                mask = self._masks.get(shape)
                out_THD[start:end] = attend_chunk(q_THD[start:end], blocks_2NKPD, table_1B, seq_len, mask)
        max_keys = PADDED_NUMBERS // kv_cache.blocks[0, 0, 0, :, 0].numel()
        for rows in padded_groups(singles, batch.seq_lens, max_keys):
            tokens = [batch.query_starts[row] for row in rows]
            out_THD[tokens] = attend_singles(
                q_THD[tokens], blocks_2NKPD, batch.block_table_RB[rows], [batch.seq_lens[row] for row in rows]
            )
        return out_THD


def attend_chunk(
    q_THD: Tensor, blocks_2NKPD: Tensor, block_table_1B: Tensor, seq_len: int, mask_TL: Tensor | None
) -> Tensor:
    """T queries of one request, the last T of its `seq_len` tokens: [T, H, D]. No mask: they are all of them."""
    import torch.nn.functional as F

    k_1KLD, v_1KLD = gather(blocks_2NKPD, block_table_1B, seq_len)
    out_1HTD = F.scaled_dot_product_attention(
        q_THD.transpose(0, 1)[None],
        k_1KLD,
        v_1KLD,
        attn_mask=mask_TL,
        is_causal=mask_TL is None,  # torch's own causal mask starts at key 0, and is quicker than a tensor
        enable_gqa=True,
    )
    return out_1HTD[0].transpose(0, 1)


def attend_singles(q_RHD: Tensor, blocks_2NKPD: Tensor, block_table_RB: Tensor, seq_lens: Sequence[int]) -> Tensor:
    """The newest query of each of R requests, in one call padded to the longest: [R, H, D].

    The G query heads that share a key head stand where a chunk has its queries: they see the same keys.
    """
    import torch
    import torch.nn.functional as F

    longest = max(seq_lens)
    k_RKLD, v_RKLD = gather(blocks_2NKPD, block_table_RB, longest)
    is_key_R11L = None
    if min(seq_lens) < longest:
        seq_lens_R1 = torch.tensor(seq_lens, device=q_RHD.device)[:, None]
        is_key_R11L = (torch.arange(longest, device=q_RHD.device) < seq_lens_R1)[:, None, None]
        # Weight 0 times NaN is NaN: what lies in the padding must go.
        k_RKLD.masked_fill_(~is_key_R11L.mT, 0)
        v_RKLD.masked_fill_(~is_key_R11L.mT, 0)
    q_RKGD = q_RHD.unflatten(1, (k_RKLD.shape[1], -1))
    return F.scaled_dot_product_attention(q_RKGD, k_RKLD, v_RKLD, attn_mask=is_key_R11L).flatten(1, 2)


def gather(blocks_2NKPD: Tensor, block_table_RB: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """A copy of the first `seq_len` keys and values of R requests, each in one piece: [R, K, seq_len, D]."""
    import torch

    _, _, num_heads, block_size, _ = blocks_2NKPD.shape
    num_blocks = -(-seq_len // block_size)
    # Picked by block and head at once, so that the copy already lies the way attention reads it.
    table_R1B = block_table_RB[:, None, :num_blocks]
    heads_K1 = torch.arange(num_heads, device=blocks_2NKPD.device)[:, None]
    keys_NKPD, values_NKPD = blocks_2NKPD
    k_RKLD = keys_NKPD[table_R1B, heads_K1].flatten(2, 3)[:, :, :seq_len]
    v_RKLD = values_NKPD[table_R1B, heads_K1].flatten(2, 3)[:, :, :seq_len]
    return k_RKLD, v_RKLD


def causal_mask(num_queries: int, num_keys: int, like: Tensor) -> Tensor:
    """0 where query i, of the last `num_queries` positions, may see key j, else -inf: [num_queries, num_keys]."""
    import torch

    mask = torch.full((num_queries, num_keys), float("-inf"), dtype=like.dtype, device=like.device)
    return mask.triu_(num_keys - num_queries + 1)


def padded_groups(rows: Iterable[int], seq_lens: Sequence[int], max_keys: int) -> list[list[int]]:
    """Cut rows into groups, shortest first, that gather at most `max_keys` keys; a longer row is alone."""
    groups: list[list[int]] = []
    for row in sorted(rows, key=seq_lens.__getitem__):
        if groups and (len(groups[-1]) + 1) * seq_lens[row] <= max_keys:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
