"""Laws of a CPU's graphs: a recording does what the pass did, on whatever its static memory holds then, or is refused;
its memory is never two things at once, and what it has the address of is kept."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_graph_runner import build_graphs, mixed_life
from test_runner import Driver, model_dir  # noqa: F401  (a fixture)
from torch import Tensor
from torch.nn.functional import embedding

from nanoserve import compilation, cpu_graphs, native_calls
from nanoserve.attention import TorchAttention
from nanoserve.compilation import CompileMode
from nanoserve.cpu_graphs import CpuGraphPool, Memory, Move, NotRecordable, Recording
from nanoserve.cpu_ops import CpuOps
from nanoserve.graph_runner import GraphRunner
from nanoserve.graphs import GraphMode
from nanoserve.native_calls import POINTER, Function, recorded_calls
from nanoserve.ops import TorchOps

pytestmark = pytest.mark.needs_cxx

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


def test_no_recording_computes():
    check_nothing_is_computed()


def check_nothing_is_computed() -> None:
    """As in the capture of a CUDA graph: before the first replay, memory holds what it held."""
    x_TE, out_TI = torch.ones(5, 32), torch.full((5, 16), torch.nan)
    replay = CpuGraphPool()(swiglu_of_a_norm(x_TE, out_TI))
    assert out_TI.isnan().all(), "a recording has written results"
    replay()
    assert out_TI.isfinite().all()


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


IDS = torch.tensor([3, 0, 0, 2])
IDS_OF_32_BITS = IDS.int()
IDS_APART = IDS.repeat_interleave(2)[::2]
TABLE_OF_16_BITS = torch.ones(4, 4, dtype=torch.bfloat16)


def rows_by_ids_of_32_bits(x: Tensor, out: Tensor) -> None:
    out.copy_(embedding(IDS_OF_32_BITS, x))


def rows_by_a_matrix_of_ids(x: Tensor, out: Tensor) -> None:
    out.view(2, 2, 4).copy_(embedding(IDS.view(2, 2), x))


def rows_of_16_bits(x: Tensor, out: Tensor) -> None:
    out.copy_(embedding(IDS, TABLE_OF_16_BITS))


def rows_by_ids_apart(x: Tensor, out: Tensor) -> None:
    out.copy_(embedding(IDS_APART, x))


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (hidden_product, "eye"),
        (hidden_sum, "add_"),
        (copy_of_another_dtype, "_to_copy"),
        (copy_of_columns, "clone"),
        (rows_by_ids_of_32_bits, "embedding"),
        (rows_by_a_matrix_of_ids, "embedding"),
        (rows_of_16_bits, "embedding"),
        (rows_by_ids_apart, "embedding"),
    ],
)
def test_everything_that_a_replay_would_leave_out_ends_the_recording(compute, name):
    x, out, pool = torch.zeros(4, 4), torch.zeros(4, 4), CpuGraphPool()

    def run() -> None:
        compute(x, out)

    assert pool(run) is run
    assert pool.kind == f"the same calls again, as torch's {name} cannot be recorded"
    check_replay(run, run, x, out)


def test_every_pass_of_no_tokens_is_run_again():
    out_TI = torch.ones(0, 16)
    run, pool = swiglu_of_a_norm(torch.zeros(0, 32), out_TI), CpuGraphPool()
    assert pool(run) is run
    run()


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
        wide[:, 4:10].copy_(embedding(ids, table))
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


class ForgetsThatItLends(Memory):
    """What it lends stays free."""

    def like(self, tensor: Tensor) -> Tensor:
        lent = super().like(tensor)
        self._free = list(self.buffers)
        return lent


def test_memory_that_is_lent_twice_is_seen(monkeypatch):
    monkeypatch.setitem(globals(), "Memory", ForgetsThatItLends)
    with pytest.raises(AssertionError, match="lent twice"):
        check_memory([(1, 1), (1, 1)])


def test_every_graph_fits_in_the_memory_of_the_largest():
    pool = CpuGraphPool()
    for rows in (64, 8, 3, 1):
        pool(swiglu_of_a_norm(torch.zeros(rows, 32), torch.zeros(rows, 16)))
        assert pool.num_bytes <= 64 * (32 + 16) * 4


# Addresses: nothing is replayed here, for what follows a wrong one is a crash


def test_every_recorded_call_has_arguments_of_its_own():
    check_arguments()


def check_arguments() -> None:
    """Callers change a structure for their next call, as every product of a model does."""
    move, given = Function("graph", "move"), Move(source=8, target=16, rows=1, size=4)
    with recorded_calls() as calls:
        move(given)
        given.size = 0
        move(given)
    sizes = [arguments.size for _, arguments in calls if isinstance(arguments, Move)]
    assert sizes == [4, 0], f"a caller changed what was recorded, to sizes {sizes}"


def check_addresses(recordings: Iterable[Recording], static: Iterable[Tensor]) -> None:
    """What is replayed is what a recording keeps, and reads and writes its pool's memory, or what the pass was given,
    alone."""
    given = [(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) for tensor in static]
    for recording in recordings:
        replayed = [call.arguments for call in recording._calls]
        assert replayed == [ctypes.addressof(arguments) for _, arguments in recording.calls], "not its own arguments"
        memory = [*given, *((buffer.ctypes.data, buffer.nbytes) for buffer in recording.memory.buffers)]
        for function, arguments in recording.calls:
            for name, address in pointers(arguments):
                owners = [start for start, size in memory if start <= address < start + size]
                assert owners, f"{name} of {function.name} is nobody's memory"


def pointers(arguments: ctypes.Structure) -> Iterator[tuple[str, int]]:
    for name, kind, *_ in arguments._fields_:
        value = getattr(arguments, name)
        if isinstance(value, ctypes.Structure):
            yield from pointers(value)
        elif kind is POINTER and value is not None:
            yield name, value


class KeepsReplays(CpuGraphPool):
    def __init__(self, *, is_compiled: bool = False) -> None:
        super().__init__(is_compiled=is_compiled)
        self.replays: list[Callable[[], None]] = []

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.replays.append(super().__call__(run))
        return self.replays[-1]


def check_engine(monkeypatch: pytest.MonkeyPatch, model: str, mode: GraphMode, cls: type[GraphRunner]) -> None:
    monkeypatch.setattr(cpu_graphs, "CpuGraphPool", KeepsReplays)
    runner = build_graphs(model, cls, graph_mode=mode)
    assert isinstance(runner._capture, KeepsReplays)
    recordings = [replay for replay in runner._capture.replays if isinstance(replay, Recording)]
    assert len(recordings) == len(runner._capture.replays) > 0
    owners = runner.cache, runner._static, runner._activations, *runner.model.modules()
    check_addresses(recordings, [tensor for owner in owners for tensor in tensors_of(owner)])


def tensors_of(owner: object) -> Iterator[Tensor]:
    """Its attributes, and what is in its tuples and a module's registers."""
    for value in vars(owner).values():
        many = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
        yield from (each for each in many if isinstance(each, Tensor))


