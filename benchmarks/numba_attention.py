"""Attention in numba beside attention in C++: the three loads with either, in turns. Why the kernels are C++.

    pip install numba==0.68.1      # in an environment of its own: nanoserve does not need it
    python benchmarks/numba_attention.py --cache FOLDER [--models 30m] [--loads w1 w2 w3] [--rounds 5] [--threads 2]
        [--out benchmarks/results/numba_attention.json]

The numba kernel has the loops of the Triton one (nanoserve/triton_attention.py): one block of keys after the other, an
online softmax, a thread for each tile of queries and key head. C++ is to win by a tenth, or numba would do, which needs
no compiler. With `v1` a pass with numba in it is not recorded (nanoserve/cpu_graphs.py); `eager` has the kernel alone.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numba  # pyright: ignore[reportMissingImports]  (it is not of this environment)
import numpy as np
import torch
from checkpoints_qwen3 import VOCAB_SIZE, make_checkpoint
from line import median_ratio
from offline import FORMS, Engine
from peers.loads import gaps, make_load
from torch import Tensor

from nanoserve.attention import AttentionBatch
from nanoserve.client import InProcessClient
from nanoserve.config import STAGES
from nanoserve.cpu_attention import CpuAttention
from nanoserve.graphs import GraphSupport
from nanoserve.kv_cache import KVCache
from nanoserve.machine import describe_machine
from nanoserve.runner import EagerRunner

TILE = 16  # queries of a prompt that one thread attends with at once
POOL_BYTES = 2**30
KERNELS = {"C++": CpuAttention}


@numba.njit(parallel=True, fastmath=True)
def attend(
    q_THD: np.ndarray,
    keys_NKPD: np.ndarray,
    values_NKPD: np.ndarray,
    out_THD: np.ndarray,
    tiles_X4: np.ndarray,
    table_RB: np.ndarray,
) -> None:
    """A tile: its row, its first query, how many, and how many keys the first of them sees."""
    _, heads, dim = q_THD.shape
    _, kv_heads, places, _ = keys_NKPD.shape
    group, scale = heads // kv_heads, np.float32(1 / math.sqrt(dim))
    for task in numba.prange(len(tiles_X4) * kv_heads):
        row, first, count, seen = tiles_X4[task // kv_heads]
        head = task % kv_heads
        pairs = count * group
        largest = np.full(pairs, -np.inf, np.float32)
        total = np.zeros(pairs, np.float32)
        sums = np.zeros((pairs, dim), np.float32)
        scores = np.empty(places, np.float32)
        for block in range((seen + count - 2) // places + 1):
            keys, values = keys_NKPD[table_RB[row, block], head], values_NKPD[table_RB[row, block], head]
            for pair in range(pairs):
                query = pair // group
                num_keys = min(places, seen + query - block * places)
                if num_keys <= 0:
                    continue
                q_D = q_THD[first + query, head * group + pair % group]
                top = largest[pair]
                for key in range(num_keys):
                    score = np.float32(0)
                    for d in range(dim):
                        score += q_D[d] * keys[key, d]
                    scores[key] = score * scale
                    top = max(top, scores[key])
                kept = np.exp(largest[pair] - top)
                largest[pair] = top
                total[pair] *= kept
                for d in range(dim):
                    sums[pair, d] *= kept
                for key in range(num_keys):
                    weight = np.exp(scores[key] - top)
                    total[pair] += weight
                    for d in range(dim):
                        sums[pair, d] += weight * values[key, d]
        for pair in range(pairs):
            for d in range(dim):
                out_THD[first + pair // group, head * group + pair % group, d] = sums[pair, d] / total[pair]


class NumbaAttention(CpuAttention):
    """Stores as the other does."""

    graph_support = GraphSupport.NEVER  # no call of compiled code that could be recorded
    _batch: AttentionBatch | None = None

    def attend(self, q_THD: Tensor, kv_cache: KVCache, layer: int, batch: AttentionBatch) -> Tensor:
        if batch is not self._batch:  # the last layer has one of its own
            self._batch, self._tiles_X4 = batch, tiles_of(batch)
        out_THD = torch.zeros(q_THD.shape)
        keys_NKPD, values_NKPD = kv_cache.blocks[layer].numpy()
        numba.set_num_threads(torch.get_num_threads())
        if len(self._tiles_X4):
            table_RB = batch.block_table_RB.numpy()
            attend(q_THD.numpy(), keys_NKPD, values_NKPD, out_THD.numpy(), self._tiles_X4, table_RB)
        return out_THD


def tiles_of(batch: AttentionBatch) -> np.ndarray:
    found = []
    for row, seq_len in enumerate(batch.seq_lens):
        start, end = batch.query_starts[row : row + 2]
        for first in range(start, end if seq_len else start, TILE):
            found.append((row, first, min(TILE, end - first), seq_len - (end - first) + 1))
    return np.array(found, np.int64).reshape(-1, 4)


KERNELS["numba"] = NumbaAttention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--models", nargs="+", default=["30m"])
    parser.add_argument("--loads", nargs="+", choices=("w1", "w2", "w3"), default=["w1", "w2", "w3"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "numba_attention.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    forms = {"eager": FORMS["persistent batch"], "v1": FORMS["v1"]}
    base = replace(STAGES["shared"], client=InProcessClient, num_threads=args.threads, max_num_seqs=64)
    base = replace(base, max_model_len=8192, max_num_batched_tokens=512, runner=EagerRunner)
    result: dict[str, Any] = {
        "what": "seconds of three loads with attention in C++ and in numba, in turns",
        "machine": msgspec.to_builtins(describe_machine()),
        "numba": numba.__version__,
        "threads": args.threads,
        "models": {},
    }
    for shape in args.models:
        model = str(make_checkpoint(shape, args.cache))
        engines = {
            (form, kernel): Engine(
                replace(base, model=model, kv_cache_memory_bytes=POOL_BYTES, attention=attention, **fields)
            )
            for form, fields in forms.items()
            for kernel, attention in KERNELS.items()
        }
        rounds: dict[str, dict[str, dict[str, list[dict[str, float]]]]] = {}
        for number in range(args.rounds + 1):  # the first warms up, and compiles
            for name in args.loads:
                load = make_load(name, VOCAB_SIZE)
                for (form, kernel), engine in engines.items():
                    if not number and name == args.loads[0]:
                        engine.write_pool()
                    lasted_s, _, stamps = engine.run(load)
                    found = {"seconds": lasted_s} | (gaps(stamps) if name == "w3" else {})
                    of_form = rounds.setdefault(name, {}).setdefault(form, {})
                    of_form.setdefault(kernel, []).extend([found] * bool(number))
        print(
            f"\n| {shape}, numba over C++ | rounds | seconds | decode ms | max gap ms | late TTFT ms |\n"
            + "|---" * 6
            + "|"
        )
        ratios: dict[str, dict[str, dict[str, float]]] = {}
        for name, by_form in rounds.items():
            for form, by in by_form.items():
                keys = list(by["C++"][0])
                ratio = {key: median_ratio(*([r[key] for r in by[k]] for k in ("numba", "C++"))) for key in keys}
                medians = {k: statistics.median(r["seconds"] for r in by[k]) for k in KERNELS}
                ratios.setdefault(name, {})[form] = ratio
                cells = [f"{ratio[k]:.2f}" if k in ratio else "" for k in ("decode_ms", "max_gap_ms", "late_ttft_ms")]
                seconds = f"{ratio['seconds']:.2f} ({medians['numba']:.2f} / {medians['C++']:.2f} s)"
                print("| " + " | ".join([f"{name}, {form}", str(args.rounds), seconds, *cells]) + " |", flush=True)
        result["models"][shape] = {"numba_over_cpp": ratios, "rounds": rounds}
        for engine in engines.values():
            engine.close()
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
