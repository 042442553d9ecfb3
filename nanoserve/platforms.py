"""The machines an engine runs on: CPU, NVIDIA, AMD. What differs between them is asked of a `Platform`.

Owns device names, defaults and memory questions; knows no model and no cache. `resolve_platform` looks at the
machine once, when the engine is built. Imports no torch.
"""

from __future__ import annotations

import os
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from nanoserve.attention import TorchAttention

if TYPE_CHECKING:
    import torch

    from nanoserve.attention import AttentionBackend

GIB = 2**30
CPU_POOL_BYTES = 2 * GIB
CPU_POOL_SHARE = 0.5  # of what is available: the rest of the machine wants to live too
SMALL_MODEL = 10_000_000  # parameters
GPU_POOL_SHARE = 0.85  # of what is free once the weights are loaded: activations take the rest
PLATFORM_NAMES = ("auto", "cpu", "cuda", "rocm")


class Platform(Protocol):
    """One kind of machine. Mirrors `vllm/platforms/interface.py: Platform`, without its global instance."""

    name: ClassVar[str]  # as in `device=`
    torch_device: ClassVar[str]
    default_dtype: ClassVar[str]  # for dtype="auto"; "auto" here: the checkpoint's own
    default_attention: ClassVar[type[AttentionBackend]]

    @property
    def device(self) -> torch.device: ...

    def kv_cache_bytes(self, reserved_bytes: int = 0) -> int:
        """Bytes that the KV pool may take on this machine, now: ask after the weights are loaded, or say how many
        bytes they will take."""
        ...

    def num_threads(self, num_parameters: int) -> int:
        """CPU threads for the steps of a model of that size."""
        ...

    def queue(self, num_threads: int) -> Executor | None:
        """What runs steps in order while the host goes on; None: the device has such a queue of its own."""
        ...


class CpuPlatform:
    name: ClassVar[str] = "cpu"
    torch_device: ClassVar[str] = "cpu"
    default_dtype: ClassVar[str] = "float32"  # 16-bit products are slower on most CPUs
    default_attention: ClassVar[type[AttentionBackend]] = TorchAttention

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device(self.torch_device)

    def kv_cache_bytes(self, reserved_bytes: int = 0) -> int:
        return min(CPU_POOL_BYTES, int(CPU_POOL_SHARE * max(0, available_memory() - reserved_bytes)))

    def num_threads(self, num_parameters: int) -> int:
        """As OMP_NUM_THREADS says. Else one for a small model, whose products are over before a second is awake."""
        if "OMP_NUM_THREADS" in os.environ:
            import torch

            return torch.get_num_threads()
        return 1 if num_parameters < SMALL_MODEL else num_cpus()

    def queue(self, num_threads: int) -> Executor | None:
        """A thread: operations of torch let go of the interpreter lock while they compute."""
        import torch

        return ThreadPoolExecutor(1, "nanoserve-step", torch.set_num_threads, (num_threads,))


class CudaPlatform:
    name: ClassVar[str] = "cuda"
    torch_device: ClassVar[str] = "cuda"
    default_dtype: ClassVar[str] = "auto"
    default_attention: ClassVar[type[AttentionBackend]] = TorchAttention

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device(self.torch_device)

    def kv_cache_bytes(self, reserved_bytes: int = 0) -> int:
        import torch

        free, _ = torch.cuda.mem_get_info()
        return int(GPU_POOL_SHARE * max(0, free - reserved_bytes))

    def num_threads(self, num_parameters: int) -> int:
        return 1  # it only launches

    def queue(self, num_threads: int) -> Executor | None:
        return None


class RocmPlatform(CudaPlatform):
    """AMD: torch answers to the name `cuda` there."""

    name: ClassVar[str] = "rocm"


def resolve_platform(device: str) -> Platform:
    """The platform of that name; "auto": the GPU that torch can use, else the CPU.

    Raises ValueError for a name that is not known, or a GPU that is not there.
    """
    if device not in PLATFORM_NAMES:
        raise ValueError(
            f"device={device!r} is not supported; use one of {', '.join(PLATFORM_NAMES)} "
            "(CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES choose among several GPUs)."
        )
    if device == "cpu":
        return CpuPlatform()
    found = _gpu_platform()
    if device == "auto":
        return found or CpuPlatform()
    if found is None or found.name != device:
        there = f"torch sees {found.name} here" if found else f"torch sees no GPU here ({_torch_build()})"
        instead = found.name if found else "cpu"
        raise ValueError(f"device={device!r} was asked for, but {there}; use device={instead!r}.")
    return found


def _gpu_platform() -> Platform | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return RocmPlatform() if torch.version.hip else CudaPlatform()


def _torch_build() -> str:
    import torch

    kind = torch.version.hip or torch.version.cuda
    return f"torch {torch.__version__}" + ("" if kind else ", a build without GPU support")


def num_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Bytes that can be allocated without swapping; never more than the container's limit (cgroup v2)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit))
