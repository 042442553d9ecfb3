"""Turns the logits of the rows that sample into token ids, and into log-probabilities where they are asked for.

Reads `SamplingInputs`, and knows no request. Every draw is a pure function of a 64-bit key and of the row's
logits. A seeded row's key comes from its seed and the index of the token, so that where the row stands in the
batch, with whom, and how its steps were cut changes nothing (`tests/test_sampler.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nanoserve.request import TokenLogprobs
from nanoserve.sampling_inputs import (
    FLOAT32,
    GAMMA,
    INF,
    MIX_1,
    MIX_2,
    Draws,
    LogprobRows,
    Penalties,
    SamplingInputs,
    SamplingRow,
    num_wanted,
    signed64,
)

__all__ = ["Sampled", "SamplingInputs", "SamplingRow", "prompt_logprobs", "sample"]


class Arrival(Protocol):
    """When numbers will be on the host: an event of a device, or what stands for one."""

    def synchronize(self) -> None: ...


@dataclass(slots=True, eq=False)
class Sampled:
    """One token a row. `ids_S` stays on the device; the first look at `token_ids` or `logprobs` fetches both of
    them, in one copy. `measured_LW`: what `_measure` made of the rows that want log-probabilities."""

    ids_S: Tensor  # int64
    measured_LW: Tensor | None = None
    asked: LogprobRows | None = None
    _numbers: Tensor | None = field(default=None, init=False)
    _arrival: Arrival | None = field(default=None, init=False)
    _fetched: tuple[list[int], dict[int, TokenLogprobs]] | None = field(default=None, init=False)

    @classmethod
    def on_its_way(cls, ids_S: Tensor, arrival: Arrival) -> Sampled:
        """Ids that are written to the host's memory, and will be there after `arrival`."""
        sampled = cls(ids_S)
        sampled._numbers, sampled._arrival = ids_S, arrival
        return sampled

    def start_fetch(self) -> None:
        """Begin the copy to the host, in front of whatever the device is given next."""
        numbers = self.ids_S
        if self.measured_LW is not None:
            numbers = torch.cat((self.ids_S.double(), self.measured_LW.flatten()))
        if numbers.is_cuda:
            on_device, numbers = numbers, torch.empty_like(numbers, device="cpu", pin_memory=True)
            numbers.copy_(on_device, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._arrival = event
        self._numbers = numbers

    @property
    def is_on_its_way(self) -> bool:
        """Launched, and perhaps not there."""
        return self._arrival is not None

    def _on_host(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        if self._fetched is None:
            self._fetched = self._fetch()
        return self._fetched

    def _fetch(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        if self._numbers is None:
            self.start_fetch()
        assert self._numbers is not None
        if self._arrival is not None:
            self._arrival.synchronize()
        numbers = self._numbers.tolist()
        if self.measured_LW is None or self.asked is None:
            return numbers, {}
        num_rows, width = len(self.ids_S), self.measured_LW.shape[1]
        ids = [int(number) for number in numbers[:num_rows]]
        logprobs = {}
        for position, (row, k) in enumerate(zip(self.asked.rows, self.asked.wanted, strict=True)):
            start = num_rows + position * width
            logprobs[row] = _token_logprobs(ids[row], numbers[start : start + width], k)
        return ids, logprobs

    @property
    def token_ids(self) -> list[int]:
        return self._on_host()[0]

    @property
    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Of the rows that asked, by row."""
        return self._on_host()[1]


def sample(logits_SV: Tensor, inputs: SamplingInputs, generator: torch.Generator | None = None) -> Sampled:
    """One token for each row, in the order of `vllm/v1/sample/sampler.py: Sampler`. `logits_SV` is only read.

    Log-probabilities are those of the raw logits; masks, bias and penalties make the logits that every row
    chooses from; greedy rows take the largest (the lowest id among equals); the others draw after temperature,
    min-p, top-k and top-p. `generator` (on the device of the logits) gives one key a row to rows without a seed.

    Masks that contradict each other: allowed ids always hold, and where bad words and `min_tokens` together
    would leave a row nothing, they are dropped for that row and step. Logits that are all -inf give id 0.
    """
    shape = (inputs.num_rows, inputs.vocab_size)
    assert logits_SV.shape == shape, f"logits of shape {tuple(logits_SV.shape)} for inputs of {shape}"
    processed_SV = change_logits(logits_SV, inputs) if inputs.changes_logits else logits_SV
    ids_S = largest(processed_SV)
    for draws in (inputs.plain, inputs.truncated):
        if draws is not None:
            ids_S[draws.rows_N] = draw(processed_SV[draws.rows_N].float(), draws, generator)
    if (asked := inputs.logprobs) is None:
        return Sampled(ids_S)
    measured_LW = _measure(logits_SV[asked.rows_L], ids_S[asked.rows_L], max(asked.wanted))
    return Sampled(ids_S, measured_LW, asked)


def prompt_logprobs(logits_PV: Tensor, token_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens: `token_ids[i]` under the raw logits of row i, i.e. of the position before
    it. k as in `SamplingParams.prompt_logprobs` (-1: the whole vocabulary). Needs several times the memory of the
    logits: the caller keeps P small."""
    assert len(logits_PV) == len(token_ids), f"{len(logits_PV)} rows of logits for {len(token_ids)} tokens"
    if not token_ids:
        return []
    k = num_wanted(k, logits_PV.shape[1])
    measured_PW = _measure(logits_PV, torch.tensor(token_ids, device=logits_PV.device), k)
    measured = zip(token_ids, measured_PW.tolist(), strict=True)
    return [_token_logprobs(token_id, numbers, k) for token_id, numbers in measured]


def largest(values_NV: Tensor) -> Tensor:
    """Of each row the place of its largest value, int64 [N], the lowest among equals."""
    if values_NV.is_cpu:  # numpy's is vectorised there: with many rows 20 times as fast
        return torch.from_numpy(values_NV.float().numpy().argmax(axis=-1))
    return values_NV.argmax(dim=-1)


def change_logits(logits_SV: Tensor, inputs: SamplingInputs) -> Tensor:
    """A float32 copy after allowed ids, bad words, `min_tokens`, logit bias and penalties, in this order."""
    logits_SV = logits_SV.to(torch.float32, copy=True)
    if (allowed := inputs.allowed) is not None:
        # The clamp keeps an allowed id above a forbidden one, whatever the model gave it.
        rows_AV = logits_SV[allowed.rows_A].clamp(min=-FLOAT32.max)
        logits_SV[allowed.rows_A] = rows_AV.masked_fill(allowed.forbidden_AV, -INF)
    if (blocked := inputs.blocked) is not None:
        before_M = logits_SV[blocked.rows_M, blocked.ids_M]
        logits_SV[blocked.rows_M, blocked.ids_M] = blocked.values_M
        empty_S = logits_SV.amax(dim=-1) == -INF
        after_M = torch.where(empty_S[blocked.rows_M], before_M, blocked.values_M)
        logits_SV[blocked.rows_M, blocked.ids_M] = after_M
    if (bias := inputs.bias) is not None:
        logits_SV[bias.rows_M, bias.ids_M] += bias.values_M
    if (penalties := inputs.penalties) is not None:
        logits_SV[penalties.rows_N] = penalise(logits_SV[penalties.rows_N], penalties)
    return logits_SV


def penalise(logits_NV: Tensor, penalties: Penalties) -> Tensor:
    """Repetition (Keskar et al. 2019, CTRL) over prompt and output; frequency and presence (OpenAI) over the
    output alone. What an extreme repetition penalty would overflow stays finite; -inf stays -inf."""
    repetition = penalties.repetition_N1
    scaled_NV = torch.where(logits_NV > 0, logits_NV / repetition, logits_NV * repetition)
    scaled_NV = scaled_NV.clamp(-FLOAT32.max, FLOAT32.max)
    logits_NV = torch.where(penalties.seen_NV & (logits_NV > -INF), scaled_NV, logits_NV)
    logits_NV = logits_NV - penalties.frequency_N1 * penalties.counts_NV
    return logits_NV - penalties.presence_N1 * (penalties.counts_NV > 0)


def draw(logits_NV: Tensor, draws: Draws, generator: torch.Generator | None) -> Tensor:
    """Ids [N] drawn from float32 logits: the argmax of score + Gumbel noise is a draw from softmax(score).

    Noise belongs to an id, not to a place, so that it is the same among all ids and among a few candidates.
    """
    if draws.num_candidates is None:
        ids_NK = torch.arange(logits_NV.shape[1], device=logits_NV.device).expand(logits_NV.shape)
        largest_N1 = logits_NV.amax(dim=-1, keepdim=True)
    else:
        logits_NV, ids_NK = most_likely(logits_NV, draws.num_candidates)
        largest_N1 = logits_NV[:, :1]
    scores_NK = truncate((logits_NV - largest_N1) / draws.temperature_N1, draws)
    noise_NK = gumbel_noise(_keys(draws, generator), ids_NK)
    return ids_NK.gather(1, largest(scores_NK + noise_NK).unsqueeze(1)).squeeze(1)


def truncate(scores_NK: Tensor, draws: Draws) -> Tensor:
    """Scores (largest = 0; in descending order if there is a top-k or top-p) with -inf for what may not be drawn.

    min-p, then top-k, then top-p (Holtzman et al. 2020) on the mass that they left. Among equals the lower id is
    kept; the first one always is.
    """
    drop_NK = torch.zeros_like(scores_NK, dtype=torch.bool)
    if draws.log_min_p_N1 is not None:
        drop_NK |= scores_NK < draws.log_min_p_N1
    if draws.top_k_N1 is not None:
        drop_NK |= torch.arange(scores_NK.shape[1], device=scores_NK.device) >= draws.top_k_N1
    if draws.top_p_N1 is not None:
        weights_NK = scores_NK.exp().masked_fill(drop_NK, 0).double()
        mass_NK = weights_NK.cumsum(dim=-1)
        drop_NK |= mass_NK - weights_NK >= draws.top_p_N1 * mass_NK[:, -1:]
    return scores_NK.masked_fill(drop_NK, -INF)


def most_likely(logits_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest float32 logits of each row in descending order, the lower id first among equals, and their ids.

    `torch.topk` on the logits leaves the order of equals open; a key that holds the value's bits above the id
    does not.
    """
    bits_NV = (logits_NV + 0.0).view(torch.int32)  # -0.0 + 0.0 = 0.0
    ordered_NV = bits_NV ^ ((bits_NV >> 31) & 0x7FFFFFFF)  # as integers in the order of the floats
    keys_NV = (~ordered_NV).long() * 2**32 + torch.arange(logits_NV.shape[1], device=logits_NV.device)
    ids_NK = _smallest(keys_NV, k) & 0xFFFFFFFF
    return logits_NV.gather(1, ids_NK), ids_NK


def _smallest(keys_NV: Tensor, k: int) -> Tensor:
    if k * 32 <= keys_NV.shape[1]:
        return keys_NV.topk(k, dim=-1, largest=False).values
    if keys_NV.device.type == "cpu":  # numpy's vectorised sort is many times faster than torch's there
        return torch.from_numpy(np.sort(keys_NV.numpy(), axis=-1)[:, :k])
    return torch.sort(keys_NV, dim=-1).values[:, :k]


def gumbel_noise(keys_N1: Tensor, ids_NK: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [N, K], a pure function of (key, id): output number id of the SplitMix64
    stream that starts at the key. The integers are the same on every device and for every batch."""
    x = (ids_NK + 1) * signed64(GAMMA) + keys_N1
    x = (x ^ _shift_right(x, 30)) * signed64(MIX_1)
    x = (x ^ _shift_right(x, 27)) * signed64(MIX_2)
    x = x ^ _shift_right(x, 31)
    # A float of 63 bits is fine near 0, where the winner of many ids is; neither 0 nor 1 may come out.
    uniform = _shift_right(x, 1).float().mul_(2.0**-63).clamp_(2.0**-64, 1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _keys(draws: Draws, generator: torch.Generator | None) -> Tensor:
    if draws.unseeded_N1 is None:
        assert draws.keys_N1 is not None, "a row has a seed or takes its key from the generator"
        return draws.keys_N1
    size, device = draws.unseeded_N1.shape, draws.unseeded_N1.device
    fresh_N1 = torch.randint(2**63 - 1, size, generator=generator, device=device)
    return fresh_N1 if draws.keys_N1 is None else torch.where(draws.unseeded_N1, fresh_N1, draws.keys_N1)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & (2 ** (64 - bits) - 1)  # torch's own keeps the sign


def _measure(logits_LV: Tensor, ids_L: Tensor, k: int) -> Tensor:
    """Of each row, as float64 (exact for ids and for float32): log-probability and rank of its id, the ids of the
    k most likely tokens, their log-probabilities: [L, 2 + 2k]."""
    logits_LV, ids_L1 = logits_LV.float(), ids_L.unsqueeze(1)
    total_L1 = logits_LV.logsumexp(dim=-1, keepdim=True)
    own_L1 = logits_LV.gather(1, ids_L1)
    lower_V = torch.arange(logits_LV.shape[1], device=logits_LV.device) < ids_L1
    rank_L1 = 1 + ((logits_LV > own_L1) | ((logits_LV == own_L1) & lower_V)).sum(dim=-1, keepdim=True)
    top_LK, top_ids_LK = most_likely(logits_LV, k)
    return torch.cat([x.double() for x in (own_L1 - total_L1, rank_L1, top_ids_LK, top_LK - total_L1)], dim=1)


def _token_logprobs(token_id: int, measured: Sequence[float], k: int) -> TokenLogprobs:
    """`measured`: one row of `_measure` for K >= k, of which this row wants k."""
    most = (len(measured) - 2) // 2
    found = TokenLogprobs([token_id], [measured[0]], [int(measured[1])])
    for place in range(k):
        top_id = int(measured[2 + place])
        if top_id != token_id:
            found.token_ids.append(top_id)
            found.logprobs.append(measured[2 + most + place])
            found.ranks.append(place + 1)
    return found
