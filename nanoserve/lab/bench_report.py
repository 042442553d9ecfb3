"""What a load test measured: latencies, throughput, goodput, errors; as JSON and as a table.

`BenchReport` *is* the schema of the JSON (version 1): `msgspec.json.decode(data, type=BenchReport)` reads it back.
Times are in seconds, rates a second, shares in [0, 1]; null where there is no such value. Latencies are over the
requests that came to a good end. tests/test_bench.py checks each figure against one by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoserve.lab.async_load import LoadResult, Outcome
from nanoserve.lab.metrics import RunMetrics, percentile
from nanoserve.machine import Machine

if TYPE_CHECKING:
    from rich.table import Table

BENCH_VERSION = 1
SLO_NAMES = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Latency:
    """Of some values: how many, mean, nearest-rank percentiles and maximum."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Latency | None:
        """None without values."""
        seen = sorted(values)
        if not seen:
            return None
        p50, p90, p99 = (percentile(seen, percent) for percent in (50, 90, 99))
        return cls(len(seen), sum(seen) / len(seen), p50, p90, p99, seen[-1])


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every limit: their number, share of all that were sent, and rate."""

    slo_s: dict[str, float]
    num_requests: int
    share: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class BenchMetrics:
    num_requests: int  # sent
    num_ok: int
    errors: dict[str, int]  # by kind
    error_examples: dict[str, str]  # one a kind
    duration_s: float  # from the start to the last end
    requests_per_s: float  # ok ones, as all below
    output_tokens: int
    output_tokens_per_s: float
    prompt_tokens: int | None  # null where the server does not say
    cached_tokens: int | None
    hit_rate: float | None  # cached tokens / prompt tokens
    tokens_per_event: float | None  # above 1: tokens came merged, so gaps between events are not between tokens
    ttft_s: Latency | None  # from when a request was due
    tpot_s: Latency | None  # over requests: a mean a request first
    itl_s: Latency | None  # over all gaps between events of all requests
    e2e_s: Latency | None
    send_lag_s: Latency | None  # sent - due, over all: how late the load generator was
    goodput: Goodput | None  # null without an SLO


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The whole file."""

    version: int
    nanoserve: str
    target: str  # the URL, or "engine"
    model: str
    parameters: dict[str, str | int | float | bool | None]
    interrupted: bool
    metrics: BenchMetrics
    cpu_share: float  # CPU seconds of this process (an engine in it included) / seconds of the run
    engine_config: dict[str, str | int | float | bool | None] | None  # of an engine in this process
    engine: RunMetrics | None  # from its records; null also after errors
    machine: Machine | None  # of an engine in this process; of a server it is not known
    requests: list[Outcome] | None  # with --detailed; times count from the start


def parse_slo(text: str) -> dict[str, float]:
    """`ttft=500,itl=100`, in milliseconds -> limits in seconds. Raises ValueError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if name not in SLO_NAMES or not 0 < limit < float("inf") or name in limits:
            raise ValueError(
                f"{part.strip()!r} in {text!r} is not a limit; write NAME=MILLISECONDS, each of "
                f"{', '.join(SLO_NAMES)} at most once, such as ttft=500,itl=100."
            )
        limits[name] = limit / 1e3
    return limits


def meets(outcome: Outcome, slo_s: Mapping[str, float]) -> bool:
    """A good end within every limit; `itl` limits the request's longest gap. What has no value cannot be too slow."""
    values = {
        "ttft": outcome.ttft_s,
        "itl": max(outcome.itl_s, default=None),
        "tpot": outcome.tpot_s,
        "e2e": outcome.e2e_s,
    }
    return outcome.error is None and all((values[name] or 0.0) <= limit for name, limit in slo_s.items())


