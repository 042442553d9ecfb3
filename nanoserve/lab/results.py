"""Figures that were measured and committed, for a reader whose machine cannot measure them.

In a clone they lie in benchmarks/results, in an installed package beside the lessons. Laws: tests/test_lessons.py.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any


def read_result(name: str) -> dict[str, Any]:
    """The content of NAME.json. ValueError when there is none."""
    package = Path(str(files("nanoserve")))
    for folder in (package / "results", package.parent / "benchmarks" / "results"):
        if (path := folder / f"{name}.json").is_file():
            return json.loads(path.read_text(encoding="utf-8"))
    raise ValueError(f"no result {name!r} is installed; reinstall nanoserve, or take it from its repository.")
