"""Part `speed`: attention, element-wise operations and whole decode steps against what the device can do.

What it can do is measured first, in the same process: the bandwidth of a copy, and the rate of a matrix product. A
floor is the time in which that bandwidth moves the bytes that must be moved. Shapes of Llama-3.1-8B for single calls,
of Qwen3-0.6B for whole steps. Dry: tiny sizes, torch's attention, nothing compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpu_check.engines import Engine, quick, with_engine, write_shape
from gpu_check.ladder import Sizes, decode_rate
from gpu_check.timing import Timer, copy_bandwidth, matmul_rate
from nanoserve.checkpoint import read_model_config
from nanoserve.config import STAGES, EngineConfig
from nanoserve.graph_runner import GraphRunner
from nanoserve.ops import TorchOps, TritonOps

if TYPE_CHECKING:
    from gpu_check.part import Part

EPS = 1e-5
Rows = list[tuple[int, int]]  # queries, keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of single calls."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    inner: int = 14336
    block_size: int = 16
    decodes: tuple[tuple[int, int], ...] = ((1, 1024), (1, 16384), (8, 4096), (64, 2048), (256, 1024))  # batch, context
    prompts: tuple[tuple[int, int], ...] = ((4096, 4096), (512, 8192), (2048, 16384))  # queries, keys
    num_tokens: tuple[int, ...] = (64, 4096)  # of element-wise operations
    copy_bytes: int = 2**30
    matmul_size: int = 8192


DRY_SHAPE = Shape(
    num_heads=4, num_kv_heads=2, head_dim=16, hidden=64, inner=128, decodes=((1, 64), (4, 32)),
    prompts=((32, 32), (8, 64)), num_tokens=(8,), copy_bytes=2**20, matmul_size=64,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Device:
    """What was measured of it."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, num_bytes: float) -> float:
        return num_bytes / self.bytes_per_s


def run(part: Part) -> None:
    shape = DRY_SHAPE if part.dry else Shape()
    timer = Timer("cpu" if part.dry else "cuda")
    with torch.inference_mode():
        device = part.attempt("device", 3, lambda: measure_device(part, timer, shape))
        if device is None:
            return
        part.attempt("attention", 12, lambda: measure_attention(part, timer, shape, device))
        part.attempt("element-wise", 15, lambda: measure_ops(part, timer, shape, device))
    with TemporaryDirectory() as folder:
        measure_steps(part, Path(folder), device)


def measure_device(part: Part, timer: Timer, shape: Shape) -> Device:
    dtype = torch.float32 if part.dry else torch.bfloat16
    device = Device(
        copy_bandwidth(timer, shape.copy_bytes),
        matmul_rate(timer, shape.matmul_size, dtype),
    )
    result = {"copy_bytes_per_s": device.bytes_per_s, "matmul_flops_per_s": device.flops_per_s, "dtype": str(dtype)}
    part.keep(
        "device",
        result,
        (f"copy of {shape.copy_bytes / 2**20:.0f} MiB, read and written", f"{device.bytes_per_s / 1e12:.2f} TB/s"),
        (f"product of {shape.matmul_size}^2 in {dtype}", f"{device.flops_per_s / 1e12:.0f} TFLOP/s"),
    )
    return device


# Attention


