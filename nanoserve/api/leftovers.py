"""What engines that ended badly can leave behind: orphaned processes, socket folders, crash dumps. Finds, removes.

Nothing that a live engine uses is ever in the list: a process whose parent lives is not an orphan, and a folder is in
use while its owner's lock is held, a socket in it is bound, or it is younger than a minute. Shared memory has no
names here, so it ends with its processes. Processes are looked for where there is a /proc. Laws: tests/test_doctor.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nanoserve.client import FOLDER_PREFIX, INPUT, OUTPUT, OWNER
from nanoserve.core import CRASH_PREFIX
from nanoserve.record import StepRecord

PROC = Path("/proc")
SETTLE_S = 3.0  # an orphan ends on its own within two seconds, unless it is stuck
YOUNG_S = 60.0  # a folder this young may be one whose owner has not locked it yet
SIGNAL_WAIT_S = 3.0
MAX_ERROR = 160  # characters shown of what ended an engine
_FOLDER_NAME = re.compile(re.escape(FOLDER_PREFIX) + r"[a-z0-9_]{8}")  # as `tempfile.mkdtemp` makes them


@dataclass(frozen=True, slots=True)
class OrphanProcess:
    """A child of an engine whose parent is gone. `start_ticks` tells it from a later process with its number."""

    pid: int
    parent_pid: int
    target: str
    start_ticks: int

    def __str__(self) -> str:
        return f"process {self.pid} ({self.target}): its parent {self.parent_pid} is gone"

    def remove(self) -> bool:
        """SIGTERM, then SIGKILL; True once it is gone. Never another process that has its number by now."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        try:
            return self._signal(pidfd)
        finally:
            os.close(pidfd)

    def _signal(self, pidfd: int) -> bool:
        if _orphan(self.pid) != self:
            return True  # it has ended
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGKILL):  # a stopped one has to go on to end
            try:
                signal.pidfd_send_signal(pidfd, number)
            except ProcessLookupError:
                return True
            except OSError:
                return False
            if number != signal.SIGTERM and poller.poll(SIGNAL_WAIT_S * 1000):
                return True
        return False


@dataclass(frozen=True, slots=True)
class SocketFolder:
    path: str

    def __str__(self) -> str:
        return f"socket folder {self.path}: no live process uses it"

    def remove(self) -> bool:
        if _is_unused(Path(self.path)):
            shutil.rmtree(self.path, ignore_errors=True)
        return not os.path.lexists(self.path)


@dataclass(frozen=True, slots=True)
class CrashDump:
    """`error`: the last line of what ended the engine."""

    path: str
    error: str

    def __str__(self) -> str:
        return f"crash dump {self.path}: {self.error}"

    def remove(self) -> bool:
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        return not os.path.lexists(self.path)


@dataclass(frozen=True, slots=True)
class Leftovers:
    processes: list[OrphanProcess]
    folders: list[SocketFolder]
    dumps: list[CrashDump]

    def __iter__(self) -> Iterator[OrphanProcess | SocketFolder | CrashDump]:
        yield from (*self.processes, *self.folders, *self.dumps)


def find_leftovers() -> Leftovers:
    """Everything of this user. Orphans get `SETTLE_S` to end by themselves before they count."""
    deadline = time.monotonic() + SETTLE_S
    while (processes := find_orphans()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return Leftovers(processes, find_folders(_temp_folders()), find_dumps(_temp_folders()))


def remove_leftovers(leftovers: Leftovers) -> tuple[list[str], list[str]]:
    """What was removed and what could not be, in words. A process that turns into an orphan on the way is found by
    the next look."""
    removed: list[str] = []
    failed: list[str] = []
    for item in leftovers:
        (removed if item.remove() else failed).append(str(item))
    return removed, failed


def find_orphans() -> list[OrphanProcess]:
    """[] where there is no /proc."""
    pids = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()] if PROC.is_dir() else []
    return [found for pid in pids if (found := _orphan(pid)) is not None]


def _orphan(pid: int) -> OrphanProcess | None:
    """None unless it is provably ours: this user's, in this process namespace, started by `nanoserve.process`, and
    its parent not the one that started it."""
    folder = PROC / str(pid)
    try:
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        if len(words) < 6 or words[1:3] != ["-m", "nanoserve.process"] or not words[3].isdigit():
            return None
        state, parent, *fields = (folder / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()
        ours = folder.stat().st_uid == os.geteuid()
        here = os.readlink(folder / "ns" / "pid") == os.readlink(PROC / "self" / "ns" / "pid")
    except OSError:  # it has ended, or it is not ours to look at
        return None
    if state in "ZX" or not ours or not here or int(parent) == int(words[3]):
        return None
    return OrphanProcess(pid, int(words[3]), words[4], int(fields[17]))


def _temp_folders() -> list[Path]:
    """Where `tempfile` puts things, and where sockets go when that path is too long for them."""
    return list(dict.fromkeys([Path(tempfile.gettempdir()).resolve(), Path("/tmp").resolve()]))


def find_folders(parents: Sequence[Path]) -> list[SocketFolder]:
    names = [path for parent in parents for path in sorted(parent.glob(f"{FOLDER_PREFIX}*"))]
    return [SocketFolder(str(path)) for path in names if _FOLDER_NAME.fullmatch(path.name) and _is_unused(path)]


def _is_unused(path: Path) -> bool:
    """A folder of ours that no live engine uses. Anything unexpected in it: not ours."""
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return False
        if not {entry.name for entry in path.iterdir()} <= {INPUT, OUTPUT, OWNER}:
            return False
    except OSError:
        return False
    return time.time() - status.st_mtime > YOUNG_S and not _is_locked(path / OWNER) and not _is_bound(path)


def _is_locked(owner: Path) -> bool:
    try:
        lock = os.open(owner, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # cannot tell
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _is_bound(folder: Path) -> bool:
    """A process listens on a socket in it."""
    try:
        lines = (PROC / "net" / "unix").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.split(None, 7)[-1].startswith(f"{folder}/") for line in lines)


def find_dumps(parents: Sequence[Path]) -> list[CrashDump]:
    paths = [path for parent in parents for path in sorted(parent.glob(f"{CRASH_PREFIX}*.jsonl"))]
    return [CrashDump(str(path), _error(path)) for path in paths if _is_our_file(path)]


def _is_our_file(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _error(dump: Path) -> str:
    try:
        lines = reversed(dump.read_bytes().splitlines()[1:])  # a plan that was launched ahead may stand behind it
        records = (msgspec.json.decode(line, type=StepRecord) for line in lines)
        failed = next(record for record in records if record.error)
        line = failed.error.strip().splitlines()[-1]
        return line if len(line) <= MAX_ERROR else f"{line[:MAX_ERROR]}..."
    except (OSError, IndexError, StopIteration, msgspec.MsgspecError):
        return "it cannot be read"
