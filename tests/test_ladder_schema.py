"""The law of ladder.json: docs/ladder.md names every field of every part of it."""

import dataclasses
import re
import types
import typing
from dataclasses import is_dataclass
from pathlib import Path

import msgspec

from nanoserve.lab.ladder_report import LadderReport

DOC = Path(__file__).resolve().parents[1] / "docs" / "ladder.md"


def parts_of(kind: typing.Any, seen: dict[type, list[str]]) -> dict[type, list[str]]:
    """Class -> fields, of everything that a report is made of."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is not None:
        for part in typing.get_args(kind):
            parts_of(part, seen)
    elif kind not in seen and (is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))):
        struct = typing.cast("type[msgspec.Struct]", kind)
        is_plain = is_dataclass(kind)
        seen[struct] = [f.name for f in dataclasses.fields(kind)] if is_plain else list(struct.__struct_fields__)
        for hint in typing.get_type_hints(kind).values():
            parts_of(hint, seen)
    return seen


def undocumented(text: str) -> list[str]:
    """Fields that stand neither in the section of their class nor in that of one above it."""
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))
    parts = parts_of(LadderReport, {})
    told = {kind: "".join(sections.get(base.__name__, "") for base in kind.__mro__) for kind in parts}
    return [
        f"{kind.__name__}.{name}" for kind, names in parts.items() for name in names if f"`{name}`" not in told[kind]
    ]


def test_every_field_of_the_file_is_documented() -> None:
    text = DOC.read_text(encoding="utf-8")
    found = {kind.__name__ for kind in parts_of(LadderReport, {})}
    assert {"Production", "SimulatedReport", "StageStory", "Host", "Execution", "BoundaryCost", "RunMetrics"} <= found
    assert undocumented(text) == []
    assert "version 3" in text


def test_a_field_that_the_page_leaves_out_is_found_out() -> None:
    text = DOC.read_text(encoding="utf-8")
    assert undocumented(text.replace("`not_told_apart`", "")) == ["Production.not_told_apart"]
    assert "Spread.mean" in undocumented(text.replace("### `Spread`", "### Spread"))
