"""`nanoserve calibrate`: the costs of a step, fitted to the records of a real run, for `nanoserve simulate`.

A step's time (decided to done) is fitted by least squares, with no cost below 0, as what so many tokens take plus a sum
over rows and attention; steps that are far off (a warm-up, a busy machine) are left out. The gap from a step to the
next is the host's, told apart. `--check` simulates other runs with it, and says how far off. Laws: tests/test_costs.py.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, median_low
from typing import TYPE_CHECKING

import msgspec

from nanoserve.config import SEAMS
from nanoserve.lab.costs import StepLoad, Table, attention_of, shares
from nanoserve.lab.files import check_outputs, file_argument, write_file
from nanoserve.lab.held_out import Comparison, compare
from nanoserve.lab.metrics import percentile
from nanoserve.lab.trace_check import read_checked
from nanoserve.lab.user_class import refusing
from nanoserve.record import StepRecord, TraceHeader

if TYPE_CHECKING:
    import numpy as np

MIN_STEPS = 20
FAR_OFF = 1.35  # times what was fitted, or that part of it: a core that somebody else uses too takes 1.5
MIN_STEPS_A_KNOT = 5
NUM_PASSES = 4  # of the fit: each weighs errors by what the one before has found


@dataclass(frozen=True, slots=True)
class Measured:
    """One recorded step."""

    load: StepLoad
    us: float  # schedule() called to update() done
    gap_us: float | None  # to the next step, where requests waited for it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces", nargs="+", type=file_argument, metavar="TRACE", help="written by --record; of one engine"
    )
    parser.add_argument("--out", type=file_argument, required=True, metavar="FILE", help="for --costs table:FILE")
    parser.add_argument(
        "--check",
        nargs="+",
        type=file_argument,
        default=[],
        metavar="TRACE",
        help="runs to simulate, and to compare with",
    )
    parser.add_argument("--json", action="store_true", help="print the costs and the comparisons as JSON")


def run(args: argparse.Namespace) -> int:
    """Read, fit, write, compare, print. ValueError for traces that cannot be fitted to, or compared with."""
    check_outputs([("--out", args.out)], [*args.traces, *args.check])
    traces, held_out = [read_checked(path) for path in args.traces], [read_checked(path) for path in args.check]
    source = _source([header for header, _ in traces])
    if others := {f"{h.config.get('model')} on {h.device}" for h, _ in held_out} - {source}:
        raise ValueError(f"--check has a run of {others.pop()}, and the costs are those of {source}; leave it out.")
    table = fit([step for _, records in traces for step in measured_steps(records)], source)
    encoded = msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n"
    checks = {str(path): _compared(path, *trace, table) for path, trace in zip(args.check, held_out, strict=True)}
    write_file(args.out, encoded)
    if args.json:
        errors = {path: {**asdict(check), "errors": check.errors} for path, check in checks.items()}
        print(msgspec.json.format(msgspec.json.encode({"table": table, "checks": errors}), indent=1).decode())
    else:
        print(_told(table, args.out))
        for path, check in checks.items():
            print(f"{path}: {check}")
    return 0


def _compared(path: Path, header: TraceHeader, records: Sequence[StepRecord], table: Table) -> Comparison:
    """ValueError that names the file, where it is not the whole of a run that can be simulated."""
    known = [client.__name__ for client in SEAMS["client"].values()]
    if header.config.get("client") not in known:
        raise ValueError(f"{path}, line 1: config.client is none of {', '.join(known)}; record the run again.")
    arrived = {request.id for record in records for request in record.arrivals}
    for place, record in enumerate(records):
        if strange := next((request_id for request_id in record.sampled if request_id not in arrived), None):
            raise ValueError(f"{path}, line {place + 2}: sampled names {strange!r:.60}, which never arrived in it.")
    with refusing(f"{path} cannot be simulated"):
        return compare(header, records, table)


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
    knots = zip(table.knot_tokens, table.knot_us, strict=True)
    lines = [
        f"Fitted to {table.num_steps:,} steps of {table.source}, microseconds:",
        "  a step of so many tokens: " + ", ".join(f"{tokens:,.0f}: {us:,.0f}" for tokens, us in knots),
        f"  and {table.request_us:,.3f} a request, {table.context_us:,.5f} a token of context, "
        f"{table.attention_us:,.6f} a pair of attention",
        f"  from the end of a step to the start of the next {table.gap_us:,.0f} on average",
        f"  error of a step: median {table.median_error:.1%}, P90 {table.p90_error:.1%}",
        f"Written: {out}; use it as --costs table:{out}",
    ]
    return "\n".join(lines)


def measured_steps(records: Sequence[StepRecord]) -> Iterator[Measured]:
    """Every step with tokens, and what it computed."""
    computed: dict[str, int] = {}
    for index, record in enumerate(records):
        computed |= record.hit_tokens
        tokens = record.num_scheduled_tokens
        starts = [(computed.get(request_id, 0), n) for request_id, n in tokens.items()]
        for request_id, n in tokens.items():
            computed[request_id] = computed.get(request_id, 0) + n
        if any(tokens.values()):
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
    knots = _knots([step.load.num_tokens for step in usable])
    features = np.array([_features(step.load, knots) for step in usable])
    costs, kept = _weighted_fit(features, np.array([step.us for step in usable]))
    request_us, context_us, attention_us = costs[len(knots) :]
    table = Table(
        source=source,
        knot_tokens=knots,
        knot_us=costs[: len(knots)],
        request_us=request_us,
        context_us=context_us,
        attention_us=attention_us,
        gap_us=mean(gaps) if gaps else 0.0,
        num_steps=len(kept),
    )
    errors = [abs(table.step_us(usable[i].load) / usable[i].us - 1) for i in kept]
    return msgspec.structs.replace(table, median_error=median(errors), p90_error=percentile(errors, 90))


def _knots(tokens: Sequence[int]) -> list[float]:
    """The median of each group of steps with about as many tokens: a group is a power of two, give or take."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for n in tokens:
        groups[round(math.log2(n))].append(n)
    knots = sorted({float(median_low(group)) for group in groups.values() if len(group) >= MIN_STEPS_A_KNOT})
    return knots or [float(median_low(tokens))]