MODES = [GraphMode.PIECEWISE, GraphMode.FULL, GraphMode.FULL_AND_PIECEWISE]


@pytest.mark.parametrize("mode", MODES)
def test_every_address_in_an_engine_s_graphs_is_in_memory_that_it_keeps(model_dir, monkeypatch, mode):  # noqa: F811
    check_engine(monkeypatch, model_dir, mode, GraphRunner)


class AnotherCache(GraphRunner):
    """Captured before there was the cache that it serves with."""

    def allocate(self, config: Any) -> None:
        super().allocate(config)
        self.cache.blocks = torch.empty_like(self.cache.blocks)


def keeps_the_caller_s_structure(patch: pytest.MonkeyPatch) -> None:
    def call(self: Function, arguments: ctypes.Structure) -> None:
        assert native_calls._here.recorded is not None
        native_calls._here.recorded.append((self, arguments))

    patch.setattr(Function, "__call__", call)


def makes_the_calls_as_well(patch: pytest.MonkeyPatch) -> None:
    right = Function.__call__

    def call(self: Function, arguments: ctypes.Structure) -> None:
        right(self, arguments)
        if native_calls._here.recorded is not None:
            self._function(ctypes.addressof(arguments))

    patch.setattr(Function, "__call__", call)


def lends_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Memory, "like", lambda self, tensor: tensor)


