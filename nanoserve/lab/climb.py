"""Runs the stages on the loads, in interleaved rounds, and keeps what each run told.

Each run has a fresh engine, so that none finds another's cache; a stage is whatever config it is given. Workloads go to
every stage; servers, and the cost of a boundary, to the stages that move the client and to those above them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from nanoserve.lab.boundary import BoundaryCost, boundary_cost, measure_step
from nanoserve.lab.front_end import FrontEndLoad, run_front_end
from nanoserve.lab.ladder_report import Run, ServerRun, StageReport
from nanoserve.lab.loadgen import drive
from nanoserve.lab.workload import Arrival, Workload
from nanoserve.record import JsonlRecorder, StepRecord, read_trace

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig
    from nanoserve.record import Observer
    from nanoserve.request import EngineInfo


class Progress:
    """Whoever wants to know how far the runs are."""

    def announce(self, what: str) -> None:
        """A run begins, so that the one before has ended."""

    def on_tokens(self, num_tokens: int) -> None:
        """So many output tokens have come."""


def climb(
    stages: Mapping[str, EngineConfig],
    workloads: Sequence[Workload],
    num_rounds: int,
    progress: Progress | None = None,
) -> tuple[dict[str, list[Run]], dict[str, StageReport]]:
    """All the runs, by workload, and what each stage became."""
    progress = progress or Progress()
    runs: dict[str, list[Run]] = {}
    built: dict[str, StageReport] = {}
    for workload in workloads:
        done = runs.setdefault(workload.name, [])
        for number in range(1, num_rounds + 1):
            for name, config in stages.items():
                progress.announce(f"{workload.name}, round {number}, {name}")
                warm_up, records, built[name] = _run(config, workload, progress.on_tokens)
                done.append(Run(name, number, records, warm_up))
    return runs, built


def client_moves(stages: Mapping[str, EngineConfig]) -> list[tuple[str, str]]:
    """(stage above, stage) wherever the two differ in their client."""
    return [(above, stage) for above, stage in pairwise(stages) if stages[above].client is not stages[stage].client]


def moving_stages(stages: Mapping[str, EngineConfig]) -> dict[str, EngineConfig]:
    """Every stage in `client_moves`, in order."""
    moved = {name for move in client_moves(stages) for name in move}
    return {name: config for name, config in stages.items() if name in moved}


def climb_front_end(
    stages: Mapping[str, EngineConfig],
    load: FrontEndLoad,
    num_rounds: int,
    progress: Progress | None = None,
) -> list[ServerRun]:
    """A server of each of the stages in each round."""
    progress = progress or Progress()
    runs = []
    for number in range(1, num_rounds + 1):
        for name, config in stages.items():
            progress.announce(f"{load.name}, round {number}, {name}")
            runs.append(ServerRun(name, number, run_front_end(config, load, on_tokens=progress.on_tokens)))
    return runs


def split_costs(
    stages: Mapping[str, EngineConfig],
    num_running: int,
    num_rounds: int,
    progress: Progress | None = None,
    *,
    num_steps: int = 200,
) -> list[BoundaryCost]:
    """What each move of the client costs, of engines without a model with `num_running` requests."""
    progress = progress or Progress()
    moves, moving = client_moves(stages), moving_stages(stages)
    rounds = []
    for number in range(1, num_rounds + 1):
        progress.announce(f"cost of the boundary, round {number}")
        rounds.append({name: measure_step(moving[name], num_running, num_steps) for name in moving})
    return [boundary_cost((a, stages[a]), (b, stages[b]), rounds, num_running) for a, b in moves]


def run_once(
    config: EngineConfig, workload: Workload, on_tokens: Callable[[int], None] | None = None
) -> tuple[list[StepRecord], StageReport]:
    """The workload on a fresh engine, after a warm-up whose records are dropped. Raises ValueError when the workload
    does not fit the engine."""
    _, records, stage = _run(config, workload, on_tokens)
    return records, stage


def _run(
    config: EngineConfig, workload: Workload, on_tokens: Callable[[int], None] | None
) -> tuple[list[StepRecord], list[StepRecord], StageReport]:
    """The warm-up's records, the load's, and what the stage became. Records travel through a file, which works wherever
    the core lives."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        recorder = JsonlRecorder(path)
        try:
            info = _drive_engine(config, workload, recorder, on_tokens)
        finally:
            recorder.close()
        header, records = read_trace(path)
    ids = workload.groups
    first = next(i for i, record in enumerate(records) if any(r.id in ids for r in record.arrivals))
    return records[:first], records[first:], StageReport(header.config, info)


def _drive_engine(
    config: EngineConfig, workload: Workload, observer: Observer, on_tokens: Callable[[int], None] | None
) -> EngineInfo:
    with config.client(config, observer=observer) as client:
        limit = client.info.max_model_len
        if workload.longest > limit:
            raise ValueError(
                f"load {workload.name} holds a sequence of {workload.longest} tokens, longer than "
                f"max_model_len={limit} of {client.info.model}; "
                "make its prompts shorter or use a model with a longer context."
            )
        drive(client, warm_up(workload))
        gc.collect()
        drive(client, workload, on_tokens=on_tokens)
        return client.info


def warm_up(workload: Workload) -> Workload:
    """A few short requests of no interest: the first steps of an engine pay for set-up that later ones do not."""
    prompt = workload.arrivals[-1].prompt_token_ids[64::-1]  # backwards: shares no prefix with the load
    arrivals = [Arrival(id=f"warm-up-{i}", group="warm-up", prompt_token_ids=prompt, max_tokens=8) for i in range(4)]
    return replace(workload, name="warm-up", watched="warm-up", arrivals=arrivals)
