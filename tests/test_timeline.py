"""Laws of the timeline's file: what the page reads back is the run, and it is one file that asks nobody anything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from engines import engine_request, make_core
from hypothesis import HealthCheck, given, settings
from recordings import record, scripts

from nanoserve.api import cli
from nanoserve.blocks import PrivateBlocks, SharedBlocks
from nanoserve.config import STAGES
from nanoserve.lab.block_history import APPEND, CACHED, EVICTABLE, PREPEND, UNCACHED, BlockHistory, WatchedPool
from nanoserve.lab.charts import ACTIVITY_COLOURS, look_of
from nanoserve.lab.columns import Columns, unpack
from nanoserve.lab.perfetto import perfetto
from nanoserve.lab.reasons import in_words
from nanoserve.lab.timeline import ACTIVITIES, COLOURS, encode_run, timeline_html
from nanoserve.lab.trace import Trace
from nanoserve.record import ListRecorder, TraceHeader, describe_config
from nanoserve.scheduler import PhaseSplitScheduler, UnifiedScheduler

relaxed = settings(suppress_health_check=[HealthCheck.too_slow])


def encoded(trace: Trace) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """What the page knows of a run, and its columns as the page reads them."""
    info = encode_run(trace, "0.", columns := Columns())
    return info, {name[2:]: column for name, column in unpack(columns.pack(), columns.directory).items()}


def make_trace(**fields: Any) -> Trace:
    """Waits, hits, preemptions."""
    given = {
        "scheduler": UnifiedScheduler, "blocks": SharedBlocks, "num_blocks": 9, "block_size": 4, "max_num_seqs": 3,
        "max_model_len": "auto", "max_num_batched_tokens": 16,
    }  # fmt: skip
    core = make_core(recorder := ListRecorder(), **given | fields)
    for i in range(6):
        core.add(engine_request(f"r{i}", [*range(8), i], max_tokens=9 + i))
    while core.has_work:
        core.step()
    return Trace(recorder.header, recorder.records, "run.jsonl")


class Player:
    """Plays the columns of a run as the page does: one step of tables and of the free queue after another."""

    def __init__(self, info: dict[str, Any], columns: dict[str, list[Any]]) -> None:
        self.columns = columns
        self.queue = list(range(1, info["num_blocks"]))
        self.evictable: dict[int, tuple[int, int]] = {}
        self.cached: set[int] = set()
        self.tables: dict[int, list[int]] = {}

    def steps(self) -> Iterator[int]:
        c = self.columns
        for place in range(c["queue_steps"][0]):
            for i in range(c["step_tables"][place], c["step_tables"][place + 1]):
                self._table(i)
            ops = iter(c["ops"][c["step_ops"][place] : c["step_ops"][place + 1]])
            for op in ops:
                self._op(op % 8, op // 8, ops)
            yield place

    def _table(self, i: int) -> None:
        c = self.columns
        lane, place = c["table_lane"][i], c["table_place"][i]
        blocks = c["table_blocks"][c["table_offsets"][i] : c["table_offsets"][i + 1]]
        table = self.tables.setdefault(lane, [])
        table[place : place + len(blocks)] = blocks
        if not blocks:
            del self.tables[lane]

    def _op(self, kind: int, block_id: int, rest: Iterator[int]) -> None:
        if kind in (CACHED, UNCACHED):
            (self.cached.add if kind == CACHED else self.cached.discard)(block_id)
            return
        if block_id in self.queue:
            self.queue.remove(block_id)
        self.evictable.pop(block_id, None)
        if kind == APPEND:
            self.queue.append(block_id)
        elif kind == PREPEND:
            self.queue.insert(0, block_id)
        elif kind == EVICTABLE:
            self.evictable[block_id] = (next(rest), -next(rest))

    @property
    def free(self) -> list[int]:
        return self.queue + sorted(self.evictable, key=lambda i: (*self.evictable[i], i))


def check_blocks(trace: Trace) -> None:
    info, columns = encoded(trace)
    history = BlockHistory(trace)
    changes = history.changes()
    player = Player(info, columns)
    for place in player.steps():
        next(changes)
        own = history._map(trace.records[place].step, True)
        assert player.free == own.free
        assert player.cached == own.cached
        held = [block_id for table in player.tables.values() for block_id in table]
        assert {i: held.count(i) for i in held} == own.refs
    assert columns["queue_steps"] == [len(trace.records)]


@settings(relaxed, max_examples=60)
@given(scripts())
def test_every_block_map_comes_out_of_the_columns(script):
    if (trace := record(script)).records:
        check_blocks(trace)


@settings(relaxed, max_examples=60)
@given(scripts())
def test_every_lane_comes_out_of_the_columns(script):
    trace = record(script)
    if not trace.records:
        return
    info, c = encoded(trace)
    for number, lane in enumerate(trace.lanes):
        first, end = c["lane_runs"][number], c["lane_runs"][number + 1]
        read = [
            (
                c["run_first"][i],
                c["run_steps"][i],
                ACTIVITIES[c["run_activity"][i]],
                c["run_tokens"][i],
                info["reasons"][c["run_reason"][i]] if c["run_reason"][i] >= 0 else None,
            )
            for i in range(first, end)
        ]
        assert read == [(*run[:4], run.reason and in_words(run.reason)) for run in lane.runs]
        assert (c["prompt"][number], c["outputs"][number]) == (lane.num_prompt_tokens, len(lane.token_s))
    assert info["ids"] == [lane.id for lane in trace.lanes]


def test_every_step_comes_out_of_the_columns():
    trace = make_trace(async_scheduling=True)
    _, c = encoded(trace)
    assert c["step"] == [one.step for one in trace.records]
    assert c["tokens"] == [sum(one.num_scheduled_tokens.values()) for one in trace.records]
    assert c["preempted"] == [len(one.preempted) for one in trace.records]
    assert all(a <= b for a, b in zip(c["x0"], c["x1"], strict=True))
    assert c["x0"][1:] == [max(start, end) for start, end in zip(c["start"][1:], c["x1"], strict=False)]
    decodes = [sum(n == 1 for n in one.num_scheduled_tokens.values()) for one in trace.records]
    assert all(p <= t and t - p <= d for p, t, d in zip(c["prefill"], c["tokens"], decodes, strict=True))


@pytest.mark.parametrize("kind", ["i", "f", "d"])
def test_columns_of_every_type_and_length_come_back(kind):
    columns = Columns()
    given = {f"c{n}": [float(i) for i in range(n)] for n in (0, 1, 2, 3, 17)}
    for name, values in given.items():
        columns.add(name, kind, values)
    assert unpack(columns.pack(), columns.directory) == given
    assert all(offset % 8 == 0 for _, _, offset, _ in columns.directory)


def test_a_queue_that_forgets_a_change_is_seen(monkeypatch):
    def forgets(self: WatchedPool, block: Any, plain: Callable[..., None] = WatchedPool.__mro__[1].prepend) -> None:
        plain(self, block)

    trace = make_trace()
    check_blocks(trace)
    monkeypatch.setattr(WatchedPool, "prepend", forgets)
    with pytest.raises(AssertionError):
        check_blocks(trace)


# The page


def test_the_page_asks_nobody_for_anything():
    page = timeline_html([make_trace()])
    assert re.findall(r"(?:src|href)=|https?:|@import|url\(|fetch\(|XMLHttp|import\(", page) == []
    assert page.count("<script") == 3
    assert not re.search(r"@(TITLE|CSS|META|DATA|JS)@", page)


def test_what_a_trace_says_cannot_break_the_page():
    trace = make_trace()
    evil = "</script><b>@DATA@"
    header = msgspec.structs.replace(trace.header, device=evil)
    page = timeline_html([Trace(header, trace.records, evil)])
    assert page.count("</script>") == 3
    assert page.count("<b>") == timeline_html([trace]).count("<b>")
    meta = json.loads(page.split('id="meta">')[1].split("</script>")[0])
    assert meta["runs"][0]["device"] == evil


def test_colours_are_those_of_every_chart():
    assert {str(activity): colour for activity, colour in ACTIVITY_COLOURS.items()}.items() <= COLOURS.items()
    trace = make_trace()
    v0 = describe_config(STAGES["v0"])
    info, _ = encoded(Trace(TraceHeader(config=trace.header.config | {k: v0[k] for k in v0}), trace.records))
    assert (info["label"], info["colour"]) == ("v0", look_of("v0").colour)


def grey(colour: str) -> float:
    """CIE lightness, 0 to 100."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def test_activities_differ_in_grey():
    """By at least ten steps of a hundred; they differ in height and strokes too."""
    light = sorted(grey(colour) for colour in COLOURS.values())
    assert all(b - a >= 10 for a, b in pairwise(light)), light


