"""Fills a decoder: from safetensors files (one or sharded), or with random numbers for a config alone.

Every Hugging Face tensor has a slot: a view of the decoder's own memory. Fusing q, k, v and converting the
dtype are therefore one copy out of the memory-mapped file, and nothing is held twice. A checkpoint that does
not fit its config.json exactly is refused. checkpoint.py finds the folder and reads the config.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoserve.checkpoint import ModelConfig, read_json, read_model_config, resolve_model_dir
from nanoserve.model import Decoder, Linear

__all__ = ["checkpoint_slots", "load_model", "read_model_config", "resolve_dtype", "resolve_model_dir"]

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "half": torch.float16,
}
DUMMY_GAIN = 1.7


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    seed: int = 0,
) -> Decoder:
    """A decoder that is ready to run, from an embedded model, a folder or a hub id.

    `dtype`: "auto" is float32 on a CPU, the checkpoint's own elsewhere. `load_format`: "auto" reads safetensors;
    "dummy" reads config.json only and draws weights from `seed`, the same on every device. Raises ValueError.
    """
    device = torch.device(device)
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format={load_format!r} is not known; use auto or dummy.")
    config = read_model_config(name)
    if load_format == "dummy":
        model = _empty_decoder(config, resolve_dtype(dtype, device, config.dtype), device)
        _fill_randomly(model, seed)
        return model
    files = find_weight_files(resolve_model_dir(name))
    stored = config.dtype if dtype != "auto" or device.type == "cpu" else config.dtype or _stored_dtype(files[0])
    model = _empty_decoder(config, resolve_dtype(dtype, device, stored), device)
    _fill_from_files(model, files)
    return model


def _empty_decoder(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    try:
        return Decoder(config, dtype=dtype, device=device)
    except RuntimeError as error:  # torch has nothing narrower for the memory of a CPU
        raise ValueError(
            f"the model's {config.num_parameters} weights in {dtype} do not fit on {device} "
            f"({str(error).splitlines()[0]}); use a smaller model, or a 16-bit dtype."
        ) from error


def resolve_dtype(dtype: str | torch.dtype, device: torch.device, stored: str | None) -> torch.dtype:
    """The dtype to compute in. "auto" is float32 on a CPU (16-bit matrices are slow there), else `stored`."""
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else stored or "float32"
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype={dtype!r} is not supported; use auto, {', '.join(DTYPES)}.")
    assert isinstance(dtype, torch.dtype)
    return dtype


def find_weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the index's shards, else `model.safetensors`, else the only one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not weight_map or not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map from tensors to files; fetch the file again.")
        for shard in weight_map.values():
            if not isinstance(shard, str) or not shard.isprintable() or not _is_inside(shard):
                raise ValueError(
                    f"{index}: weight_map names {shard!r:.80}, which is no file in the model folder; fetch it again."
                )
        return [folder / shard for shard in sorted(set(weight_map.values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        raise ValueError(
            f"model folder {folder} has {len(found)} safetensors files and no model.safetensors(.index.json); give "
            "a folder with safetensors weights (transformers' save_pretrained writes them)."
        )
    return found


def _is_inside(shard: str) -> bool:
    """Whether a relative name stays in its folder; a link there may lead out, as in the hub's cache."""
    return not Path(shard).is_absolute() and ".." not in Path(shard).parts


def checkpoint_slots(model: Decoder) -> dict[str, Tensor]:
    """Hugging Face's name of each tensor -> the view of the decoder's memory that holds it."""
    config = model.config
    slots: dict[str, Tensor] = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm.weight}
    if not config.tied_head:
        slots["lm_head.weight"] = model.head.weight
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    for index, layer in enumerate(model.layers):
        at = f"model.layers.{index}"
        slots[f"{at}.input_layernorm.weight"] = layer.attention_norm.weight
        slots[f"{at}.post_attention_layernorm.weight"] = layer.mlp_norm.weight
        if layer.q_norm is not None and layer.k_norm is not None:
            slots[f"{at}.self_attn.q_norm.weight"] = layer.q_norm.weight
            slots[f"{at}.self_attn.k_norm.weight"] = layer.k_norm.weight
        slots |= _rows(f"{at}.self_attn", layer.qkv, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size})
        slots |= _rows(f"{at}.self_attn", layer.o, {"o_proj": config.hidden_size})
        slots |= _rows(f"{at}.mlp", layer.gate_up, {"gate_proj": inner, "up_proj": inner})
        slots |= _rows(f"{at}.mlp", layer.down, {"down_proj": config.hidden_size})
    return slots


