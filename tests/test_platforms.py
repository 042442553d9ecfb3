"""Laws of platforms: what is asked for is there or refused by name, and the KV pool leaves room for the machine."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from checkpoints import write_checkpoint

from nanoserve import platforms
from nanoserve.attention import TorchAttention
from nanoserve.compilation import CompileMode
from nanoserve.config import EngineConfig
from nanoserve.cpu_attention import CpuAttention
from nanoserve.cpu_ops import CpuOps
from nanoserve.graphs import GraphMode, GraphSupport
from nanoserve.ops import TorchOps, TritonOps
from nanoserve.platforms import (
    GIB,
    CpuPlatform,
    CudaGraphPool,
    CudaPlatform,
    RocmPlatform,
    available_memory,
    resolve_attention,
    resolve_ops,
    resolve_platform,
)
from nanoserve.runner import EagerRunner
from nanoserve.triton_attention import TritonAttention

MIB = 2**20


def pretend(monkeypatch: pytest.MonkeyPatch, *, gpu: bool, hip: str | None = None, cuda: str | None = None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)


def test_every_machine_has_its_own_auto(monkeypatch):
    pretend(monkeypatch, gpu=False)
    assert isinstance(resolve_platform("auto"), CpuPlatform)
    pretend(monkeypatch, gpu=True, cuda="13.0")
    assert type(resolve_platform("auto")) is type(resolve_platform("cuda")) is CudaPlatform
    pretend(monkeypatch, gpu=True, hip="7.0")
    assert type(resolve_platform("auto")) is type(resolve_platform("rocm")) is RocmPlatform
    assert isinstance(resolve_platform("cpu"), CpuPlatform)


@pytest.mark.parametrize("device", ["tpu", "cuda:1", "", "CPU"])
def test_every_unknown_device_is_refused_by_name(device):
    with pytest.raises(ValueError, match=rf"device='{device}' is not supported; use one of auto, cpu, cuda, rocm"):
        resolve_platform(device)


def test_every_absent_gpu_is_refused_with_what_is_there(monkeypatch):
    pretend(monkeypatch, gpu=False)
    for device in ("cuda", "rocm"):
        with pytest.raises(
            ValueError, match=f"'{device}' was asked for, but torch sees no GPU here.* use device='cpu'"
        ):
            resolve_platform(device)
    pretend(monkeypatch, gpu=True, hip="7.0")
    with pytest.raises(ValueError, match="'cuda' was asked for, but torch sees rocm here; use device='rocm'"):
        resolve_platform("cuda")


def test_every_platform_answers_the_same_questions(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40 * GIB, 80 * GIB))
    for platform, device, dtype, attention, ops, compile in (
        (CpuPlatform(), "cpu", "float32", CpuAttention, CpuOps, CompileMode.NONE),
        (CudaPlatform(), "cuda", "auto", TritonAttention, TritonOps, CompileMode.LAYERS),
        (RocmPlatform(), "cuda", "auto", TritonAttention, TritonOps, CompileMode.LAYERS),
    ):
        assert platform.device == torch.device(device)
        assert platform.default_dtype == dtype
        assert platform.default_attention is attention
        assert platform.default_compile is compile
        assert platform.default_graph_mode is GraphMode.FULL_AND_PIECEWISE
        assert platform.default_ops is ops
        assert platform.name in attention.platforms
        assert platform.name in ops.platforms
    assert CpuPlatform().graph_support(TorchAttention) is GraphSupport.ALWAYS  # run again where it is not recorded
    assert CudaPlatform().graph_support(TorchAttention) is GraphSupport.NEVER
    assert CudaPlatform().graph_support(TritonAttention) is GraphSupport.ALWAYS
    assert CudaPlatform().kv_cache_bytes() == RocmPlatform().kv_cache_bytes() == 34 * GIB


GRAPH, WITHIN_TORCH = 7 * MIB, 2 * MIB  # that the driver gives to each graph of a `Card`, and torch knows of


class Card:
    """Stands in for the driver and for what torch holds of it, so that a pool can be asked without a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.reserved = 40 * GIB, GIB
        card = self

        class Stream:
            def wait_stream(self, stream: Stream) -> None:
                pass

            def synchronize(self) -> None:
                pass

        class Graph:
            def capture_begin(self, pool: object) -> None:
                card.free, card.reserved = card.free - GRAPH, card.reserved + WITHIN_TORCH

            def capture_end(self) -> None:
                pass

            def replay(self) -> None:
                pass

        for name, stand_in in {
            "graph_pool_handle": object,
            "Stream": Stream,
            "current_stream": Stream,
            "stream": nullcontext,
            "CUDAGraph": Graph,
            "mem_get_info": lambda: (self.free, 80 * GIB),
            "memory_reserved": lambda: self.reserved,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)


