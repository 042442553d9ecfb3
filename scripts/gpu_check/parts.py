"""Runs the parts one after the other, each in a process of its own that is ended when its time is over.

Standard library only. A part that hangs, dies or fails stops none of the others: what it wrote until then is kept, with
what became of it. Time that a part leaves over goes to the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpu_check.part import FAILED, PASSED, RUNNING, SKIPPED, TIMED_OUT, say, write_json

TOTAL_S = 510.0  # for all parts together
GRACE_S = 5.0  # from asking a part to end to ending it


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part: the module with its `run`, and its share of the time."""

    module: str
    share_s: float
    is_fixed: bool = False  # the share is its limit, whatever others leave


PARTS: Mapping[str, PartSpec] = MappingProxyType(
    {
        "kernels": PartSpec("gpu_check.kernels", 60.0),
        "graphs": PartSpec("gpu_check.graphs", 105.0),
        "ladder": PartSpec("gpu_check.ladder", 180.0),
        "speed": PartSpec("gpu_check.speed", 85.0),
        "step_gap": PartSpec("gpu_check.step_gap", 80.0),
    }
)


def chosen(only: str | None, limits: list[str]) -> dict[str, PartSpec]:
    """The parts to run, with the limits that the user set. ValueError for a name that is not known."""
    names = [name.strip() for name in only.split(",")] if only is not None else list(PARTS)
    parts = {name: PARTS[_known(name, "--only")] for name in names}
    for text in limits:
        name, _, seconds = text.partition("=")
        spec = PARTS[_known(name, "--limit")]
        try:
            limit_s = float(seconds)
        except ValueError:
            limit_s = 0.0
        if not 0 < limit_s <= 3600:
            raise ValueError(f"--limit {text} is not PART=SECONDS with seconds in (0, 3600]; say --limit {name}=60.")
        if name in parts:
            parts[name] = replace(spec, share_s=limit_s, is_fixed=True)
    return parts


def _known(name: str, flag: str) -> str:
    if name not in PARTS:
        raise ValueError(f"{flag} names {name!r}, which is no part; use some of {','.join(PARTS)}.")
    return name


def run_parts(
    parts: Mapping[str, PartSpec],
    out: Path,
    *,
    machine: Mapping[str, Any],
    dry: bool,
    env: Mapping[str, str],
    cwd: Path,
    began_s: float,
) -> dict[str, dict[str, Any]]:
    """The reports of all parts, by name; each is in `out` as well, as NAME.json."""
    reports = {}
    end_s = time.monotonic() + TOTAL_S
    names = list(parts)
    for index, name in enumerate(names):
        spec = parts[name]
        later_s = sum(parts[other].share_s for other in names[index + 1 :])
        limit_s = spec.share_s if spec.is_fixed else max(spec.share_s, end_s - time.monotonic() - later_s)
        told = {
            "name": name,
            "module": spec.module,
            "path": str(out / f"{name}.json"),
            "machine": dict(machine),
            "dry": dry,
            "limit_s": round(limit_s, 1),
            "began_s": began_s,
        }
        say(began_s, f"{name}: begins, {limit_s:.0f} s at most")
        reports[name] = _run_part(told, env=env, cwd=cwd)
        say(began_s, f"{name}: {reports[name]['status']} after {reports[name]['seconds']:.1f} s")
    return reports


def _run_part(told: dict[str, Any], *, env: Mapping[str, str], cwd: Path) -> dict[str, Any]:
    path, start_s = Path(told["path"]), time.monotonic()
    path.unlink(missing_ok=True)  # of a check before this one
    command = [sys.executable, "-m", "gpu_check.part", json.dumps(told)]
    process = subprocess.Popen(command, env={**os.environ, **env}, cwd=cwd, stdin=subprocess.DEVNULL, stdout=2,
                               start_new_session=True)  # fmt: skip
    status, why = FAILED, ""
    try:
        code = process.wait(told["limit_s"])
        why = "" if code == 0 else f"its process {_describe_exit(code)}"
    except subprocess.TimeoutExpired:
        status, why = TIMED_OUT, f"was ended after its limit of {told['limit_s']:g} s"
    finally:
        _end_group(process)
    report = _read_report(told, path)
    if report["status"] == RUNNING and not why:
        why = "its process ended before the part did"
    if why:
        report |= {"status": status, "failures": {**report["failures"], told["name"]: why}}
    report["seconds"] = round(time.monotonic() - start_s, 2)
    write_json(path, report)
    return report


def _describe_exit(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """The part and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def _read_report(told: dict[str, Any], path: Path) -> dict[str, Any]:
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    empty: dict[str, Any] = {"results": {}, "lines": [], "failures": {}, "not_run": {}, "skipped": {}}
    head = {"part": told["name"], "status": RUNNING, "seconds": 0.0}
    return head | {key: told[key] for key in ("dry", "machine", "limit_s")} | empty


def is_good(reports: Mapping[str, dict[str, Any]]) -> bool:
    return all(report["status"] in (PASSED, SKIPPED) for report in reports.values())
