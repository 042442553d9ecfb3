"""A bound on what this process may allocate, so that a policy that eats memory fails alone. Linux; elsewhere none."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def limit_memory(num_bytes: int) -> None:
    """That much more than now; an allocation beyond it raises MemoryError."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def lift_memory_limit() -> None:
    """To tell what happened takes some, too."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
