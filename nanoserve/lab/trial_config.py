"""The config of a trial: the load's sizes, then what the class under trial insists on.

A policy states options of its own in `fixed` and a budget in `default_budget`; where it refuses the load's budget, it
gets its own. Raises ValueError, the policy's own words, for a policy that takes neither.
"""

from __future__ import annotations

from typing import Any

from nanoserve.blocks import PrivateBlocks, SharedBlocks
from nanoserve.config import EngineConfig
from nanoserve.lab.fakes import MODEL_LEN
from nanoserve.lab.trial_loads import Load
from nanoserve.scheduler import UnifiedScheduler

NUM_SWAP_BLOCKS = 64


def trial_config(load: Load, fields: dict[str, Any]) -> EngineConfig:
    """`fields` go over the load's, and the scheduler's `fixed` over both."""
    fields = {"scheduler": UnifiedScheduler, "blocks": SharedBlocks, **load.fields, **fields}
    fields |= fields["scheduler"].fixed
    if fields.get("preemption_mode") == "swap":
        fields.setdefault("num_swap_blocks", NUM_SWAP_BLOCKS)
        if not fields["blocks"].can_swap:
            fields["blocks"] = PrivateBlocks
    config = EngineConfig(**fields)
    try:
        config.resolve(model_len=MODEL_LEN, pool_blocks=0, device="cpu")
    except ValueError:
        fields["max_num_batched_tokens"] = None
        return EngineConfig(**fields)
    return config
