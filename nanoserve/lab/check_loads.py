"""Loads of one rule each, for the policies of exercises 1 to 3: a cached prefix, a watermark, a prompt that loses its
blocks half-way.

Beside the loads of `nanoserve grade`, on which an answer may forget such a rule and still make the same plans. Knows no
engine but the block managers that have a cache. Laws: tests/test_exercises.py.
"""

from __future__ import annotations

import random

from nanoserve.blocks import SharedBlocks, V0CachedBlocks
from nanoserve.lab.trial_loads import VOCAB, Job, Load, sizes


def _own(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(n)]


def _cached_prefix(blocks: type) -> Load:
    """The second comes when the first has computed what both begin with, the third while the second decodes."""
    rng = random.Random(21)
    prefix = _own(rng, 16)
    jobs = [Job(id=f"r{i}", prompt=prefix + _own(rng, 3), max_tokens=5, at_us=6_000 * i) for i in range(3)]
    claim = "Prompts begin alike, and the cache has what the first of them computed."
    return Load(name="cached-prefix", claim=claim, jobs=jobs, fields=sizes(40, 32, 4, blocks=blocks))


CACHED_BY_V0 = _cached_prefix(V0CachedBlocks)
CACHED = _cached_prefix(SharedBlocks)


def _watermark() -> Load:
    """There is room for the second prompt, but not for the watermark beside it."""
    rng = random.Random(22)
    jobs = [Job(id=f"r{i}", prompt=_own(rng, 14), max_tokens=6, at_us=1_500 * i) for i in range(3)]
    claim = "The blocks for one more prompt are free, but are those that the watermark keeps."
    return Load(name="watermark", claim=claim, jobs=jobs, fields=sizes(11, 32, 4, watermark=0.3))


WATERMARK = _watermark()


def _lost_half_way() -> Load:
    """Admitted with a chunk, the long prompt runs into a stream's blocks; what it gives back would do for a chunk."""
    rng = random.Random(23)
    jobs = [
        Job(id="stream", prompt=_own(rng, 12), max_tokens=10),
        Job(id="long", prompt=_own(rng, 28), max_tokens=2, at_us=2_500),
    ]
    claim = "A long prompt is preempted half-way, and the blocks that it gives back would do for its first chunk."
    return Load(name="lost-half-way", claim=claim, jobs=jobs, fields=sizes(9, 8, 4, reserve_full_prompt=False))


LOST_HALF_WAY = _lost_half_way()
