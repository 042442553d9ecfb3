"""`nanoserve doctor`: prints a check-up of this machine and of what engines have left on it; `--clean` removes that.

Exit code 0: fine; 1: there are problems, each with its fix.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nanoserve.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from nanoserve.api.doctor import Checkup, Memory

FINE, PROBLEMS = 0, 1
_WIDTH = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clean", action="store_true", help="end orphaned processes, remove folders and crash dumps")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="PATH_OR_HUB_ID", help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, rocm")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")


def run(args: argparse.Namespace) -> int:
    import msgspec

    from nanoserve.api.doctor import examine

    checkup = examine(args.model, args.device, args.dtype, clean=args.clean)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(checkup), indent=1).decode() + "\n")
    else:
        print("\n".join(describe(checkup)))
    return PROBLEMS if checkup.problems else FINE


def describe(checkup: Checkup) -> Iterator[str]:
    """The check-up, line by line."""

    def row(label: str, value: object) -> str:
        return f"  {label:<{_WIDTH}}{value}"

    yield "versions"
    yield row("nanoserve", checkup.nanoserve)
    yield row("python", f"{checkup.python} ({checkup.executable})")
    for package in checkup.packages:
        extra = f"  (extra {package.extra})" if package.extra else ""
        yield row(package.name, f"{package.version or 'not installed'}{extra}")
    yield row("C++ compiler", checkup.compiler or "none")
    yield "machine"
    if checkup.system:
        yield row("system", checkup.system)
        yield row("processor", checkup.processor)
    if checkup.load_average_1m is not None:
        yield row("load average", f"{checkup.load_average_1m:.2f}")
    if (threads := checkup.threads) is not None:
        omp = threads.omp_num_threads or "not set"
        yield row(
            "threads of a step", f"{threads.engine} on {threads.usable_cores} usable cores (OMP_NUM_THREADS: {omp})"
        )
    if (device := checkup.device) is not None:
        yield row("device", f"{device.name}: {device.why}")
        yield row("dtype", device.dtype)
        yield row("attention", f"{device.attention}: {device.attention_why}")
        yield row("stage v1 runs with", device.execution)
    if checkup.memory is not None:
        yield f"memory, for {checkup.memory.model}"
        yield from (row(label, value) for label, value in _memory_rows(checkup.memory))
    yield "left over"
    for what in checkup.removed:
        yield f"  removed: {what}"
    for item in checkup.leftovers:
        yield f"  {item}"
    if not any(checkup.leftovers):
        yield "  nothing" + (" else" if checkup.removed else "")
    yield "problems" if checkup.problems else "no problems"
    yield from (f"  {problem}" for problem in checkup.problems)


def _memory_rows(memory: Memory) -> Iterator[tuple[str, str]]:
    from nanoserve.api.doctor import SAMPLE_TOKENS

    yield "free", _size(memory.free)
    yield "weights", _size(memory.weights)
    yield "KV pool", f"{_size(memory.kv_pool)}, once the weights are in"
    yield "KV of one token", _size(memory.kv_per_token)
    yield "KV blocks", f"{memory.num_blocks:,} of {memory.block_size} tokens, one of them the null block"
    yield "tokens in the pool", f"{memory.num_tokens:,}"
    yield (
        "requests at a time",
        (
            f"{memory.requests_of_max_len:,.1f} of {memory.max_model_len:,} tokens (the model's longest), "
            f"{memory.requests_of_sample:,.1f} of {SAMPLE_TOKENS:,}"
        ),
    )


def _size(num_bytes: int) -> str:
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
