"""Where a figure was measured: a wall-clock time means little without its machine.

Part of every report. Knows nothing of engines, and imports torch when it is asked, not before.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from nanoserve.platforms import num_cpus


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine, without its name; part of the schema of every report."""

    system: str
    processor: str
    cores: int
    usable_cores: int  # that this process may run on
    load_average_1m: float | None  # before the measurement: above 0 something else was running too
    python: str
    torch: str
    torch_threads: int


def describe_machine() -> Machine:
    """This machine, now. Loads torch."""
    import torch

    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        cores=os.cpu_count() or 1,
        usable_cores=num_cpus(),
        load_average_1m=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        python=platform.python_version(),
        torch=str(torch.__version__),
        torch_threads=torch.get_num_threads(),
    )


def _processor() -> str:
    """The processor's model name, as well as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
