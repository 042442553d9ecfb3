"""Compile every Triton kernel for GPUs that are not here, and write down what each takes of them.

    python scripts/aot_kernels.py [--targets sm_80 sm_90 gfx942] [--out benchmarks/results/kernels_aot.json]

The launch functions of the engine run as they are, with a driver under them that knows a device's limits and has no
device: Triton compiles what would be launched, refuses what does not fit, and the launch itself does nothing. Block
shapes are therefore those that the device would get. Tensors are on torch's meta device, where they have no numbers:
a launch that looked at one would fail here, as it would in a CUDA graph. Knows nothing of speed or of results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.pop("TRITON_INTERPRET", None)  # before the kernels are imported: here they are compiled

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from nanoserve import attention_kernels, kernels
from nanoserve.attention_kernels import Tile

HEADS, KV_HEADS, BLOCK_SIZE = 32, 8, 16
COMMON_HEAD_DIMS, OTHER_HEAD_DIMS = (64, 128), (80, 96, 256)
BF16 = {"dtype": torch.bfloat16, "device": "meta"}
INT64 = {"dtype": torch.int64, "device": "meta"}


@dataclass(frozen=True, slots=True)
class Target:
    """A device by its limits, from the vendors' tables."""

    index: int  # under which Triton keeps what it compiled
    gpu: GPUTarget
    num_cores: int
    shared_bytes: int  # for one program, opted in
    tensor_core: str  # instructions, in the assembly text


TARGETS = {
    "sm_80": Target(0, GPUTarget("cuda", 80, 32), 108, 163 * 1024, r"\bmma\.sync"),
    "sm_89": Target(3, GPUTarget("cuda", 89, 32), 128, 99 * 1024, r"\bmma\.sync"),
    "sm_90": Target(1, GPUTarget("cuda", 90, 32), 132, 227 * 1024, r"\bmma\.sync|\bwgmma\.mma_async"),
    "gfx942": Target(2, GPUTarget("hip", "gfx942", 64), 304, 64 * 1024, r"\bv_mfma_"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One compiled kernel."""

    target: str
    case: str
    kernel: str
    head_dim: int | None
    num_warps: int
    num_stages: int
    shared_bytes: int
    shared_limit_bytes: int
    registers: int  # of a thread; AMD: vector registers, accumulators included
    spilled: int  # NVIDIA: bytes of a thread's stack; AMD: vector registers
    tensor_core_instructions: int
    binary_bytes: int


class AbsentGpu:
    """Triton's driver, as far as compiling and launching ask of it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.utils = self
        self.launcher_cls = lambda src, metadata: lambda *launch: None

    def get_current_device(self) -> int:
        return self._target.index

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target.gpu

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._target.shared_bytes, "multiprocessor_count": self._target.num_cores}

    def load_binary(
        self, name: str, binary: bytes, shared_bytes: int, device: int
    ) -> tuple[object, object, int, int, int]:
        return object(), object(), 0, 0, 1024  # module, function, registers, spills, threads at most


def attention_launch(num_tokens: int, num_rows: int, max_keys: int, head_dim: int, tile: Tile | None = None) -> None:
    q_THD = torch.empty(num_tokens, HEADS, head_dim, **BF16)
    keys_NKPD, values_NKPD = torch.empty(2, 4, KV_HEADS, BLOCK_SIZE, head_dim, **BF16)
    table_RB = torch.empty(num_rows, max_keys // BLOCK_SIZE, **INT64)
    starts_R1, lens_R = torch.empty(num_rows + 1, **INT64), torch.empty(num_rows, **INT64)
    attention_kernels.paged_attention(q_THD, keys_NKPD, values_NKPD, table_RB, starts_R1, lens_R, tile=tile)


def head_launches(head_dim: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, launch) of all that depends on the head dim. q, k and v are views into one product, as in the model."""
    qkv = torch.empty(4, HEADS + 2 * KV_HEADS, head_dim, **BF16)
    q_THD, k_TKD, v_TKD = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    keys_NKPD, values_NKPD = torch.empty(2, 4, KV_HEADS, BLOCK_SIZE, head_dim, **BF16)
    slots_T = torch.empty(4, **INT64)
    cos_TI, sin_TI = torch.empty(2, 4, head_dim // 2, **BF16)
    yield "store", lambda: kernels.store_kv(k_TKD, v_TKD, keys_NKPD, values_NKPD, slots_T)
    yield "q and k norm", lambda: kernels.rms_norm(q_THD, torch.empty(head_dim, **BF16), 1e-6)
    yield "rotary", lambda: kernels.rotary(q_THD, k_TKD, cos_TI, sin_TI)
    yield "decode, 1 row", lambda: attention_launch(1, 1, 4096, head_dim)
    yield "prefill, 2048 tokens", lambda: attention_launch(2048, 1, 2048, head_dim)
    if head_dim in COMMON_HEAD_DIMS:
        yield "decode, 256 rows", lambda: attention_launch(256, 256, 4096, head_dim)
        yield "mixed, 512 tokens in 33 rows", lambda: attention_launch(512, 33, 4096, head_dim)


def hidden_launches() -> Iterator[tuple[str, Callable[[], object]]]:
    x_TE, weight_E = torch.empty(4, 4096, **BF16), torch.empty(4096, **BF16)
    yield "norm", lambda: kernels.rms_norm(x_TE, weight_E, 1e-6)
    yield "norm of a sum", lambda: kernels.add_rms_norm(x_TE, x_TE, weight_E, 1e-6)
    yield "SwiGLU", lambda: kernels.silu_and_mul(torch.empty(4, 2 * 14336, **BF16))


def compiled(target: Target) -> dict[str, dict[Any, Any]]:
    """What Triton has compiled for a device so far: kernel name -> {key: compiled kernel}."""
    functions = {**vars(kernels), **vars(attention_kernels)}
    found = {name: fn for name, fn in functions.items() if isinstance(fn, triton.JITFunction)}
    return {
        name: dict(fn.device_caches[target.index][0]) for name, fn in found.items() if target.index in fn.device_caches
    }


def compile_launch(target_name: str, case: str, launch: Callable[[], object], head_dim: int | None = None) -> list[Row]:
    """A row for each kernel that this launch compiles and none before it did. OutOfResources if it does not fit."""
    target = TARGETS[target_name]
    driver.set_active(AbsentGpu(target))
    before = compiled(target)
    launch()
    rows = []
    for name, by_key in compiled(target).items():
        for key in by_key.keys() - before.get(name, {}).keys():
            kernel = by_key[key]
            registers, spilled = nvidia_usage(kernel) if target.gpu.backend == "cuda" else amd_usage(kernel)
            assembly = kernel.asm["ptx" if target.gpu.backend == "cuda" else "amdgcn"]
            rows.append(
                Row(
                    target=target_name,
                    case=case,
                    kernel=name.lstrip("_"),
                    head_dim=head_dim,
                    num_warps=kernel.metadata.num_warps,
                    num_stages=kernel.metadata.num_stages,
                    shared_bytes=kernel.metadata.shared,
                    shared_limit_bytes=target.shared_bytes,
                    registers=registers,
                    spilled=spilled,
                    tensor_core_instructions=len(re.findall(target.tensor_core, assembly)),
                    binary_bytes=len(kernel.kernel),
                )
            )
    return rows


def nvidia_usage(kernel: Any) -> tuple[int, int]:
    """As NVIDIA's cuobjdump, which is in Triton's wheel, reads them from the binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


def amd_usage(kernel: Any) -> tuple[int, int]:
    """As the compiler notes them in the kernel's metadata."""
    text = kernel.asm["amdgcn"]
    return int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1]), int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])


