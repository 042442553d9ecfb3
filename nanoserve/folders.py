"""Where the package keeps what it has built, for one user of this machine. Laws: tests/test_native.py."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import stat
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/nanoserve, else ~/.cache/nanoserve, else, for a user without a home (as in a container), a
    folder of this user's own among the temporary ones. OSError where there are none of those either."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # any other is to be ignored, says the XDG specification: it would move with each start
        return Path(given) / "nanoserve"
    try:
        if os.path.isabs(home := os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir):
            return Path(home) / ".cache" / "nanoserve"
    except KeyError:  # no HOME, and no entry among the users
        pass
    return _private_folder(tempfile.gettempdir())


@functools.cache
def _private_folder(parent: str) -> Path:
    """The same from one start to the next, unless somebody else has put something in its place: what is in it is
    loaded as code."""
    path = Path(parent) / f"nanoserve-cache-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    seen = path.lstat()
    if stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid() and not seen.st_mode & 0o077:
        return path
    return Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=parent))
