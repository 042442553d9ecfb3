"""Laws of a CPU's stream: its work is done in order, while whoever submitted it goes on; and the tokens of steps that
are launched without a look at the ones before are those of a runner that waits for each."""

from __future__ import annotations

import ctypes
import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_graph_runner import build_graphs
from test_runner import model_dir  # noqa: F401  (a fixture)
from torch import Tensor

from nanoserve import platforms
from nanoserve.api.doctor import examine
from nanoserve.blocks import PrivateBlocks
from nanoserve.client import InProcessClient
from nanoserve.config import STAGES
from nanoserve.core import EngineCore
from nanoserve.cpu_graphs import Calls, Replay
from nanoserve.cpu_stream import CpuStream
from nanoserve.execution import QUEUED
from nanoserve.graph_runner import GraphRunner
from nanoserve.graphs import GraphMode
from nanoserve.input_batch import RebuiltBatch
from nanoserve.native import load
from nanoserve.native_calls import POINTER
from nanoserve.ops import TorchOps
from nanoserve.persistent_batch import PersistentBatch
from nanoserve.platforms import CpuPlatform, CudaPlatform
from nanoserve.queued_decodes import QueuedDecodes, Side
from nanoserve.request import EngineRequest, NewRequest, SamplingParams, StepPlan
from nanoserve.scheduler import PhaseSplitScheduler

pytestmark = pytest.mark.needs_cxx

GREEDY = SamplingParams(temperature=0, max_tokens=None)
LIMIT_S = 30.0  # of any wait: a failure


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "num_cpus", lambda: 2)


class Work(Replay):
    """A function of Python's, called by the stream's thread."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._function = ctypes.CFUNCTYPE(None, POINTER)(lambda _: run() and None)
        address = ctypes.cast(self._function, POINTER).value
        super().__init__([(SimpleNamespace(address=address), Calls())])  # type: ignore[list-item]


class Gate(Work):
    """Work that goes on until it is told to end, or has been slow enough."""

    def __init__(self, stream: CpuStream, slow_s: float = LIMIT_S) -> None:
        self.opened, self.is_over = threading.Event(), False
        super().__init__(lambda: self._hold(slow_s))
        stream.submit(self)

    def _hold(self, slow_s: float) -> None:
        self.opened.wait(slow_s)
        self.is_over = True


def stream_threads() -> set[str]:
    """Of this process: threads that take no signals at all, which Python's own do."""
    threads = Path("/proc/self/task")
    return {task.name for task in threads.iterdir() if _blocks_sigterm(task)}


def _blocks_sigterm(task: Path) -> bool:
    lines = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
    return bool(int(lines["SigBlk"], 16) >> 14 & 1)


# The stream


def test_every_work_is_done_in_order_while_the_caller_goes_on():
    stream, done = CpuStream(), []
    gate = Gate(stream)
    works = [Work(lambda i=i: done.append(i)) for i in range(10)]
    tickets = [stream.submit(work) for work in works]
    assert not gate.is_over, "somebody waited"
    assert not done
    gate.opened.set()
    tickets[4].synchronize()
    assert done[:5] == list(range(5))
    stream.synchronize()
    assert done == list(range(10))
    stream.close()


def test_more_work_than_the_queue_holds_waits_for_its_place():
    stream, done = CpuStream(), []
    works = [Work(lambda i=i: done.append(i)) for i in range(200)]
    for work in works:
        stream.submit(work)
    stream.close()
    assert done == list(range(200))


def test_no_wake_up_is_lost():
    """Gaps around the moment when either side stops looking and goes to sleep."""
    stream, done = CpuStream(), []
    work, gap = Work(lambda: done.append(time.sleep(gap))), 0.0
    for i in range(300):
        gap = i % 10 * 1e-4
        stream.submit(work).synchronize()
        assert len(done) == i + 1
        time.sleep(i % 7 * 1.5e-4)
    stream.close()


