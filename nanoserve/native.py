"""Small C++ sources of the package, built on first use and kept: `load("attention")` is `native/attention.cpp`.

A build is found again by what made it: source, flags, compiler and processor. Its file ends with a digest of itself,
so that a damaged one is built anew rather than loaded, and appears under its name all at once, whoever else builds it.
What builds that were killed have left goes at the next one. A terminal is told of a build. Knows nothing of what the
code does. Imports torch, whose OpenMP runtime the code is to share. Laws: tests/test_native.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

from nanoserve import folders
from nanoserve.compiler import BuildError, find_compiler, one_line, reason_not_to_compile, run_compiler, version

SOURCES = Path(__file__).with_suffix("")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
BUILD_TIMEOUT_S = 300.0
SCRATCH_PREFIX = "tmp"
STALE_S = 2 * BUILD_TIMEOUT_S  # no build is as old
DIGEST_BYTES = hashlib.sha256().digest_size


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
            raise BuildError(f"{name}.cpp could not be built or loaded ({one_line(error)})") from error


@functools.cache
def reason_not_to_load(name: str) -> str | None:
    """None where `load(name)` works: it has been loaded then."""
    try:
        load(name)
    except BuildError as error:
        return str(error)
    return None


def cache_folder() -> Path:
    return folders.cache_folder() / "native"


def build(source: Path, compiler: str, folder: Path) -> Path:
    """The library of a source, in `folder`: as it lies there, if it is whole. Raises BuildError, and OSError where
    the folder cannot be written to."""
    target = folder / f"{source.stem}-{_key(source, compiler)}.so"
    if _is_whole(target):
        return target
    if (reason := reason_not_to_compile(compiler)) is not None:
        raise BuildError(reason)
    folder.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder)
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=folder, ignore_cleanup_errors=True) as scratch:
        made = Path(scratch) / target.name
        command = [compiler, *FLAGS, str(source), "-o", str(made)]
        if sys.stderr.isatty():  # somebody waits for it
            print(f"nanoserve: compiling {source.name} for this processor", file=sys.stderr, flush=True)
        run_compiler(command, timeout_s=BUILD_TIMEOUT_S, folder=Path(scratch))
        with made.open("ab") as file:  # what follows the sections of a library is not looked at
            file.write(hashlib.sha256(made.read_bytes()).digest())
        made.replace(target)
    return target


def _remove_stale(folder: Path) -> None:
    """What builds that were killed have left."""
    for scratch in folder.glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - scratch.stat().st_mtime > STALE_S:
                shutil.rmtree(scratch, ignore_errors=True)


def _load_kept(source: Path, compiler: str, folder: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(build(source, compiler, folder)))


def _is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _key(source: Path, compiler: str) -> str:
    parts = (source.read_bytes(), FLAGS, compiler, version(compiler), platform.machine(), _cpu_flags())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _cpu_flags() -> str:
    """What -march=native looks at, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))