def test_two_runs_of_one_name_are_told_apart():
    one, two = make_trace(), make_trace(blocks=PrivateBlocks, scheduler=PhaseSplitScheduler, max_num_batched_tokens=64)
    two.name = "other.jsonl"
    meta = json.loads(timeline_html([one, two]).split('id="meta">')[1].split("</script>")[0])
    assert [info["label"] for info in meta["runs"]] == ["run.jsonl", "other.jsonl"]


def test_a_run_without_steps_is_refused():
    with pytest.raises(ValueError, match="has no step"):
        timeline_html([Trace(TraceHeader(), [], "empty.jsonl")])


# Chrome's format


def test_every_request_and_step_is_in_the_chrome_trace():
    trace = make_trace()
    events = json.loads(json.dumps(perfetto([trace, trace])))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(set(names.values())) == ["r0", "r1", "r2", "r3", "r4", "r5", "steps"]
    steps = [event["name"] for event in spans if event["tid"] == 0]
    assert steps == [f"step {one.step}" for one in trace.records]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    waits = [event["args"]["why"] for event in spans if event["name"] == "waiting"]
    assert waits
    assert all(" " in why for why in waits)
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"tokens", "KV blocks in use", "running", "waiting"}


# The command


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.jsonl"
    trace = make_trace()
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in (trace.header, *trace.records)))
    return path


