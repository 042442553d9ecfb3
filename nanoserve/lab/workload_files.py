"""Workloads as files: one JSON object a line, an arrival each, that anyone can write; and traces in Mooncake's form.

    {"at_s": 0.5, "max_tokens": 64, "prompt_len": 128}                      128 tokens that nobody shares
    {"at_s": 0.7, "max_tokens": 64, "parts": [["system", 1024], ["", 40]]}  a prefix group, and 40 tokens of its own
    {"at_s": 2.0, "max_tokens": 64, "prompt": [5, 17, 9], "id": "b", "group": "chat", "follows": "a"}

Mooncake's lines have `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`, one for every 512
tokens of the prompt; equal ids are equal blocks after equal beginnings. Laws: tests/test_scenarios.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from nanoserve.lab.files import check_inputs
from nanoserve.lab.prompts import PartIds, TokenRuns
from nanoserve.lab.workload import Arrival, Workload

MOONCAKE_BLOCK = 512  # tokens
MOONCAKE_FIRST_ID = 10**9  # far from the ids of other parts
MOONCAKE_MAX_ID = 10**9
MAX_ID = 2**31 - 1
MAX_LEN = 10**7  # tokens: the longest contexts that models are published with
MAX_TOKENS = 10**9  # of all requests: they may all be alive at once
MAX_SECONDS = 1e10  # a time since 1970 is one, too
EXAMPLE = '{"at_s": 0.5, "prompt_len": 128, "max_tokens": 64}'


class Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One arrival. A part is [name, count], "" for tokens of its own; or [token id, count]."""

    max_tokens: int
    at_s: float = 0.0
    prompt: list[int] | None = None
    prompt_len: int | None = None
    parts: list[tuple[str | int, int]] | None = None
    id: str = ""
    group: str = ""
    follows: str = ""


class MooncakeLine(msgspec.Struct):
    """One arrival of a published trace (Qin et al. 2025, "Mooncake"); other fields are not looked at."""

    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_workload(path: str | Path) -> Workload:
    """A file of either form. Raises OSError, and ValueError that names the line."""
    path = Path(path)
    check_inputs([path])
    arrivals = list(_arrivals(path))
    if not arrivals:
        raise ValueError(f"{path} holds no request; write one JSON object a line, such as {EXAMPLE}.")
    num_tokens = sum(len(a.prompt_token_ids) + a.max_tokens for a in arrivals)
    if num_tokens > MAX_TOKENS:
        raise ValueError(
            f"{path} asks for {num_tokens:,} tokens in all, and {MAX_TOKENS:,} are the most; cut it short."
        )
    groups = list(dict.fromkeys(a.group for a in arrivals))
    return Workload(
        name=path.stem,
        claim="A load from a file.",
        watched=groups[0],
        seed=0,
        parameters={"requests": len(arrivals), "groups": len(groups)},
        arrivals=arrivals,
    )


def _arrivals(path: Path) -> Iterator[Arrival]:
    ids = PartIds()
    number = 0
    for line_number, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        try:
            fields = msgspec.json.decode(text)
            if isinstance(fields, dict) and "hash_ids" in fields:
                yield _from_mooncake(msgspec.convert(fields, MooncakeLine), number, ids)
            else:
                yield _from_line(msgspec.convert(fields, Line), number, ids)
        except RecursionError:
            raise ValueError(f"{path}, line {line_number}: it is nested too deeply for a request.") from None
        except (msgspec.MsgspecError, ValueError) as error:
            raise ValueError(f"{path}, line {line_number}: {error}") from None
        number += 1


def _from_line(line: Line, number: int, ids: PartIds) -> Arrival:
    given = {"prompt": line.prompt, "prompt_len": line.prompt_len, "parts": line.parts}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        raise ValueError("a request has one of `prompt`, `prompt_len` and `parts`; give exactly one of them.")
    [(name, value)] = given.items()
    prompt: Any = value
    if name == "prompt_len":
        prompt = TokenRuns([(ids.own(), _length("prompt_len", value))])
    elif name == "parts":
        prompt = TokenRuns((_part_id(part, ids), _length("a part", count)) for part, count in value)
    else:
        for token_id in value:
            _id("`prompt` must hold token ids", token_id, MAX_ID)
    if not len(prompt):
        raise ValueError(f"`{name}` is empty; give at least one token.")
    _length(f"the length of `{name}`", len(prompt))
    return Arrival(
        id=line.id or f"request-{number}",
        group=line.group or "all requests",
        prompt_token_ids=prompt,
        max_tokens=_length("max_tokens", line.max_tokens),
        at_s=_time("at_s", line.at_s, MAX_SECONDS),
        follows=line.follows,
    )


def _from_mooncake(line: MooncakeLine, number: int, ids: PartIds) -> Arrival:
    length = _length("input_length", line.input_length)
    num_blocks = -(-length // MOONCAKE_BLOCK)
    if len(line.hash_ids) not in (num_blocks, num_blocks - 1):
        raise ValueError(
            f"{len(line.hash_ids)} hash_ids do not fit an input_length of {length}; give one for every "
            f"{MOONCAKE_BLOCK} tokens ({num_blocks}, or {num_blocks - 1} without the last block)."
        )
    runs = []
    for index in range(num_blocks):
        named = index < len(line.hash_ids)
        count = min(MOONCAKE_BLOCK, length - index * MOONCAKE_BLOCK)
        block_id = _id("hash_ids must be", line.hash_ids[index], MOONCAKE_MAX_ID) if named else 0
        runs.append((MOONCAKE_FIRST_ID + block_id if named else ids.named(f"rest of {number}"), count))
    return Arrival(
        id=f"request-{number}",
        group="all requests",
        prompt_token_ids=TokenRuns(runs),
        max_tokens=_length("output_length", line.output_length),
        at_s=_time("timestamp", line.timestamp, MAX_SECONDS * 1000) / 1000,
    )


def _part_id(part: str | int, ids: PartIds) -> int:
    if isinstance(part, int):
        return _id("a part must be a name or a token id", part, MAX_ID)
    return ids.named(part) if part else ids.own()


def _id(what: str, value: int, most: int) -> int:
    if not 0 <= value <= most:
        raise ValueError(f"{what} >= 0 and <= {most}, got {value}.")
    return value


def _length(name: str, value: int) -> int:
    if not 1 <= value <= MAX_LEN:
        raise ValueError(f"{name} must be an integer >= 1 and <= {MAX_LEN}, got {value}.")
    return value


def _time(name: str, value: float, most: float) -> float:
    if not 0 <= value <= most:
        raise ValueError(f"{name} must be a finite number >= 0 and <= {most:g}, got {value:g}.")
    return value


def write_workload(workload: Workload, path: str | Path) -> None:
    """The file that `read_workload` makes the same arrivals of. ValueError for one that waits for a group's progress,
    which this form cannot say."""
    lines = []
    for a in workload.arrivals:
        if a.after:
            raise ValueError(f"{a.id} waits for the progress of a group, which a file cannot say; give it a time.")
        line = Line(max_tokens=a.max_tokens, at_s=a.at_s, id=a.id, group=a.group, follows=a.follows)
        if isinstance(a.prompt_token_ids, TokenRuns):
            line.parts = list(a.prompt_token_ids.runs)
        else:
            line.prompt = list(a.prompt_token_ids)
        lines.append(msgspec.json.encode(line) + b"\n")
    Path(path).write_bytes(b"".join(lines))
