"""One or two recorded runs as a single HTML file that needs nothing else: the data, and the page that draws it.

Owns what the page is told (`encode_run`) and how its parts become one file; the drawing is static/timeline*.js.
Colours of activities and stages are those of every other chart (`charts.py`). tests/test_timeline.py reads the
encoding back; tests/ui/test_timeline_page.py looks at the page.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from nanoserve.lab.block_history import EVICTABLE, BlockHistory, Entry, TableChange
from nanoserve.lab.charts import ACTIVITY_COLOURS, look_of
from nanoserve.lab.columns import Columns
from nanoserve.lab.metrics import Activity
from nanoserve.lab.reasons import in_words
from nanoserve.lab.trace import SWAPPED, Trace, last_line
from nanoserve.runner import MAX_POOL_BLOCKS

ACTIVITIES = (*map(str, Activity), SWAPPED)  # a run's activity is its place in here
COLOURS = {str(a): colour for a, colour in ACTIVITY_COLOURS.items()} | {SWAPPED: "#a585cf"}
SCRIPTS = ("timeline_data.js", "timeline_chart.js", "timeline_blocks.js", "timeline_page.js")
SHOWN_CONFIG = (
    "model", "scheduler", "client", "blocks", "runner", "async_scheduling", "max_num_batched_tokens", "max_num_seqs",
    "block_size", "num_blocks", "policy", "preemption_mode",
)  # fmt: skip
NO_REASON = -1


def timeline_html(traces: Sequence[Trace], with_blocks: bool = True) -> str:
    """The page of one run, or of two on one time axis. ValueError for a trace without steps."""
    columns = Columns()
    runs = [encode_run(trace, f"{i}.", columns, with_blocks) for i, trace in enumerate(traces)]
    labels = [run["label"] for run in runs]
    if len(set(labels)) < len(labels):
        for run, trace in zip(runs, traces, strict=True):
            run["label"] = trace.name or run["label"]
    meta = {
        "runs": runs,
        "activities": ACTIVITIES,
        "colours": [COLOURS[a] for a in ACTIVITIES],
        "columns": columns.directory,
    }
    static = files("nanoserve.lab") / "static"
    page = (static / "timeline.html").read_text(encoding="utf-8")
    parts = {
        "TITLE": html.escape(" and ".join(run["label"] for run in runs)),
        "CSS": (static / "timeline.css").read_text(encoding="utf-8"),
        "META": json.dumps(meta, separators=(",", ":")).replace("<", "\\u003c"),
        "DATA": columns.pack(),
        "JS": "\n".join((static / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    return re.sub(r"@([A-Z]+)@", lambda part: parts[part[1]], page)


def encode_run(trace: Trace, prefix: str, columns: Columns, with_blocks: bool = True) -> dict[str, Any]:
    """One run's columns, their names starting with `prefix`, and the rest of what the page must know of it."""
    if not trace.records:
        raise ValueError(f"{trace.name or 'the trace'} has no step; record a run that has one.")
    stage = trace.stage
    look = look_of(stage)
    reasons = _encode_lanes(trace, prefix, columns)
    _encode_steps(trace, prefix, columns)
    complaint = _encode_blocks(trace, prefix, columns, with_blocks)
    return {
        "prefix": prefix,
        "label": stage or trace.name or "run",
        "name": trace.name,
        "colour": look.colour,
        "line": look.line if isinstance(look.line, str) else "--",
        "config": {name: trace.header.config.get(name) for name in SHOWN_CONFIG},
        "device": trace.header.device,
        "num_blocks": trace.num_blocks if trace.num_blocks <= MAX_POOL_BLOCKS else 0,  # 0: no map can be drawn
        "block_size": trace.block_size,
        "budget": max(record.budget for record in trace.records),
        "ids": [lane.id for lane in trace.lanes],
        "ends": [lane.finish_reason or "" for lane in trace.lanes],
        "reasons": reasons,
        "damage": trace.damage,
        "errors": {str(i): last_line(r.error) for i, r in enumerate(trace.records) if r.error},
        "complaint": complaint,
    }


