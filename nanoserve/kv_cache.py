"""The paged KV cache: one tensor that holds the keys and values of the whole pool, and host blocks for swapping.

Owns memory and its layout; knows neither requests nor tables. Imports torch inside functions. Laws:
tests/test_runner.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nanoserve.checkpoint import ModelConfig
    from nanoserve.config import EngineConfig


class KVCache:
    """Keys and values of the whole pool, and the host blocks that swapped requests wait in.

        blocks [layer, k or v, block, kv head, place in block, head dim]

    Heads stand before places (vLLM's HND): what one head reads of a block lies in one piece, which makes prefill
    on a CPU 1.0-1.4 x faster than places before heads, and decode no slower. One tensor for all layers, so that
    copying a block is one operation. The memory is uninitialised, and a CPU commits it page by page as it is first
    written: attention must not let what it finds in unwritten places, NaN included, reach a result.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        import torch

        def empty(num: int, where: torch.device, *, pin: bool = False) -> Tensor:
            shape = (num_layers, 2, num, num_kv_heads, block_size, head_dim)
            return torch.empty(shape, dtype=dtype, device=where, pin_memory=pin)

        self.num_blocks = num_blocks
        self.block_size = block_size
        self.blocks = empty(num_blocks, device)
        self.host_blocks = empty(num_host_blocks, torch.device("cpu"), pin=device.type != "cpu" and num_host_blocks > 0)

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return self.blocks.numel() * self.blocks.element_size()

    @classmethod
    def build(cls, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> KVCache:
        """For a resolved config. ValueError when the memory is not there."""
        assert config.num_blocks is not None, "resolve() first"
        try:
            return cls(
                num_layers=model.num_layers,
                num_blocks=config.num_blocks,
                num_kv_heads=model.num_kv_heads,
                block_size=config.block_size,
                head_dim=model.head_dim,
                dtype=dtype,
                device=device,
                num_host_blocks=config.num_swap_blocks,
            )
        except RuntimeError as error:  # torch has no narrower one for a CPU
            num_blocks = config.num_blocks + config.num_swap_blocks
            size = num_blocks * config.block_size * model.kv_bytes_per_token(dtype)
            raise ValueError(
                f"num_blocks={config.num_blocks} and num_swap_blocks={config.num_swap_blocks} of {config.block_size} "
                f"tokens take {size / 2**30:.1f} GiB, more than {device.type} memory has; lower them, or "
                "kv_cache_memory_bytes."
            ) from error

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), as if one after the other. An id >= num_blocks is a host block."""

        def kind(pair: tuple[int, int]) -> tuple[bool, bool]:
            return pair[0] >= self.num_blocks, pair[1] >= self.num_blocks

        for (from_host, to_host), group in groupby(pairs, key=kind):
            source = self.host_blocks if from_host else self.blocks
            target = self.host_blocks if to_host else self.blocks
            run = [(a - from_host * self.num_blocks, b - to_host * self.num_blocks) for a, b in group]
            # Within one memory a block may be read after it was written: one at a time there.
            for batch in [run] if from_host != to_host else [[pair] for pair in run]:
                from_ids, to_ids = map(list, zip(*batch, strict=True))
                target[:, :, to_ids] = source[:, :, from_ids].to(target.device)
