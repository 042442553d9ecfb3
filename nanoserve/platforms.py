"""The machines an engine runs on: CPU, NVIDIA, AMD. What differs between them is asked of a `Platform`.

Owns device names, defaults and memory questions; knows no model and no cache. `resolve_platform` looks at the
machine once, when the engine is built. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from nanoserve.allocator import release_freed_memory
from nanoserve.attention import TorchAttention
from nanoserve.compilation import CompileMode
from nanoserve.cpu_attention import CpuAttention
from nanoserve.cpu_ops import CpuOps
from nanoserve.graphs import GraphMode, GraphSupport
from nanoserve.native import reason_not_to_load
from nanoserve.ops import Ops, TorchOps, TritonOps
from nanoserve.triton_attention import TritonAttention

if TYPE_CHECKING:
    import torch

    from nanoserve.attention import AttentionBackend

GIB = 2**30
CPU_POOL_BYTES = 2 * GIB
CPU_POOL_SHARE = 0.5  # of what is available: the rest of the machine wants to live too
SMALL_MODEL = 10_000_000  # parameters
GPU_POOL_SHARE = 0.85  # of what is free once the weights are loaded: activations take the rest
PLATFORM_NAMES = ("auto", "cpu", "cuda", "rocm")


class GraphPool(Protocol):
    """Captures work on static memory; what all its graphs need beside that, they share."""

    @property
    def kind(self) -> str:
        """What its replays are."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of the device's memory that its graphs hold, static memory aside. Ask when the last one is captured, and
        before anything else is allocated."""
        ...

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """The replay of `run`."""
        ...


class Platform(Protocol):
    """One kind of machine. Mirrors `vllm/platforms/interface.py: Platform`, without its global instance."""

    name: ClassVar[str]  # as in `device=`
    torch_device: ClassVar[str]
    default_dtype: ClassVar[str]  # for dtype="auto"; "auto" here: the checkpoint's own
    default_attention: ClassVar[type[AttentionBackend]]
    default_ops: ClassVar[type[Ops]]
    default_compile: ClassVar[CompileMode]
    default_graph_mode: ClassVar[GraphMode]
    graph_kind: ClassVar[str]  # what replays captured work
    launches: ClassVar[bool]  # the host only launches a step, and the device works on its own

    @property
    def device(self) -> torch.device: ...

    def kv_cache_bytes(self, reserved_bytes: int = 0) -> int:
        """Bytes that the KV pool may take on this machine, now: ask after the weights are loaded, or say how many
        bytes they will take."""
        ...

    def num_threads(self, num_parameters: int) -> int:
        """CPU threads for the steps of a model of that size."""
        ...

    def spares_a_core(self, num_threads: int) -> bool:
        """Whether steps that take so many threads of the CPU leave the host one to go on with."""
        ...

    def free_bytes(self) -> int:
        """Of the device's memory, now."""
        ...

    def release_memory(self) -> None:
        """Give back what torch holds but nobody uses."""
        ...

    def graph_support(self, attention: type[AttentionBackend]) -> GraphSupport: ...

    def graph_pool(self, *, is_compiled: bool) -> GraphPool: ...


class CpuPlatform:
    name: ClassVar[str] = "cpu"
    torch_device: ClassVar[str] = "cpu"
    default_dtype: ClassVar[str] = "float32"  # 16-bit products are slower on most CPUs
    default_attention: ClassVar[type[AttentionBackend]] = CpuAttention
    default_ops: ClassVar[type[Ops]] = CpuOps
    default_compile: ClassVar[CompileMode] = CompileMode.NONE  # half a minute of compiling, for little
    default_graph_mode: ClassVar[GraphMode] = GraphMode.FULL_AND_PIECEWISE
    graph_kind: ClassVar[str] = "recorded calls of compiled code"
    launches: ClassVar[bool] = False

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

    def spares_a_core(self, num_threads: int) -> bool:
        """One thread only: more would be a team for the host and another one for its stream, in each other's way."""
        return num_threads == 1 < num_cpus()

    def free_bytes(self) -> int:
        return available_memory()

    def release_memory(self) -> None:
        release_freed_memory()

    def graph_support(self, attention: type[AttentionBackend]) -> GraphSupport:
        return GraphSupport.ALWAYS  # what cannot be recorded is run again, and may look at the batch each time

    def graph_pool(self, *, is_compiled: bool) -> GraphPool:
        from nanoserve.cpu_graphs import CpuGraphPool

        return CpuGraphPool(is_compiled=is_compiled)


class CudaPlatform:
    name: ClassVar[str] = "cuda"
    torch_device: ClassVar[str] = "cuda"
    default_dtype: ClassVar[str] = "auto"
    default_attention: ClassVar[type[AttentionBackend]] = TritonAttention
    default_ops: ClassVar[type[Ops]] = TritonOps
    default_compile: ClassVar[CompileMode] = CompileMode.LAYERS
    default_graph_mode: ClassVar[GraphMode] = GraphMode.FULL_AND_PIECEWISE
    graph_kind: ClassVar[str] = "CUDA graphs"
    launches: ClassVar[bool] = True

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device(self.torch_device)

    def kv_cache_bytes(self, reserved_bytes: int = 0) -> int:
        return int(GPU_POOL_SHARE * max(0, self.free_bytes() - reserved_bytes))

    def num_threads(self, num_parameters: int) -> int:
        return 1  # it only launches

    def spares_a_core(self, num_threads: int) -> bool:
        return False  # the device has streams of its own

    def free_bytes(self) -> int:
        import torch

        return torch.cuda.mem_get_info()[0]

    def release_memory(self) -> None:
        import gc

        import torch

        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def graph_support(self, attention: type[AttentionBackend]) -> GraphSupport:
        return attention.graph_support

    def graph_pool(self, *, is_compiled: bool) -> GraphPool:
        return CudaGraphPool(self.graph_kind, self.free_bytes)


