"""A step's input, made from its plan: which tokens, where, with which blocks, and how their rows sample.

Owns a record of each request the runner was told of; decides nothing and knows no phase: a row has computed some of its
known tokens, computes a few more, and samples exactly when it has caught up. v0: records of each request, inputs made
anew from them in every step (`RebuiltBatch`). v1: arrays that stay, patched by the plan's differences
(persistent_batch.py). Imports torch and numpy inside functions. Laws: tests/test_runner.py, tests/test_input_batch.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nanoserve.attention import AttentionBatch
from nanoserve.request import NewRequest, SamplingParams, StepPlan

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from nanoserve.config import EngineConfig
    from nanoserve.sampler import SamplingInputs

IN_FLIGHT = -1  # stands for a token that a launched step samples


@dataclass(frozen=True, slots=True, eq=False)
class HostInputs:
    """A step's input on the host, as int64 arrays; the rows' tokens lie end to end, in batch order.

    Token `in_flight_T[i]` is not known yet: it is what the step before sampled for its row `in_flight_S[i]`.
    """

    request_ids: Sequence[str]
    input_ids_T: np.ndarray
    positions_T: np.ndarray
    slot_mapping_T: np.ndarray
    query_start_loc_R1: np.ndarray
    seq_lens_R: np.ndarray
    block_table_RB: np.ndarray
    sampling_ids: Sequence[str]  # those that catch up with their known tokens
    sampling_index_S: np.ndarray  # their last tokens, among the T
    in_flight_T: np.ndarray
    in_flight_S: np.ndarray
    sampling: SamplingInputs | None  # None: nobody samples
    receipt: Any  # for `fill`

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_T)

    @property
    def is_uniform_decode(self) -> bool:
        """Every row has one token: the one kind of batch whose shape says everything."""
        return len(self.input_ids_T) == len(self.request_ids)

    @property
    def all_sample(self) -> bool:
        """Every token is one that samples."""
        return len(self.sampling_index_S) == len(self.input_ids_T)

    @property
    def sampling_rows_S(self) -> np.ndarray:
        """The rows whose last tokens `sampling_index_S` names."""
        return self.query_start_loc_R1[1:].searchsorted(self.sampling_index_S + 1)

    def to(self, device: torch.device) -> StepInputs:
        """On the device, in one transfer."""
        sampling_rows_S = self.sampling_rows_S
        arrays = (
            self.input_ids_T.copy(),  # `take_in_flight` writes there
            self.positions_T,
            self.slot_mapping_T,
            self.query_start_loc_R1,
            self.seq_lens_R,
            sampling_rows_S,
            self.sampling_index_S,
            self.block_table_RB.ravel(),
        )
        ids_T, positions_T, slots_T, starts_R1, seq_lens_R, rows_S, index_S, table = _send(arrays, device)
        attention = AttentionBatch(
            query_start_loc_R1=starts_R1,
            seq_lens_R=seq_lens_R,
            block_table_RB=table.view(self.block_table_RB.shape),
            slot_mapping_T=slots_T,
            query_starts=self.query_start_loc_R1.tolist(),
            seq_lens=self.seq_lens_R.tolist(),
        )
        newest = None if self.all_sample else attention.newest(rows_S, sampling_rows_S.tolist())
        return StepInputs(ids_T, positions_T, attention, newest, index_S)

    def take_in_flight(self, ids_T: Tensor, sampled_ids_S: Tensor | None) -> None:
        """Put the ids that the step before sampled in their places, without a look from the host."""
        if not len(self.in_flight_T):
            return
        assert sampled_ids_S is not None, "tokens are in flight, but no step came before"
        if ids_T.device.type == "cpu":  # as arrays: a fraction of the calls' costs
            ids_T.numpy()[self.in_flight_T] = sampled_ids_S.numpy()[self.in_flight_S]
        else:
            places_T, rows_S = _send((self.in_flight_T, self.in_flight_S), ids_T.device)
            ids_T.index_copy_(0, places_T, sampled_ids_S.index_select(0, rows_S))

    def of_sampling(self, x_T: Tensor) -> Tensor:
        """What belongs to the tokens that sample, of something that all have, perhaps with more behind it."""
        if self.all_sample:
            return x_T[: self.num_tokens]
        (index_S,) = _send((self.sampling_index_S,), x_T.device)
        return x_T.index_select(0, index_S)


def _send(arrays: Sequence[np.ndarray], device: torch.device) -> Sequence[Tensor]:
    """In one transfer, or none where both are one memory."""
    import numpy as np
    import torch

    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    flat = torch.from_numpy(np.concatenate(arrays)).to(device, non_blocking=True)
    return flat.split([array.size for array in arrays])


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """A step's input on the device. Token i of the T is at `positions_T[i]` of its request."""

    input_ids_T: Tensor
    positions_T: Tensor
    attention: AttentionBatch
    newest: AttentionBatch | None  # of the tokens that sample; None: of all
    sampling_index_S: Tensor


