"""One part of the check, in a process of its own: takes measurements in order, and writes each down as it ends.

`python -m gpu_check.part '{"name": ...}'` imports the part's module and calls its `run(part)`. What a part learned
before its time ran out is in its file: a measurement that does not fit into what is left is not begun, and says so.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
PASSED, FAILED, RUNNING, TIMED_OUT, SKIPPED = "passed", "failed", "running", "timed out", "skipped"
SPARE_S = 2.0  # before its process is ended, a part ends by itself


@dataclass(slots=True, kw_only=True)
class Part:
    """What a part is told, and what it has found so far."""

    name: str
    module: str
    path: Path
    machine: dict[str, Any]
    dry: bool  # tiny sizes, on the CPU
    limit_s: float
    began_s: float  # of the whole check, on the monotonic clock that all processes share
    start_s: float = field(default_factory=time.monotonic)
    results: dict[str, Any] = field(default_factory=dict)
    lines: list[list[str]] = field(default_factory=list)  # of the table: what, figure
    failures: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)  # for want of time
    skipped: dict[str, str] = field(default_factory=dict)  # because there is no point in it here

    @property
    def left_s(self) -> float:
        return self.start_s + self.limit_s - SPARE_S - time.monotonic()

    def say(self, text: str) -> None:
        say(self.began_s, f"{self.name}: {text}")

    def attempt(self, name: str, needs_s: float, run: Callable[[], T]) -> T | None:
        """The result of `run`, if there is time for it and it does not fail; else None, and why is written down."""
        if self.left_s < needs_s:
            self.not_run[name] = f"takes about {needs_s:.0f} s, and {max(0.0, self.left_s):.0f} s were left"
            self.say(f"{name}: not run, {self.not_run[name]}")
            self.write()
            return None
        self.say(name)
        try:
            return run()
        except Exception as error:
            self.fail(name, f"{type(error).__name__}: {error}")
            traceback.print_exc()
            return None
        finally:
            self.write()

    def keep(self, name: str, result: Any, *lines: tuple[str, str]) -> None:
        """A result, as JSON, and the lines of the table that tell it."""
        self.results[name] = result
        for what, figure in lines:
            self.lines.append([what, figure])
            self.say(f"{what}: {figure}")
        self.write()

    def fail(self, name: str, why: str) -> None:
        self.failures[name] = why
        self.say(f"{name}: FAILED, {why.splitlines()[0] if why else why}")
        self.write()

    def skip(self, name: str, why: str) -> None:
        self.skipped[name] = why
        self.say(f"{name}: skipped, {why}")
        self.write()

    def write(self, status: str = RUNNING) -> None:
        report = {
            "part": self.name,
            "status": status,
            "dry": self.dry,
            "machine": self.machine,
            "seconds": round(time.monotonic() - self.start_s, 2),
            "limit_s": self.limit_s,
            "results": self.results,
            "lines": self.lines,
            "failures": self.failures,
            "not_run": self.not_run,
            "skipped": self.skipped,
        }
        write_json(self.path, report)

    def end(self) -> None:
        """A part that found nothing has not passed."""
        empty = SKIPPED if self.skipped or self.not_run else FAILED
        self.write(FAILED if self.failures else PASSED if self.results else empty)


def write_json(path: Path, content: Any) -> None:
    """As a whole or not at all: whoever reads it may end this process at any moment."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def say(began_s: float, text: str) -> None:
    print(f"[{time.monotonic() - began_s:6.1f} s] {text}", file=sys.stderr, flush=True)


def main() -> None:
    told = json.loads(sys.argv[1])
    part = Part(**{**told, "path": Path(told["path"])})
    part.write()
    try:
        importlib.import_module(part.module).run(part)
    except Exception as error:
        part.fail(part.name, f"{type(error).__name__}: {error}")
        traceback.print_exc()
    part.end()


if __name__ == "__main__":
    main()
