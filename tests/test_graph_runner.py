"""Laws of captured work: a step that is padded and replayed gives what it gives as it is, whatever ran before it on the
same memory. Dispatch, padding and static memory are those of a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_runner import (
    Driver,
    build,
    check_text,
    model_dir,  # noqa: F401  (a fixture)
    prompt_of,
    resume_with_other_blocks,
    shared_blocks_in_one_step,
)
from torch import Tensor

from nanoserve import cpu_graphs, platforms
from nanoserve.attention import AttentionBatch, TorchAttention
from nanoserve.config import EngineConfig
from nanoserve.cpu_graphs import CpuGraphPool
from nanoserve.graph_runner import GraphRunner
from nanoserve.graphs import GraphKey, GraphMode
from nanoserve.input_batch import HostInputs
from nanoserve.kv_cache import KVCache
from nanoserve.ops import TritonOps
from nanoserve.static_inputs import StaticInputs
from nanoserve.triton_attention import TritonAttention

SIZES = (1, 2, 4, 8, 16, 24)
CAPTURING = [mode for mode in GraphMode if mode is not GraphMode.NONE]


def build_graphs(model: str, cls: type[GraphRunner] = GraphRunner, **fields: Any) -> GraphRunner:
    fields = {"graph_sizes": SIZES, "max_num_seqs": 8, "max_num_batched_tokens": 256, "block_size": 4, **fields}
    runner = build(model, cls, runner=cls, **fields)
    assert isinstance(runner, GraphRunner)
    return runner


def mixed_life(driver: Driver) -> None:
    """Batches shrink, grow, change kind and reuse each other's blocks; every text stays the reference's."""
    for i, length in enumerate((5, 11, 3, 7)):
        driver.add(f"r{i}", prompt_of(length, i))
    driver.step({f"r{i}": length for i, length in enumerate((5, 11, 3))})  # 19 tokens in 24
    driver.step({"r0": 1, "r1": 1, "r2": 1})  # a decode of 3 in 4
    driver.step({"r0": 1, "r3": 4, "r1": 1})  # mixed, 6 in 8
    driver.step({"r3": 3, "r2": 1})
    driver.step({f"r{i}": 1 for i in range(4)})
    driver.drop("r1")  # its blocks hold NaN from here on, and go to others
    driver.step({"r0": 1, "r2": 1, "r3": 1}, preempted=["r1"])
    driver.step({"r1": driver.behind("r1"), "r0": 1, "r2": 1})
    driver.add("long", prompt_of(40, 9))
    driver.step({"long": 40, "r0": 1, "r1": 1})  # more than any graph holds
    driver.step({"long": 1})
    for name in ("r0", "r1", "r2", "r3", "long"):
        driver.finish(name, 6)
        check_text(driver, name)


@pytest.mark.parametrize("mode", CAPTURING)
@pytest.mark.parametrize("law", [mixed_life, resume_with_other_blocks, shared_blocks_in_one_step])
def test_every_replayed_step_gives_the_text_of_one_pass(model_dir, law, mode):  # noqa: F811
    law(Driver(build_graphs(model_dir, graph_mode=mode)))


@pytest.mark.parametrize("mode", ["full", "full_and_piecewise"])
def test_every_kernel_of_ours_serves_a_whole_model(model_dir, mode):  # noqa: F811
    """In Triton's interpreter: attention and all element-wise operations, captured and as they are."""
    kernels = {"attention": TritonAttention, "ops": TritonOps}
    driver = Driver(build_graphs(model_dir, graph_mode=mode, graph_sizes=(2, 4), max_num_seqs=2, **kernels))
    driver.add("a", prompt_of(6))
    driver.add("b", prompt_of(3, 1))
    driver.step({"a": 6})
    driver.step({"a": 1, "b": 2})
    driver.step({"b": 1})
    driver.step({"a": 1, "b": 1})
    for name in "ab":
        driver.finish(name, 3)
        check_text(driver, name)


