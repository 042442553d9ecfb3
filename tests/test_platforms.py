"""Laws of platforms: what is asked for is there or refused by name, and the KV pool leaves room for the machine."""

from __future__ import annotations

import pytest
import torch

from nanoserve import platforms
from nanoserve.attention import TorchAttention
from nanoserve.compilation import CompileMode
from nanoserve.cpu_attention import CpuAttention
from nanoserve.graphs import GraphMode, GraphSupport
from nanoserve.ops import TorchOps, TritonOps
from nanoserve.platforms import (
    GIB,
    CpuPlatform,
    CudaPlatform,
    RocmPlatform,
    available_memory,
    resolve_attention,
    resolve_ops,
    resolve_platform,
)
from nanoserve.triton_attention import TritonAttention


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
    for platform, device, dtype, attention, compile in (
        (CpuPlatform(), "cpu", "float32", CpuAttention, CompileMode.NONE),
        (CudaPlatform(), "cuda", "auto", TritonAttention, CompileMode.LAYERS),
        (RocmPlatform(), "cuda", "auto", TritonAttention, CompileMode.LAYERS),
    ):
        assert platform.device == torch.device(device)
        assert platform.default_dtype == dtype
        assert platform.default_attention is attention
        assert platform.default_compile is compile
        assert platform.default_graph_mode is GraphMode.FULL_AND_PIECEWISE
        assert platform.default_ops(is_compiled=True) is TorchOps  # the compiler fuses by itself
        assert platform.name in attention.platforms
    assert CpuPlatform().graph_support(TorchAttention) is GraphSupport.ALWAYS  # nothing is recorded there
    assert CudaPlatform().graph_support(TorchAttention) is GraphSupport.NEVER
    assert CudaPlatform().graph_support(TritonAttention) is GraphSupport.ALWAYS
    assert CudaPlatform().kv_cache_bytes() == RocmPlatform().kv_cache_bytes() == 34 * GIB


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


def test_kernels_for_another_device_are_refused_when_the_engine_is_built(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="ops=TritonOps runs on cuda and rocm, not on cpu; leave it out"):
        resolve_ops(CpuPlatform(), TritonOps, is_compiled=False)
    assert resolve_ops(CudaPlatform(), TritonOps, is_compiled=True) is TritonOps