def padding_inputs(num_tokens: int) -> HostInputs:
    """A step that computes nothing of anybody's: one row without keys, tokens that are not stored."""
    import numpy as np

    none = np.zeros(0, np.int64)
    return HostInputs(
        request_ids=[""],
        input_ids_T=np.zeros(num_tokens, np.int64),
        positions_T=np.zeros(num_tokens, np.int64),
        slot_mapping_T=np.full(num_tokens, -1),
        query_start_loc_R1=np.array([0, num_tokens]),
        seq_lens_R=np.zeros(1, np.int64),
        block_table_RB=np.zeros((1, 1), np.int64),
        sampling_ids=[],
        sampling_index_S=none,
        in_flight_T=none,
        in_flight_S=none,
        sampling=None,
        receipt=[],
    )


class InputBatch(Protocol):
    """What a runner keeps of its requests between steps, in one of two forms.

    A row exists from the plan that has it in `new` to the plan that names it in `finished` or `preempted`. A plan that
    names a request without a row, or tokens without blocks, is a broken invariant: AssertionError.
    """

    def __init__(self, config: EngineConfig, *, vocab_size: int, device: torch.device) -> None:
        """Empty, for a resolved config."""
        ...

    @property
    def request_ids(self) -> list[str]:
        """Those that have a row."""
        ...

    @property
    def reads_output(self) -> bool:
        """Whether a row's sampling needs the ids of its output on the host: its last token may not be in flight."""
        ...

    def apply(self, plan: StepPlan) -> None:
        """Drop, add and change rows: from here on they are the truth, and the plan only says how many tokens."""
        ...

    def build(self, plan: StepPlan) -> HostInputs | None:
        """The input of the plan's tokens, at least one for each row it names, and count them as computed. A row that
        catches up has one more token from then on, in flight until `fill`. None: a plan without tokens."""
        ...

    def fill(self, inputs: HostInputs, token_ids: Sequence[int]) -> None:
        """The ids that a step sampled, one for each of its `sampling_ids`. Rows that are gone are skipped."""
        ...


@dataclass(slots=True, eq=False)
class RequestRow:
    """The record of one request. Only the batch writes it."""

    id: str
    params: SamplingParams
    eos_token_id: int | None
    num_prompt_tokens: int
    token_ids: list[int]  # prompt, then output, a last one perhaps IN_FLIGHT
    block_ids: list[int]
    num_computed_tokens: int
    sampled_row: int = -1  # where its newest token stands among those that its step sampled

    @classmethod
    def from_new(cls, new: NewRequest) -> RequestRow:
        return cls(
            id=new.id,
            params=new.params,
            eos_token_id=new.eos_token_id,
            num_prompt_tokens=new.num_prompt_tokens,
            token_ids=list(new.token_ids),
            block_ids=list(new.block_ids),
            num_computed_tokens=new.num_computed_tokens,
        )


