"""What a block manager costs where it cannot help: a prompt that nobody shares is looked up, allocated and committed.

No engine and no step: the manager alone, in this process. The difference between two managers is what a prefix cache
pays at a hit rate of 0, hashing above all. Laws: tests/test_ladder_report.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from nanoserve.block_pool import cdiv
from nanoserve.lab.ladder_report import AdmissionCost
from nanoserve.request import EngineRequest, Request, SamplingParams

if TYPE_CHECKING:
    from nanoserve.blocks import KVCacheManager
    from nanoserve.config import EngineConfig

NUM_PROMPTS = 15


def admission_costs(stages: Mapping[str, EngineConfig], prompt_len: int) -> list[AdmissionCost]:
    """Of every stage whose block manager is another than that of the stage above."""
    moves = [(a, b) for a, b in pairwise(stages) if stages[a].blocks is not stages[b].blocks]

    def seconds(stage: str) -> float:
        return admission_s(stages[stage].blocks, prompt_len, stages[stage].block_size)

    return [AdmissionCost(b, a, prompt_len, {a: seconds(a), b: seconds(b)}) for a, b in moves]


def admission_s(manager: type[KVCacheManager], prompt_len: int, block_size: int) -> float:
    """Seconds, the median of some prompts, all different from the first block on."""
    blocks = manager(cdiv(prompt_len, block_size) + 2, block_size)
    taken = []
    for number in range(NUM_PROMPTS):
        prompt = [(number + i * 7) % 1000 for i in range(prompt_len)]
        asked = EngineRequest(id=f"prompt-{number}", prompt_token_ids=prompt, params=SamplingParams())
        request = Request.from_engine_request(asked, max_model_len=prompt_len + 1)
        start_s = time.perf_counter()
        hit = blocks.lookup(request)
        new = blocks.allocate(request, prompt_len - hit.num_tokens, hit)
        blocks.commit(request, prompt_len)
        taken.append(time.perf_counter() - start_s)
        assert new is not None, f"{manager.__name__} has no room for {prompt_len} tokens in an empty pool"
        blocks.free(request)
    return median(taken)
