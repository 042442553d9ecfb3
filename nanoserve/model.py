"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 families: the forward pass, with transformers' logits.

It takes a flat list of T tokens and their positions, and knows neither requests nor the KV cache: each layer
hands q, k and v to `attend`, a callable of the runner that stores and attends for the whole batch. q, k, v
and gate, up are fused into one matrix each. checkpoint.py says which shape, weights.py fills in the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.checkpoint import ModelConfig, RopeConfig
from nanoserve.ops import Ops, TorchOps

__all__ = ["Attend", "Decoder", "Linear", "ModelConfig", "RMSNorm", "rope_frequencies"]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, float32 [D/2], with the arithmetic of transformers.

    default: Su et al. 2021, theta^(-2i/D). linear: all slowed down by `factor` (Chen et al. 2023).
    llama3: long wavelengths slowed down, short ones kept, a linear blend between the two limits.
    yarn (Peng et al. 2023): the same idea, blended over the dimensions that turn beta_slow..beta_fast times.
    """
    wave = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    freq = 1.0 / wave
    match rope.rope_type:
        case "linear":
            return freq / rope.factor
        case "llama3":
            turns = rope.original_max_len / (2 * math.pi / freq)  # over the trained length
            keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            keep = keep.clamp(0, 1)
            return (1 - keep) * freq / rope.factor + keep * freq
        case "yarn":
            low, high = _yarn_band(rope, head_dim)
            pairs = torch.arange(head_dim // 2, dtype=torch.float32)
            keep = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
            return 1.0 / (rope.factor * wave) * (1 - keep) + freq * keep
    return freq


def _yarn_band(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """The dimensions between which yarn goes from the kept frequency to the slowed-down one."""

    def dim_of(turns: float) -> float:
        return head_dim * math.log(rope.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001


class Attend(Protocol):
    """What the runner gives to a forward pass: store k and v of the whole batch, then attend with q.

    Causal, with softmax scale D^-0.5. v may be a strided view. Returns [T, H, D] in q's dtype. In the last layer there
    may be fewer queries than keys: those of the tokens that sample.
    """

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, /) -> Tensor: ...


class Linear(nn.Module):
    """Every product with a weight matrix goes through here: the place to swap in another kernel."""

    def __init__(self, weight_OI: nn.Parameter, bias_O: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight_OI
        self.bias = bias_O

    def forward(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self.weight, self.bias)

    def look_up(self, ids_T: Tensor) -> Tensor:
        """The rows of the matrix that these outputs have: the embedding of tokens, by a head that is tied to it."""
        return F.embedding(ids_T, self.weight)


class RMSNorm(nn.Module):
    """What a norm needs; `Ops.rms_norm` and `Ops.add_rms_norm` say how it is computed."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps


class _Memory:
    """Makes modules whose weights are uninitialised memory."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._eps, self._dtype, self._device = config.rms_norm_eps, dtype, device

    def weight(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self._dtype, device=self._device), requires_grad=False)

    def linear(self, num_in: int, num_out: int, *, bias: bool) -> Linear:
        return Linear(self.weight(num_out, num_in), self.weight(num_out) if bias else None)

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(self.weight(size), self._eps)


class DecoderLayer(nn.Module):
    """Pre-norm attention, then a pre-norm SwiGLU (Shazeer 2020); each adds to the residual stream."""

    def __init__(self, config: ModelConfig, memory: _Memory) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.attention_norm = memory.norm(hidden)
        self.qkv = memory.linear(hidden, q_size + 2 * kv_size, bias=config.qkv_bias)
        self.q_norm = memory.norm(config.head_dim) if config.qk_norm else None
        self.k_norm = memory.norm(config.head_dim) if config.qk_norm else None
        self.o = memory.linear(q_size, hidden, bias=config.o_bias)
        self.mlp_norm = memory.norm(hidden)
        self.gate_up = memory.linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.down = memory.linear(inner, hidden, bias=config.mlp_bias)

    def enter(self, x_TE: Tensor, cos_TD: Tensor, sin_TD: Tensor, ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
        """From a normed input to what attention takes: q [T, H, D], k and v [T, K, D]."""
        heads = self.qkv(x_TE).unflatten(-1, (-1, self.head_dim))
        q_THD, k_TKD, v_TKD = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        q_weight = None if self.q_norm is None else self.q_norm.weight
        k_weight = None if self.k_norm is None else self.k_norm.weight
        eps = self.attention_norm.eps
        return *ops.norm_and_rotate(q_THD, k_TKD, q_weight, k_weight, eps, cos_TD, sin_TD), v_TKD

    def leave(self, attended_THD: Tensor, residual_TE: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """From attention's answer to the layer's output, not yet added to the residual stream."""
        norm = self.mlp_norm
        x_TE, residual_TE = ops.add_rms_norm(self.o(attended_THD.flatten(1)), residual_TE, norm.weight, norm.eps)
        return self.down(ops.silu_and_mul(self.gate_up(x_TE))), residual_TE


class Flow(NamedTuple):
    """What lies on either side of an attention call."""

    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    residual_TE: Tensor
    cos_TD: Tensor  # D/2 columns
    sin_TD: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_THD, self.k_TKD, self.v_TKD


def cross(leaving: DecoderLayer, entering: DecoderLayer, attended_THD: Tensor, flow: Flow, ops: Ops) -> Flow:
    """Everything between the attention of one layer and that of the next."""
    x_TE, residual_TE = leaving.leave(attended_THD, flow.residual_TE, ops)
    norm = entering.attention_norm
    x_TE, residual_TE = ops.add_rms_norm(x_TE, residual_TE, norm.weight, norm.eps)
    return Flow(*entering.enter(x_TE, flow.cos_TD, flow.sin_TD, ops), residual_TE, flow.cos_TD, flow.sin_TD)


class Pieces(NamedTuple):
    """The callables that a forward pass is made of; compiled ones may stand in their place."""

    first: Callable[[Tensor, Tensor], Flow]
    cross: Callable[[DecoderLayer, DecoderLayer, Tensor, Flow, Ops], Flow]
    last: Callable[[Tensor, Tensor], Tensor]


class Decoder(nn.Module):
    """The whole model, with uninitialised weights: `weights.load_model` makes one that is ready."""

    layers: Sequence[DecoderLayer]
    inv_freq: Tensor

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.ops: Ops = TorchOps()
        self.pieces = Pieces(self.first, cross, self.last)
        memory = _Memory(config, dtype, device)
        self.embed = memory.weight(config.vocab_size, config.hidden_size)
        layers = nn.ModuleList(DecoderLayer(config, memory) for _ in range(config.num_layers))
        self.layers = cast("Sequence[DecoderLayer]", layers)
        self.norm = memory.norm(config.hidden_size)
        self.head = Linear(self.embed if config.tied_head else memory.weight(*self.embed.shape))
        # Always float32: a position of 100,000 in bfloat16 would be off by hundreds.
        inv_freq = rope_frequencies(config.rope, config.head_dim).to(device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in. Matrices may be kept in another."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def forward(
        self, input_ids_T: Tensor, positions_T: Tensor, attend: Attend, wanted_S: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the last norm, of T tokens of any requests in any order: [T, E], or [S, E] of those
        tokens that are wanted. Of the others the last layer's keys and values are all that anybody will read.

        first | attend | cross | attend | cross | ... | attend | last: all but attention is the same for a token
        whatever its batch is, so that it can be compiled, and captured, in pieces.
        """
        pieces, last = self.pieces, len(self.layers) - 1
        flow = pieces.first(input_ids_T, positions_T)
        for layer in range(last):
            flow = pieces.cross(self.layers[layer], self.layers[layer + 1], attend(layer, *flow.qkv), flow, self.ops)
        q_THD, residual_TE = flow.q_THD, flow.residual_TE
        if wanted_S is not None:
            q_THD, residual_TE = q_THD[wanted_S], residual_TE[wanted_S]
        attended_THD = attend(last, q_THD, flow.k_TKD, flow.v_TKD)
        return pieces.last(attended_THD, residual_TE) if len(residual_TE) else residual_TE

    def first(self, input_ids_T: Tensor, positions_T: Tensor) -> Flow:
        layer, ops, rope, tied = self.layers[0], self.ops, self.config.rope, self.config.tied_head
        cos_TD, sin_TD = ops.angles(positions_T, self.inv_freq, rope.attention_factor, self.dtype)
        residual_TE = self.head.look_up(input_ids_T) if tied else F.embedding(input_ids_T, self.embed)
        x_TE = ops.rms_norm(residual_TE, layer.attention_norm.weight, layer.attention_norm.eps)
        return Flow(*layer.enter(x_TE, cos_TD, sin_TD, ops), residual_TE, cos_TD, sin_TD)

    def last(self, attended_THD: Tensor, residual_TE: Tensor) -> Tensor:
        x_TE, residual_TE = self.layers[-1].leave(attended_THD, residual_TE, self.ops)
        return self.ops.add_rms_norm(x_TE, residual_TE, self.norm.weight, self.norm.eps)[0]

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """Scores [S, V] of the next token, in the model's dtype, for those rows of `forward` that sample."""
        return self.head(hidden_SE)