class RebuiltBatch:
    """v0: inputs come from nothing but the records, row by row, in every step."""

    def __init__(self, config: EngineConfig, *, vocab_size: int, device: torch.device) -> None:
        self.rows: dict[str, RequestRow] = {}
        self._block_size = config.block_size
        self._vocab_size = vocab_size
        self._device = device

    @property
    def request_ids(self) -> list[str]:
        return list(self.rows)

    @property
    def reads_output(self) -> bool:
        return any(row.params.reads_output for row in self.rows.values())

    def apply(self, plan: StepPlan) -> None:
        for request_id in plan.preempted:
            self._row(plan, request_id)
            del self.rows[request_id]
        for request_id in plan.finished:  # perhaps before it ever ran
            self.rows.pop(request_id, None)
        for new in plan.new:
            assert new.id not in self.rows, f"step {plan.step}: {new.id} is new, but was never finished or preempted"
            self.rows[new.id] = RequestRow.from_new(new)
        for request_id, replaced in plan.replaced_blocks.items():
            for index, block_id in replaced:
                self._row(plan, request_id).block_ids[index] = block_id
        for request_id, block_ids in plan.new_blocks.items():
            self._row(plan, request_id).block_ids += block_ids

    def _row(self, plan: StepPlan, request_id: str) -> RequestRow:
        assert request_id in self.rows, f"step {plan.step} names {request_id}; the runner holds {sorted(self.rows)}"
        return self.rows[request_id]

    def build(self, plan: StepPlan) -> HostInputs | None:
        import numpy as np

        scheduled = [(self._row(plan, request_id), n) for request_id, n in plan.num_scheduled_tokens.items()]
        if not scheduled:
            return None
        block_size = self._block_size
        ids: list[int] = []
        positions, slots = [], []
        starts, seq_lens, sampling_rows, sampling_index, in_flight = [0], [], [], [], []
        block_table_RB = np.zeros((len(scheduled), max(len(row.block_ids) for row, _ in scheduled)), np.int64)
        for table_B, (row, n) in zip(block_table_RB, scheduled, strict=True):
            first, end = row.num_computed_tokens, row.num_computed_tokens + n
            known, room = len(row.token_ids), len(row.block_ids) * block_size
            assert first < end <= min(known, room), (
                f"{row.id}: tokens {first}..{end} are scheduled, {known} are known, its blocks hold {room}"
            )
            table_B[: len(row.block_ids)] = row.block_ids
            position_T = np.arange(first, end)
            ids += row.token_ids[first:end]
            positions.append(position_T)
            slots.append(table_B[position_T // block_size] * block_size + position_T % block_size)
            starts.append(len(ids))
            seq_lens.append(end)
            if end == known:
                sampling_rows.append(row)
                sampling_index.append(len(ids) - 1)
                if ids[-1] == IN_FLIGHT:
                    ids[-1] = 0
                    in_flight.append((len(ids) - 1, row.sampled_row))
            row.num_computed_tokens = end
        sampling = self._sampling_inputs(sampling_rows)
        receipt = [(row, len(row.token_ids)) for row in sampling_rows]
        for index, row in enumerate(sampling_rows):
            row.token_ids.append(IN_FLIGHT)
            row.sampled_row = index
        in_flight_T, in_flight_S = _int64(in_flight).reshape(-1, 2).T
        return HostInputs(
            request_ids=[row.id for row, _ in scheduled],
            input_ids_T=_int64(ids),
            positions_T=np.concatenate(positions),
            slot_mapping_T=np.concatenate(slots),
            query_start_loc_R1=_int64(starts),
            seq_lens_R=_int64(seq_lens),
            block_table_RB=block_table_RB,
            sampling_ids=[row.id for row in sampling_rows],
            sampling_index_S=_int64(sampling_index),
            in_flight_T=in_flight_T,
            in_flight_S=in_flight_S,
            sampling=sampling,
            receipt=receipt,
        )

    def _sampling_inputs(self, rows: list[RequestRow]) -> SamplingInputs | None:
        from nanoserve.sampler import SamplingInputs, SamplingRow

        if not rows:
            return None
        sampling_rows = [
            SamplingRow(
                row.params,
                row.token_ids[: row.num_prompt_tokens],
                row.token_ids[row.num_prompt_tokens :],
                row.eos_token_id,
            )
            for row in rows
        ]
        return SamplingInputs.build(sampling_rows, self._vocab_size, self._device)

    def fill(self, inputs: HostInputs, token_ids: Sequence[int]) -> None:
        for (row, place), token_id in zip(inputs.receipt, token_ids, strict=True):
            assert row.token_ids[place] == IN_FLIGHT, f"{row.id}: token {place} was known already"
            row.token_ids[place] = token_id


def _int64(values: Iterable[Any]) -> np.ndarray:
    import numpy as np

    return np.asarray(values, np.int64)
