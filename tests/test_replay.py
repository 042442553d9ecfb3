"""Laws of replay: a recorded run decides the same again, whatever happened in it, and a changed number is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engines import WatchedRunner, engine_request, make_core
from faulty import SlowRunner, collect, config_of, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordings import Script, record, scripts

from nanoserve.api import cli
from nanoserve.blocks import PrivateBlocks, SharedBlocks, V0CachedBlocks
from nanoserve.config import SEAMS
from nanoserve.core import EngineCore
from nanoserve.lab import replay as replaying
from nanoserve.lab.replay import MAX_LINES, Change, Difference, Replay
from nanoserve.lab.trace import Trace
from nanoserve.lab.user_class import seam_class
from nanoserve.record import Input, JsonlRecorder, ListRecorder, StepRecord
from nanoserve.scheduler import PhaseSplitScheduler, UnifiedScheduler

relaxed = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
TIGHT = {"num_blocks": 7, "block_size": 4, "max_model_len": "auto", "max_num_seqs": 3, "max_num_batched_tokens": 16}


def as_read(trace: Trace) -> Trace:
    """The trace as it comes back from a file."""
    lines = [msgspec.json.encode(one) for one in trace.records]
    return Trace(trace.header, [msgspec.json.decode(line, type=StepRecord) for line in lines])


def run(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def check_identical(script: Script) -> None:
    trace = as_read(record(script))
    replay = Replay(trace)
    assert replay.run() is None, str(replay.difference)
    assert replay.num_steps == len(trace.records)


@settings(relaxed, max_examples=100)
@given(scripts())
def test_every_recorded_run_is_decided_again_as_it_was(script):
    check_identical(script)


@pytest.mark.slow
@settings(relaxed, max_examples=1000)
@given(scripts())
def test_a_thousand_recorded_runs_are_decided_again_as_they_were(script):
    check_identical(script)


@settings(relaxed, max_examples=30)
@given(scripts(scheduler=PhaseSplitScheduler, blocks=PrivateBlocks, preemption_mode="swap", num_swap_blocks=6))
def test_every_run_that_swaps_is_decided_again_as_it_was(script):
    check_identical(script)


@pytest.mark.parametrize("ahead", [False, True], ids=["in_step", "ahead"])
@pytest.mark.parametrize("layout", SEAMS["client"].values())
def test_every_layout_is_decided_again_as_it_was(layout, ahead, tmp_path):
    path = tmp_path / "trace.jsonl"
    config = config_of(
        SlowRunner, blocks=SharedBlocks, async_scheduling=ahead, num_blocks=14, max_model_len=200, max_num_seqs=5,
        max_num_batched_tokens=64,
    )  # fmt: skip
    with layout(config, JsonlRecorder(path)) as client:
        requests = [request(f"r{i}", num_prompt=40 + 5 * (i % 3), max_tokens=30) for i in range(8)]
        for one in requests[:5]:
            client.submit(one)
        while not client.poll(5):
            pass
        client.abort(["r1", "r4"])
        assert client.call("reset_prefix_cache", True) in (True, False)
        for one in requests[5:]:
            client.submit(one)
        client.abort(["r6"])
        _, ends = collect(client, len(requests))
    assert list(ends.values()).count("abort") == 3
    trace = Trace.load(path)
    assert not trace.damage
    assert Replay(trace).run() is None
    assert sum(len(one.preempted) for one in trace.records) > 0
    assert any(one.ahead for one in trace.records) is ahead


def test_an_id_that_is_used_again_is_told_from_the_one_before():
    core = make_core(recorder := ListRecorder(), async_scheduling=True, scheduler=UnifiedScheduler, blocks=SharedBlocks)
    core.add(engine_request("a", list(range(40))))
    core.step(), core.step()
    core.abort(["a"])
    core.step()
    core.add(engine_request("a", list(range(60)), max_tokens=3))
    core.step()
    core.abort(["a"])
    core.step()
    core.add(engine_request("a", list(range(70)), max_tokens=3))
    run(core)
    trace = as_read(Trace(recorder.header, recorder.records))
    assert Replay(trace).run() is None
    assert [(len(lane.request.prompt_token_ids), lane.finish_reason) for lane in trace.lanes] == [
        (40, "abort"), (60, "abort"), (70, "length"),
    ]  # fmt: skip


# A file that says something else

DECIDED = ("num_scheduled_tokens", "new_blocks", "hit_tokens", "replaced_blocks", "copies", "evicted", "budget")
TAKEN = ("num_free_blocks", "num_used_blocks", "num_running", "num_waiting")


def numbers(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Where the numbers of some JSON are, as paths of keys."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for key, inner in items for found in numbers(inner, (*path, key))]
    return [path] if isinstance(value, int) else []


def tampered(trace: Trace, draw: st.DataObject) -> tuple[Trace, int, str]:
    """The same with one number of one decision changed; which step, which field."""
    place = draw.draw(st.integers(0, len(trace.records) - 1))
    line = msgspec.to_builtins(msgspec.structs.asdict(trace.records[place]))
    reasons = {key: {k: v for k, v in why.items() if k != "code"} for key, why in line["left_out"].items()}
    choices = [found for name in (*DECIDED, *TAKEN) for found in numbers(line[name], (name,))]
    choices += numbers(reasons, ("left_out",))
    *path, last = draw.draw(st.sampled_from(choices))
    inner = line
    for key in path:
        inner = inner[key]
    inner[last] += draw.draw(st.sampled_from([1, -1, 7]))
    records = list(trace.records)
    records[place] = msgspec.convert(line, StepRecord)
    return Trace(trace.header, records), trace.records[place].step, (*path, last)[0]


@settings(relaxed, max_examples=150)
@given(scripts(), st.data())
def test_every_changed_number_is_found_at_its_step(script, data):
    trace = record(script)
    if not trace.records:
        return
    changed, step, name = tampered(trace, data)
    difference = Replay(changed).run()
    assert difference is not None
    assert (difference.step, [change.field for change in difference.changes]) == (step, [name])


@pytest.fixture
def trace() -> Trace:
    """Hits, evictions, preemptions and an abort."""
    core = make_core(recorder := ListRecorder(), scheduler=UnifiedScheduler, blocks=SharedBlocks, **TIGHT)
    for i in range(6):
        core.add(engine_request(f"r{i}", [*range(8), i], max_tokens=9))
    core.runner.in_flight = lambda: core.abort(["r5"])
    run(core)
    return as_read(Trace(recorder.header, recorder.records))


def test_another_token_another_end_and_another_order_are_found(trace):
    def change(place: int, **fields: Any) -> Difference:
        records = list(trace.records)
        records[place] = msgspec.structs.replace(records[place], **fields)
        difference = Replay(Trace(trace.header, records)).run()
        assert difference is not None
        assert difference.step == records[place].step
        return difference

    first = trace.records[0]
    backwards = dict(reversed(first.num_scheduled_tokens.items()))
    assert [c.key for c in change(0, num_scheduled_tokens=backwards).changes] == ["order"]
    assert change(0, meanwhile=[]).changes[0].field in ("num_waiting", "finished")
    assert change(0, meanwhile=[Input("abort", "nobody")]).changes[0].field == "error"
    assert change(1, before=[Input("dance", "r1")]).changes[0].field == "error"
    last = len(trace.records) - 1
    (ended,) = trace.records[last].finished
    assert change(last, finished={}).changes == (Change("finished", ended, "nothing", "length"),)
    assert change(2, step=99).changes[0] == Change("step", "", "99", "3")


def test_a_line_that_is_missing_is_found(trace):
    records = [*trace.records[:4], *trace.records[5:]]
    difference = Replay(Trace(trace.header, records)).run()
    assert difference is not None
    assert difference.step in (5, 6)


def test_a_difference_says_step_field_and_both_values():
    one = Difference(7, "decided", (Change("left_out", "r3", "budget", "nothing"), Change("evicted", "", "[4]", "[]")))
    assert str(one).splitlines() == [
        "step 7 is decided otherwise:",
        "  left_out[r3]  recorded budget, replayed nothing",
        "  evicted       recorded [4], replayed []",
    ]
    long = Difference(7, "taken", tuple(Change("sampled", f"r{i}", "1", "2") for i in range(30)))
    assert str(long).splitlines()[0] == "step 7 ends otherwise:"
    assert str(long).splitlines()[-1] == f"  and {30 - MAX_LINES} more"


# Planted bugs die


@pytest.mark.parametrize("forgotten", ["meanwhile", "before", "ahead"])
def test_a_recorder_that_forgets_when_things_came_is_seen(forgotten):
    """Each of the fields is needed: some random run is not the same without it."""
    seen = []

    @settings(relaxed, max_examples=300, database=None, derandomize=True)
    @given(scripts())
    def law(script):
        full = record(script)
        records = [msgspec.structs.replace(one, **{forgotten: type(getattr(one, forgotten))()}) for one in full.records]
        if not seen and Replay(Trace(full.header, records)).run():
            seen.append(script)

    law()
    assert seen


def test_a_scheduler_with_a_bug_is_seen(trace):
    class Generous(UnifiedScheduler):
        """Takes its own victims back in the step that preempted them."""

        def _preempt(self, victim, draft):
            super()._preempt(victim, draft)
            draft.preempted.clear()

    replay = Replay(trace)
    replay.scheduler = Generous(replay.config, replay.blocks)
    difference = replay.run()
    assert difference is not None
    assert difference.step == next(one.step for one in trace.records if one.preempted)


# Crash dumps


class FailsWhenAwaited(WatchedRunner):
    def execute(self, plan):
        if plan.step == 5:
            raise RuntimeError("out of luck")
        return super().execute(plan)


class FailsAtLaunch(WatchedRunner):
    def launch(self, plan):
        if plan.step == 5:
            raise RuntimeError("out of luck")
        return super().launch(plan)


class Undecided(UnifiedScheduler):
    def schedule(self):
        if self._step == 4:
            raise RuntimeError("out of luck")
        return super().schedule()


def crash(core: EngineCore, num_requests: int = 4) -> Trace:
    for i in range(num_requests):
        core.add(engine_request(f"r{i}", [*range(8), i], max_tokens=9))
    core.abort(["r2"])
    with pytest.raises(RuntimeError) as error:
        run(core)
    path = core.dump_crash(error.value)
    core.close()
    return Trace.load(path)


@pytest.mark.parametrize("ahead", [False, True], ids=["in_step", "ahead"])
@pytest.mark.parametrize("runner", [FailsWhenAwaited, FailsAtLaunch])
def test_every_crash_dump_is_replayed_up_to_the_failing_step(runner, ahead, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seams = {"scheduler": UnifiedScheduler, "blocks": SharedBlocks, "async_scheduling": ahead}
    trace = crash(make_core(runner=runner, **seams, **TIGHT))
    replay = Replay(trace)
    assert replay.run() is None, str(replay.difference)
    failed = [one.step for one in trace.records if one.error]
    assert failed == [5]
    assert replay.num_steps >= 5
    records = [*trace.records[:4], msgspec.structs.replace(trace.records[4], budget=1), *trace.records[5:]]
    difference = Replay(Trace(trace.header, records)).run()
    assert difference is not None
    assert difference.step == 5


def test_a_scheduler_that_failed_must_fail_again(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    trace = crash(make_core(scheduler=Undecided, blocks=SharedBlocks, **TIGHT))
    (tmp_path / "mine.py").write_text(
        "from nanoserve.scheduler import UnifiedScheduler\n\n\nclass Undecided(UnifiedScheduler):\n"
        "    def schedule(self):\n        if self._step == 4:\n            raise RuntimeError\n"
        "        return super().schedule()\n"
    )
    assert Replay(trace, scheduler=f"{tmp_path}/mine.py:Undecided").run() is None
    difference = Replay(trace, scheduler="unified").run()
    assert difference is not None
    assert (difference.step, difference.changes[0].field) == (5, "error")


def test_a_dump_without_the_beginning_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class Late(WatchedRunner):
        def launch(self, plan):
            if plan.step == 60:
                raise RuntimeError("late")
            return super().launch(plan)

    core = make_core(runner=Late)
    core.add(engine_request("a", list(range(9)), max_tokens=100))
    with pytest.raises(RuntimeError) as error:
        run(core)
    with pytest.raises(ValueError, match=r"begins with step 29: .* --record"):
        Replay(Trace.load(core.dump_crash(error.value)))


# Classes and the command


def test_classes_of_ones_own_are_named_by_file(trace, tmp_path):
    class Mine(SharedBlocks):
        pass

    core = make_core(recorder := ListRecorder(), scheduler=UnifiedScheduler, blocks=Mine, **TIGHT)
    core.add(engine_request("a", list(range(9))))
    run(core)
    own = as_read(Trace(recorder.header, recorder.records))
    with pytest.raises(ValueError, match=r"'Mine' is none of PrivateBlocks.*--blocks FILE.py:Mine"):
        Replay(own)
    path = tmp_path / "mine.py"
    path.write_text("from nanoserve.blocks import SharedBlocks\n\n\nclass Mine(SharedBlocks):\n    pass\n")
    assert Replay(own, blocks=f"{path}:Mine").run() is None
    with pytest.raises(ValueError, match="no class 'Other'; it has SharedBlocks, Mine"):
        Replay(own, blocks=f"{path}:Other")
    with pytest.raises(ValueError, match="is no file"):
        Replay(own, blocks=f"{tmp_path}/absent.py:Mine")
    path.write_text("1 / 0\n")
    with pytest.raises(ValueError, match="cannot be loaded: ZeroDivisionError"):
        Replay(own, blocks=f"{path}:Mine")
    assert Replay(trace, blocks="v0_cached").config.blocks is V0CachedBlocks


EVIL = """
from pathlib import Path
from nanoserve.blocks import SharedBlocks
from nanoserve.scheduler import UnifiedScheduler

