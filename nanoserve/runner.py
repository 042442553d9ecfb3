"""Turns a step plan into sampled tokens: the only part of the engine that touches tensors.

Owns the model, the KV cache and the batch; decides nothing. v0: the layers run one by one, each operation launched by
the host (`EagerRunner`). v1: captured graphs are replayed (graph_runner.py). A step may be launched while the one
before still runs: what it sampled stays on the device. Imports torch inside functions. Laws: tests/test_runner.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from nanoserve.compilation import CompileMode
from nanoserve.execution import Execution
from nanoserve.input_batch import HostInputs, InputBatch, padding_inputs
from nanoserve.kv_cache import KVCache
from nanoserve.platforms import resolve_attention, resolve_ops, resolve_platform
from nanoserve.prompt_scores import PromptScores
from nanoserve.request import StepCost, StepPlan, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve.attention import AttentionBackend, AttentionBatch
    from nanoserve.config import EngineConfig
    from nanoserve.graphs import GraphKey
    from nanoserve.input_batch import StepInputs
    from nanoserve.model import Attend, Decoder
    from nanoserve.sampler import Sampled

MAX_POOL_BLOCKS = 2**20  # that a pool is sized for by itself: the host keeps a record of each


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
    execution: Execution  # how it executes; complete after `allocate`
    captures_graphs: ClassVar[bool]  # whether graph_mode and graph_sizes mean anything to it

    def __init__(self, config: EngineConfig) -> None:
        """Load the model. ValueError: no such model, device or dtype."""
        ...

    def pool_blocks(self, block_size: int) -> int:
        """How many blocks fit in `kv_cache_memory_bytes`, or in the device's share of free memory. ValueError for more
        bytes than a pool is sized by."""
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


class LaunchedStep:
    """A step on its way. `wait` brings its tokens to the host, once, and tells the batch."""

    def __init__(
        self,
        sampled: Sampled | None,
        batch: InputBatch,
        inputs: HostInputs | None,
        prompt_scores: dict[str, list[TokenLogprobs | None]],
        cost: StepCost,
    ) -> None:
        self._sampled = sampled
        self._batch = batch
        self._inputs = inputs
        self._prompt_scores = prompt_scores
        self._cost = cost
        self._result: StepResult | None = None

    def wait(self) -> StepResult:
        if self._result is None:
            self._result = self._fetch()
        return self._result

    def _fetch(self) -> StepResult:
        sampled, inputs = self._sampled, self._inputs
        if sampled is None or inputs is None:
            return StepResult({}, cost=self._cost)
        token_ids = sampled.token_ids
        self._batch.fill(inputs, token_ids)
        return StepResult(
            {request_id: [token_id] for request_id, token_id in zip(inputs.sampling_ids, token_ids, strict=True)},
            {inputs.sampling_ids[row]: [logprobs] for row, logprobs in sampled.logprobs.items()},
            self._prompt_scores,
            self._cost,
        )


class StepAttention:
    """What the layers of a forward pass call. One object for all steps, so that compiled code knows it again."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = type(backend)
        self._backend = backend
        self.cache: KVCache | None = None
        self.batch: AttentionBatch | None = None  # of the step that runs
        self.newest: AttentionBatch | None = None  # of its tokens that sample, if these are not all

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, /) -> Tensor:
        """Everyone's keys and values are stored before anyone attends, so that a row may read blocks which another row
        of the same step fills."""
        assert self.cache is not None, "allocate() first, and launch nothing after close()"
        assert self.batch is not None, "which step?"
        self._backend.store(k_TKD, v_TKD, self.cache, layer, self.batch.slot_mapping_T)
        batch = self.newest if self.newest is not None and len(q_THD) < len(k_TKD) else self.batch
        return self._backend.attend(q_THD, self.cache, layer, batch)


