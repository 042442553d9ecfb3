"""How a command line names the policies of a simulation: `unified:512`, `phase_split:16384`, `v1`, and more exactly

    SCHEDULER or STAGE [:BUDGET] [+BLOCKS] [+CLIENT] [+ahead]

A stage brings its scheduler, client, blocks and whether it is a step ahead; each part behind it overrides one of them.
The names are those of `config.SEAMS` and `config.STAGES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanoserve.config import SEAMS, STAGES, EngineConfig

AHEAD = "ahead"


@dataclass(frozen=True, slots=True)
class Policy:
    """One row of a simulation's tables."""

    name: str  # as it was given
    config: EngineConfig


def parse_policies(text: str, **common: Any) -> list[Policy]:
    """A list with commas; `common`: fields of every config that a policy may override. Raises ValueError."""
    policies = [parse_policy(name.strip(), **common) for name in text.split(",") if name.strip()]
    names = [policy.name for policy in policies]
    if not names:
        raise ValueError("--policies names none; write for example phase_split:16384,unified:512.")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--policies names {', '.join(repeated)} twice; name each policy once.")
    return policies


def parse_policy(text: str, **common: Any) -> Policy:
    """One of them. Raises ValueError."""
    head, *parts = text.split("+")
    name, colon, budget = head.partition(":")
    fields = dict(common)
    if name in STAGES:
        stage = STAGES[name]
        own = {f: getattr(stage, f) for f in ("scheduler", "client", "blocks", "async_scheduling")}
        fields = {**own, **{f: value for f, value in fields.items() if f not in own}}
    elif name in SEAMS["scheduler"]:
        fields["scheduler"] = SEAMS["scheduler"][name]
    else:
        known = ", ".join([*SEAMS["scheduler"], *STAGES])
        raise ValueError(f"policy {text!r} is not known: {name!r} is no scheduler and no stage; use one of {known}.")
    if colon:
        if not budget.isdecimal() or not budget.isascii() or not 1 <= int(budget[:20]) < 2**40:
            raise ValueError(f"policy {text!r} has the budget {budget!r}; write tokens a step, such as {name}:512.")
        fields["max_num_batched_tokens"] = int(budget)
    return Policy(text, replace(EngineConfig(), **fields | _parts(text, parts)))


def _parts(text: str, parts: Sequence[str]) -> dict[str, Any]:
    """Fields of the config, each from one part."""
    fields: dict[str, Any] = {}
    by: dict[str, str] = {}
    for part in parts:
        [(field, value)] = _part(text, part).items()
        if field in by:
            raise ValueError(f"policy {text!r} has two parts for {field}, {by[field]} and {part}; leave one out.")
        by[field], fields[field] = part, value
    return fields


def _part(text: str, part: str) -> dict[str, Any]:
    for seam in ("blocks", "client"):
        if part in SEAMS[seam]:
            return {seam: SEAMS[seam][part]}
    if part == AHEAD:
        return {"async_scheduling": True}
    known = ", ".join([*SEAMS["blocks"], *SEAMS["client"], AHEAD])
    raise ValueError(f"policy {text!r} has the part {part!r}, which is not known; use one of {known}.")