def test_every_step_says_which_graph_it_replayed(model_dir):  # noqa: F811
    driver = Driver(build_graphs(model_dir))
    driver.add("a", prompt_of(11))
    driver.add("b", prompt_of(3))
    driver.add("c", prompt_of(200))
    costs = [driver.step(tokens).cost for tokens in ({"a": 11, "b": 3}, {"a": 1, "b": 1}, {"c": 200})]
    assert [(cost.graph, cost.num_padding_tokens) for cost in costs] == [
        ("piecewise 16", 2),
        ("full decode 2", 0),
        ("", 0),
    ]
    assert all(cost.host_s > 0 for cost in costs)


def test_every_graph_is_captured_before_the_first_step(model_dir):  # noqa: F811
    runner = build_graphs(model_dir)
    assert runner.execution.graph_sizes == list(SIZES)
    assert runner.execution.graph_mode == "full_and_piecewise"
    assert runner.execution.capture_s > 0
    config = EngineConfig(model=model_dir, runner=GraphRunner, max_model_len="auto", num_blocks=9)
    with pytest.raises(AssertionError, match="never while it serves"):
        runner._capture_all(config.resolve(model_len=256, pool_blocks=9, device="cpu"))


def test_every_graph_is_paid_for_before_the_pool(model_dir):  # noqa: F811
    """The memory of graphs is known, and taken off, when the pool is sized."""
    seen = []

    class Spying(GraphRunner):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            platform = self._platform

            class Asked(type(platform)):
                def kv_cache_bytes(self, reserved_bytes: int = 0) -> int:
                    seen.append(reserved_bytes)
                    return platform.kv_cache_bytes(reserved_bytes)

            self._platform = Asked()

    runner = build_graphs(model_dir, Spying)
    assert seen == [runner.execution.graph_bytes] == [runner._graph_bytes]
    hidden_states = 24 * 32 * 4
    assert hidden_states < runner._static.num_bytes + runner._activations.num_bytes <= runner._graph_bytes < 2**20


def test_every_graph_costs_what_the_engine_s_own_hold(model_dir, monkeypatch):  # noqa: F811
    check_graph_bytes(model_dir, monkeypatch)


