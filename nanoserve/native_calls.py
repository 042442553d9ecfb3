"""Calls of compiled code: a function takes the address of one structure, so that a call is two numbers.

Those that would be made while somebody records, in the same thread, are kept instead, with a copy of their arguments:
what a CPU's graphs are made of (cpu_graphs.py). Knows no tensor. Laws: tests/test_cpu_graphs.py.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nanoserve.native import load

POINTER, INTEGER, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def members(kind: type, names: str) -> tuple[tuple[str, Any], ...]:
    """Of a structure, all of one kind."""
    return tuple((name, kind) for name in names.split())


class Call(ctypes.Structure):
    """`Call` of graph.cpp."""

    _fields_ = members(POINTER, "function arguments")


class Function:
    """`native/<library>.cpp: <name>`. What the pointers in its arguments lead to must live until the call is over, and
    as long as a recording of it. Raises native.BuildError without a compiler."""

    def __init__(self, library: str, name: str) -> None:
        self._function = getattr(load(library), name)
        self._function.restype, self._function.argtypes = None, (POINTER,)
        self.name, self.address = name, ctypes.cast(self._function, POINTER).value

    def __call__(self, arguments: ctypes.Structure) -> None:
        if _here.recorded is None:
            self._function(ctypes.addressof(arguments))
        else:  # callers use a structure again
            _here.recorded.append((self, type(arguments).from_buffer_copy(arguments)))


RecordedCall = tuple[Function, ctypes.Structure]


class _Here(threading.local):
    recorded: list[RecordedCall] | None = None


_here = _Here()


@contextmanager
def recorded_calls() -> Iterator[list[RecordedCall]]:
    """The calls that this thread would make within, in their order. None is made."""
    assert _here.recorded is None, "one recording at a time"
    _here.recorded = calls = []
    try:
        yield calls
    finally:
        _here.recorded = None
