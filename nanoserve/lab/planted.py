"""The classic bugs of scheduling and of blocks, each planted in a subclass of the right class, in the fewest lines.

To be read beside what they override (scheduler.py, blocks.py, persistent_batch.py, static_inputs.py): the difference is
the bug. faults.py says which law each breaks, on which load, and how to find it. Imports torch nowhere.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from nanoserve.block_pool import Block, PrefixHit
from nanoserve.blocks import SharedBlocks
from nanoserve.graph_runner import GraphRunner
from nanoserve.input_batch import HostInputs
from nanoserve.persistent_batch import PersistentBatch
from nanoserve.request import NewRequest, Reason, Request, Status, StepPlan
from nanoserve.scheduler import Draft, Share, UnifiedScheduler
from nanoserve.static_inputs import StaticInputs

if TYPE_CHECKING:
    import torch

    from nanoserve.config import EngineConfig

# Blocks


class ForgetsToTouch(SharedBlocks):
    """A hit is neither counted nor taken out of the free queue."""

    def _hold(self, block: Block) -> None:
        pass


class LeavesHitsInTheQueue(SharedBlocks):
    """A hit is counted, but stays in the free queue."""

    def _hold(self, block: Block) -> None:
        block.ref += 1


class FreesHeadFirst(SharedBlocks):
    """Blocks go back in the order of the table, so that a prefix is evicted before what follows it."""

    def free(self, request: Request) -> None:
        request.block_ids.reverse()
        super().free(request)


class HitsTheWholePrompt(SharedBlocks):
    """The last known token may be part of a hit."""

    def lookup(self, request: Request) -> PrefixHit:
        request.token_ids.append(0)
        hit = super().lookup(request)
        request.token_ids.pop()
        return hit


class HashesWithoutParent(SharedBlocks):
    """A block is known by its own tokens, whatever came before them."""

    def hash_block(self, request: Request, index: int, parent: bytes) -> bytes:
        return super().hash_block(request, index, b"")


class NeverForgets(SharedBlocks):
    """Blocks keep the hash that they got on the promise of a step which will not run."""

    def forget(self, request: Request, num_computed_tokens: int) -> None:
        request.num_cached_blocks = min(request.num_cached_blocks, num_computed_tokens // self.block_size)


# Scheduler


class TakesOutputForDecode(UnifiedScheduler):
    """Whoever has output is taken for a decode, which samples in every step: also when it computes its prompt again."""

    def _count(self, request: Request, num_tokens: int) -> Share:
        share = super()._count(request, num_tokens)
        if request.num_output_tokens and not share.samples:
            request.num_placeholders += 1
            share = share._replace(samples=True)
        return share


class ChunksOnlyTheFirst(UnifiedScheduler):
    """A prompt may be cut only when it is the first that a step admits."""

    def _admit(self, request: Request, num_tokens: int, hit: PrefixHit, draft: Draft, watermark_blocks: int) -> bool:
        if draft.new and num_tokens < request.num_tokens - hit.num_tokens:
            draft.stopped_by = Reason("budget")
            return False
        return super()._admit(request, num_tokens, hit, draft, watermark_blocks)


class FreesTheAbortedTwice(UnifiedScheduler):
    """An abort gives the blocks back, and so does the end that it causes."""

    def _finish(self, request: Request, status: Status) -> None:
        table = list(request.block_ids)
        super()._finish(request, status)
        if status is Status.FINISHED_ABORTED:
            request.block_ids = table
            self.blocks.free(request)


# The runner's inputs


class KeepsTheTableOnResume(PersistentBatch):
    """Whoever comes back after a preemption goes on with the first block that it had before."""

    def __init__(self, config: EngineConfig, *, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size=vocab_size, device=device)
        self._first_blocks: dict[str, int] = {}

    def _add(self, plan: StepPlan, new: NewRequest) -> None:
        super()._add(plan, new)
        row = self._rows[new.id]
        self._block_table_CB[row, 0] = self._first_blocks.setdefault(new.id, new.block_ids[0])


class KeysOfThePromptOnly(PersistentBatch):
    """A decode attends to as many keys as its prompt has tokens."""

    def build(self, plan: StepPlan) -> HostInputs | None:
        inputs = super().build(plan)
        if inputs is None:
            return None
        num_prompt_R = self._sampling.num_prompt_C[self._rows_of(plan, inputs.request_ids)]
        return dataclasses.replace(inputs, seq_lens_R=inputs.seq_lens_R.clip(max=num_prompt_R))


class KeepsOldSlots(StaticInputs):
    """Padding tokens keep the slots that an earlier, longer step left in their places."""

    def fill_tokens(self, inputs: HostInputs, size: int) -> None:
        before = self.slot_mapping_T.copy()
        super().fill_tokens(inputs, size)
        num_tokens = len(inputs.input_ids_T)
        self.slot_mapping_T[num_tokens:size] = before[num_tokens:size]


class StoresPadding(GraphRunner):
    """Replays with `KeepsOldSlots`: the same memory, filled the wrong way."""

    static_inputs: ClassVar[type[StaticInputs]] = KeepsOldSlots
