"""Small C++ sources of the package, built on first use and kept: `load("attention")` is `native/attention.cpp`.

A build is found again by what made it: source, flags, compiler and processor. Its file ends with a digest of itself,
so that a damaged one is built anew rather than loaded, and appears under its name all at once, whoever else builds it.
Knows nothing of what the code does. Imports torch, whose OpenMP runtime the code is to share. Laws:
tests/test_native.py.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from nanoserve.compilation import COMPILERS

SOURCES = Path(__file__).with_suffix("")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
BUILD_TIMEOUT_S = 300.0
DIGEST_BYTES = hashlib.sha256().digest_size


class BuildError(RuntimeError):
    """There is no such code on this machine, and one line says why."""


@functools.cache
def load(name: str) -> ctypes.CDLL:
    """The compiled code, once for the process. Raises BuildError."""
    import torch  # noqa: F401  (loaded first, it brings the one OpenMP runtime of the process)

    source = SOURCES / f"{name}.cpp"
    compiler = find_compiler()
    try:
        return _load_kept(source, compiler, cache_folder())
    except OSError:  # a home that cannot be written to: build it for this process alone
        try:
            with tempfile.TemporaryDirectory(prefix="nanoserve-") as folder:
                return _load_kept(source, compiler, Path(folder))
        except OSError as error:
            raise BuildError(f"{name}.cpp could not be built or loaded ({_one_line(error)})") from error


@functools.cache
def reason_not_to_load(name: str) -> str | None:
    """None where `load(name)` works: it has been loaded then."""
    try:
        load(name)
    except BuildError as error:
        return str(error)
    return None


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "nanoserve" / "native"


def find_compiler() -> str:
    """Path of $CXX, else of the first of the usual names. Raises BuildError."""
    given = os.environ.get("CXX")
    path = next(filter(None, map(shutil.which, [given] if given else COMPILERS)), None)
    if path is None:
        looked = f"CXX={given!r} is not on PATH" if given else f"none of {', '.join(COMPILERS)} is on PATH"
        raise BuildError(f"no C++ compiler: {looked}")
    return path


def build(source: Path, compiler: str, folder: Path) -> Path:
    """The library of a source, in `folder`: as it lies there, if it is whole. Raises BuildError, and OSError where
    the folder cannot be written to."""
    target = folder / f"{source.stem}-{_key(source, compiler)}.so"
    if _is_whole(target):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / target.name
        _run([compiler, *FLAGS, str(source), "-o", str(made)])
        with made.open("ab") as file:  # what follows the sections of a library is not looked at
            file.write(hashlib.sha256(made.read_bytes()).digest())
        made.replace(target)
    return target


def _load_kept(source: Path, compiler: str, folder: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(build(source, compiler, folder)))


def _is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _key(source: Path, compiler: str) -> str:
    parts = (source.read_bytes(), FLAGS, compiler, _run([compiler, "--version"]), platform.machine(), _cpu_flags())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _cpu_flags() -> str:
    """What -march=native looks at, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=BUILD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler {command[0]} does not run ({_one_line(error)})") from error
    if done.returncode:
        lines = done.stderr.splitlines()
        said = next((line for line in lines if "error" in line), lines[-1] if lines else "it does not say why")
        raise BuildError(f"the C++ compiler {command[0]} failed with {done.returncode} ({said.strip():.200})")
    return done.stdout


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
