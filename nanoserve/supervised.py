"""Programs of the system (a compiler), run so that nothing of them outlives this process, or a time limit.

A compiler starts others, which no signal to itself reaches, and all of them inherit what this process ignores. So a
small interpreter stands in between, out of reach of Ctrl-C: it starts the program as a group of its own, and ends the
group when its pipe to this process closes, whatever closes it. Runs as a script: imports nothing of the package. Laws:
tests/test_supervised.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

CANNOT_RUN = 127  # exit code, as a shell's; the reason is on stderr
END_S = 5.0  # for the interpreter in between to end a group


def run(command: Sequence[str], *, timeout_s: float, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with captured text; 128 + N for a program that signal N ended, CANNOT_RUN for none at all.

    `folder` is where the program keeps temporary files; it is removed where the program does not end by itself.
    Raises subprocess.TimeoutExpired.
    """
    ours = [sys.executable, "-I", "-S", __file__]
    read, write = os.pipe()
    with contextlib.ExitStack() as connection:
        connection.callback(os.close, write)
        try:
            process = subprocess.Popen(
                [*ours, str(read), str(folder or ""), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                pass_fds=(read,),
                start_new_session=True,
            )
        finally:
            os.close(read)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            connection.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            for pipe in filter(None, (process.stdout, process.stderr)):
                pipe.close()
            raise
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def _main(fd: str, folder: str, *command: str) -> int:
    """In between: the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the pipe tells the end; to ignore them, the program would, too
    try:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=os.environ | ({"TMPDIR": folder} if folder else {}),
            start_new_session=True,
        )
    except OSError as error:
        print(error.strerror, file=sys.stderr)
        return CANNOT_RUN
    ended_read, ended_write = os.pipe()

    def await_end() -> None:
        os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)  # not reaped: its number is still the group's
        os.close(ended_write)

    threading.Thread(target=await_end, daemon=True).start()
    poller = select.poll()
    for end in (int(fd), ended_read):
        poller.register(end, select.POLLIN)
    ended = ended_read in dict(poller.poll())
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, signal.SIGKILL)
    code = program.wait()
    if folder and (not ended or code < 0):  # whoever has signalled it may have signalled its caller, too
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