@pytest.mark.parametrize("platform", [CudaPlatform(), RocmPlatform()])
def test_every_graph_of_a_gpu_costs_what_its_driver_gave(monkeypatch, platform):
    check_gpu_graphs(monkeypatch, platform)


def check_gpu_graphs(monkeypatch: pytest.MonkeyPatch, platform: CudaPlatform) -> None:
    """Which is more than torch knows of; but no less than that, if others let go of theirs meanwhile."""
    card = Card(monkeypatch)
    pool = platform.graph_pool(is_compiled=False)
    assert pool.num_bytes == 0
    card.free -= GIB  # static memory, say
    for _ in range(3):
        pool(lambda: None)
    assert pool.num_bytes == 3 * GRAPH, f"{pool.num_bytes} bytes counted, {3 * GRAPH} given"
    card.free += GIB
    assert pool.num_bytes == 3 * WITHIN_TORCH, f"{pool.num_bytes} bytes counted, {3 * WITHIN_TORCH} torch's"


class TrustsTorch(CudaGraphPool):
    @property
    def num_bytes(self) -> int:
        return self._reserved_bytes() - self._before[1] if self._before else 0


class TrustsTheDriver(CudaGraphPool):
    @property
    def num_bytes(self) -> int:
        return self._before[0] - self._free_bytes() if self._before else 0


@pytest.mark.parametrize("pool", [TrustsTorch, TrustsTheDriver])
def test_a_pool_that_trusts_one_of_the_two_is_seen(monkeypatch, pool):
    monkeypatch.setattr(platforms, "CudaGraphPool", pool)
    with pytest.raises(AssertionError, match="bytes counted"):
        check_gpu_graphs(monkeypatch, CudaPlatform())