def lets_go_of_the_arguments(patch: pytest.MonkeyPatch) -> None:
    class LetsGo(Recording):
        def __init__(self, run: Callable[[], None], memory: Memory) -> None:
            super().__init__(run, memory)
            self.calls = [(function, type(a).from_buffer_copy(a)) for function, a in self.calls]

    patch.setattr(cpu_graphs, "Recording", LetsGo)


@pytest.mark.parametrize(
    ("bug", "message"),
    [(lends_nothing, "is nobody's memory"), (lets_go_of_the_arguments, "not its own arguments")],
)
def test_every_planted_address_is_seen(model_dir, monkeypatch, bug, message):  # noqa: F811
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        check_engine(monkeypatch, model_dir, GraphMode.FULL_AND_PIECEWISE, GraphRunner)


def test_graphs_of_another_cache_are_seen(model_dir, monkeypatch):  # noqa: F811
    with pytest.raises(AssertionError, match="keys of store is nobody's memory"):
        check_engine(monkeypatch, model_dir, GraphMode.FULL, AnotherCache)


def test_a_recording_with_the_structures_of_its_callers_is_seen(monkeypatch):
    keeps_the_caller_s_structure(monkeypatch)
    with pytest.raises(AssertionError, match=r"changed what was recorded, to sizes \[0, 0\]"):
        check_arguments()


def test_a_recording_that_computes_is_seen(monkeypatch):
    makes_the_calls_as_well(monkeypatch)
    with pytest.raises(AssertionError, match="a recording has written results"):
        check_nothing_is_computed()


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


def test_every_engine_of_a_process_has_graphs_of_its_own(model_dir):  # noqa: F811
    """Built side by side; then one is closed and another one takes its place, while the others run."""
    with ThreadPoolExecutor(3) as threads:
        closed, *runners = threads.map(lambda seed: build_graphs(model_dir, seed=seed), range(3), timeout=60)
        lives = [threads.submit(mixed_life, Driver(runner)) for runner in runners]
        closed.close()
        mixed_life(Driver(build_graphs(model_dir)))
        for life in lives:
            life.result(60)


def test_every_pass_without_a_compiler_is_run_again(monkeypatch):
    monkeypatch.setattr(cpu_graphs, "reason_not_to_load", lambda name: "none of g++ is on PATH")
    pool, run = CpuGraphPool(), swiglu_of_a_norm(torch.zeros(2, 8), torch.zeros(2, 4))
    assert pool(run) is run
    assert pool.kind == "the same calls again, as nothing can be recorded without a compiler (none of g++ is on PATH)"


def test_compiled_code_is_run_again(model_dir, monkeypatch):  # noqa: F811
    """By what the engine was asked for: torch.compile itself is left out here, as it takes a quarter minute."""
    monkeypatch.setattr(compilation, "compile_model", lambda model, mode: None)
    runner = build_graphs(model_dir, compile=CompileMode.LAYERS, graph_sizes=(2,), max_num_seqs=2)
    assert runner.execution.graph_kind == "the same calls again, as torch.compile's code cannot be recorded"


def test_a_recording_within_a_recording_is_refused():
    with recorded_calls(), pytest.raises(AssertionError, match="one recording at a time"), recorded_calls():
        pass
    with pytest.raises(NotRecordable):
        Recording(lambda: torch.ones(2).add_(1), Memory())  # type: ignore[arg-type]
    Recording(swiglu_of_a_norm(torch.zeros(2, 8), torch.zeros(2, 4)), Memory())  # nothing is left of it
