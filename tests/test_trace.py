"""Laws of traces: every view agrees with what the engine said of itself, and with the figures of `metrics`; a damaged
file tells where, and shows whatever was whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engines import engine_request, make_core
from fakes_records import arrival
from hypothesis import HealthCheck, given, settings
from recordings import play, record, scripts

from nanoserve.api import cli
from nanoserve.blocks import PrivateBlocks, SharedBlocks
from nanoserve.core import EngineCore
from nanoserve.lab import trace_check
from nanoserve.lab.block_history import BlockHistory, BlockMap, Prefixes, Tables
from nanoserve.lab.metrics import request_times, spans
from nanoserve.lab.reasons import SENTENCES, in_words
from nanoserve.lab.trace import SWAPPED, Lane, Run, Trace, moments
from nanoserve.record import (
    TRACE_VERSION,
    JsonlRecorder,
    ListRecorder,
    StepRecord,
    TraceError,
    TraceHeader,
    read_trace,
)
from nanoserve.request import Reason
from nanoserve.scheduler import PhaseSplitScheduler, UnifiedScheduler

relaxed = settings(suppress_health_check=[HealthCheck.too_slow])
TIGHT = {"num_blocks": 7, "block_size": 4, "max_model_len": "auto", "max_num_seqs": 3, "max_num_batched_tokens": 16}


def run(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def tight_trace(**fields: Any) -> Trace:
    recorder = ListRecorder()
    core = make_core(recorder, **{"scheduler": UnifiedScheduler, "blocks": SharedBlocks} | TIGHT | fields)
    for i in range(6):
        core.add(engine_request(f"r{i}", [*range(8), i], max_tokens=9))
    run(core)
    return Trace(recorder.header, recorder.records, "tight.jsonl")


# Views


@settings(relaxed, max_examples=100)
@given(scripts())
def test_every_block_map_is_the_engines_own(script):
    """Tables, reference counts, hashes and the order of the free queue, at every step."""
    maps: dict[int, dict[str, Any]] = {}
    recorder = ListRecorder()
    play(script, recorder, watch=lambda core: maps.update({core.num_steps: core.block_map()}))
    trace = Trace(recorder.header, recorder.records)
    history = BlockHistory(trace)
    for change in history.changes():
        step = trace.records[change.place].step
        check_map(history._map(step, change.journal is not None), maps[step])
    assert not history.complaint


def check_map(found: BlockMap, own: dict[str, Any]) -> None:
    assert found.refs == {block_id: tables for block_id, tables, _ in own["used"]}
    assert found.cached == {i for i, _, start in own["used"] if start} | {i for i, _ in own["cached"]}
    holders: dict[int, list[str]] = {}
    for request_id, table in own["tables"].items():
        for block_id in table:
            holders.setdefault(block_id, []).append(request_id)
    assert {i: sorted(ids) for i, ids in found.holders.items()} == {i: sorted(ids) for i, ids in holders.items()}
    assert found.free is not None
    queue = [first + i for first, count in own["free"] for i in range(count)]
    assert found.free[: len(queue)] == queue  # v0's cache has more behind it
    assert len(found.free) == own["num_free_blocks"]


def test_a_block_map_is_of_the_step_that_was_asked_for():
    trace = tight_trace()
    found = BlockHistory(trace).at(2)
    assert sum(found.refs.values()) == sum(len(ids) for ids in found.holders.values())
    assert found.step == 2
    with pytest.raises(ValueError, match="step 999 is not in the trace; it has steps 1 to"):
        BlockHistory(trace).at(999)


def test_a_map_without_a_replay_still_knows_who_holds_what():
    trace = tight_trace()
    header = msgspec.structs.replace(trace.header, config=trace.header.config | {"scheduler": "Mine"})
    history = BlockHistory(other := Trace(header, trace.records))
    assert (found := history.at(3)).free is None
    assert "'Mine' is none of" in history.complaint
    assert found.refs == BlockHistory(trace).at(3).refs
    assert other.records == trace.records


def test_after_a_difference_the_queue_is_unknown():
    trace = tight_trace()
    trace.records[4] = msgspec.structs.replace(trace.records[4], num_free_blocks=99)
    assert BlockHistory(trace).at(5).free is not None
    history = BlockHistory(trace)
    assert history.at(6).free is None
    assert "step 5 ends otherwise" in history.complaint


@settings(relaxed, max_examples=60)
@given(scripts(preemption_mode="recompute", num_swap_blocks=0))
def test_every_lane_agrees_with_the_spans_of_metrics(script):
    trace = record(script)
    seen = {
        (lane.id, trace.records[place].step): (run.activity, run.num_tokens)
        for lane in trace.lanes
        for run in lane.runs
        for place in range(run.first, run.first + run.num_steps)
    }
    told = {
        (span.request_id, span.step): (str(span.activity), span.num_tokens)
        for span in spans(trace.records)
        if span.num_tokens or span.request_id in trace.records[span.step - 1].left_out
    }
    late = {key: value for key, value in seen.items() if key not in told}
    assert {key: seen[key] for key in told if key in seen} == told
    assert all(tokens == 1 for _, tokens in late.values())  # one step ahead: computed for nothing after its end
    for lane in trace.lanes:
        times = request_times(trace.records)[lane.id]
        assert (lane.token_s, lane.finish_reason, lane.ttft_s) == (times.token_s, times.finish_reason, times.ttft_s)


def test_a_lane_is_runs_of_equal_steps_with_their_reasons():
    behind = Reason("fcfs_behind", behind="a")
    records = [
        StepRecord(
            step=1, start_s=0, launched_s=0, end_s=1, arrivals=[arrival("a", 6), arrival("b", 8)],
            num_scheduled_tokens={"a": 4}, hit_tokens={"a": 0}, left_out={"b": behind}, budget=8,
        ),
        StepRecord(
            step=2, start_s=1, launched_s=1, end_s=2, num_scheduled_tokens={"a": 2}, left_out={"b": behind}, budget=8,
            sampled={"a": [1]},
        ),
        StepRecord(
            step=3, start_s=2, launched_s=2, end_s=4, num_scheduled_tokens={"a": 1}, left_out={"b": behind}, budget=8,
            sampled={"a": [1]}, finished={"a": "length"},
        ),
    ]  # fmt: skip
    trace = Trace(TraceHeader(), records)
    a, b = trace.lanes
    assert a.runs == [Run(0, 1, "prefill", 4), Run(1, 1, "prefill", 2), Run(2, 1, "decode", 1)]
    assert b.runs == [Run(0, 3, "waiting", 0, behind)]
    assert trace.budget_fill() == [0.5, 0.25, 0.125]
    assert [spread and spread.max for spread in trace.itl()] == [None, None, 2.0]
    assert in_words(behind) == "first come, first served: it waits behind a"


def test_a_swapped_request_is_told_from_a_preempted_one():
    fields = {"scheduler": PhaseSplitScheduler, "watermark": 0.0, "max_num_batched_tokens": 64}
    swapping = tight_trace(**fields, blocks=PrivateBlocks, preemption_mode="swap", num_swap_blocks=20)
    assert SWAPPED in {run.activity for lane in swapping.lanes for run in lane.runs}
    dropping = tight_trace(**fields)
    assert "preempted" in {run.activity for lane in dropping.lanes for run in lane.runs}


def test_one_step_ahead_a_step_is_decided_before_the_one_before_it_is_taken():
    trace = tight_trace(async_scheduling=True)
    order = [(m.record.step, m.is_decision) for m in moments(trace.records)]
    assert order[:5] == [(1, True), (2, True), (1, False), (3, True), (2, False)]
    in_step = [(m.record.step, m.is_decision) for m in moments(tight_trace().records)]
    assert in_step[:4] == [(1, True), (1, False), (2, True), (2, False)]


def test_prefixes_are_told_by_content():
    def lane(request_id: str, *tokens: int, **fields: Any) -> Lane:
        return Lane(request_id, 0.0, engine_request(request_id, list(tokens), **fields))

    lanes = [lane("a", 1, 2, 3, 4, 5), lane("b", 1, 2, 3, 4, 6, 7), lane("c", 1, 2, 9, 9), lane("d", 8, 8, 8)]
    prefixes = Prefixes.of([*lanes, lane("e", 1, 2, 3, 4, cache_salt="s")], 2)
    assert prefixes.shared == {0: (1, 2), 1: (1, 2), 2: (1, 1)}
    assert prefixes.num_requests == [3]
    assert [prefixes.content(1, i) for i in range(3)] == [3, 3, 2]
    assert prefixes.content(3, 0) == 0


def test_a_crash_dump_without_its_beginning_still_has_lanes(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    core = make_core()
    core.add(engine_request("a", list(range(40)), max_tokens=50))
    run(core)
    trace = Trace.load(core.dump_crash(RuntimeError("late")))
    (lane,) = trace.lanes
    assert lane.request is None
    assert lane.runs == [Run(0, 32, "decode", 1)]
    history = BlockHistory(trace)
    assert history.at(20).free is None
    assert "begins with step 19" in history.complaint


def test_every_reason_has_its_words():
    core = ["budget", "seq_cap", "blocks", "watermark", "fcfs_behind", "preemption_this_step"]
    codes = [*core, "paused", "nothing_to_compute"]
    assert sorted(SENTENCES) == sorted(codes)
    assert in_words(Reason("blocks", need=3, free=1)) == "it needs 3 free KV blocks, and 1 are free"
    assert in_words(Reason("other")) == "other"


# The file


def write(trace: Trace, path: Path) -> list[bytes]:
    lines = [msgspec.json.encode(one) + b"\n" for one in (trace.header, *trace.records)]
    path.write_bytes(b"".join(lines))
    return lines


def test_every_record_comes_back_from_its_line(tmp_path):
    trace = tight_trace(async_scheduling=True)
    write(trace, path := tmp_path / "trace.jsonl")
    assert read_trace(path) == (trace.header, trace.records)
    loaded = Trace.load(path)
    assert (loaded.name, loaded.damage, loaded.records) == ("trace.jsonl", "", trace.records)


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_of_a_file_that_was_cut_short_whatever_was_whole_is_there(tmp_path, cut):
    trace = tight_trace()
    lines = write(trace, path := tmp_path / "trace.jsonl")
    path.write_bytes(b"".join(lines)[: -cut - 1])
    loaded = Trace.load(path)
    assert loaded.records == trace.records[: len(loaded.records)]
    assert f"line {len(loaded.records) + 2}: not a step record" in loaded.damage
    assert "\n" not in loaded.damage


def test_a_corrupt_line_in_the_middle_is_named(tmp_path):
    trace = tight_trace()
    lines = write(trace, path := tmp_path / "trace.jsonl")
    lines[3] = lines[3].replace(b'"step":3', b'"step":"x"')
    path.write_bytes(b"".join(lines))
    loaded = Trace.load(path)
    assert loaded.records == trace.records[:2]
    assert "line 4: not a step record (Expected `int`, got `str` - at `$.step`)" in loaded.damage


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty; a trace starts with a header line"),
        (b"hello\n", "line 1: not a trace header"),
        (b'{"version": 99}\n', f"has format version 99; this build reads {TRACE_VERSION}"),
        (b'{"version": %d}\n{"step": 1' % TRACE_VERSION, "line 2: not a step record"),
    ],
)
def test_a_file_of_which_nothing_is_whole_is_refused(tmp_path, content, complaint):
    (path := tmp_path / "trace.jsonl").write_bytes(content)
    with pytest.raises(TraceError, match=complaint):
        Trace.load(path)


TAMPERED = [
    ("step", 2**31),
    ("step", -1),
    ("budget", 10**40),
    ("num_scheduled_tokens", {"r0": 2**31}),
    ("num_scheduled_tokens", {"r0": 2**30, "r1": 2**30}),
    ("num_scheduled_tokens", {"r0": -1}),
    ("hit_tokens", {"r0": 2**63}),
    ("new_blocks", {"r0": [3, 2**31]}),
    ("replaced_blocks", {"r0": [[-1, 3]]}),
    ("evicted", [2**31]),
    ("copies", [[0, 2**31]]),
    ("num_padding_tokens", 10**400),
    ("num_free_blocks", 2**31),
    ("sampled", {"r0": [2**31]}),
    ("left_out", {"r5": {"code": "blocks", "need": 2**31}}),
    ("end_s", 1e300),
    ("host_s", -1e300),
    ("arrivals.prompt_token_ids", [2**31]),
    ("arrivals.prompt_token_ids", [5, -1]),
    ("arrivals.arrival_s", 1e300),
]


def tampered(path: Path, name: str, value: Any) -> Path:
    """A trace whose fourth line has the value in that field."""
    trace = tight_trace()
    records = [msgspec.to_builtins(record) for record in trace.records]
    target, _, inner = name.partition(".")
    if inner:
        records[2][target] = [records[0][target][0] | {"id": "late", inner: value}]
    else:
        records[2][target] = value
    lines = [json.dumps(one).encode() + b"\n" for one in (msgspec.to_builtins(trace.header), *records)]
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize(("name", "value"), TAMPERED)
def test_every_number_that_no_run_has_is_told_with_file_line_and_field(name, value, tmp_path, capsys):
    path = tampered(tmp_path / "trace.jsonl", name, value)
    loaded = Trace.load(path)
    assert [record.step for record in loaded.records] == [1, 2]
    assert f"{path}, line 4: {name} holds " in loaded.damage
    assert ", and must be " in loaded.damage
    assert "\n" not in loaded.damage
    for words, code in (["trace"], 0), (["replay"], 2), (["calibrate", "--out", str(tmp_path / "x")], 2):
        assert cli.main([words[0], str(path), *words[1:]]) == code
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert f"line 4: {name} holds " in err


@pytest.mark.parametrize(("name", "value"), [("step", 2**31), ("new_blocks", {"r0": [3, 2**31]})])
def test_a_number_that_is_not_checked_is_seen(name, value, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trace_check, "_faults", lambda record: iter(()))
    with pytest.raises(AssertionError):
        test_every_number_that_no_run_has_is_told_with_file_line_and_field(name, value, tmp_path, capsys)
    with pytest.raises(OverflowError):
        cli.main(["trace", str(tmp_path / "trace.jsonl")])


@settings(relaxed, max_examples=60)
@given(scripts())
def test_no_number_of_a_real_run_is_complained_of(script):
    assert [fault for one in record(script).records for fault in trace_check._faults(one)] == []


def test_a_number_of_a_config_without_end_is_refused(tmp_path):
    (path := tmp_path / "trace.jsonl").write_text(
        f'{{"version": {TRACE_VERSION}, "config": {{"seed": 1{"0" * 99}}}}}\n'
    )
    with pytest.raises(TraceError, match=r"line 1: config\.seed is an integer of more than 30 digits"):
        Trace.load(path)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("command", ["trace", "replay", "calibrate"])
def test_a_line_that_is_nested_without_end_is_one_line(command, place, tmp_path, capsys):
    lines = write(tight_trace(), path := tmp_path / "trace.jsonl")
    lines[place] = lines[place].rstrip()[:-1] + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    path.write_bytes(b"".join(lines))
    assert cli.main([command, str(path), *(["--out", str(tmp_path / "x")] if command != "replay" else [])]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"trace.jsonl, line {place + 1}: it is nested too deeply" in err


@pytest.mark.parametrize("name", ["new_blocks", "replaced_blocks", "preempted"])
def test_a_record_of_a_request_that_is_not_there_is_told_with_its_line(name, tmp_path, capsys):
    value = {"new_blocks": {"ghost": [3]}, "replaced_blocks": {"ghost": [[0, 3]]}, "preempted": ["r5"]}[name]
    records = tight_trace().records[:3]
    records[2] = msgspec.structs.replace(records[2], **{name: value})
    if name == "preempted":
        records[1] = msgspec.structs.replace(records[1], finished={"r5": "stop"}, left_out={})
        records[2].left_out.clear()
    write(Trace(tight_trace().header, records), path := tmp_path / "trace.jsonl")
    assert cli.main(["trace", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"trace.jsonl, line 4: {name} names '{'r5' if name == 'preempted' else 'ghost'}', which is no request" in err
    assert cli.main(["trace", str(path), "--no-blocks"]) == 0


def test_a_table_of_a_request_that_is_not_there_is_seen(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Tables, "_lane", lambda tables, name, request_id: tables._alive[request_id])
    with pytest.raises(KeyError):
        test_a_record_of_a_request_that_is_not_there_is_told_with_its_line("new_blocks", tmp_path, capsys)


@pytest.mark.parametrize("error", [" \n ", "\n", "one\ntwo\n"])
def test_every_error_in_a_record_has_a_last_line(error, tmp_path, capsys):
    trace = tight_trace()
    trace.records[-1] = msgspec.structs.replace(trace.records[-1], error=error)
    write(trace, path := tmp_path / "trace.jsonl")
    assert cli.main(["replay", str(path)]) == 0
    expected = "two" if "two" in error else "no reason was recorded"
    assert f"failed when it was recorded: {expected}\n" in capsys.readouterr().out
    assert cli.main(["trace", str(path)]) == 0
    assert f'"{expected}"' in path.with_suffix(".html").read_text(encoding="utf-8")


def test_recording_is_off_unless_it_is_asked_for(tmp_path):
    core = make_core(blocks=SharedBlocks)
    core.add(engine_request("a", list(range(40))))
    run(core)
    assert core.observer is None
    assert core.scheduler.blocks.take_events() == []
    recorder = JsonlRecorder(tmp_path / "trace.jsonl")
    core = make_core(recorder, blocks=SharedBlocks)
    core.add(engine_request("a", list(range(40))))
    run(core)
    core.close()
    assert len(read_trace(recorder.path)[1]) == core.num_steps


def test_every_field_is_documented():
    text = (Path(__file__).resolve().parents[1] / "docs" / "trace-format.md").read_text(encoding="utf-8")
    names = [field.name for kind in (TraceHeader, StepRecord) for field in msgspec.structs.fields(kind)]
    assert [name for name in names if f"`{name}`" not in text] == []
    assert f"version {TRACE_VERSION}" in text