def compile_all(target_name: str) -> Iterator[Row]:
    for case, launch in hidden_launches():
        yield from compile_launch(target_name, case, launch)
    for head_dim in COMMON_HEAD_DIMS + OTHER_HEAD_DIMS:
        for case, launch in head_launches(head_dim):
            yield from compile_launch(target_name, case, launch, head_dim)


def print_table(rows: list[Row]) -> None:
    columns = {
        "target": "target",
        "kernel": "kernel",
        "head dim": "head_dim",
        "case": "case",
        "warps": "num_warps",
        "stages": "num_stages",
        "shared B": "shared_bytes",
        "registers": "registers",
        "spilled": "spilled",
        "tensor cores": "tensor_core_instructions",
    }
    cells = [list(columns), *([str(getattr(row, name) or "-") for name in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile every Triton kernel for GPUs that are not here.")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=["sm_80", "sm_90", "gfx942"])
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    started = time.process_time()
    rows = [row for target in args.targets for row in compile_all(target)]
    print_table(rows)
    print(f"{len(rows)} kernels in {time.process_time() - started:.1f} s of CPU; triton {triton.__version__}")
    if args.out:
        result = {
            "command": f"python scripts/aot_kernels.py --targets {' '.join(args.targets)}",
            "what": "registers, shared memory and spills of every kernel, compiled in bfloat16 without a GPU",
            "triton": triton.__version__,
            "torch": torch.__version__,
            "rows": [asdict(row) for row in rows],
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
