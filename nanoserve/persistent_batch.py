"""The batch of v1: arrays with a row for each request, which stay; a plan only patches what it changes.

Counterpart of `RebuiltBatch` (input_batch.py): the same contract, but no work in Python for each request in a step.
A plan's ids become row numbers in one go, and everything after that is a vector; a step that is the one before again,
one token further on, shares what that one was given. Mirrors `vllm/v1/worker/gpu_input_batch.py: InputBatch`; unlike
there, rows never move: a free one is a hole that nothing gathers from. C: rows of the arrays, in use or free; L:
positions of a sequence. Imports numpy inside functions. Laws: tests/test_input_batch.py, tests/test_runner.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import TYPE_CHECKING

from nanoserve.input_batch import IN_FLIGHT, HostInputs
from nanoserve.request import NewRequest, StepPlan

if TYPE_CHECKING:
    import numpy as np
    import torch

    from nanoserve.config import EngineConfig


@dataclass(slots=True, eq=False)
class Receipt:
    """Whose tokens a step samples, and where they will stand."""

    rows_S: np.ndarray
    places_S: np.ndarray
    num_left: int  # rows that had been given back by then
    ids_S: np.ndarray | None = None  # once they are filled in


@dataclass(slots=True, eq=False)
class Decode:
    """The step before, if every row had one token and sampled, and no row was changed since."""

    num_scheduled_tokens: dict[str, int]
    inputs: HostInputs
    known_R: np.ndarray  # from then on, the sampled token included
    num_more: int  # so many steps further every row is still in the same block

    def is_followed_by(self, scheduled: dict[str, int]) -> bool:
        same = self.num_more > 0 and scheduled == self.num_scheduled_tokens
        return same and list(scheduled) == self.inputs.request_ids  # in the same order


class PersistentBatch:
    """v1: inputs are gathered from arrays that every plan leaves as the next one needs them."""

    def __init__(self, config: EngineConfig, *, vocab_size: int, device: torch.device) -> None:
        import numpy as np

        from nanoserve.sampling_columns import SamplingColumns

        capacity, width = config.max_num_seqs, config.model_len + 1  # the last token that is sampled is never computed
        self._block_size = config.block_size
        self._rows: dict[str, int] = {}
        self._free: list[int] = []  # rows that were in use
        try:  # the system commits memory of zeros only where it is written
            self._token_ids_CL = np.zeros((capacity, width), np.int32)
            self._block_table_CB = np.zeros((capacity, -(-width // config.block_size)), np.int64)
        except (MemoryError, ValueError):
            raise ValueError(
                f"max_num_seqs={capacity} rows of max_model_len={width - 1} tokens are more than memory can hold; "
                "lower one of them."
            ) from None
        self._num_blocks_C = np.zeros(capacity, np.int64)
        self._num_known_C = np.zeros(capacity, np.int64)
        self._num_computed_C = np.zeros(capacity, np.int64)
        self._sampled_row_C = np.zeros(capacity, np.int64)  # where the newest token stands among those of its step
        self._num_left = 0  # rows that were given back, all in all
        self._left_C = np.zeros(capacity, np.int64)  # what that number was when this row was given back
        self._zeros_C = np.zeros(capacity, np.int64)
        self._last: Decode | None = None
        self._sampling = SamplingColumns(capacity, vocab_size, device)

    @property
    def request_ids(self) -> list[str]:
        return list(self._rows)

    @property
    def reads_output(self) -> bool:
        return self._sampling.reads_output

    def apply(self, plan: StepPlan) -> None:
        if not (plan.preempted or plan.finished or plan.new or plan.replaced_blocks or plan.new_blocks):
            return
        self._last = None
        for request_id in plan.preempted:
            self._rows_of(plan, [request_id])
            self._drop(request_id)
        for request_id in plan.finished:  # perhaps before it ever ran
            if request_id in self._rows:
                self._drop(request_id)
        for new in plan.new:
            assert new.id not in self._rows, f"step {plan.step}: {new.id} is new, but was never finished or preempted"
            self._add(plan, new)
        if plan.replaced_blocks:
            self._replace_blocks(plan)
        if plan.new_blocks:
            self._append_blocks(plan)

    def _add(self, plan: StepPlan, new: NewRequest) -> None:
        row = self._free.pop() if self._free else len(self._rows)
        capacity = len(self._num_known_C)
        assert row < capacity, f"step {plan.step}: {new.id} is one request more than max_num_seqs={capacity}"
        self._rows[new.id] = row
        self._token_ids_CL[row, : len(new.token_ids)] = new.token_ids
        self._block_table_CB[row, : len(new.block_ids)] = new.block_ids
        self._num_blocks_C[row] = len(new.block_ids)
        self._num_known_C[row] = len(new.token_ids)
        self._num_computed_C[row] = new.num_computed_tokens
        self._sampling.put(row, new, self._token_ids_CL[row, new.num_prompt_tokens :])

    def _drop(self, request_id: str) -> None:
        row = self._rows.pop(request_id)
        self._block_table_CB[row, : self._num_blocks_C[row]] = 0  # what stands behind a short table is read, too
        self._num_left += 1
        self._left_C[row] = self._num_left
        self._sampling.drop(row)
        self._free.append(row)

    def _replace_blocks(self, plan: StepPlan) -> None:
        for request_id, replaced in plan.replaced_blocks.items():
            (row,) = self._rows_of(plan, [request_id])
            for index, block_id in replaced:
                self._block_table_CB[row, index] = block_id

    def _append_blocks(self, plan: StepPlan) -> None:
        import numpy as np

        rows_R = self._rows_of(plan, plan.new_blocks)
        n_R = np.fromiter(map(len, plan.new_blocks.values()), np.int64, len(rows_R))
        places = ranges(self._num_blocks_C[rows_R], n_R)
        block_ids = np.fromiter(chain.from_iterable(plan.new_blocks.values()), np.int64, len(places))
        self._block_table_CB[rows_R.repeat(n_R), places] = block_ids
        self._num_blocks_C[rows_R] += n_R

    def _rows_of(self, plan: StepPlan, request_ids: Collection[str]) -> np.ndarray:
        import numpy as np

        try:
            return np.fromiter(map(self._rows.__getitem__, request_ids), np.int64, len(request_ids))
        except KeyError as unknown:
            held = sorted(self._rows)
            raise AssertionError(f"step {plan.step} names {unknown.args[0]}; the runner holds {held}") from None

    def build(self, plan: StepPlan) -> HostInputs | None:
        scheduled, last = plan.num_scheduled_tokens, self._last
        if not scheduled:
            return None
        if last and last.is_followed_by(scheduled):
            return self._go_on(last)
        return self._gather(plan)

    def _go_on(self, last: Decode) -> HostInputs:
        """The same step, one token further on: `_gather` would give the same. Nobody writes to what was given out."""
        before, receipt = last.inputs, last.inputs.receipt
        end_R, known_R = last.known_R, last.known_R + 1
        rows_R, index_R = receipt.rows_S, before.sampling_index_S
        if receipt.ids_S is None:
            ids_R, in_flight_R = self._zeros_C[: len(rows_R)], index_R
        else:
            ids_R, in_flight_R = receipt.ids_S, self._zeros_C[:0]
        self._num_computed_C[rows_R] = end_R
        self._token_ids_CL[rows_R, end_R] = IN_FLIGHT
        self._num_known_C[rows_R] = known_R
        last.inputs = HostInputs(
            request_ids=before.request_ids,
            input_ids_T=ids_R,
            positions_T=before.seq_lens_R,
            slot_mapping_T=before.slot_mapping_T + 1,
            query_start_loc_R1=before.query_start_loc_R1,
            seq_lens_R=end_R,
            block_table_RB=before.block_table_RB,
            sampling_ids=before.sampling_ids,
            sampling_index_S=index_R,
            in_flight_T=in_flight_R,
            in_flight_S=in_flight_R,
            sampling=self._sampling.build(rows_R, end_R),
            receipt=Receipt(rows_R, end_R, self._num_left),
        )
        last.known_R = known_R
        last.num_more -= 1
        return last.inputs

    def _gather(self, plan: StepPlan) -> HostInputs:
        import numpy as np

        scheduled, block_size = plan.num_scheduled_tokens, self._block_size
        rows_R = self._rows_of(plan, scheduled)
        num_rows = len(rows_R)
        n_R = np.fromiter(scheduled.values(), np.int64, num_rows)
        first_R, known_R = self._num_computed_C[rows_R], self._num_known_C[rows_R]
        end_R, num_blocks_R = first_R + n_R, self._num_blocks_C[rows_R]
        self._check(plan, first_R, end_R, known_R, num_blocks_R * block_size)
        starts_R1 = np.zeros(num_rows + 1, np.int64)
        n_R.cumsum(out=starts_R1[1:])
        is_uniform = starts_R1[-1] == num_rows
        rows_T, positions_T = (rows_R, first_R) if is_uniform else (rows_R.repeat(n_R), ranges(first_R, n_R))
        ids_T = self._token_ids_CL[rows_T, positions_T].astype(np.int64)
        blocks_T, offsets_T = np.divmod(positions_T, block_size)
        samples_R = end_R == known_R
        all_sample = np.count_nonzero(samples_R) == num_rows
        rows_S, index_S, known_S, sampling_ids = rows_R, starts_R1[1:] - 1, known_R, list(scheduled)
        if not all_sample:
            rows_S, index_S, known_S = rows_S[samples_R], index_S[samples_R], known_S[samples_R]
            sampling_ids = list(compress(scheduled, samples_R.tolist()))
        (in_flight,) = (ids_T[index_S] == IN_FLIGHT).nonzero()
        in_flight_T, in_flight_S = index_S[in_flight], self._sampled_row_C[rows_S[in_flight]]
        ids_T[in_flight_T] = 0
        next_S = known_S + 1
        self._num_computed_C[rows_R] = end_R
        self._token_ids_CL[rows_S, known_S] = IN_FLIGHT
        self._num_known_C[rows_S] = next_S
        self._sampled_row_C[rows_S] = np.arange(len(rows_S))
        inputs = HostInputs(
            request_ids=list(scheduled),
            input_ids_T=ids_T,
            positions_T=positions_T,
            slot_mapping_T=self._block_table_CB[rows_T, blocks_T] * block_size + offsets_T,
            query_start_loc_R1=starts_R1,
            seq_lens_R=end_R,
            block_table_RB=self._block_table_CB[:, : num_blocks_R.max()][rows_R],
            sampling_ids=sampling_ids,
            sampling_index_S=index_S,
            in_flight_T=in_flight_T,
            in_flight_S=in_flight_S,
            sampling=self._sampling.build(rows_S, known_S) if len(rows_S) else None,
            receipt=Receipt(rows_S, known_S, self._num_left),
        )
        self._last = None
        if is_uniform and all_sample:
            self._last = Decode(scheduled, inputs, next_S, block_size - 1 - int(offsets_T.max()))
        return inputs

    @staticmethod
    def _check(plan: StepPlan, first_R: np.ndarray, end_R: np.ndarray, known_R: np.ndarray, room_R: np.ndarray) -> None:
        (broken,) = ((end_R <= first_R) | (end_R > known_R) | (end_R > room_R)).nonzero()
        if len(broken):
            row = broken[0]
            raise AssertionError(
                f"{list(plan.num_scheduled_tokens)[row]}: tokens {first_R[row]}..{end_R[row]} are scheduled, "
                f"{known_R[row]} are known, its blocks hold {room_R[row]}"
            )

    def fill(self, inputs: HostInputs, token_ids: Sequence[int]) -> None:
        import numpy as np

        receipt: Receipt = inputs.receipt
        rows_S, places_S = receipt.rows_S, receipt.places_S
        assert receipt.ids_S is None, f"{inputs.sampling_ids[0]}: token {places_S[0]} was known already"
        receipt.ids_S = ids_S = np.array(token_ids, np.int64)
        if receipt.num_left != self._num_left:
            stays_S = self._left_C[rows_S] <= receipt.num_left
            rows_S, places_S, ids_S = rows_S[stays_S], places_S[stays_S], ids_S[stays_S]
        self._token_ids_CL[rows_S, places_S] = ids_S
        self._sampling.append(rows_S, ids_S)


def ranges(first_R: np.ndarray, n_R: np.ndarray) -> np.ndarray:
    """first, first + 1, ... of each row, n of them, end to end."""
    import numpy as np

    ends_R = n_R.cumsum()
    return np.arange(ends_R[-1]) + (first_R - ends_R + n_R).repeat(n_R)