Path(__file__).with_name("was_run").touch()


class Mine(SharedBlocks):
    pass


class Other(UnifiedScheduler):
    pass
"""


def named_by_header(trace: Trace, tmp_path: Path, command: str, seam: str, name: str) -> None:
    """The command reads a trace whose header names a class in a file, and must not run it."""
    file = tmp_path / "evil.py"
    file.write_text(EVIL)
    header = msgspec.structs.replace(trace.header, config=trace.header.config | {seam: f"{file}:{name}"})
    path = write(Trace(header, trace.records), tmp_path / "trace.jsonl")
    code = cli.main([command, str(path)])
    assert not (tmp_path / "was_run").exists()
    assert code == (2 if command == "replay" else 0)


@pytest.mark.parametrize("command", ["replay", "trace"])
@pytest.mark.parametrize(("seam", "name"), [("scheduler", "Other"), ("blocks", "Mine")])
def test_no_header_makes_a_command_run_code(seam, name, command, trace, tmp_path, capsys):
    named_by_header(trace, tmp_path, command, seam, name)
    if command == "replay":
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert f"give a class of your own as --{seam} FILE.py:{name}" in err


@pytest.mark.parametrize("command", ["replay", "trace"])
def test_a_replay_that_runs_what_a_header_names_is_seen(command, trace, tmp_path, monkeypatch):
    monkeypatch.setattr(replaying, "known_class", seam_class)
    with pytest.raises(AssertionError):
        named_by_header(trace, tmp_path, command, "scheduler", "Other")


MINE = """
import sys
from nanoserve.blocks import SharedBlocks
from nanoserve.scheduler import UnifiedScheduler