def check_graph_bytes(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, whoever else allocates meanwhile: as counted before there is a pool, and with it."""
    alone = build_graphs(model)
    free = itertools.count(2**36, -OTHERS)
    monkeypatch.setattr(platforms, "available_memory", lambda: next(free))
    runner = build_graphs(model)
    counted, held = runner.execution.graph_bytes, runner._graph_bytes
    assert counted == held == alone._graph_bytes, f"{counted} bytes counted, {held} held, {alone._graph_bytes} alone"


OTHERS = 300 * 2**20  # bytes that they take whenever somebody looks


class MeasuresTheMachine(CpuGraphPool):
    def __init__(self, *, is_compiled: bool = False) -> None:
        super().__init__(is_compiled=is_compiled)
        self._before = platforms.available_memory()

    @property
    def num_bytes(self) -> int:
        return self._before - platforms.available_memory()


def test_graphs_that_are_measured_by_the_whole_machine_are_seen(model_dir, monkeypatch):  # noqa: F811
    monkeypatch.setattr(cpu_graphs, "CpuGraphPool", MeasuresTheMachine)
    with pytest.raises(AssertionError, match="bytes counted"):
        check_graph_bytes(model_dir, monkeypatch)


def test_every_padding_row_and_token_is_inert():
    """After a large step, a small one leaves nothing of it: no slot, no key length, no block."""
    static = StaticInputs(num_tokens=8, num_rows=4, num_blocks=3, device=torch.device("cpu"))
    key = GraphKey(GraphMode.FULL, 4, is_uniform=True)
    batch = static.batch(key)
    static.fill_tokens(step_of(4), 4)
    static.fill_rows(step_of(4), key, batch)
    static.fill_tokens(step_of(2), 4)
    static.fill_rows(step_of(2), key, batch)
    static.send()
    assert [tensor.tolist() for tensor in static.tokens(4)] == [[7, 7, 0, 0], [8, 9, 0, 0], [40, 41, -1, -1]]
    assert batch.seq_lens_R.tolist() == batch.seq_lens == [9, 9, 0, 0]
    assert batch.block_table_RB[2:].eq(0).all()
    assert batch.query_start_loc_R1.tolist() == batch.query_starts == [0, 1, 2, 3, 4]
    mixed = GraphKey(GraphMode.FULL, 8)
    batch = static.batch(mixed)
    static.fill_rows(step_of(2), mixed, batch)
    assert batch.query_start_loc_R1.tolist() == batch.query_starts == [0, 1, 2, 2, 2]
    assert batch.seq_lens_R.tolist() == [9, 9, 0, 0]


def step_of(num_rows: int) -> HostInputs:
    count = np.arange(num_rows)
    return HostInputs(
        request_ids=[str(i) for i in range(num_rows)],
        input_ids_T=np.full(num_rows, 7),
        positions_T=count + 8,
        slot_mapping_T=40 + count,
        query_start_loc_R1=np.arange(num_rows + 1),
        seq_lens_R=np.full(num_rows, 9),
        block_table_RB=np.full((num_rows, 2), 5),
        sampling_ids=[],
        sampling_index_S=count[:0],
        in_flight_T=count[:0],
        in_flight_S=count[:0],
        sampling=None,
        receipt=None,
    )


# Planted bugs


def plant(name: str, wrapped: Callable[..., None]) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(patch: pytest.MonkeyPatch) -> None:
        right = getattr(StaticInputs, name)
        patch.setattr(StaticInputs, name, lambda self, *args: wrapped(right, self, *args))

    return apply


def keeps_stale_slots(right: Callable[..., None], static: StaticInputs, inputs: HostInputs, size: int) -> None:
    before = static.slot_mapping_T.copy()
    right(static, inputs, size)
    used = len(inputs.input_ids_T)
    static.slot_mapping_T[used:size] = before[used:size]


def keeps_stale_lengths(right: Callable[..., None], static: StaticInputs, inputs: HostInputs, *args: Any) -> None:
    before = static.seq_lens_R.copy()
    right(static, inputs, *args)
    used = len(inputs.seq_lens_R)
    static.seq_lens_R[used:] = before[used:]


def pads_with_a_live_slot(right: Callable[..., None], static: StaticInputs, inputs: HostInputs, size: int) -> None:
    right(static, inputs, size)
    static.slot_mapping_T[len(inputs.input_ids_T) : size] = inputs.slot_mapping_T[0]


class ReadsTheTensors(TorchAttention):
    """As a kernel does: what is on the device decides, not the lists of the host."""

    def attend(self, q_THD: Tensor, kv_cache: KVCache, layer: int, batch: AttentionBatch) -> Tensor:
        batch.query_starts[:], batch.seq_lens[:] = batch.query_start_loc_R1.tolist(), batch.seq_lens_R.tolist()
        return super().attend(q_THD, kv_cache, layer, batch)


@pytest.mark.parametrize("mode", CAPTURING)
def test_every_mode_can_read_its_batch_from_the_device(model_dir, mode):  # noqa: F811
    mixed_life(Driver(build_graphs(model_dir, graph_mode=mode, attention=ReadsTheTensors)))


@pytest.mark.parametrize(
    "bug",
    [plant("fill_tokens", keeps_stale_slots), plant("fill_tokens", pads_with_a_live_slot)],
    ids=["stale tail", "padding touches a live block"],
)
@pytest.mark.parametrize("mode", CAPTURING)
def test_every_planted_bug_in_padding_is_seen(model_dir, monkeypatch, bug, mode):  # noqa: F811
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=r"wrong tokens|scores are off"):
        mixed_life(Driver(build_graphs(model_dir, graph_mode=mode)))


def test_a_stale_key_length_is_seen(monkeypatch):
    plant("fill_rows", keeps_stale_lengths)(monkeypatch)
    with pytest.raises(AssertionError):
        test_every_padding_row_and_token_is_inert()
