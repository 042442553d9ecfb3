"""`nanoserve calibrate`: the costs of a step, fitted to the records of a real run, for `nanoserve simulate`.

A step's time (decided to done) is fitted by least squares of relative errors on its counts, no coefficient below 0,
without steps that are far off (a warm-up, a busy machine); then a factor by its number of tokens takes up what a sum
cannot say. The gap from a step to the next is the host's, told apart. Laws: tests/test_costs.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

import msgspec

from nanoserve.lab.costs import StepLoad, Table, attention_of
from nanoserve.lab.metrics import percentile
from nanoserve.record import StepRecord, TraceHeader, read_trace

if TYPE_CHECKING:
    import numpy as np

MIN_STEPS = 20  # to fit five numbers to
FAR_OFF = 3.0  # a step that takes so many times what was fitted, or that part of it, is left out
NUM_KNOTS = 12
MIN_STEPS_A_KNOT = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """One recorded step."""

    load: StepLoad
    us: float  # schedule() called to update() done
    gap_us: float | None  # to the next step, where requests waited for it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="written by --record; of one engine")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for --costs table:FILE")
    parser.add_argument("--json", action="store_true", help="print the file's content")


def run(args: argparse.Namespace) -> int:
    """Read, fit, write, print. ValueError for traces that cannot be fitted to."""
    if not args.out.resolve().parent.is_dir():
        raise ValueError(f"--out {args.out} is in a folder that does not exist; make it first.")
    steps: list[Measured] = []
    headers: list[TraceHeader] = []
    for path in args.traces:
        header, records = read_trace(path)
        headers.append(header)
        steps += measured_steps(records)
    table = fit(steps, source=_source(headers))
    encoded = msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n"
    args.out.write_bytes(encoded)
    print(encoded.decode() if args.json else _told(table, args.out), end="")
    return 0


def _source(headers: Sequence[TraceHeader]) -> str:
    """What ran. ValueError when it was not one engine."""
    kinds = {(h.config.get("model"), h.device, h.config.get("async_scheduling")) for h in headers}
    if len(kinds) > 1:
        raise ValueError(f"the traces are of {len(kinds)} different engines; fit each of them on its own.")
    [(model, device, ahead)] = kinds
    if ahead:
        raise ValueError(
            "the trace is of an engine that is one step ahead, whose steps overlap, so that none has a time of its "
            "own; record one with --no-async-scheduling."
        )
    return f"{model} on {device}"


def _told(table: Table, out: Path) -> str:
    lines = [
        f"Fitted to {table.num_steps:,} steps of {table.source}:",
        f"  {table.base_us:,.1f} us a step, {table.token_us:,.3f} a token, {table.request_us:,.3f} a request, "
        f"{table.context_us:,.5f} a token of context, {table.attention_us:,.6f} a pair of attention",
        f"  times {min(table.knot_factors):.2f} to {max(table.knot_factors):.2f}, by the number of tokens",
        f"  from the end of a step to the start of the next {table.gap_us:,.0f} us on average",
        f"  error of a step: median {table.median_error:.1%}, P90 {table.p90_error:.1%}",
        f"Written: {out}; use it as --costs table:{out}",
    ]
    return "\n".join(lines) + "\n"


def measured_steps(records: Sequence[StepRecord]) -> Iterator[Measured]:
    """Every step with tokens, and what it computed."""
    computed: dict[str, int] = {}
    for index, record in enumerate(records):
        computed |= record.hit_tokens
        tokens = record.num_scheduled_tokens
        starts = [(computed.get(request_id, 0), n) for request_id, n in tokens.items()]
        for request_id, n in tokens.items():
            computed[request_id] = computed.get(request_id, 0) + n
        if tokens:
            load = StepLoad(
                num_tokens=sum(tokens.values()),
                num_requests=len(tokens),
                context=sum(start + n for start, n in starts),
                attention=sum(attention_of(start, n) for start, n in starts),
            )
            yield Measured(load, (record.end_s - record.start_s) * 1e6, _gap_us(records, index))
        for request_id in (*record.finished, *record.aborts):
            computed.pop(request_id, None)


def _gap_us(records: Sequence[StepRecord], index: int) -> float | None:
    """None where nobody waited, or nothing came after."""
    if index + 1 == len(records) or not records[index].num_running:
        return None
    return max(0.0, records[index + 1].start_s - records[index].end_s) * 1e6


def fit(steps: Iterable[Measured], source: str = "") -> Table:
    """The table. ValueError where there are too few steps."""
    import numpy as np

    usable = [step for step in steps if step.us > 0]
    if len(usable) < MIN_STEPS:
        raise ValueError(f"{len(usable)} steps are too few to fit costs to; record at least {MIN_STEPS}.")
    gaps = [step.gap_us for step in usable if step.gap_us is not None]
    features = np.array([[1, *step.load] for step in usable], dtype=float)
    times = np.array([step.us for step in usable])
    coefficients = _least_squares(features, times)
    ratio = times / (features @ coefficients)
    near = (ratio < FAR_OFF) & (ratio > 1 / FAR_OFF)
    if near.sum() >= MIN_STEPS:
        features, times = features[near], times[near]
        coefficients = _least_squares(features, times)
    knots, factors = _knots(features[:, 1], times, features @ coefficients)
    base_us, token_us, request_us, context_us, attention_us = map(float, coefficients)
    table = Table(
        source=source,
        base_us=base_us,
        token_us=token_us,
        request_us=request_us,
        context_us=context_us,
        attention_us=attention_us,
        knot_tokens=knots,
        knot_factors=factors,
        gap_us=mean(gaps) if gaps else 0.0,
        num_steps=len(times),
    )
    loads = [StepLoad(*(int(n) for n in row[1:])) for row in features]
    errors = [abs(table.step_us(load) / us - 1) for load, us in zip(loads, times.tolist(), strict=True)]
    return msgspec.structs.replace(table, median_error=median(errors), p90_error=percentile(errors, 90))


def _least_squares(features: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The best coefficients >= 0 for relative errors: of every choice of features, so few that all can be tried."""
    import numpy as np

    weighted, ones = features / times[:, None], np.ones(len(times))
    best, best_error = np.zeros(features.shape[1]), float("inf")
    for size in range(1, features.shape[1] + 1):
        for chosen in combinations(range(features.shape[1]), size):
            columns = weighted[:, chosen]
            scale = np.maximum(np.abs(columns).max(axis=0), np.finfo(float).tiny)  # a column may be all 0
            found = np.linalg.lstsq(columns / scale, ones, rcond=None)[0] / scale
            error = float(((columns @ found - ones) ** 2).sum())
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(features.shape[1]), error
                best[list(chosen)] = found
    return best


def _knots(tokens: np.ndarray, times: np.ndarray, sums: np.ndarray) -> tuple[list[float], list[float]]:
    """Of groups of steps of about as many tokens, the median tokens, and all their time over what the sum says: so that
    a whole run takes as long as it took, on a machine whose steps vary too."""
    import numpy as np

    edges = np.geomspace(tokens.min(), tokens.max() + 1, NUM_KNOTS + 1)
    knots: list[float] = []
    factors: list[float] = []
    for low, high in pairwise(edges):
        group = (low <= tokens) & (tokens < high)
        if group.sum() >= MIN_STEPS_A_KNOT:
            knots.append(float(np.median(tokens[group])))
            factors.append(float(times[group].sum() / sums[group].sum()))
    return (knots, factors) if knots else ([1.0], [float(times.sum() / sums.sum())])
