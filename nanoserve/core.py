"""The step: schedule, execute, update. Everything in the engine hangs on these few lines.

Owns one scheduler and one runner; knows neither text nor sockets. v0 and v1 differ in the classes it is given, and
here in one thing: v1 decides and launches a step before it takes the results of the one before (`_step_ahead`). Calls
an optional `Observer` with a `StepRecord` after each step. Laws: tests/test_core.py, tests/test_one_step_ahead.py.
Reading path: this file, scheduler.py, blocks.py.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nanoserve.invariants import check_blocks, check_plan, check_queues, check_result
from nanoserve.messages import SchedulerStats
from nanoserve.record import Input, JsonlRecorder, Observer, StepRecord, TraceHeader, decided, describe_config
from nanoserve.request import EngineInfo, EngineOutput, EngineRequest, Request, StepCost, StepPlan, StepResult

if TYPE_CHECKING:
    from nanoserve.block_pool import BlockPool
    from nanoserve.config import EngineConfig
    from nanoserve.runner import Runner, StepHandle
    from nanoserve.scheduler import BaseScheduler


logger = logging.getLogger("nanoserve.core")
CRASH_PREFIX = "nanoserve-crash-"
NUM_RECENT_STEPS = 32  # steps that a crash dump and `recent_steps` go back


class RecentStep(msgspec.Struct, eq=False):
    """A step that is kept for a look back, with all that came to the scheduler around it: `end_s` is None while it
    runs, and for the one that failed."""

    plan: StepPlan
    start_s: float
    launched_s: float
    ahead: bool = False  # decided before the results of the one before were taken
    arrivals: list[EngineRequest] = []
    aborts: list[str] = []  # before it was decided, and until the next one is
    before: list[Input] = []
    meanwhile: list[Input] = []
    resumed: list[str] = []  # admitted again after a preemption
    evicted: list[int] = []
    news: list[EngineOutput] = []
    end_s: float | None = None


class StepInFlight(msgspec.Struct, eq=False):
    """A step that was launched and whose results were not taken."""

    recent: RecentStep
    handle: StepHandle


class EngineCore:
    """Requests in, tokens out, one step at a time.

    `abort` may be called from another thread while a step runs: it is honoured before the step's tokens are taken,
    so that an abort wins over a natural end. Everything else belongs to the thread that calls `step`.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: BaseScheduler,
        runner: Runner,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.runner = runner
        self.observer = observer
        self.clock = clock
        self._abort_ids: deque[str] = deque()
        self._arrivals: list[EngineRequest] = []  # that no step has in its record yet
        self._aborted: list[str] = []  # the same
        self._inputs: list[Input] = []  # both, and resets, in order, since a step was decided or its tokens taken
        self._recent: deque[RecentStep] = deque(maxlen=NUM_RECENT_STEPS)
        self._in_flight: StepInFlight | None = None  # between two calls of `step`; one step ahead only
        self._at_step = 0  # the one that is being decided, or awaited
        self.num_steps = 0  # decided so far
        if observer:
            scheduler.blocks.record_events = True  # type: ignore[attr-defined]  # evictions are on record

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        observer: Observer | None = None,
        make_runner: Callable[[EngineConfig], Runner] | None = None,
    ) -> EngineCore:
        """Load the model, size the KV pool, fill in the config, and put the parts together. Raises ValueError.

        `make_runner`: instead of `config.runner`, for a runner that lives elsewhere."""
        runner = (make_runner or config.runner)(config)
        try:
            config = config.resolve(
                model_len=runner.model_len,
                pool_blocks=runner.pool_blocks(config.block_size),
                device=runner.device,
            )
            runner.allocate(config)
            assert config.num_blocks is not None
            blocks = config.blocks(
                config.num_blocks,
                config.block_size,
                watermark_blocks=config.watermark_blocks,
                free_order=config.free_order,
                num_swap_blocks=config.num_swap_blocks,
            )
            scheduler = config.scheduler(config, blocks)
            if observer:
                header = TraceHeader(
                    config=describe_config(config), device=runner.device, execution=str(runner.execution)
                )
                observer.on_start(header)
        except BaseException:
            runner.close()
            raise
        how = runner.execution
        logger.info("%s on %s, %s: %s; %s", config.model, runner.device, runner.dtype, how, how.memory)
        return cls(config, scheduler, runner, observer)

    @property
    def info(self) -> EngineInfo:
        assert self.config.num_blocks is not None
        return EngineInfo(
            model=self.config.model,
            max_model_len=self.config.model_len,
            vocab_size=self.runner.vocab_size,
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            device=self.runner.device,
            dtype=self.runner.dtype,
            execution=self.runner.execution,
        )

    @property
    def stats(self) -> SchedulerStats:
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        return SchedulerStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(scheduler.swapped),
            kv_cache_usage=1 - blocks.num_free_blocks / (blocks.num_blocks - 1),
            prefix_cache_queries=blocks.stats.queried_tokens,
            prefix_cache_hits=blocks.stats.hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self.num_steps,
        )

    @property
    def utilities(self) -> Mapping[str, Callable[..., Any]]:
        """What a front end may call between two calls of `step`, also while a step is in flight."""
        return {
            "reset_prefix_cache": self.reset_prefix_cache,
            "block_map": self.block_map,
            "recent_steps": self.recent_steps,
        }

    def call(self, method: str, args: list[Any]) -> Any:
        """ValueError for an unknown name; else whatever the utility returns or raises."""
        if method not in self.utilities:
            raise ValueError(f"utility {method!r} is not known; use one of {', '.join(self.utilities)}.")
        return self.utilities[method](*args)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None or bool(self._abort_ids)

    def add(self, request: EngineRequest) -> None:
        """ValueError if the id is in use."""
        self.scheduler.add(Request.from_engine_request(request, self.config.model_len))
        self._arrivals.append(request)
        self._inputs.append(Input("add", request.id))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Idempotent; honoured by the step that is awaited, or else by the next call of `step`."""
        self._abort_ids.extend(request_ids)

    def reset_prefix_cache(self, force: bool = False) -> bool:
        """`BaseScheduler.reset_prefix_cache`, on record."""
        self._inputs.append(Input("reset", "force" if force else ""))
        return self.scheduler.reset_prefix_cache(force)

    def step(self) -> list[EngineOutput]:
        """News of the requests that have any, from one step; [] when there is none."""
        outputs = self._abort_now()
        return outputs + (self._step_ahead() if self.config.async_scheduling else self._step())

    def _step(self) -> list[EngineOutput]:
        """The device waits while the host takes the tokens and decides what is next."""
        if not self.scheduler.has_work:
            return []
        return self._finish(self._launch())

    def _step_ahead(self) -> list[EngineOutput]:
        """The host does all that while the device runs the next step, whose rows take their newest token from where
        the device left it. A stop is seen one step late: at most one token is computed for nothing. What that step
        writes goes to blocks that are free by then; a runner executes plans in order, so nobody is harmed.
        Mirrors `vllm/v1/engine/core.py: step_with_batch_queue` with a queue of two."""
        before, self._in_flight = self._in_flight, None
        if self.scheduler.can_schedule:
            self._in_flight = self._launch(ahead=before is not None)
        return self._finish(before) if before else []

    def _launch(self, ahead: bool = False) -> StepInFlight:
        """Schedule, and hand the plan to the runner."""
        self.num_steps += 1
        self._at_step = self.num_steps
        start_s = self.clock()
        plan = self.scheduler.schedule()
        recent = RecentStep(plan, start_s, self.clock(), ahead, self._arrivals, self._aborted, self._inputs)
        self._arrivals, self._aborted, self._inputs = [], [], []
        self._recent.append(recent)
        if plan.new:
            recent.resumed = [new.id for new in plan.new if self.scheduler.requests[new.id].num_preemptions]
        if self.observer:
            events = self.scheduler.blocks.take_events()
            recent.evicted = [block_id for event in events if event.kind == "removed" for block_id in event.block_ids]
        if self.config.check_invariants:
            check_plan(plan, self.scheduler)
        return StepInFlight(recent, self.runner.launch(plan))

    def _finish(self, step: StepInFlight) -> list[EngineOutput]:
        """Wait for the results, and update."""
        plan = step.recent.plan
        self._at_step = plan.step
        result = step.handle.wait()
        arrived_s = self.clock()
        outputs = self._abort_now()  # before the tokens are taken: an abort wins over a natural end
        newest = (self._in_flight or step).recent
        newest.arrivals += self._arrivals  # came and went, or no step would have been decided without it
        newest.aborts += self._aborted
        step.recent.meanwhile = self._inputs
        self._arrivals, self._aborted, self._inputs = [], [], []
        if self.config.check_invariants:
            check_result(plan, result, self.scheduler)
        news = self.scheduler.update(plan, result.token_ids)
        if result.logprobs or result.prompt_logprobs:
            news = with_logprobs(news, result)
        if self.config.check_invariants:
            self.check()
        step.recent.news = news
        if self.observer:
            self.observer.on_step(self._record(step.recent, result.cost, arrived_s))
        step.recent.end_s = self.clock()
        return outputs + news

    def _abort_now(self) -> list[EngineOutput]:
        if not self._abort_ids:
            return []
        ids = [self._abort_ids.popleft() for _ in range(len(self._abort_ids))]
        alive = self.scheduler.abort(ids)
        self._aborted += alive
        self._inputs += [Input("abort", request_id) for request_id in alive]
        return [EngineOutput(id=request_id, new_token_ids=[], finish_reason="abort") for request_id in alive]

    def check(self) -> None:
        """Assert every invariant of a state between two steps."""
        check_queues(self.scheduler)
        check_blocks(self.scheduler.blocks, self.scheduler.requests.values(), self.config.model_len)

    def _record(self, recent: RecentStep, cost: StepCost, arrived_s: float) -> StepRecord:
        """One step ahead, the counts at the end are those with the next step decided."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        end_s = self.clock()
        scheduling_s = recent.launched_s - recent.start_s
        return StepRecord(
            start_s=recent.start_s,
            launched_s=recent.launched_s,
            end_s=end_s,
            budget=self.config.budget,
            **decided(recent.plan),
            **_around(recent),
            evicted=recent.evicted,
            num_free_blocks=blocks.num_free_blocks,
            num_used_blocks=blocks.num_blocks - 1 - blocks.num_free_blocks,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(scheduler.swapped),
            host_s=scheduling_s + cost.host_s + end_s - arrived_s,
            graph=cost.graph,
            num_padding_tokens=cost.num_padding_tokens,
        )

    def describe_crash(self, error: BaseException) -> str:
        """Where the last steps are, for a message. Never raises: what ended the engine is what matters."""
        try:
            return f"its last steps are in {self.dump_crash(error)}"
        except OSError as full:
            return f"its last steps could not be kept: {full.strerror}"

    def dump_crash(self, error: BaseException) -> str:
        """Write the last plans as a trace file, and return its path. The failing one carries the error: it is the last,
        but for a plan that was launched behind it. A step that failed before it had a plan is an empty record."""
        path = Path(tempfile.gettempdir()) / f"{CRASH_PREFIX}{os.getpid()}-{self.num_steps}.jsonl"
        recorder = JsonlRecorder(path)
        config, runner = describe_config(self.config), self.runner
        recorder.on_start(TraceHeader(config=config, device=runner.device, execution=str(runner.execution), crash=True))
        steps = list(self._recent)
        if all(recent.plan.step != self._at_step for recent in steps):
            now_s, plan = self.clock(), StepPlan(self._at_step, {})
            ahead = bool(steps) and steps[-1].end_s is None
            steps.append(RecentStep(plan, now_s, now_s, ahead, self._arrivals, self._aborted, self._inputs))
        for recent in steps:
            failed = recent.plan.step == self._at_step
            recorder.on_step(self._recall(recent, "".join(traceback.format_exception(error)) if failed else "", True))
        recorder.close()
        return str(path)

    def _recall(self, recent: RecentStep, error: str = "", whole: bool = False) -> StepRecord:
        """What its plan tells of a step; `whole`: and what came to the scheduler around it."""
        return StepRecord(
            start_s=recent.start_s,
            launched_s=recent.launched_s,
            end_s=self.clock() if recent.end_s is None else recent.end_s,
            budget=self.config.budget,
            **decided(recent.plan),
            **(_around(recent) if whole else {}),
            error=error,
            unfinished=recent.end_s is None,
        )

    def recent_steps(self, limit: int = NUM_RECENT_STEPS) -> list[dict[str, Any]]:
        """The last steps as plain data, the newest at the end: what was planned, and when it ran."""
        return [msgspec.to_builtins(self._recall(recent)) for recent in list(self._recent)[-limit:]]

    def block_map(self) -> dict[str, Any]:
        """The KV blocks as plain data. `used`: [id, tables that hold it, start of its hash or ""]; `cached`: [id, start
        of its hash] of blocks that nobody holds; `free`: the queue as runs [id, how many in a row], the next to be
        handed out first; `tables`: the blocks of every request."""
        blocks = self.scheduler.blocks
        pool: BlockPool = blocks.pool  # type: ignore[attr-defined]  # every manager of ours has one
        tables = {request.id: list(request.block_ids) for request in self.scheduler.requests.values()}
        held = Counter(block_id for table in tables.values() for block_id in table)
        hashes = {block.id: _hash_prefix(block.block_hash) for block in pool.blocks if block.block_hash is not None}
        return {
            "num_blocks": blocks.num_blocks,
            "block_size": blocks.block_size,
            "num_free_blocks": blocks.num_free_blocks,
            "used": [[block_id, count, hashes.get(block_id, "")] for block_id, count in sorted(held.items())],
            "cached": [[block_id, value] for block_id, value in hashes.items() if block_id not in held],
            "free": _runs(block.id for block in pool),
            "tables": tables,
        }

    def close(self) -> None:
        """Free the runner's memory, end the observer; nobody waits for a step in flight. Idempotent."""
        self._in_flight = None
        self.runner.close()
        if self.observer:
            self.observer.close()


