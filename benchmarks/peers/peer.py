"""An engine in a process of its own: it loads its model once, and then runs a load whenever it is asked.

Needs nothing but Python. The other end is serve.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VENV_OF = {"transformers_cb": "transformers"}  # where it is not the peer's own name
PEERS = ("nanoserve", "transformers", "transformers_cb", "vllm", "llama")


class Peer:
    """`about`: its name and versions, and whether it `streams`. Raises SystemExit once its process is gone."""

    def __init__(self, name: str, venvs: Path, model: Path, vocab_size: int, threads: int, budget: int = 512) -> None:
        venv = venvs.absolute() / VENV_OF.get(name, name)  # as it is called: links in it lead out of it
        python = Path(sys.executable) if name == "nanoserve" else venv / "bin" / "python"
        command = [str(python), str(HERE / f"run_{name}.py"), "--model", str(model.absolute())]
        command += ["--vocab-size", str(vocab_size), "--threads", str(threads), "--budget", str(budget)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false"}
        environment.setdefault("VLLM_CACHE_ROOT", str(venvs.absolute() / "vllm-cache"))  # what it has compiled
        if preload := preloaded(name, python):
            environment["LD_PRELOAD"] = ":".join(map(str, preload))
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE
        )
        self.about = self._answer()

    def run(self, load: str) -> dict[str, Any]:
        """`seconds`, the `tokens` of each request, and for an engine that streams the `stamps` of a late load."""
        assert self._process.stdin is not None
        self._process.stdin.write(load + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with {self._process.wait(30)}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)


def preloaded(name: str, python: Path) -> list[Path]:
    """The allocator and the threads that vLLM's documentation asks for on a CPU, as far as they are there."""
    if name != "vllm":
        return []
    allocators = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    return allocators[:1] + list((python.parents[1] / "lib").glob("libiomp5.so"))
