"""A checkpoint's folder and the meaning of its `config.json`; imports no torch and reads no weights.

`resolve_model_dir` turns a name (the embedded model, a folder, a hub id) into a folder, `read_model_config`
reads the shape of the decoder in it. What model.py cannot compute is refused here, with the value and the
fix. Absent keys mean what they mean in transformers. weights.py loads the tensors.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CONFIG_FILES = ("config.json",)
TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
ALL_FILES = (*TEXT_FILES, "*.safetensors")

# The supported families, with the meaning of keys that config.json leaves out.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPE_NAMES = ("float32", "float16", "bfloat16")
MAX_COUNT, MAX_LAYERS, MAX_NUMBER, MAX_PARAMETERS = 2**31 - 1, 10_000, 1e30, 2**44


def resolve_model_dir(name: str | Path, *, patterns: Sequence[str] = ALL_FILES) -> Path:
    """The folder of a model: embedded (`nanostory`), a local folder, or a hub id such as `Qwen/Qwen3-0.6B`.

    Of a hub id, the files that match `patterns` are downloaded, or taken from the local cache. A name that is
    both an embedded model and a folder means the embedded one; write `./name` for the folder.
    Raises ValueError when nothing has that name.
    """
    name = str(name)
    embedded_root = Path(str(resources.files("nanoserve"))) / "models"
    embedded = sorted(path.name for path in embedded_root.iterdir() if path.is_dir())
    if name in embedded:
        return embedded_root / name
    path = Path(os.path.expanduser(name))
    if name and path.is_dir():
        return path
    if path.is_file():
        raise ValueError(f"model {name!r} is a file; give the folder that holds its config.json.")
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*/[\w.-]+", name):
        raise ValueError(
            f"model {name!r} was not found: it is not an embedded model ({', '.join(embedded)}), not a "
            "folder, and not a hub id (organisation/name); check the path."
        )
    return _download(name, patterns)


def _download(name: str, patterns: Sequence[str]) -> Path:
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=list(patterns), ignore_patterns=["consolidated*", "original/*"]
        )
    except Exception as error:  # which errors there are depends on the version's HTTP library
        raise ValueError(
            f"model {name!r} was not found: there is no such folder, and the Hugging Face hub did not have it "
            f"({_one_line(error)}); check the name and the network (a gated model needs HF_TOKEN), or give a "
            "folder."
        ) from error
    return Path(folder)


def _one_line(error: Exception) -> str:
    """The kind of an error and its first sentence."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 160 else text[:160] + '...'}"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError that names the file."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({_one_line(error)}); fetch the file again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a JSON object; fetch the file again.")
    return content


