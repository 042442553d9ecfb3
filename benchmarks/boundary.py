"""What a process boundary costs: a step without a model, in each layout, at several numbers of running requests.

    python benchmarks/boundary.py [--rounds 5] [--steps 200] [--out benchmarks/results/boundary.json]

Layouts take turns within a round. A step's time is from one `schedule()` to the next as the core's own records tell
it; bytes are those of the messages that cross, encoded as the layouts encode them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec

from nanoserve import messages
from nanoserve.client import CoreProcessClient, InProcessClient, SplitRunnerClient
from nanoserve.config import STAGES, EngineConfig
from nanoserve.lab.fakes import NullRunner
from nanoserve.lab.ladder_report import describe_machine
from nanoserve.messages import CoreOutputs, SchedulerStats
from nanoserve.record import JsonlRecorder, read_trace
from nanoserve.request import EngineOutput, EngineRequest, SamplingParams, StepPlan, StepResult

LAYOUTS = {"inproc": InProcessClient, "core_process": CoreProcessClient, "split_runner": SplitRunnerClient}
RUNNING = (1, 64, 256)
PROMPT_LEN = 32


@dataclass
class Point:
    """Medians over the rounds."""

    layout: str
    num_running: int
    step_us: float
    us_per_request: float
    added_us: float  # against inproc, in the same rounds
    start_s: float
    plan_bytes: int  # to a runner process, a decode step
    outputs_bytes: int  # to the front end, a decode step


def config_of(layout: str, num_running: int) -> EngineConfig:
    stage = STAGES["shared"]
    return replace(stage, client=LAYOUTS[layout], runner=NullRunner, max_num_seqs=max(num_running, 2))


def measure(layout: str, num_running: int, num_steps: int) -> tuple[float, float]:
    """(median time of a decode step in us, start-up in s)."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = JsonlRecorder(Path(folder) / "trace.jsonl")
        start_s = time.monotonic()
        with LAYOUTS[layout](config_of(layout, num_running), recorder) as client:
            start_up_s = time.monotonic() - start_s
            params = SamplingParams(max_tokens=num_steps, temperature=0, ignore_eos=True)
            for i in range(num_running):
                prompt = [(i + j) % 1000 for j in range(PROMPT_LEN)]
                client.submit(EngineRequest(id=f"request-{i}", prompt_token_ids=prompt, params=params))
            ended = 0
            while ended < num_running:
                ended += sum(output.finish_reason is not None for output in client.poll(30))
        _, records = read_trace(recorder.path)
    full = [record.start_s for record in records if len(record.num_scheduled_tokens) == num_running]
    return statistics.median(b - a for a, b in pairwise(full[2:])) * 1e6, start_up_s


def message_bytes(num_running: int) -> tuple[int, int]:
    """(plan, outputs) of a decode step in which every sixteenth request gets a new block."""
    ids = [f"request-{i}" for i in range(num_running)]
    plan = StepPlan(1000, dict.fromkeys(ids, 1), new_blocks={i: [7] for i in ids[::16]})
    outputs = [EngineOutput(id=i, new_token_ids=[123]) for i in ids]
    result = StepResult({i: [123] for i in ids})
    to_runner = len(msgspec.msgpack.encode(plan)) + len(msgspec.msgpack.encode(result))
    return to_runner, len(messages.encode(CoreOutputs(outputs, SchedulerStats())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "boundary.json")
    args = parser.parse_args()
    points = []
    print("| running | layout | step, us | us per request | added by the boundary, us | bytes a step | start-up, s |")
    print("|---|---|---|---|---|---|---|")
    for num_running in RUNNING:
        rounds = [{layout: measure(layout, num_running, args.steps) for layout in LAYOUTS} for _ in range(args.rounds)]
        plan_bytes, outputs_bytes = message_bytes(num_running)
        for layout in LAYOUTS:
            step_us = statistics.median(r[layout][0] for r in rounds)
            added_us = statistics.median(r[layout][0] - r["inproc"][0] for r in rounds)
            start_s = statistics.median(r[layout][1] for r in rounds)
            crossing = (plan_bytes * (layout == "split_runner"), outputs_bytes * (layout != "inproc"))
            points.append(Point(layout, num_running, step_us, step_us / num_running, added_us, start_s, *crossing))
            print(
                f"| {num_running} | {layout} | {step_us:,.0f} | {step_us / num_running:.1f} | {added_us:,.0f} | "
                f"{sum(crossing):,} | {start_s:.2f} |",
                flush=True,
            )
    result = {
        "what": "step of a null runner, per layout",
        "command": f"python benchmarks/boundary.py --rounds {args.rounds} --steps {args.steps}",
        "machine": msgspec.to_builtins(describe_machine()),
        "points": [asdict(point) for point in points],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
