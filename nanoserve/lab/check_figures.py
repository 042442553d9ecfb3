"""The bars of exercises that are about a figure: simulated runs and trials of the reader's class beside a built-in one.

Times are those of a virtual clock, so that a bar means the same on every machine. Laws: tests/test_exercises.py.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from nanoserve.config import STAGES
from nanoserve.lab.laws import Verdict, broken
from nanoserve.lab.rehearsal import rehearse
from nanoserve.lab.scenarios import SCENARIOS
from nanoserve.lab.trial_loads import VOCAB, Job, Load, sizes
from nanoserve.scheduler import PhaseSplitScheduler, UnifiedScheduler

if TYPE_CHECKING:
    from nanoserve.lab.check_engine import Pairs
    from nanoserve.lab.simulated import SimulatedRun

LOAD, BUDGET = "long-prompt", 512
MIXING_GAP_MS = 8 + 0.03 * BUDGET  # the fullest step, by the costs of `rehearse`


@cache
def long_prompt_run(scheduler: type, budget: int = BUDGET) -> SimulatedRun:
    """Lesson 02's load: eight streams, four prompts of 16,384 tokens."""
    config = replace(STAGES["v0"], scheduler=scheduler)
    return rehearse(config, SCENARIOS[LOAD].build(0), max_num_batched_tokens=budget).run


def longest_gap_ms(scheduler: type, budget: int = BUDGET) -> float:
    """Of a stream."""
    gaps = long_prompt_run(scheduler, budget).itl_us("stream")
    assert gaps is not None, "streams have many tokens"
    return gaps.max / 1000


def first_token_ms(scheduler: type) -> float:
    """Of the long prompts, the median."""
    times = long_prompt_run(scheduler).ttft_us("long")
    assert times is not None, "all of them come to their end"
    return times.p50 / 1000


def not_enough(mine: type, pairs: Pairs) -> str:
    gaps = {
        "v0's whole prompts": longest_gap_ms(PhaseSplitScheduler, 16_384),
        "your chunks": longest_gap_ms(mine),
    }
    told = ", ".join(f"{gap_ms:.1f} ms with {name}" for name, gap_ms in gaps.items())
    return f"Is it enough? On the load of lesson 02 the longest gap of a stream is {told}."


def gaps_are_short(mine: type, pairs: Pairs) -> tuple[str, Verdict]:
    got_ms = longest_gap_ms(mine)
    if got_ms > MIXING_GAP_MS:
        return "", broken("gap", 0, "", f"at most {MIXING_GAP_MS} ms, the length of a full step", f"{got_ms:.2f} ms")
    return "", Verdict(law="gap")


def first_tokens_stay(mine: type, pairs: Pairs) -> tuple[str, Verdict]:
    bar_ms, got_ms = first_token_ms(UnifiedScheduler), first_token_ms(mine)
    if got_ms > 1.01 * bar_ms:
        return "", broken("first token", 0, "", f"after {bar_ms:.1f} ms (median), as the built-in one", f"{got_ms:.1f}")
    return "", Verdict(law="first token")


# Loads of one exercise


def _own(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(n)]


def _comes_back() -> Load:
    """A short prefix that is found again and again while others come once: it is the oldest by its first use only."""
    rng = random.Random(8)
    prefix, jobs = _own(rng, 8), []
    for number, kind in enumerate(4 * ["session", "other", "session", "other", "other"]):
        own = _own(rng, 2) if kind == "session" else _own(rng, 10)
        prompt = (prefix if kind == "session" else []) + own
        jobs.append(Job(id=f"{kind}-{number}", prompt=prompt, max_tokens=3, at_us=10_000 * number))
    claim = "A prefix comes back before what was used after it is evicted."
    return Load(name="comes-back", claim=claim, jobs=jobs, fields=sizes(10, 16, 2))


COMES_BACK = _comes_back()


def _fair() -> Load:
    """Long prompts that all came before short ones, and few seats: who came first is served first, however long."""
    rng = random.Random(16)
    longs = [Job(id=f"long-{i}", prompt=_own(rng, 120), max_tokens=12, at_us=1000 * i) for i in range(3)]
    shorts = [Job(id=f"short-{i}", prompt=_own(rng, 8), max_tokens=6, at_us=3_000 + 2_000 * i) for i in range(12)]
    claim = "Short requests come behind long ones, and all of them are answered in full."
    return Load(name="fair-shares", claim=claim, jobs=[*longs, *shorts], fields=sizes(200, 24, 3))


FAIR = _fair()
MARGIN = 0.03


def fairer(mine: type, pairs: Pairs) -> tuple[str, Verdict]:
    yours, built_in = (ran.figures.fairness or 0.0 for ran in pairs[FAIR.name])
    if yours < built_in + MARGIN:
        expected = f"{built_in + MARGIN:.2f} or more; the built-in one has {built_in:.2f}"
        return FAIR.name, broken("fairness", 0, "", expected, f"{yours:.2f}")
    return FAIR.name, Verdict(law="fairness")
