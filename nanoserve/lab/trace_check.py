"""Reads a trace file and checks what its types cannot say: numbers that no run has, lines nested without end.

Owns the limits of the numbers in a record; charts, replay and timeline may count on them. Knows nothing of what was
decided. Every complaint names file, line and field. Laws: tests/test_trace.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from nanoserve.lab.files import check_inputs
from nanoserve.record import StepRecord, TraceError, TraceHeader, read_trace

COUNT_LIMIT = 2**31  # of tokens, ids, blocks: the page keeps them in 32 bits
CONFIG_LIMIT = 2**63
TIME_LIMIT_S = 1e12
TIMES = ("start_s", "launched_s", "end_s", "host_s")
COUNTS = (
    "step", "num_scheduled_tokens", "budget", "hit_tokens", "new_blocks", "replaced_blocks", "evicted", "copies",
    "num_free_blocks", "num_used_blocks", "num_running", "num_waiting", "sampled", "num_padding_tokens",
)  # fmt: skip


def read_checked(path: str | os.PathLike[str]) -> tuple[TraceHeader, list[StepRecord]]:
    """Header and records. TraceError, with the records before the fault, for a line that no engine wrote; ValueError
    for what is no file; OSError."""
    check_inputs([Path(path)])
    try:
        header, records = read_trace(path)
    except TraceError as error:
        if error.header is not None:
            _check(path, error.header, error.records)
        raise
    except RecursionError:
        raise TraceError(f"{path}, line {_line_without_end(path)}: it is nested too deeply for a record.", []) from None
    _check(path, header, records)
    return header, records


def _check(path: str | os.PathLike[str], header: TraceHeader, records: list[StepRecord]) -> None:
    for name, value in header.config.items():
        if isinstance(value, int | float) and not abs(value) < CONFIG_LIMIT:
            raise TraceError(f"{path}, line 1: config.{name} is {_shown(value)}, and no config holds that.", [])
    for place, record in enumerate(records):
        if fault := next(_faults(record), None):
            name, value, limit = fault
            message = f"{path}, line {place + 2}: {name} holds {_shown(value)}, and must be {limit}."
            raise TraceError(message, records[:place], header)


def _faults(record: StepRecord) -> Iterator[tuple[str, float, str]]:
    """(field, value, what it must be)."""
    counts = [(name, number) for name in COUNTS for number in _numbers(getattr(record, name))]
    counts.append(("num_scheduled_tokens", sum(record.num_scheduled_tokens.values())))
    for why in record.left_out.values():
        counts += [("left_out", abs(why.need)), ("left_out", abs(why.free))]
    times: list[tuple[str, float]] = [(name, getattr(record, name)) for name in TIMES]
    for request in record.arrivals:
        counts += [("arrivals.prompt_token_ids", number) for number in _ends(request.prompt_token_ids)]
        times.append(("arrivals.arrival_s", request.arrival_s))
    for name, count in counts:
        if not 0 <= count < COUNT_LIMIT:
            yield name, count, f">= 0 and < {COUNT_LIMIT}"
    for name, seconds in times:
        if not abs(seconds) < TIME_LIMIT_S:
            yield name, seconds, f"seconds within {TIME_LIMIT_S:g}"


def _numbers(value: Any) -> Iterator[int]:
    """Of counts in lists and mappings, whatever way."""
    if isinstance(value, int):
        yield value
        return
    for inner in value.values() if isinstance(value, dict) else value:
        yield from (inner,) if isinstance(inner, int) else _numbers(inner)


def _ends(numbers: list[int]) -> tuple[int, ...]:
    """The least and the largest."""
    return (min(numbers), max(numbers)) if numbers else ()


def _shown(value: float) -> str:
    is_long = isinstance(value, int) and abs(value) >= 10**30  # Python refuses to print thousands of digits
    return "an integer of more than 30 digits" if is_long else str(value)


def _line_without_end(path: str | os.PathLike[str]) -> int:
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            msgspec.json.decode(line)
        except RecursionError:
            return number
        except msgspec.MsgspecError:
            continue
    raise AssertionError("one of the lines was nested too deeply")