def test_every_close_waits_for_what_was_submitted_and_can_be_repeated():
    stream = CpuStream()
    gate = Gate(stream, slow_s=0.05)
    stream.close()
    assert gate.is_over
    stream.close()
    stream.synchronize()
    with pytest.raises(AssertionError, match="closed"):
        stream.submit(gate)


def test_every_thread_takes_no_signals_and_ends_with_its_stream():
    before = stream_threads()
    stream = CpuStream()
    stream.submit(Work(int)).synchronize()
    assert len(stream_threads() - before) == 1
    stream.close()
    assert stream_threads() == before


def test_every_work_is_waited_for_whose_ticket_an_interrupt_has_lost():
    stream = CpuStream()
    library, submit = stream._library, stream._library.submit

    def interrupted(*args: Any) -> int:
        submit(*args)
        raise KeyboardInterrupt

    stream._library = SimpleNamespace(submit=interrupted, wait_for_all=library.wait_for_all)
    gate = Gate.__new__(Gate)
    with pytest.raises(KeyboardInterrupt):
        gate.__init__(stream, slow_s=0.05)
    stream._library = library
    stream.synchronize()
    assert gate.is_over
    stream.close()


@pytest.mark.parametrize("end", ["close", "synchronize"])
def test_every_forked_process_ends_without_the_thread_that_it_has_not_got(end):
    stream = CpuStream()
    gate = Gate(stream)
    child = get_context("fork").Process(target=getattr(stream, end))
    child.start()
    child.join(LIMIT_S)
    assert child.exitcode == 0
    gate.opened.set()
    stream.close()


def test_an_engine_without_a_thread_to_be_had_has_no_queue(model_dir, monkeypatch):  # noqa: F811
    monkeypatch.setattr("nanoserve.cpu_stream.load", without_threads(load("stream")))
    runner = queueing(model_dir)
    assert runner._decodes is None
    assert QUEUED not in str(runner.execution)
    runner.close()


def without_threads(library: ctypes.CDLL) -> Callable[[str], Any]:
    functions = {name: getattr(library, name) for name in ("submit", "wait_for", "wait_for_all", "end_stream")}
    return lambda name: SimpleNamespace(make_stream=lambda: None, **functions)


# Decodes that are queued


