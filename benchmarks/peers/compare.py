"""The same loads on nanoserve and on its peers, which take turns: tokens a second, gaps, and whose tokens are the same.

    python benchmarks/peers/compare.py --cache FOLDER --venvs FOLDER [--models 30m 150m] [--loads w1 w2 w3]
        [--peers nanoserve transformers transformers_cb vllm llama] [--rounds 5] [--more] [--threads 2]
        [--budget 512] [--out benchmarks/results/peers.json]

Peers live in virtual environments of their own, VENVS/transformers, VENVS/vllm and VENVS/llama; README.md beside this
file tells how they are made. Each runs in a process that loads the model once and then waits for its turn; figures are
medians over the rounds. A step has up to `budget` tokens, except with transformers' `generate`, which has no such
limit. Tokens are compared with those of transformers' `generate` in float32, which are kept in CACHE
for runs without it. Whatever speculates or samples is off everywhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from checkpoints_qwen3 import VOCAB_SIZE, make_checkpoint  # noqa: E402  (beside this folder)
from loads import Stamps, gaps, make_load  # noqa: E402
from peer import PEERS, Peer  # noqa: E402

from nanoserve.machine import describe_machine  # noqa: E402

REFERENCE, NEXT_BEST = "transformers", "vllm"  # whose float32 tokens are asked for
Tokens = list[list[int]]
Round = dict[str, dict[str, float]]  # of one load: the peers that took turns in it, and their figures


def figures_of(load: str, answer: dict[str, Any]) -> dict[str, float]:
    found = {"seconds": answer["seconds"]}
    if answer["stamps"]:
        of, late_at = answer["stamps"]
        return found | gaps(Stamps(dict(of), late_at))
    return found | {"output_tok_per_s": sum(map(len, answer["tokens"])) / answer["seconds"]}


def agreement(shape: str, load: str, tokens: dict[str, list[Tokens]], args: argparse.Namespace) -> dict[str, Any]:
    """How many requests have, in the round with the fewest, the tokens of transformers, now or in an earlier run; or
    else of vllm. Nobody is counted beside itself."""
    kept = args.cache / f"qwen3-{shape}" / f"tokens-{load}.json"
    if REFERENCE in tokens:
        kept.write_text(json.dumps(tokens[REFERENCE][-1]) + "\n")
    reference = REFERENCE if kept.exists() else NEXT_BEST if NEXT_BEST in tokens else None
    if reference is None:
        return {"reference": None}
    expected = json.loads(kept.read_text()) if kept.exists() else tokens[reference][-1]
    others = {name: rounds for name, rounds in tokens.items() if name != reference}
    counts = {name: min(sum(map(list.__eq__, mine, expected)) for mine in rounds) for name, rounds in others.items()}
    return {"reference": reference, "requests": len(expected), **counts}


def compare(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of this run alone."""
    model = make_checkpoint(shape, args.cache)
    peers: dict[str, Peer] = {}
    rounds: dict[str, list[Round]] = {load: [] for load in args.loads}
    tokens: dict[str, dict[str, list[Tokens]]] = {}
    try:
        for name in args.peers:
            peers[name] = Peer(name, args.venvs, model, VOCAB_SIZE, args.threads, args.budget)
        for number in range(args.rounds):
            for load in args.loads:
                rounds[load].append({})
                for name in turned(args.peers, number):
                    peer = peers[name]
                    if make_load(load, VOCAB_SIZE).late is not None and not peer.about["streams"]:
                        continue
                    answer = peer.run(load)
                    rounds[load][-1][name] = figures_of(load, answer)
                    tokens.setdefault(load, {}).setdefault(name, []).append(answer["tokens"])
    finally:
        for peer in peers.values():
            peer.close()
    return {
        "limits": dict.fromkeys(tokens, limits_of(args)),
        "peers": {name: peer.about for name, peer in peers.items()},
        "requests_alike": {load: agreement(shape, load, by, args) for load, by in tokens.items()},
        "rounds": {load: rounds[load] for load in tokens},
    }


