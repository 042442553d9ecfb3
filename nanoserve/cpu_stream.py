"""A queue of recorded calls that a thread of C++ makes in order, while the interpreter goes on.

What a CUDA stream is on a GPU. A thread of Python's would not do: it and the host would take the interpreter from each
other at every operation. Knows neither model nor step. Whoever submits work keeps the memory that it reads and writes,
and changes none of it, until the work is done. Laws: tests/test_cpu_stream.py.
"""

from __future__ import annotations

import ctypes
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
    """Its thread starts with the first work. Belongs to one thread, which submits, waits and closes. Raises
    native.BuildError without a compiler."""

    def __init__(self) -> None:
        library = load("stream")
        library.make_stream.argtypes, library.make_stream.restype = (), POINTER
        library.submit.argtypes, library.submit.restype = (POINTER, POINTER, POINTER), INTEGER
        library.wait_for.argtypes, library.wait_for.restype = (POINTER, INTEGER), None
        library.end_stream.argtypes, library.end_stream.restype = (POINTER,), None
        self._submit, self._wait_for, self._end = library.submit, library.wait_for, library.end_stream
        self._newest = 0
        self._stream: int | None = library.make_stream()

    def submit(self, work: Replay) -> Ticket:
        """Behind whatever was submitted before."""
        assert self._stream is not None, "the stream is closed"
        self._newest = self._submit(self._stream, work.function.address, ctypes.addressof(work.arguments))
        return Ticket(self, self._newest)

    def wait_for(self, number: int) -> None:
        if self._stream is not None:
            self._wait_for(self._stream, number)

    def synchronize(self) -> None:
        """Until all is done that was submitted."""
        self.wait_for(self._newest)

    def close(self) -> None:
        """Ends the thread, once all is done. Idempotent."""
        if self._stream is not None:
            self._end(self._stream)
            self._stream = None
