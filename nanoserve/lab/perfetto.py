"""A recorded run as Chrome's trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

A process a run; in it one thread of steps, one thread a request, and counters. Times are microseconds since the first
arrival. Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nanoserve.lab.reasons import in_words
from nanoserve.lab.trace import Lane, Trace

STEPS = 0  # the thread of steps; a request's is its place from 1 on
Event = dict[str, Any]


def perfetto(traces: Sequence[Trace]) -> dict[str, Any]:
    """The whole file as JSON values."""
    events = [event for process, trace in enumerate(traces, 1) for event in _run(trace, process)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _run(trace: Trace, process: int) -> Iterator[Event]:
    yield _name("process_name", process, STEPS, trace.stage or trace.name or "run")
    yield _name("thread_name", process, STEPS, "steps")
    yield from _steps(trace, process)
    for thread, lane in enumerate(trace.lanes, 1):
        yield _name("thread_name", process, thread, lane.id)
        yield from _lane(trace, lane, process, thread)


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _steps(trace: Trace, process: int) -> Iterator[Event]:
    for record in trace.records:
        tokens = sum(record.num_scheduled_tokens.values())
        where = {"pid": process, "tid": STEPS, "ts": _us(record.start_s - trace.start_s)}
        args: Event = {"tokens": tokens, "budget": record.budget, "requests": len(record.num_scheduled_tokens)}
        if record.preempted:
            args["preempted"] = ", ".join(record.preempted)
        yield {
            "ph": "X",
            "name": f"step {record.step}",
            "dur": _us(record.end_s - record.start_s),
            "args": args,
        } | where
        counters = {
            "tokens": tokens,
            "KV blocks in use": record.num_used_blocks,
            "running": record.num_running,
            "waiting": record.num_waiting,
        }
        for name, value in counters.items():
            yield {"ph": "C", "name": name, "args": {name: value}} | where


def _lane(trace: Trace, lane: Lane, process: int, thread: int) -> Iterator[Event]:
    for run in lane.runs:
        first, last = trace.records[run.first], trace.records[run.first + run.num_steps - 1]
        start_s = max(first.start_s, lane.arrival_s)
        args: dict[str, Any] = {"steps": run.num_steps}
        if run.num_tokens:
            args["tokens a step"] = run.num_tokens
        if run.reason:
            args["why"] = in_words(run.reason)
        yield {
            "ph": "X",
            "name": str(run.activity),
            "pid": process,
            "tid": thread,
            "ts": _us(start_s - trace.start_s),
            "dur": _us(max(last.end_s - start_s, 0.0)),
            "args": args,
        }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
