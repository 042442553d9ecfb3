"""Decode steps as work of a CPU's stream: the host hands one over and decides the next while it runs.

A step that is one recording, of rows that all take their largest logit, needs nobody between its inputs and its ids.
Host and stream both touch those: there are two sets, which take turns, so that a step is filled in while another runs,
or its ids wait to be read. Decides nothing, and knows no model. Laws: tests/test_cpu_stream.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nanoserve.cpu_graphs import Move, Recording, Replay, Take
from nanoserve.cpu_ops import argmax
from nanoserve.cpu_stream import CpuStream
from nanoserve.graphs import GraphKey
from nanoserve.input_batch import HostInputs
from nanoserve.native_calls import Function, recorded_calls
from nanoserve.sampler import Sampled
from nanoserve.static_inputs import StaticInputs

NUM_BYTES = 8  # of an int64


class QueuedDecodes:
    """`recordings`: from static inputs to the first rows of `logits_SV`, for as many rows as their key says."""

    def __init__(self, static: StaticInputs, logits_SV: Tensor, recordings: Mapping[GraphKey, Recording]) -> None:
        self.stream = CpuStream()
        self._recordings = recordings
        self._sides = [Side(static, logits_SV, recordings) for _ in range(2)]

    def takes(self, inputs: HostInputs, key: GraphKey | None) -> bool:
        """Whether such a step can be launched here."""
        sampling = inputs.sampling
        return key in self._recordings and inputs.all_sample and sampling is not None and sampling.takes_largest

    def launch(self, inputs: HostInputs, key: GraphKey, sampled_ids_S: Tensor | None) -> Sampled:
        """`sampled_ids_S`: of the step before, on this stream or not."""
        side = self._sides[0]
        self._sides.reverse()
        side.settle()
        work = side.fill(inputs, key, sampled_ids_S)
        side.sampled = Sampled.on_its_way(side.ids_S[: inputs.num_tokens], self.stream.submit(work))
        return side.sampled


class Side:
    """What one step in flight reads and writes, and nobody else until it is over."""

    def __init__(self, static: StaticInputs, logits_SV: Tensor, recordings: Mapping[GraphKey, Recording]) -> None:
        rows, width = static.block_table_RB.shape
        self.inputs = inputs = static.another()
        self.ids_S = torch.zeros(rows, dtype=torch.int64)
        self.sampled: Sampled | None = None
        self._from_S, self._to_T = torch.zeros(2, rows, dtype=torch.int64).numpy()
        self._source_S: Tensor | None = None  # kept while it is read
        numbers, row_bytes = static.numbers, width * NUM_BYTES
        places = self._from_S.ctypes.data, self._to_T.ctypes.data
        self._send = Move(inputs.numbers.data_ptr(), numbers.data_ptr(), 1, numbers.numel() * NUM_BYTES, 0, 0)
        self._send_table = Move(
            inputs.block_table_RB.data_ptr(), static.block_table_RB.data_ptr(), 0, 0, row_bytes, row_bytes
        )
        self._take = Take(None, *places, numbers.data_ptr(), 0)
        self._works = {key: self._work(recording, logits_SV[: key.size]) for key, recording in recordings.items()}
        self._batches = {key: inputs.batch(key) for key in recordings}

    def _work(self, recording: Recording, logits_SV: Tensor) -> Replay:
        """From these inputs to these ids. What differs from step to step is changed in the three structures."""
        move, take = Function("graph", "move"), Function("graph", "take")
        with recorded_calls() as calls:
            recording()
            argmax(logits_SV, self.ids_S)
        return Replay([(move, self._send), (move, self._send_table), (take, self._take), *calls])

    def settle(self) -> None:
        """The step that was the last one here is over, and its ids are with the host."""
        if self.sampled is not None:
            self.sampled.token_ids  # noqa: B018  (a look brings them)

    def fill(self, inputs: HostInputs, key: GraphKey, sampled_ids_S: Tensor | None) -> Replay:
        """The work of that step."""
        used, width = inputs.block_table_RB.shape
        self.inputs.fill_tokens(inputs, key.size)
        self.inputs.fill_rows(inputs, key, self._batches[key])
        self._send_table.rows = key.size
        self._send_table.size = self._send_table.to_row if used < key.size else width * NUM_BYTES
        self._take.count = count = len(inputs.in_flight_T)
        if count:
            assert sampled_ids_S is not None, "tokens are in flight, but no step came before"
            self._source_S = sampled_ids_S
            self._take.source = sampled_ids_S.data_ptr()
            self._from_S[:count], self._to_T[:count] = inputs.in_flight_S, inputs.in_flight_T
        return self._works[key]
