"""Laws of child processes beyond the table of faults (test_faults.py): one that is stuck ends with whoever has started
it, whether that was told to end or was killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faulty import is_alive, wait_until

from nanoserve.client import SplitRunnerClient
from nanoserve.runner_process import RunnerProcess

ENDS = ("close", "kill")
END_S = 10.0


def only_asks(config):
    """A core that sends SIGTERM to what it has started, and is content with that."""
    main = sys.modules["__main__"].__dict__
    send = main["_signal"]
    main["_signal"] = lambda pidfd, number: number == signal.SIGKILL or send(pidfd, number)
    return RunnerProcess(config)


class OnlyAsksClient(SplitRunnerClient):
    make_runner = only_asks


def check_stopped_runner_ends(end: str, client: str) -> None:
    """`client`: the name of its class here."""
    program = (
        "import sys\n"
        "from faulty import SlowRunner, children_of, config_of\n"
        "from test_process import OnlyAsksClient, SplitRunnerClient\n"
        f"client = {client}(config_of(SlowRunner))\n"
        "print(client._folder, client._child.pid, *children_of(client._child.pid), flush=True)\n"
        "sys.stdin.readline()\n"
        "client.close()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    front = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    pids: list[int] = []
    try:
        assert front.stdin is not None
        assert front.stdout is not None
        folder, *words = front.stdout.readline().split()
        pids = [int(word) for word in words]
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGSTOP)
        if end == "kill":
            front.kill()
        else:
            front.stdin.write("\n")
            front.stdin.flush()
        front.wait(END_S)
        wait_until(lambda: not any(map(is_alive, pids)), END_S, "core and runner are gone")
        wait_until(lambda: not Path(folder).exists(), END_S, "their folder is gone")
    finally:
        for pid in (front.pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        front.communicate()


@pytest.mark.parametrize("end", ENDS)
def test_a_runner_that_is_stopped_ends_with_its_engine(end):
    check_stopped_runner_ends(end, "SplitRunnerClient")


def test_a_planted_core_that_only_asks_its_runner_to_end_is_seen():
    with pytest.raises(AssertionError, match="not within"):
        check_stopped_runner_ends("kill", "OnlyAsksClient")