class RocmPlatform(CudaPlatform):
    """AMD: torch answers to the name `cuda` there."""

    name: ClassVar[str] = "rocm"
    graph_kind: ClassVar[str] = "HIP graphs"


class CudaGraphPool:
    """Captures on a stream of its own. Without `torch.cuda.graph`, which collects garbage at each of the thousand or
    so captures that a model in pieces needs."""

    def __init__(self, kind: str, free_bytes: Callable[[], int]) -> None:
        import torch

        self.kind = kind
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._free_bytes, self._reserved_bytes = free_bytes, torch.cuda.memory_reserved
        self._before: tuple[int, int] | None = None  # the first capture: bytes that were free, and that torch had

    @property
    def num_bytes(self) -> int:
        """As the driver has it, which gives graphs, and the kernels that are loaded for them, memory that torch does
        not know of; at least what torch knows of, whatever others on the device let go of meanwhile. Mirrors
        `vllm/v1/worker/gpu_model_runner.py: capture_model`."""
        if self._before is None:
            return 0
        free, reserved = self._before
        return max(free - self._free_bytes(), self._reserved_bytes() - reserved)

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        import torch

        self._before = self._before or (self._free_bytes(), self._reserved_bytes())
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()  # as it is: kernels are compiled and libraries set up, which cannot be captured
            self._stream.synchronize()
            graph.capture_begin(pool=self._memory)
            try:
                run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


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


def resolve_attention(
    platform: Platform, asked: type[AttentionBackend] | None, dtype: torch.dtype | None = None
) -> tuple[type[AttentionBackend], str]:
    """The backend to use for a model of that dtype (None: not known before it is loaded), and why. ValueError for one
    that does not run there."""
    return _resolve("attention", asked, platform.default_attention, TorchAttention, platform, dtype)


def resolve_ops(
    platform: Platform, asked: type[Ops] | None, dtype: torch.dtype | None = None, *, is_compiled: bool
) -> tuple[type[Ops], str]:
    """The operations to use, and why: fused by hand, unless a compiler will do it. ValueError as above, and for
    operations that cannot be compiled."""
    if is_compiled and asked is None:
        return TorchOps, "the compiler fuses them"
    ops, why = _resolve("ops", asked, platform.default_ops, TorchOps, platform, dtype)
    if is_compiled and ops is TritonOps and interprets_triton():
        raise ValueError("ops=TritonOps cannot be compiled while kernels are interpreted; use compile='none'.")
    if is_compiled and ops is CpuOps:
        raise ValueError("ops=CpuOps cannot be compiled; use compile='none', or leave it out.")
    return ops, why


class Kernels(Protocol):
    """What backends and operations have in common."""

    platforms: ClassVar[tuple[str, ...]]
    dtypes: ClassVar[tuple[str, ...]]


T = TypeVar("T", bound=Kernels)


def _resolve(
    seam: str, asked: type[T] | None, default: type[T], plain: type[T], platform: Platform, dtype: torch.dtype | None
) -> tuple[type[T], str]:
    """`plain` runs everywhere."""
    name = str(dtype).removeprefix("torch.")
    if asked is None:
        if dtype and name not in default.dtypes:
            return plain, f"{default.__name__} is for {' and '.join(default.dtypes)}"
        if reason := reason_against(default):
            return plain, f"{default.__name__} cannot run: {reason}"
        return default, f"the default on {platform.name}"
    chosen, instead = f"{seam}={asked.__name__}", plain.__name__
    if _is_triton(asked) and not has_triton():
        raise ValueError(f"{chosen} needs triton; pip install 'nanoserve[gpu]', or use {instead}.")
    if platform.name not in asked.platforms and not (_is_triton(asked) and interprets_triton()):
        raise ValueError(
            f"{chosen} runs on {' and '.join(asked.platforms)}, not on {platform.name}; leave it out for "
            f"{default.__name__}."
        )
    if dtype and name not in asked.dtypes:
        raise ValueError(f"{chosen} is for dtype={' and '.join(asked.dtypes)}, not {name}; use {instead}.")
    if reason := reason_against(asked):
        raise ValueError(
            f"{chosen} cannot run: {reason}; install a C++ compiler (Debian: apt install g++), set CXX, or use "
            f"{instead}."
        )
    return asked, "asked for"


def reason_against(kernels: type[Kernels]) -> str | None:
    """What this machine lacks for them; None: nothing, and what they need has been compiled."""
    if _is_triton(kernels):
        return None if has_triton() else "triton is not installed"
    name = {CpuAttention: "attention", CpuOps: "ops"}.get(kernels)
    return reason_not_to_load(name) if name else None


def _is_triton(kernels: type[Kernels]) -> bool:
    return kernels in (TritonAttention, TritonOps)


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def interprets_triton() -> bool:
    """Whether kernels run in Triton's interpreter: on any machine, and a thousand times slower. For tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


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
