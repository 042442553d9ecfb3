"""From arrival to admission while steps run: per layout, one step ahead and not.

    python benchmarks/admission.py [--rounds 5] [--requests 40] [--decodes 16] [--out benchmarks/results/admission.json]

Some requests decode without end; others, of one token, arrive at random moments from a thread of their own. Admission
is when the plan with the request in it goes to the runner, as the core's records tell it; one step ahead, that is while
the step before it still runs. The first token says what a user sees of it. Layouts and modes take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec

from nanoserve.client import CoreProcessClient, InProcessClient, SplitRunnerClient
from nanoserve.config import STAGES
from nanoserve.lab.metrics import percentile
from nanoserve.machine import describe_machine
from nanoserve.record import JsonlRecorder, read_trace
from nanoserve.request import EngineRequest, SamplingParams

LAYOUTS = {"inproc": InProcessClient, "core_process": CoreProcessClient, "split_runner": SplitRunnerClient}
LONG = 4000


def measure(layout: str, ahead: bool, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Milliseconds from arrival to admission, and of a step."""
    config = replace(STAGES["v1"], client=LAYOUTS[layout], async_scheduling=ahead, model=args.model, device=args.device)
    with tempfile.TemporaryDirectory() as folder:
        recorder = JsonlRecorder(Path(folder) / "trace.jsonl")
        with LAYOUTS[layout](replace(config, max_model_len="auto"), recorder) as client:
            for i in range(args.decodes):
                client.submit(request(f"long-{i}", LONG))
            arriving = threading.Thread(target=arrive, args=(client, args.requests, random.Random(seed)))
            for _ in range(20):
                client.poll(10)
            arriving.start()
            ended = 0
            while ended < args.requests:
                ended += sum(output.id.startswith("short") for output in client.poll(10) if output.finish_reason)
            arriving.join()
        _, records = read_trace(recorder.path)
    arrivals = {r.id: r.arrival_s for record in records for r in record.arrivals if r.id.startswith("short")}
    waits = [record.launched_s - arrivals[i] for record in records for i in record.hit_tokens if i in arrivals]
    tokens = [record.end_s - arrivals[i] for record in records for i in record.sampled if i in arrivals]
    decodes = [b.end_s - a.end_s for a, b in pairwise(records) if len(b.num_scheduled_tokens) == args.decodes]
    return {
        "p50_ms": percentile(waits, 50) * 1e3,
        "p90_ms": percentile(waits, 90) * 1e3,
        "first_token_p50_ms": percentile(tokens, 50) * 1e3,
        "step_p50_ms": percentile(decodes, 50) * 1e3,
    }


def arrive(client: InProcessClient | CoreProcessClient, num_requests: int, rng: random.Random) -> None:
    for i in range(num_requests):
        time.sleep(rng.uniform(0.01, 0.04))
        client.submit(request(f"short-{i}", 1))


def request(request_id: str, max_tokens: int) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    prompt = [5 + sum(request_id.encode()) % 500] * 8
    return EngineRequest(id=request_id, prompt_token_ids=prompt, params=params, arrival_s=time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nanostory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--decodes", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "admission.json")
    args = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {}
    for number in range(1, args.rounds + 1):
        for layout in LAYOUTS:
            for ahead in (False, True):
                name = f"{layout}, {'one step ahead' if ahead else 'in step'}"
                rounds.setdefault(name, []).append(measure(layout, ahead, args, number))
        print(f"round {number} of {args.rounds} is done", file=sys.stderr, flush=True)
    medians = {
        name: {key: statistics.median(r[key] for r in several) for key in several[0]}
        for name, several in rounds.items()
    }
    print("| ms from arrival | to admission, P50 | P90 | to the first token, P50 | a step |\n|---|---|---|---|---|")
    for name, figures in medians.items():
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in figures.values()) + " |")
    result = {
        "what": "milliseconds from a request's arrival to its admission while other requests decode",
        "command": "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": msgspec.to_builtins(describe_machine()),
        "medians": medians,
        "rounds": rounds,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