def test_every_choice_of_attention_says_why(monkeypatch):
    cpu, gpu = CpuPlatform(), CudaPlatform()
    with monkeypatch.context() as patch:  # what tests/test_native.py finds out
        patch.setattr(platforms, "reason_not_to_load", lambda name: None)
        assert resolve_attention(cpu, None) == (CpuAttention, "the default on cpu")
        assert resolve_attention(cpu, CpuAttention) == (CpuAttention, "asked for")
        with pytest.raises(ValueError, match="attention=CpuAttention runs on cpu, not on cuda; leave it out"):
            resolve_attention(gpu, CpuAttention)
        assert resolve_attention(cpu, None, torch.float32) == (CpuAttention, "the default on cpu")
        assert resolve_attention(cpu, None, torch.bfloat16) == (TorchAttention, "CpuAttention is for float32")
        with pytest.raises(ValueError, match="attention=CpuAttention is for dtype=float32, not float16; use TorchAtt"):
            resolve_attention(cpu, CpuAttention, torch.float16)
    assert resolve_attention(gpu, TorchAttention) == (TorchAttention, "asked for")
    assert resolve_attention(gpu, None) == (TritonAttention, "the default on cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="attention=TritonAttention runs on cuda and rocm, not on cpu; leave it out"):
        resolve_attention(cpu, TritonAttention)
    monkeypatch.setattr(platforms, "has_triton", lambda: False)
    assert resolve_attention(gpu, None) == (TorchAttention, "TritonAttention cannot run: triton is not installed")
    with pytest.raises(ValueError, match="needs triton; pip install"):
        resolve_attention(gpu, TritonAttention)


def test_every_choice_of_operations_says_why(monkeypatch):
    cpu, gpu = CpuPlatform(), CudaPlatform()

    def resolve(platform, asked=None, dtype=torch.float32, *, is_compiled=False):
        return resolve_ops(platform, asked, dtype, is_compiled=is_compiled)

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(platforms, "reason_not_to_load", lambda name: None)
    assert resolve(cpu) == (CpuOps, "the default on cpu")
    assert resolve(cpu, CpuOps) == (CpuOps, "asked for")
    assert resolve(cpu, is_compiled=True) == (TorchOps, "the compiler fuses them")
    for dtype in (torch.float16, torch.bfloat16):
        assert resolve(cpu, None, dtype) == (TorchOps, "CpuOps is for float32")
        with pytest.raises(ValueError, match=r"ops=CpuOps is for dtype=float32, not b?float16; use TorchOps"):
            resolve(cpu, CpuOps, dtype)
    with pytest.raises(ValueError, match="ops=CpuOps runs on cpu, not on cuda; leave it out for TritonOps"):
        resolve(gpu, CpuOps)
    with pytest.raises(ValueError, match="ops=CpuOps cannot be compiled; use compile='none', or leave it out"):
        resolve(cpu, CpuOps, is_compiled=True)
    with pytest.raises(ValueError, match="ops=TritonOps runs on cuda and rocm, not on cpu; leave it out"):
        resolve(cpu, TritonOps)
    assert resolve(gpu, None, torch.bfloat16) == (TritonOps, "the default on cuda")
    assert resolve(gpu, TritonOps, is_compiled=True) == (TritonOps, "asked for")
    monkeypatch.setattr(platforms, "reason_not_to_load", lambda name: "no C++ compiler")
    assert resolve(cpu) == (TorchOps, "CpuOps cannot run: no C++ compiler")
    with pytest.raises(ValueError, match=r"ops=CpuOps cannot run: no C\+\+ compiler; install"):
        resolve(cpu, CpuOps)
    monkeypatch.setattr(platforms, "has_triton", lambda: False)
    assert resolve(gpu) == (TorchOps, "TritonOps cannot run: triton is not installed")
    with pytest.raises(ValueError, match="ops=TritonOps needs triton; pip install"):
        resolve(gpu, TritonOps)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_an_engine_says_it_runs_is_what_runs(tmp_path, dtype):
    """With numbers of every dtype: the operations that are named, and no others behind them."""
    runner = EagerRunner(EngineConfig(model=str(write_checkpoint(tmp_path)), device="cpu", dtype=dtype))
    assert runner.execution.ops.startswith(type(runner.model.ops).__name__)
    assert str(runner.torch_dtype) == f"torch.{dtype}"
    assert dtype in type(runner.model.ops).dtypes
    assert dtype in runner._attention.backend.dtypes
    check_only_named_operations_run(runner)


def check_only_named_operations_run(runner: EagerRunner) -> None:
    named, called = runner.model.ops, set()
    for cls in (TorchOps, CpuOps):
        original = cls.silu_and_mul

        def spying(self, gate_up, cls=cls, original=original):
            called.add(cls)
            return original(self, gate_up)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cls, "silu_and_mul", spying)
            named.silu_and_mul(torch.ones(2, 8, dtype=runner.torch_dtype))
    assert called == {type(named)}, f"{type(named).__name__} was named, and {called} ran"


def test_operations_that_hand_on_to_others_are_seen(tmp_path, monkeypatch):
    right = CpuOps.silu_and_mul
    monkeypatch.setattr(CpuOps, "silu_and_mul", lambda self, x: (TorchOps().silu_and_mul(x), right(self, x))[1])
    with pytest.raises(AssertionError, match="CpuOps was named"):
        test_what_an_engine_says_it_runs_is_what_runs(tmp_path, "float32")


def test_a_device_of_others_is_refused_by_name():
    for device in ("tpu", "xpu", "cuda:1", ""):
        with pytest.raises(ValueError, match=f"device='{device}' is not supported; use one of auto, cpu, cuda, rocm"):
            resolve_platform(device)


@pytest.mark.parametrize(("available", "pool"), [(64 * GIB, 2 * GIB), (4 * GIB, 2 * GIB), (3 * GIB, 3 * GIB // 2)])
def test_every_cpu_pool_leaves_half_of_what_is_available(monkeypatch, available, pool):
    monkeypatch.setattr(platforms, "available_memory", lambda: available)
    assert CpuPlatform().kv_cache_bytes() == pool


def test_every_container_limit_bounds_what_is_available(monkeypatch):
    assert 0 < available_memory() < 2**50
    texts = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 4096 kB\n", "/sys/fs/cgroup/memory.max": "max\n"}
    monkeypatch.setattr(platforms.Path, "read_text", lambda path: texts[str(path)])
    assert available_memory() == 2**22
    texts["/sys/fs/cgroup/memory.max"] = "1000000\n"
    assert available_memory() == 10**6
