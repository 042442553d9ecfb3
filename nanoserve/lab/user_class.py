"""A class by its name: one of nanoserve's, or one of the user's own as `file.py:NAME`.

Knows seams by name and how a Python file is loaded, nothing of what the class does.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from nanoserve.config import SEAMS


def seam_class(seam: str, name: str) -> type:
    """The class of `seam` ("scheduler", "blocks") that bears the name on the command line (`unified`), in a trace
    (`UnifiedScheduler`), or in a file of the user's (`my.py:Mine`). ValueError that names the fix."""
    if ":" in name:
        return load_class(name)
    for short, cls in SEAMS[seam].items():
        if name in (short, cls.__name__):
            return cls
    known = ", ".join(cls.__name__ for cls in SEAMS[seam].values())
    raise ValueError(f"{seam} {name!r} is none of {known}; give a class of your own as --{seam} FILE.py:{name}.")


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
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{file} cannot be loaded: {type(error).__name__}: {error}.") from error
    cls = vars(module).get(name)
    if not isinstance(cls, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ValueError(f"{file} has no class {name!r}; it has {', '.join(classes) or 'none'}.")
    return cls