def _encode_steps(trace: Trace, prefix: str, columns: Columns) -> None:
    """Times in seconds since the first arrival. A step is drawn from when the device was free for it."""
    records, start_s = trace.records, trace.start_s
    ends = [record.end_s for record in records]
    prefill = [0] * len(records)
    for lane in trace.lanes:
        for run in lane.runs:
            if run.activity == Activity.PREFILL:
                for place in range(run.first, run.first + run.num_steps):
                    prefill[place] += run.num_tokens
    spreads = trace.itl()
    drawn = [max(r.start_s, before) for r, before in zip(records, [records[0].start_s, *ends], strict=False)]
    add = columns.add
    add(prefix + "x0", "d", [x - start_s for x in drawn])
    add(prefix + "x1", "d", [end - start_s for end in ends])
    add(prefix + "start", "d", [r.start_s - start_s for r in records])
    add(prefix + "step", "i", [r.step for r in records])
    add(prefix + "tokens", "i", [sum(r.num_scheduled_tokens.values()) for r in records])
    add(prefix + "prefill", "i", prefill)
    add(prefix + "rows", "i", [len(r.num_scheduled_tokens) for r in records])
    add(prefix + "running", "i", [r.num_running for r in records])
    add(prefix + "waiting", "i", [r.num_waiting for r in records])
    add(prefix + "preempted", "i", [len(r.preempted) for r in records])
    add(prefix + "padding", "i", [r.num_padding_tokens for r in records])
    add(prefix + "host", "f", [r.host_s for r in records])
    add(prefix + "itl_p50", "f", [spread.p50 if spread else 0.0 for spread in spreads])
    add(prefix + "itl_max", "f", [spread.max if spread else 0.0 for spread in spreads])


def _encode_lanes(trace: Trace, prefix: str, columns: Columns) -> list[str]:
    """Returns the reasons that runs refer to."""
    lanes = trace.lanes
    reasons: dict[str, int] = {}
    rows = []
    for lane in lanes:
        for run in lane.runs:
            place = NO_REASON if run.reason is None else reasons.setdefault(in_words(run.reason), len(reasons))
            rows.append((run.first, run.num_steps, ACTIVITIES.index(run.activity), run.num_tokens, place))
    add, start_s = columns.add, trace.start_s
    add(prefix + "arrival", "d", [max(lane.arrival_s - start_s, 0.0) for lane in lanes])
    add(prefix + "prompt", "i", [lane.num_prompt_tokens for lane in lanes])
    add(prefix + "outputs", "i", [len(lane.token_s) for lane in lanes])
    add(prefix + "hits", "i", [lane.num_hit_tokens or 0 for lane in lanes])
    add(prefix + "ttft", "f", [-1.0 if lane.ttft_s is None else lane.ttft_s for lane in lanes])
    add(prefix + "lane_runs", "i", _offsets([len(lane.runs) for lane in lanes]))
    for i, name in enumerate(("run_first", "run_steps", "run_activity", "run_tokens", "run_reason")):
        add(prefix + name, "i", [row[i] for row in rows])
    return list(reasons)


def _encode_blocks(trace: Trace, prefix: str, columns: Columns, with_blocks: bool) -> str:
    """What each step changed in tables, queue and hashes. Returns why the queue is not known, or not to the end."""
    history = BlockHistory(trace)
    tables: list[TableChange] = []
    operations: list[int] = []
    num_tables, num_operations, num_with_queue = [], [], 0
    for change in history.changes() if with_blocks else ():
        tables += change.tables
        num_tables.append(len(change.tables))
        coded = [number for entry in change.journal or () for number in _operation(entry)]
        operations += coded
        num_operations.append(len(coded))
        num_with_queue += change.journal is not None
    add, shared = columns.add, history.prefixes.shared
    add(prefix + "step_tables", "i", _offsets(num_tables))
    add(prefix + "table_lane", "i", [change.lane for change in tables])
    add(prefix + "table_place", "i", [change.place for change in tables])
    add(prefix + "table_offsets", "i", _offsets([len(change.block_ids) for change in tables]))
    add(prefix + "table_blocks", "i", [block_id for change in tables for block_id in change.block_ids])
    add(prefix + "step_ops", "i", _offsets(num_operations))
    add(prefix + "ops", "i", operations)
    add(prefix + "queue_steps", "i", [num_with_queue])
    add(prefix + "group", "i", [shared.get(i, (0, 0))[0] for i in range(len(trace.lanes))])
    add(prefix + "depth", "i", [shared.get(i, (0, 0))[1] for i in range(len(trace.lanes))])
    add(prefix + "group_requests", "i", history.prefixes.num_requests)
    return history.complaint if with_blocks else "the block map was left out (--no-blocks)"


def _operation(entry: Entry) -> tuple[int, ...]:
    """Block and kind in one number; EVICTABLE brings its age."""
    code = entry.block_id * 8 + entry.kind
    return (code, *entry[2:]) if entry.kind == EVICTABLE else (code,)


def _offsets(lengths: Sequence[int]) -> list[int]:
    """Where each of some rows begins in a column of all of them, and where the last one ends."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets
