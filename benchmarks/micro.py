"""The parts of a CPU step by themselves, and the step they make: attention, products, decode by batch, and the floor.

    python benchmarks/micro.py [--only attention linear step stages] [--rounds 7] [--threads 1]
        [--out benchmarks/results/micro.json]

Attention by batch and context, each backend; the products of one pass by rows, in each layout; a whole decode step
before and after each lever, from plain torch on; where the time of a step goes. What is compared takes turns within a
round; figures are medians over the rounds. floor.py says what the floor of a step is; how far a step may be from it is
checked by lines.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from checkpoints_qwen3 import SHAPES, config_of
from floor import Products, Rates, clock, matrices, measure_rates, take_turns
from torch import Tensor

from nanoserve.attention import AttentionBackend, AttentionBatch, TorchAttention
from nanoserve.cpu_attention import CpuAttention
from nanoserve.cpu_ops import CpuOps
from nanoserve.kv_cache import KVCache
from nanoserve.machine import describe_machine
from nanoserve.model import Decoder, Linear, Pieces
from nanoserve.packed_linear import Int8Linear, pack_linears
from nanoserve.weights import load_model

BLOCK_SIZE = 16
ATTENTION_CASES: Mapping[str, list[tuple[int, int]]] = {  # (queries, keys) of each row
    **{f"{n} decodes, {keys} keys": [(1, keys)] * n for n in (1, 8, 32) for keys in (128, 1024)},
    "8 decodes, 64-1024 keys": [(1, n) for n in (64, 130, 256, 384, 512, 700, 900, 1024)],
    "prompt of 256": [(256, 256)],
    "chunk of 256, 1024 keys": [(256, 1024)],
    "chunk of 512, 2048 keys": [(512, 2048)],
    "chunk of 256 and 8 decodes, 512 keys": [(256, 512)] + [(1, 512)] * 8,
}
HEADS = 16, 8  # of queries, of keys
STEP_CASES = {
    "nanostory": [(1, 256), (8, 256), (64, 256)],
    "qwen3-30m": [(1, 512), (8, 512), (32, 256)],
    "qwen3-150m": [(1, 512), (8, 512), (32, 256)],
}


def make_batch(rows: list[tuple[int, int]]) -> tuple[AttentionBatch, int]:
    """Each row has blocks of its own, shuffled; and how many blocks there are."""
    sizes = [-(-keys // BLOCK_SIZE) for _, keys in rows]
    tables = [ids.tolist() for ids in torch.randperm(sum(sizes)).split(sizes)]
    starts, slots = [0], []
    for (n, keys), table in zip(rows, tables, strict=True):
        starts.append(starts[-1] + n)
        slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(keys - n, keys)]
    seq_lens = [keys for _, keys in rows]
    padded = torch.tensor([table + [0] * (max(sizes) - len(table)) for table in tables])
    tensors = torch.tensor(starts), torch.tensor(seq_lens), padded, torch.tensor(slots)
    return AttentionBatch(*tensors, query_starts=starts, seq_lens=seq_lens), sum(sizes)


def make_cache(num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int) -> KVCache:
    cache = KVCache(
        num_layers=num_layers,
        num_blocks=num_blocks,
        num_kv_heads=num_kv_heads,
        block_size=BLOCK_SIZE,
        head_dim=head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.blocks.normal_()
    return cache


def measure_attention(num_rounds: int) -> Iterable[tuple[str, dict[str, float]]]:
    num_heads, num_kv_heads = HEADS
    for head_dim in (64, 128):
        for case, rows in ATTENTION_CASES.items():
            batch, num_blocks = make_batch(rows)
            cache = make_cache(1, num_blocks, num_kv_heads, head_dim)
            q_THD = torch.randn(batch.query_starts[-1], num_heads, head_dim)
            attends = {type(backend).__name__: backend.attend for backend in (TorchAttention(), CpuAttention())}
            forms = {name: partial(attend, q_THD, cache, 0, batch) for name, attend in attends.items()}
            yield f"{case}, head dim {head_dim}", take_turns(forms, num_rounds)


class AllProducts(Products):
    """And those of int8 weights, which are nearly the same."""

    @staticmethod
    def layouts(linears: Sequence[Linear]) -> dict[str, Sequence[Callable[[Tensor], Tensor]]]:
        return {**Products.layouts(linears), "int8": [Int8Linear(linear) for linear in linears]}


def measure_linears(models: Mapping[str, Path | str], num_rounds: int) -> Iterable[tuple[str, dict[str, float]]]:
    for name, path in models.items():
        products = AllProducts(matrices(load_model(path, load_format="dummy")))
        for rows in (1, 2, 8, 32, 64, 512):
            yield f"{name}, {rows} rows", take_turns(products.forms(rows), num_rounds)


def decode_step(model: Decoder, backend: AttentionBackend, num_rows: int, num_keys: int) -> Callable[[], Tensor]:
    """The model, from token ids to the greedy next ones: no scheduler, no inputs to be made."""
    config = model.config
    batch, num_blocks = make_batch([(1, num_keys)] * num_rows)
    cache = make_cache(config.num_layers, num_blocks, config.num_kv_heads, config.head_dim)
    ids_T, positions_T = torch.arange(num_rows), torch.full((num_rows,), num_keys - 1)

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, /) -> Tensor:
        backend.store(k_TKD, v_TKD, cache, layer, batch.slot_mapping_T)
        return backend.attend(q_THD, cache, layer, batch)

    return lambda: model.logits(model(ids_T, positions_T, attend)).argmax(dim=-1)


def measure_steps(
    models: Mapping[str, Path | str], rates: Rates, num_rounds: int
) -> Iterable[tuple[str, dict[str, float]]]:
    for name, path in models.items():
        plain, packed, fused = (load_model(path, load_format="dummy") for _ in range(3))
        products = Products(matrices(plain))
        pack_linears(packed)
        pack_linears(fused)
        fused.ops = CpuOps()
        for num_rows, num_keys in STEP_CASES[name]:
            forms = {
                "plain": decode_step(plain, TorchAttention(), num_rows, num_keys),
                "+ attention in C++": decode_step(plain, CpuAttention(), num_rows, num_keys),
                "+ packed products": decode_step(packed, CpuAttention(), num_rows, num_keys),
                "+ fused operations": decode_step(fused, CpuAttention(), num_rows, num_keys),
            }
            best = products.forms(num_rows)
            times = take_turns(forms | best, num_rounds)
            kv_bytes = num_rows * num_keys * plain.config.kv_bytes_per_token(torch.float32)
            floor_ms = min(times.pop(layout) for layout in best) + kv_bytes / rates.read_gb_per_s / 1e6
            yield f"{name}, {num_rows} rows of {num_keys} keys", times | {"floor": floor_ms}


def measure_stages(models: Mapping[str, Path | str], num_rounds: int) -> Iterable[tuple[str, dict[str, float]]]:
    """Where the time of a decode step goes, all levers on. A clock is read at every border."""
    for name, path in models.items():
        model = load_model(path, load_format="dummy")
        pack_linears(model)
        model.ops = CpuOps()
        backend = CpuAttention()
        for num_rows, num_keys in STEP_CASES[name]:
            stages = Stages()
            timed = backend_of(stages.timed("store", backend.store), stages.timed("attention", backend.attend))
            first, cross, last = model.pieces
            model.pieces = Pieces(
                stages.timed("embedding, angles, first qkv", first),
                stages.timed("products and norms between", cross),
                stages.timed("the last ones", last),
            )
            step = decode_step(model, timed, num_rows, num_keys)
            whole = stages.timed("logits, argmax and what is between", step)
            for number in range(num_rounds * 5):
                if number == num_rounds:  # those before warm up
                    stages.spent.clear()
                whole()
            model.pieces = Pieces(first, cross, last)
            yield (
                f"{name}, {num_rows} rows of {num_keys} keys",
                {stage: 1e3 * seconds / (num_rounds * 4) for stage, seconds in stages.spent.items()},
            )


class Stages:
    """Seconds spent in each stage, without those of the stages inside it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._inside_s = 0.0
        self._now = clock()

    def timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            outer_s, self._inside_s, start_s = self._inside_s, 0.0, self._now()
            result = call(*args)
            lasted_s = self._now() - start_s
            self.spent[stage] = self.spent.get(stage, 0.0) + lasted_s - self._inside_s
            self._inside_s = outer_s + lasted_s
            return result

        return run


