"""Laws of a CPU's graphs: a recording does what the pass did, on whatever its static memory holds then, or is refused;
its memory is never two things at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_graph_runner import build_graphs, mixed_life
from test_runner import Driver, model_dir  # noqa: F401  (a fixture)
from torch import Tensor

from nanoserve import cpu_graphs
from nanoserve.attention import TorchAttention
from nanoserve.compilation import CompileMode
from nanoserve.cpu_graphs import CpuGraphPool, Memory, NotRecordable, Recording
from nanoserve.cpu_ops import CpuOps
from nanoserve.graphs import GraphMode
from nanoserve.native_calls import recorded_calls
from nanoserve.ops import TorchOps

EPS = 1e-6


def swiglu_of_a_norm(x_TE: Tensor, out_TI: Tensor) -> Callable[[], None]:
    """A pass on static memory, with a tensor in between."""
    ops, weight = CpuOps(), torch.linspace(0.5, 2, x_TE.shape[1])

    def run() -> None:
        out_TI.copy_(ops.silu_and_mul(ops.rms_norm(x_TE, weight, EPS)))

    return run


def check_replay(run: Callable[[], None], replay: Callable[[], None], given: Tensor, out: Tensor) -> None:
    for seed in range(3):
        given.copy_(torch.randn(given.shape, generator=torch.Generator().manual_seed(seed)))
        run()
        expected = out.clone()
        out.fill_(torch.nan)
        replay()
        assert torch.equal(out, expected), f"the replay of inputs {seed} is off by {(out - expected).abs().max()}"


def test_every_recording_does_the_work_again_on_what_its_memory_holds_then():
    x_TE, out_TI = torch.zeros(5, 32), torch.zeros(5, 16)
    run, pool = swiglu_of_a_norm(x_TE, out_TI), CpuGraphPool()
    replay = pool(run)
    assert isinstance(replay, Recording)
    assert [f.name for f, _ in replay.calls] == ["rms_norm", "silu_and_mul", "move"]
    assert pool.kind == "recorded calls"
    check_replay(run, replay, x_TE, out_TI)


def test_every_recording_outlives_what_the_pass_was_given():
    """Nothing but the recording holds the memory between its calls."""
    x_TE, out_TI = torch.zeros(5, 32), torch.zeros(5, 16)
    run = swiglu_of_a_norm(x_TE, out_TI)
    replays = [CpuGraphPool()(run) for _ in range(20)]
    junk = [torch.full((size,), torch.nan) for size in range(1, 400)]  # takes what is free
    for replay in replays:
        check_replay(run, replay, x_TE, out_TI)
    assert all(tensor.isnan().all() for tensor in junk)


def hidden_product(x: Tensor, out: Tensor) -> None:
    out.copy_(x @ torch.eye(x.shape[1]))


def hidden_sum(x: Tensor, out: Tensor) -> None:
    out.copy_(x)
    out += 1


def copy_of_another_dtype(x: Tensor, out: Tensor) -> None:
    out.copy_(x.double())


def copy_of_columns(x: Tensor, out: Tensor) -> None:
    out.copy_(x.t().contiguous().t())


@pytest.mark.parametrize(
    ("compute", "name"),
    [(hidden_product, "eye"), (hidden_sum, "add_"), (copy_of_another_dtype, "_to_copy"), (copy_of_columns, "clone")],
)
def test_everything_that_a_replay_would_leave_out_ends_the_recording(compute, name):
    x, out, pool = torch.zeros(4, 4), torch.zeros(4, 4), CpuGraphPool()

    def run() -> None:
        compute(x, out)

    assert pool(run) is run
    assert pool.kind == f"the same calls again, as torch's {name} cannot be recorded"
    check_replay(run, run, x, out)


def test_an_operation_that_is_let_through_is_seen(monkeypatch):
    class LetsSumsThrough(cpu_graphs.OnlyRecordable):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add_.Tensor:
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr(cpu_graphs, "OnlyRecordable", LetsSumsThrough)
    x, out = torch.zeros(4, 4), torch.zeros(4, 4)

    def run() -> None:
        hidden_sum(x, out)

    replay = CpuGraphPool()(run)
    assert replay is not run
    with pytest.raises(AssertionError, match="the replay of inputs 0 is off by 1"):
        check_replay(run, replay, x, out)


def test_every_row_that_is_moved_looked_up_or_cleared_is_recorded():
    table, ids, wide, out = torch.randn(9, 6), torch.tensor([3, 0, 8]), torch.zeros(3, 20), torch.ones(3, 2, 6)

    def run() -> None:
        wide[:, 4:10].copy_(torch.nn.functional.embedding(ids, table))
        out[:, 0].copy_(wide[:, 4:10])
        out[:, 1].copy_(table.new_zeros(3, 6))

    replay = CpuGraphPool()(run)
    assert isinstance(replay, Recording)
    ids.copy_(torch.tensor([8, 8, 1]))
    out.fill_(torch.nan)
    replay()
    assert torch.equal(out, torch.stack((table[[8, 8, 1]], torch.zeros(3, 6)), dim=1))


def test_every_thread_records_its_own_calls_only():
    ops, x, weight = CpuOps(), torch.ones(2, 8), torch.ones(8)
    with recorded_calls() as calls:
        thread = threading.Thread(target=ops.rms_norm, args=(x, weight, EPS))
        thread.start()
        thread.join(60)
        assert not calls
        ops.rms_norm(x, weight, EPS)
    ops.rms_norm(x, weight, EPS)
    assert len(calls) == 1


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 3)), min_size=1, max_size=30))
def test_no_memory_is_lent_twice_at_once_and_what_is_free_is_used_again(steps):
    check_memory(steps)


def check_memory(steps: list[tuple[int, int]]) -> None:
    """Each step asks for a size and lets go of one of those that are held."""
    memory, held = Memory(), []
    for i, (size, place) in enumerate(steps):
        held.append((memory.like(torch.empty(size)).fill_(i), i))
        if place < len(held):
            del held[place]
        assert all(bool((tensor == i).all()) for tensor, i in held), "lent twice"
    largest = 4 * max(size for size, _ in steps)
    assert memory.num_bytes <= largest * len(steps)
    held.clear()
    before = memory.num_bytes
    memory.like(torch.empty(largest // 4))
    assert memory.num_bytes == before


def test_memory_that_is_lent_while_a_view_lives_is_seen(monkeypatch):
    monkeypatch.setattr(Memory, "_take_back", lambda self: self._free.extend(buffer for buffer, _ in self._lent))
    with pytest.raises(AssertionError, match="lent twice"):
        check_memory([(1, 1), (1, 1)])


def test_every_graph_fits_in_the_memory_of_the_largest():
    pool = CpuGraphPool()
    for rows in (64, 8, 3, 1):
        pool(swiglu_of_a_norm(torch.zeros(rows, 32), torch.zeros(rows, 16)))
        assert pool.num_bytes <= 64 * (32 + 16) * 4


MODES = [GraphMode.PIECEWISE, GraphMode.FULL, GraphMode.FULL_AND_PIECEWISE]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "recorded calls"),
        ({"ops": TorchOps}, "the same calls again, as torch's"),
        ({"attention": TorchAttention}, None),
        ({"dtype": "bfloat16"}, "the same calls again, as torch's"),
    ],
    ids=["all ours", "torch's operations", "torch's attention", "16 bits"],
)
def test_every_engine_says_what_its_replays_are(model_dir, mode, fields, kind):  # noqa: F811
    runner = build_graphs(model_dir, graph_mode=mode, **fields)
    if kind is None:
        parts = {GraphMode.PIECEWISE: "recorded calls", GraphMode.FULL: "the same calls again, as torch's"}
        kind = parts.get(mode, "recorded calls; some the same calls again, as torch's")
    assert runner.execution.graph_kind.startswith(kind)
    if "dtype" not in fields:
        mixed_life(Driver(runner))


def test_every_pass_without_a_compiler_is_run_again(monkeypatch):
    monkeypatch.setattr(cpu_graphs, "reason_not_to_load", lambda name: "none of g++ is on PATH")
    pool, run = CpuGraphPool(), swiglu_of_a_norm(torch.zeros(2, 8), torch.zeros(2, 4))
    assert pool(run) is run
    assert pool.kind == "the same calls again, as nothing can be recorded without a compiler (none of g++ is on PATH)"


def test_compiled_code_is_run_again(model_dir):  # noqa: F811
    runner = build_graphs(model_dir, compile=CompileMode.LAYERS, graph_sizes=(2,), max_num_seqs=2)
    assert runner.execution.graph_kind == "the same calls again, as torch.compile's code cannot be recorded"


def test_a_recording_within_a_recording_is_refused():
    with recorded_calls(), pytest.raises(AssertionError, match="one recording at a time"), recorded_calls():
        pass
    with pytest.raises(NotRecordable):
        Recording(lambda: torch.ones(2).add_(1), Memory())  # type: ignore[arg-type]
    Recording(swiglu_of_a_norm(torch.zeros(2, 8), torch.zeros(2, 4)), Memory())  # nothing is left of it
