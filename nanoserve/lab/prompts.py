"""Prompts without text: runs of equal token ids, so that a thousand prompts of 30,000 tokens cost nothing to keep.

To a scheduler and a block manager only equality matters: which prompts begin alike, and for how long. A part with a
name is a run of one id, and equal names are equal tokens; the hash of a block covers all that comes before it, so a
run of one id makes as many different blocks as any text. Laws: tests/test_scenarios.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import overload

FIRST_PART_ID = 1_000_000  # above the vocabularies, so that parts and real token ids do not meet
OUTPUT_TOKEN = 0  # what a simulated model answers with, always: a next turn can hold the answer of the one before


class TokenRuns(Sequence[int]):
    """Token ids as runs of (id, count): as long as a list, in the memory of its runs."""

    __slots__ = ("_len", "runs")

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        """ValueError for a count below 1."""
        self.runs = tuple((int(token_id), int(count)) for token_id, count in runs)
        for token_id, count in self.runs:
            if count < 1 or token_id < 0:
                raise ValueError(f"a run must be a token id >= 0 and a count >= 1, got [{token_id}, {count}].")
        self._len = sum(count for _, count in self.runs)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(repeat(token_id, count) for token_id, count in self.runs)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return list(self)[index]

    def __repr__(self) -> str:
        return f"TokenRuns({list(self.runs)})"


class PartIds:
    """The token id of every part of a workload's prompts."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._next = FIRST_PART_ID

    def named(self, name: str) -> int:
        """Equal names are equal tokens."""
        if name not in self._ids:
            self._ids[name] = self.own()
        return self._ids[name]

    def own(self) -> int:
        """Of a part that no other prompt has."""
        self._next += 1
        return self._next - 1
