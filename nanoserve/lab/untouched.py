"""Whether a user's code has changed nanoserve itself: a function, class or constant of a module, a method of a class.

Takes a picture of what is imported so far, and says what is no longer the same thing. Knows nothing of what the code is
for. Not a wall: what is changed and put back between two looks is not seen. Law: tests/test_grade.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

PACKAGE = "nanoserve"
WRAPPED = (classmethod, staticmethod, property)
_MISSING = object()


class Untouched:
    """A picture of the package, at the time that it was made."""

    def __init__(self) -> None:
        self._owners = [*_owners()]
        self._picture = {name: _parts(owner) for name, owner in self._owners}

    def changed(self) -> str:
        """The first thing that is another one now, by its full name; "" while all is as it was."""
        for name, owner in self._owners:
            before, now = self._picture[name], _parts(owner)
            for part in before | now:
                is_own = isinstance(owner, type) or part in before  # a module's submodules come as they are imported
                if is_own and before.get(part, _MISSING) != now.get(part, _MISSING):
                    return f"{name}.{part}"
        return ""


class _Part:
    """Equal to itself alone, and only as long as its code is the same."""

    __slots__ = ("_code", "_value")

    def __init__(self, value: object) -> None:
        self._value = value
        code = getattr(value, "__code__", None)
        self._code = code if isinstance(code, CodeType) else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Part) and self._value is other._value and self._code is other._code

    __hash__ = None  # type: ignore[assignment]


def _owners() -> Iterator[tuple[str, Any]]:
    """Modules of the package, and the classes that they define."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != PACKAGE or not isinstance(module, ModuleType):
            continue
        yield name, module
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == name:
                yield f"{name}.{value.__qualname__}", value


def _parts(owner: Any) -> dict[str, _Part]:
    """Of the names that Python keeps for itself (`__doc__`), only what can be called."""
    return {
        name: _Part(value)
        for name, value in vars(owner).items()
        if not name.startswith("__") or callable(value) or isinstance(value, WRAPPED)
    }
