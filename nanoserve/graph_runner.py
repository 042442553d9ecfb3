"""A runner that replays captured graphs: the host says "this one" instead of launching each operation.

Owns the graphs and the memory they work on; graphs.py decides which one a step gets. v0 captured decodes; v1 captures
by default, decodes whole and any other batch in pieces. What a graph is differs by platform (CUDA's, or the recorded
calls of cpu_graphs.py, in part queued: queued_decodes.py); dispatch, padding and resets are the same code. Mirrors
`vllm/v1/worker/gpu_model_runner.py`. Laws: tests/test_graph_runner.py.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

from nanoserve.compilation import CompileMode
from nanoserve.execution import QUEUED
from nanoserve.graphs import Dispatcher, GraphKey, GraphMode, default_sizes, given_sizes, supported
from nanoserve.input_batch import HostInputs
from nanoserve.kv_cache import KVCache
from nanoserve.native import reason_not_to_load
from nanoserve.runner import EagerRunner
from nanoserve.static_inputs import StaticActivations, StaticInputs, is_whole, keep

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve.config import EngineConfig
    from nanoserve.model import Flow
    from nanoserve.queued_decodes import QueuedDecodes
    from nanoserve.sampler import Sampled

Replay = Callable[[HostInputs, "Tensor | None"], "Tensor"]  # scores, from a step and what the one before sampled
NO_GRAPHS = Dispatcher(GraphMode.NONE, (), 0)
PROVISIONAL_BLOCKS = 2**31  # a pool that no limit of a config is too large for


class GraphRunner(EagerRunner):
    """Captures when the engine is built, the largest size first, all in one memory pool; never afterwards."""

    captures_graphs: ClassVar[bool] = True
    static_inputs: ClassVar[type[StaticInputs]] = StaticInputs

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        asked = GraphMode(config.graph_mode) if config.graph_mode else self._platform.default_graph_mode
        self._config = config
        self._mode = supported(asked, self._platform.graph_support(self._attention.backend))
        self._graphs: dict[GraphKey, Replay] = {}
        self._ends: dict[int, Callable[[], None]] = {}
        self._replays: dict[GraphKey, Callable[[], None]] = {}  # of whole passes
        self._decodes: QueuedDecodes | None = None
        self._serves = False
        self.dispatcher = NO_GRAPHS

    def _reserved_bytes(self) -> int:
        """What graphs hold: they are captured once with hardly any cache, and dropped."""
        config = replace(self._config, num_blocks=None, watermark=0.0)
        config = config.resolve(model_len=self.model_len, pool_blocks=PROVISIONAL_BLOCKS, device=self.device)
        least = replace(config, num_blocks=2, num_swap_blocks=min(config.num_swap_blocks, 1))
        self._attention.cache = KVCache.build(least, self.model_config, self.torch_dtype, self._device)
        self._capture_all(config)
        self.execution.graph_bytes = self._graph_bytes
        self._drop_graphs()
        return super()._reserved_bytes() + self.execution.graph_bytes

    def allocate(self, config: EngineConfig) -> None:
        super().allocate(config)
        start_s = time.perf_counter()
        self._capture_all(config)
        self.execution.capture_s = time.perf_counter() - start_s
        self.execution.graph_bytes = self.execution.graph_bytes or self._graph_bytes
        self._compile_now(config)
        if config.async_scheduling and self._platform.spares_a_core(self.execution.num_threads):
            self._queue_decodes()
        self._serves = True

    def _queue_decodes(self) -> None:
        """What one step ahead is on a device that works on its own, for the steps that can be queued here."""
        from nanoserve.cpu_graphs import Recording
        from nanoserve.queued_decodes import QueuedDecodes

        decodes = {key: replay for key, replay in self._replays.items() if key.is_uniform}
        recordings = {key: replay for key, replay in decodes.items() if isinstance(replay, Recording)}
        if not recordings or reason_not_to_load("stream"):
            return
        try:
            self._decodes = QueuedDecodes(self._static, self._activations.logits_SV, recordings)
        except OSError:  # no thread to be had
            return
        weakref.finalize(self, self._decodes.stream.close)  # before anything that its work reads is let go of
        self.execution.stream = QUEUED

    def _capture_all(self, config: EngineConfig) -> None:
        """In inference mode, as the steps are run: compiled code tells its tensors from others."""
        import torch

        assert not self._serves, "graphs are captured when the engine is built, never while it serves"
        sizes = default_sizes(config.max_num_seqs, config.budget)
        if config.graph_sizes is not None:
            sizes = given_sizes(config.graph_sizes, config.budget)
        self.dispatcher = dispatcher = Dispatcher(self._mode, sizes, config.max_num_seqs)
        self._graph_of = cache(dispatcher.dispatch)  # most steps ask what the one before asked
        self._capture = self._platform.graph_pool(is_compiled=self._compile_mode is not CompileMode.NONE)
        with torch.inference_mode():
            self._make_static(config)
            self._graphs = {key: self._whole(key) if is_whole(key) else self._pieces(key) for key in dispatcher.keys}
            if not all(map(is_whole, dispatcher.keys)):
                sizes = reversed(dispatcher.sampling_sizes)
                self._ends = {size: self._capture(partial(self._end, size)) for size in sizes}
        self.execution.graph_mode = str(self._mode)
        self.execution.graph_kind = self._capture.kind
        self.execution.graph_sizes = list(dispatcher.sizes)

    def _make_static(self, config: EngineConfig) -> None:
        num_tokens = max(self.dispatcher.sizes, default=0)
        whole = [key for key in self.dispatcher.keys if is_whole(key)]
        try:
            self._static = self.static_inputs(
                num_tokens=num_tokens,
                num_rows=max((key.size if key.is_uniform else config.max_num_seqs for key in whole), default=0),
                num_blocks=-(-config.model_len // config.block_size),
                device=self._device,
            )
            self._activations = StaticActivations(
                self.model_config,
                num_tokens=num_tokens,
                num_sampling=max(self.dispatcher.sampling_sizes, default=0),
                dtype=self.torch_dtype,
                device=self._device,
            )
        except RuntimeError as error:  # torch has no narrower one for a CPU
            raise ValueError(
                f"graphs of up to {num_tokens} tokens and max_num_seqs={config.max_num_seqs} rows need more memory "
                f"than {self._device.type} has; lower graph_sizes or max_num_seqs, or use graph_mode='none'."
            ) from error

    def _warm_up(self, inputs: HostInputs) -> None:
        super()._warm_up(inputs)
        for key in {self.dispatcher.dispatch(inputs.num_tokens, is_uniform) for is_uniform in (True, False)}:
            if key is not None:
                self._graphs[key](inputs, None)
        if self._ends:  # of which that step has none: nobody samples
            num_sampling = min(inputs.num_tokens, max(self._ends))
            self._ends[self.dispatcher.sampling_size(num_sampling)]()

    @property
    def _graph_bytes(self) -> int:
        return self._static.num_bytes + self._activations.num_bytes + self._capture.num_bytes

    def _drop_graphs(self) -> None:
        self._graphs.clear()
        self._replays.clear()
        self._ends.clear()
        self.dispatcher = NO_GRAPHS
        del self._static, self._activations, self._capture
        self._attention.cache = None
        self._platform.release_memory()

    def _whole(self, key: GraphKey) -> Replay:
        """The pass with its attention calls as one graph, up to the scores where every token may sample."""
        static, size = self._static, key.size
        batch = static.batch(key)
        ids_T, positions_T, _ = static.tokens(size)
        hidden_TE, logits_SV = self._activations.hidden_TE[:size], self._activations.logits_SV[:size]

        def run() -> None:
            self._attention.batch, self._attention.newest = batch, None
            states_TE = self.model(ids_T, positions_T, self._attend)
            if key.is_uniform:
                logits_SV.copy_(self.model.logits(states_TE))
            else:
                hidden_TE.copy_(states_TE)

        self._replays[key] = replay = self._capture(run)

        def replay_step(inputs: HostInputs, sampled_ids_S: Tensor | None) -> Tensor:
            static.fill_tokens(inputs, size)
            static.fill_rows(inputs, key, batch)
            static.send()
            inputs.take_in_flight(ids_T, sampled_ids_S)
            replay()
            return inputs.of_sampling(logits_SV) if key.is_uniform else self.model.logits(inputs.of_sampling(hidden_TE))

        return replay_step

    def _pieces(self, key: GraphKey) -> Replay:
        """Everything between the attention calls as a graph each; attention runs as it is, on the step's own rows. What
        comes after the last of these calls is replayed for as many tokens as sample."""
        static, size, model = self._static, key.size, self.model
        pieces, layers, last = model.pieces, model.layers, len(model.layers) - 1
        ids_T, positions_T, slots_T = static.tokens(size)
        flow, attended_THD = self._activations.view(size), self._activations.attended_THD[:size]
        attention = self._attention

        def first() -> None:
            keep(flow, pieces.first(ids_T, positions_T))

        def cross(layer: int) -> None:
            keep(flow, pieces.cross(layers[layer], layers[layer + 1], attended_THD, flow, model.ops))

        enter, *rest = [self._capture(run) for run in (first, *(partial(cross, i) for i in range(last)))]

        def replay_step(inputs: HostInputs, sampled_ids_S: Tensor | None) -> Tensor:
            static.fill_tokens(inputs, size)
            static.send()
            own = inputs.to(ids_T.device)
            attention.batch, attention.newest = replace(own.attention, slot_mapping_T=slots_T), own.newest
            inputs.take_in_flight(ids_T, sampled_ids_S)
            enter()
            for layer, leave in enumerate(rest):
                attended_THD.copy_(attention(layer, *flow.qkv))
                leave()
            return self._replay_end(flow, inputs, own.sampling_index_S)

        return replay_step

    def _end(self, size: int) -> None:
        """From what the last attention call left to scores, of the first tokens."""
        flow, attended_THD = self._activations.view(size), self._activations.attended_THD[:size]
        hidden_SE = self.model.pieces.last(attended_THD, flow.residual_TE)
        self._activations.logits_SV[:size].copy_(self.model.logits(hidden_SE))

    def _replay_end(self, flow: Flow, inputs: HostInputs, index_S: Tensor) -> Tensor:
        """The last attention call, and what comes after it, of the tokens that sample: these move to the front."""
        q_THD, residual_TE = flow.q_THD, flow.residual_TE
        if not inputs.all_sample:
            q_THD, residual_TE = q_THD[index_S], residual_TE[index_S]
        attended_THD = self._attention(len(self.model.layers) - 1, q_THD, flow.k_TKD, flow.v_TKD)
        if not (num_sampling := len(index_S)):
            return residual_TE
        self._activations.attended_THD[: len(q_THD)].copy_(attended_THD)
        self._activations.flow.residual_TE[: len(q_THD)].copy_(residual_TE)
        self._ends[self.dispatcher.sampling_size(num_sampling)]()
        return self._activations.logits_SV[:num_sampling]

    @property
    def cache(self) -> KVCache:
        """As the steps that were launched leave it."""
        self._drain()
        return super().cache

    def _drain(self) -> None:
        """Until the stream is done: this thread works on the same memory."""
        if self._decodes is not None:
            self._decodes.stream.synchronize()

    def _run(
        self,
        copies: Sequence[tuple[int, int]],
        inputs: HostInputs | None,
        key: GraphKey | None,
        to_score: Sequence[Any],
    ) -> Sampled | None:
        if self._decodes is None or copies or inputs is None or key is None or not self._decodes.takes(inputs, key):
            self._drain()
            return super()._run(copies, inputs, key, to_score)
        sampled = self._decodes.launch(inputs, key, self._sampled_ids_S)
        self._sampled_ids_S = sampled.ids_S
        return sampled

    def _dispatch(self, inputs: HostInputs) -> GraphKey | None:
        return self._graph_of(inputs.num_tokens, inputs.is_uniform_decode)

    def _forward(self, inputs: HostInputs, key: GraphKey | None, to_score: Sequence[Any] = ()) -> Tensor:
        if key is None:
            return super()._forward(inputs, key, to_score)
        return self._graphs[key](inputs, self._sampled_ids_S)

    def close(self) -> None:
        if self._decodes is not None:
            self._decodes.stream.close()
        self._decodes = None
        super().close()
        self._graphs.clear()
        self._replays.clear()
        self._ends.clear()
