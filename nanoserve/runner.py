"""Turns a step plan into sampled tokens: the only part of the engine that touches tensors.

Owns the model, the KV cache and a row for each request it was told of; decides nothing. It knows no phase: a row
has computed some of its known tokens, computes a few more, and samples exactly when it has caught up with them. v0:
inputs are rebuilt from the rows each step, and kernels run eagerly (`EagerRunner`). Imports torch inside functions.
Laws: tests/test_runner.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from nanoserve.attention import AttentionBatch
from nanoserve.platforms import resolve_platform
from nanoserve.request import NewRequest, SamplingParams, StepPlan, StepResult, TokenLogprobs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nanoserve.checkpoint import ModelConfig
    from nanoserve.config import EngineConfig
    from nanoserve.model import Decoder

PROMPT_ROWS_AT_ONCE = 1024  # prompt positions whose logits exist at the same time


class StepHandle(Protocol):
    """A step that may still be running."""

    def wait(self) -> StepResult:
        """Block until the step is done. May be called again."""
        ...


class Runner(Protocol):
    """Executes plans, in order. The caller keeps to: construct, `allocate` once, `launch` any number of times.

    A row exists from the plan that has it in `new` to the plan that names it in `finished` or `preempted`.
    A plan that names a request without a row, or tokens without blocks, is a broken invariant: AssertionError.
    """

    device: str  # "cpu", or the kind of GPU
    dtype: str  # of weights and KV cache
    model_len: int  # longest sequence of the model, in tokens
    vocab_size: int

    def __init__(self, config: EngineConfig) -> None:
        """Load the model. ValueError: no such model, device or dtype."""
        ...

    def pool_blocks(self, block_size: int) -> int:
        """How many blocks fit in `kv_cache_memory_bytes`, or in the device's share of free memory."""
        ...

    def allocate(self, config: EngineConfig) -> None:
        """Make the KV cache of a resolved config. ValueError when it does not fit."""
        ...

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start the step; may return before it is done. In this order: rows are dropped, added and changed, blocks
        are copied, the tokens run. A plan without tokens is a step without a forward pass."""
        ...

    def close(self) -> None:
        """Let go of weights and cache. Idempotent; nothing may be launched afterwards."""
        ...


class KVCache:
    """Keys and values of the whole pool, and the host blocks that swapped requests wait in.

        blocks [layer, k or v, block, kv head, place in block, head dim]

    Heads stand before places (vLLM's HND): what one head reads of a block lies in one piece, which makes prefill
    on a CPU 1.0-1.4 x faster than places before heads, and decode no slower. One tensor for all layers, so that
    copying a block is one operation. The memory is uninitialised, and a CPU commits it page by page as it is first
    written: attention must not let what it finds in unwritten places, NaN included, reach a result.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        import torch

        def empty(num: int, where: torch.device, *, pin: bool = False) -> Tensor:
            shape = (num_layers, 2, num, num_kv_heads, block_size, head_dim)
            return torch.empty(shape, dtype=dtype, device=where, pin_memory=pin)

        self.num_blocks = num_blocks
        self.block_size = block_size
        self.blocks = empty(num_blocks, device)
        self.host_blocks = empty(num_host_blocks, torch.device("cpu"), pin=device.type != "cpu" and num_host_blocks > 0)

    @classmethod
    def build(cls, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> KVCache:
        """For a resolved config. ValueError when the memory is not there."""
        assert config.num_blocks is not None, "resolve() first"
        try:
            return cls(
                num_layers=model.num_layers,
                num_blocks=config.num_blocks,
                num_kv_heads=model.num_kv_heads,
                block_size=config.block_size,
                head_dim=model.head_dim,
                dtype=dtype,
                device=device,
                num_host_blocks=config.num_swap_blocks,
            )
        except RuntimeError as error:  # torch has no narrower one for a CPU
            num_blocks = config.num_blocks + config.num_swap_blocks
            size = num_blocks * config.block_size * model.kv_bytes_per_token(dtype)
            raise ValueError(
                f"num_blocks={config.num_blocks} and num_swap_blocks={config.num_swap_blocks} of {config.block_size} "
                f"tokens take {size / 2**30:.1f} GiB, more than {device.type} memory has; lower them, or "
                "kv_cache_memory_bytes."
            ) from error

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), as if one after the other. An id >= num_blocks is a host block."""

        def kind(pair: tuple[int, int]) -> tuple[bool, bool]:
            return pair[0] >= self.num_blocks, pair[1] >= self.num_blocks

        for (from_host, to_host), group in groupby(pairs, key=kind):
            source = self.host_blocks if from_host else self.blocks
            target = self.host_blocks if to_host else self.blocks
            run = [(a - from_host * self.num_blocks, b - to_host * self.num_blocks) for a, b in group]
            # Within one memory a block may be read after it was written: one at a time there.
            for batch in [run] if from_host != to_host else [[pair] for pair in run]:
                from_ids, to_ids = map(list, zip(*batch, strict=True))
                target[:, :, to_ids] = source[:, :, from_ids].to(target.device)


@dataclass(slots=True, eq=False)
class RequestRow:
    """The runner's record of one request. Only the runner writes it."""

    id: str
    params: SamplingParams
    eos_token_id: int | None
    num_prompt_tokens: int
    token_ids: list[int]  # prompt, then output
    block_ids: list[int]
    num_computed_tokens: int
    # Scores of the prompt so far, the first one None; None: not asked for, or handed out already.
    prompt_logprobs: list[TokenLogprobs | None] | None

    @classmethod
    def from_new(cls, new: NewRequest) -> RequestRow:
        """Of a request that comes for the first time, or comes back. Once it has output, its prompt was scored."""
        to_score = new.params.prompt_logprobs is not None and len(new.token_ids) == new.num_prompt_tokens
        assert not to_score or new.num_computed_tokens == 0, (
            f"{new.id} wants prompt_logprobs but starts at token {new.num_computed_tokens}"
        )
        return cls(
            id=new.id,
            params=new.params,
            eos_token_id=new.eos_token_id,
            num_prompt_tokens=new.num_prompt_tokens,
            token_ids=list(new.token_ids),
            block_ids=list(new.block_ids),
            num_computed_tokens=new.num_computed_tokens,
            prompt_logprobs=[None] if to_score else None,
        )


@dataclass(frozen=True)
class InputBatch:
    """A step's input as tensors. Token i of the T is at `positions_T[i]` of its request; rows lie end to end."""

    rows: list[RequestRow]
    input_ids_T: Tensor
    positions_T: Tensor
    attention: AttentionBatch
    sampling_rows: list[RequestRow]  # those that catch up with their known tokens
    sampling_index_S: Tensor  # their last tokens, among the T

    @classmethod
    def rebuild(cls, scheduled: Sequence[tuple[RequestRow, int]], block_size: int, device: torch.device) -> InputBatch:
        """From nothing but the rows and the number of tokens of each, at least one: what v0 did in every step."""
        import numpy as np
        import torch

        ids: list[int] = []
        positions, slots = [], []
        starts, seq_lens, sampling_rows, sampling_index = [0], [], [], []
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
        arrays = [ids, np.concatenate(positions), np.concatenate(slots), starts, seq_lens, sampling_index]
        arrays = [np.asarray(array, np.int64) for array in arrays] + [block_table_RB]
        flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device)  # the one transfer
        ids_T, positions_T, slots_T, starts_R1, seq_lens_R, index_S, table = flat.split([a.size for a in arrays])
        attention = AttentionBatch(
            query_start_loc_R1=starts_R1,
            seq_lens_R=seq_lens_R,
            block_table_RB=table.view(block_table_RB.shape),
            slot_mapping_T=slots_T,
            query_starts=starts,
            seq_lens=seq_lens,
        )
        return cls([row for row, _ in scheduled], ids_T, positions_T, attention, sampling_rows, index_S)


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The handle of a step that was done before `launch` returned."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class EagerRunner:
    """v0: rebuild the inputs, run the layers one by one, fetch the tokens, return. The device idles in between."""

    def __init__(self, config: EngineConfig) -> None:
        import torch

        from nanoserve.weights import load_model

        platform = resolve_platform(config.device)
        self._model: Decoder | None = load_model(
            config.model,
            dtype=platform.default_dtype if config.dtype == "auto" else config.dtype,
            device=platform.device,
            load_format=config.load_format,
            seed=config.seed,
        )
        self._platform = platform
        self._kv_cache_bytes = config.kv_cache_memory_bytes
        self._attention = (config.attention or platform.default_attention)()
        self._generator = torch.Generator(platform.device).manual_seed(config.seed)
        self._cache: KVCache | None = None
        self.rows: dict[str, RequestRow] = {}
        self.model_config = self._model.config
        torch.set_num_threads(config.num_threads or platform.num_threads(self.model_config.num_parameters))
        self.torch_dtype = self._model.dtype
        self.device = platform.name
        self.dtype = str(self.torch_dtype).removeprefix("torch.")
        self.model_len = self.model_config.max_model_len
        self.vocab_size = self.model_config.vocab_size

    def pool_blocks(self, block_size: int) -> int:
        num_bytes = self._kv_cache_bytes or self._platform.kv_cache_bytes()
        return num_bytes // (block_size * self.model_config.kv_bytes_per_token(self.torch_dtype))

    def allocate(self, config: EngineConfig) -> None:
        self._cache = KVCache.build(config, self.model_config, self.torch_dtype, self._platform.device)

    @property
    def cache(self) -> KVCache:
        assert self._cache is not None, "allocate() first, and launch nothing after close()"
        return self._cache

    @property
    def model(self) -> Decoder:
        assert self._model is not None, "the runner is closed"
        return self._model

    def launch(self, plan: StepPlan) -> StepHandle:
        import torch

        with torch.inference_mode():
            self._apply(plan)
            self.cache.copy(plan.copies)
            return FinishedStep(self._run(plan))

    def _apply(self, plan: StepPlan) -> None:
        """Bring the rows up to date: from here on they are the truth, and the plan only says how many tokens."""
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

    def _run(self, plan: StepPlan) -> StepResult:
        scheduled = [(self._row(plan, request_id), n) for request_id, n in plan.num_scheduled_tokens.items()]
        if not scheduled:
            return StepResult({})
        batch = InputBatch.rebuild(scheduled, self.cache.block_size, self._platform.device)
        hidden_TE = self._forward(batch)
        self._score_prompts(batch, hidden_TE)
        for row, n in scheduled:
            row.num_computed_tokens += n
        return self._sample(batch, hidden_TE)

    def _forward(self, batch: InputBatch) -> Tensor:
        """One pass for any mix of rows: [T, E]. Everyone's keys and values are stored before anyone attends, so
        that a row may read blocks which another row of the same step fills."""
        backend, cache = self._attention, self.cache

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            backend.store(k_TKD, v_TKD, cache, layer, batch.attention.slot_mapping_T)
            return backend.attend(q_THD, cache, layer, batch.attention)

        return self.model(batch.input_ids_T, batch.positions_T, attend)

    def _score_prompts(self, batch: InputBatch, hidden_TE: Tensor) -> None:
        """Position p scores token p + 1, which the row knows even when the next chunk is the one to compute it."""
        from nanoserve.sampler import prompt_logprobs

        for index, row in enumerate(batch.rows):
            if row.prompt_logprobs is None or row.params.prompt_logprobs is None:
                continue
            start, seq_len = batch.attention.query_starts[index], batch.attention.seq_lens[index]
            first = row.num_computed_tokens
            assert len(row.prompt_logprobs) == first + 1, f"{row.id}: {len(row.prompt_logprobs)} scores at {first}"
            targets = row.token_ids[first + 1 : min(seq_len + 1, row.num_prompt_tokens)]
            hidden_PE = hidden_TE[start : start + len(targets)]
            for at in range(0, len(targets), PROMPT_ROWS_AT_ONCE):
                part = slice(at, at + PROMPT_ROWS_AT_ONCE)
                logits_PV = self.model.logits(hidden_PE[part])
                row.prompt_logprobs += prompt_logprobs(logits_PV, targets[part], row.params.prompt_logprobs)

    def _sample(self, batch: InputBatch, hidden_TE: Tensor) -> StepResult:
        from nanoserve.sampler import SamplingInputs, SamplingRow, sample

        rows = batch.sampling_rows
        if not rows:
            return StepResult({})
        logits_SV = self.model.logits(hidden_TE[batch.sampling_index_S])
        inputs = SamplingInputs.build(
            [
                SamplingRow(
                    row.params,
                    row.token_ids[: row.num_prompt_tokens],
                    row.token_ids[row.num_prompt_tokens :],
                    row.eos_token_id,
                )
                for row in rows
            ],
            self.vocab_size,
            logits_SV.device,
        )
        sampled = sample(logits_SV, inputs, self._generator)
        prompt_scores = {}
        for row, token_id in zip(rows, sampled.token_ids, strict=True):
            row.token_ids.append(token_id)
            if row.prompt_logprobs is not None:
                prompt_scores[row.id], row.prompt_logprobs = row.prompt_logprobs, None
        return StepResult(
            {row.id: [token_id] for row, token_id in zip(rows, sampled.token_ids, strict=True)},
            {rows[index].id: [logprobs] for index, logprobs in sampled.logprobs.items()},
            prompt_scores,
        )

    def close(self) -> None:
        self.rows.clear()
        self._model = self._cache = None
