"""What each step did, as plain data and as one JSON line a step; written by the core, read by the laboratory.

The engine calls an optional `Observer`; it does not know what the observer does with a record. A file starts
with a `TraceHeader` line, then one `StepRecord` line a step, so that a truncated file keeps whatever was whole.
Everything a scheduler decided on (arrivals, aborts) and everything it decided is in there: a run can be replayed
(tests/test_replay.py). docs/trace-format.md describes every field.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import msgspec

from nanoserve.request import EngineRequest, Reason, StepPlan

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig

logger = logging.getLogger("nanoserve.record")
TRACE_VERSION = 2


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a trace: format version and the engine's config (classes by name)."""

    version: int = TRACE_VERSION
    config: dict[str, str | int | float | bool | None] = {}
    device: str = ""
    execution: str = ""  # how the runner executes, and what getting ready took
    crash: bool = False  # the last steps of an engine that died, from plans alone: no counts at the end of a step


class Input(msgspec.Struct, frozen=True, array_like=True):
    """What came to the scheduler between two decisions: `add` or `abort` of a request, `reset` of the prefix cache
    (`id`: "force", or "")."""

    kind: str
    id: str = ""


class StepRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One step. Times are seconds of one monotonic clock (the machine's, or a simulator's virtual one)."""

    step: int
    start_s: float  # schedule() was called
    launched_s: float  # the plan went to the runner
    end_s: float  # the sampled tokens were there and update() had run
    arrivals: list[EngineRequest] = []  # added since the step before
    aborts: list[str] = []  # asked for since the step before, or while this step ran
    ahead: bool = False  # decided before the tokens of the step before it were taken
    before: list[Input] = []  # that came before it was decided, in order; left out where they are the arrivals
    meanwhile: list[Input] = []  # that came then, before its tokens were taken
    num_scheduled_tokens: dict[str, int] = {}
    budget: int = 0
    hit_tokens: dict[str, int] = {}  # of requests admitted in this step: tokens found in the cache, or swapped in
    resumed: list[str] = []  # admitted again after a preemption
    preempted: list[str] = []
    left_out: dict[str, Reason] = {}
    new_blocks: dict[str, list[int]] = {}  # blocks added to each table; the whole table of who was admitted
    replaced_blocks: dict[str, list[tuple[int, int]]] = {}  # (index, id): table entries that changed
    evicted: list[int] = []  # blocks that lost their hash: handed out again, or not written after all
    copies: list[tuple[int, int]] = []  # blocks (from, to) that were swapped
    num_free_blocks: int = 0  # after the step
    num_used_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0  # swapped and preempted ones included
    sampled: dict[str, list[int]] = {}  # accepted by update()
    finished: dict[str, str] = {}  # id -> finish reason
    host_s: float = 0.0  # deciding, making inputs, launching, taking the tokens: all but the device's own work
    graph: str = ""  # the one that was replayed
    num_padding_tokens: int = 0
    error: str = ""  # of a step that failed; only in a crash dump
    unfinished: bool = False  # its tokens were never taken; only in a crash dump


def decided(plan: StepPlan) -> dict[str, Any]:
    """The fields of a record that a plan tells: all but what became of it."""
    return {
        "step": plan.step,
        "num_scheduled_tokens": plan.num_scheduled_tokens,
        "hit_tokens": {new.id: new.num_computed_tokens for new in plan.new},
        "preempted": plan.preempted,
        "left_out": plan.left_out,
        "new_blocks": {new.id: new.block_ids for new in plan.new} | plan.new_blocks,
        "replaced_blocks": plan.replaced_blocks,
        "copies": plan.copies,
    }


class Observer(Protocol):
    """Lives where the core lives, and is called from its thread."""

    def on_start(self, header: TraceHeader) -> None: ...
    def on_step(self, record: StepRecord) -> None: ...
    def close(self) -> None: ...


class ListRecorder:
    """Keeps the records in memory."""

    def __init__(self) -> None:
        self.header = TraceHeader()
        self.records: list[StepRecord] = []

    def on_start(self, header: TraceHeader) -> None:
        self.header = header

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


class JsonlRecorder:
    """Writes one JSON line a step to a file, from `on_start` to `close`. Until then it is a path, so that it can
    travel to the process that the core lives in.

    `on_start` raises OSError for a file that cannot be written to. A disk that is full later ends the record, which
    one line tells, and not the engine: nobody's request has to do with it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._encoder = msgspec.json.Encoder()
        self._file: IO[bytes] | None = None

    def on_start(self, header: TraceHeader) -> None:
        self._file = self.path.open("wb")
        try:
            self._write(header)
            self._file.flush()
        except OSError as error:
            self._drop()
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def on_step(self, record: StepRecord) -> None:
        assert self._file is not None, "on_start comes first"
        if not self._file.closed:
            with self._ended_by_error():
                self._write(record)

    def close(self) -> None:
        if self._file is not None and not self._file.closed:
            with self._ended_by_error():
                self._file.close()

    def _write(self, item: msgspec.Struct) -> None:
        assert self._file is not None, "on_start comes first"
        self._file.write(self._encoder.encode(item) + b"\n")

    @contextlib.contextmanager
    def _ended_by_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._drop()
            logger.error("the record in %s ends too early: %s; make room, and record again", self.path, error.strerror)

    def _drop(self) -> None:
        """Close the file, whatever of it is written."""
        with contextlib.suppress(OSError):
            self._file.close()  # type: ignore[union-attr]  # only called with a file

    def __reduce__(self) -> tuple[type[JsonlRecorder], tuple[Path]]:
        return JsonlRecorder, (self.path,)


def describe_config(config: EngineConfig) -> dict[str, str | int | float | bool | None]:
    """The config as JSON values; classes by name."""
    described: dict[str, str | int | float | bool | None] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, tuple):
            value = ",".join(map(str, value))
        described[f.name] = value.__name__ if isinstance(value, type) else value
    return described


class TraceError(ValueError):
    """A trace file that cannot be read. `records` holds whatever was whole before the fault; `header` is None when
    not even that was."""

    def __init__(self, message: str, records: list[StepRecord], header: TraceHeader | None = None) -> None:
        super().__init__(message)
        self.records = records
        self.header = header


def read_trace(path: str | os.PathLike[str]) -> tuple[TraceHeader, list[StepRecord]]:
    """Header and records of a trace file, or of a crash dump. TraceError, naming the line, when it is damaged."""
    lines = Path(path).read_bytes().splitlines()
    records: list[StepRecord] = []
    if not lines:
        raise TraceError(f"{path} is empty; a trace starts with a header line.", records)
    try:
        header = msgspec.json.decode(lines[0], type=TraceHeader)
    except msgspec.MsgspecError as error:
        raise TraceError(f"{path}, line 1: not a trace header ({error}).", records) from None
    if header.version != TRACE_VERSION:
        raise TraceError(f"{path} has format version {header.version}; this build reads {TRACE_VERSION}.", records)
    decoder = msgspec.json.Decoder(StepRecord)
    for number, line in enumerate(lines[1:], 2):
        try:
            records.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path}, line {number}: not a step record ({error}).", records, header) from None
    return header, records
