"""Writes tiny random checkpoints in Hugging Face's format, without transformers and without our own loader.

The weights are wide enough that greedy output varies. Tensor names and shapes are spelled out here a second
time on purpose: transformers and nanoserve must both find what they look for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
FAMILIES = tuple(ARCHITECTURES)


def tiny_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """The content of a `config.json`: vocabulary 128, hidden 48, 2 layers, 4 query and 2 kv heads of 16.

    `overrides` replace its keys; one that is `...` (an Ellipsis) is left out of the file.
    """
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return {key: value for key, value in (config | overrides).items() if value is not ...}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the checkpoint of a config."""
    family, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    attention_bias = family in ("llama", "qwen3") and config.get("attention_bias", False)
    qkv_bias = family == "qwen2" or attention_bias
    mlp_bias = family == "llama" and config.get("mlp_bias", False)
    linears = {
        "self_attn.q_proj": (q_size, hidden, qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, q_size, attention_bias),
        "mlp.gate_proj": (inner, hidden, mlp_bias),
        "mlp.up_proj": (inner, hidden, mlp_bias),
        "mlp.down_proj": (hidden, inner, mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if family == "qwen3":
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, (num_out, num_in, bias) in linears.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (num_out, num_in)
            if bias:
                shapes[f"model.layers.{layer}.{name}.bias"] = (num_out,)
        for name, size in norms.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (size,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """float32 weights: norms about 1 (q_norm, k_norm about 1.7), biases about 0.3, matrices that amplify."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("bias"):
            tensors[name] = 0.3 * noise
        elif len(shape) == 1:
            tensors[name] = (1.7 if "self_attn" in name else 1.0) * (1 + 0.2 * noise)
        else:
            tensors[name] = 1.7 * shape[1] ** -0.5 * noise
    return tensors


def write_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    num_shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Writes config.json and the weights into `folder` (made if absent) and returns it.

    One shard is `model.safetensors`; more are `model-0000i-of-0000n.safetensors` with an index.
    `overrides` are keys of config.json, as in `tiny_config`.
    """
    config = tiny_config(family, torch_dtype=str(dtype).removeprefix("torch."), **overrides)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(config, seed).items()}
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for shard in range(num_shards):
        names = sorted(tensors)[shard::num_shards]  # q, k and v of one layer land in different files
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
