"""Which packages this machine lacks, and their installation from a folder of wheels into a folder of our own.

Standard library only: it runs before anything is there. The machine's own packages are neither changed nor replaced.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEEL_LIST = ROOT / "scripts" / "gpu_wheels.txt"
PIP_TIMEOUT_S = 60.0


def pinned(path: Path = WHEEL_LIST) -> list[str]:
    """The requirements of the list, `name==version`."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def least_versions(path: Path = ROOT / "pyproject.toml") -> dict[str, str]:
    """Name -> the oldest version that the project allows."""
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    found = (re.match(r"([\w-]+)>=([\d.]+)", line) for line in [*project["dependencies"], *extras["serve"]])
    return {match[1].replace("_", "-"): match[2] for match in found if match}


def missing(requirements: list[str], least: dict[str, str]) -> list[str]:
    """Those that are absent, or older than the project allows."""
    return [wanted for wanted in requirements if not _is_there(wanted.partition("==")[0], least)]


def _is_there(name: str, least: dict[str, str]) -> bool:
    try:
        there = metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return numbers(there) >= numbers(least.get(name, "0"))


def numbers(version: str) -> tuple[int, ...]:
    """The release of a version: (2, 11, 0) of 2.11.0+cu130."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def install(requirements: list[str], wheels: Path, target: Path) -> None:
    """Exactly these, from that folder. RuntimeError with pip's reason when one is not there or does not fit."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    command += ["--no-deps", "--no-compile", "-f", str(wheels), "--target", str(target), *requirements]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"WHEELS={wheels} did not do: {done.stderr.strip() or done.stdout.strip()}")
