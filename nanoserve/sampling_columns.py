"""What each row of a persistent batch asks of the sampler, kept in columns from its arrival to its end.

Owns the parameters of all rows and the token counts of those with a penalty; a step's `SamplingInputs` are gathered
from them by the numbers of the rows that sample. What few rows use (masks, bias, log-probabilities) is made row by
row, for those rows only. Knows no plan and no block. Counterpart: `SamplingInputs.build`, which starts from nothing;
that both give the same bits is a law of tests/test_input_batch.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from nanoserve.request import NewRequest
from nanoserve.sampling_inputs import (
    GAMMA,
    INF,
    Draws,
    Penalties,
    SamplingInputs,
    SamplingRow,
    clamped,
    count_ids,
    has_extras,
    mix64,
)

GREEDY, PLAIN, TRUNCATED = range(3)
NOT_COUNTED = -1
COLUMNS = np.dtype(
    [
        ("draws", np.int8),  # GREEDY, PLAIN or TRUNCATED
        ("has_seed", np.bool_),
        ("has_extras", np.bool_),
        ("temperature", np.float32),
        ("log_min_p", np.float32),  # -inf: off
        ("top_k", np.int64),  # the vocabulary: off
        ("top_p", np.float64),  # inf: off
        ("mixed_seed", np.uint64),
        ("counts", np.int64),  # where its `TokenCounts` are
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("num_prompt", np.int64),
    ],
    align=True,
)


class SamplingColumns:
    """Capacity for C rows; the batch says which of them stands for whom."""

    def __init__(self, capacity: int, vocab_size: int, device: torch.device) -> None:
        self._columns_C = np.zeros(capacity, COLUMNS)
        self._counts = TokenCounts(vocab_size, device)
        self._extras: dict[int, SamplingRow] = {}
        self._reading: set[int] = set()
        self._asking: set[int] = set()  # rows that want more than the likeliest token
        self._vocab_size = vocab_size
        self._device = device

    @property
    def reads_output(self) -> bool:
        return bool(self._reading)

    @property
    def num_prompt_C(self) -> np.ndarray:
        """How many tokens of a row are its prompt."""
        return self._columns_C["num_prompt"]

    def put(self, row: int, new: NewRequest, output_L: np.ndarray) -> None:
        """`output_L`: where the row's output will stand, its beginning as in `new`. It is only read."""
        params, vocab_size = new.params, self._vocab_size
        penalised = params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
        prompt, output = new.token_ids[: new.num_prompt_tokens], new.token_ids[new.num_prompt_tokens :]
        cut = 0 < params.top_k < vocab_size or params.top_p < 1
        self._columns_C[row] = (
            GREEDY if params.is_greedy else TRUNCATED if cut else PLAIN,
            params.seed is not None,
            has_extras(params),
            params.temperature,
            math.log(params.min_p) if params.min_p else -INF,
            min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size,
            params.top_p if params.top_p < 1 else INF,
            0 if params.seed is None else mix64(params.seed % 2**64),
            self._counts.add(prompt, output) if penalised else NOT_COUNTED,
            clamped(params.repetition_penalty),
            params.frequency_penalty,
            params.presence_penalty,
            new.num_prompt_tokens,
        )
        if penalised or has_extras(params) or not params.is_greedy:
            self._asking.add(row)
        if has_extras(params):
            self._extras[row] = SamplingRow(params, (), output_L, new.eos_token_id)
        if params.reads_output:
            self._reading.add(row)

    def drop(self, row: int) -> None:
        place = self._columns_C["counts"][row]
        if place != NOT_COUNTED:
            self._counts.remove(int(place))
        self._extras.pop(row, None)
        self._reading.discard(row)
        self._asking.discard(row)

    def append(self, rows_S: np.ndarray, ids_S: np.ndarray) -> None:
        """A new token of each of these rows."""
        if not self._reading:
            return
        places_S = self._columns_C["counts"][rows_S]
        counted_S = places_S != NOT_COUNTED
        self._counts.append(places_S[counted_S], ids_S[counted_S])

    def build(self, rows_S: np.ndarray, num_known_S: np.ndarray) -> SamplingInputs:
        """What these rows ask for, each with that many tokens before the one that is sampled now, the prompt's too."""
        inputs = SamplingInputs(len(rows_S), self._vocab_size)
        if not self._asking:
            return inputs
        columns_S = self._columns_C[rows_S]
        num_outputs_S = num_known_S - columns_S["num_prompt"]
        if columns_S["draws"].any():  # else everyone is greedy
            inputs.plain = self._draws(columns_S, num_outputs_S, PLAIN)
            inputs.truncated = self._draws(columns_S, num_outputs_S, TRUNCATED)
        if inputs.truncated is not None:
            self._add_truncation(inputs.truncated, columns_S)
        if self._reading:
            inputs.penalties = self._penalties(columns_S)
        if self._extras:
            inputs.add_extras(self._extras_of(columns_S, rows_S, num_outputs_S), self._device)
        return inputs

    def _draws(self, columns_S: np.ndarray, num_outputs_S: np.ndarray, kind: int) -> Draws | None:
        picked_N = np.flatnonzero(columns_S["draws"] == kind)
        if not len(picked_N):
            return None
        columns_N = columns_S[picked_N]
        draws = Draws(self._tensor(picked_N), self._column(columns_N["temperature"]), None, None, None)
        log_min_p_N, has_seed_N = columns_N["log_min_p"], columns_N["has_seed"]
        if log_min_p_N.max() > -INF:
            draws.log_min_p_N1 = self._column(log_min_p_N)
        if has_seed_N.any():
            keys_N = draw_keys(columns_N["mixed_seed"], num_outputs_S[picked_N])
            draws.keys_N1 = self._column(np.where(has_seed_N, keys_N, 0))
        if not has_seed_N.all():
            draws.unseeded_N1 = self._column(~has_seed_N)
        return draws

    def _add_truncation(self, draws: Draws, columns_S: np.ndarray) -> None:
        columns_N = columns_S[columns_S["draws"] == TRUNCATED]
        top_k_N, top_p_N = columns_N["top_k"], columns_N["top_p"]
        draws.num_candidates = int(top_k_N.max())
        if top_k_N.min() < draws.num_candidates:
            draws.top_k_N1 = self._column(top_k_N)
        if top_p_N.min() < INF:
            draws.top_p_N1 = self._column(top_p_N)

    def _penalties(self, columns_S: np.ndarray) -> Penalties | None:
        picked_N = np.flatnonzero(columns_S["counts"] != NOT_COUNTED)
        if not len(picked_N):
            return None
        columns_N = columns_S[picked_N]
        seen_NV, counts_NV = self._counts.take(columns_N["counts"])
        return Penalties(
            rows_N=self._tensor(picked_N),
            repetition_N1=self._column(columns_N["repetition"]),
            frequency_N1=self._column(columns_N["frequency"]),
            presence_N1=self._column(columns_N["presence"]),
            seen_NV=seen_NV,
            counts_NV=counts_NV,
        )

    def _extras_of(
        self, columns_S: np.ndarray, rows_S: np.ndarray, num_outputs_S: np.ndarray
    ) -> Iterator[tuple[int, SamplingRow]]:
        for index in np.flatnonzero(columns_S["has_extras"]).tolist():
            kept = self._extras[int(rows_S[index])]
            output = kept.output_token_ids[: num_outputs_S[index]]
            yield index, SamplingRow(kept.params, (), output, kept.eos_token_id)

    def _column(self, values_N: np.ndarray) -> Tensor:
        return self._tensor(values_N).unsqueeze(1)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return to_device(values, self._device)