class EagerRunner:
    """v0: run the layers one by one. The device idles whenever the host is slower than it."""

    captures_graphs: ClassVar[bool] = False

    def __init__(self, config: EngineConfig) -> None:
        import torch

        from nanoserve.allocator import keep_freed_memory
        from nanoserve.compilation import AttentionOperator, compile_model
        from nanoserve.packed_linear import check_quantization, pack_linears
        from nanoserve.weights import DTYPES, load_model

        keep_freed_memory()
        self._platform = platform = resolve_platform(config.device)
        self._device = platform.device
        dtype = platform.default_dtype if config.dtype == "auto" else config.dtype
        attention, why = resolve_attention(platform, config.attention, DTYPES.get(dtype))
        mode = CompileMode(config.compile or platform.default_compile)
        is_compiled = mode is not CompileMode.NONE
        ops, ops_why = resolve_ops(platform, config.ops, DTYPES.get(dtype), is_compiled=is_compiled)
        check_quantization(config.quantization, platform.name, DTYPES.get(dtype), is_compiled=is_compiled)
        self._model: Decoder | None = load_model(
            config.model,
            dtype=dtype,
            device=self._device,
            load_format=config.load_format,
            seed=config.seed,
        )
        self._model.ops = ops()
        compile_model(self._model, mode)
        if mode is CompileMode.NONE:
            pack_linears(self._model, config.quantization)
        self._compile_mode = mode
        self._kv_cache_bytes = config.kv_cache_memory_bytes
        self._attention = StepAttention(attention())
        # As the model calls it: compiled code that is not cut at attention takes it for an operator.
        self._attend: Attend = self._attention
        if mode is CompileMode.MODEL:
            self._attend = AttentionOperator(self._attention)
        self._generator = torch.Generator(self._device).manual_seed(config.seed)
        self._batch: InputBatch | None = None
        self._scores = PromptScores()
        self._last: LaunchedStep | None = None
        self._sampled_ids_S: Tensor | None = None  # of the newest step that sampled; stays on the device
        self.model_config = self._model.config
        num_threads = config.num_threads or platform.num_threads(self.model_config.num_parameters)
        torch.set_num_threads(num_threads)
        self.torch_dtype = self._model.dtype
        self.device = platform.name
        self.dtype = str(self.torch_dtype).removeprefix("torch.")
        self.model_len = self.model_config.max_model_len
        self.vocab_size = self.model_config.vocab_size
        self.execution = Execution(
            attention=f"{attention.__name__} ({why})",
            ops=f"{ops.__name__} ({ops_why})",
            batch=config.batch.__name__,
            quantization=config.quantization or "",
            compile=str(mode),
            num_threads=num_threads,
            weight_bytes=sum(p.numel() * p.element_size() for p in self._model.parameters()),
        )

    def pool_blocks(self, block_size: int) -> int:
        num_bytes = self._kv_cache_bytes or self._platform.kv_cache_bytes(self._reserved_bytes())
        block_bytes = block_size * self.model_config.kv_bytes_per_token(self.torch_dtype)
        num_blocks = num_bytes // block_bytes
        if self._kv_cache_bytes and num_blocks > MAX_POOL_BLOCKS:
            raise ValueError(
                f"kv_cache_memory_bytes={self._kv_cache_bytes} is room for {num_blocks:,} blocks of {block_size} "
                f"tokens, and a size in bytes makes {MAX_POOL_BLOCKS:,} at most; give at most "
                f"{block_bytes * MAX_POOL_BLOCKS}, or a number of blocks instead (num_blocks)."
            )
        return min(num_blocks, MAX_POOL_BLOCKS)

    def _reserved_bytes(self) -> int:
        """Of the memory that is free now: what must not go to the KV pool."""
        return 0

    def allocate(self, config: EngineConfig) -> None:
        self._attention.cache = cache = KVCache.build(config, self.model_config, self.torch_dtype, self._device)
        self._batch = config.batch(config, vocab_size=self.vocab_size, device=self._device)
        self.execution.kv_cache_bytes = cache.num_bytes
        self._compile_now(config)

    def _compile_now(self, config: EngineConfig) -> None:
        """Before the first request rather than under it: steps of padding alone, for each kind of code there is."""
        if self._compile_mode is CompileMode.NONE:
            return
        import torch

        from nanoserve.compilation import failed_compiler_refused

        start_s = time.perf_counter()
        with torch.inference_mode(), failed_compiler_refused(self._compile_mode):
            for num_tokens in (1, min(8, config.budget)):
                self._warm_up(padding_inputs(num_tokens))
        self.execution.compile_s += time.perf_counter() - start_s

    def _warm_up(self, inputs: HostInputs) -> None:
        """Every way to run such a step."""
        self._pass(inputs.to(self._device))

    @property
    def cache(self) -> KVCache:
        assert self._attention.cache is not None, "allocate() first, and launch nothing after close()"
        return self._attention.cache

    @property
    def batch(self) -> InputBatch:
        assert self._batch is not None, "allocate() first, and launch nothing after close()"
        return self._batch

    @property
    def model(self) -> Decoder:
        assert self._model is not None, "the runner is closed"
        return self._model

    def launch(self, plan: StepPlan) -> StepHandle:
        """The rows are changed and the inputs made here; the device's work may still be going on afterwards."""
        start_s, batch = time.perf_counter(), self.batch
        if self._last is not None and batch.reads_output:
            self._last.wait()
        batch.apply(plan)
        self._scores.apply(plan)
        inputs = batch.build(plan)
        to_score = self._scores.find(inputs) if inputs else []
        key = self._dispatch(inputs) if inputs and not to_score else None
        host_s = time.perf_counter() - start_s
        sampled = self._run(plan.copies, inputs, key, to_score)
        if self._platform.launches or (sampled is not None and sampled.is_on_its_way):
            host_s = time.perf_counter() - start_s
        ended = self._scores.take(inputs.sampling_ids) if inputs else {}
        num_padding = key.size - inputs.num_tokens if inputs and key else 0
        cost = StepCost(host_s, str(key or ""), num_padding)
        self._last = LaunchedStep(sampled, batch, inputs, {i: prompt.scores for i, prompt in ended.items()}, cost)
        return self._last

    def _dispatch(self, inputs: HostInputs) -> GraphKey | None:
        """The graph that a step replays, if any."""
        return None

    def _run(
        self,
        copies: Sequence[tuple[int, int]],
        inputs: HostInputs | None,
        key: GraphKey | None,
        to_score: Sequence[Any],
    ) -> Sampled | None:
        """The device's part of a step; parts of several steps run one after the other."""
        import torch

        from nanoserve.sampler import sample

        with torch.inference_mode():
            self.cache.copy(copies)
            if inputs is None:
                return None
            logits_SV = self._forward(inputs, key, to_score)
            if inputs.sampling is None:
                return None
            sampled = sample(logits_SV, inputs.sampling, self._generator)
            self._sampled_ids_S = sampled.ids_S
            sampled.start_fetch()
            return sampled

    def _forward(self, inputs: HostInputs, key: GraphKey | None, to_score: Sequence[Any] = ()) -> Tensor:
        """One pass for any mix of rows: scores [S, V] of the tokens that sample. Where prompts are scored, and in code
        that is compiled whole, the last layer runs for the other tokens as well."""
        step = inputs.to(self._device)
        inputs.take_in_flight(step.input_ids_T, self._sampled_ids_S)
        is_whole = inputs.all_sample or bool(to_score) or self._compile_mode is CompileMode.MODEL
        hidden_TE = self._pass(step, None if is_whole else step.sampling_index_S)
        self._scores.score(to_score, hidden_TE, self.model.logits)
        if is_whole and not inputs.all_sample:
            hidden_TE = hidden_TE[step.sampling_index_S]
        return self.model.logits(hidden_TE) if len(hidden_TE) else hidden_TE

    def _pass(self, step: StepInputs, wanted_S: Tensor | None = None) -> Tensor:
        self._attention.batch, self._attention.newest = step.attention, step.newest
        return self.model(step.input_ids_T, step.positions_T, self._attend, wanted_S)

    def close(self) -> None:
        self._model = self._batch = self._last = self._attention.cache = None
