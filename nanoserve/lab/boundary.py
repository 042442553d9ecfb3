"""What a process boundary costs: steps of an engine without a model, timed by its own records; bytes of its messages.

A step's time is from one `schedule()` to the next. Bytes are those of a decode step's messages, encoded as the layouts
encode them; which of them cross follows from the client class. Laws: tests/test_front_end.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from nanoserve import messages
from nanoserve.client import CoreProcessClient, InProcessClient
from nanoserve.lab.fakes import NullRunner
from nanoserve.messages import CoreOutputs, SchedulerStats
from nanoserve.record import JsonlRecorder, read_trace
from nanoserve.request import EngineOutput, EngineRequest, SamplingParams, StepPlan, StepResult

if TYPE_CHECKING:
    from nanoserve.client import EngineClient
    from nanoserve.config import EngineConfig

PROMPT_LEN = 32
SETTLE_STEPS = 2  # after the last request has joined
POLL_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of an engine without a model, in seconds."""

    step_s: float  # median of the decode steps of one run
    start_s: float  # until the client was there


@dataclass(frozen=True, slots=True)
class BoundaryCost:
    """What a client costs against that of the stage above, medians over rounds; nulls for a client not known here."""

    stage: str
    above: str
    num_running: int
    step_s: dict[str, float]  # by stage, the two of them
    start_s: dict[str, float]
    added_step_s: float  # median over rounds of the difference in one
    added_per_request_s: float
    bytes_per_step: dict[str, int | None]
    bytes_per_request_step: dict[str, float | None]


def measure_step(config: EngineConfig, num_running: int, num_steps: int) -> StepCost:
    """The config's scheduler, blocks and client around a runner that computes nothing, `num_running` requests deep."""
    seats, budget = max(num_running, 2), config.max_num_batched_tokens
    config = replace(config, runner=NullRunner, max_num_seqs=seats)
    config = replace(config, max_num_batched_tokens=budget and max(budget, seats))
    with TemporaryDirectory() as folder:
        recorder = JsonlRecorder(Path(folder) / "trace.jsonl")
        start_s = time.monotonic()
        with config.client(config, recorder) as client:
            start_up_s = time.monotonic() - start_s
            _decode(client, num_running, num_steps)
        recorder.close()
        _, records = read_trace(recorder.path)
    full = [record.start_s for record in records if len(record.num_scheduled_tokens) == num_running]
    return StepCost(median(b - a for a, b in pairwise(full[SETTLE_STEPS:])), start_up_s)


def _decode(client: EngineClient, num_running: int, num_steps: int) -> None:
    params = SamplingParams(max_tokens=num_steps, temperature=0, ignore_eos=True)
    for i in range(num_running):
        prompt = [(i + j) % 1000 for j in range(PROMPT_LEN)]
        client.submit(EngineRequest(id=f"request-{i}", prompt_token_ids=prompt, params=params))
    left = num_running
    while left:
        outputs = client.poll(POLL_TIMEOUT_S)
        assert outputs or isinstance(client, InProcessClient), f"no news of a step within {POLL_TIMEOUT_S:g} s"
        left -= sum(output.finish_reason is not None for output in outputs)


def message_bytes(num_running: int) -> tuple[int, int]:
    """Of a decode step in which every sixteenth request gets a new block: bytes to a runner process and back, and
    bytes of the news for the front end."""
    ids = [f"request-{i}" for i in range(num_running)]
    plan = StepPlan(1000, dict.fromkeys(ids, 1), new_blocks={i: [7] for i in ids[::16]})
    outputs = [EngineOutput(id=i, new_token_ids=[123]) for i in ids]
    result = StepResult({i: [123] for i in ids})
    to_runner = len(msgspec.msgpack.encode(plan)) + len(msgspec.msgpack.encode(result))
    return to_runner, len(messages.encode(CoreOutputs(outputs, SchedulerStats())))


def crossing_bytes(client: type[EngineClient], num_running: int) -> int | None:
    """Bytes that cross process boundaries in a decode step with such a client; None for a layout not known here."""
    if issubclass(client, InProcessClient):
        return 0
    if not issubclass(client, CoreProcessClient):
        return None
    to_runner, to_front_end = message_bytes(num_running)
    return to_front_end + (to_runner if client.make_runner is not None else 0)


def boundary_cost(
    above: tuple[str, EngineConfig],
    stage: tuple[str, EngineConfig],
    rounds: Sequence[Mapping[str, StepCost]],
    num_running: int,
) -> BoundaryCost:
    """From the costs of both stages in each round."""
    (above_name, above_config), (name, config) = above, stage
    crossing = {n: crossing_bytes(c.client, num_running) for n, c in ((above_name, above_config), (name, config))}
    added_s = median(costs[name].step_s - costs[above_name].step_s for costs in rounds)
    return BoundaryCost(
        stage=name,
        above=above_name,
        num_running=num_running,
        step_s={n: median(costs[n].step_s for costs in rounds) for n in crossing},
        start_s={n: median(costs[n].start_s for costs in rounds) for n in crossing},
        added_step_s=added_s,
        added_per_request_s=added_s / num_running,
        bytes_per_step=crossing,
        bytes_per_request_step={n: None if b is None else b / num_running for n, b in crossing.items()},
    )