def measure_load(result: LoadResult, slo_s: Mapping[str, float] | None = None) -> BenchMetrics:
    """All figures of a load that has ended."""
    outcomes = result.outcomes
    ok = [outcome for outcome in outcomes if outcome.error is None]
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    duration_s = max((outcome.end_s for outcome in outcomes), default=result.start_s) - result.start_s

    def per_second(number: float) -> float:
        return number / duration_s if duration_s > 0 else 0.0

    goodput = None
    if slo_s:
        num_good = sum(meets(outcome, slo_s) for outcome in outcomes)
        goodput = Goodput(dict(slo_s), num_good, num_good / max(len(outcomes), 1), per_second(num_good))
    output_tokens = sum(outcome.num_output_tokens for outcome in ok)
    num_events = sum(len(outcome.event_s) for outcome in ok)
    prompt_tokens = _total([outcome.num_prompt_tokens for outcome in ok])
    cached_tokens = _total([outcome.num_cached_tokens for outcome in ok])
    return BenchMetrics(
        num_requests=len(outcomes),
        num_ok=len(ok),
        errors=dict(errors),
        error_examples={o.error: o.detail for o in reversed(outcomes) if o.error is not None and o.detail},
        duration_s=duration_s,
        requests_per_s=per_second(len(ok)),
        output_tokens=output_tokens,
        output_tokens_per_s=per_second(output_tokens),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        hit_rate=cached_tokens / prompt_tokens if prompt_tokens and cached_tokens is not None else None,
        tokens_per_event=output_tokens / num_events if num_events else None,
        ttft_s=Latency.of(o.ttft_s for o in ok if o.ttft_s is not None),
        tpot_s=Latency.of(o.tpot_s for o in ok if o.tpot_s is not None),
        itl_s=Latency.of(gap for o in ok for gap in o.itl_s),
        e2e_s=Latency.of(o.e2e_s for o in ok),
        send_lag_s=Latency.of(o.sent_s - o.due_s for o in outcomes),
        goodput=goodput,
    )


def _total(counts: Sequence[int | None]) -> int | None:
    """None unless every request has the count."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def latency_table(metrics: BenchMetrics) -> Table:
    """Latencies in milliseconds."""
    from rich.table import Table

    table = Table()
    table.add_column("milliseconds")
    for column in ("mean", "P50", "P90", "P99", "max", "values"):
        table.add_column(column, justify="right")
    rows = {
        "TTFT": metrics.ttft_s,
        "TPOT": metrics.tpot_s,
        "ITL": metrics.itl_s,
        "end to end": metrics.e2e_s,
        "sent late by": metrics.send_lag_s,
    }
    for label, latency in rows.items():
        if latency is None:
            table.add_row(label, *["-"] * 5, "0")
            continue
        values = (latency.mean, latency.p50, latency.p90, latency.p99, latency.max)
        table.add_row(label, *(f"{value * 1e3:,.1f}" for value in values), f"{latency.count:,}")
    return table


def sentences(report: BenchReport) -> list[str]:
    """The figures that no table of latencies holds, one a line."""
    metrics = report.metrics
    lines = [
        f"requests: {metrics.num_ok} of {metrics.num_requests} ok in {metrics.duration_s:.2f} s, "
        f"{metrics.requests_per_s:.2f} a second; {metrics.output_tokens_per_s:,.1f} output tokens a second",
    ]
    if metrics.goodput is not None:
        limits = ", ".join(f"{name} <= {limit * 1e3:g} ms" for name, limit in metrics.goodput.slo_s.items())
        lines.append(
            f"goodput: {metrics.goodput.requests_per_s:.2f} requests a second "
            f"({metrics.goodput.num_requests} requests, {metrics.goodput.share:.1%}) met {limits}"
        )
    tokens = [f"{metrics.output_tokens:,} output tokens"]
    if metrics.prompt_tokens is not None:
        tokens.insert(0, f"{metrics.prompt_tokens:,} prompt tokens")
    if metrics.hit_rate is not None:
        tokens.insert(1, f"{metrics.hit_rate:.1%} of them cached")
    lines.append(f"tokens: {', '.join(tokens)}")
    if metrics.tokens_per_event is not None and metrics.tokens_per_event > 1.05:
        lines.append(
            f"an event brought {metrics.tokens_per_event:.2f} tokens on average: ITL is between events, TPOT a token"
        )
    if report.engine is not None and report.engine.step_s is not None:
        step = report.engine.step_s
        lines.append(
            f"engine: {report.engine.num_steps:,} steps of {step.p50 * 1e3:.1f} ms (P50), {step.p99 * 1e3:.1f} ms "
            f"(P99); at most {report.engine.peak_used_blocks:,} KV blocks in use"
        )
    lines.append(f"this process used {report.cpu_share:.0%} of a core")
    lines += [f"error {kind}: {count}{_example(metrics, kind)}" for kind, count in metrics.errors.items()]
    if report.interrupted:
        lines.append("interrupted: these are the figures up to then")
    return lines


def _example(metrics: BenchMetrics, kind: str) -> str:
    example = " ".join(metrics.error_examples.get(kind, "").split())
    return f", such as: {example[:200]}" if example else ""
