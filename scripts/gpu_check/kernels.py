"""Part `kernels`: every kernel against its torch twin, compiled, on the GPU, in every dtype, with its greatest error.

The cases are those of tests/kernel_cases.py, moved to the device stride by stride, and longer ones that Triton's
interpreter has no time for. Dry: a few of them in the interpreter.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernel_cases import PagedCase

    from gpu_check.part import Part

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}  # the slowest to compile last
# Of results of about 1, and relative to greater ones. Sums are float32 in another order than the twin's.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}

EDGES = {
    "one token": [(1, 1)],
    "one decode": [(1, 9)],
    "a prompt that fills its blocks": [(16, 16)],
    "a chunk that ends with a block": [(4, 32)],
    "a chunk that begins with a block": [(5, 21)],
    "a tile of keys and one more": [(1, 65)],
    "a mix": [(5, 5), (1, 17), (3, 20), (1, 1), (7, 40)],
    "rows without queries": [(0, 0), (2, 5), (0, 9), (0, 0), (1, 3), (0, 0)],
    "padding rows": [(2, 5), (1, 7), (1, 0), (1, 0)],
    "a padding row of several tokens": [(1, 20), (9, 0)],
    "nothing but padding": [(1, 0), (1, 0)],
}
LONG_EDGES = {
    "a chunk behind a long context": [(150, 700), (1, 1300)],
    "a long decode": [(1, 3000)],
    "a prompt of many tiles": [(400, 400)],
}
HEAD_DIMS, BLOCK_SIZES = (64, 80, 96, 128, 256), (1, 8, 48, 256)
GROUPINGS = ((3, 1), (2, 3), (1, 7), (1, 24))
SIZES = (1, 100, 1024, 4096)


def run(part: Part) -> None:
    if part.dry:
        if importlib.util.find_spec("triton") is None:
            part.skip("kernels", "triton is not installed, so that not even its interpreter is there")
            return
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
        part.skip("compiled kernels", "no GPU: a few cases in Triton's interpreter instead, in float32 and float16")
    device = torch.device("cpu" if part.dry else "cuda")
    for dtype_name, dtype in DTYPES.items():
        # Element-wise kernels first: they compile in no time.
        cases = sorted(
            dry_cases(dtype) if part.dry else all_cases(dtype), key=lambda case: case[0] == "paged_attention"
        )
        part.attempt(dtype_name, 5, lambda cases=cases, name=dtype_name: check_dtype(part, name, cases, device))


def check_dtype(part: Part, dtype_name: str, cases: list[tuple[str, str, Case]], device: torch.device) -> None:
    """Every case; the greatest error of each kernel, and all that failed."""
    limit = TOLERANCE[DTYPES[dtype_name]]
    greatest: dict[str, float] = {}
    counts: dict[str, int] = {}
    with torch.inference_mode():
        for index, (kernel, name, case) in enumerate(cases):
            if part.left_s < 1:
                part.not_run[dtype_name] = f"{len(cases) - index} of {len(cases)} cases: the time was over"
                break
            try:
                error = case(device)
            except Exception as problem:
                part.fail(f"{kernel}, {dtype_name}, {name}", f"{type(problem).__name__}: {problem}")
                continue
            greatest[kernel] = max(greatest.get(kernel, 0.0), error)
            counts[kernel] = counts.get(kernel, 0) + 1
            if not error <= limit:  # NaN fails too
                part.fail(f"{kernel}, {dtype_name}, {name}", f"is off by {error:.2e}, more than {limit:.1e}")
    result = {
        kernel: {"num_cases": counts[kernel], "max_error": greatest[kernel], "limit": limit} for kernel in greatest
    }
    part.keep(
        dtype_name,
        result,
        *((f"{kernel}, {dtype_name}: {counts[kernel]} cases", f"off by {greatest[kernel]:.1e}") for kernel in greatest),
    )


Case = Callable[[torch.device], float]


def all_cases(dtype: torch.dtype) -> Iterator[tuple[str, str, Case]]:
    """(kernel, what is special, case)."""
    from kernel_cases import PagedCase

    def paged(name: str, rows: Any, **fields: Any) -> tuple[str, str, Case]:
        case = lambda device: paged_error(PagedCase(rows, dtype=dtype, **fields), device)  # noqa: E731
        return "paged_attention", f"{name}, {fields}", case

    for name, rows in (EDGES | LONG_EDGES).items():
        for num_splits in (None, 1, 4):
            yield paged(name, rows, head_dim=128, num_splits=num_splits)
    mix = EDGES["a mix"]
    for head_dim in HEAD_DIMS:
        yield paged("a mix", mix, head_dim=head_dim)
    for block_size in BLOCK_SIZES:
        yield paged("a mix", mix, block_size=block_size)
    for num_kv_heads, group in GROUPINGS:
        yield paged("a mix", mix, num_kv_heads=num_kv_heads, group=group, head_dim=64)
    yield paged("32-bit indices", mix, index_dtype=torch.int32)
    yield paged("tokens behind the last row", mix, stray_tokens=11, head_dim=80, num_splits=2)
    yield from other_cases(dtype, head_dims=HEAD_DIMS, sizes=SIZES)


def dry_cases(dtype: torch.dtype) -> Iterator[tuple[str, str, Case]]:
    """What the interpreter has time for. Its products are wrong in bfloat16."""
    from kernel_cases import PagedCase

    if dtype != torch.bfloat16:
        for name in ("a mix", "padding rows"):
            case = lambda device, rows=EDGES[name]: paged_error(PagedCase(rows, num_kv_heads=1, dtype=dtype), device)  # noqa: E731
            yield "paged_attention", name, case
    yield from other_cases(dtype, head_dims=(16,), sizes=(100,))


def other_cases(
    dtype: torch.dtype, *, head_dims: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[tuple[str, str, Case]]:
    for head_dim in head_dims:
        yield "store_kv", f"head dim {head_dim}", lambda device, d=head_dim: store_error(dtype, d, device)
        yield "rotary", f"head dim {head_dim}", lambda device, d=head_dim: rotary_error(dtype, d, device)
    for size in sizes:
        yield "rms_norm", f"size {size}", lambda device, n=size: norm_error(dtype, n, device)
        yield "silu_and_mul", f"size {size}", lambda device, n=size: silu_error(dtype, n, device)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """With the gaps between its numbers, which `Tensor.to` would close."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def greatest_error(out: Tensor, expected: Tensor) -> float:
    assert out.dtype == expected.dtype, (out.dtype, expected.dtype)
    assert out.shape == expected.shape, (out.shape, expected.shape)
    if not out.numel():
        return 0.0
    return ((out.double() - expected.double()).abs() / expected.double().abs().clamp_min(1)).max().item()


