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
    from nanoserve.input_batch import HostInputs
    from nanoserve.model import Flow

NOT_STORED = -1  # slot of a padding token
NULL_BLOCK = 0


class StaticInputs:
    """What a step's tokens and rows are, padded: written by the host as arrays, read by graphs as tensors. On a CPU
    both are the same memory.

    Padding tokens have id 0, position 0 and slot -1; padding rows have key length 0, and a table of nothing but the
    null block.
    """

    def __init__(self, *, num_tokens: int, num_rows: int, num_blocks: int, device: torch.device) -> None:
        import numpy as np
        import torch

        self._sizes = {"num_tokens": num_tokens, "num_rows": num_rows, "num_blocks": num_blocks}
        sizes = (num_tokens, num_tokens, num_tokens, num_rows + 1, num_rows)
        numbers = torch.zeros(sum(sizes), dtype=torch.int64)
        arrays = np.split(numbers.numpy(), np.cumsum(sizes)[:-1])
        self.input_ids_T, self.positions_T, self.slot_mapping_T, self.query_start_loc_R1, self.seq_lens_R = arrays
        self.slot_mapping_T[:] = NOT_STORED
        self.numbers, self._numbers_there = numbers, numbers.to(device)  # all of them, one array after the other
        self._there = self._numbers_there.split(sizes)
        self.block_table_RB = torch.full((num_rows, num_blocks), NULL_BLOCK, dtype=torch.int64, device=device)
        self._each_R1 = torch.arange(num_rows + 1, device=device)  # where rows of one token start

    def another(self) -> StaticInputs:
        """One more of the same shape, on the host."""
        return type(self)(**self._sizes, device=self.numbers.device)

    def num_rows(self, key: GraphKey) -> int:
        return key.size if key.is_uniform else len(self.seq_lens_R)

    def tokens(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, positions and slots, as a graph of that size reads them."""
        ids_T, positions_T, slots_T, _, _ = self._there
        return ids_T[:size], positions_T[:size], slots_T[:size]

    def batch(self, key: GraphKey) -> AttentionBatch:
        """What a graph of the whole pass tells attention: as it reads it, and lists that `fill_rows` keeps true."""
        rows = self.num_rows(key)
        _, _, slots_T, starts_R1, seq_lens_R = self._there
        return AttentionBatch(
            query_start_loc_R1=self._each_R1[: rows + 1] if key.is_uniform else starts_R1[: rows + 1],
            seq_lens_R=seq_lens_R[:rows],
            block_table_RB=self.block_table_RB[:rows],
            slot_mapping_T=slots_T[: key.size],
            query_starts=list(range(rows + 1)),
            seq_lens=[0] * rows,
        )

    def fill_tokens(self, inputs: HostInputs, size: int) -> None:
        num_tokens = len(inputs.input_ids_T)
        assert num_tokens <= size, f"{num_tokens} tokens do not fit a graph of {size}"
        for buffer, tokens, padding in (
            (self.input_ids_T, inputs.input_ids_T, 0),
            (self.positions_T, inputs.positions_T, 0),
            (self.slot_mapping_T, inputs.slot_mapping_T, NOT_STORED),
        ):
            buffer[:num_tokens] = tokens
            buffer[num_tokens:size] = padding

    def fill_rows(self, inputs: HostInputs, key: GraphKey, batch: AttentionBatch) -> None:
        """Padding rows have one of the padding tokens each, if that is what rows have in this graph, else none."""
        import torch

        used, width = inputs.block_table_RB.shape
        rows = self.num_rows(key)
        self.seq_lens_R[:used] = inputs.seq_lens_R
        self.block_table_RB[:used, :width] = torch.from_numpy(inputs.block_table_RB)
        if used < rows:
            self.seq_lens_R[used:rows] = 0
            self.block_table_RB[used:rows] = NULL_BLOCK
        batch.seq_lens[:] = self.seq_lens_R[:rows].tolist()
        if not key.is_uniform:
            self.query_start_loc_R1[: used + 1] = inputs.query_start_loc_R1
            self.query_start_loc_R1[used + 1 : rows + 1] = len(inputs.input_ids_T)
            batch.query_starts[:] = self.query_start_loc_R1[: rows + 1].tolist()

    def send(self) -> None:
        """What was filled in, to where graphs read it."""
        if self._numbers_there is not self.numbers:
            self._numbers_there.copy_(self.numbers)

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self._numbers_there, self.block_table_RB)


class StaticActivations:
    """What flows between the pieces of a pass, and its result. Pieces run one after the other, and so do steps: one set
    for all layers and all graphs."""

    def __init__(
        self, model: ModelConfig, *, num_tokens: int, num_sampling: int, dtype: torch.dtype, device: torch.device
    ) -> None:
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
        self.logits_SV = torch.empty(num_sampling, model.vocab_size, dtype=dtype, device=device)

    def view(self, size: int) -> Flow:
        return type(self.flow)(*(buffer[:size] for buffer in self.flow))

    @property
    def num_bytes(self) -> int:
        return _num_bytes(*self.flow, self.attended_THD, self.hidden_TE, self.logits_SV)


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
