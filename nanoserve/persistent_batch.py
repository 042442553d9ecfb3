"""The batch of v1: arrays with a row for each request, which stay; a plan only patches what it changes.

Counterpart of `RebuiltBatch` (input_batch.py): the same contract, but no work in Python for each request in a step.
A plan's ids become row numbers in one go, and everything after that is a vector. Mirrors `vllm/v1/worker/
gpu_input_batch.py: InputBatch`; unlike there, rows never move: a free one is a hole that nothing gathers from.
C: rows of the arrays, in use or free; L: positions of a sequence. Imports numpy inside functions.
Laws: tests/test_input_batch.py, tests/test_runner.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING

from nanoserve.input_batch import IN_FLIGHT, HostInputs
from nanoserve.request import NewRequest, StepPlan

if TYPE_CHECKING:
    import numpy as np
    import torch

    from nanoserve.config import EngineConfig


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
        self._num_prompt_C = np.zeros(capacity, np.int64)
        self._num_known_C = np.zeros(capacity, np.int64)
        self._num_computed_C = np.zeros(capacity, np.int64)
        self._sampled_row_C = np.zeros(capacity, np.int64)  # where the newest token stands among those of its step
        self._tenancy_C = np.zeros(capacity, np.int64)  # how many requests had this row and are gone
        self._sampling = SamplingColumns(capacity, vocab_size, device)

    @property
    def request_ids(self) -> list[str]:
        return list(self._rows)

    @property
    def reads_output(self) -> bool:
        return self._sampling.reads_output

    def apply(self, plan: StepPlan) -> None:
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
        capacity = len(self._tenancy_C)
        assert row < capacity, f"step {plan.step}: {new.id} is one request more than max_num_seqs={capacity}"
        self._rows[new.id] = row
        self._token_ids_CL[row, : len(new.token_ids)] = new.token_ids
        self._block_table_CB[row, : len(new.block_ids)] = new.block_ids
        self._num_blocks_C[row] = len(new.block_ids)
        self._num_prompt_C[row] = new.num_prompt_tokens
        self._num_known_C[row] = len(new.token_ids)
        self._num_computed_C[row] = new.num_computed_tokens
        self._sampling.put(row, new, self._token_ids_CL[row, new.num_prompt_tokens :])

    def _drop(self, request_id: str) -> None:
        row = self._rows.pop(request_id)
        self._block_table_CB[row, : self._num_blocks_C[row]] = 0  # what stands behind a short table is read, too
        self._tenancy_C[row] += 1
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
        import numpy as np

        scheduled, block_size = plan.num_scheduled_tokens, self._block_size
        if not scheduled:
            return None
        rows_R = self._rows_of(plan, scheduled)
        n_R = np.fromiter(scheduled.values(), np.int64, len(scheduled))
        first_R, known_R = self._num_computed_C[rows_R], self._num_known_C[rows_R]
        end_R, num_blocks_R = first_R + n_R, self._num_blocks_C[rows_R]
        self._check(plan, first_R, end_R, known_R, num_blocks_R * block_size)
        starts_R1 = np.zeros(len(rows_R) + 1, np.int64)
        n_R.cumsum(out=starts_R1[1:])
        rows_T, positions_T = rows_R.repeat(n_R), ranges(first_R, n_R)
        ids_T = self._token_ids_CL[rows_T, positions_T].astype(np.int64)
        block_ids_T = self._block_table_CB[rows_T, positions_T // block_size]
        samples_R = end_R == known_R
        rows_S, index_S = rows_R[samples_R], starts_R1[1:][samples_R] - 1
        (in_flight,) = (ids_T[index_S] == IN_FLIGHT).nonzero()
        in_flight_T, in_flight_S = index_S[in_flight], self._sampled_row_C[rows_S[in_flight]]
        ids_T[in_flight_T] = 0
        known_S = known_R[samples_R]
        num_outputs_S = known_S - self._num_prompt_C[rows_S]
        sampling = self._sampling.build(rows_S, num_outputs_S) if len(rows_S) else None
        self._num_computed_C[rows_R] = end_R
        self._token_ids_CL[rows_S, known_S] = IN_FLIGHT
        self._num_known_C[rows_S] = known_S + 1
        self._sampled_row_C[rows_S] = np.arange(len(rows_S))
        return HostInputs(
            request_ids=list(scheduled),
            input_ids_T=ids_T,
            positions_T=positions_T,
            slot_mapping_T=block_ids_T * block_size + positions_T % block_size,
            query_start_loc_R1=starts_R1,
            seq_lens_R=end_R,
            block_table_RB=self._block_table_CB[:, : num_blocks_R.max()][rows_R],
            sampling_ids=list(compress(scheduled, samples_R.tolist())),
            sampling_index_S=index_S,
            in_flight_T=in_flight_T,
            in_flight_S=in_flight_S,
            sampling=sampling,
            receipt=(rows_S, known_S, self._tenancy_C[rows_S]),
        )

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

        rows_S, places_S, tenancy_S = inputs.receipt
        stays_S = self._tenancy_C[rows_S] == tenancy_S
        ids, rows, places = np.array(token_ids, np.int64)[stays_S], rows_S[stays_S], places_S[stays_S]
        (known,) = (self._token_ids_CL[rows, places] != IN_FLIGHT).nonzero()
        assert not len(known), (
            f"{list(compress(inputs.sampling_ids, stays_S))[known[0]]}: token {places[known[0]]} was known already"
        )
        self._token_ids_CL[rows, places] = ids
        self._sampling.append(rows, ids)


def ranges(first_R: np.ndarray, n_R: np.ndarray) -> np.ndarray:
    """first, first + 1, ... of each row, n of them, end to end."""
    import numpy as np

    ends_R = n_R.cumsum()
    return np.arange(ends_R[-1]) + (first_R - ends_R + n_R).repeat(n_R)
