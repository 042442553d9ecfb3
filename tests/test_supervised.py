"""Laws of supervised programs: what a program prints and how it ends is told as it is, and nothing of it, neither what
it started nor its folder, outlives its caller or its time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from faulty import is_alive, wait_until

from nanoserve import supervised

# As bad as compilers get: deaf to what is asked politely, and with a child of its own.
STUBBORN = """#!/bin/sh
trap '' INT TERM HUP
sleep 1000 &
echo half > "$TMPDIR/half"
echo $$ $! > "$1.new" && mv "$1.new" "$1"
wait
sleep 1000
"""
CALLER = """
    import os, signal, sys
    from pathlib import Path
    from nanoserve import supervised
    leave = lambda *_: os._exit(3)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, wherever this test runs
    {before}
    supervised.run(sys.argv[1:3], timeout_s=100, folder=Path(sys.argv[3]))
"""
BEFORE = {
    signal.SIGINT: "",
    signal.SIGTERM: "",
    signal.SIGKILL: "",
    # as a child of an engine: Ctrl-C is not for it, and it leaves without looking back
    signal.SIGUSR1: "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGUSR1, leave)",
}


@pytest.fixture
def stubborn(tmp_path: Path) -> str:
    path = tmp_path / "stubborn"
    path.write_text(STUBBORN)
    path.chmod(0o755)
    return str(path)


def check_nothing_outlives(number: signal.Signals, stubborn: str, folder: Path, caller: str = CALLER) -> None:
    pid_file, scratch = folder / "pids", folder / "scratch"
    scratch.mkdir()
    code = textwrap.dedent(caller).format(before=BEFORE[number])
    command = [sys.executable, "-c", code, stubborn, str(pid_file), str(scratch)]
    ours = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    pids: list[int] = []
    try:
        wait_until(pid_file.exists, 30, "the program runs")
        pids = [int(word) for word in pid_file.read_text().split()]
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        assert (scratch / "half").exists()
        os.kill(ours.pid, number)
        ours.wait(20)
        wait_until(lambda: not any(map(is_alive, pids)), 5, "the program and what it started are gone")
        wait_until(lambda: not scratch.exists(), 5, "its folder is gone")
    finally:
        for pid in (ours.pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ours.wait(20)


@pytest.mark.parametrize("number", BEFORE, ids=lambda number: number.name)
def test_nothing_of_a_program_outlives_its_caller(number, stubborn, tmp_path):
    check_nothing_outlives(number, stubborn, tmp_path)


def test_a_planted_run_without_supervision_is_seen(stubborn, tmp_path):
    plain = CALLER.replace(
        "supervised.run(sys.argv[1:3], timeout_s=100, folder=Path(sys.argv[3]))",
        "import subprocess; subprocess.run(sys.argv[1:3], env=os.environ | {{'TMPDIR': sys.argv[3]}})",
    )
    with pytest.raises(AssertionError, match="what it started are gone"):
        check_nothing_outlives(signal.SIGTERM, stubborn, tmp_path, plain)


def test_nothing_of_a_program_outlives_its_time(stubborn, tmp_path):
    pid_file, scratch = tmp_path / "pids", tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(subprocess.TimeoutExpired):
        supervised.run([stubborn, str(pid_file)], timeout_s=3, folder=scratch)
    assert not any(is_alive(int(word)) for word in pid_file.read_text().split())
    assert not scratch.exists()


def test_what_a_program_leaves_running_ends_with_it(tmp_path):
    done = supervised.run(["sh", "-c", "sleep 1000 >&- 2>&- & echo $!"], timeout_s=20)
    wait_until(lambda: not is_alive(int(done.stdout)), 5, "what it left is gone")


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo out; echo err >&2; exit 3", (3, "out\n", "err\n")),
        ("exec false", (1, "", "")),
        ("printf 'caf\\351'", (0, "caf\N{REPLACEMENT CHARACTER}", "")),
        ("cat", (0, "", "")),  # there is nothing to read
    ],
)
def test_every_end_is_told_as_it_is(script, told, tmp_path):
    done = supervised.run(["sh", "-c", script], timeout_s=20, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == told
    assert tmp_path.exists(), "a folder is its caller's where the program has ended by itself"


def test_a_program_that_a_signal_ends_is_told_as_a_shell_does(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert supervised.run(["sh", "-c", "kill -9 $$"], timeout_s=20, folder=scratch).returncode == 128 + signal.SIGKILL
    assert not scratch.exists(), "whoever signals it may signal its caller too"


def test_a_program_that_cannot_run_says_why(tmp_path):
    (tmp_path / "empty").touch(mode=0o755)
    for name, why in (("missing", "No such file or directory"), ("empty", "Exec format error")):
        done = supervised.run([str(tmp_path / name)], timeout_s=20)
        assert (done.returncode, done.stderr.strip()) == (supervised.CANNOT_RUN, why)
