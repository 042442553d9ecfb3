"""A deterministic engine in no time: the real core, scheduler and blocks, on a clock that a cost model moves.

Owns the virtual clock (whole microseconds), the runner that answers from a `CostModel`, and who arrives when. The loop
is semantics.md, section 10: admit who has arrived, schedule, `now += cost(step)`, tokens are stamped `now`, update;
with nothing to run, jump to the next arrival. The layout is the engine's own switch: with `InProcessClient` the front
end's work holds up the next step. Nothing here is random. Laws: tests/test_simulator.py.
"""

from __future__ import annotations

import gc
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from nanoserve.client import InProcessClient
from nanoserve.config import EngineConfig
from nanoserve.core import EngineCore
from nanoserve.execution import Execution
from nanoserve.lab.costs import REFERENCE, CostModel, StepLoad, attention_of
from nanoserve.lab.prompts import OUTPUT_TOKEN
from nanoserve.lab.simulated import SimulatedRun
from nanoserve.lab.workload import Arrival, Workload
from nanoserve.record import Observer, TraceHeader, describe_config
from nanoserve.request import EngineOutput, NewRequest, StepCost, StepPlan, StepResult

MAX_IDLE_STEPS = 100  # steps in a row that may do nothing before the simulation is stuck


@dataclass(frozen=True, slots=True)
class Host:
    """What the host adds to the device's time, in microseconds. One step ahead, a step's own part runs beside the
    device; the front end's part runs beside the steps unless it shares their process."""

    step_us: int = 0  # deciding a step, making its inputs, launching it
    request_us: float = 0.0  # more of that for each request in the step
    front_end_us: float = 0.0  # for each token that goes out: detokenise, serialise, send

    def __post_init__(self) -> None:
        for name in ("step_us", "request_us", "front_end_us"):
            value = getattr(self, name)
            if not 0 <= value < 1e12:
                raise ValueError(f"{name} must be microseconds >= 0 and < 1e12, got {value:g}.")

    def launch_us(self, num_requests: int) -> int:
        return self.step_us + round(self.request_us * num_requests)


class VirtualClock:
    """Whole microseconds; calling it gives seconds, as the core wants them."""

    __slots__ = ("now_us",)

    def __init__(self) -> None:
        self.now_us = 0

    def __call__(self) -> float:
        return self.now_us / 1e6


class CostStep:
    """A step that is over at `end_us`; waiting for it moves the clock there."""

    __slots__ = ("_clock", "_end_us", "_result")

    def __init__(self, clock: VirtualClock, end_us: int, result: StepResult) -> None:
        self._clock, self._end_us, self._result = clock, end_us, result

    def wait(self) -> StepResult:
        self._clock.now_us = max(self._clock.now_us, self._end_us)
        return self._result


