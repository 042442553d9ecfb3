"""Child processes that cannot outlive their parent, and parents that notice the death of a child.

A child is a fresh interpreter (never a fork: threads and GPU contexts do not survive one, and a user's script is not
imported again). The two are linked by a socket pair: start-up messages travel on it, and each side sees the other's
death as its end. Start-up messages are pickled (classes given by the user travel by value); nothing later is.
Laws: tests/test_process.py, tests/test_faults.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

LENGTH = struct.Struct("<Q")
PR_SET_PDEATHSIG = 1
END_S = 1.0  # for what a child has started to end by itself; `stop` waits longer for the child


class ChildDiedError(RuntimeError):
    """A child process ended when it should not have."""


class Link:
    """One end of the start-up socket between parent and child.

    `on_gone` is for a child to set: called from another thread when the parent died or hung up, to end what it does
    in an orderly way; when it returns, the process ends in any way.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.on_gone: Callable[[], None] = lambda: None

    def send(self, item: Any) -> None:
        data = cloudpickle.dumps(item)
        self.sock.sendall(LENGTH.pack(len(data)) + data)

    def recv(self, timeout: float | None = None) -> Any:
        """EOFError when the other side is gone, TimeoutError when it said nothing for that many seconds."""
        self.sock.settimeout(timeout)
        try:
            (length,) = LENGTH.unpack(self._read(LENGTH.size))
            return cloudpickle.loads(self._read(length))
        finally:
            self.sock.settimeout(None)

    def _read(self, n: int) -> bytes:
        data = bytearray()
        while len(data) < n:
            try:
                part = self.sock.recv(n - len(data))
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError("the other process is gone")
            data += part
        return bytes(data)


class ChildProcess:
    """One child, started and awaited by a thread of its own.

    `target` is a function of an importable module, called in the child as `target(link, *pass_fds)`; it returns the
    exit code. `folder` is removed at the child's end, whatever that is. `on_exit` is called from the awaiting thread
    when the child has ended, for whatever reason.
    """

    def __init__(
        self,
        name: str,
        target: Callable[..., int],
        *,
        folder: str = "",
        pass_fds: Sequence[int] = (),
        env: dict[str, str] | None = None,
        on_exit: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._target = f"{target.__module__}:{target.__qualname__}"
        self._folder = folder
        self._pass_fds = tuple(pass_fds)
        self._env = env or {}
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._error: Exception | None = None
        ours, self._theirs = socket.socketpair()
        self.link = Link(ours)
        # The parent-death signal follows the thread that started the child, so that thread has to stay.
        self._thread = threading.Thread(target=self._run, name=f"await-{name}", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._error:
            raise self._error

    def _run(self) -> None:
        fds = (self._theirs.fileno(), *self._pass_fds)
        paths = [path or os.getcwd() for path in sys.path]
        env = {**os.environ, **self._env, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "nanoserve.process", str(os.getpid()), self._target]
        command += [self._folder, *map(str, fds)]
        try:
            self._process = subprocess.Popen(command, pass_fds=fds, env=env, stdin=subprocess.DEVNULL)
        except OSError as error:
            self._error = error
            return
        finally:
            self._theirs.close()
            for fd in self._pass_fds:
                os.close(fd)
            self._started.set()
        self._process.wait()
        if self._on_exit:
            self._on_exit()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        assert self._process is not None
        return self._process.returncode

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def recv(self, timeout: float) -> Any:
        """Its next start-up message. ChildDiedError at once when it dies first, TimeoutError when it is late."""
        try:
            return self.link.recv(timeout)
        except EOFError:
            self._thread.join(5)
            raise ChildDiedError(f"the {self.name} process {self.describe_exit()} during start-up") from None
        except TimeoutError:
            raise TimeoutError(
                f"the {self.name} process was not ready after start_timeout_s={timeout:g}; give it more "
                "(--start-timeout), or a smaller model."
            ) from None

    def describe_exit(self) -> str:
        code = self.exit_code
        if code is None:
            return "is running"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def stop(self, timeout: float = 5.0) -> None:
        """Idempotent: hang up and wait; then SIGTERM; then SIGKILL."""
        self.link.sock.close()
        deadline = time.monotonic() + timeout
        for end in (None, signal.SIGTERM, signal.SIGKILL):
            if end is not None and self.is_alive and self._process is not None:
                self._process.send_signal(end)
            self._thread.join(max(0.2, (deadline - time.monotonic()) / 2))
            if not self.is_alive:
                return


def told_to_parent(error: Exception, unexpected: type[Exception]) -> Exception:
    """What ended a start-up, for the parent to raise: bad input and what the system refused as they are, anything else
    as `unexpected`, with its traceback."""
    if isinstance(error, ValueError):
        return ValueError(str(error))
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror, error.filename) if error.strerror else OSError(str(error))
    return unexpected("".join(traceback.format_exception(error)))


def _end_descendants() -> None:
    """What this process or a library has started (torch a compiler, which starts others): SIGTERM, at which they clean
    up; SIGKILL for what is stuck or stopped. What has a session of its own (`supervised`) sees to its own end."""
    ours = os.getsid(0)
    with contextlib.ExitStack() as stack:
        pidfds: list[int] = []
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(OSError):  # it has ended
                if os.getsid(pid) == ours:
                    pidfds.append(os.pidfd_open(pid))
                    stack.callback(os.close, pidfds[-1])
        deadline = time.monotonic() + END_S
        for pidfd in pidfds:
            _signal(pidfd, signal.SIGTERM)
        for pidfd in pidfds:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                _signal(pidfd, signal.SIGKILL)


def _signal(pidfd: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # it has ended
        signal.pidfd_send_signal(pidfd, number)


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                yield child
                yield from _descendants(child)


def _main(parent_pid: str, target: str, folder: str, link_fd: str, *fds: str) -> None:
    """The child. It never outlives its parent, not even while it loads, and its folder never outlives it."""
    link = Link(socket.socket(fileno=int(link_fd)))

    def leave(code: int) -> NoReturn:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        sys.stdout.flush()
        sys.stderr.flush()
        _end_descendants()
        os._exit(code)  # other threads may sit in their sockets; nothing of ours is left to finalise

    def watch() -> None:
        poller = select.poll()
        poller.register(link.sock, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
        poller.poll()
        link.on_gone()
        leave(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    signal.signal(signal.SIGTERM, lambda *_: leave(128 + signal.SIGTERM))  # until the target has a better idea
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent_pid):
            leave(1)  # it died before the signal was set
    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    code = 1
    try:
        module, _, name = target.partition(":")
        function = getattr(__import__(module, fromlist=[name]), name)
        code = function(link, *map(int, fds))
    except BaseException:
        traceback.print_exc()
    leave(code)


if __name__ == "__main__":
    _main(*sys.argv[1:])
