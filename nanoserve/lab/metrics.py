"""Latency, work and memory figures from `StepRecord`s alone: the one source of truth for tables and charts.

A token's time is the end of the step that sampled it. Knows no clock: times are seconds of whatever clock the
records carry, the machine's or a simulator's. `spans` says what every request did in every step; the work
counts and the timeline chart both come from it. tests/test_metrics.py checks each figure against one by hand.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from statistics import median
from typing import Any, TypeVar

from nanoserve.record import StepRecord

SLOW_GAP_FACTOR = 5  # a gap this many times the median counts as slow
ALL = "all"  # the group of every request

T = TypeVar("T")


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: the smallest value that at least `percent` % of the values do not exceed.

    Always one of the values, never an interpolation. Raises ValueError without values, or outside (0, 100].
    """
    if not values:
        raise ValueError("a percentile needs at least one value, got none.")
    if not 0 < percent <= 100:
        raise ValueError(f"percent must be in (0, 100], got {percent}.")
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


@dataclass(frozen=True, slots=True)
class Spread:
    """Of some values: how many, their mean, median, 99th percentile (nearest rank) and maximum."""

    count: int
    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None without values."""
        seen = list(values)
        if not seen:
            return None
        return cls(
            count=len(seen),
            mean=sum(seen) / len(seen),
            p50=percentile(seen, 50),
            p99=percentile(seen, 99),
            max=max(seen),
        )


@dataclass(slots=True)
class RequestTimes:
    """One request as the records tell it, written by `request_times`. `token_s[i]` is when `token_ids[i]` came."""

    id: str
    num_prompt_tokens: int
    arrival_s: float
    token_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_hit_tokens: int | None = None  # at first admission; None: never admitted
    finish_reason: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from the request's arrival. None before there is one."""
        return self.token_s[0] - self.arrival_s if self.token_s else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: every gap between two consecutive tokens."""
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token, (last - first) / (k - 1): the mean gap, which hides a freeze. None if k < 2."""
        k = len(self.token_s)
        return (self.token_s[-1] - self.token_s[0]) / (k - 1) if k > 1 else None


def request_times(records: Iterable[StepRecord]) -> dict[str, RequestTimes]:
    """Every request that arrived in these records, by id, in order of arrival."""
    requests: dict[str, RequestTimes] = {}
    for record in records:
        for r in record.arrivals:
            requests[r.id] = RequestTimes(r.id, len(r.prompt_token_ids), r.arrival_s)
        for request_id, hit in record.hit_tokens.items():
            if requests[request_id].num_hit_tokens is None:
                requests[request_id].num_hit_tokens = hit
        for request_id, token_ids in record.sampled.items():
            requests[request_id].token_ids += token_ids
            requests[request_id].token_s += [record.end_s] * len(token_ids)
        for request_id, reason in record.finished.items():
            requests[request_id].finish_reason = reason
    return requests


class Activity(enum.StrEnum):
    """What a request did during a step."""

    PREFILL = "prefill"  # computed known tokens: a prompt, a chunk of one, or all again after a preemption
    DECODE = "decode"
    WAITING = "waiting"  # got nothing in this step
    PREEMPTED = "preempted"  # got nothing, and has lost its KV


@dataclass(frozen=True, slots=True)
class Span:
    """One request in one step. `num_tokens` were computed, `num_prompt_tokens` of them were prompt."""

    request_id: str
    step: int
    start_s: float
    end_s: float
    activity: Activity
    num_tokens: int = 0
    num_prompt_tokens: int = 0


@dataclass(slots=True)
class _Live:
    """A request between its arrival and its end, as far as the records have been read."""

    num_prompt_tokens: int
    arrival_s: float
    num_outputs: int = 0
    num_computed: int = 0
    preempted: bool = False  # since it last ran

    def compute(self, num_tokens: int) -> tuple[Activity, int]:
        """Advance; what that was, and how many of the tokens were prompt."""
        start = self.num_computed
        self.num_computed += num_tokens
        newest = self.num_prompt_tokens + max(self.num_outputs - 1, 0)  # where the next decode would start
        activity = Activity.DECODE if start >= newest else Activity.PREFILL
        return activity, max(0, min(self.num_computed, self.num_prompt_tokens) - start)


def spans(records: Iterable[StepRecord]) -> Iterator[Span]:
    """What every live request did in every step, in order of steps and, within a step, of arrival."""
    live: dict[str, _Live] = {}
    for record in records:
        for r in record.arrivals:
            live[r.id] = _Live(len(r.prompt_token_ids), r.arrival_s)
        for request_id in record.preempted:
            if request := live.get(request_id):  # else its last token was in flight
                request.preempted = True
        for request_id, request in live.items():
            yield _span(record, request_id, request)
        for request_id, token_ids in record.sampled.items():
            live[request_id].num_outputs += len(token_ids)
        for request_id in [*record.finished, *record.aborts]:
            live.pop(request_id, None)


