"""A recorded run: its header, its records, and the views of them that charts, replay and timeline are made from.

Owns the order in which the recorded moments happened, and what every request did in every step as runs of equal
steps (`Lane`): a trace of 20,000 steps has few of them. Knows nothing of pictures. A damaged file is shown as far as
it is whole: `Trace.load` keeps the complaint. Laws: tests/test_trace.py; the format: docs/trace-format.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from nanoserve.config import STAGES
from nanoserve.lab.metrics import Activity, Spread
from nanoserve.lab.trace_check import read_checked
from nanoserve.record import StepRecord, TraceError, TraceHeader, describe_config
from nanoserve.request import EngineRequest, Reason

SWAPPED = "swapped"  # beside the activities: got nothing, and its KV is on the host


class Moment(NamedTuple):
    """One of the two moments of a step: it is decided (or else its tokens are taken)."""

    record: StepRecord
    place: int  # of the record in its trace
    is_decision: bool


def moments(records: Iterable[StepRecord]) -> Iterator[Moment]:
    """Decisions and results in the order in which they happened: one step ahead, a step is decided before the results
    of the one before it are taken. A step of a crash dump that was never finished has no results."""
    before: Moment | None = None
    for place, record in enumerate(records):
        now = Moment(record, place, True)
        if before is None:
            yield now
        elif record.ahead:
            yield from (now, *_results(before))
        else:
            yield from (*_results(before), now)
        before = now
    if before is not None:
        yield from _results(before)


def _results(decision: Moment) -> tuple[Moment, ...]:
    return () if decision.record.unfinished else (decision._replace(is_decision=False),)


class Run(NamedTuple):
    """Steps in a row in which a request did the same."""

    first: int  # place of the first record in its trace
    num_steps: int
    activity: str  # an `Activity`, or SWAPPED
    num_tokens: int = 0  # in each step
    reason: Reason | None = None  # why it got nothing


@dataclass(slots=True)
class Lane:
    """One request, from its arrival to its end or the end of the trace."""

    id: str
    arrival_s: float
    request: EngineRequest | None = None  # None: it came before the trace begins
    runs: list[Run] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    num_hit_tokens: int | None = None  # at first admission
    finish_reason: str | None = None
    num_computed: int = 0
    lost: str = ""  # since it last ran: "", `Activity.PREEMPTED` or SWAPPED

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids) if self.request else 0

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.arrival_s if self.token_s and self.request else None

    def compute(self, place: int, num_tokens: int, hit: int | None) -> None:
        """It ran; `hit`: it was admitted, with so many tokens computed."""
        self.lost = ""
        if hit is not None:
            self.num_computed = hit
            if self.num_hit_tokens is None:
                self.num_hit_tokens = hit
        start, self.num_computed = self.num_computed, self.num_computed + num_tokens
        newest = self.num_prompt_tokens + max(len(self.token_s) - 1, 0)  # where the next decode would start
        is_decode = start >= newest if self.request else num_tokens == 1
        self.extend(place, Activity.DECODE if is_decode else Activity.PREFILL, num_tokens)

    def extend(self, place: int, activity: str, num_tokens: int = 0, reason: Reason | None = None) -> None:
        last = self.runs[-1] if self.runs else None
        if last and last[2:] == (activity, num_tokens, reason) and last.first + last.num_steps == place:
            self.runs[-1] = last._replace(num_steps=last.num_steps + 1)
        else:
            self.runs.append(Run(place, 1, activity, num_tokens, reason))


class Lanes:
    """Reads records and writes a lane per request, in order of arrival. An id that is used again gets a new lane."""

    def __init__(self, lost: str) -> None:
        self.all: list[Lane] = []
        self.alive: dict[str, Lane] = {}
        self._lost = lost
        self._late_aborts: set[str] = set()  # of the record before: after this one was decided
        self._ended: dict[str, Lane] = {}  # in the record before: one step ahead, this one was decided with them

    def read(self, place: int, record: StepRecord) -> None:
        for request in record.arrivals:
            self._open(Lane(request.id, request.arrival_s, request))
        for request_id in record.preempted:
            self._lane(request_id, record).lost = self._lost
        for request_id, num_tokens in record.num_scheduled_tokens.items():
            self._lane(request_id, record).compute(place, num_tokens, record.hit_tokens.get(request_id))
        for request_id, reason in record.left_out.items():
            lane = self._lane(request_id, record)
            if not lane.finish_reason:
                lane.extend(place, lane.lost or Activity.WAITING, 0, reason)
        for request_id, token_ids in record.sampled.items():
            self._lane(request_id, record).token_s += [record.end_s] * len(token_ids)
        self._close(record)

    def _lane(self, request_id: str, record: StepRecord) -> Lane:
        lane = self.alive.get(request_id) or self._ended.get(request_id)
        if lane is None:
            lane = Lane(request_id, record.start_s)
            self._open(lane)
        return lane

    def _open(self, lane: Lane) -> None:
        if before := self.alive.get(lane.id):
            before.finish_reason = "abort"  # or its id could not be used again
        self.alive[lane.id] = lane
        self.all.append(lane)

    def _close(self, record: StepRecord) -> None:
        """Ends, but for an abort that came before the request that bears the id now."""
        last = {i.id: i.kind for i in record.before}
        late = {i.id for i in record.meanwhile if i.kind == "abort"}
        aborted = late | (self._late_aborts if record.ahead else set())
        self._ended = {}
        for request_id, reason in record.finished.items():
            is_older = reason == "abort" and last.get(request_id) == "add" and request_id not in aborted
            if request_id in self.alive and not is_older:
                lane = self._ended[request_id] = self.alive.pop(request_id)
                lane.finish_reason = reason
        self._late_aborts = late


def last_line(error: str) -> str:
    """Of the traceback in a record: what went wrong."""
    lines = error.strip().splitlines()
    return lines[-1] if lines else "no reason was recorded"


class Trace:
    """Header and records, and the views of them."""

    def __init__(self, header: TraceHeader, records: Sequence[StepRecord], name: str = "", damage: str = "") -> None:
        self.header = header
        self.records = list(records)
        self.name = name
        self.damage = damage  # what is wrong with the file; "": nothing

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Of a damaged file whatever is whole, with the complaint in `damage`. TraceError when that is nothing;
        ValueError for what is no file; OSError."""
        try:
            return cls(*read_checked(path), name=os.path.basename(path))
        except TraceError as error:
            if error.header is None or not error.records:
                raise
            return cls(error.header, error.records, os.path.basename(path), str(error))

    def line(self, place: int) -> str:
        """Where the record at that place stands; -1: the header."""
        return f"{self.name or 'the trace'}, line {place + 2}"

    @property
    def block_size(self) -> int:
        return self._size("block_size")

    @property
    def num_blocks(self) -> int:
        return self._size("num_blocks")

    def _size(self, name: str) -> int:
        size = self.header.config.get(name)
        return max(size, 0) if isinstance(size, int) else 0

    @property
    def stage(self) -> str:
        """The stage whose seams and modes the config has; "" when it is none of them."""
        names = ("scheduler", "client", "blocks", "runner", "batch", "async_scheduling")
        for stage, config in STAGES.items():
            described = describe_config(config)
            if all(described[name] == self.header.config.get(name) for name in names):
                return stage
        return ""

    @property
    def start_s(self) -> float:
        """The first arrival, or the first step when that was earlier or the arrivals are not in the trace."""
        arrivals = [r.arrival_s for record in self.records for r in record.arrivals]
        first = self.records[0].start_s if self.records else 0.0
        return min([first, *(arrivals if arrivals and min(arrivals) > 0 else [])])

    @cached_property
    def lanes(self) -> list[Lane]:
        """What every request did, in order of arrival."""
        lanes = Lanes(SWAPPED if self.header.config.get("preemption_mode") == "swap" else Activity.PREEMPTED)
        for place, record in enumerate(self.records):
            lanes.read(place, record)
        return lanes.all

    def budget_fill(self) -> list[float]:
        """Of every step, the share of its token budget that was given away."""
        return [sum(r.num_scheduled_tokens.values()) / r.budget if r.budget else 0.0 for r in self.records]

    def itl(self) -> list[Spread | None]:
        """Of every step, the gaps in seconds that its tokens ended; None where it ended none."""
        gaps: dict[float, list[float]] = {}
        for lane in self.lanes:
            for earlier, later in zip(lane.token_s, lane.token_s[1:], strict=False):
                gaps.setdefault(later, []).append(later - earlier)
        return [Spread.of(gaps.get(record.end_s, ())) for record in self.records]