class Plans:
    """Plans for texts that grow by a token a step, in blocks of 4: they ask for no token, so that nobody waits."""

    def __init__(self) -> None:
        self.all: list[StepPlan] = []
        self.blocks: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}
        self._free = list(range(1, 100))

    def step(
        self,
        names: str,
        new: Mapping[str, int] | None = None,
        params: SamplingParams = GREEDY,
        finished: Sequence[str] = (),
        **fields: Any,
    ) -> None:
        """A token of each of these, and prompts of so many tokens of the new ones."""
        for name in finished:
            self._free = self.blocks.pop(name) + self._free  # the next one gets them
        lengths = {**dict.fromkeys(names, 1), **(new or {})}
        grown = {name: self._grow(name, n) for name, n in lengths.items()}
        arrivals = [
            NewRequest(name, [7 * i % 60 + 1 for i in range(n)], n, grown.pop(name), 0, params, None)
            for name, n in (new or {}).items()
        ]
        blocks = {name: block_ids for name, block_ids in grown.items() if block_ids}
        number = len(self.all) + 1
        self.all.append(StepPlan(number, lengths, arrivals, blocks, finished=list(finished), **fields))

    def _grow(self, name: str, num_tokens: int) -> list[int]:
        self._lengths[name] = length = self._lengths.get(name, 0) + num_tokens
        held = self.blocks.setdefault(name, [])
        grown = [self._free.pop(0) for _ in range(-(-length // 4) - len(held))]
        held += grown
        return grown


def a_life(*, pauses: bool = False) -> list[StepPlan]:
    """Batches grow and shrink, are mixed and not, and blocks change hands. `pauses`: rows miss a few steps."""
    plans = Plans()
    plans.step("", {"a": 5, "b": 2, "c": 9})
    for names in ("abc", "abc", "abc", "bca", *(("ac", "ac", "abc") if pauses else ())):
        plans.step(names)
    plans.step("cab", {"d": 3})
    for names in ("dabc", "abcd", "dcba"):
        plans.step(names)
    plans.step("bd", finished="ac")
    plans.step("bd", {"e": 11})
    for _ in range(6):
        plans.step("ebd")
    plans.step("eb", copies=[(plans.blocks["b"][0], 99)])
    plans.step("e", finished="bd")
    plans.step("e")
    plans.step("", finished="e")
    return plans.all


def run(runner: GraphRunner, plans: Sequence[StepPlan]) -> list[dict[str, list[int]]]:
    """The tokens of each step, of a runner that waits for it."""
    return [runner.launch(plan).wait().token_ids for plan in plans]


def run_ahead(
    runner: GraphRunner, plans: Sequence[StepPlan], num_in_flight: int, slow_s: float = 0.004
) -> list[dict[str, list[int]]]:
    """The same, but so many are launched before anyone looks; a stream as slow as that is behind all the time."""
    stream, gates, handles = stream_of(runner), [], []
    for plan in plans:
        gates.append(Gate(stream, slow_s))
        if len(handles) >= num_in_flight:
            handles[-num_in_flight].wait()
        handles.append(runner.launch(plan))
    results = [handle.wait().token_ids for handle in handles]
    stream.synchronize()
    return results


def queueing(model: str, **fields: Any) -> GraphRunner:
    return build_graphs(model, async_scheduling=True, num_threads=1, **fields)


def stream_of(runner: GraphRunner) -> CpuStream:
    assert runner._decodes is not None, "this runner queues nothing"
    return runner._decodes.stream


@pytest.mark.parametrize("form", [RebuiltBatch, PersistentBatch])
@pytest.mark.parametrize("mode", [GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL_DECODE_ONLY])
def test_every_step_launched_without_a_look_at_the_ones_before_gives_the_same_tokens(model_dir, form, mode):  # noqa: F811
    check_tokens(model_dir, batch=form, graph_mode=mode)


def check_tokens(model: str, **fields: Any) -> None:
    """As the core does it, and as far ahead as anyone can be while every row goes on."""
    runner, waits = queueing(model, **fields), build_graphs(model, **fields)
    for plans, num_in_flight in ((a_life(pauses=True), 2), (a_life(), 1000)):
        found, expected = run_ahead(runner, plans, num_in_flight), run(waits, plans)
        for plan, ids, right in zip(plans, found, expected, strict=True):
            assert ids == right, f"step {plan.step} gave {ids} instead of {right}"
    runner.close()


def takes_turns_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Side, "settle", lambda self: None)


def runs_beside_the_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GraphRunner, "_drain", lambda self: None)


def takes_the_ids_of_the_step_before_last(patch: pytest.MonkeyPatch) -> None:
    right = QueuedDecodes.launch

    def launch(self: QueuedDecodes, inputs: Any, key: Any, sampled_ids_S: Tensor | None) -> Any:
        return right(self, inputs, key, self._sides[0].ids_S)

    patch.setattr(QueuedDecodes, "launch", launch)


def sends_no_table(patch: pytest.MonkeyPatch) -> None:
    right = Side.fill

    def fill(self: Side, *args: Any) -> Replay:
        work = right(self, *args)
        self._send_table.rows = 0
        return work

    patch.setattr(Side, "fill", fill)


@pytest.mark.parametrize(
    "bug", [takes_turns_too_early, runs_beside_the_stream, takes_the_ids_of_the_step_before_last, sends_no_table]
)
def test_every_planted_race_is_seen(model_dir, monkeypatch, bug):  # noqa: F811
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=r"step \d+ gave"):
        check_tokens(model_dir)


