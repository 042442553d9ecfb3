"""What a child process has started and left running, ended with it, as far as that can be found.

By its process group, and on Linux by a mark in the environment that it was started with, which its own children inherit
even where they leave the group. Knows nothing of what the child is for. Law: tests/test_grade.py.
"""

from __future__ import annotations

import os
import secrets
import signal
from contextlib import suppress
from pathlib import Path

VARIABLE = "NANOSERVE_STARTED_BY"


def new_mark() -> dict[str, str]:
    """For the environment of one child."""
    return {VARIABLE: secrets.token_hex(16)}


def end_marked(mark: dict[str, str]) -> None:
    """Every process that was started with that mark. Linux; elsewhere none."""
    entry = f"{VARIABLE}={mark[VARIABLE]}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it is gone, or another user's
            if entry in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)


def end_group(leader: int) -> None:
    """Every process of the group that the process `leader` has made its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
