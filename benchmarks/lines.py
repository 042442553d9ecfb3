"""What the engine promises of its speed, line by line: found, wanted, and whether it holds.

    python benchmarks/lines.py --cache FOLDER --venvs FOLDER [--only floor host costs tokens errors start generate]
        [--models 30m 150m] [--rounds 7] [--threads 2] [--out benchmarks/results/lines.json]

floor: a decode step over its floor. host: everything but the model, of a step. costs: a prefix cache without hits, and
recording. tokens: greedy ones beside transformers'. errors: of each kernel in each dtype. start, generate: of the
embedded model. Parts and models that are measured in runs of their own stand beside each other in one file; beside it
a table is written of all of them, and of what peers/compare.py has found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import line_costs
import line_nanostory
import line_steps
import msgspec
import torch
from checkpoints_qwen3 import VOCAB_SIZE, make_checkpoint
from line import Line, median_ratio, table
from offline import Engine
from peers.loads import make_load
from peers.peer import Peer

from nanoserve.config import DEFAULT_MODEL
from nanoserve.machine import describe_machine

PER_MODEL = ("floor", "host", "costs", "tokens")
PARTS = (*PER_MODEL, "start", "generate", "errors")
RESULTS = Path(__file__).parent / "results"
BESIDE = (  # load, figure, peer, how many times the peer's
    ("w1", "output_tok_per_s", "vllm", ">=", 1.2),
    ("w1", "output_tok_per_s", "transformers", ">=", 3.0),
    ("w2", "output_tok_per_s", "vllm", ">=", 1.1),
    ("w3", "max_gap_ms", "vllm", "<=", 0.9),
    ("w3", "late_ttft_ms", "vllm", "<=", 1.0),
    ("w3", "decode_ms", "vllm", "<=", 0.75),
)


def check_tokens(shape: str, args: argparse.Namespace) -> list[Line]:
    """W1's, all at once. What transformers answers to it is kept beside the checkpoint: it does not change."""
    path = make_checkpoint(shape, args.cache)
    kept, load = path / "tokens-w1.json", make_load("w1", VOCAB_SIZE)
    if not kept.exists():
        peer = Peer("transformers", args.venvs, path, VOCAB_SIZE, args.threads)
        kept.write_text(json.dumps(peer.run("w1")["tokens"]) + "\n")
        peer.close()
    engine = Engine(line_steps.served(path, args.threads))
    _, tokens, _ = engine.run(load)
    engine.close()
    differ = {}  # request: the first token that is another one
    for i, theirs in enumerate(json.loads(kept.read_text())):
        places = [place for place, pair in enumerate(zip(tokens[i], theirs, strict=True)) if pair[0] != pair[1]]
        differ |= {str(i): places[0]} if places else {}
    what = f"{shape}, W1: requests with transformers' greedy float32 tokens, of {len(load.prompts)}"
    return [Line(what, len(load.prompts) - len(differ), "", ">=", len(load.prompts), {"differ_at": differ})]


def measure(part: str, shape: str, args: argparse.Namespace) -> list[Line]:
    path = make_checkpoint(shape, args.cache)
    if part == "floor":
        with torch.inference_mode():
            return line_steps.measure_floor(shape, path, args.rounds, args.threads)
    if part == "host":
        return line_steps.measure_host(shape, path, args.rounds, args.threads, promised=shape == "150m")
    if part == "costs":
        return line_costs.measure_costs(shape, path, args.rounds, args.threads)
    return check_tokens(shape, args)


def measure_errors(args: argparse.Namespace) -> dict[str, Any]:
    os.environ["TRITON_INTERPRET"] = "1"  # before its kernels are imported
    import line_errors

    models = {DEFAULT_MODEL: DEFAULT_MODEL} | {shape: make_checkpoint(shape, args.cache) for shape in args.models}
    found = line_errors.measure_errors(models)
    print(line_errors.table(found))
    return {"errors": [asdict(error) for error in found], "table": line_errors.table(found)}


def beside_peers(path: Path) -> list[Line]:
    """From the rounds of peers/compare.py, as far as there are any."""
    lines = []
    for shape, found in (json.loads(path.read_text())["models"] if path.exists() else {}).items():
        for load, figure, peer, relation, limit in BESIDE:
            rounds = [one for one in found["rounds"].get(load, ()) if {"nanoserve", peer} <= one.keys()]
            if not rounds:
                continue
            ratio = median_ratio(*([one[name][figure] for one in rounds] for name in ("nanoserve", peer)))
            of = f"{shape}, {load.upper()}, {found['limits'][load]['budget']} tokens a step, KV cache written before"
            what = f"{of}: {figure} over {found['peers'][peer]['name']}'s, {len(rounds)} rounds"
            lines.append(Line(what, ratio, "x", relation, limit))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--venvs", type=Path, required=True, help="folder of the peers' virtual environments")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", default=["30m", "150m"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "lines.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    kept: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    command = " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    command = command.replace(str(args.cache), "CACHE").replace(str(args.venvs), "VENVS")

    def keep(name: str, **found: Any) -> None:
        machine = msgspec.to_builtins(describe_machine())
        kept[name] = {"command": f"python {command}", "machine": machine, "threads": args.threads, **found}
        args.out.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")

    def keep_lines(name: str, call: Callable[[], list[Line]]) -> None:
        lines = call()
        keep(name, lines=[asdict(line) for line in lines])
        print(f"\n{table(name, lines)}", flush=True)

    for part in args.only:
        for shape in args.models if part in PER_MODEL else ():
            keep_lines(f"{part} {shape}", lambda part=part, shape=shape: measure(part, shape, args))
    if "start" in args.only:
        keep_lines("start", lambda: line_nanostory.measure_start(args.rounds))
    for threads in (1, None) if "generate" in args.only else ():
        name = f"generate {threads or 'by itself'}"
        keep_lines(name, lambda n=threads: line_nanostory.measure_generate(args.rounds, args.venvs, n))
    if "errors" in args.only:
        keep("errors", **measure_errors(args))
    lines = [Line(**line) for name in sorted(kept) for line in kept[name].get("lines", ())]
    whole = table("promise", lines + beside_peers(RESULTS / "peers.json"))
    errors = kept.get("errors", {}).get("table", "")
    args.out.with_suffix(".md").write_text(f"{whole}\n\n{errors}".strip() + "\n")


if __name__ == "__main__":
    main()