def test_every_padding_row_and_token_is_reset_where_the_stream_reads_them(model_dir):  # noqa: F811
    plans = Plans()
    plans.step("", {"a": 5, "b": 2, "c": 30, "d": 9})
    for names in ("abcd", "abcd", "abc", "abc"):
        plans.step(names)
    runner = queueing(model_dir)
    run_ahead(runner, plans.all, num_in_flight=2)
    static = runner._static
    assert static.input_ids_T[3] == static.positions_T[3] == static.seq_lens_R[3] == 0
    assert static.slot_mapping_T[3] == -1
    assert not static.block_table_RB[3].any()
    runner.close()


def test_every_launch_of_a_decode_returns_before_it_is_done(model_dir):  # noqa: F811
    plans = Plans()
    plans.step("", {"a": 3, "b": 4})
    plans.step("ab")
    plans.step("ba")
    runner = queueing(model_dir)
    runner.launch(plans.all[0])
    gate = Gate(stream_of(runner))
    handles = [runner.launch(plan) for plan in plans.all[1:]]
    assert not gate.is_over, "a launch waited for the stream"
    gate.opened.set()
    assert [set(handle.wait().token_ids) for handle in handles] == [{"a", "b"}] * 2
    runner.close()


def test_every_look_at_the_cache_is_at_what_was_launched(model_dir):  # noqa: F811
    runner = queueing(model_dir)
    gate = Gate(stream_of(runner), slow_s=0.02)
    assert runner.cache.blocks.isnan().any()
    assert gate.is_over


OTHERS = {
    "drawn": {"temperature": 1.0, "seed": 3},
    "biased": {"logit_bias": {3: 2.0}},
    "penalised": {"repetition_penalty": 1.2},
    "scored": {"logprobs": 1},
    "not to end": {"min_tokens": 4, "stop_token_ids": [5]},
}


def num_queued(runner: GraphRunner, plans: Sequence[StepPlan]) -> list[int]:
    """By each step, with nothing in flight."""
    stream, counts = stream_of(runner), []

    def number_of_the_next() -> int:
        work = Work(int)
        ticket = stream.submit(work)
        ticket.synchronize()
        return ticket.number

    for plan in plans:
        before = number_of_the_next()
        runner.launch(plan).wait()
        counts.append(number_of_the_next() - before - 1)
    runner.close()
    return counts


def test_every_greedy_decode_is_queued_and_no_other_step(model_dir):  # noqa: F811
    plans = Plans()
    plans.step("", {"a": 4, "b": 6})
    plans.step("ab")
    plans.step("a", copies=[(1, 99)])
    plans.step("a", {"c": 5})
    plans.step("abc")
    plans.step("", finished="abc")
    plans.step("", {"one token": 1})
    assert num_queued(queueing(model_dir), plans.all) == [0, 1, 0, 0, 1, 0, 1]


@pytest.mark.parametrize("params", OTHERS.values(), ids=OTHERS)
def test_no_decode_is_queued_that_wants_more_than_the_largest_logit(model_dir, params):  # noqa: F811
    plans = Plans()
    plans.step("", {"a": 4})
    plans.step("", {"b": 6}, SamplingParams(**{"temperature": 0, "max_tokens": None, **params}))
    plans.step("a")
    plans.step("ab")
    plans.step("a")
    assert num_queued(queueing(model_dir), plans.all) == [0, 0, 1, 0, 1]


def test_an_engine_queues_where_a_core_is_to_spare_and_says_so(model_dir, monkeypatch):  # noqa: F811
    runner = queueing(model_dir)
    assert str(runner.execution).endswith(QUEUED)
    told = examine(device="cpu").device
    assert told is not None
    assert told.execution.endswith(QUEUED)
    refused = [{"async_scheduling": False}, {"num_threads": 2}, {"graph_mode": "piecewise"}, {"ops": TorchOps}]
    for fields in refused:
        runner = build_graphs(model_dir, **{"async_scheduling": True, "num_threads": 1, **fields})
        assert runner._decodes is None, f"with {fields}"
        assert QUEUED not in str(runner.execution)
    monkeypatch.setattr(platforms, "num_cpus", lambda: 1)
    told = examine(device="cpu").device
    assert told is not None
    assert QUEUED not in told.execution
    assert not CpuPlatform().spares_a_core(1)
    assert not CudaPlatform().spares_a_core(1)


