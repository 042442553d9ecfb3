"""A queue of recorded calls that a thread of C++ makes in order, while the interpreter goes on.

What a CUDA stream is on a GPU. A thread of Python's would not do: it and the host would take the interpreter from each
other at every operation. Knows neither model nor step. Whoever submits work keeps the memory that it reads and writes,
and changes none of it, until the work is done. Laws: tests/test_cpu_stream.py.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from nanoserve.cpu_graphs import Replay
from nanoserve.native import load
from nanoserve.native_calls import INTEGER, POINTER


@dataclass(frozen=True, slots=True)
class Ticket:
    """Mirrors `torch.cuda.Event` once it is recorded."""

    stream: CpuStream
    number: int

    def synchronize(self) -> None:
        """Until that work is done."""
        self.stream.wait_for(self.number)


class CpuStream:
    """Belongs to one thread, which submits, waits and closes; in a process that is forked it does nothing. Raises
    native.BuildError without a compiler, OSError where the system has no thread for it."""

    def __init__(self) -> None:
        library = load("stream")
        library.make_stream.argtypes, library.make_stream.restype = (), POINTER
        library.submit.argtypes, library.submit.restype = (POINTER, POINTER, POINTER), INTEGER
        library.wait_for.argtypes, library.wait_for.restype = (POINTER, INTEGER), None
        library.wait_for_all.argtypes, library.wait_for_all.restype = (POINTER,), None
        library.end_stream.argtypes, library.end_stream.restype = (POINTER,), None
        self._library, self._process = library, os.getpid()
        self._stream: int | None = library.make_stream()
        if self._stream is None:
            raise OSError("the system has no thread for a stream")

    @property
    def _is_alive(self) -> bool:
        return self._stream is not None and self._process == os.getpid()

    def submit(self, work: Replay) -> Ticket:
        """Behind whatever was submitted before."""
        assert self._is_alive, "the stream is closed, or another process's"
        return Ticket(self, self._library.submit(self._stream, work.function.address, ctypes.addressof(work.arguments)))

    def wait_for(self, number: int) -> None:
        if self._is_alive:
            self._library.wait_for(self._stream, number)

    def synchronize(self) -> None:
        """Until all is done that was submitted, also what an interrupt kept the caller from hearing of."""
        if self._is_alive:
            self._library.wait_for_all(self._stream)

    def close(self) -> None:
        """Ends the thread, once all is done. Idempotent."""
        if self._is_alive:
            stream, self._stream = self._stream, None
            self._library.end_stream(stream)
