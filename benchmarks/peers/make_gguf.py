"""A checkpoint of Qwen3's shape in float32 as llama.cpp reads it: the same numbers, and no vocabulary but its size.

    VENVS/llama/bin/python make_gguf.py CHECKPOINT

run_llama.py does it by itself. Needs the packages `gguf` and `safetensors`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gguf import GGUFWriter
from safetensors import safe_open

OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """KeyError for a tensor that this family does not have."""
    module = name.removesuffix(".weight")
    if not module.startswith("model.layers."):
        return f"{OUTSIDE[module]}.weight"
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{IN_LAYER[part]}.weight"


def make_gguf(checkpoint: Path) -> Path:
    """Its file, as it lies there or newly made."""
    target = checkpoint / "float32.gguf"
    if target.exists():
        return target
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["model_type"] == "qwen3", f"{checkpoint} is a {config['model_type']}"
    partial = target.with_suffix(".partial")
    writer = GGUFWriter(partial, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    with safe_open(checkpoint / "model.safetensors", "np") as tensors:
        for name in tensors.keys():  # noqa: SIM118  (not a dict)
            writer.add_tensor(gguf_name(name), tensors.get_tensor(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target


if __name__ == "__main__":
    print(make_gguf(Path(sys.argv[1])))