def test_the_command_writes_what_it_says(file, capsys):
    assert cli.main(["trace", str(file)]) == 0
    assert file.with_suffix(".html").stat().st_size > 10_000
    assert f"written: {file.with_suffix('.html')}" in capsys.readouterr().out
    out, chrome = file.parent / "x.html", file.parent / "x.json"
    assert cli.main(["trace", str(file), str(file), "--out", str(out), "--perfetto", str(chrome), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["written"] == [str(out), str(chrome)]
    assert [one["requests"] for one in said["runs"]] == [6, 6]
    assert json.loads(chrome.read_text())["traceEvents"]
    assert cli.main(["trace", str(file), "--no-blocks", "--out", str(out)]) == 0
    assert "the block map was left out" in out.read_text()


def test_what_is_whole_of_a_damaged_file_is_shown(file, capsys):
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:5]) + b'{"step"')
    assert cli.main(["trace", str(file)]) == 0
    captured = capsys.readouterr()
    assert "6 requests, 4 steps" in captured.out
    assert "line 6: not a step record" in captured.err
    assert captured.err.count("\n") == 1


def test_bad_input_is_one_line(file, capsys):
    for words, complaint in (
        ([str(file)] * 3, "at most 2 runs"),
        ([str(file), "--out", str(file)], "would be overwritten"),
        ([str(file.parent / "absent")], "No such file"),
    ):
        assert cli.main(["trace", *words]) == 2
        err = capsys.readouterr().err
        assert complaint in err
        assert err.count("\n") == 1
