"""The three loads that engines are compared on, as token ids from a seed, and how the third one's gaps are counted.

Needs nothing but Python: runners in other virtual environments import it as they do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

Ids = list[int]
FIRST_ID = 16  # ids below it stand for special tokens in many vocabularies


@dataclass(frozen=True)
class Load:
    """Greedy requests, with no end but their length; `late` comes once every other one has `after` tokens."""

    prompts: list[Ids]
    num_tokens: list[int]
    late: tuple[Ids, int] | None = None
    after: int = 0


@dataclass
class Stamps:
    """When each request's tokens came, in seconds; the late one's name is -1."""

    of: dict[int, list[float]] = field(default_factory=dict)
    late_at: float = 0.0


def make_load(name: str, vocab_size: int) -> Load:
    """w1: 32 prompts of 64-512 tokens, 64-128 out. w2: 64 that share 1024 tokens and have 32 of their own, 32 out.
    w3: 8 of 64 tokens, 96 out, and one of 4096 as soon as each of them has 32. one: 16 tokens, 512 out."""
    rng = random.Random(name)

    def ids(count: int) -> Ids:
        return [rng.randrange(FIRST_ID, vocab_size) for _ in range(count)]

    if name == "w1":
        return Load([ids(rng.randint(64, 512)) for _ in range(32)], [rng.randint(64, 128) for _ in range(32)])
    if name == "w2":
        shared = ids(1024)
        return Load([shared + ids(32) for _ in range(64)], [32] * 64)
    if name == "one":
        return Load([ids(16)], [512])
    return Load([ids(64) for _ in range(8)], [96] * 8, late=(ids(4096), 16), after=32)


def run_steps(load: Load, add: Callable[[int, Ids, int], None], step: Callable[[], dict[int, int]]) -> Stamps:
    """Drive an engine that is stepped. `step` returns how many tokens each request got in it."""
    want = dict(enumerate(load.num_tokens))
    stamps = Stamps({i: [] for i in want})
    for i, prompt in enumerate(load.prompts):
        add(i, prompt, want[i])
    while any(len(stamps.of[i]) < count for i, count in want.items()):
        news = step()
        now = time.perf_counter()
        for i, count in news.items():
            stamps.of[i] += [now] * count
        if load.late and -1 not in want and min(map(len, stamps.of.values())) >= load.after:
            prompt, want[-1] = load.late
            stamps.of[-1], stamps.late_at = [], time.perf_counter()
            add(-1, prompt, want[-1])
    return stamps


def gaps(stamps: Stamps) -> dict[str, float]:
    """Milliseconds between a stream's tokens before the late prompt came and until its first token, and that."""
    streams = [times for i, times in stamps.of.items() if i >= 0]
    first = stamps.of[-1][0]
    pairs = [pair for times in streams for pair in pairwise(times)]
    before = sorted(b - a for a, b in pairs if b <= stamps.late_at)
    during = [b - a for a, b in pairs if b > stamps.late_at and a < first]
    return {
        "decode_ms": before[len(before) // 2] * 1e3,
        "max_gap_ms": max(during) * 1e3,
        "late_ttft_ms": (first - stamps.late_at) * 1e3,
    }
