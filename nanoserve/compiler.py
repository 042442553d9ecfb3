"""The machine's C++ compiler: which one, whether it compiles, and a run of it that says in one line what is wrong.

Knows nothing of what is compiled (native.py: sources of the package; compilation.py: what torch generates). Laws:
tests/test_native.py, tests/test_compilation.py.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from nanoserve import supervised

COMPILERS = ("g++", "clang++", "c++")
PROBE_TIMEOUT_S = 20.0  # for a version, or two lines of code
PROBE = 'extern "C" int answer() {\n    return 42;\n}\n'


class BuildError(RuntimeError):
    """There is no such code on this machine, and one line says why."""


def find_compiler() -> str:
    """Path of $CXX, else of the first of the usual names. Raises BuildError."""
    given = os.environ.get("CXX")
    path = next(filter(None, map(shutil.which, [given] if given else COMPILERS)), None)
    if path is None:
        looked = f"CXX={given!r} is not on PATH" if given else f"none of {', '.join(COMPILERS)} is on PATH"
        raise BuildError(f"no C++ compiler: {looked}")
    return path


def run_compiler(command: list[str], *, timeout_s: float = PROBE_TIMEOUT_S, folder: Path | None = None) -> str:
    """What it prints. `folder`: for its temporary files (`supervised.run`). Raises BuildError."""
    try:
        done = supervised.run(command, timeout_s=timeout_s, folder=folder)
    except subprocess.TimeoutExpired:
        raise BuildError(f"the C++ compiler {command[0]} has not ended after {timeout_s:g} s") from None
    except OSError as error:
        raise BuildError(f"the C++ compiler {command[0]} does not run ({one_line(error)})") from error
    if done.returncode:
        lines = done.stderr.splitlines()
        said = next((line for line in lines if "error" in line), lines[-1] if lines else "it does not say why")
        raise BuildError(f"the C++ compiler {command[0]} failed with {done.returncode} ({said.strip():.200})")
    return done.stdout


def version(compiler: str) -> str:
    """What it answers to --version, asked once in a process. Raises BuildError."""
    answer = _version(compiler)
    if isinstance(answer, BuildError):
        raise answer
    return answer


@functools.cache
def _version(compiler: str) -> str | BuildError:
    try:
        return run_compiler([compiler, "--version"])
    except BuildError as error:  # kept, too: to one that hangs nobody waits twice
        return error


@functools.cache
def reason_not_to_compile(compiler: str) -> str | None:
    """None where it makes a library of two lines, tried once in a process."""
    try:
        if not version(compiler).strip():
            return f"{compiler} does not answer to --version"
    except BuildError as error:
        return f"{compiler} does not answer to --version: {error}"
    try:
        with tempfile.TemporaryDirectory(prefix="nanoserve-probe-", ignore_cleanup_errors=True) as name:
            source = Path(name, "probe.cpp")
            source.write_text(PROBE)
            made = source.with_suffix(".so")
            run_compiler([compiler, "-shared", "-fPIC", str(source), "-o", str(made)], folder=source.parent)
            return None if made.is_file() else f"the C++ compiler {compiler} ended well and made no file"
    except BuildError as error:
        return str(error)
    except OSError as error:
        return f"there is no folder to try the C++ compiler {compiler} in ({one_line(error)})"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
