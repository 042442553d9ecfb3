"""An engine without a model: a runner whose tokens betray any mistake in scheduling or in block tables.

A KV cell holds a digest of everything before it, read through the block table, as real keys and values depend on
their whole prefix. So a wrong block, a stale table, a skipped or repeated token or a cell that was never written
changes every later token, or fails at once. Imports no torch; tests and lessons share it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, ClassVar

from nanoserve.execution import Execution
from nanoserve.request import NewRequest, StepPlan, StepResult

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig

VOCAB_SIZE = 1000
MODEL_LEN = 4096
START = 0x243F6A8885A308D3


def mix(state: int, value: int) -> int:
    """One step of a 64-bit digest."""
    state = (state ^ value) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return state ^ (state >> 29)


def next_token(state: int) -> int:
    return state % VOCAB_SIZE


def reference_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    """What a right engine answers: no cache, no batch, everything from the start for each token."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        state = START
        for token_id in tokens:
            state = mix(state, mix(state, token_id))
        tokens.append(next_token(state))
    return tokens[len(prompt) :]


class DigestRow:
    """What the runner knows of a request."""

    def __init__(self, new: NewRequest) -> None:
        self.token_ids = list(new.token_ids)
        self.block_ids = list(new.block_ids)
        self.num_computed_tokens = new.num_computed_tokens


class DigestStep:
    """The handle of a launched plan. `wait` runs the plans that were launched before it, then its own: as late as a
    device could, so that whoever is one step ahead really does not know the tokens."""

    def __init__(self, runner: DigestRunner, plan: StepPlan) -> None:
        self.plan = plan
        self._runner = runner
        self._result: StepResult | None = None

    def wait(self) -> StepResult:
        while self._result is None:
            step = self._runner.launched.popleft()
            step._result = self._runner.execute(step.plan)
        return self._result


class DigestRunner:
    """Speaks `Runner`; a plan runs when its result is waited for. Counts the tokens it computed in `num_tokens`."""

    captures_graphs: ClassVar[bool] = False
    execution = Execution()
    device = "cpu"
    dtype = "digest"
    model_len = MODEL_LEN
    vocab_size = VOCAB_SIZE

    def __init__(self, config: EngineConfig) -> None:
        self.block_size = config.block_size
        self.rows: dict[str, DigestRow] = {}
        self.cells: dict[int, int] = {}  # slot -> digest
        self.launched: deque[DigestStep] = deque()  # and not run yet
        self.num_tokens = 0

    def pool_blocks(self, block_size: int) -> int:
        return 2 * MODEL_LEN // block_size + 2

    def allocate(self, config: EngineConfig) -> None:
        self.cells.clear()

    def launch(self, plan: StepPlan) -> DigestStep:
        step = DigestStep(self, plan)
        self.launched.append(step)
        return step

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan; called in the order of the launches."""
        for request_id in (*plan.preempted, *plan.finished):
            self.rows.pop(request_id, None)
        for new in plan.new:
            assert new.id not in self.rows, f"{new.id} is new, but its row was never dropped"
            self.rows[new.id] = DigestRow(new)
        for request_id, replaced in plan.replaced_blocks.items():
            for index, block_id in replaced:
                self.rows[request_id].block_ids[index] = block_id
        for request_id, block_ids in plan.new_blocks.items():
            self.rows[request_id].block_ids += block_ids
        for source, target in plan.copies:
            self._copy_block(source, target)
        sampled = {request_id: self._run(request_id, n) for request_id, n in plan.num_scheduled_tokens.items()}
        return StepResult({request_id: tokens for request_id, tokens in sampled.items() if tokens})

    def _copy_block(self, source: int, target: int) -> None:
        for offset in range(self.block_size):
            cell = self.cells.get(source * self.block_size + offset)
            if cell is not None:
                self.cells[target * self.block_size + offset] = cell

    def _run(self, request_id: str, num_tokens: int) -> list[int]:
        """Compute the next tokens of a row; a sampled one if it has caught up."""
        row = self.rows[request_id]
        first, end = row.num_computed_tokens, row.num_computed_tokens + num_tokens
        assert end <= len(row.token_ids), f"{request_id}: {end} tokens are scheduled, {len(row.token_ids)} known"
        state = START
        for position in range(end):
            slot = self._slot(row, request_id, position)
            if position >= first:
                self.cells[slot] = mix(state, row.token_ids[position])
            assert slot in self.cells, f"{request_id}: the KV of position {position} was never written"
            state = mix(state, self.cells[slot])
        row.num_computed_tokens = end
        self.num_tokens += num_tokens
        if end < len(row.token_ids):
            return []
        row.token_ids.append(next_token(state))
        return [next_token(state)]

    def _slot(self, row: DigestRow, request_id: str, position: int) -> int:
        index = position // self.block_size
        assert index < len(row.block_ids), f"{request_id}: position {position} has no block in {row.block_ids}"
        return row.block_ids[index] * self.block_size + position % self.block_size

    def close(self) -> None:
        self.rows.clear()


class NullStep:
    """The handle of a step that was done before `launch` returned."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        time.sleep(0)
        return self._result


class NullRunner:
    """Speaks `Runner` and computes nothing: every row that has caught up gets token 1. What a step then costs is
    everything but the model. As a model would, it lets go of the interpreter lock once a step."""

    captures_graphs: ClassVar[bool] = False
    execution = Execution()
    device = "cpu"
    dtype = "null"
    model_len = MODEL_LEN
    vocab_size = VOCAB_SIZE

    def __init__(self, config: EngineConfig) -> None:
        self._missing: dict[str, int] = {}  # request id -> known tokens that are not computed yet

    def pool_blocks(self, block_size: int) -> int:
        return 2**16

    def allocate(self, config: EngineConfig) -> None:
        self._missing.clear()

    def launch(self, plan: StepPlan) -> NullStep:
        for request_id in (*plan.preempted, *plan.finished):
            self._missing.pop(request_id, None)
        for new in plan.new:
            self._missing[new.id] = len(new.token_ids) - new.num_computed_tokens
        sampled: dict[str, list[int]] = {}
        for request_id, n in plan.num_scheduled_tokens.items():
            self._missing[request_id] -= n
            if self._missing[request_id] == 0:
                self._missing[request_id] = 1
                sampled[request_id] = [1]
        return NullStep(StepResult(sampled))

    def close(self) -> None:
        self._missing.clear()