def _span(record: StepRecord, request_id: str, request: _Live) -> Span:
    num_tokens = record.num_scheduled_tokens.get(request_id, 0)
    if not num_tokens:
        activity = Activity.PREEMPTED if request.preempted else Activity.WAITING
        start_s = min(max(record.start_s, request.arrival_s), record.end_s)
        return Span(request_id, record.step, start_s, record.end_s, activity)
    request.preempted = False
    request.num_computed = record.hit_tokens.get(request_id, request.num_computed)  # it was admitted, or goes on
    activity, num_prompt_tokens = request.compute(num_tokens)
    return Span(request_id, record.step, record.start_s, record.end_s, activity, num_tokens, num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class GroupMetrics:
    """Latencies, in seconds, over the requests of one group. None: no such value (none had two tokens)."""

    num_requests: int
    ttft_s: Spread | None
    itl_s: Spread | None  # over all gaps of all requests
    tpot_s: Spread | None  # over requests: a mean per request first
    slow_gap_share: float | None  # gaps over SLOW_GAP_FACTOR x the median gap, in [0, 1]

    @classmethod
    def of(cls, requests: Sequence[RequestTimes]) -> GroupMetrics:
        gaps = [gap for r in requests for gap in r.itl_s]
        itl = Spread.of(gaps)
        slow = None if itl is None else sum(gap > SLOW_GAP_FACTOR * itl.p50 for gap in gaps) / len(gaps)
        return cls(
            num_requests=len(requests),
            ttft_s=Spread.of(r.ttft_s for r in requests if r.ttft_s is not None),
            itl_s=itl,
            tpot_s=Spread.of(r.tpot_s for r in requests if r.tpot_s is not None),
            slow_gap_share=slow,
        )


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """All figures of one run. Times in seconds, throughput in tokens a second, shares in [0, 1]."""

    groups: dict[str, GroupMetrics]  # by label; "all" is every request
    duration_s: float  # from the first arrival to the end of the last step
    num_steps: int
    step_s: Spread | None  # schedule() called, or the step before done -> update() done
    output_tokens: int
    output_tokens_per_s: float
    prompt_tokens: int  # asked for
    prompt_tokens_computed: int  # a hit saves some, a preemption computes some again
    hit_rate: float  # prompt tokens found in the cache, at first admission
    peak_used_blocks: int  # over the ends of steps
    host_s: Spread | None = None  # of a step: all but the device's own work
    padding_share: float = 0.0  # of the tokens that steps ran: of those that only fill up a graph


def measure(records: Sequence[StepRecord], groups: Mapping[str, str] | None = None) -> RunMetrics:
    """All figures of one run. `groups`: request id -> label. Raises ValueError when no request arrived."""
    requests = request_times(records)
    if not requests:
        raise ValueError("records hold no arrival: there is nothing to measure.")
    by_group: dict[str, list[RequestTimes]] = {ALL: list(requests.values())}
    for request_id, label in (groups or {}).items():
        by_group.setdefault(label, []).append(requests[request_id])
    duration_s = records[-1].end_s - min(r.arrival_s for r in requests.values())
    output_tokens = sum(len(r.token_ids) for r in requests.values())
    admitted = [r for r in requests.values() if r.num_hit_tokens is not None]
    num_queried = sum(r.num_prompt_tokens for r in admitted)
    num_hits = sum(r.num_hit_tokens or 0 for r in admitted)
    num_padding = sum(record.num_padding_tokens for record in records)
    num_tokens = sum(sum(record.num_scheduled_tokens.values()) for record in records)
    return RunMetrics(
        groups={label: GroupMetrics.of(members) for label, members in by_group.items()},
        duration_s=duration_s,
        num_steps=sum(bool(record.num_scheduled_tokens) for record in records),
        step_s=Spread.of(step_times(records)),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration_s if duration_s > 0 else 0.0,
        prompt_tokens=sum(r.num_prompt_tokens for r in requests.values()),
        prompt_tokens_computed=sum(span.num_prompt_tokens for span in spans(records)),
        hit_rate=num_hits / num_queried if num_queried else 0.0,
        peak_used_blocks=max(record.num_used_blocks for record in records),
        host_s=Spread.of(record.host_s for record in records if record.host_s),
        padding_share=num_padding / (num_tokens + num_padding) if num_padding else 0.0,
    )


def step_times(records: Sequence[StepRecord]) -> list[float]:
    """How long each step kept the engine: from its start, or from the end of the one before where that is later. One
    step ahead, a step is decided while another still runs."""
    ends = [-math.inf, *(record.end_s for record in records)]
    pairs = zip(records, ends, strict=False)
    return [r.end_s - max(r.start_s, before_s) for r, before_s in pairs if r.num_scheduled_tokens]


def median_of(runs: Sequence[T]) -> T:
    """The median of every number in some results of equal shape (dataclasses, dicts, numbers, None).

    Each figure is taken on its own, so that the medians need not all come from one run. Of an even number of
    integers the lower middle one, so that a count stays a count's value; None where any run has none.
    """
    first: Any = runs[0]
    if any(run is None for run in runs):
        return None  # type: ignore[return-value]
    if is_dataclass(first):
        return type(first)(**{f.name: median_of([getattr(run, f.name) for run in runs]) for f in fields(first)})  # type: ignore[return-value]
    if isinstance(first, dict):
        return {key: median_of([run[key] for run in runs]) for key in first}  # type: ignore[return-value,index]
    if isinstance(first, int):
        return sorted(runs)[(len(runs) - 1) // 2]  # type: ignore[type-var]
    return median(runs)  # type: ignore[return-value,type-var]