def paged_error(case: PagedCase, device: torch.device) -> float:
    """Places of the cache that no row owns are NaN, and so is what the kernel leaves out of its output."""
    from nanoserve.attention_kernels import paged_attention_twin

    case.q = to_device(case.q, device)
    case.cache, case.table, case.starts, case.lens = (
        x.to(device) for x in (case.cache, case.table, case.starts, case.lens)
    )
    before = case.cache.clone()
    out = case.run()
    assert torch.equal(before.view(torch.uint8), case.cache.view(torch.uint8)), "attention wrote to the cache"
    return greatest_error(out, paged_attention_twin(*case.args))


def store_error(dtype: torch.dtype, head_dim: int, device: torch.device) -> float:
    """0, or 1 where a bit differs from the twin's cache: slot -1 in between, and blocks on either side that are not its
    own."""
    from kernel_cases import fused_qkv

    from nanoserve import kernels

    slots = [5, -1, 0, 19, 7, -1, 12]
    _, k_TKD, v_TKD = (to_device(x, device) for x in fused_qkv(len(slots), 3, 3, head_dim, dtype))
    memory = torch.full((2, 7, 3, 4, head_dim), torch.nan, dtype=dtype, device=device)
    expected = memory.clone()
    slots_T = torch.tensor(slots, device=device)
    for store, (keys, values) in ((kernels.store_kv, memory[:, 1:6]), (kernels.store_kv_twin, expected[:, 1:6])):
        store(k_TKD, v_TKD, keys, values, slots_T)
    return 0.0 if torch.equal(memory.view(torch.uint8), expected.view(torch.uint8)) else 1.0


def rotary_error(dtype: torch.dtype, head_dim: int, device: torch.device) -> float:
    from kernel_cases import fused_qkv, random

    from nanoserve import kernels

    q_THD, k_TKD, _ = (to_device(x, device) for x in fused_qkv(5, 6, 2, head_dim, dtype))
    angles_TI = 10 * random(5, head_dim // 2, seed=3)
    cos_TI, sin_TI = (x.to(dtype).to(device) for x in (angles_TI.cos(), angles_TI.sin()))
    out = kernels.rotary(q_THD, k_TKD, cos_TI, sin_TI)
    expected = kernels.rotary_twin(q_THD, k_TKD, cos_TI, sin_TI)
    return max(greatest_error(*pair) for pair in zip(out, expected, strict=True))


def norm_error(dtype: torch.dtype, size: int, device: torch.device) -> float:
    from kernel_cases import random

    from nanoserve import kernels

    x, residual = (3 * random(5, size, dtype=dtype, seed=seed).to(device) for seed in (0, 1))
    weight = random(size, dtype=dtype, seed=2).to(device)
    out = (kernels.rms_norm(x, weight, 1e-5), *kernels.add_rms_norm(x, residual, weight, 1e-5))
    expected = (kernels.rms_norm_twin(x, weight, 1e-5), *kernels.add_rms_norm_twin(x, residual, weight, 1e-5))
    return max(greatest_error(*pair) for pair in zip(out, expected, strict=True))


def silu_error(dtype: torch.dtype, size: int, device: torch.device) -> float:
    from kernel_cases import random

    from nanoserve import kernels

    gate_up_TI2 = 4 * random(5, 2 * size, dtype=dtype).to(device)
    return greatest_error(kernels.silu_and_mul(gate_up_TI2), kernels.silu_and_mul_twin(gate_up_TI2))