class CostRunner:
    """Speaks `Runner`. The device runs steps one after another, each for as long as the cost model says; every row
    that has caught up gets `OUTPUT_TOKEN`."""

    captures_graphs: ClassVar[bool] = False
    execution = Execution()
    device = "simulated"
    dtype = ""
    vocab_size = 2**31 - 1

    def __init__(
        self,
        config: EngineConfig,
        costs: CostModel = REFERENCE,
        host: Host | None = None,
        clock: VirtualClock | None = None,
    ) -> None:
        self.model_len = config.model_len
        self.num_request_steps = 0
        self.num_tokens = 0
        self.busy_us = 0
        self._costs = costs
        self._host = host or Host()
        self._clock = clock or VirtualClock()
        self._free_us = 0  # when the device has done all that was launched
        self._prefills: dict[str, int] = {}  # known tokens still to compute, of rows with more than the newest
        self._computed: dict[str, int] = {}  # only kept for a cost model that looks at contexts

    def pool_blocks(self, block_size: int) -> int:
        raise NotImplementedError("a simulated pool is as large as its config says")

    def allocate(self, config: EngineConfig) -> None:
        pass

    def launch(self, plan: StepPlan) -> CostStep:
        tokens = plan.num_scheduled_tokens
        self._drop((*plan.preempted, *plan.finished))
        for new in plan.new:
            self._take(new)
        host_us = self._host.launch_us(len(tokens))
        self._clock.now_us += host_us
        if not tokens:
            return CostStep(self._clock, self._clock.now_us, StepResult({}))
        load = self._load(tokens)
        step_us = self._costs.step_us(load)
        self._free_us = max(self._clock.now_us, self._free_us) + step_us
        self.busy_us += step_us
        self.num_request_steps += load.num_requests
        self.num_tokens += load.num_tokens
        result = StepResult(self._sample(tokens), cost=StepCost(host_us / 1e6))
        return CostStep(self._clock, self._free_us, result)

    def _drop(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            self._prefills.pop(request_id, None)
            self._computed.pop(request_id, None)

    def _take(self, new: NewRequest) -> None:
        self._prefills[new.id] = len(new.token_ids) - new.num_computed_tokens
        self._computed[new.id] = new.num_computed_tokens

    def _load(self, tokens: dict[str, int]) -> StepLoad:
        num_tokens, num_requests = sum(tokens.values()), len(tokens)
        if not self._costs.needs_context:
            return StepLoad(num_tokens, num_requests)
        computed = self._computed
        context = attention = 0
        for request_id, n in tokens.items():
            start = computed[request_id]
            computed[request_id] = end = start + n
            context += end
            attention += end if n == 1 else attention_of(start, n)
        return StepLoad(num_tokens, num_requests, context, attention)

    def _sample(self, tokens: dict[str, int]) -> dict[str, list[int]]:
        """One list for all rows: nobody writes to it."""
        answer = [OUTPUT_TOKEN]
        sampled = dict.fromkeys(tokens, answer)
        for request_id in list(self._prefills) if self._prefills else ():
            if n := tokens.get(request_id):
                self._prefills[request_id] -= n
                if self._prefills[request_id]:
                    del sampled[request_id]
                else:
                    del self._prefills[request_id]
        return sampled

    def close(self) -> None:
        self._prefills.clear()
        self._computed.clear()


class Arrivals:
    """What of a workload is still to come. Ties go by the order of the workload."""

    def __init__(self, workload: Workload) -> None:
        self._due: list[tuple[int, int, Arrival]] = []  # heap: microseconds, place in the workload
        self._followers: defaultdict[str, list[tuple[int, Arrival]]] = defaultdict(list)
        self._behind: list[tuple[int, Arrival]] = []  # that wait for the progress of a group
        self._members: defaultdict[str, list[str]] = defaultdict(list)
        self._emitted: dict[str, int] = {}  # of members of groups whose progress somebody waits for
        watched = {a.after.group for a in workload.arrivals if a.after}
        for place, a in enumerate(workload.arrivals):
            if a.follows:
                self._followers[a.follows].append((place, a))
            elif a.after:
                self._behind.append((place, a))
            else:
                self._due.append((_us(a.at_s), place, a))
            if a.group in watched:
                self._members[a.group].append(a.id)
                self._emitted[a.id] = 0
        heapq.heapify(self._due)

    def __bool__(self) -> bool:
        return bool(self._due)

    @property
    def never_due(self) -> list[str]:
        """Ids of those that still wait for something else than the clock."""
        followers = [a for waiting in self._followers.values() for _, a in waiting]
        return [a.id for a in (*followers, *(a for _, a in self._behind))]

    @property
    def next_us(self) -> int:
        return self._due[0][0]

    def take(self, now_us: int) -> Iterator[tuple[int, Arrival]]:
        """Those that are due, with the time when they were."""
        while self._due and self._due[0][0] <= now_us:
            due_us, _, arrival = heapq.heappop(self._due)
            yield due_us, arrival

    def hear(self, outputs: list[EngineOutput], now_us: int) -> None:
        """News that the users got at that time: some may have waited for them."""
        if self._followers:
            for output in outputs:
                if output.finish_reason is not None:
                    for place, a in self._followers.pop(output.id, ()):
                        heapq.heappush(self._due, (now_us + _us(a.at_s), place, a))
        if self._behind:
            for output in outputs:
                if output.id in self._emitted:
                    self._emitted[output.id] += len(output.new_token_ids)
            reached = [(place, a) for place, a in self._behind if self._reached(a)]
            for place, a in reached:
                self._behind.remove((place, a))
                heapq.heappush(self._due, (max(now_us, _us(a.at_s)), place, a))

    def _reached(self, arrival: Arrival) -> bool:
        progress = arrival.after
        assert progress is not None
        return all(self._emitted[i] >= progress.num_tokens for i in self._members[progress.group])


def simulate(
    config: EngineConfig,
    workload: Workload,
    costs: CostModel,
    host: Host | None = None,
    *,
    observer: Observer | None = None,
    on_step: Callable[[EngineCore], None] | None = None,
) -> SimulatedRun:
    """The workload on an engine of that config, from time 0 until the last request has ended.

    `config` must be complete (`complete_config`). The observer gets a record of every step, in virtual seconds;
    `on_step` may look at the core after each. ValueError for an arrival that never came; RuntimeError when steps do
    nothing though requests wait.
    """
    host = host or Host()
    clock = VirtualClock()
    runner = CostRunner(config, costs, host, clock)
    core = make_core(config, runner, observer, clock)
    if observer:
        device = f"simulated, {costs}"
        observer.on_start(TraceHeader(config=describe_config(config), device=device))
    arrivals, run = Arrivals(workload), SimulatedRun(workload, config, str(costs), host)
    blocks, blocking = core.scheduler.blocks, config.client is InProcessClient
    front_end_us = idle = 0  # when the front end has sent all that it got; steps that did nothing
    with _no_garbage_collection():
        while arrivals or core.has_work:
            if not core.has_work:
                clock.now_us = max(clock.now_us, arrivals.next_us)
            for due_us, arrival in arrivals.take(clock.now_us):
                core.add(arrival.request(arrival_s=due_us / 1e6))
                run.arrive(arrival, due_us)
            outputs = core.step()
            idle = 0 if outputs or runner.num_request_steps != run.num_request_steps else idle + 1
            if idle > MAX_IDLE_STEPS:
                raise RuntimeError(f"{MAX_IDLE_STEPS} steps did nothing while {core.stats} wait; is this a bug?")
            run.num_request_steps = runner.num_request_steps
            run.peak_used_blocks = max(run.peak_used_blocks, blocks.num_blocks - 1 - blocks.num_free_blocks)
            front_end_us = max(clock.now_us, front_end_us) + round(host.front_end_us * len(outputs))
            if blocking:
                clock.now_us = front_end_us
            run.take(outputs, front_end_us)
            arrivals.hear(outputs, front_end_us)
            if on_step:
                on_step(core)
    core.close()
    if left := arrivals.never_due:
        raise ValueError(
            f"load {workload.name}: {left[0]} waits for tokens of requests that were refused, so it never came "
            f"({len(left)} in all); give the pool or the budget room for them."
        )
    run.finish(core, max(clock.now_us, front_end_us), runner.num_tokens, runner.busy_us)
    return run


def make_core(
    config: EngineConfig, runner: CostRunner, observer: Observer | None, clock: Callable[[], float]
) -> EngineCore:
    """As `EngineCore.build` does it, for a runner that has no memory to size a pool by."""
    assert config.num_blocks is not None, "complete_config() first"
    blocks = config.blocks(
        config.num_blocks,
        config.block_size,
        watermark_blocks=config.watermark_blocks,
        free_order=config.free_order,
        num_swap_blocks=config.num_swap_blocks,
    )
    return EngineCore(config, config.scheduler(config, blocks), runner, observer, clock)


def complete_config(config: EngineConfig, *, max_model_len: int, num_blocks: int) -> EngineConfig:
    """Every None filled in, as `EngineConfig.resolve` does, but for what only a real engine must refuse: here a pool
    or a budget may be too small for the longest request, which then ends at once and is counted. Raises ValueError."""
    watermark = config.scheduler.default_watermark if config.watermark is None else config.watermark
    budget = config.max_num_batched_tokens or config.scheduler.default_budget(max_model_len, "cuda")
    if budget < config.max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens={budget} is smaller than max_num_seqs={config.max_num_seqs}: a step holds one "
            f"token of every running request; raise it to {config.max_num_seqs} or lower --max-num-seqs."
        )
    return replace(
        config,
        runner=CostRunner,
        max_model_len=max_model_len,
        num_blocks=config.num_blocks or num_blocks,
        watermark=watermark,
        max_num_batched_tokens=budget,
        device="simulated",
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Millions of small objects that are in no cycle: looking for one takes a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