def _features(load: StepLoad, knots: Sequence[float]) -> list[float]:
    """What the costs of a `Table` are multiplied with: of each knot, of a request, of context and attention."""
    row = [0.0] * len(knots)
    for i, share in shares(knots, load.num_tokens):
        row[i] = share
    return [*row, float(load.num_requests), float(load.context), float(load.attention)]


def _weighted_fit(features: np.ndarray, times: np.ndarray) -> tuple[list[float], list[int]]:
    """Costs, and which steps they were fitted to. An error counts by its share of what was *fitted* before: by its
    share of what was measured, a step that took too long would count for less than one that was too fast, and a whole
    run would come out too short."""
    import numpy as np

    expected, near = times, np.full(len(times), True)
    costs = np.zeros(features.shape[1])
    for _ in range(NUM_PASSES):
        costs = least_squares(features[near] / expected[near, None], times[near] / expected[near])
        fitted = features @ costs
        expected = np.maximum(fitted, times.min() / FAR_OFF)  # a step that nothing was fitted to may come out as 0
        near = (times < FAR_OFF * expected) & (times > expected / FAR_OFF)
        if near.sum() < MIN_STEPS:
            near[:] = True
    return [float(cost) for cost in costs], [int(i) for i in np.flatnonzero(near)]


def least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |a x - b|: Lawson and Hanson 1974, chapter 23. Numbers are freed of the bound one by
    one, the one that helps most first; one that would fall below 0 on the way is bound again."""
    import numpy as np

    scale = np.maximum(np.linalg.norm(a, axis=0), np.finfo(float).tiny)  # a column may be all 0
    a = a / scale
    x, free = np.zeros(a.shape[1]), np.full(a.shape[1], False)
    for _ in range(10 * len(x)):  # rounding could make it go in circles
        pull = np.where(free, -np.inf, a.T @ (b - a @ x))
        if pull.max() < 1e-9 * np.linalg.norm(b):
            break
        free[pull.argmax()] = True
        while True:
            best = np.zeros(len(x))
            best[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (best <= 0)
            if not below.any():
                x = best
                break
            fall = np.maximum(x[below] - best[below], np.finfo(float).tiny)
            x = x + (x[below] / fall).min() * (best - x)
            free &= x > 1e-12 * x.max()
            x[~free] = 0
    return x / scale