def _rows(prefix: str, linear: Linear, sizes: dict[str, int]) -> dict[str, Tensor]:
    """The parts of a fused matrix (and of its bias), by the names they have apart."""
    slots = {}
    for kind, fused in (("weight", linear.weight), ("bias", linear.bias)):
        if fused is not None:
            parts = fused.split(list(sizes.values()))
            slots |= {f"{prefix}.{name}.{kind}": part for name, part in zip(sizes, parts, strict=True)}
    return slots


def _fill_from_files(model: Decoder, files: list[Path]) -> None:
    slots = checkpoint_slots(model)
    missing = set(slots)
    spare_head: Tensor | None = None
    for path in files:
        for name, tensor in _read_tensors(path):
            if name.endswith("rotary_emb.inv_freq"):  # old checkpoints store what follows from the config
                continue
            if name == "lm_head.weight" and model.config.tied_head:
                spare_head = tensor
                continue
            _check_tensor(path, name, tensor, slots, model.config)
            slots[name].copy_(tensor)
            missing.discard(name)
    if missing:
        raise ValueError(
            f"{files[0].parent} lacks {len(missing)} of {len(slots)} tensors, the first {min(missing)!r}; fetch the "
            "whole checkpoint, and check that config.json belongs to it."
        )
    if spare_head is not None and not torch.equal(spare_head.to(model.embed), model.embed):
        raise ValueError(
            f"{files[0].parent} has an lm_head.weight unlike its embedding, but tie_word_embeddings is true; "
            "set it to false in config.json."
        )


def _read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file, each backed by the memory-mapped file."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict: it cannot be iterated)
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as safetensors ({' '.join(str(error).split())}); fetch the file again."
        ) from error


def _stored_dtype(path: Path) -> str | None:
    """The name of the first tensor's dtype."""
    return next((str(tensor.dtype).removeprefix("torch.") for _, tensor in _read_tensors(path)), None)


def _check_tensor(path: Path, name: str, tensor: Tensor, slots: Mapping[str, Tensor], config: ModelConfig) -> None:
    if name not in slots:
        raise ValueError(
            f"{path} holds {name!r}, which a {config.architecture} of this shape does not have; check that "
            "config.json belongs to these weights."
        )
    if tensor.shape != slots[name].shape:
        raise ValueError(
            f"{path}: {name!r} has shape {list(tensor.shape)}, config.json asks for {list(slots[name].shape)}; check "
            "that it belongs to these weights."
        )
    if tensor.dtype not in DTYPES.values():
        raise ValueError(
            f"{path}: {name!r} is {tensor.dtype}, and quantised weights are not supported; use a checkpoint in "
            f"{', '.join(DTYPES)}."
        )


def _fill_randomly(model: Decoder, seed: int) -> None:
    """Normal weights, wide enough that greedy output varies and depends on attention, in any shape of model.

    Each matrix multiplies the size of its input by `DUMMY_GAIN`, so that the layers, not the last token's
    embedding, dominate the residual stream, and attention picks a few keys. With a narrow initialiser and a
    tied head a model repeats one token.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, slot in checkpoint_slots(model).items():
        noise = torch.randn(slot.shape, generator=generator)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            noise = DUMMY_GAIN * (1 + 0.1 * noise)
        elif name.endswith("norm.weight"):
            noise = 1 + 0.1 * noise
        elif name.endswith("bias"):
            noise *= 0.1
        else:
            noise *= DUMMY_GAIN / math.sqrt(slot.shape[1])
        slot.copy_(noise)
