"""A trace file of a simulated run, long enough to fit costs to."""

from __future__ import annotations

from pathlib import Path

from nanoserve.config import EngineConfig
from nanoserve.lab.costs import REFERENCE
from nanoserve.lab.scenarios import chat
from nanoserve.lab.simulator import complete_config, simulate
from nanoserve.record import JsonlRecorder
from nanoserve.scheduler import UnifiedScheduler


def write_trace(path: Path) -> Path:
    load = chat(1, num_sessions=2)
    config = EngineConfig(scheduler=UnifiedScheduler, max_num_batched_tokens=512)
    recorder = JsonlRecorder(path)
    simulate(complete_config(config, max_model_len=load.longest, num_blocks=2000), load, REFERENCE, observer=recorder)
    recorder.close()
    return path
