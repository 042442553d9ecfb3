"""The naive reference: no cache, no batching, every token recomputed for every new one, all in float64.

Written in another way than the engine: unfused matrices by their checkpoint names, rotary positions as complex
numbers, one head at a time, an explicit mask. Slow on purpose; for tiny models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nanoserve.model import Decoder


class Reference:
    """A decoder's weights in float64, by Hugging Face's names."""

    def __init__(self, model: Decoder) -> None:
        from nanoserve.weights import checkpoint_slots

        self.config = model.config
        self.inv_freq = model.inv_freq.cpu().double()
        self.weights = {name: slot.cpu().double() for name, slot in checkpoint_slots(model).items()}
        self.weights.setdefault("lm_head.weight", self.weights["model.embed_tokens.weight"])

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
        return x / (mean_square + self.config.rms_norm_eps).sqrt() * self.weights[f"{name}.weight"]

    def rotate(self, x: Tensor) -> Tensor:
        """Multiplies the complex numbers x[i] + j x[i + D/2] by e^(j angle)."""
        half = x.shape[-1] // 2
        angles = torch.arange(len(x))[:, None] * self.inv_freq
        z = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * angles)
        return torch.cat((z.real, z.imag), dim=-1) * self.config.rope.attention_factor

    def attention(self, layer: int, x: Tensor) -> Tensor:
        at, config = f"model.layers.{layer}.self_attn", self.config
        mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        q_all, k_all, v_all = (self.linear(f"{at}.{name}_proj", x) for name in "qkv")
        outputs = []
        for head in range(config.num_heads):
            kv_head = head * config.num_kv_heads // config.num_heads
            q = q_all[:, head * config.head_dim :][:, : config.head_dim]
            k = k_all[:, kv_head * config.head_dim :][:, : config.head_dim]
            v = v_all[:, kv_head * config.head_dim :][:, : config.head_dim]
            if config.qk_norm:
                q, k = self.norm(f"{at}.q_norm", q), self.norm(f"{at}.k_norm", k)
            scores = self.rotate(q) @ self.rotate(k).T / config.head_dim**0.5
            outputs.append(torch.where(mask, scores, -torch.inf).softmax(-1) @ v)
        return self.linear(f"{at}.o_proj", torch.cat(outputs, dim=-1))

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        x = self.weights["model.embed_tokens.weight"][list(token_ids)]
        for layer in range(self.config.num_layers):
            at = f"model.layers.{layer}"
            x = x + self.attention(layer, self.norm(f"{at}.input_layernorm", x))
            y = self.norm(f"{at}.post_attention_layernorm", x)
            gate = self.linear(f"{at}.mlp.gate_proj", y)
            x = x + self.linear(f"{at}.mlp.down_proj", gate * gate.sigmoid() * self.linear(f"{at}.mlp.up_proj", y))
        return self.norm("model.norm", x)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """float64 [T, V]: after each token, the scores of the next."""
        return self.linear("lm_head", self.hidden(token_ids))


def reference_logits(model: Decoder, token_ids: Sequence[int]) -> Tensor:
    """float64 [T, V]."""
    return Reference(model).logits(token_ids)


def reference_generate(model: Decoder, prompt: Sequence[int], n: int) -> list[int]:
    """The `n` greedy tokens after `prompt`; the whole sequence is computed anew for each."""
    reference, token_ids = Reference(model), list(prompt)
    for _ in range(n):
        token_ids.append(int(reference.linear("lm_head", reference.hidden(token_ids)[-1:]).argmax()))
    return token_ids[len(prompt) :]


def is_greedy(model: Decoder, prompt: Sequence[int], output: Sequence[int]) -> bool:
    """Whether `output` equals `reference_generate` of its length, from one pass over both together.

    If each token is the argmax after the tokens before it, greedy generation gives that list, by induction.
    """
    best = reference_logits(model, [*prompt, *output]).argmax(-1)
    return best[len(prompt) - 1 : -1].tolist() == list(output)
