"""Checkpoints of Qwen3's shape with random float32 weights, made once into a folder, as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file

from nanoserve.weights import checkpoint_slots, load_model

VOCAB_SIZE = 8192
SHAPES: Mapping[str, dict[str, int]] = {
    "30m": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1536,
    },
    "150m": {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 2816,
    },
}


def config_of(shape: str) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "head_dim": 64,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 8192,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": 0,
        **SHAPES[shape],
    }


def make_checkpoint(shape: str, cache: Path) -> Path:
    """Its folder, as it lies there, or newly made: the weights follow from the shape alone."""
    folder = cache / f"qwen3-{shape}"
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config_of(shape), indent=1) + "\n")
        model = load_model(folder, load_format="dummy")
        tensors = {name: slot.clone() for name, slot in checkpoint_slots(model).items()}
        partial = folder / "model.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.rename(folder / "model.safetensors")
    return folder
