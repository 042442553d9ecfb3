"""How long a call takes on the device: medians of timed calls, after warm-up, each with a cold L2 cache.

On a GPU by events around a replayed graph, so that neither the launching host nor what the call before left in the
cache is part of the figure. On a CPU by the clock, for dry checks only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

WARM_UPS, REPEATS = 3, 9
LEAST_FLUSH_BYTES = 2**28


class Timer:
    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._flush = None
        if self.device.type == "cuda":
            l2_bytes = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0)
            self._flush = torch.empty(max(4 * l2_bytes, LEAST_FLUSH_BYTES), dtype=torch.uint8, device=self.device)

    def seconds(self, run: Callable[[], Any], *, repeats: int = REPEATS) -> float:
        """The median; `run` must be something that a CUDA graph can capture."""
        for _ in range(WARM_UPS):
            run()
        return self._on_gpu(run, repeats) if self.device.type == "cuda" else self._on_cpu(run, repeats)

    def _on_gpu(self, run: Callable[[], Any], repeats: int) -> float:
        assert self._flush is not None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
        for begin, end in zip(begins, ends, strict=True):
            self._flush.zero_()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return median(begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)) / 1e3

    def _on_cpu(self, run: Callable[[], Any], repeats: int) -> float:
        times_s = []
        for _ in range(repeats):
            start_s = time.perf_counter()
            run()
            times_s.append(time.perf_counter() - start_s)
        return median(times_s)


def copy_bandwidth(timer: Timer, num_bytes: int) -> float:
    """Bytes a second that a copy reads and writes, counted both."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / timer.seconds(lambda: target.copy_(source))


def matmul_rate(timer: Timer, size: int, dtype: torch.dtype) -> float:
    """Operations a second of a square product of random matrices."""
    a, b = (torch.randn(size, size, dtype=dtype, device=timer.device) for _ in range(2))
    return 2 * size**3 / timer.seconds(lambda: a @ b)
