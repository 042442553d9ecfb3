"""A class by its name: one of nanoserve's, or one of the user's own as `file.py:NAME`.

Knows seams by name and how a Python file is loaded, nothing of what the class does. Code of a user's is run for a name
that the user gave, never for one that was read from a file. Laws: tests/test_replay.py.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanoserve.blocks import KVCacheManager, PrivateBlocks
from nanoserve.config import SEAMS
from nanoserve.scheduler import BaseScheduler

WANTED = {
    "scheduler": "derives from BaseScheduler",
    "blocks": "derives from PrivateBlocks, or has all that KVCacheManager asks for",
}


def seam_class(seam: str, name: str) -> type:
    """The class of `seam` ("scheduler", "blocks") that bears the name on the command line (`unified`), in a trace
    (`UnifiedScheduler`), or in a file of the user's (`my.py:Mine`), which is run. ValueError that names the fix."""
    if ":" not in name:
        return known_class(seam, name)
    cls = load_class(name)
    if not fits(seam, cls):
        other = next((f"; it fits --{other}" for other in WANTED if fits(other, cls)), "")
        raise ValueError(f"--{seam} {name} is no class for it; give one that {WANTED[seam]}{other}.")
    return cls


def known_class(seam: str, name: str) -> type:
    """As `seam_class`, of nanoserve's own alone: what a file that anyone may have written can name."""
    for short, cls in SEAMS[seam].items():
        if name in (short, cls.__name__):
            return cls
    known = ", ".join(cls.__name__ for cls in SEAMS[seam].values())
    own = name.rpartition(":")[2]
    raise ValueError(f"{seam} {name!r} is none of {known}; give a class of your own as --{seam} FILE.py:{own}.")


def fits(seam: str, cls: type) -> bool:
    """Whether a class is what `WANTED` says."""
    if seam == "scheduler":
        return issubclass(cls, BaseScheduler)
    verbs = [verb for verb, value in vars(KVCacheManager).items() if inspect.isfunction(value) and verb[0] != "_"]
    return issubclass(cls, PrivateBlocks) or all(callable(getattr(cls, verb, None)) for verb in verbs)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """A ValueError for whatever goes wrong in code of a user's, SystemExit included: it must not end the command."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        message = str(error) if isinstance(error, ValueError) else told(error)
        raise ValueError(f"{what}: {message.rstrip('.')}.") from error


def told(error: BaseException) -> str:
    """Class and message; of an error that cannot even be told, the class."""
    try:
        message = str(error)
    except Exception:
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def load_class(spec: str) -> type:
    """`file.py:NAME`. The file is run, once a call. ValueError when there is no such file, it fails, or has no such
    class."""
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"{file!r} is no file; give a class of your own as FILE.py:NAME.")
    module_spec = importlib.util.spec_from_file_location(f"nanoserve_user_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"{file!r} is no Python file; give one that ends in .py.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up
    with refusing(f"{file} cannot be loaded"):
        module_spec.loader.exec_module(module)
    cls = vars(module).get(name)
    if not isinstance(cls, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ValueError(f"{file} has no class {name!r}; it has {', '.join(classes) or 'none'}.")
    return cls