class TokenCounts:
    """Of rows with a penalty: which ids stand in prompt or output, and how often in the output. Counted once, then
    patched token by token; the P places double when they run out."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._seen_PV = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._counts_PV = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._free: list[int] = []

    def add(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        """The place that they are counted in."""
        if not self._free:
            self._grow()
        place = self._free.pop()
        counts_2V = count_ids([prompt, output], self._counts_PV.shape[1], self._counts_PV.device)
        self._seen_PV[place] = (counts_2V > 0).any(dim=0)
        self._counts_PV[place] = counts_2V[1]
        return place

    def _grow(self) -> None:
        old = len(self._counts_PV)
        added = max(old, 1)
        self._seen_PV = torch.cat([self._seen_PV, self._seen_PV.new_zeros((added, self._seen_PV.shape[1]))])
        self._counts_PV = torch.cat([self._counts_PV, self._counts_PV.new_zeros((added, self._counts_PV.shape[1]))])
        self._free += range(old, old + added)

    def remove(self, place: int) -> None:
        self._free.append(place)

    def append(self, places_N: np.ndarray, ids_N: np.ndarray) -> None:
        """One more token of output for each of these places, which all differ."""
        where = (to_device(places_N, self._counts_PV.device), to_device(ids_N, self._counts_PV.device))
        self._seen_PV[where] = True
        self._counts_PV[where] += 1

    def take(self, places_N: np.ndarray) -> tuple[Tensor, Tensor]:
        """(seen, counts), each [N, V]: copies, which a step that still runs may read while these change."""
        places = to_device(places_N, self._counts_PV.device)
        return self._seen_PV[places], self._counts_PV[places]


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Queued behind the step that runs, without waiting for it; may share memory with `values` on a CPU."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)


def draw_keys(mixed_seeds_N: np.ndarray, indices_N: np.ndarray) -> np.ndarray:
    """`draw_key` of many rows at once, int64 [N]; arithmetic of uint64 arrays wraps, as the masks of integers do."""
    return mix64(mixed_seeds_N + indices_N.astype(np.uint64) * np.uint64(GAMMA)).view(np.int64)
