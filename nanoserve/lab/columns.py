"""Columns of numbers in one compressed text that a page can carry and a browser can read without a library.

Owns the packing: every column is a little-endian typed array of its own, one after another, deflated and in base64.
The directory names them: [name, type, offset in bytes, length]. tests/test_timeline.py reads them back.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

TYPES = {"i": "<i4", "f": "<f4", "d": "<f8"}


@dataclass(slots=True)
class Columns:
    directory: list[tuple[str, str, int, int]] = field(default_factory=list)
    _parts: list[bytes] = field(default_factory=list)
    _size: int = 0

    def add(self, name: str, kind: str, values: Sequence[float]) -> None:
        """`kind`: i (32-bit integers), f, or d (floats of 32 and 64 bits)."""
        data = np.asarray(values, dtype=TYPES[kind]).tobytes()
        self._parts.append(data + bytes(-len(data) % 8))  # a typed array starts at a multiple of its item size
        self.directory.append((name, kind, self._size, len(values)))
        self._size += len(self._parts[-1])

    def pack(self) -> str:
        return base64.b64encode(zlib.compress(b"".join(self._parts), 6)).decode()


def unpack(text: str, directory: Sequence[Sequence[object]]) -> dict[str, list[float]]:
    """The way back, as the page does it."""
    data = zlib.decompress(base64.b64decode(text))
    columns = {}
    for name, kind, offset, length in directory:
        column = np.frombuffer(data, TYPES[str(kind)], count=int(str(length)), offset=int(str(offset)))
        columns[str(name)] = column.tolist()
    return columns
