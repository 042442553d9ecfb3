"""What a step costs on the host beside its model, per running request: everyone decodes, and nothing is computed.

    python benchmarks/host_overhead.py [--rounds 7] [--steps 48] [--out benchmarks/results/host_overhead.json]

Three comparisons at 1, 64, 512 and 1024 requests: the batch made anew in every step against the one that stays
(`apply`, `build` with the sampling inputs, `fill`); `schedule` and `update` apart; and what it takes to tell an
executor of a step and to take in its tokens, in objects like v0's and in ours. All of them take turns within a round.
Times are CPU time of the one thread that does the work: what else runs on the machine is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path

import msgspec
import torch

from nanoserve.blocks import SharedBlocks
from nanoserve.config import EngineConfig
from nanoserve.input_batch import InputBatch, RebuiltBatch
from nanoserve.machine import describe_machine
from nanoserve.persistent_batch import PersistentBatch
from nanoserve.request import EngineRequest, Request, SamplingParams, StepPlan, StepResult
from nanoserve.scheduler import UnifiedScheduler

RUNNING = (1, 64, 512, 1024)
PROMPT_LEN = 256
BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
TOKEN_ID = 7
TARGET_RUNNING = 512
TARGETS_US = {"batch": 3.0, "scheduler": 5.0}  # per request and step at that number
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
    "seeded top-p": SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=None, ignore_eos=True),
}


@dataclass
class Point:
    """One part of a step, in one form. A round gives the median of its steps; times are those of the rounds."""

    part: str
    form: str
    num_running: int
    step_us: float  # the median
    least_us: float
    most_us: float
    us_per_request: float


def make_scheduler(num_running: int, num_steps: int) -> tuple[EngineConfig, UnifiedScheduler]:
    model_len = PROMPT_LEN + num_steps + 2
    config = EngineConfig(
        scheduler=UnifiedScheduler,
        blocks=SharedBlocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * PROMPT_LEN,
        num_blocks=2 + num_running * (model_len // BLOCK_SIZE + 1),
    ).resolve(model_len=model_len, pool_blocks=0, device="cpu")
    assert config.num_blocks is not None
    return config, UnifiedScheduler(config, SharedBlocks(config.num_blocks, BLOCK_SIZE))


def run_scheduler(num_running: int, num_steps: int, params: SamplingParams) -> tuple[list[StepPlan], list[float]]:
    """A step for the prompts, then decodes: the plans, and the time of `schedule` and `update` in each decode."""
    config, scheduler = make_scheduler(num_running, num_steps)
    for i in range(num_running):  # lengths differ, so that in each step a sixteenth of them begins a block
        prompt = [(i * 7919 + place) % VOCAB_SIZE for place in range(PROMPT_LEN - i % BLOCK_SIZE)]
        request = EngineRequest(id=f"request-{i}", prompt_token_ids=prompt, params=params)
        scheduler.add(Request.from_engine_request(request, config.model_len))
    plans, times_s = [], []
    for _ in range(1 + num_steps):
        start_s = time.thread_time()
        plan = scheduler.schedule()
        scheduled_s = time.thread_time()
        sampled = {request_id: [TOKEN_ID] for request_id in plan.num_scheduled_tokens}
        sampled_s = time.thread_time()
        scheduler.update(plan, sampled)
        times_s.append(time.thread_time() - sampled_s + scheduled_s - start_s)
        assert len(plan.num_scheduled_tokens) == num_running, "somebody was left out"
        plans.append(plan)
    return plans, times_s[1:]


@cache
def recorded_plans(num_running: int, num_steps: int, params_name: str) -> list[StepPlan]:
    return run_scheduler(num_running, num_steps, PARAMS[params_name])[0]


def time_scheduler(num_running: int, num_steps: int) -> list[float]:
    return run_scheduler(num_running, num_steps, PARAMS["greedy"])[1]


def time_batch(form: type[InputBatch], params_name: str, num_running: int, num_steps: int) -> list[float]:
    config, _ = make_scheduler(num_running, num_steps)
    batch = form(config, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    token_ids = [TOKEN_ID] * num_running
    times_s = []
    for plan in recorded_plans(num_running, num_steps, params_name):
        start_s = time.thread_time()
        batch.apply(plan)
        inputs = batch.build(plan)
        assert inputs is not None
        batch.fill(inputs, token_ids)
        times_s.append(time.thread_time() - start_s)
    return times_s[1:]


# Objects like those of vLLM 0.8.5 (`vllm/sequence.py`), with their fields, for requests of one sequence. The living
# ones stay from step to step; schedule() makes the metadata of everyone anew, the sampler an output of everyone.


@dataclass
class V0Data:
    """`SequenceData`: the tokens, and what is derived from them, kept beside them."""

    prompt_token_ids: array[int]
    output_token_ids: array[int]
    all_token_ids: list[int]
    new_appended_tokens: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_computed_tokens: int = 0

    def get_len(self) -> int:
        return len(self.output_token_ids) + len(self.prompt_token_ids)

    def append_token_id(self, token_id: int, logprob: float) -> None:
        self.output_token_ids.append(token_id)
        self.new_appended_tokens.append(token_id)
        self.all_token_ids.append(token_id)
        self.cumulative_logprob += logprob


@dataclass
class V0Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class V0Sequence:
    seq_id: int
    data: V0Data
    status: str = "running"
    output_logprobs: list[dict[int, V0Logprob]] = field(default_factory=list)

    def append_token_id(self, token_id: int, logprobs: dict[int, V0Logprob]) -> None:
        assert token_id in logprobs
        self.output_logprobs.append(logprobs)
        self.data.append_token_id(token_id, logprobs[token_id].logprob)


@dataclass
class V0Group:
    """`SequenceGroup`: a request with all of its sequences."""

    request_id: str
    seqs: list[V0Sequence]
    sampling_params: SamplingParams

    def get_seqs(self, status: str) -> list[V0Sequence]:
        return [seq for seq in self.seqs if seq.status == status]


class V0GroupState(msgspec.Struct, omit_defaults=True):
    num_steps: int = 1
    current_step: int = 0


class V0Metadata(msgspec.Struct, tag=True, array_like=True, omit_defaults=True):
    """`SequenceGroupMetadata`: what an executor is told of one request in one step."""

    request_id: str
    is_prompt: bool
    seq_data: dict[int, V0Data]
    sampling_params: SamplingParams | None
    block_tables: dict[int, list[int]]
    do_sample: bool = True
    pooling_params: None = None
    lora_request: None = None
    computed_block_nums: list[int] | None = None
    state: V0GroupState = msgspec.field(default_factory=V0GroupState)
    token_type_ids: list[int] | None = None
    multi_modal_data: None = None
    multi_modal_placeholders: None = None
    mm_processor_kwargs: None = None
    encoder_seq_data: None = None
    cross_block_table: list[int] | None = None
    prompt_adapter_request: None = None
    token_chunk_size: int | None = None
    num_speculative_tokens: int | None = None


class V0SequenceOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    parent_seq_id: int
    output_token: int
    logprobs: dict[int, V0Logprob]


class V0GroupOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    samples: list[V0SequenceOutput]
    prompt_logprobs: None = None


def time_v0_objects(num_running: int, num_steps: int) -> list[float]:
    """Metadata of everyone, an output of everyone, and the outputs taken in."""
    groups, tables = [], {}
    for i in range(num_running):
        prompt = list(range(PROMPT_LEN))
        sequence = V0Sequence(
            i, V0Data(array("l", prompt), array("l"), list(prompt), num_computed_tokens=PROMPT_LEN - 1)
        )
        groups.append(V0Group(f"request-{i}", [sequence], PARAMS["greedy"]))
        tables[i] = list(range(PROMPT_LEN // BLOCK_SIZE))

    def step() -> None:
        told = []
        for group in groups:
            seq_data, block_tables = {}, {}
            for seq in group.get_seqs("running"):
                seq_data[seq.seq_id] = seq.data
                block_tables[seq.seq_id] = tables[seq.seq_id]
            data = group.seqs[0].data
            metadata = V0Metadata(
                request_id=group.request_id,
                is_prompt=False,
                seq_data=seq_data,
                sampling_params=group.sampling_params,
                block_tables=block_tables,
                do_sample=data.num_computed_tokens + 1 >= data.get_len(),
                token_chunk_size=1,
                computed_block_nums=[],
            )
            told.append(metadata)
        outputs = []
        for metadata in told:
            samples = [V0SequenceOutput(i, TOKEN_ID, {TOKEN_ID: V0Logprob(0.0)}) for i in metadata.seq_data]
            outputs.append(V0GroupOutput(samples))
        for group, output in zip(groups, outputs, strict=True):
            for seq, sample in zip(group.seqs, output.samples, strict=True):
                seq.data.num_computed_tokens += 1
                seq.append_token_id(sample.output_token, sample.logprobs)

    return time_steps(step, num_steps)


def time_slim_objects(num_running: int, num_steps: int) -> list[float]:
    """The same in one `StepPlan` and one `StepResult`; a request is a slotted record."""
    requests = {}
    for i in range(num_running):
        request = EngineRequest(id=f"request-{i}", prompt_token_ids=list(range(PROMPT_LEN)), params=PARAMS["greedy"])
        requests[request.id] = Request.from_engine_request(request, PROMPT_LEN + num_steps + 1)

    def step() -> None:
        tokens: dict[str, int] = {}
        for request in requests.values():
            tokens[request.id] = 1
            request.num_computed_tokens += 1
        plan = StepPlan(1, tokens)
        result = StepResult({request_id: [TOKEN_ID] for request_id in plan.num_scheduled_tokens})
        for request_id, token_ids in result.token_ids.items():
            requests[request_id].token_ids += token_ids

    return time_steps(step, num_steps)


def time_steps(step: Callable[[], None], num_steps: int) -> list[float]:
    times_s = []
    for _ in range(num_steps):
        start_s = time.thread_time()
        step()
        times_s.append(time.thread_time() - start_s)
    return times_s


FORMS = {"rebuilt": RebuiltBatch, "persistent": PersistentBatch}
PARTS: dict[tuple[str, str], Callable[[int, int], list[float]]] = {
    **{
        ("batch", f"{name}, {params_name}"): partial(time_batch, form, params_name)
        for params_name in PARAMS
        for name, form in FORMS.items()
    },
    ("scheduler", "unified, shared blocks"): time_scheduler,
    ("objects", "like v0's"): time_v0_objects,
    ("objects", "plan and slots"): time_slim_objects,
}


def measure(num_running: int, num_rounds: int, num_steps: int) -> list[Point]:
    rounds_us: dict[tuple[str, str], list[float]] = {key: [] for key in PARTS}
    for number in range(1 + num_rounds):
        for key, part in PARTS.items():
            median_us = statistics.median(part(num_running, num_steps)) * 1e6
            if number > 0:  # the first warms up
                rounds_us[key].append(median_us)
    points = []
    for (part, form), each_us in rounds_us.items():
        step_us = statistics.median(each_us)
        points.append(Point(part, form, num_running, step_us, min(each_us), max(each_us), step_us / num_running))
    return points


def verdicts(points: list[Point]) -> list[str]:
    lines = []
    for part, target_us in TARGETS_US.items():
        for point in points:
            if point.part == part and point.num_running == TARGET_RUNNING and not point.form.startswith("rebuilt"):
                verdict = "within" if point.us_per_request <= target_us else "OVER"
                lines.append(f"{part}, {point.form}: {point.us_per_request:.2f} us, {verdict} {target_us:g} us")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "host_overhead.json")
    args = parser.parse_args()
    machine = describe_machine()
    torch.set_num_threads(1)
    print("| part | form | running | step, us | least-most | us per request |")
    print("|---|---|---|---|---|---|")
    points: list[Point] = []
    for num_running in RUNNING:
        for point in measure(num_running, args.rounds, args.steps):
            points.append(point)
            print(
                f"| {point.part} | {point.form} | {point.num_running} | {point.step_us:,.0f} | "
                f"{point.least_us:,.0f}-{point.most_us:,.0f} | {point.us_per_request:.2f} |",
                flush=True,
            )
    print("", *verdicts(points), sep="\n")
    result = {
        "what": "host time (CPU time of its thread) of a decode step beside the model, in us",
        "command": f"python benchmarks/host_overhead.py --rounds {args.rounds} --steps {args.steps}",
        "prompt_len": PROMPT_LEN,
        "block_size": BLOCK_SIZE,
        "machine": msgspec.to_builtins(machine),
        "points": [asdict(point) for point in points],
        f"at_{TARGET_RUNNING}": verdicts(points),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