def _around(recent: RecentStep) -> dict[str, Any]:
    """The fields of a record that tell what came to the scheduler around a step, and what came of it."""
    ends = dict.fromkeys(recent.aborts, "abort")
    ends |= {output.id: output.finish_reason for output in recent.news if output.finish_reason}
    return {
        "arrivals": recent.arrivals,
        "aborts": recent.aborts,
        "ahead": recent.ahead,
        "before": recent.before if any(i.kind != "add" for i in recent.before) else [],
        "meanwhile": recent.meanwhile,
        "resumed": recent.resumed,
        "sampled": {output.id: output.new_token_ids for output in recent.news if output.new_token_ids},
        "finished": ends,
    }


def _hash_prefix(block_hash: bytes | int) -> str:
    data = block_hash if isinstance(block_hash, bytes) else (block_hash & (2**64 - 1)).to_bytes(8, "big")
    return data[:4].hex()


def _runs(ids: Iterable[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for block_id in ids:
        if runs and block_id == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([block_id, 1])
    return runs


def with_logprobs(outputs: list[EngineOutput], result: StepResult) -> list[EngineOutput]:
    """The outputs, with log-probabilities for exactly the tokens that were accepted."""
    full = []
    for output in outputs:
        logprobs = result.logprobs.get(output.id)
        full.append(
            EngineOutput(
                id=output.id,
                new_token_ids=output.new_token_ids,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                logprobs=logprobs[: len(output.new_token_ids)] if logprobs else None,
                prompt_logprobs=result.prompt_logprobs.get(output.id),
                num_cached_tokens=output.num_cached_tokens,
                error=output.error,
            )
        )
    return full
