"""`nanoserve serve` as a process of its own, seen from outside, until its block ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection

COMMAND = [sys.executable, "-m", "nanoserve"]
WAIT_S = 60.0
ASK_EVERY_S = 0.01


def environment(threads: int | None = None) -> dict[str, str]:
    """As a shell has it, whatever a script has set for itself."""
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "TRITON_INTERPRET")}
    return kept if threads is None else kept | {"OMP_NUM_THREADS": str(threads)}


@contextmanager
def serving(*arguments: str, threads: int | None = None) -> Iterator[tuple[str, float]]:
    """Its address, and the seconds from the process's start to the first answer of 200 to /health."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*COMMAND, "serve", "--port", str(port), *arguments]
    start_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(threads))
    try:
        while not is_healthy(port):
            if process.poll() is not None or time.perf_counter() - start_s > WAIT_S:
                raise SystemExit(f"{' '.join(command)} is not ready; it ended with {process.poll()}.")
            time.sleep(ASK_EVERY_S)
        yield f"http://127.0.0.1:{port}", time.perf_counter() - start_s
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(WAIT_S)


def is_healthy(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except ConnectionError:
        return False
    finally:
        connection.close()
