"""The table of faults, with real processes and real signals: nothing hangs, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from faulty import (
    CrashesAtStart,
    DiesAtStart,
    DiesInStep,
    InterruptsInStep,
    RaisesInStep,
    RefusesToStart,
    SlowRunner,
    StuckInStep,
    children_of,
    collect,
    config_of,
    is_alive,
    request,
    wait_until,
)

from nanoserve.blocks import SharedBlocks
from nanoserve.client import EngineDeadError, InProcessClient, SplitRunnerClient
from nanoserve.config import SEAMS
from nanoserve.lab.fakes import DigestRunner
from nanoserve.record import JsonlRecorder, StepRecord, read_trace

LAYOUTS = list(SEAMS["client"].values())
PROCESS_LAYOUTS = LAYOUTS[1:]
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_process_layout = pytest.mark.parametrize("layout", PROCESS_LAYOUTS)


@pytest.fixture(autouse=True)
def dumps_go_to(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def footprint(client) -> tuple[list[int], Path]:
    """Every process and folder of a client that is alive."""
    pids = [client._child.pid, *children_of(client._child.pid)]
    assert len(pids) == (2 if isinstance(client, SplitRunnerClient) else 1)
    return pids, Path(client._folder)


def check_gone(pids: list[int], folder: Path, timeout: float = 5.0) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), timeout, f"processes {pids} are gone")
    wait_until(lambda: not folder.exists(), timeout, f"{folder} is gone")


def start_serving(layout, runner=SlowRunner, **fields):
    client = layout(config_of(runner, **fields))
    for i in range(3):
        client.submit(request(f"r{i}", max_tokens=900))
    return client


def check_dead(client) -> None:
    """The death is sticky: every later call says so at once."""
    for call in (lambda: client.poll(0.1), lambda: client.submit(request("late")), lambda: client.call("anything")):
        start = time.monotonic()
        with pytest.raises(EngineDeadError):
            call()
        assert time.monotonic() - start < 1


def poll_to_death(client, timeout: float) -> EngineDeadError:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            client.poll(0.5)
        except EngineDeadError as error:
            return error
    raise AssertionError(f"the engine was still alive after {timeout} s")


@every_layout
def test_an_exception_in_a_step_ends_every_request_and_leaves_a_crash_dump(layout, dumps_go_to):
    client = layout(config_of(RaisesInStep))
    pids, folder = footprint(client) if layout is not InProcessClient else ([], dumps_go_to / "none")
    client.submit(request("a"))
    error = poll_to_death(client, 30)
    assert "cursed" in str(error)
    check_dead(client)
    client.close()
    check_gone(pids, folder)
    (dump,) = dumps_go_to.glob("nanoserve-crash-*.jsonl")
    header, records = read_trace(dump)
    assert header.config["scheduler"] == "UnifiedScheduler"
    assert [record.step for record in records] == [1, 2, 3]
    assert "cursed" in records[-1].error
    assert records[-1].num_scheduled_tokens == {"a": 1}
    assert all(isinstance(record, StepRecord) and not record.error for record in records[:-1])


@every_process_layout
def test_a_killed_core_is_noticed_within_a_second(layout):
    client = start_serving(layout)
    pids, folder = footprint(client)
    client.poll(5)
    os.kill(pids[0], signal.SIGKILL)
    start = time.monotonic()
    error = poll_to_death(client, 30)
    assert time.monotonic() - start < 2
    assert "SIGKILL" in str(error)
    check_dead(client)
    client.close()
    check_gone(pids, folder)


def test_a_killed_runner_ends_the_core():
    client = start_serving(SplitRunnerClient)
    pids, folder = footprint(client)
    client.poll(5)
    os.kill(pids[1], signal.SIGKILL)
    start = time.monotonic()
    error = poll_to_death(client, 30)
    assert time.monotonic() - start < 3
    assert "runner" in str(error)
    check_dead(client)
    client.close()
    check_gone(pids, folder)


@every_process_layout
@pytest.mark.parametrize("runner", [DiesInStep, InterruptsInStep])
def test_a_step_that_ends_its_process_is_noticed(layout, runner):
    client = start_serving(layout, runner)
    pids, folder = footprint(client)
    poll_to_death(client, 30)
    client.close()
    check_gone(pids, folder)


def test_a_stuck_runner_is_a_failure():
    client = start_serving(SplitRunnerClient, StuckInStep, client=SplitRunnerClient, execute_timeout_s=0.5)
    pids, folder = footprint(client)
    error = poll_to_death(client, 30)
    assert "execute_timeout_s=0.5" in str(error)
    client.close()
    check_gone(pids, folder)


def test_a_runner_that_is_late_is_told_in_a_line_with_the_fix(capfd, dumps_go_to):
    client = start_serving(SplitRunnerClient, StuckInStep, client=SplitRunnerClient, execute_timeout_s=0.5)
    error = poll_to_death(client, 30)
    client.close()
    assert re.search(r"execute_timeout_s=0\.5; give it more \(--execute-timeout\)", str(error))
    assert "\n" not in str(error)
    assert "Traceback" not in capfd.readouterr().err


@every_process_layout
def test_a_start_that_takes_too_long_is_told_in_a_line_with_the_fix(layout):
    with pytest.raises(OSError, match=r"not ready after start_timeout_s=0\.001; give it more \(--start-timeout\)"):
        layout(config_of(client=layout, start_timeout_s=0.001))


@every_layout
def test_a_record_that_cannot_be_written_is_told_in_a_line_that_names_it(layout):
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'$"):
        layout(config_of(), JsonlRecorder("/dev/full"))


class FullDisk(JsonlRecorder):
    """A disk that is full after the header."""

    def on_start(self, header):
        super().on_start(header)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, self._file.fileno())
        os.close(full)

    def __reduce__(self):
        return FullDisk, (self.path,)


@every_layout
@pytest.mark.parametrize("num_tokens", [3, 200])  # seen at the end, and under way
def test_a_disk_that_fills_up_ends_the_record_and_not_the_engine(layout, num_tokens, tmp_path, capfd, caplog):
    with layout(config_of(), FullDisk(tmp_path / "trace")) as client:
        client.submit(request("a", max_tokens=num_tokens))
        _, ends = collect(client, 1)
    assert ends == {"a": "length"}
    told = caplog.text + capfd.readouterr().err
    assert told.count(f"the record in {tmp_path / 'trace'} ends too early: No space left on device; make room") == 1
    assert "Traceback" not in told


def test_a_planted_recorder_that_raises_in_a_step_is_seen(tmp_path, capfd, caplog, monkeypatch, dumps_go_to):
    monkeypatch.setattr(JsonlRecorder, "_ended_by_error", contextlib.nullcontext)
    with pytest.raises((EngineDeadError, OSError)):
        test_a_disk_that_fills_up_ends_the_record_and_not_the_engine(InProcessClient, 200, tmp_path, capfd, caplog)


class StartsProgram(DigestRunner):
    """A library that starts a program, as torch does a compiler."""

    def __init__(self, config):
        super().__init__(config)
        subprocess.Popen(["sleep", "1000"])


class Forgets(StartsProgram):
    """In a process that ends as if it had started nothing."""

    def __init__(self, config):
        super().__init__(config)
        sys.modules["__main__"].__dict__["_end_descendants"] = lambda: None


def check_programs_end(layout, runner):
    client = layout(config_of(runner))
    folder, pids = Path(client._folder), [client._child.pid, *children_of(client._child.pid)]
    wait_until(lambda: any(map(is_program, pids)), 5, "the program runs")
    client.close()
    try:
        check_gone(pids, folder)
    finally:
        for pid in filter(is_program, pids):
            os.kill(pid, signal.SIGKILL)


def is_program(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    except OSError:
        return False


@every_process_layout
def test_what_a_library_has_started_ends_with_the_process(layout):
    check_programs_end(layout, StartsProgram)


def test_a_planted_process_that_forgets_what_was_started_is_seen():
    with pytest.raises(AssertionError, match="not within"):
        check_programs_end(SplitRunnerClient, Forgets)


def test_an_engine_that_dies_where_no_dump_can_be_written_says_of_what(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/dev/full")
    client = start_serving(InProcessClient, RaisesInStep)
    assert re.search("cursed.*its last steps could not be kept: Not a directory", str(poll_to_death(client, 30)))
    client.close()


@every_layout
@pytest.mark.parametrize(
    ("runner", "kind", "message"),
    [
        (RefusesToStart, ValueError, "model 'nowhere' is not there"),
        (CrashesAtStart, (RuntimeError, ZeroDivisionError), "a bug in start-up"),
        (DiesAtStart, RuntimeError, "SIGKILL"),
    ],
)
def test_a_child_that_cannot_start_says_why_at_once_and_leaves_nothing(layout, runner, kind, message, dumps_go_to):
    if runner is DiesAtStart and layout is InProcessClient:
        return  # that is the test itself
    start = time.monotonic()
    with pytest.raises(kind, match=message):
        layout(config_of(runner))
    assert time.monotonic() - start < 20  # a start, not a timeout
    assert not list(dumps_go_to.glob("nanoserve-*"))
    wait_until(lambda: not children_of(os.getpid()), 5, "no child is left")


@every_process_layout
def test_a_killed_front_end_takes_everything_with_it(layout, dumps_go_to):
    program = (
        "import sys, time\n"
        "from faulty import *\n"
        f"from nanoserve.client import {layout.__name__} as layout\n"
        "client = layout(config_of(SlowRunner))\n"
        "client.submit(request('a', max_tokens=900))\n"
        "client.poll(5)\n"
        "print(client._folder, client._child.pid, *children_of(client._child.pid), flush=True)\n"
        "time.sleep(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    front = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert front.stdout is not None
        folder, *pids = front.stdout.readline().split()
        assert len(pids) == (2 if layout is SplitRunnerClient else 1)
    finally:
        front.kill()
        front.wait()
    check_gone([int(pid) for pid in pids], Path(folder))


@every_process_layout
@pytest.mark.parametrize("how", ["exit", "exception"])
def test_a_front_end_that_forgets_to_close_leaves_nothing(layout, how, dumps_go_to):
    program = (
        "from faulty import *\n"
        f"from nanoserve.client import {layout.__name__} as layout\n"
        "client = layout(config_of(SlowRunner))\n"
        "print(client._folder, client._child.pid, *children_of(client._child.pid), flush=True)\n"
        + ("raise RuntimeError('front end')\n" if how == "exception" else "")
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=60, check=False
    )
    folder, *pids = done.stdout.split()
    check_gone([int(pid) for pid in pids], Path(folder))


@every_process_layout
def test_sigterm_aborts_what_runs_and_exits_cleanly(layout):
    client = start_serving(layout)
    pids, folder = footprint(client)
    client.poll(5)
    os.kill(pids[0], signal.SIGTERM)
    _, ends = collect(client, 3)
    assert set(ends.values()) == {"abort"}
    poll_to_death(client, 10)
    assert client._child.exit_code == 0
    client.close()
    check_gone(pids, folder)


@every_process_layout
def test_sigterm_drains_what_runs_and_refuses_the_rest(layout):
    client = layout(config_of(SlowRunner, shutdown_timeout_s=60.0))
    pids, folder = footprint(client)
    client.submit(request("a", max_tokens=50))
    client.poll(5)
    os.kill(pids[0], signal.SIGTERM)
    time.sleep(0.2)  # so that the signal comes first
    client.submit(request("late"))
    tokens, ends = collect(client, 2)
    assert ends == {"a": "length", "late": "abort"}
    assert tokens.get("late", []) == []
    poll_to_death(client, 10)
    assert client._child.exit_code == 0
    client.close()
    check_gone(pids, folder)


@every_process_layout
def test_a_drain_ends_at_its_timeout(layout):
    client = layout(config_of(SlowRunner, shutdown_timeout_s=0.5))
    pids, folder = footprint(client)
    client.submit(request("a", max_tokens=1000))
    client.poll(5)
    os.kill(pids[0], signal.SIGTERM)
    assert collect(client, 1)[1] == {"a": "abort"}
    poll_to_death(client, 10)
    client.close()
    check_gone(pids, folder)


NUM_ROUNDS = 50


def front_end(layout, folder: Path) -> tuple[subprocess.Popen[str], Path, list[int]]:
    """A front end in a process of its own, busy with requests; its folder and children."""
    program = (
        "from faulty import *\n"
        f"from nanoserve.client import {layout.__name__} as layout\n"
        "client = layout(config_of(SlowRunner))\n"
        "for i in range(3): client.submit(request(f'r{i}', max_tokens=900))\n"
        "client.poll(5)\n"
        "print(client._folder, client._child.pid, *children_of(client._child.pid), flush=True)\n"
        "while True: client.poll(1)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)}
    command = [sys.executable, "-c", program]
    front = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    assert front.stdout is not None
    name, *pids = front.stdout.readline().split()
    return front, Path(name), [int(pid) for pid in pids]


@pytest.mark.slow
@every_process_layout
@pytest.mark.parametrize("victim", ["core", "runner", "front end"])
def test_fifty_kills_leave_no_hang_and_no_leftover(layout, victim, dumps_go_to):
    if victim == "runner" and layout is not SplitRunnerClient:
        return  # it has none
    rng = random.Random(victim)
    for _ in range(NUM_ROUNDS):
        if victim == "front end":
            front, folder, pids = front_end(layout, dumps_go_to)
            time.sleep(rng.uniform(0, 0.1))
            front.kill()
            front.wait(5)
        else:
            client = start_serving(layout)
            pids, folder = footprint(client)
            client.poll(5)
            time.sleep(rng.uniform(0, 0.1))
            os.kill(pids[victim == "runner"], signal.SIGKILL)
            start = time.monotonic()
            poll_to_death(client, 30)
            assert time.monotonic() - start < 5
            client.close()
        check_gone(pids, folder)


# --- Ctrl-C while engine and caller share a process


def interrupt_at(line: int, seen: list[int]) -> Callable[..., Any]:
    """A trace function: SIGINT when that many lines of the engine, its client aside, have begun."""

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if f"{os.sep}nanoserve{os.sep}" not in name or name.endswith("client.py"):
            return trace if name.endswith("client.py") else None
        if event == "line":
            seen[0] += 1
            if seen[0] == line:
                signal.raise_signal(signal.SIGINT)
        return trace

    return trace


def run_interrupted(at_line: int) -> tuple[dict[str, list[int]], int, int]:
    """Tokens, how often it was interrupted, and how many lines there were."""
    config = config_of(max_model_len=96, max_num_seqs=4, num_blocks=12, max_num_batched_tokens=24, blocks=SharedBlocks)
    seen, tokens, live, interrupts = [0], {}, {"a", "b", "c"}, 0
    with InProcessClient(config) as client:
        for request_id in sorted(live):
            client.submit(request(request_id, 40, 30))
        sys.settrace(interrupt_at(at_line, seen))
        try:
            for _ in range(200):
                try:
                    for output in client.poll(0.01):
                        tokens.setdefault(output.id, []).extend(output.new_token_ids)
                        live -= {output.id} if output.finish_reason else set()
                except KeyboardInterrupt:
                    interrupts += 1
                if not live:
                    break
        finally:
            sys.settrace(None)
    return tokens, interrupts, seen[0]


def test_every_step_is_whole_at_whichever_line_an_interrupt_comes():
    expected, _, num_lines = run_interrupted(-1)
    rng = random.Random(0)
    for line in [1, num_lines, *(rng.randrange(1, num_lines) for _ in range(20))]:
        tokens, interrupts, _ = run_interrupted(line)
        assert (tokens, interrupts) == (expected, 1), f"line {line} of {num_lines}"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_planted_interrupt_within_a_step_is_seen(monkeypatch):
    monkeypatch.setattr("nanoserve.client.whole_despite_interrupts", contextlib.nullcontext)
    with pytest.raises((AssertionError, EngineDeadError)):
        test_every_step_is_whole_at_whichever_line_an_interrupt_comes()


def test_a_second_interrupt_does_not_wait_for_the_step():
    class InterruptedTwice(DigestRunner):
        launched = False

        def launch(self, plan):
            signal.raise_signal(signal.SIGINT)
            self.launched = True
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("it waited")

    with InProcessClient(config_of(InterruptedTwice)) as client:
        client.submit(request("a"))
        with pytest.raises(KeyboardInterrupt):
            client.poll()
        assert client.core.runner.launched
        with pytest.raises(EngineDeadError, match="torn"):
            client.poll()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_cache_is_emptied_whole_at_whichever_line_an_interrupt_comes():
    seen, line = [0], 0
    with InProcessClient(config_of(max_model_len=96, max_num_seqs=4, num_blocks=12, blocks=SharedBlocks)) as client:
        while seen[0] >= line:  # until the lines of a call are over
            seen, line = [0], line + 1
            client.submit(request("a", 40, 4))
            assert client.call("reset_prefix_cache")
            collect(client, 1)
            sys.settrace(interrupt_at(line, seen))
            with contextlib.suppress(KeyboardInterrupt):
                client.call("reset_prefix_cache")
            sys.settrace(None)
            blocks = client.core.scheduler.blocks
            assert not blocks._cached, f"line {line}"
            assert all(block.block_hash is None for block in blocks.pool.blocks), f"line {line}"
    assert line > 10


def test_an_engine_that_another_thread_polls_leaves_interrupts_alone():
    with InProcessClient(config_of()) as client, ThreadPoolExecutor(1) as pool:
        client.submit(request("a"))
        assert pool.submit(client.poll).result(30)
