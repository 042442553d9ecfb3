"""One interpreter lock or two: the gap between two engine steps while the front end is busy, in each layout.

    python benchmarks/step_gap.py [--rounds 3] [--streams 300] [--out benchmarks/results/step_gap.json]

Each run is a real server (`nanoserve serve`, the embedded model) under `nanoserve bench` with that many concurrent
streams, started under `nice` as one process; a third process asks `/health` all the while. The gap is from the end of
a step to the start of the next while requests are waiting for it, from the records of the core itself. Layouts take
turns; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from nanoserve.lab.bench_report import BenchReport
from nanoserve.lab.ladder_report import describe_machine
from nanoserve.lab.metrics import percentile
from nanoserve.record import read_trace

LAYOUTS = ("inproc", "core_process", "split_runner")
FIGURES = {
    "gap_p50_ms": "gap P50",
    "gap_p99_ms": "P99",
    "gap_max_ms": "max",
    "step_p50_ms": "step P50",
    "step_p99_ms": "P99",
    "health_p50_ms": "/health P50",
    "health_p99_ms": "P99",
    "output_tokens_per_s": "tokens/s",
    "client_cpu_share": "client's CPU",
    "ready_s": "ready, s",
}


class HealthProbe(threading.Thread):
    """Asks /health every 20 ms from a process that does nothing else."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.latencies_ms: list[float] = []
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.02):
            start_s = time.monotonic()
            with urllib.request.urlopen(f"{self.url}/health", timeout=30) as answer:
                assert answer.status == 200
            self.latencies_ms.append((time.monotonic() - start_s) * 1e3)


def measure(layout: str, num_streams: int, folder: Path) -> dict[str, float]:
    """One server's life: its figures."""
    trace = folder / f"{layout}.jsonl"
    command = ["serve", "--stage", "shared", "--client", layout, "--port", "0", "--record", str(trace)]
    start_s = time.monotonic()
    server = nanoserve(*command, "--max-num-seqs", str(num_streams), "--max-num-batched-tokens", "1024")
    try:
        url = wait_until_ready(server)
        ready_s = time.monotonic() - start_s
        probe = HealthProbe(url)
        probe.start()
        report = run_bench(url, num_streams)
        probe.done.set()
        probe.join(30)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    _, records = read_trace(trace)
    gaps = [b.start_s - a.end_s for a, b in pairwise(records) if a.num_running + a.num_waiting > 0]
    durations = [record.end_s - record.start_s for record in records]
    return {
        "gap_p50_ms": percentile(gaps, 50) * 1e3,
        "gap_p99_ms": percentile(gaps, 99) * 1e3,
        "gap_max_ms": max(gaps) * 1e3,
        "step_p50_ms": percentile(durations, 50) * 1e3,
        "step_p99_ms": percentile(durations, 99) * 1e3,
        "health_p50_ms": percentile(probe.latencies_ms, 50),
        "health_p99_ms": percentile(probe.latencies_ms, 99),
        "output_tokens_per_s": report["output_tokens_per_s"],
        "client_cpu_share": report["client_cpu_share"],
        "num_steps": len(records),
        "ready_s": ready_s,
    }


def nanoserve(*args: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nanoserve", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def wait_until_ready(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found.group()
    raise RuntimeError(f"the server ended with {server.wait()} before it was ready")


def run_bench(url: str, num_streams: int) -> dict[str, float]:
    """The load: twice as many requests as streams, prompts of about 300 words of text behind a common prefix."""
    args = ["bench", "--url", url, "--concurrency", str(num_streams), "--num-requests", str(2 * num_streams)]
    args += ["--prompts", "text", "--prompt-len", "uniform:100:500", "--output-len", "64", "--timeout", "300", "--json"]
    bench = nanoserve(*args, preexec_fn=lambda: os.nice(10))
    out, _ = bench.communicate(timeout=600)
    if bench.returncode != 0:
        raise RuntimeError(f"bench failed: {out[-500:]}")
    report = msgspec.json.decode(out, type=BenchReport)
    return {"output_tokens_per_s": report.metrics.output_tokens_per_s, "client_cpu_share": report.cpu_share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step_gap.json")
    args = parser.parse_args()
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, args.rounds + 1):
            rounds.append({})
            for layout in args.layouts:
                rounds[-1][layout] = measure(layout, args.streams, Path(folder))
                print(f"round {number}, {layout}: {json.dumps(rounds[-1][layout])}", file=sys.stderr, flush=True)
    medians = {
        layout: {figure: statistics.median(r[layout][figure] for r in rounds) for figure in rounds[0][layout]}
        for layout in args.layouts
    }
    print(f"| {args.streams} streams | " + " | ".join(FIGURES.values()) + " |")
    print("|---" * (len(FIGURES) + 1) + "|")
    for layout, figures in medians.items():
        print(f"| {layout} | " + " | ".join(f"{figures[figure]:,.2f}" for figure in FIGURES) + " |")
    result = {
        "what": "gap between two engine steps under many concurrent streams, per layout (ms)",
        "command": f"python benchmarks/step_gap.py --rounds {args.rounds} --streams {args.streams}",
        "machine": msgspec.to_builtins(describe_machine()),
        "medians": medians,
        "rounds": rounds,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
