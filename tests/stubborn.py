"""A child that ignores every polite request to end. In a module, so that children can import it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from nanoserve.process import Link

ORPHAN = """
import os, signal
from nanoserve.process import ChildProcess
from stubborn import stubborn
child = ChildProcess("stubborn", stubborn)
child.recv(60)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def stubborn(link: Link) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link.on_gone = lambda: time.sleep(3600)
    link.send("ready")
    while True:
        time.sleep(60)


def make_orphan() -> int:
    """The number of a process whose parent has been killed."""
    command, folder = [sys.executable, "-c", ORPHAN], Path(__file__).parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())  # the orphan keeps the pipe open: there is no end to read to
    return pid
