"""The same loads on nanoserve and on its peers, which take turns: tokens a second, gaps, and whose tokens are the same.

    python benchmarks/peers/compare.py --cache FOLDER --venvs FOLDER [--models 30m 150m] [--loads w1 w2 w3]
        [--peers nanoserve transformers vllm] [--rounds 5] [--threads 2] [--out benchmarks/results/peers.json]

Each peer lives in a virtual environment of its own, VENVS/transformers and VENVS/vllm; README.md beside this file tells
how they are made. Each runs in a process that loads the model once and then waits for its turn; figures are medians
over the rounds. Tokens are compared with transformers' float32 ones; `prompt lookup` and sampling are off everywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from checkpoints_qwen3 import VOCAB_SIZE, make_checkpoint  # noqa: E402  (beside this folder)
from loads import Stamps, gaps, make_load  # noqa: E402

from nanoserve.machine import describe_machine  # noqa: E402

PEERS = ("nanoserve", "transformers", "vllm")
STATIC = "transformers"  # whose batches are as long as their longest prompt: it has no prefix cache and no stream


class Peer:
    """One engine in its process."""

    def __init__(self, name: str, python: Path | str, model: Path, threads: int) -> None:
        command = [str(python), str(HERE / f"run_{name}.py"), "--model", str(model)]
        command += ["--vocab-size", str(VOCAB_SIZE), "--threads", str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false"}
        if preload := preloaded(name, Path(python)):
            environment["LD_PRELOAD"] = ":".join(map(str, preload))
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE
        )
        self.about = self._answer()

    def run(self, load: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(load + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with {self._process.wait(30)}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def preloaded(name: str, python: Path) -> list[Path]:
    """The allocator and the threads that vLLM's documentation asks for on a CPU, as far as they are there."""
    if name != "vllm":
        return []
    allocators = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    return allocators[:1] + list((python.parents[1] / "lib").glob("libiomp5.so"))


def figures_of(load: str, answer: dict[str, Any]) -> dict[str, float]:
    found = {"seconds": answer["seconds"]}
    if answer["stamps"]:
        of, late_at = answer["stamps"]
        return found | gaps(Stamps(dict(of), late_at))
    return found | {"output_tok_per_s": sum(map(len, answer["tokens"])) / answer["seconds"]}


def agreement(tokens: dict[str, list[list[int]]]) -> dict[str, Any]:
    """How many requests have the tokens of transformers, or else of the last peer."""
    reference = STATIC if STATIC in tokens else list(tokens)[-1]
    counts = {name: sum(map(list.__eq__, mine, tokens[reference])) for name, mine in tokens.items()}
    return {"reference": reference, "requests": len(tokens[reference]), **counts}


def compare(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    model = make_checkpoint(shape, args.cache)
    pythons = {name: args.venvs / name / "bin" / "python" for name in args.peers} | {"nanoserve": Path(sys.executable)}
    peers = {name: Peer(name, pythons[name], model, args.threads) for name in args.peers}
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    tokens: dict[str, dict[str, list[list[int]]]] = {}
    try:
        for _ in range(args.rounds):
            for load in args.loads:
                for name, peer in peers.items():
                    if make_load(load, VOCAB_SIZE).late is not None and not peer.about["streams"]:
                        continue
                    answer = peer.run(load)
                    runs.setdefault(load, {}).setdefault(name, []).append(figures_of(load, answer))
                    tokens.setdefault(load, {})[name] = answer["tokens"]
    finally:
        for peer in peers.values():
            peer.close()
    agree = {load: agreement(by) for load, by in tokens.items()}
    medians = {
        load: {name: {key: statistics.median(r[key] for r in rs) for key in rs[0]} for name, rs in by.items()}
        for load, by in runs.items()
    }
    return {
        "peers": {name: peer.about for name, peer in peers.items()},
        "medians": medians,
        "requests_alike": agree,
        "rounds": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--venvs", type=Path, required=True, help="folder of the peers' virtual environments")
    parser.add_argument("--models", nargs="+", default=["30m", "150m"])
    parser.add_argument("--loads", nargs="+", choices=("w1", "w2", "w3"), default=["w1", "w2", "w3"])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "peers.json")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "what": "the same loads on nanoserve and on its peers, in turns",
        "machine": msgspec.to_builtins(describe_machine()),
        "threads": args.threads,
        "models": {},
    }
    if args.out.exists():  # loads and models measured in runs of their own stand beside each other
        result["models"] = json.loads(args.out.read_text())["models"]
    for shape in args.models:
        found = compare(shape, args)
        kept = result["models"].setdefault(shape, {key: {} for key in found})
        for key, value in found.items():
            kept[key] |= value
        print(f"\n{shape}, {args.threads} threads")
        print("| load | engine | output tok/s | decode ms | max gap ms | late TTFT ms | requests alike |")
        print("|---" * 7 + "|")
        for load, by in found["medians"].items():
            for name, figures in by.items():
                keys = ("output_tok_per_s", "decode_ms", "max_gap_ms", "late_ttft_ms")
                cells = [f"{figures[key]:.1f}" if key in figures else "" for key in keys]
                alike = found["requests_alike"][load]
                cells.append(f"{alike[name]} of {alike['requests']}")
                print("| " + " | ".join([load, name, *cells]) + " |", flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
