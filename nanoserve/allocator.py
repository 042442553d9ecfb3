"""Keeps glibc from giving large buffers back to the kernel in every step: it would clear them for the next one.

Touches nothing under another C library. Knows no tensor. Laws: tests/test_allocator.py.
"""

from __future__ import annotations

import ctypes

# From glibc's malloc.h. Thresholds that were set are no longer moved by glibc itself.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
MIB = 2**20
SETTINGS = {
    M_MMAP_THRESHOLD: 256 * MIB,  # what is larger, a KV pool above all, is the kernel's again once it is freed
    M_TRIM_THRESHOLD: 2**31 - 1,
    M_TOP_PAD: 64 * MIB,
    M_ARENA_MAX: 1,  # the thread that runs steps allocates where the others do: an arena of its own ends at 64 MiB
}


def keep_freed_memory() -> bool:
    """For the whole process, from now on; False where there is nothing to be set. Idempotent."""
    libc = _glibc()
    return libc is not None and [libc.mallopt(*setting) for setting in SETTINGS.items()] == [1] * len(SETTINGS)


def release_freed_memory() -> None:
    """Give the kernel what is free now, once."""
    if libc := _glibc():
        libc.malloc_trim(ctypes.c_size_t(0))


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
