"""What a batch of rows asks of the sampler, as tensors: built here, only read by `sampler.py`.

A row is its parameters and its token ids: nothing here knows requests, blocks or steps. `SamplingInputs.build`
starts from nothing, as v0 did; sampling_columns.py keeps what it can from step to step. A field is None when no row
uses the feature, so that a batch of plain greedy rows costs one look at the parameters of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from nanoserve.request import SamplingParams

INF = float("inf")
FLOAT32 = torch.finfo(torch.float32)
# SplitMix64 (Steele, Lea, Flood 2014): the step between two states, and the two factors of the mixing function.
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK64 = 2**64 - 1
Integers64 = TypeVar("Integers64", int, np.ndarray)  # Python's, or an array of uint64


@dataclass(slots=True)
class SamplingRow:
    """What is known of one row. `output_token_ids` are those before the token that is sampled now."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int] | np.ndarray
    eos_token_id: int | None = None


@dataclass(slots=True)
class AllowedIds:
    """Rows that name the ids they may emit."""

    rows_A: Tensor
    forbidden_AV: Tensor  # bool


@dataclass(slots=True)
class Entries:
    """Single places of the logits, and what belongs there."""

    rows_M: Tensor
    ids_M: Tensor
    values_M: Tensor  # float32


@dataclass(slots=True)
class Penalties:
    """Rows with a penalty. A new output token changes one place of each of the two [N, V] tensors."""

    rows_N: Tensor
    repetition_N1: Tensor
    frequency_N1: Tensor
    presence_N1: Tensor
    seen_NV: Tensor  # bool: in the prompt or the output
    counts_NV: Tensor  # int32: in the output


@dataclass(slots=True)
class Draws:
    """Rows that draw. `num_candidates` None: from the whole vocabulary; else from that many of the most likely."""

    rows_N: Tensor
    temperature_N1: Tensor
    log_min_p_N1: Tensor | None
    keys_N1: Tensor | None  # int64; None: no row has a seed
    unseeded_N1: Tensor | None  # bool: rows whose key the generator gives; None: every row has a seed
    num_candidates: int | None = None
    top_k_N1: Tensor | None = None
    top_p_N1: Tensor | None = None  # float64


@dataclass(slots=True)
class LogprobRows:
    """Rows that want log-probabilities."""

    rows: list[int]
    wanted: list[int]  # how many of the most likely tokens each wants
    rows_L: Tensor


@dataclass(slots=True)
class SamplingInputs:
    """The parameters of S rows as tensors; a field is None when no row uses the feature."""

    num_rows: int
    vocab_size: int
    allowed: AllowedIds | None = None
    blocked: Entries | None = None  # bad words, and the ends that min_tokens forbids
    bias: Entries | None = None
    penalties: Penalties | None = None
    plain: Draws | None = None
    truncated: Draws | None = None
    logprobs: LogprobRows | None = None

    @property
    def takes_largest(self) -> bool:
        """Nothing but the largest logit of each row."""
        return not self.changes_logits and self.plain is self.truncated is self.logprobs is None

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str) -> SamplingInputs:
        """The inputs of a batch; greedy rows without other features cost one look at their parameters.

        Ids beyond the vocabulary cannot be sampled: as stop ids and bad words they have no effect, elsewhere the
        front end refuses them.
        """
        inputs = cls(len(rows), vocab_size)
        plain, truncated, penalised, extras = [], [], [], []
        for index, row in enumerate(rows):
            params = row.params
            if not params.is_greedy:
                cut = 0 < params.top_k < vocab_size or params.top_p < 1
                (truncated if cut else plain).append(index)
            if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
                penalised.append(index)
            if has_extras(params):
                extras.append((index, row))
        if penalised:
            inputs.penalties = _build_penalties(rows, penalised, vocab_size, device)
        if plain:
            inputs.plain = _build_draws(rows, plain, device)
        if truncated:
            inputs.truncated = _build_draws(rows, truncated, device)
            _add_truncation(inputs.truncated, rows, truncated, vocab_size, device)
        inputs.add_extras(extras, device)
        return inputs

    def add_extras(self, rows: Iterable[tuple[int, SamplingRow]], device: torch.device | str) -> None:
        """What few rows use, of those rows, each with its index: masks, bias and log-probabilities."""
        allowed: dict[int, list[int]] = {}
        blocked: list[tuple[int, int, float]] = []
        bias: list[tuple[int, int, float]] = []
        wanted: dict[int, int] = {}
        for index, row in rows:
            params = row.params
            if params.allowed_token_ids is not None:
                allowed[index] = params.allowed_token_ids
            if params.bad_words_token_ids or params.min_tokens:
                blocked += [(index, token_id, -INF) for token_id in _blocked_ids(row) if token_id < self.vocab_size]
            if params.logit_bias:
                bias += [(index, token_id, value) for token_id, value in params.logit_bias.items()]
            if params.logprobs is not None:
                wanted[index] = num_wanted(params.logprobs, self.vocab_size)
        if allowed:
            self.allowed = _build_allowed(allowed, self.vocab_size, device)
        if blocked:
            self.blocked = _build_entries(blocked, self.vocab_size, device)
        if bias:
            self.bias = _build_entries(bias, self.vocab_size, device)
        if wanted:
            rows_L = torch.tensor(list(wanted), device=device)
            self.logprobs = LogprobRows(list(wanted), list(wanted.values()), rows_L)

    @property
    def changes_logits(self) -> bool:
        """Whether any row's logits differ from the model's when its token is chosen."""
        return not (self.allowed is self.blocked is self.bias is self.penalties is None)