def backend_of(store: Callable[..., Any], attend: Callable[..., Any]) -> Any:
    return SimpleNamespace(store=store, attend=attend)


def show(title: str, found: Iterable[tuple[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """A line each as it is measured, with the ratio to the first column."""
    points: dict[str, dict[str, float]] = {}
    for case, times in found:
        if not points:
            print(f"\n| {title}, ms | " + " | ".join(times) + " |\n|---" + "|---" * len(times) + "|")
        first = next(iter(times.values()))
        print(f"| {case} | " + " | ".join(f"{ms:.3f} x{ms / first:.2f}" for ms in times.values()) + " |", flush=True)
        points[case] = times
    return points


def main() -> None:
    parts = ("attention", "linear", "step", "stages")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "micro.json")
    args = parser.parse_args()
    machine = describe_machine()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        models = {"nanostory": "nanostory"} | {f"qwen3-{shape}": Path(folder) / shape for shape in SHAPES}
        for shape in SHAPES:
            (Path(folder) / shape).mkdir()
            (Path(folder) / shape / "config.json").write_text(json.dumps(config_of(shape)))
        rates = measure_rates()
        print(f"products {rates.gemm_gflops:.0f} GFLOP/s, reading {rates.read_gb_per_s:.1f} GB/s, one minute's load "
              f"{machine.load_average_1m}, {args.threads} threads")  # fmt: skip
        measures: dict[str, Callable[[], Iterable[tuple[str, dict[str, float]]]]] = {
            "attention": lambda: measure_attention(args.rounds),
            "linear": lambda: measure_linears(models, args.rounds),
            "step": lambda: measure_steps(models, rates, args.rounds),
            "stages": lambda: measure_stages(models, args.rounds),
        }
        found = {part: show(part, measures[part]()) for part in args.only}
    result = {
        "what": "milliseconds of attention, of a pass's products and of a decode step, by how they are computed",
        "command": "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": msgspec.to_builtins(machine),
        "threads": args.threads,
        "rates": asdict(rates),
        "found": found,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
