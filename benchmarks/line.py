"""One line of what the engine promises: what was found, beside what is wanted."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

IS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}


@dataclass(frozen=True)
class Line:
    """`limit` None: a figure that stands beside a promise, and is none. `detail`: the rounds, or what it is made of."""

    what: str
    found: float
    unit: str = ""  # "%": found is a share
    relation: str = "<="
    limit: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool | None:
        return None if self.limit is None else IS[self.relation](self.found, self.limit)

    @property
    def cells(self) -> list[str]:
        wanted = "" if self.limit is None else f"{self.relation} {self._show(self.limit)}"
        return [self.what, self._show(self.found), wanted, {None: "", True: "yes", False: "NO"}[self.holds]]

    def _show(self, number: float) -> str:
        if self.unit == "%":
            return f"{number:.2%}"
        return f"{number:.3g} {self.unit}".rstrip() if abs(number) < 100 else f"{number:.0f} {self.unit}".rstrip()


def table(head: str, lines: Sequence[Line]) -> str:
    rows = [f"| {head} | found | wanted | holds |", "|---|---|---|---|"]
    return "\n".join(rows + ["| " + " | ".join(line.cells) + " |" for line in lines])


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Of neighbours: what slows a whole round down is in both."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
