"""From keywords to an `EngineConfig`: a stage or a config, with single fields replaced.

Serves `LLM(...)` and the command line alike. Takes vLLM's names beside ours where they mean the same, and
refuses every other name with the nearest known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from nanoserve.config import SEAMS, STAGES, EngineConfig, get_stage
from nanoserve.runner import EagerRunner

FIELDS = tuple(field.name for field in fields(EngineConfig))
OPTIONAL_SEAMS = ("attention", "ops")  # None: the device chooses
VLLM_NAMES: Mapping[str, str] = MappingProxyType(
    {"num_gpu_blocks_override": "num_blocks", "scheduling_policy": "policy"}
)


def engine_config(*, stage: str | None = None, config: EngineConfig | None = None, **given: Any) -> EngineConfig:
    """The config of `stage` (default: the last one built), or `config` itself, with the given fields replaced.

    `enable_prefix_caching=True / False` stands for the shared / private block manager, `enforce_eager=True` for a
    runner that neither captures nor compiles. Raises TypeError for an unknown field, ValueError for a bad value or for
    contradictions.
    """
    if stage is not None and config is not None:
        raise ValueError(f"stage={stage!r} and a config were both given; give one of them and override its fields.")
    base = config if config is not None else get_stage(stage if stage is not None else list(STAGES)[-1])
    changes = _rename(given)
    _check_names(changes)
    if (caching := changes.pop("enable_prefix_caching", None)) is not None:
        changes["blocks"] = _blocks_for(caching, changes.get("blocks"))
    eager = changes.pop("enforce_eager", False)
    if not isinstance(eager, bool):
        raise ValueError(f"enforce_eager must be True or False, got {eager!r}.")
    if eager:
        changes |= _eager(changes)
    _check_seams(changes)
    return replace(base, **changes)


def _rename(given: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, value in given.items():
        field = VLLM_NAMES.get(name, name)
        if field in changes:
            raise ValueError(f"{field} was given twice, also as {name}; give it once.")
        changes[field] = value
    return changes


def _check_names(changes: Mapping[str, Any]) -> None:
    known = [*FIELDS, "enable_prefix_caching", "enforce_eager"]
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *VLLM_NAMES], n=1, cutoff=0.5)
            raise TypeError(
                f"{name!r} is not an engine option"
                + (f"; did you mean {near[0]!r}?" if near else f"; the options are {', '.join(known)}.")
            )


def _blocks_for(caching: bool, asked: type | None) -> type:
    blocks = SEAMS["blocks"]["shared" if caching else "private"]
    if asked is not None and asked is not blocks:
        raise ValueError(
            f"enable_prefix_caching={caching} means {blocks.__name__}, but blocks is {asked.__name__}; "
            "give one of the two."
        )
    return blocks


def _eager(given: Mapping[str, Any]) -> dict[str, Any]:
    meant = {"runner": EagerRunner, "compile": "none", "graph_mode": None, "graph_sizes": None}
    for name, value in meant.items():
        if given.get(name, value) != value:
            raise ValueError(f"enforce_eager=True leaves no room for {name}, which was given too; give one of the two.")
    return meant


def _check_seams(changes: Mapping[str, Any]) -> None:
    for seam, classes in SEAMS.items():
        value = changes.get(seam)
        if value is None and seam in OPTIONAL_SEAMS:
            continue
        if seam in changes and not isinstance(value, type):
            known = ", ".join(cls.__name__ for cls in classes.values())
            raise ValueError(f"{seam} must be a class, got {value!r}; pass one of {known}, or one of your own.")