class Untold(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Exits(UnifiedScheduler):
    def schedule(self):
        sys.exit(0)


class Mute(UnifiedScheduler):
    def schedule(self):
        raise Untold


class Nothing(UnifiedScheduler):
    def schedule(self):
        return None


class Unmade(UnifiedScheduler):
    def __init__(self, *args):
        sys.exit(0)


class Unmute(SharedBlocks):
    def __init__(self, *args, **kwargs):
        raise Untold


class Stray:
    pass
"""


@pytest.mark.parametrize(
    ("source", "words", "code", "message"),
    [
        ("import sys\nsys.exit(0)\n", "--scheduler {}:Exits", 2, "cannot be loaded: SystemExit: 0"),
        ("class E(BaseException): pass\nraise E\n", "--scheduler {}:Exits", 2, "cannot be loaded: E."),
        (MINE + "raise Untold\n", "--blocks {}:Mine", 2, "cannot be loaded: Untold."),
        (MINE, "--scheduler {}:Exits", 1, "recorded nothing, replayed SystemExit: 0"),
        (MINE, "--scheduler {}:Mute", 1, "recorded nothing, replayed Untold"),
        (MINE, "--scheduler {}:Nothing", 1, "AttributeError"),
        (MINE, "--scheduler {}:Unmade", 2, "SharedBlocks and Unmade cannot be made: SystemExit: 0"),
        (MINE, "--blocks {}:Unmute", 2, "cannot be made: Untold."),
        (MINE, "--scheduler {}:Stray", 2, "is no class for it; give one that derives from BaseScheduler."),
        (MINE, "--scheduler {}:SharedBlocks", 2, "derives from BaseScheduler; it fits --blocks"),
        (MINE, "--blocks {}:Exits", 2, "derives from PrivateBlocks, or has all that KVCacheManager asks for; it fits"),
    ],
)
def test_no_class_of_ones_own_ends_the_command_unsaid(source, words, code, message, trace, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(source)
    path = write(trace, tmp_path / "trace.jsonl")
    assert cli.main(["replay", str(path), *words.format(tmp_path / "mine.py").split()]) == code
    out, err = capsys.readouterr()
    assert message in (err if code == 2 else out)
    assert err.count("\n") == (code == 2)


def test_a_replay_that_an_exit_ends_is_seen(trace, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(replaying, "BaseException", Exception, raising=False)
    with pytest.raises(SystemExit):
        test_no_class_of_ones_own_ends_the_command_unsaid(MINE, "--scheduler {}:Exits", 1, "", trace, tmp_path, capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_model_len": "auto"}, "max_model_len='auto' is not of type int"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens='many' is not of type int"),
        ({"num_blocks": 2**39}, "num_blocks=549755813888 is more than a replay has memory for; at most 1048576"),
        ({"num_swap_blocks": 2**39}, "num_swap_blocks=549755813888 is more"),
        ({"num_blocks": "7"}, "num_blocks must be an integer"),
        ({"block_size": 0}, "block_size must be an integer >= 1"),
        ({"watermark": "low"}, "watermark must be in [0, 1)"),
        ({"reserve_full_prompt": "yes"}, "reserve_full_prompt='yes' is not of type bool"),
        ({"scheduler": "Fifo"}, "scheduler 'Fifo' is none of"),
        ({"blocks": 5}, "blocks '5' is none of"),
    ],
)
def test_every_header_that_no_engine_wrote_is_told_with_its_line(change, message, trace, tmp_path, capsys):
    header = msgspec.structs.replace(trace.header, config=trace.header.config | change)
    path = write(Trace(header, trace.records), tmp_path / "trace.jsonl")
    assert cli.main(["replay", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "trace.jsonl, line 1: its config cannot be had again: " in err
    assert message in err
    assert cli.main(["trace", str(path)]) == 0, "the records still tell who held what"


def test_a_header_that_is_not_checked_is_seen(trace, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(replaying, "_check_values", lambda values: None)
    with pytest.raises(AssertionError):
        test_every_header_that_no_engine_wrote_is_told_with_its_line(
            {"max_model_len": "auto"}, "is not of type int", trace, tmp_path, capsys
        )


def test_a_pool_may_have_as_many_blocks_as_the_limit(trace, monkeypatch):
    monkeypatch.setattr(replaying, "MAX_POOL_BLOCKS", 7)
    assert Replay(trace).run() is None
    monkeypatch.setattr(replaying, "MAX_POOL_BLOCKS", 6)
    with pytest.raises(ValueError, match="num_blocks=7 is more than a replay has memory for; at most 6"):
        Replay(trace)


def test_a_header_that_says_too_little_is_refused(trace):
    header = msgspec.structs.replace(trace.header, config={"scheduler": "UnifiedScheduler"})
    with pytest.raises(ValueError, match="does not say block_size, num_blocks"):
        Replay(Trace(header, trace.records))


def write(trace: Trace, path: Path) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in (trace.header, *trace.records)))
    return path


def test_the_command_says_identical_or_shows_the_first_difference(trace, tmp_path, capsys):
    path = write(trace, tmp_path / "trace.jsonl")
    assert cli.main(["replay", str(path)]) == 0
    num_steps = len(trace.records)
    assert capsys.readouterr().out == (
        f"{num_steps} steps decided again by UnifiedScheduler and SharedBlocks: all are identical.\n"
    )
    trace.records[3] = msgspec.structs.replace(trace.records[3], num_free_blocks=77)
    write(trace, path)
    assert cli.main(["replay", str(path)]) == 1
    out = capsys.readouterr().out
    assert "step 4 ends otherwise:\n  num_free_blocks  recorded 77, replayed" in out
    assert cli.main(["replay", str(path), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["identical"], verdict["difference"]["step"]) == (False, 4)
    assert cli.main(["replay", str(path), "--scheduler", "phase_split"]) in (1, 2)
    capsys.readouterr()
    assert cli.main(["replay", str(tmp_path / "absent")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_what_is_whole_of_a_damaged_file_is_replayed(trace, tmp_path, capsys):
    path = write(trace, tmp_path / "trace.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:6]) + lines[6][:20])
    assert cli.main(["replay", str(path)]) == 2, "nobody may take it for the whole run"
    captured = capsys.readouterr()
    assert captured.out.startswith("5 steps decided again")
    assert "The file is damaged: what came after them is not known." in captured.out
    assert "line 7: not a step record" in captured.err
    assert captured.err.count("\n") == 1
    assert cli.main(["replay", str(path), "--json"]) == 2
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["identical"], verdict["steps"]) == (True, 5)
    assert "line 7: not a step record" in verdict["damage"]
    assert cli.main(["replay", str(write(trace, path)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["damage"] == ""
    path.write_bytes(b"what is this\n")
    assert cli.main(["replay", str(path)]) == 2
    assert "line 1: not a trace header" in capsys.readouterr().err
