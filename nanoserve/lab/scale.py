"""How big a measured run of a lesson is, from what the machine has: one call, `scale()`, and no `if` in a lesson.

On a CPU the embedded model and short prompts; on a GPU a model of real size with random weights and the prompts that
hurt it. The loads are those of workload.py in other numbers. What no machine here could run is the simulator's
(rehearsal.py). Laws: tests/test_lessons.py.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.config import DEFAULT_MODEL
from nanoserve.lab.charts import Setting
from nanoserve.lab.gpus import ModelSize, get_model
from nanoserve.lab.workload import Workload, long_prompt_among_decodes, random_tokens, shared_system_prompt

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig

SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes in tokens. `device`: what a title names; `fields`: of the config, for the model that fits the device."""

    device: str
    fields: dict[str, Any]
    vocab_size: int
    num_streams: int
    stream_tokens: int
    long_prompt_len: int
    chunk: int  # tokens a step of a scheduler that chunks
    num_sessions: int
    prefix_len: int
    is_exact: bool  # float32: the same tokens whatever a step holds beside them

    def fit(self, config: EngineConfig) -> EngineConfig:
        """That engine, with the model and the device of this machine."""
        return replace(config, **self.fields)

    def long_prompt(self) -> Workload:
        """One long prompt lands among the streams."""
        return long_prompt_among_decodes(
            random_tokens(self.vocab_size),
            seed=SEED,
            num_streams=self.num_streams,
            stream_tokens=self.stream_tokens,
            num_long=1,
            long_prompt_len=self.long_prompt_len,
            long_tokens=4,
        )

    def system_prompt(self) -> Workload:
        """Sessions that begin alike, all at once."""
        return shared_system_prompt(
            random_tokens(self.vocab_size),
            seed=SEED,
            num_requests=self.num_sessions,
            prefix_len=self.prefix_len,
            output_tokens=8,
        )

    def setting(self, load: Workload) -> Setting:
        return Setting(load.name, self.device, "wall", load.seed)


def scale(device: str = "auto") -> Scale:
    """The sizes for that device. ValueError for one that is not there."""
    from nanoserve.platforms import resolve_platform

    platform = resolve_platform(device)
    if platform.name == "cpu":
        return Scale(
            device="cpu",
            fields={"model": DEFAULT_MODEL, "device": "cpu"},
            vocab_size=2048,
            num_streams=4,
            stream_tokens=48,
            long_prompt_len=2048,
            chunk=256,
            num_sessions=8,
            prefix_len=512,
            is_exact=True,
        )
    import torch

    model = get_model("qwen3-0.6b")
    return Scale(
        device=torch.cuda.get_device_name(),
        fields={"model": _shape_folder(model), "load_format": "dummy", "device": platform.name},
        vocab_size=model.vocab_size,
        num_streams=16,
        stream_tokens=256,
        long_prompt_len=32_000,
        chunk=2048,
        num_sessions=64,
        prefix_len=8192,
        is_exact=False,
    )


def _shape_folder(model: ModelSize) -> str:
    """A folder with the config.json of that shape and nothing else, until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="nanoserve-shape-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(shape_config(model)), encoding="utf-8")
    return str(folder)


def shape_config(model: ModelSize) -> dict[str, Any]:
    """A Qwen3 config.json with the figures of that model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": model.is_tied,
        "torch_dtype": "bfloat16",
    }
