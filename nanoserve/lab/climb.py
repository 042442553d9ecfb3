"""Runs every stage on every workload, in interleaved rounds, and keeps each run's records.

Each run has a fresh engine, so that none finds another's cache; a stage is whatever config it is given.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from nanoserve.lab.ladder_report import Run, StageReport
from nanoserve.lab.loadgen import drive
from nanoserve.lab.workload import Arrival, Workload
from nanoserve.record import JsonlRecorder, StepRecord, read_trace

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig
    from nanoserve.record import Observer
    from nanoserve.request import EngineInfo


def climb(
    stages: Mapping[str, EngineConfig],
    workloads: Sequence[Workload],
    num_rounds: int,
    *,
    announce: Callable[[str], None] = lambda what: None,
    on_tokens: Callable[[int], None] | None = None,
) -> tuple[dict[str, list[Run]], dict[str, StageReport]]:
    """All the runs, by workload, and what each stage became. `announce` hears what comes next."""
    runs: dict[str, list[Run]] = {}
    built: dict[str, StageReport] = {}
    for workload in workloads:
        done = runs.setdefault(workload.name, [])
        for number in range(1, num_rounds + 1):
            for name, config in stages.items():
                announce(f"{workload.name}, round {number}, {name}")
                records, built[name] = run_once(config, workload, on_tokens)
                done.append(Run(name, number, records))
    return runs, built


def run_once(
    config: EngineConfig, workload: Workload, on_tokens: Callable[[int], None] | None = None
) -> tuple[list[StepRecord], StageReport]:
    """The workload on a fresh engine, after a warm-up whose records are dropped.

    Records travel through a file, which works wherever the core lives. Raises ValueError when the workload does
    not fit the engine.
    """
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
    return records[first:], StageReport(header.config, info)


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
