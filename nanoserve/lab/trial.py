"""A trial: one load, one engine, a virtual clock, and the laws looked at in every step.

The engine is the real core with the real scheduler and blocks; only the runner (`DigestRunner`, unless told otherwise)
and the clock are not. A step costs `STEP_US`, and `TOKEN_US` a token. Of each broken law the first verdict is kept, and
the trial goes on until an error stops it. Laws: tests/test_faults_lab.py, tests/test_grade.py.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from nanoserve.blocks import PrivateBlocks, SharedBlocks, V0CachedBlocks
from nanoserve.core import EngineCore
from nanoserve.invariants import check_blocks, check_queues
from nanoserve.lab import laws
from nanoserve.lab.fakes import DigestRunner, reference_tokens
from nanoserve.lab.laws import Row, Verdict
from nanoserve.lab.memory_limit import lift_memory_limit
from nanoserve.lab.mishaps import explain
from nanoserve.lab.trial_config import trial_config
from nanoserve.lab.trial_loads import Job, Load
from nanoserve.lab.trial_tee import Tee
from nanoserve.record import Observer, StepRecord
from nanoserve.request import EngineOutput, StepPlan, StepResult

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig
    from nanoserve.runner import Runner, StepHandle

STEP_US, TOKEN_US = 1000, 50
PATIENCE = 3  # how many times the steps that serving one after the other takes

MakeRunner = Callable[["EngineConfig"], Any]  # -> Runner
Alone = Callable[[list[int], int], list[int]]  # (prompt, how many) -> what a right engine answers


class TimedStep:
    """A step whose end moves the clock."""

    def __init__(self, trial: Trial, plan: StepPlan, handle: StepHandle) -> None:
        self._trial, self._plan, self._handle = trial, plan, handle

    def wait(self) -> StepResult:
        result = self._handle.wait()
        self._trial.now_us += STEP_US + TOKEN_US * self._plan.num_tokens
        self._trial.take_result(self._plan, result)
        return result


class TimedRunner:
    """Stands before a runner: shows the trial every plan and every result."""

    captures_graphs: ClassVar[bool] = False

    def __init__(self, trial: Trial, runner: Runner) -> None:
        self._trial, self._runner = trial, runner
        self.device, self.dtype = runner.device, runner.dtype
        self.model_len, self.vocab_size = runner.model_len, runner.vocab_size
        self.execution = runner.execution
        self.pool_blocks, self.allocate, self.close = runner.pool_blocks, runner.allocate, runner.close

    def launch(self, plan: StepPlan) -> TimedStep:
        self._trial.take_plan(plan)
        return TimedStep(self._trial, plan, self._runner.launch(plan))


@dataclass(slots=True)
class Fate:
    """What became of a request, as far as the trial has come."""

    job: Job
    alone: list[int]
    came_at_step: int
    fair_steps: int  # that it may wait for its first token
    num_tokens: int = 0
    is_aborted: bool = False
    end: str = ""


class Outcome(msgspec.Struct, kw_only=True):
    """Verdicts by law, in the order of LAWS, and what the run left for the metrics."""

    load: str
    verdicts: dict[str, Verdict]
    num_steps: int = 0
    error: str = ""  # that stopped the trial before its end
    records: list[StepRecord] = []

    @property
    def first(self) -> Verdict | None:
        """The broken law that showed first; of one step, the one that was looked at first."""
        bad = [verdict for verdict in self.verdicts.values() if not verdict.holds]
        return min(bad, key=lambda verdict: verdict.step, default=None)


@dataclass
class Trial:
    """`fields`: of the config, over those of the load. `note_step`: called with the number of each step.
    `policy_file`: the file whose lines an error names."""

    load: Load
    fields: dict[str, Any]
    make_runner: MakeRunner = DigestRunner
    alone: Alone = reference_tokens
    observer: Observer | None = None
    note_step: Callable[[int], None] = lambda step: None
    policy_file: str = ""
    now_us: int = 0
    rows: dict[str, Row] = field(default_factory=dict)
    fates: dict[str, Fate] = field(default_factory=dict)
    found: dict[str, Verdict] = field(default_factory=dict)  # the first of each broken law
    chunks: bool = False  # a prompt was cut
    step: int = 0
    error: str = ""  # that stopped the trial
    num_idle: int = 0  # steps in a row without tokens
    chains: dict[object, tuple[object, str, int]] = field(default_factory=dict)
    last_owners: dict[int, str] = field(default_factory=dict)

    def run(self) -> Outcome:
        """To the end of everyone, or to the error that stops it. Never raises on account of the policy."""
        recorder = Tee(self.observer)
        core = None
        try:
            self.core = core = self._build(recorder)
            self._drive(core)
            self._look_at_ends()
            self._judge(laws.blocks_came_back(core.scheduler.blocks, self.last_owners, self.step))
        except Stuck:
            pass
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                raise  # the user's; where none can come, it is the policy's
            if isinstance(error, MemoryError):
                lift_memory_limit()
            verdict = explain(error, self.step, list(self.fates), self.policy_file)
            self.error = str(verdict)
            self._judge(verdict)
        finally:
            recorder.finish(core, self.step, [fate.job for fate in self.fates.values()], self.error)
            if core:
                core.close()
        verdicts = {law: self.found.get(law, Verdict(law=law)) for law in laws.LAWS}
        return Outcome(
            load=self.load.name, verdicts=verdicts, num_steps=self.step, error=self.error, records=recorder.records
        )

    def _build(self, recorder: Observer) -> EngineCore:
        config = trial_config(self.load, self.fields)
        core = EngineCore.build(config, recorder, self._timed_runner)
        core.clock = lambda: self.now_us / 1e6
        return core

    def _timed_runner(self, config: EngineConfig) -> Any:
        return TimedRunner(self, self.make_runner(config))

    def _drive(self, core: EngineCore) -> None:
        coming = deque(sorted(self.load.jobs, key=lambda job: job.at_us))
        limit = self._limit(core)
        while core.has_work or coming:
            if not core.has_work:
                self.now_us = max(self.now_us, coming[0].at_us)
            while coming and coming[0].at_us <= self.now_us:
                self._add(core, coming.popleft())
            self._abort_those_due(core)
            self.step = core.num_steps + 1
            self.note_step(self.step)
            self._look_at_hits(core)
            outputs = core.step()
            if core.num_steps < self.step:  # nothing was decided
                self.num_idle += 1
            self._take_outputs(core, outputs)
            self._look_at_state(core)
            self._look_at_patience(core, limit)

    def _add(self, core: EngineCore, job: Job) -> None:
        room = core.config.model_len - len(job.prompt)
        alone = self.alone(job.prompt, min(job.max_tokens, room))
        before = [fate.job for fate in self.fates.values() if not fate.end]
        fair = 10 + PATIENCE * sum(_steps_alone(core, one) for one in (*before, job))
        self.fates[job.id] = Fate(job, alone, core.num_steps, fair)
        core.add(job.request())

    def _abort_those_due(self, core: EngineCore) -> None:
        for request_id, fate in self.fates.items():
            after = fate.job.abort_after
            if after is not None and not fate.end and fate.num_tokens >= after and core.num_steps > fate.came_at_step:
                fate.is_aborted = True
                core.abort([request_id])

    # What the engine shows

    def take_plan(self, plan: StepPlan) -> None:
        """Decided, not yet run."""
        scheduler = self.core.scheduler
        for request_id in (*plan.preempted, *plan.finished):
            self.rows.pop(request_id, None)
        before = set(self.rows)
        for new in plan.new:
            fate = self.fates[new.id]
            last = len(fate.job.prompt) + len(fate.alone)
            self.rows[new.id] = Row(len(new.token_ids), new.num_computed_tokens, fate.num_tokens, last)
        for request_id, block_ids in ({new.id: new.block_ids for new in plan.new} | plan.new_blocks).items():
            self.last_owners |= dict.fromkeys(block_ids, request_id)
        lengths = {request_id: request.num_tokens for request_id, request in scheduler.requests.items()}
        self._judge(laws.limits_are_kept(scheduler, self.core.config, plan.step))
        self._judge(laws.plan_is_legal(plan, scheduler))
        for request_id in self._aborted():
            self._judge(laws.nothing_is_computed_for(request_id, plan))
        if self._judge(laws.tokens_are_known(plan, self.rows)):
            self._judge(laws.promises_are_kept(plan, scheduler, self.rows, before))
        self._judge(laws.reasons_are_true(plan, scheduler, self.rows, lengths, self.chunks))
        for request_id, n in plan.num_scheduled_tokens.items():
            if (row := self.rows.get(request_id)) is not None:
                row.computed += n
                self.chunks |= row.computed < row.known
                if row.computed == row.known:
                    row.known, row.num_outputs = row.known + 1, row.num_outputs + 1
        self.num_idle = 0 if plan.num_scheduled_tokens or plan.preempted else self.num_idle + 1

    def take_result(self, plan: StepPlan, result: StepResult) -> None:
        """Ran, not yet taken."""
        self._judge(laws.sampled_when_caught_up(plan, result, self.core.scheduler))

    def _take_outputs(self, core: EngineCore, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            fate, new = self.fates[output.id], output.new_token_ids
            self._judge(laws.nothing_comes_after_the_end(output.id, self.step, fate.end))
            self._judge(laws.tokens_are_those_alone(output.id, self.step, fate.num_tokens, new, fate.alone))
            fate.num_tokens += len(new)
            if reason := output.finish_reason:
                fate.end = reason
                row = self.rows.get(output.id)
                num_tokens, alone = fate.num_tokens, fate.alone
                self._judge(laws.all_tokens_came(output.id, self.step, num_tokens, alone, reason, fate.is_aborted))
                if reason not in ("abort", "error"):
                    num_prompt = len(fate.job.prompt)
                    self._judge(laws.work_is_accounted(output.id, row, num_prompt, fate.num_tokens, self.step))

    def _aborted(self) -> list[str]:
        return [request_id for request_id, fate in self.fates.items() if fate.is_aborted]

    # What is looked at between two steps

    def _look_at_hits(self, core: EngineCore) -> None:
        for request in core.scheduler.waiting:
            self._judge(laws.hit_is_legal(request, core.scheduler.blocks, self.step))

    def _look_at_state(self, core: EngineCore) -> None:
        """What has a law of its own first; the invariants then have the last word."""
        scheduler, blocks = core.scheduler, core.scheduler.blocks
        requests = list(scheduler.requests.values())
        for request_id in self._aborted():
            self._judge(laws.abort_is_an_end(request_id, scheduler, self.step))
        self._judge(laws.tables_are_right(requests, blocks, self.step))
        if isinstance(blocks, SharedBlocks | V0CachedBlocks):
            self._judge(laws.references_are_right(requests, blocks, self.step))
            self._remember_chains(core)
            self._judge(laws.cache_is_reachable(blocks, self.chains, self.step))
        if isinstance(blocks, PrivateBlocks):
            self._judge(laws.none_is_lost(requests, blocks, self.last_owners, self.step))
        if "blocks" not in self.found and isinstance(blocks, PrivateBlocks):
            self._check(lambda: check_blocks(blocks, requests, core.config.model_len))
        if "plan" not in self.found and "work" not in self.found:
            self._check(lambda: check_queues(scheduler))

    def _check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except AssertionError as error:
            self._judge(explain(error, self.step, list(self.fates)))

    def _remember_chains(self, core: EngineCore) -> None:
        for request in core.scheduler.requests.values():
            hashes = request.block_hashes
            for index in range(1, len(hashes)):
                self.chains.setdefault(hashes[index], (hashes[index - 1], request.id, index))

    def _look_at_ends(self) -> None:
        """Of those of whom nothing was heard, when the engine has no work left."""
        for request_id, fate in self.fates.items():
            if not fate.end:
                self._judge(laws.all_tokens_came(request_id, self.step, fate.num_tokens, fate.alone, ""))

    def _look_at_patience(self, core: EngineCore, limit: int) -> None:
        alive = [fate for fate in self.fates.values() if not fate.end]
        if self.num_idle > len(self.load.jobs) + 5 or core.num_steps > limit:
            oldest = min(alive, key=lambda fate: fate.came_at_step, default=None)
            name = oldest.job.id if oldest else ""
            got = f"none in {self.num_idle} steps" if self.num_idle > 1 else f"no end after {core.num_steps} steps"
            self._judge(laws.broken("progress", self.step, name, "progress in every step", got))
            raise Stuck
        if core.config.policy == "fcfs":
            for fate in alive:
                self._look_at_wait(core, fate)

    def _look_at_wait(self, core: EngineCore, fate: Fate) -> None:
        """Nobody waits for its first token longer than serving all before it, one after the other, could take."""
        waited = core.num_steps - fate.came_at_step
        if fate.num_tokens or waited <= fate.fair_steps:
            return
        ids = list(self.fates)
        passed = [i for i in ids[ids.index(fate.job.id) + 1 :] if self.fates[i].num_tokens]
        if passed:
            expected = f"its first token within {fate.fair_steps} steps, enough to serve all before it one by one"
            got = f"none after {waited}, while {len(passed)} that came later have theirs"
            self._judge(laws.broken("progress", self.step, fate.job.id, expected, got))

    def _limit(self, core: EngineCore) -> int:
        return 20 + 2 * PATIENCE * sum(_steps_alone(core, job) for job in self.load.jobs)

    def _judge(self, verdict: Verdict) -> bool:
        if not verdict.holds:
            self.found.setdefault(verdict.law, verdict)
        return verdict.holds


def _steps_alone(core: EngineCore, job: Job) -> int:
    """That a request takes which has the engine to itself."""
    chunk = core.config.long_prefill_token_threshold or core.config.budget
    return -(-len(job.prompt) // min(chunk, core.config.budget)) + job.max_tokens


class Stuck(Exception):
    """The load will not end."""
