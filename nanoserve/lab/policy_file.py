"""Finds the class to grade: in a file of a user's, or a planted fault.

A scheduler derives from `BaseScheduler`; a block manager derives from `PrivateBlocks` or has all that `KVCacheManager`
asks for. Runs the file's own code: to be called in a child process. Raises ValueError in one line for all that is wrong
with a file.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from nanoserve.blocks import KVCacheManager, PrivateBlocks
from nanoserve.lab.mishaps import described
from nanoserve.scheduler import BaseScheduler

MODULE = "nanoserve_graded_policy"
SCHEDULER_VERBS = ("schedule", "update", "add", "abort")


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What to grade, as it can travel to another process: a class in a file, or a planted fault."""

    path: str = ""  # absolute
    class_name: str = ""  # "": the only one there is
    fault: str = ""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the child found there."""

    name: str
    seam: str
    base: str  # the class of the package that it derives from; "" for none


def load_class(policy: Policy) -> tuple[str, type]:
    """(field of the config, class)."""
    if policy.fault:
        from nanoserve.lab.faults import get_fault

        seam = get_fault(policy.fault).seam
        return next(iter(seam.items()))
    classes = find_classes(_import(Path(policy.path)))
    file = Path(policy.path).name
    if policy.class_name:
        if policy.class_name not in classes:
            there = f"it has {', '.join(classes)}" if classes else "it has none"
            raise ValueError(
                f"--class {policy.class_name}: {file} has no scheduler or block manager of that name; {there}."
            )
        return classes[policy.class_name]
    leaves = {
        name: found
        for name, found in classes.items()
        if not any(issubclass(other, found[1]) and other is not found[1] for _, other in classes.values())
    }
    if not leaves:
        raise ValueError(
            f"{file} has no class to grade; write one that derives from BaseScheduler, PrivateBlocks or one of theirs."
        )
    if len(leaves) > 1:
        raise ValueError(f"{file} has several classes to grade; name one with --class: {', '.join(leaves)}.")
    return next(iter(leaves.values()))


def describe(seam: str, cls: type) -> Found:
    base = next((one.__name__ for one in cls.__mro__[1:] if one.__module__.startswith("nanoserve.")), "")
    return Found(name=cls.__name__, seam=seam, base=base)


def find_classes(module: ModuleType) -> dict[str, tuple[str, type]]:
    """Name -> (seam, class), of the classes that the module defines itself."""
    found: dict[str, tuple[str, type]] = {}
    for name, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module.__name__ and (seam := _seam(value)):
            found[name] = (seam, value)
    return found


def _seam(cls: type) -> str:
    if issubclass(cls, BaseScheduler):
        return "scheduler"
    if issubclass(cls, PrivateBlocks) or all(callable(getattr(cls, verb, None)) for verb in _manager_verbs()):
        return "blocks"
    if all(callable(getattr(cls, verb, None)) for verb in SCHEDULER_VERBS):
        raise ValueError(
            f"class {cls.__name__} has the verbs of a scheduler, but not its queues, which the core reads; "
            "let it derive from BaseScheduler."
        )
    return ""


def _manager_verbs() -> list[str]:
    verbs: dict[str, Any] = dict(vars(KVCacheManager))
    return [name for name, value in verbs.items() if inspect.isfunction(value) and not name.startswith("_")]


def _import(path: Path) -> ModuleType:
    """The file as a module; its folder can be imported from, as for a script."""
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise ValueError(f"{path.name} is not a Python file; give one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        if error.filename not in (None, str(path)):  # of a file that it imports, or of a text that it compiles
            raise _refused(path, error) from error
        where = f", line {error.lineno}" if error.lineno else ""
        raise ValueError(f"{path.name}{where}: {error.msg}; the file is not valid Python.") from error
    except BaseException as error:
        raise _refused(path, error) from error
    return module


def _refused(path: Path, error: BaseException) -> ValueError:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f", line {lines[-1]}" if lines else ""
    return ValueError(f"{path.name}{where}: importing it ends in {described(error)}; mend the file first.")