class PagedInput:
    """Rows of (queries, keys) over random blocks of a random cache."""

    def __init__(self, rows: Rows, shape: Shape, timer: Timer, dtype: torch.dtype) -> None:
        device = timer.device
        widths = [-(-keys // shape.block_size) for _, keys in rows]
        num_blocks = sum(widths) + 1
        order = torch.randperm(num_blocks - 1, device=device) + 1
        cache = torch.randn(
            2, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim, dtype=dtype, device=device
        )
        table = torch.zeros(len(rows), max(widths), dtype=torch.int64, device=device)
        for row, (blocks, width) in enumerate(zip(order.split(widths), widths, strict=True)):
            table[row, :width] = blocks
        queries = torch.tensor([0, *(n for n, _ in rows)], device=device)
        num_tokens = sum(n for n, _ in rows)
        q = torch.randn(num_tokens, shape.num_heads, shape.head_dim, dtype=dtype, device=device)
        lens = torch.tensor([keys for _, keys in rows], device=device)
        self.args: tuple[Tensor, ...] = (q, cache[0], cache[1], table, queries.cumsum(0), lens)
        kv_size = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        self.num_bytes = kv_size * sum(keys for _, keys in rows) + 2 * q.numel() * dtype.itemsize
        seen = sum(n * keys - n * (n - 1) // 2 for n, keys in rows)  # pairs of a query and a key
        self.flops = 4 * shape.num_heads * shape.head_dim * seen


def attention_calls(inputs: PagedInput, *, dry: bool) -> dict[str, Callable[[], Tensor]]:
    """By name: keys in one part and in as many as fit; on a CPU the twin, once."""
    if dry:
        return {"oracle": partial(dry_attention, *inputs.args)}
    from nanoserve.attention_kernels import paged_attention

    return {
        "as fits": partial(paged_attention, *inputs.args),
        "one split": partial(paged_attention, *inputs.args, num_splits=1),
    }


def dry_attention(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, starts: Tensor, lens: Tensor) -> Tensor:
    from nanoserve.attention import attend_chunk, causal_mask

    outs = []
    for row, seq_len in enumerate(lens.tolist()):
        mine = q[starts[row] : starts[row + 1]]
        mask = causal_mask(len(mine), seq_len, mine)
        outs.append(attend_chunk(mine, torch.stack((keys, values)), table[row : row + 1], seq_len, mask))
    return torch.cat(outs)


def measure_attention(part: Part, timer: Timer, shape: Shape, device: Device) -> None:
    dtype = torch.float32 if part.dry else torch.bfloat16
    if part.dry:
        part.skip("split keys on and off", "torch's attention stands in for the kernel, and does not split")
    cases = [(f"decode {batch} x {context}", [(1, context)] * batch) for batch, context in shape.decodes]
    cases += [(f"{n} queries of {keys} keys", [(n, keys)]) for n, keys in shape.prompts]
    mix = [shape.prompts[1], *[(1, shape.decodes[0][1])] * 63]
    for name, rows in [*cases, ("a chunk beside 63 decodes", mix)]:
        inputs = PagedInput(rows, shape, timer, dtype)
        times = {kind: timer.seconds(call) for kind, call in attention_calls(inputs, dry=part.dry).items()}
        floor_s = max(device.floor_s(inputs.num_bytes), inputs.flops / device.flops_per_s)
        best_s = next(iter(times.values()))
        result = {
            "seconds": times,
            "bytes": inputs.num_bytes,
            "flops": inputs.flops,
            "floor_s": floor_s,
            "share_of_floor": floor_s / best_s,
        }
        figures = ", ".join(f"{kind} {microseconds(seconds)}" for kind, seconds in times.items())
        figure = f"{figures}; floor {microseconds(floor_s)} ({floor_s / best_s:.0%} of the limit)"
        part.keep(f"attention: {name}", result, (f"attention: {name}", figure))


# Element-wise operations


def measure_ops(part: Part, timer: Timer, shape: Shape, device: Device) -> None:
    """torch as it is, the same compiled, and fused by hand."""
    kinds: dict[str, Callable[[str], Callable[..., Any]]] = {"torch": lambda name: getattr(TorchOps(), name)}
    if part.dry:
        part.skip("compiled and fused by hand", "neither the compiler's code nor the kernels would be a GPU's")
    else:
        kinds["compiled"] = lambda name: torch.compile(getattr(TorchOps(), name), dynamic=True)
        kinds["by hand"] = lambda name: getattr(TritonOps(), name)
    for name, make_args in OPERATIONS.items():
        calls = {kind: make(name) for kind, make in kinds.items()}
        for num_tokens in shape.num_tokens:
            args, num_bytes = make_args(num_tokens, shape, timer, torch.float32 if part.dry else torch.bfloat16)
            times = {kind: timer.seconds(partial(call, *args)) for kind, call in calls.items()}
            floor_s = device.floor_s(num_bytes)
            what = f"{name}, {num_tokens} tokens"
            figures = ", ".join(f"{kind} {microseconds(seconds)}" for kind, seconds in times.items())
            result = {"seconds": times, "bytes": num_bytes, "floor_s": floor_s}
            part.keep(what, result, (what, f"{figures}; floor {microseconds(floor_s)}"))


Arguments = tuple[tuple[Any, ...], int]  # and the bytes that must be read and written


def norm_args(num_tokens: int, shape: Shape, timer: Timer, dtype: torch.dtype) -> Arguments:
    x, residual = torch.randn(2, num_tokens, shape.hidden, dtype=dtype, device=timer.device)
    weight = torch.randn(shape.hidden, dtype=dtype, device=timer.device)
    return (x, residual, weight, EPS), 4 * x.numel() * dtype.itemsize


def rotate_args(num_tokens: int, shape: Shape, timer: Timer, dtype: torch.dtype) -> Arguments:
    sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    qkv = torch.randn(num_tokens, sum(sizes), shape.head_dim, dtype=dtype, device=timer.device)
    q, k, _ = qkv.split(sizes, dim=1)
    angles = torch.randn(num_tokens, shape.head_dim // 2, device=timer.device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return (q, k, cos, sin), 2 * (q.numel() + k.numel() + cos.numel()) * dtype.itemsize


def silu_args(num_tokens: int, shape: Shape, timer: Timer, dtype: torch.dtype) -> Arguments:
    gate_up = torch.randn(num_tokens, 2 * shape.inner, dtype=dtype, device=timer.device)
    return (gate_up,), 3 * num_tokens * shape.inner * dtype.itemsize


OPERATIONS: dict[str, Callable[[int, Shape, Timer, torch.dtype], Arguments]] = {
    "add_rms_norm": norm_args,
    "rotate": rotate_args,
    "silu_and_mul": silu_args,
}


# Whole steps


def measure_steps(part: Part, folder: Path, device: Device) -> None:
    """Decode steps through the whole engine, by the clock of the host: throughput with and without graphs."""
    model = write_shape("tiny-llama" if part.dry else "qwen3-0.6b", folder)
    batches = (1, 4) if part.dry else (1, 64)
    sizes = Sizes(batches=batches, prompt_len=16 if part.dry else 1024, steps=2 if part.dry else 10)
    base = replace(
        STAGES["shared"],
        model=model,
        max_model_len=512 if part.dry else 4096,
        max_num_seqs=batches[-1],
        kv_cache_memory_bytes=2**24 if part.dry else 16 * 2**30,
        device="cpu" if part.dry else "auto",
    )
    graphs = replace(base, runner=GraphRunner, graph_sizes=batches)
    kinds: list[tuple[str, EngineConfig, float]] = [("eager", base, 6), ("graphs", graphs, 6)]
    if part.dry:
        part.skip("steps of compiled layers", "half a minute of compiling on a CPU")
    else:
        compiled = replace(graphs, compile="layers")
        kinds.append(("graphs, compiled", compiled, 20))
        ahead = replace(compiled, batch=STAGES["v1"].batch, async_scheduling=True)
        kinds.append(("graphs, compiled, persistent batch, one step ahead", ahead, 15))
    for kind, config, needs_s in kinds:
        part.attempt(f"steps, {kind}", needs_s, partial(measure_kind, part, kind, quick(config), sizes, device))


def measure_kind(part: Part, kind: str, config: EngineConfig, sizes: Sizes, device: Device) -> None:
    shape = read_model_config(config.model)

    def measure(engine: Engine) -> None:
        dtype = getattr(torch, engine.info.dtype)
        for batch in sizes.batches:
            rate = decode_rate(engine, batch, sizes)
            step_s = batch / rate
            context = sizes.prompt_len + 40
            num_bytes = engine.execution.weight_bytes + batch * context * shape.kv_bytes_per_token(dtype)
            floor_s = device.floor_s(num_bytes)
            result = {"step_s": step_s, "tokens_per_s": rate, "bytes": num_bytes, "floor_s": floor_s}
            what = f"decode step of {batch}, {kind}"
            figure = f"{step_s * 1e3:.2f} ms, {rate:,.0f} tokens/s; floor {floor_s * 1e3:.2f} ms"
            part.keep(what, result, (what, figure))

    with_engine(config, measure)


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"