# Ends


@pytest.mark.parametrize("end", ["close", "forget"])
def test_every_end_waits_for_the_step_that_runs(model_dir, end):  # noqa: F811
    gc.collect()
    plans, before, runner = Plans(), stream_threads(), queueing(model_dir)
    plans.step("", {"a": 3})
    plans.step("a")
    runner.launch(plans.all[0])
    gate = Gate(stream_of(runner), slow_s=0.02)
    runner.launch(plans.all[1])
    gone = weakref.ref(runner)
    if end == "close":
        runner.close()
    del runner
    gc.collect()
    assert gone() is None
    assert gate.is_over, "memory was let go of while a step could read it"
    assert stream_threads() == before


IN_FLIGHT = """
import sys
from test_cpu_stream import Plans, queueing
from nanoserve import platforms
platforms.num_cpus = lambda: 2
plans = Plans()
plans.step("", {"a": 3})
for _ in range(9):
    plans.step("a")
runner = queueing(sys.argv[1])
for plan in plans.all:
    runner.launch(plan)
print(len(plans.all))
"""


def test_every_process_can_end_with_a_step_in_flight(model_dir):  # noqa: F811
    command = [sys.executable, "-c", IN_FLIGHT, model_dir]
    ended = subprocess.run(command, check=False, cwd=Path(__file__).parent, timeout=60, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "10\n", "")


# Within an engine


def tokens_of_a_load(model: str, seed: int, **fields: Any) -> dict[str, list[int]]:
    """Arrivals, ends and aborts at any moment, more requests than there are blocks for, and a few that draw."""
    sizes = {"graph_sizes": (1, 2, 4, 8), "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4}
    config = replace(
        STAGES["v1"],
        model=model,
        load_format="dummy",
        device="cpu",
        client=InProcessClient,
        num_blocks=28,
        max_model_len=64,
        num_threads=1,
        check_invariants=True,
        **sizes,
        **fields,
    )
    core, draw, tokens = EngineCore.build(config), random.Random(seed), {}
    arrivals = [draw.randrange(60) for _ in range(24)]
    for step in range(500):
        for i, arrives in enumerate(arrivals):
            if arrives == step:
                params = SamplingParams(
                    temperature=float(i % 5 == 0), seed=i, max_tokens=draw.randint(1, 30), stop_token_ids=[i % 61]
                )
                prompt = [draw.randrange(61) for _ in range(draw.randint(1, 20))]
                core.add(EngineRequest(id=str(i), prompt_token_ids=prompt, params=params))
                tokens[str(i)] = []
        if step % 9 == 5:
            core.abort([str(step % 24)])
        for output in core.step():
            tokens[output.id] += output.new_token_ids
    assert not core.has_work
    assert core.scheduler.num_preemptions, "not enough requests at once"
    core.runner.close()
    return tokens


@pytest.mark.parametrize(
    "fields",
    [{}, {"scheduler": PhaseSplitScheduler, "blocks": PrivateBlocks, "preemption_mode": "swap", "num_swap_blocks": 20}],
    ids=["recompute", "swap"],
)
def test_every_load_gives_the_tokens_of_an_engine_without_a_stream(model_dir, monkeypatch, fields):  # noqa: F811
    found = [tokens_of_a_load(model_dir, seed, **fields) for seed in range(3)]
    monkeypatch.setattr(platforms, "num_cpus", lambda: 1)
    for seed, tokens in enumerate(found):
        assert tokens == tokens_of_a_load(model_dir, seed, **fields)
        assert any(tokens.values())
