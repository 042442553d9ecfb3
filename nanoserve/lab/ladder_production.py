"""The ladder for a stated production set-up: the stages' own schedulers and block managers on a virtual clock.

Owns what is assumed and three loads of a scale that no laptop has. What a step takes on the device is the roofline of
the data sheets (costs.py); what the host adds is written down here, with its source; what neither can show is said, not
guessed. Nothing is measured, and equal seeds give equal figures. Laws: tests/test_ladder_production.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nanoserve.client import InProcessClient
from nanoserve.lab.costs import Roofline
from nanoserve.lab.front_end import step_gaps
from nanoserve.lab.gpus import Memory, get_gpu, get_model
from nanoserve.lab.ladder_report import Production, SimulatedReport
from nanoserve.lab.ladder_rows import simulated_rows
from nanoserve.lab.metrics import Spread
from nanoserve.lab.prompts import PartIds, TokenRuns
from nanoserve.lab.scenarios import generator, poisson_times
from nanoserve.lab.simulated import SimulatedRun
from nanoserve.lab.simulator import Host, complete_config, simulate
from nanoserve.lab.workload import Arrival, Workload

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig
    from nanoserve.record import StepRecord, TraceHeader

MEMORY = Memory(model=get_model("llama-3-70b"), gpu=get_gpu("h100"), tp=8, dtype="fp8")
COSTS = Roofline(MEMORY)
SEATS = 256  # max_num_seqs
IN_PROCESS = Host(step_us=300, request_us=4.0, front_end_us=20.0)
SPLIT = Host(step_us=365, request_us=4.35, front_end_us=20.0)  # and what the messages cost: benchmarks/boundary.py
SIMULATED = "simulated-"  # every load's name begins like that

NOT_TOLD_APART = (
    "Captured graphs, compiled layers and the persistent batch: the device's time is a formula that knows no launches, "
    "so of stage v1 only the step ahead shows here.",
    "Hashing of prompts, padding of graphs, start-up and capture: they cost time that no term stands for.",
)

STREAM_TOKENS, LONG_PROMPT_LEN = 400, 16_384
SYSTEM_PROMPT_LEN, QUESTION_LEN, ANSWER_LEN = 30_000, 200, 100


@dataclass(frozen=True)
class ProductionRuns:
    """The report, and the runs that its charts are drawn from: load -> stage -> run."""

    report: Production
    runs: dict[str, dict[str, SimulatedRun]] = field(repr=False)


class StepGaps:
    """Speaks `Observer`: keeps the gaps between steps while requests wait, and no record."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._before: StepRecord | None = None

    def on_start(self, header: TraceHeader) -> None:
        self._before = None

    def on_step(self, record: StepRecord) -> None:
        if self._before:
            self.seconds += step_gaps([self._before, record])
        self._before = record

    def close(self) -> None:
        self._before = None


def production_ladder(
    stages: Mapping[str, EngineConfig], seed: int = 0, on_load: Callable[[str], None] = lambda name: None
) -> ProductionRuns:
    """Every stage on the three loads. Only what decides counts: scheduler, blocks, client, and one step ahead."""
    runs: dict[str, dict[str, SimulatedRun]] = {}
    loads = []
    for build in (long_prompts, system_prompt, busy_front_end):
        load = build(seed)
        on_load(load.name)
        done = {name: run_stage(stage, load) for name, stage in stages.items()}
        runs[load.name] = {name: run for name, (run, _) in done.items()}
        loads.append(_report(load, runs[load.name], {name: Spread.of(gaps) for name, (_, gaps) in done.items()}))
    report = Production(
        clock="simulated",
        setup=f"{MEMORY.model.name}, {MEMORY.dtype} weights, on {MEMORY.tp} x {MEMORY.gpu.name}",
        seed=seed,
        num_blocks=MEMORY.num_blocks,
        host={name: host_of(stage) for name, stage in stages.items()},
        assumptions=_assumptions(),
        not_told_apart=list(NOT_TOLD_APART),
        loads=loads,
    )
    return ProductionRuns(report, runs)


def run_stage(stage: EngineConfig, load: Workload) -> tuple[SimulatedRun, list[float]]:
    """One run, and its step gaps in seconds. The budget is the one that the scheduler has by itself on a GPU."""
    plain = replace(stage, max_num_seqs=SEATS, block_size=MEMORY.block_size, max_num_batched_tokens=None)
    config = complete_config(plain, max_model_len=load.longest, num_blocks=MEMORY.num_blocks)
    gaps = StepGaps()
    return simulate(config, load, COSTS, host_of(stage), observer=gaps), gaps.seconds


def host_of(stage: EngineConfig) -> Host:
    return IN_PROCESS if stage.client is InProcessClient else SPLIT


def _report(load: Workload, runs: Mapping[str, SimulatedRun], gaps: Mapping[str, Spread | None]) -> SimulatedReport:
    return SimulatedReport(
        name=load.name,
        claim=load.claim,
        headlines=list(load.headlines),
        parameters=dict(load.parameters),
        num_runs=dict.fromkeys(runs, 1),
        rows=simulated_rows(runs, gaps, load.watched),
    )


