"""What the parts run on, told by a process that has torch: device, driver, versions. Changes no setting of anything.

`python -m gpu_check.machine` prints it as JSON.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """`device` is None where torch can use no GPU."""
    import torch

    there: dict[str, Any] = {
        "device": None,
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        there |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "num_cores": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "driver": _driver(),
            "cuda": torch.version.cuda or torch.version.hip,
        }
    return there


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    if tool := shutil.which("nvidia-smi"):
        command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    told = Path("/proc/driver/nvidia/version")
    match = re.search(r"\s(\d+\.\d[\d.]*)\s", told.read_text()) if told.exists() else None
    return match[1] if match else "not known"


if __name__ == "__main__":
    print(json.dumps(describe()))
