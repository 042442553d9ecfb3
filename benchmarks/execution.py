"""What each way of executing a step gains: batch, graphs, compiled code, one step ahead, side by side.

    python benchmarks/execution.py [--model nanostory] [--device auto] [--requests 1 8 64] [--rounds 5]
        [--skip-compiled] [--out benchmarks/results/execution.json]

Every row is an engine in one process with one field moved against plain eager steps of torch's operations ("fused by
hand": the device's own, CpuOps or TritonOps); rows take turns within a round.
Requests decode together; figures are of the steps in which all of them do, medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from nanoserve.client import InProcessClient
from nanoserve.config import STAGES, EngineConfig
from nanoserve.graph_runner import GraphRunner
from nanoserve.machine import describe_machine
from nanoserve.ops import TorchOps
from nanoserve.persistent_batch import PersistentBatch
from nanoserve.record import ListRecorder
from nanoserve.request import EngineRequest, SamplingParams

ROWS: dict[str, dict[str, Any]] = {
    "eager": {},
    "persistent batch": {"batch": PersistentBatch},
    "graphs, piecewise": {"runner": GraphRunner, "graph_mode": "piecewise"},
    "graphs, full": {"runner": GraphRunner, "graph_mode": "full_and_piecewise"},
    "one step ahead": {"async_scheduling": True},
    "compiled layers": {"compile": "layers"},
    "compiled model": {"compile": "model"},
    "compiled layers + graphs": {"compile": "layers", "runner": GraphRunner},
    "fused by hand": {"ops": None},
    "fused by hand + graphs": {"ops": None, "runner": GraphRunner},
    "stage v1": {
        "runner": GraphRunner,
        "batch": PersistentBatch,
        "compile": None,
        "async_scheduling": True,
        "ops": None,
    },
}
NUM_TOKENS = 64


def measure(client: InProcessClient, recorder: ListRecorder, num_requests: int) -> dict[str, float]:
    """Of the steps in which every request decodes: milliseconds from one to the next, and of the host."""
    recorder.records.clear()
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    for i in range(num_requests):
        client.submit(EngineRequest(id=f"r{i}", prompt_token_ids=list(range(3 + i, 35 + i)), params=params))
    ended = 0
    while ended < num_requests:
        ended += sum(output.finish_reason is not None for output in client.poll(60))
    while client.core.has_work:
        client.poll(1)
    full = [r for r in recorder.records if list(r.num_scheduled_tokens.values()) == [1] * num_requests]
    return {
        "step_ms": statistics.median(b.end_s - a.end_s for a, b in pairwise(full)) * 1e3,
        "host_ms": statistics.median(r.host_s for r in full) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nanostory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-compiled", action="store_true", help="no torch.compile")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "execution.json")
    args = parser.parse_args()
    rows = dict(ROWS)
    if args.skip_compiled:
        rows = {name: fields for name, fields in rows.items() if fields.get("compile", "none") == "none"}
    base = replace(STAGES["shared"], client=InProcessClient, model=args.model, device=args.device, ops=TorchOps)
    base = replace(base, max_model_len="auto", max_num_seqs=max(args.requests))
    engines: dict[str, tuple[InProcessClient, ListRecorder]] = {}
    for name, fields in rows.items():
        recorder = ListRecorder()
        config: EngineConfig = replace(base, **fields)
        engines[name] = InProcessClient(config, recorder), recorder
        print(f"{name}: {engines[name][0].info.execution}", file=sys.stderr, flush=True)
    found: dict[str, dict[int, list[dict[str, float]]]] = {name: {n: [] for n in args.requests} for name in rows}
    for number in range(args.rounds + 1):
        for n in args.requests:
            for name, (client, recorder) in engines.items():
                figures = measure(client, recorder, n)
                if number:  # the first one warms up
                    found[name][n].append(figures)
        print(f"round {number} of {args.rounds} (0 warms up) is done", file=sys.stderr, flush=True)
    print("| milliseconds a step (host) | " + " | ".join(f"{n} requests" for n in args.requests) + " |")
    print("|---" * (len(args.requests) + 1) + "|")
    medians: dict[str, dict[str, dict[str, float]]] = {}
    for name, by_count in found.items():
        medians[name] = {
            str(n): {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
            for n, rounds in by_count.items()
        }
        cells = []
        for n in args.requests:
            mine, eager = medians[name][str(n)], medians["eager"][str(n)]
            ratio = mine["step_ms"] / eager["step_ms"]
            cells.append(f"{mine['step_ms']:.2f} x{ratio:.2f} ({mine['host_ms']:.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |")
    result = {
        "what": "milliseconds of a decode step, and of it on the host, by way of executing it",
        "command": "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": msgspec.to_builtins(describe_machine()),
        "execution": {name: msgspec.to_builtins(client.info.execution) for name, (client, _) in engines.items()},
        "medians": medians,
        "rounds": {name: {str(n): r for n, r in by_count.items()} for name, by_count in found.items()},
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for client, _ in engines.values():
        client.close()


if __name__ == "__main__":
    main()
