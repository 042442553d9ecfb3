"""`nanoserve serve` as a process of its own, for tests that see it only from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from faulty import children_of

WAIT_S = 60.0


class ServeProcess:
    """A running server. `url` has no path."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.exit_code = 0  # when it is told to leave
        self.port = urlsplit(url).port

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)

    def get(self, path: str) -> Any:
        connection = self.connect()
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            assert response.status == 200, f"{path}: {response.status} {body[:500]!r}"
            return json.loads(body)
        finally:
            connection.close()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def pids(self) -> list[int]:
        """The front end, then what it started."""
        return [self.process.pid, *children_of(self.process.pid)]

    def rss_mib(self) -> float:
        """Resident memory of all its processes."""
        fields = [re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()) for pid in self.pids()]
        return sum(int(field[1]) for field in fields if field) / 1024

    def cpu_s(self) -> float:
        """CPU time of all its processes so far."""
        ticks = 0
        for pid in self.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def until_idle(self, within_s: float) -> float:
        """Seconds until nothing runs, waits or holds a block; needs --debug-endpoints."""
        start_s = time.monotonic()
        while True:
            blocks, stats = self.get("/debug/blocks"), self.get("/stats")
            took_s = time.monotonic() - start_s
            held = (blocks["tables"], stats["num_running"], stats["num_waiting"])
            if not any(held) and blocks["num_free_blocks"] == blocks["num_blocks"] - 1:
                return took_s
            assert took_s < within_s, f"still held after {took_s:.1f} s: {held}"

    def kill(self) -> None:
        """The front end is gone at once; its children go by themselves."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)


@contextmanager
def serve(*arguments: str) -> Iterator[ServeProcess]:
    """`nanoserve serve` on any free port. At the end it has left in good order, unless a test has killed it."""
    command = [sys.executable, "-m", "nanoserve", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    with process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            found = re.fullmatch(r"nanoserve is ready: \S+ at (http://127\.0\.0\.1:\d+)\n", ready)
            assert found, ready
            server = ServeProcess(process, found[1])
            yield server
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(WAIT_S) == server.exit_code
        finally:
            process.kill()
