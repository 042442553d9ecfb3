"""The figures of a trial, for policies beside each other: what the laws do not judge.

From the records alone, by lab/metrics.py. Fairness is Jain's index over how much slower each request was than it would
have been alone: 1 when all were slowed down alike, 1/n when one bore it all.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from nanoserve.lab.metrics import RequestTimes, measure, request_times
from nanoserve.lab.trial import STEP_US, TOKEN_US, Outcome
from nanoserve.lab.trial_loads import Load


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Times in milliseconds of the virtual clock; None where nothing has such a value."""

    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    itl_max_ms: float | None = None
    ttft_p50_ms: float | None = None
    ttft_max_ms: float | None = None
    output_tokens_per_s: float = 0.0
    hit_rate: float = 0.0  # of prompt tokens, at first admission
    num_preemptions: int = 0
    fairness: float | None = None


def figures_of(outcome: Outcome, load: Load) -> Figures | None:
    """None when the trial was over before anyone arrived."""
    if not any(record.arrivals for record in outcome.records):
        return None
    run = measure(outcome.records)
    every = run.groups["all"]
    itl, ttft = every.itl_s, every.ttft_s
    return Figures(
        itl_p50_ms=itl and itl.p50 * 1e3,
        itl_p99_ms=itl and itl.p99 * 1e3,
        itl_max_ms=itl and itl.max * 1e3,
        ttft_p50_ms=ttft and ttft.p50 * 1e3,
        ttft_max_ms=ttft and ttft.max * 1e3,
        output_tokens_per_s=run.output_tokens_per_s,
        hit_rate=run.hit_rate,
        num_preemptions=sum(len(record.preempted) for record in outcome.records),
        fairness=jain([_slowdown(r, load) for r in request_times(outcome.records).values() if r.token_s]),
    )


def _slowdown(request: RequestTimes, load: Load) -> float:
    budget = load.fields["max_num_batched_tokens"]
    num_tokens = request.num_prompt_tokens + len(request.token_ids) - 1
    num_steps = -(-request.num_prompt_tokens // budget) + len(request.token_ids) - 1
    alone_s = (num_steps * STEP_US + num_tokens * TOKEN_US) / 1e6
    return (request.token_s[-1] - request.arrival_s) / alone_s


def jain(values: Sequence[float]) -> float | None:
    """(sum x)^2 / (n sum x^2), in [1/n, 1] for positive values. None without values."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None
