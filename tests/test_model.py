"""Laws of the decoder: transformers' logits and greedy tokens, and independence of how tokens are batched."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import FAMILIES, tiny_config, write_checkpoint
from reference import is_greedy, reference_generate, reference_logits

from nanoserve.model import Decoder, Linear, ModelConfig, rope_frequencies
from nanoserve.ops import TorchOps
from nanoserve.weights import load_model, resolve_model_dir

NUM_GREEDY = 24
PROMPT_LEN = 40

LINEAR = {"rope_type": "linear", "factor": 2.5}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@dataclass(frozen=True)
class Case:
    family: str
    overrides: dict[str, Any]
    num_shards: int = 1


CASES = {
    "llama": Case("llama", {}),
    "llama-tied-biases-sharded": Case(
        "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, num_shards=3
    ),
    "llama-linear-old-spelling": Case("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama-llama3": Case("llama", {"rope_scaling": LLAMA3, "rope_theta": 5000.0}),
    "mistral-sharded": Case("mistral", {"head_dim": 24, "num_key_value_heads": 1}, num_shards=2),
    "mistral-window-as-long-as-the-model": Case("mistral", {"head_dim": None, "sliding_window": 128}),
    "qwen2-tied": Case("qwen2", {"tie_word_embeddings": True, "head_dim": ..., "num_key_value_heads": 4}),
    "qwen2-yarn": Case("qwen2", {"rope_scaling": YARN}, num_shards=2),
    "qwen3-tied": Case("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases-yarn-new-spelling": Case(
        "qwen3",
        {
            "attention_bias": True,
            "head_dim": 32,
            "rope_theta": ...,
            "rope_parameters": YARN
            | {"rope_theta": 5000.0, "beta_fast": 8, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
        },
    ),
    "qwen3-llama3-new-spelling": Case(
        "qwen3", {"rope_theta": ..., "rope_parameters": LLAMA3 | {"rope_theta": 500.0}}, num_shards=2
    ),
}


def dense_attend(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
    """One sequence, no cache."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