def read_model_config(name: str | Path) -> ModelConfig:
    """The model's shape, from `config.json` alone. Raises ValueError: absent, broken or not supported."""
    path = resolve_model_dir(name, patterns=CONFIG_FILES) / "config.json"
    if not path.is_file():
        raise ValueError(f"model folder {path.parent} has no config.json; give the folder of a whole checkpoint.")
    hf = read_json(path)
    try:
        return ModelConfig.from_hf(hf)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions become angles; `model.rope_frequencies` says what each number does."""

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # how many times longer than trained
    original_max_len: int = 0  # positions it was trained on (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> RopeConfig:
        """From `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta`. Raises ValueError."""
        rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
        if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
            raise ValueError(
                f"rope_parameters={rope!r} is not supported; use a checkpoint with one rope for all layers."
            )
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope type {rope_type!r} is not supported; use a checkpoint with {' or '.join(ROPE_TYPES)}."
            )
        theta = _number(rope, "rope_theta", _number(hf, "rope_theta", 10_000.0))
        if rope_type == "default":
            return cls(theta=theta)
        if rope_type == "linear":
            return cls(rope_type=rope_type, theta=theta, factor=_number(rope, "factor"))
        max_len = _count(hf, "max_position_embeddings")
        original = _count(rope, "original_max_position_embeddings", max_len)
        if rope_type == "llama3":
            return cls(
                rope_type=rope_type,
                theta=theta,
                factor=_number(rope, "factor"),
                original_max_len=original,
                low_freq_factor=_number(rope, "low_freq_factor"),
                high_freq_factor=_number(rope, "high_freq_factor"),
            )
        factor = _number(rope, "factor", max_len / original)
        return cls(
            rope_type=rope_type,
            theta=theta,
            factor=factor,
            original_max_len=original,
            beta_fast=_number(rope, "beta_fast", 32.0),
            beta_slow=_number(rope, "beta_slow", 1.0),
            truncate=bool(rope.get("truncate", True)),
            attention_factor=_number(rope, "attention_factor", _yarn_attention_factor(rope, factor)),
        )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Peng et al. 2023, section 3.4, with the weights that DeepSeek's configs add."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(_number(rope, "mscale")) / scale(_number(rope, "mscale_all_dim"))
    return scale(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. Built by `from_hf`, so that a config in hand is a supported one."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # longest sequence, in tokens
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied_head: bool
    dtype: str | None  # of the checkpoint, where config.json says it

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """From the content of a `config.json`. Raises ValueError for what is not supported.

        `max_model_len` is `max_position_embeddings`, times `factor` for linear rope, and the original length
        times `factor` for yarn: as in vLLM (`_get_and_verify_max_len`).
        """
        architectures = hf.get("architectures")
        architecture = architectures[0] if isinstance(architectures, list) and architectures else architectures
        if not isinstance(architecture, str) or architecture not in FAMILIES:
            raise ValueError(
                f"architecture {architecture!r} is not supported; use a checkpoint of {' or '.join(FAMILIES)}."
            )
        hf = {**FAMILIES[architecture], **hf}
        _refuse_unsupported(hf)
        llama, qwen2, qwen3 = (architecture == f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3"))
        attention_bias = (llama or qwen3) and bool(hf.get("attention_bias"))
        num_heads = _count(hf, "num_attention_heads")
        hidden_size = _count(hf, "hidden_size")
        max_len = _count(hf, "max_position_embeddings")
        rope = RopeConfig.from_hf(hf)
        stretched = {"linear": max_len * rope.factor, "yarn": rope.original_max_len * rope.factor}
        dtype = str(hf.get("dtype") or hf.get("torch_dtype")).removeprefix("torch.")
        config = cls(
            architecture=architecture,
            vocab_size=_count(hf, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(hf, "intermediate_size"),
            num_layers=_count(hf, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_count(hf, "num_key_value_heads", num_heads),
            head_dim=_count(hf, "head_dim", hidden_size // num_heads),
            max_model_len=int(stretched.get(rope.rope_type, max_len)),
            rms_norm_eps=_number(hf, "rms_norm_eps", 1e-6),
            rope=rope,
            qk_norm=qwen3,
            qkv_bias=qwen2 or attention_bias,
            o_bias=attention_bias,
            mlp_bias=llama and bool(hf.get("mlp_bias")),
            tied_head=bool(hf.get("tie_word_embeddings")),
            dtype=dtype if dtype in DTYPE_NAMES else None,
        )
        config._check(_sliding_window(architecture, hf))
        return config

    def _check(self, sliding_window: int | None) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} must be a multiple of "
                f"num_key_value_heads={self.num_kv_heads}; correct config.json."
            )
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"num_hidden_layers must be <= {MAX_LAYERS}, got {self.num_layers}; correct config.json.")
        if self.max_model_len > MAX_COUNT:
            raise ValueError(
                f"max_position_embeddings, stretched by the rope's factor, must be <= {MAX_COUNT}, got "
                f"{self.max_model_len}; correct config.json."
            )
        if self.num_parameters > MAX_PARAMETERS:
            raise ValueError(
                f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, vocab_size="
                f"{self.vocab_size} and num_hidden_layers={self.num_layers} make a model of {self.num_parameters} "
                f"weights, more than {MAX_PARAMETERS}; correct config.json."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}; correct config.json.")
        if sliding_window is not None and sliding_window < self.max_model_len:
            raise ValueError(
                f"sliding_window={sliding_window} is less than the model's {self.max_model_len} positions, and "
                f"is not supported; set max_position_embeddings to {sliding_window} in config.json (the window "
                "then hides nothing), or use a checkpoint with full attention."
            )

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that the keys and values of one token take, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize

    @property
    def num_parameters(self) -> int:
        """Weights in the model; those of a tied head count once."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = hidden * (q_size + 2 * kv_size) + q_size * hidden + 3 * hidden * inner + 2 * hidden
        layer += self.qk_norm * 2 * self.head_dim + self.qkv_bias * (q_size + 2 * kv_size)
        layer += self.o_bias * hidden + self.mlp_bias * (2 * inner + hidden)
        return self.num_layers * layer + (2 - self.tied_head) * self.vocab_size * hidden + hidden


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A key's value; null and absent both mean the default."""
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_NUMBER:
        raise ValueError(f"{key} must be a number > 0 and <= {MAX_NUMBER}, got {value!r:.60}; correct config.json.")
    return value


def _count(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _number(values, key, default)
    if not isinstance(value, int) or value > MAX_COUNT:
        raise ValueError(f"{key} must be an integer >= 1 and <= {MAX_COUNT}, got {value!r:.60}; correct config.json.")
    return value


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    supported = {"hidden_act": "silu", "quantization_config": None, "partial_rotary_factor": 1.0}
    for key, only in supported.items():
        if hf.get(key) not in (only, None):
            raise ValueError(f"{key}={hf[key]!r} is not supported; use a checkpoint with {key}={only!r}.")


def _sliding_window(architecture: str, hf: Mapping[str, Any]) -> int | None:
    """The window that any layer looks through. Mistral: all layers; Qwen: from `max_window_layers` on."""
    window = None if hf.get("sliding_window") is None else _count(hf, "sliding_window")
    match architecture:
        case "LlamaForCausalLM":
            return None
        case "MistralForCausalLM":
            return window
    first = hf.get("max_window_layers", 28)
    some_layer = not isinstance(first, int) or first < hf["num_hidden_layers"]
    if isinstance(hf.get("layer_types"), list):
        some_layer = "sliding_attention" in hf["layer_types"]
    return window if hf.get("use_sliding_window") and some_layer else None
