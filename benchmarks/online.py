"""A running `nanoserve serve` under more and more requests a second: throughput, first tokens, and gaps between tokens.

    python benchmarks/online.py [--model nanostory] [--rates 2 4 8 16 32] [--seconds 10] [--prompt-len uniform:16:256]
        [--output-len uniform:32:96] [--rounds 1] [--out benchmarks/results/online.json]

The load is `nanoserve bench --url`, for one rate after the other: requests come at random times (Poisson), whatever
has become of those before, so that a rate which the server does not keep up with shows as a queue in front of it, in
the time to the first token. More rounds go through all rates again; the figures are medians over them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from server import COMMAND, environment, serving

from nanoserve.config import DEFAULT_MODEL
from nanoserve.machine import describe_machine

HEAD = ("asked, req/s", "done, req/s", "output tok/s", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "errors")


def bench(url: str, rate: float, args: argparse.Namespace) -> dict[str, Any]:
    command = [*COMMAND, "bench", "--url", url, "--request-rate", str(rate), "--json"]
    command += ["--num-requests", str(max(10, round(rate * args.seconds)))]
    command += ["--prompt-len", args.prompt_len, "--output-len", args.output_len]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment(1)).stdout)


def figures(report: dict[str, Any]) -> dict[str, float]:
    found = report["metrics"]
    return {
        "requests_per_s": found["requests_per_s"],
        "output_tok_per_s": found["output_tokens_per_s"],
        "ttft_p50_ms": 1e3 * found["ttft_s"]["p50"],
        "ttft_p99_ms": 1e3 * found["ttft_s"]["p99"],
        "itl_p50_ms": 1e3 * found["itl_s"]["p50"],
        "itl_p99_ms": 1e3 * found["itl_s"]["p99"],
        "errors": found["num_requests"] - found["num_ok"],
        "load_cpu_share": report["cpu_share"],  # of the process that makes the load
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rates", nargs="+", type=float, default=[2, 4, 8, 16, 32])
    parser.add_argument("--seconds", type=float, default=10, help="of each rate")
    parser.add_argument("--prompt-len", default="uniform:16:256")
    parser.add_argument("--output-len", default="uniform:32:96")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "online.json")
    args = parser.parse_args()
    machine = describe_machine()
    rounds: dict[float, list[dict[str, float]]] = {rate: [] for rate in args.rates}
    with serving("--model", args.model) as (url, _):
        for _ in range(args.rounds):
            for rate in args.rates:
                rounds[rate].append(figures(bench(url, rate, args)))
    medians = {rate: {key: statistics.median(r[key] for r in rs) for key in rs[0]} for rate, rs in rounds.items()}
    print(f"{args.model}, prompts {args.prompt_len}, outputs {args.output_len}")
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    for rate, found in medians.items():
        cells = [f"{rate:g}", f"{found['requests_per_s']:.1f}", f"{found['output_tok_per_s']:.0f}"]
        cells += [f"{found[key]:.1f}" for key in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")]
        print("| " + " | ".join([*cells, f"{found['errors']:.0f}"]) + " |")
    result = {
        "what": "a running server under rising request rates",
        "command": "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": msgspec.to_builtins(machine),
        "medians": medians,
        "rounds": rounds,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