class CachingAttend:
    """Any number of sequences: keeps k and v by (layer, sequence, position), in no particular order."""

    def __init__(self) -> None:
        self.kv: dict[tuple[int, str, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.rows: list[tuple[str, int]] = []  # (sequence, position) of each token of the step

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        for (name, position), k, v in zip(self.rows, k_TKD, v_TKD, strict=True):
            self.kv[layer, name, position] = k, v
        out_THD = torch.empty_like(q_THD)
        for i, (name, position) in enumerate(self.rows):
            past = [self.kv[layer, name, p] for p in range(position + 1)]
            k, v = (torch.stack(x, dim=1)[None] for x in zip(*past, strict=True))
            attended = F.scaled_dot_product_attention(q_THD[None, i, :, None], k, v, enable_gqa=True)
            out_THD[i] = attended[0, :, 0]
        return out_THD


def all_logits(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    hidden_TE = model(torch.tensor(token_ids), torch.arange(len(token_ids)), dense_attend)
    return model.logits(hidden_TE)


def greedy(model: Decoder, prompt: list[int], n: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(n):
        token_ids.append(int(all_logits(model, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


def random_prompt(vocab_size: int, length: int = PROMPT_LEN) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(5)).tolist()


def hf_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def check_parity(folder: Path | str, prompt: list[int]) -> None:
    """Logits over the prompt and the tokens after it, ours against transformers' and the reference's."""
    model = load_model(folder)
    theirs = hf_model(resolve_model_dir(folder))
    generated = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_GREEDY, min_new_tokens=NUM_GREEDY, do_sample=False, eos_token_id=None
    )[0].tolist()
    assert generated[: len(prompt)] == prompt
    assert len(generated) == len(prompt) + NUM_GREEDY
    assert greedy(model, prompt, NUM_GREEDY) == generated[len(prompt) :]
    assert reference_generate(model, prompt, NUM_GREEDY) == generated[len(prompt) :]
    assert is_greedy(model, prompt, generated[len(prompt) :])
    expected = theirs(torch.tensor([generated])).logits[0]
    torch.testing.assert_close(all_logits(model, generated), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(reference_logits(model, generated).float(), expected, atol=1e-4, rtol=0)
    assert sum(p.numel() for p in theirs.parameters()) == model.config.num_parameters


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_family_has_transformers_logits_and_greedy_tokens(case: Case, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, case.family, num_shards=case.num_shards, **case.overrides)
    check_parity(folder, random_prompt(128))


def test_the_embedded_model_has_transformers_logits_and_greedy_tokens() -> None:
    check_parity("nanostory", random_prompt(2048, 60))


def test_every_random_checkpoint_says_varied_things_that_depend_on_the_prompt(tmp_path: Path) -> None:
    """Else the parity above would hold for a decoder with broken attention."""
    for family in FAMILIES:
        model = load_model(write_checkpoint(tmp_path / family, family))
        prompt = random_prompt(128)
        tokens = reference_generate(model, prompt, NUM_GREEDY)
        assert len(set(tokens)) >= NUM_GREEDY // 2, (family, tokens)
        swapped = reference_generate(model, [prompt[1], prompt[0], *prompt[2:]], NUM_GREEDY)
        assert sum(a == b for a, b in zip(tokens, swapped, strict=True)) < NUM_GREEDY // 2, family


def test_every_way_to_batch_and_chunk_gives_the_same_hidden_states(tmp_path: Path) -> None:
    model = load_model(write_checkpoint(tmp_path, "qwen3"))
    sequences = {"a": random_prompt(128, 13), "b": random_prompt(128, 9)[::-1]}
    expected = {name: model(torch.tensor(ids), torch.arange(len(ids)), dense_attend) for name, ids in sequences.items()}
    attend, seen = CachingAttend(), 0
    # each step: chunks of one or both sequences, in any order, of any length
    for step in ([("a", 0, 5)], [("b", 0, 1), ("a", 5, 6)], [("a", 6, 7), ("b", 1, 8)], [("b", 8, 9), ("a", 7, 13)]):
        attend.rows = [(name, p) for name, start, end in step for p in range(start, end)]
        ids = torch.tensor([sequences[name][p] for name, p in attend.rows])
        hidden_TE = model(ids, torch.tensor([p for _, p in attend.rows]), attend)
        for row, (name, position) in zip(hidden_TE, attend.rows, strict=True):
            torch.testing.assert_close(row, expected[name][position], atol=1e-5, rtol=1e-5)
            seen += 1
    assert seen == 13 + 9


def interleaved(
    ops: TorchOps, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    q, k = (torch.cat((x[..., ::2] * cos, x[..., 1::2] * sin), -1) for x in (q, k))
    return q, k


PLANTED = {
    "interleaved-rotation": ("rotate", interleaved),
    "no-rotation": ("rotate", lambda self, q, k, cos, sin: (q, k)),
    "uniform-attention": (None, lambda layer, q, k, v: dense_attend(layer, q * 0, k, v)),
    "own-value-only": (None, lambda layer, q, k, v: v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)),
    "wrong-kv-head": (None, lambda layer, q, k, v: dense_attend(layer, q, k.flip(1), v)),
    "no-scale": (None, lambda layer, q, k, v: dense_attend(layer, q * q.shape[-1] ** 0.5, k, v)),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_reference_sees_every_planted_bug(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(write_checkpoint(tmp_path, "llama"))
    prompt = random_prompt(128)
    tokens = reference_generate(model, prompt, NUM_GREEDY)
    assert greedy(model, prompt, NUM_GREEDY) == tokens
    name, broken = PLANTED[bug]
    if name is not None:
        monkeypatch.setattr(TorchOps, name, broken)
    hidden_TE = model(torch.tensor(prompt), torch.arange(len(prompt)), dense_attend if name else broken)
    logits = model.logits(hidden_TE).double()
    assert (logits - reference_logits(model, prompt)).abs().max() > 0.1
    assert not is_greedy(model, prompt, [*tokens[:-1], (tokens[-1] + 1) % 128])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_16_bit_model_is_close_to_its_float32_twin(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    prompt = random_prompt(128)
    exact = all_logits(load_model(folder), prompt)
    for dtype, allowed in ((torch.bfloat16, 0.15), (torch.float16, 0.02)):
        model = load_model(folder, dtype=dtype)
        logits = all_logits(model, prompt)
        assert logits.dtype == dtype
        assert model.inv_freq.dtype == torch.float32
        assert ((logits - exact).norm() / exact.norm()).item() < allowed


def test_a_norm_rounds_before_the_weight_is_applied() -> None:
    x, weight = torch.randn(5, 32).bfloat16(), torch.randn(32).bfloat16()
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(TorchOps().rms_norm(x, weight, 1e-6), exact.bfloat16() * weight)


def test_every_matrix_product_goes_through_linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a later change can swap the kernel in one place."""
    model = load_model(write_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True))
    calls = []
    monkeypatch.setattr(Linear, "forward", lambda self, x: calls.append(self) or F.linear(x, self.weight, self.bias))
    all_logits(model, [1, 2, 3])
    assert len(calls) == 4 * model.config.num_layers + 1


def rope_of(max_len: int, theta: float, rope: dict[str, Any] | None) -> dict[str, Any]:
    return tiny_config("llama", max_position_embeddings=max_len, rope_theta=theta, rope_scaling=rope, head_dim=128)


@pytest.mark.parametrize(
    "config",
    [
        rope_of(4096, 10000.0, None),
        rope_of(4096, 10000.0, LINEAR),
        rope_of(131072, 500000.0, LLAMA3 | {"original_max_position_embeddings": 8192}),
        rope_of(32768, 1000000.0, YARN | {"original_max_position_embeddings": 32768}),
        rope_of(32768, 1000000.0, {"type": "yarn", "factor": 4.0}),
        rope_of(163840, 10000.0, YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}),
        rope_of(131072, 10000.0, {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096}),
        rope_of(4096, 10000.0, YARN | {"attention_factor": 1.3, "beta_fast": 32, "beta_slow": 1}),
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn-old", "yarn-mscale", "yarn-ratio", "yarn-attention-factor"],
)
def test_every_rope_has_transformers_frequencies_bit_by_bit(config: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(LlamaConfig(**config))
    ours = ModelConfig.from_hf(config)
    assert torch.equal(rope_frequencies(ours.rope, ours.head_dim), theirs.inv_freq)
    assert ours.rope.attention_factor == pytest.approx(theirs.attention_scaling, abs=1e-12)


PUBLISHED = {
    # hidden, inner, layers, heads, kv heads, head_dim, vocabulary, tied, positions -> parameters, KV bytes in 16 bit
    "llama-3.1-8b": ("llama", 4096, 14336, 32, 32, 8, None, 128256, False, 131072, 8_030_261_248, 131_072),
    "llama-3-70b": ("llama", 8192, 28672, 80, 64, 8, None, 128256, False, 8192, 70_553_706_496, 327_680),
    "mistral-7b-v0.3": ("mistral", 4096, 14336, 32, 32, 8, None, 32768, False, 32768, 7_248_023_552, 131_072),
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 24, 14, 2, None, 151936, True, 32768, 494_032_768, 12_288),
    "qwen3-0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, 40960, 596_049_920, 114_688),
}


@pytest.mark.parametrize("row", PUBLISHED.values(), ids=PUBLISHED)
def test_every_published_model_has_its_published_size(row: tuple[Any, ...]) -> None:
    family, hidden, inner, layers, heads, kv_heads, head_dim, vocab, tied, positions, parameters, kv_bytes = row
    config = ModelConfig.from_hf(
        tiny_config(
            family,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab,
            tie_word_embeddings=tied,
            max_position_embeddings=positions,
        )
    )
    shapes = Decoder(config, dtype=torch.float32, device=torch.device("meta"))
    assert config.num_parameters == sum(p.numel() for p in shapes.parameters()) == parameters
    assert config.kv_bytes_per_token(torch.bfloat16) == kv_bytes
    assert config.kv_bytes_per_token(torch.float32) == 2 * kv_bytes
    assert config.max_model_len == positions


@pytest.mark.parametrize(
    ("rope", "max_model_len"),
    [
        (None, 1000),
        (LINEAR, 2500),
        (LLAMA3, 1000),
        (YARN | {"original_max_position_embeddings": 250}, 1000),
        (YARN | {"original_max_position_embeddings": 1000}, 4000),
        ({"rope_type": "yarn", "factor": 2.0}, 2000),
    ],
)
def test_max_model_len_counts_the_factor_where_vllm_does(rope: dict[str, Any] | None, max_model_len: int) -> None:
    config = tiny_config("llama", max_position_embeddings=1000, rope_scaling=rope)
    assert ModelConfig.from_hf(config).max_model_len == max_model_len


def test_both_spellings_of_rope_mean_the_same() -> None:
    old = ModelConfig.from_hf(tiny_config("llama", rope_theta=777.0, rope_scaling=LLAMA3))
    new = ModelConfig.from_hf(tiny_config("llama", rope_theta=..., rope_parameters=LLAMA3 | {"rope_theta": 777.0}))
    assert old == new
    assert old.rope.theta == 777.0
    plain = ModelConfig.from_hf(tiny_config("qwen3", rope_theta=..., rope_parameters={"rope_theta": 5.0}))
    assert plain.rope == replace(plain.rope, rope_type="default", theta=5.0)


def test_every_absent_key_means_what_it_means_in_transformers() -> None:
    from transformers import AutoConfig

    for family in FAMILIES:
        absent = dict.fromkeys(
            ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "sliding_window"),
            ...,
        )
        hf = tiny_config(family, num_attention_heads=32, hidden_size=64, **absent)
        ours = ModelConfig.from_hf(hf)
        theirs = AutoConfig.for_model(**hf)
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 32)
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        assert ours.tied_head == theirs.tie_word_embeddings


REFUSED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "architecture": ("llama", {"architectures": ["GPT2LMHeadModel"]}, ["'GPT2LMHeadModel'", "Qwen3ForCausalLM"]),
    "no-architecture": ("llama", {"architectures": ...}, ["None", "LlamaForCausalLM"]),
    "act": ("llama", {"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
    "rope": ("qwen2", {"rope_scaling": {"rope_type": "longrope", "factor": 2}}, ["'longrope'", "yarn"]),
    "rope-dynamic": ("qwen2", {"rope_parameters": {"type": "dynamic", "factor": 2}}, ["'dynamic'", "linear"]),
    "rope-by-layer": ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["full_attention"]),
    "rope-factor": ("llama", {"rope_scaling": {"rope_type": "linear"}}, ["factor", "None", "> 0"]),
    "rope-text": ("llama", {"rope_scaling": LINEAR | {"factor": "2"}}, ["factor", "'2'"]),
    "partial-rotary": ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5", "1.0"]),
    "quantized": ("llama", {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "fp8"]),
    "mistral-window": ("mistral", {"sliding_window": 64}, ["sliding_window=64", "128", "max_position_embeddings"]),
    "mistral-default-window": (
        "mistral",
        {"sliding_window": ..., "max_position_embeddings": 8192},
        ["sliding_window=4096", "8192"],
    ),
    "qwen-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        ["sliding_window=64", "128"],
    ),
    "qwen-window-layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]},
        ["sliding_window=64"],
    ),
    "missing": ("llama", {"hidden_size": ...}, ["hidden_size", "None"]),
    "negative": ("llama", {"vocab_size": -1}, ["vocab_size", "-1"]),
    "fraction": ("llama", {"num_hidden_layers": 2.5}, ["num_hidden_layers", "2.5", "integer"]),
    "heads": ("llama", {"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
    "odd-head": ("llama", {"head_dim": 15}, ["head_dim", "15", "even"]),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_every_unsupported_config_is_refused_in_one_line(case: tuple[str, dict[str, Any], list[str]]) -> None:
    family, overrides, words = case
    with pytest.raises(ValueError, match=re.escape(words[0])) as refusal:
        ModelConfig.from_hf(tiny_config(family, **overrides))
    message = str(refusal.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
    assert "; " in message, f"no fix in {message!r}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_junk_value_is_either_read_or_refused_in_one_line(family: str) -> None:
    rope = YARN | {"type": "yarn", "rope_theta": 9.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32}
    config = tiny_config(family, rope_scaling=rope, layer_types=None, use_sliding_window=True, max_window_layers=1)
    messages = []
    for junk in (None, True, 0, -3, 7, 2.5, "x\ny", [], [None], {}, {"a": {}}):
        junked = [config | {key: junk} for key in config]
        junked += [config | {"rope_scaling": rope | {key: junk}} for key in rope]
        for hf in junked:
            try:
                ModelConfig.from_hf(hf)
            except ValueError as refusal:
                messages.append(str(refusal))
    assert len(messages) > 100
    assert not any("\n" in message for message in messages)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"sliding_window": 64}),  # a key that the family does not read
        ("mistral", {"sliding_window": 128}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 2}),
    ],
)
def test_every_window_that_hides_nothing_is_accepted(family: str, overrides: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(tiny_config(family, **overrides)).max_model_len == 128
