"""The memory that captured work reads and writes: allocated once, refilled for each step, its unused tail reset.

Owns the buffers of all graphs, which share them: each takes the first part that its size needs. A stale tail would let
a padding row read, or overwrite, blocks of a request that is alive: laws in tests/test_graphs.py. Imports torch inside
functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoserve.attention import AttentionBatch
from nanoserve.graphs import GraphKey, GraphMode

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nanoserve.checkpoint import ModelConfig
    from nanoserve.input_batch import StepInputs
    from nanoserve.model import Flow

NOT_STORED = -1  # slot of a padding token
NULL_BLOCK = 0


class StaticInputs:
    """What a step's tokens and rows are, padded. Padding tokens have id 0, position 0 and slot -1; padding rows have
    key length 0, and a table of nothing but the null block."""

    def __init__(self, *, num_tokens: int, num_rows: int, num_blocks: int, device: torch.device) -> None:
        import torch

        def integers(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        self.input_ids_T = integers(num_tokens)
        self.positions_T = integers(num_tokens)
        self.slot_mapping_T = integers(num_tokens, value=NOT_STORED)
        self.query_start_loc_R1 = integers(num_rows + 1)
        self.seq_lens_R = integers(num_rows)
        self.block_table_RB = integers(num_rows, num_blocks, value=NULL_BLOCK)
        self.counting_R1 = torch.arange(num_rows + 1, device=device)

    def num_rows(self, key: GraphKey) -> int:
        return key.size if key.is_uniform else len(self.seq_lens_R)

    def batch(self, key: GraphKey) -> AttentionBatch:
        """What a graph of the whole pass tells attention: views of the buffers, and lists that `fill` keeps true."""
        rows = self.num_rows(key)
        return AttentionBatch(
            query_start_loc_R1=self.query_start_loc_R1[: rows + 1],
            seq_lens_R=self.seq_lens_R[:rows],
            block_table_RB=self.block_table_RB[:rows],
            slot_mapping_T=self.slot_mapping_T[: key.size],
            query_starts=[0] * (rows + 1),
            seq_lens=[0] * rows,
        )

    def fill_tokens(self, step: StepInputs, size: int) -> None:
        num_tokens = len(step.input_ids_T)
        assert num_tokens <= size, f"{num_tokens} tokens do not fit a graph of {size}"
        for buffer, tokens, padding in (
            (self.input_ids_T, step.input_ids_T, 0),
            (self.positions_T, step.positions_T, 0),
            (self.slot_mapping_T, step.attention.slot_mapping_T, NOT_STORED),
        ):
            buffer[:num_tokens] = tokens
            buffer[num_tokens:size] = padding

    def fill_rows(self, step: StepInputs, key: GraphKey, batch: AttentionBatch) -> None:
        """Padding rows have one of the padding tokens each, if that is what rows have in this graph, else none."""
        source = step.attention
        used, width = source.block_table_RB.shape
        rows, num_tokens = self.num_rows(key), len(step.input_ids_T)
        self.query_start_loc_R1[: used + 1] = source.query_start_loc_R1
        self.query_start_loc_R1[used + 1 : rows + 1] = (
            self.counting_R1[used + 1 : rows + 1] if key.is_uniform else num_tokens
        )
        self.seq_lens_R[:used] = source.seq_lens_R
        self.seq_lens_R[used:rows] = 0
        self.block_table_RB[:used, :width] = source.block_table_RB
        self.block_table_RB[used:rows] = NULL_BLOCK
        batch.query_starts[: used + 1] = source.query_starts
        batch.query_starts[used + 1 :] = range(used + 1, rows + 1) if key.is_uniform else [num_tokens] * (rows - used)
        batch.seq_lens[:used] = source.seq_lens
        batch.seq_lens[used:] = [0] * (rows - used)

    @property
    def num_bytes(self) -> int:
        return _num_bytes(*vars(self).values())


class StaticActivations:
    """What flows between the pieces of a pass, and its result. Pieces run one after the other, and so do steps: one set
    for all layers and all graphs."""

    def __init__(self, model: ModelConfig, *, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        import torch

        from nanoserve.model import Flow

        def empty(*shape: int) -> Tensor:
            return torch.empty(num_tokens, *shape, dtype=dtype, device=device)

        head_dim = model.head_dim
        self.flow = Flow(
            q_THD=empty(model.num_heads, head_dim),
            k_TKD=empty(model.num_kv_heads, head_dim),
            v_TKD=empty(model.num_kv_heads, head_dim),
            residual_TE=empty(model.hidden_size),
            cos_TD=empty(head_dim // 2),
            sin_TD=empty(head_dim // 2),
        )
        self.attended_THD = empty(model.num_heads, head_dim)
        self.hidden_TE = empty(model.hidden_size)

    def view(self, size: int) -> Flow:
        return type(self.flow)(*(buffer[:size] for buffer in self.flow))

    @property
    def num_bytes(self) -> int:
        return _num_bytes(*self.flow, self.attended_THD, self.hidden_TE)


def keep(target: Flow, result: Flow) -> None:
    """Copy what a piece returned to where the next one reads it."""
    for buffer, value in zip(target, result, strict=True):
        if value is not buffer:
            buffer.copy_(value)


def is_whole(key: GraphKey) -> bool:
    """Whether attention is part of the graph."""
    return key.mode is GraphMode.FULL


def _num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