def has_extras(params: SamplingParams) -> bool:
    """Whether `SamplingInputs.add_extras` finds anything in a row with these parameters."""
    masked = params.allowed_token_ids is not None or params.bad_words_token_ids or params.min_tokens
    return bool(masked or params.logit_bias or params.logprobs is not None)


def draw_key(seed: int, index: int) -> int:
    """The key (64 bits with sign) of a seeded row's output token number `index`."""
    return signed64(mix64(mix64(seed & _MASK64) + index * GAMMA))


def mix64(x: Integers64) -> Integers64:
    x = (x + GAMMA) & _MASK64
    x = ((x ^ (x >> 30)) * MIX_1) & _MASK64
    x = ((x ^ (x >> 27)) * MIX_2) & _MASK64
    return x ^ (x >> 31)


def signed64(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def num_wanted(k: int, vocab_size: int) -> int:
    return vocab_size if k == -1 else min(k, vocab_size)


def count_ids(sequences: Sequence[Sequence[int] | np.ndarray], vocab_size: int, device: torch.device | str) -> Tensor:
    """How often each id stands in each of N sequences: int32 [N, V]."""
    places = [np.asarray(ids, dtype=np.int64) + i * vocab_size for i, ids in enumerate(sequences)]
    flat = torch.from_numpy(np.concatenate(places)).to(device)
    counts = torch.zeros(len(sequences) * vocab_size, dtype=torch.int32, device=device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).view(-1, vocab_size)


def _blocked_ids(row: SamplingRow) -> list[int]:
    output, params = row.output_token_ids, row.params
    blocked = []
    for *start, last in params.bad_words_token_ids:
        if not start or list(output[-len(start) :]) == start:
            blocked.append(last)
    if len(output) < params.min_tokens:
        blocked += params.stop_token_ids
        if row.eos_token_id is not None:
            blocked.append(row.eos_token_id)
    return blocked


def _build_entries(entries: Sequence[tuple[int, int, float]], vocab_size: int, device: torch.device | str) -> Entries:
    rows, ids, values = zip(*entries, strict=True)
    assert max(ids) < vocab_size, f"logit_bias of id {max(ids)} in a vocabulary of {vocab_size}"
    places_2M = torch.tensor((rows, ids), device=device)
    return Entries(places_2M[0], places_2M[1], torch.tensor(values, dtype=torch.float32, device=device))


def _build_allowed(allowed: dict[int, list[int]], vocab_size: int, device: torch.device | str) -> AllowedIds:
    named = list(allowed.values())
    largest = max(map(max, named))
    assert largest < vocab_size, f"allowed id {largest} in a vocabulary of {vocab_size}"
    return AllowedIds(torch.tensor(list(allowed), device=device), count_ids(named, vocab_size, device) == 0)


def _build_penalties(
    rows: Sequence[SamplingRow], picked: list[int], vocab_size: int, device: torch.device | str
) -> Penalties:
    prompts = [rows[index].prompt_token_ids for index in picked]
    outputs = [rows[index].output_token_ids for index in picked]
    params = [rows[index].params for index in picked]
    counts_NV = count_ids(outputs, vocab_size, device)
    repetition = [clamped(p.repetition_penalty) for p in params]
    return Penalties(
        rows_N=torch.tensor(picked, device=device),
        repetition_N1=_column(repetition, device),
        frequency_N1=_column([p.frequency_penalty for p in params], device),
        presence_N1=_column([p.presence_penalty for p in params], device),
        seen_NV=(count_ids(prompts, vocab_size, device) > 0) | (counts_NV > 0),
        counts_NV=counts_NV,
    )


def clamped(repetition_penalty: float) -> float:
    """Neither 0 nor infinite as a float32."""
    return min(max(repetition_penalty, FLOAT32.tiny), FLOAT32.max)


def _build_draws(rows: Sequence[SamplingRow], picked: list[int], device: torch.device | str) -> Draws:
    draws = Draws(
        rows_N=torch.tensor(picked, device=device),
        temperature_N1=_column([rows[index].params.temperature for index in picked], device),
        log_min_p_N1=None,
        keys_N1=None,
        unseeded_N1=None,
    )
    min_ps = [rows[index].params.min_p for index in picked]
    if any(min_ps):
        draws.log_min_p_N1 = _column([math.log(min_p) if min_p else -INF for min_p in min_ps], device)
    unseeded = [rows[index].params.seed is None for index in picked]
    if not all(unseeded):
        keys = [_row_key(rows[index]) for index in picked]
        draws.keys_N1 = _column(keys, device, torch.int64)
    if any(unseeded):
        draws.unseeded_N1 = _column(unseeded, device, torch.bool)
    return draws


def _row_key(row: SamplingRow) -> int:
    seed = row.params.seed
    return 0 if seed is None else draw_key(seed, len(row.output_token_ids))


def _add_truncation(
    draws: Draws, rows: Sequence[SamplingRow], picked: list[int], vocab_size: int, device: torch.device | str
) -> None:
    params = [rows[index].params for index in picked]
    top_ks = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    draws.num_candidates = max(top_ks)
    if min(top_ks) < draws.num_candidates:
        draws.top_k_N1 = _column(top_ks, device, torch.int64)
    if any(p.top_p < 1 for p in params):
        top_ps = [p.top_p if p.top_p < 1 else INF for p in params]
        draws.top_p_N1 = _column(top_ps, device, torch.float64)


def _column(values: Sequence[float], device: torch.device | str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)
