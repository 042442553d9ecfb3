"""Engines for the parts: shapes of known models with random weights, and an engine's life from start to freed memory.

The core runs in the part's own process, whatever the stage's client: where it lives changes nothing on the device, and
the layouts are compared in `step_gap.py`.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from nanoserve.client import InProcessClient
from nanoserve.config import EngineConfig
from nanoserve.execution import Execution
from nanoserve.graph_runner import GraphRunner
from nanoserve.lab.loadgen import drive
from nanoserve.lab.metrics import RunMetrics, measure
from nanoserve.lab.workload import Workload
from nanoserve.model import Decoder
from nanoserve.platforms import resolve_platform
from nanoserve.record import ListRecorder
from nanoserve.request import EngineRequest, SamplingParams
from nanoserve.runner import EagerRunner
from nanoserve.weights import checkpoint_slots

T = TypeVar("T")

# Facts of the shapes only, as their config.json has them.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "tiny-llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
}


def write_shape(name: str, folder: Path) -> str:
    """A model folder with nothing but a config.json: what `load_format="dummy"` needs."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
    return str(path)


def fill_on_device(model: Decoder, seed: int) -> None:
    """Random weights drawn where they are used: the host would need a minute for eight billion of them."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, slot in checkpoint_slots(model).items():
        if name.endswith("norm.weight"):
            slot.fill_(1.0)
        else:
            slot.normal_(0.0, 1 / math.sqrt(slot.shape[-1]), generator=generator)


def drawn_on_device() -> AbstractContextManager[Any]:
    return patch("nanoserve.weights._fill_randomly", fill_on_device)


class QuickEagerRunner(EagerRunner):
    """With dummy weights from the device. A class, so that it does so in whichever process it is built."""

    def __init__(self, config: EngineConfig) -> None:
        with drawn_on_device():
            super().__init__(config)


class QuickGraphRunner(GraphRunner):
    def __init__(self, config: EngineConfig) -> None:
        with drawn_on_device():
            super().__init__(config)


def quick(config: EngineConfig) -> EngineConfig:
    """The config with dummy weights, drawn on its device."""
    runner = QuickGraphRunner if config.runner.captures_graphs else QuickEagerRunner
    return replace(config, runner=runner, load_format="dummy")


class Engine:
    """A core in this process, and the records of what it did."""

    def __init__(self, config: EngineConfig) -> None:
        self._num_aborts = 0
        self.recorder = ListRecorder()
        self.client = InProcessClient(replace(config, client=InProcessClient), observer=self.recorder)
        self.info = self.client.info
        self.execution: Execution = self.client.core.runner.execution

    def run(self, workload: Workload) -> RunMetrics:
        first = len(self.recorder.records)
        drive(self.client, workload)
        return measure(self.recorder.records[first:], workload.groups)

    def submit(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.client.submit(EngineRequest(id=request_id, prompt_token_ids=prompt, params=params))

    def poll(self) -> Iterator[tuple[str, list[int]]]:
        for output in self.client.poll(1.0):
            if output.error or output.finish_reason == "abort":
                raise RuntimeError(f"request {output.id} ended: {output.error or output.finish_reason}")
            yield output.id, output.new_token_ids

    def abort(self, request_ids: list[str]) -> None:
        """Records tell of an abort with the next step: there is one here, so that no later measurement sees it."""
        self.client.abort(request_ids)
        self._num_aborts += 1
        self.submit(f"after-abort-{self._num_aborts}", [1], 1)
        while self.client.core.has_work:
            self.client.poll(1.0)

    def drain(self) -> dict[str, list[int]]:
        """Everybody's tokens from here to the end."""
        tokens: dict[str, list[int]] = {}
        while self.client.core.has_work:
            for request_id, token_ids in self.poll():
                tokens.setdefault(request_id, []).extend(token_ids)
        return tokens


def with_engine(config: EngineConfig, use: Callable[[Engine], T]) -> T:
    """What `use` makes of an engine; its memory is free again afterwards, for nobody else holds it."""
    release(config)  # what one that failed has left
    engine = Engine(config)
    try:
        return use(engine)
    finally:
        engine.client.close()
        del engine
        release(config)


def release(config: EngineConfig) -> None:
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # compiled code holds on to its model
    gc.collect()
    resolve_platform(config.device).release_memory()