def turned(names: list[str], number: int) -> list[str]:
    """Another one begins in each round."""
    first = number % len(names)
    return names[first:] + names[:first]


def limits_of(args: argparse.Namespace) -> dict[str, int]:
    """What rounds must have in common to stand beside each other."""
    return {"budget": args.budget, "threads": args.threads}


def merge(kept: dict[str, Any], found: dict[str, Any], *, more: bool) -> None:
    """Into what is kept of a model: a load's rounds take the place of the same peers' earlier ones, or (`more`) join
    them; those of other limits go. Peers of one round took turns; those of different rounds did not."""
    kept.setdefault("peers", {}).update(found["peers"])
    for load, new in found["rounds"].items():
        limits, limit = kept.setdefault("limits", {}), found["limits"][load]
        if limits.setdefault(load, limit) != limit:
            limits[load] = limit
            for key in ("rounds", "requests_alike"):
                kept[key].pop(load)
        rounds: list[Round] = kept.setdefault("rounds", {}).get(load, [])
        if not more:
            again = {name for a_round in new for name in a_round}
            rounds = [{name: a_round[name] for name in a_round.keys() - again} for a_round in rounds]
        kept["rounds"][load] = rounds = [a_round for a_round in rounds if a_round] + new
        alike = found["requests_alike"][load]
        before = kept.setdefault("requests_alike", {}).get(load, alike)
        kept["requests_alike"][load] = (before if before["reference"] == alike["reference"] else {}) | alike
        names = dict.fromkeys(name for a_round in rounds for name in a_round)
        kept.setdefault("medians", {})[load] = {name: median(of_peer(rounds, name)) for name in names}


def of_peer(rounds: list[Round], name: str) -> list[dict[str, float]]:
    return [a_round[name] for a_round in rounds if name in a_round]


def median(figures: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in figures) for key in figures[0]}


def table(found: dict[str, Any]) -> str:
    heads = "load", "tokens a step", "engine", "rounds", "output tok/s", "decode ms", "max gap ms", "late TTFT ms"
    lines = ["| " + " | ".join([*heads, "requests alike"]) + " |", "|---" * (len(heads) + 1) + "|"]
    for load, by in found["medians"].items():
        alike = found["requests_alike"][load]
        for name, figures in by.items():
            about = found["peers"][name]
            keys = ("output_tok_per_s", "decode_ms", "max_gap_ms", "late_ttft_ms")
            cells = [load, str(found["limits"][load]["budget"]), f"{about['name']} {about['version']}"]
            cells.append(str(len(of_peer(found["rounds"][load], name))))
            cells += [f"{figures[key]:.1f}" if key in figures else "" for key in keys]
            counted = f"{alike[name]} of {alike['requests']}" if name in alike else ""
            cells.append("the reference" if name == alike["reference"] else counted)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--venvs", type=Path, required=True, help="folder of the peers' virtual environments")
    parser.add_argument("--models", nargs="+", default=["30m", "150m"])
    parser.add_argument("--loads", nargs="+", choices=("w1", "w2", "w3"), default=["w1", "w2", "w3"])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--more", action="store_true", help="rounds that join those in --out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=int, default=512, help="tokens a step")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "peers.json")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "what": "the same loads on nanoserve and on its peers, in turns",
        "machine": msgspec.to_builtins(describe_machine()),
        "threads": args.threads,
        "models": {},
    }
    if args.out.exists():  # loads, models and peers measured in runs of their own stand beside each other
        result["models"] = json.loads(args.out.read_text())["models"]
    for shape, load in product(args.models, args.loads) if args.more else ():
        before = result["models"].get(shape, {}).get("limits", {}).get(load, limits_of(args))
        if before != limits_of(args):
            parser.error(
                f"--more: the rounds of {shape} {load} in {args.out.name} are of {before}; join them with those."
            )
    for shape in args.models:
        kept = result["models"].setdefault(shape, {})
        merge(kept, compare(shape, args), more=args.more)
        print(f"\n{shape}, {args.threads} threads\n{table(kept)}", flush=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