def long_prompts(seed: int = 0, num_streams: int = 64, num_long: int = 6) -> Workload:
    """Streams of uniform:100:800 prompt tokens decode; prompts of 16,384 land at random moments (4 a second)."""
    ids, rng = PartIds(), generator(seed, "production streams")
    streams = [
        _arrival(f"stream-{i}", "stream", [(ids.own(), rng.randint(100, 800))], STREAM_TOKENS)
        for i in range(num_streams)
    ]
    times = poisson_times(generator(seed, "production long prompts"), 4.0, float("inf"))
    longs = [
        _arrival(f"long-{i}", "long", [(ids.own(), LONG_PROMPT_LEN)], 8, round(0.3 + at_s, 6))
        for i, at_s in zip(range(num_long), times, strict=False)
    ]
    return Workload(
        name=f"{SIMULATED}long-prompt",
        claim="Prompts of 16,384 tokens land among 64 requests that decode: who freezes, and for how long?",
        watched="stream",
        headlines=("itl_max", "ttft_long_p50"),
        seed=seed,
        parameters={
            "streams": num_streams,
            "stream_tokens": STREAM_TOKENS,
            "long_prompts": num_long,
            "long_prompt_len": LONG_PROMPT_LEN,
        },
        arrivals=streams + longs,
    )


def system_prompt(seed: int = 0, num_sessions: int = 60) -> Workload:
    """Sessions come at random moments (8 a second), each behind the same system prompt."""
    ids = PartIds()
    prefix = (ids.named("system prompt"), SYSTEM_PROMPT_LEN)
    times = poisson_times(generator(seed, "production sessions"), 8.0, float("inf"))
    return Workload(
        name=f"{SIMULATED}system-prompt",
        claim="Sixty sessions behind one system prompt of 30,000 tokens: computed and stored once each, or once.",
        watched="session",
        headlines=("tokens_computed", "peak_used_blocks", "ttft_session_p50"),
        seed=seed,
        parameters={
            "sessions": num_sessions,
            "prefix_len": SYSTEM_PROMPT_LEN,
            "tail_len": QUESTION_LEN,
            "output_tokens": ANSWER_LEN,
        },
        arrivals=[
            _arrival(f"session-{i}", "session", [prefix, (ids.own(), QUESTION_LEN)], ANSWER_LEN, at_s)
            for i, at_s in zip(range(num_sessions), times, strict=False)
        ],
    )


def busy_front_end(seed: int = 0, num_streams: int = SEATS, requests_per_stream: int = 2) -> Workload:
    """Every client sends its next request (uniform:100:400 prompt tokens) when it has the answer to the last."""
    ids, rng = PartIds(), generator(seed, "production clients")
    arrivals = []
    for client in range(num_streams):
        before, at_s = "", round(rng.uniform(0, 0.5), 6)
        for turn in range(requests_per_stream):
            name = f"client-{client}-{turn}"
            prompt = [(ids.own(), rng.randint(100, 400))]
            arrivals.append(_arrival(name, "request", prompt, rng.randint(40, 100), at_s, before))
            before, at_s = name, 0.0
    return Workload(
        name=f"{SIMULATED}busy-front-end",
        claim="Hundreds of streams are detokenized and written: does the next step wait for that, or not?",
        watched="request",
        headlines=("itl_p50", "output_tokens_per_s", "device_busy"),
        seed=seed,
        parameters={"num_streams": num_streams, "requests_per_stream": requests_per_stream},
        arrivals=arrivals,
    )


def _arrival(
    request_id: str, group: str, prompt: list[tuple[int, int]], max_tokens: int, at_s: float = 0.0, follows: str = ""
) -> Arrival:
    return Arrival(
        id=request_id,
        group=group,
        prompt_token_ids=TokenRuns(prompt),
        max_tokens=max_tokens,
        at_s=at_s,
        follows=follows,
    )


def _assumptions() -> list[str]:
    own = QUESTION_LEN + ANSWER_LEN
    private, shared = MEMORY.sessions(SYSTEM_PROMPT_LEN, own)
    return [
        f"device: {COSTS}; the KV cache in bf16; {MEMORY.num_blocks:,} blocks of {MEMORY.block_size} tokens beside the "
        f"weights at {MEMORY.use:.0%} use, which is room for {private} sessions of {SYSTEM_PROMPT_LEN:,} + {own} "
        f"tokens with a copy each, {shared:,} with the prefix shared",
        f"at most {SEATS} requests at a time; budgets are the schedulers' own on a GPU: the longest request where "
        "prompts are taken whole, 2,048 tokens a step where they are cut",
        f"host: {IN_PROCESS.step_us} us a step and {IN_PROCESS.request_us:g} us a request to decide, make inputs and "
        "launch, assumed, not measured (benchmarks/host_overhead.py has the first two on a CPU); taken for every "
        "stage, so that none gains by it",
        f"front end: {IN_PROCESS.front_end_us:g} us for each token to detokenize and send; in one process the next "
        "step waits for it, in two it does not",
        f"two processes: {SPLIT.step_us - IN_PROCESS.step_us} us a step and "
        f"{SPLIT.request_us - IN_PROCESS.request_us:.2f} us a request more for messages, as benchmarks/boundary.py "
        "finds",
        "one step ahead, the host's work on a step runs beside the device's work on the one before",
        "every request gets all its tokens; lengths and moments are drawn from the seed",
    ]
