"""Laws of the allocator's settings: large buffers stay with the process, and nothing happens without glibc."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from nanoserve import allocator
from nanoserve.allocator import keep_freed_memory, release_freed_memory

# Page faults of filling a fresh tensor of 64 MiB once the heap has settled, on the main thread and on another; and how
# many MiB a release gives back.
COUNT = """
    import resource, torch
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path
    from nanoserve.allocator import keep_freed_memory, release_freed_memory
    torch.set_num_threads(1)
    KEEP
    def faults():
        for _ in range(24):
            torch.ones(2**24)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20
    print(faults(), ThreadPoolExecutor(1).submit(faults).result(), end=" ")
    before = resident()
    release_freed_memory()
    print(before - resident())
"""
PAGES = 2**24 * 4 // 4096


def count(keep: str) -> tuple[int, int, int]:
    code = textwrap.dedent(COUNT).replace("KEEP", keep)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    main, thread, released = map(int, done.stdout.split())
    return main, thread, released


def test_every_large_buffer_is_cleared_by_the_kernel_once_at_most():
    main, thread, released = count("assert keep_freed_memory() and keep_freed_memory()")
    assert main < PAGES / 10
    assert thread < PAGES / 10
    assert released >= 60


def test_without_the_settings_it_is_cleared_every_time():
    main, thread, _ = count("")
    assert min(main, thread) > PAGES / 10


def test_without_glibc_nothing_is_set(monkeypatch):
    monkeypatch.setattr(allocator, "_glibc", lambda: None)
    assert not keep_freed_memory()
    release_freed_memory()
