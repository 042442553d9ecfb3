"""The rows of the ladder's tables: which figures, in which order, and how each compares with the first stage's.

A row is made from the figures of all rounds; what is measured and what is simulated have the same form. Knows nothing
of how a row is shown. Laws: tests/test_ladder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from nanoserve.lab.front_end import FrontEndMetrics
from nanoserve.lab.metrics import ALL, SLOW_GAP_FACTOR, RunMetrics, Spread, median_of
from nanoserve.lab.simulated import SimulatedRun

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table. `ratios` compare with the first stage; null where that is 0 or has no value."""

    key: str
    label: str
    unit: str  # "s", "share", "tokens/s" or "" for a count
    better: str  # "lower", "higher", or "" for a fact
    values: dict[str, float | None]  # of the medians
    ratios: dict[str, float | None]
    lows: dict[str, float | None]  # over the rounds
    highs: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Rows(Generic[M]):
    """Makes rows from the figures of all rounds."""

    rounds: Mapping[str, Sequence[M]]

    @staticmethod
    def middle(several: Sequence[M]) -> M:
        """What was run once is its own median, and need not be made of numbers."""
        return several[0] if len(several) == 1 else median_of(several)

    def row(self, key: str, label: str, unit: str, better: str, value: Callable[[M], float | None]) -> Row:
        values = {stage: value(self.middle(several)) for stage, several in self.rounds.items()}
        seen = {stage: [value(one) for one in several] for stage, several in self.rounds.items()}
        base = next(iter(values.values()))
        return Row(
            key,
            label,
            unit,
            better,
            values,
            ratios={stage: v / base if v is not None and base else None for stage, v in values.items()},
            lows={stage: min((v for v in vs if v is not None), default=None) for stage, vs in seen.items()},
            highs={stage: max((v for v in vs if v is not None), default=None) for stage, vs in seen.items()},
        )

    def latency(self, key: str, label: str, spread: Callable[[M], Spread | None]) -> list[Row]:
        """P50, P99, maximum."""

        def figure(pick: Callable[[Spread], float]) -> Callable[[M], float | None]:
            return lambda metrics: None if (found := spread(metrics)) is None else pick(found)

        return [
            self.row(f"{key}_p50", f"{label} P50", "s", "lower", figure(lambda s: s.p50)),
            self.row(f"{key}_p99", f"{label} P99", "s", "lower", figure(lambda s: s.p99)),
            self.row(f"{key}_max", f"{label} max", "s", "lower", figure(lambda s: s.max)),
        ]


def rows_of(rounds: Mapping[str, Sequence[RunMetrics]], watched: str) -> list[Row]:
    """The table of a load: gaps of the watched group, first tokens of every group, then work and memory."""
    rows = Rows(rounds)
    row, latency = rows.row, rows.latency

    def first_token(group: str) -> list[Row]:
        return latency(f"ttft_{group}", f"TTFT {group}", lambda m: m.groups[group].ttft_s)[::2]  # P50 and max

    groups = [label for label in next(iter(rounds.values()))[0].groups if label != ALL]
    pads = any(metrics.padding_share for several in rounds.values() for metrics in several)
    slow = f"gaps over {SLOW_GAP_FACTOR} x the median"
    return [
        *latency("itl", f"ITL {watched}", lambda m: m.groups[watched].itl_s),
        row("slow_gap_share", slow, "share", "lower", lambda m: m.groups[watched].slow_gap_share),
        *latency("tpot", f"TPOT {watched}", lambda m: m.groups[watched].tpot_s)[:2],
        *(found for group in groups for found in first_token(group)),
        row("output_tokens_per_s", "throughput", "tokens/s", "higher", lambda m: m.output_tokens_per_s),
        row("num_steps", "steps", "", "lower", lambda m: m.num_steps),
        *latency("host", "host time of a step", lambda m: m.host_s)[:2],
        *(row("padding_share", "padding, of all tokens", "share", "lower", lambda m: m.padding_share),) * pads,
        row("prompt_tokens_computed", "prompt tokens computed", "", "lower", lambda m: m.prompt_tokens_computed),
        row("hit_rate", "prefix cache hit rate", "share", "higher", lambda m: m.hit_rate),
        row("peak_used_blocks", "peak KV blocks", "", "lower", lambda m: m.peak_used_blocks),
    ]


def front_end_rows(rounds: Mapping[str, Sequence[FrontEndMetrics]]) -> list[Row]:
    """The table of a server under many streams: the engine's steps, the front end, and what ran beside them."""
    rows = Rows(rounds)
    row, latency = rows.row, rows.latency
    return [
        *latency("gap", "step gap", lambda m: m.gap_s),
        *latency("step", "step", lambda m: m.step_s)[:2],
        *latency("health", "/health", lambda m: m.health_s)[:2],
        row("output_tokens_per_s", "throughput", "tokens/s", "higher", lambda m: m.output_tokens_per_s),
        row("num_steps", "steps", "", "lower", lambda m: m.num_steps),
        row("ready", "server ready after", "s", "lower", lambda m: m.ready_s),
        row("num_threads", "torch threads of a step", "", "", lambda m: m.num_threads),
        row("client_cpu_share", "load generator, of a core", "share", "", lambda m: m.client_cpu_share),
    ]


def simulated_rows(runs: Mapping[str, SimulatedRun], gaps: Mapping[str, Spread | None], watched: str) -> list[Row]:
    """The table of a simulated load, in seconds too. `gaps`: of every stage, from the end of a step to the next one."""
    rows = Rows({stage: [run] for stage, run in runs.items()})
    row, latency = rows.row, rows.latency

    def first_token(group: str) -> list[Row]:
        return latency(f"ttft_{group}", f"TTFT {group}", lambda run: _seconds(run.ttft_us(group)))[::2]

    groups = next(iter(runs.values())).groups
    return [
        *latency("itl", f"ITL {watched}", lambda run: _seconds(run.itl_us(watched))),
        *(found for group in groups for found in first_token(group)),
        row("output_tokens_per_s", "throughput", "tokens/s", "higher", lambda run: run.output_tokens_per_s),
        row("num_steps", "steps", "", "lower", lambda run: run.num_steps),
        *Rows({stage: [gap] for stage, gap in gaps.items()}).latency("gap", "step gap", lambda gap: gap)[::2],
        row("device_busy", "device busy", "share", "higher", lambda run: run.busy_us / run.end_us),
        row("tokens_computed", "tokens computed", "", "lower", lambda run: run.num_tokens),
        row("hit_rate", "prefix cache hit rate", "share", "higher", lambda run: run.hit_rate),
        row("peak_used_blocks", "peak KV blocks", "", "lower", lambda run: run.peak_used_blocks),
        row("num_preemptions", "preemptions", "", "lower", lambda run: run.num_preemptions),
    ]


def _seconds(spread: Spread | None) -> Spread | None:
    """Of a spread of microseconds."""
    if spread is None:
        return None
    return Spread(spread.count, spread.mean / 1e6, spread.p50 / 1e6, spread.p99 / 1e6, spread.max / 1e6)
