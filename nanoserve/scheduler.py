"""Who gets how many tokens in this step. Shift 1 of vLLM v1.

Owns the queues and `num_computed_tokens`; asks the block manager for room; knows no tensors and no clock. v0: a step
is either prompts or decodes (`PhaseSplitScheduler`). v1: no phases, every request catches up with its known tokens
inside one budget (`UnifiedScheduler`). Each policy is one `schedule()`; all the rest is shared. Laws:
tests/test_scheduler.py, tests/test_scheduler_properties.py.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import msgspec

from nanoserve.block_pool import PrefixHit, cdiv
from nanoserve.request import EngineOutput, NewRequest, Reason, Request, Status, StepPlan

if TYPE_CHECKING:
    from nanoserve.blocks import KVCacheManager
    from nanoserve.config import EngineConfig


class Scheduler(Protocol):
    """What the core asks of a policy."""

    def add(self, request: Request) -> None:
        """Queue it. ValueError if the id is in use."""
        ...

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Idempotent, legal at any time, also while the request's step runs. Returns the ids that were alive."""
        ...

    def schedule(self) -> StepPlan:
        """Decide a step and count it as computed, so that the next one can be decided before this one has run."""
        ...

    def update(self, plan: StepPlan, sampled: Mapping[str, list[int]]) -> list[EngineOutput]:
        """Take what the step sampled; returns news of the requests that have any. Plans come back once each, in order;
        the next one may have been decided meanwhile."""
        ...


class WaitingQueue(Protocol):
    def push(self, request: Request, /) -> None: ...
    def push_front(self, request: Request, /) -> None: ...
    def peek(self) -> Request: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request, /) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...


class FcfsQueue(deque[Request]):
    """First come, first served; a preempted request comes back to the front."""

    push, push_front, pop = deque.append, deque.appendleft, deque.popleft

    def peek(self) -> Request:
        return self[0]


def urgency(request: Request) -> tuple[int, float, str]:
    """Sort key of the priority policy: the smallest goes first, the largest is preempted first."""
    return (request.priority, request.arrival_s, request.id)


class PriorityQueue:
    """Ordered by `urgency`, whatever the order of arrival; a preempted request takes its old place."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, str], Request]] = []

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (urgency(request), request))

    push_front = push

    def peek(self) -> Request:
        return self._heap[0][1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        self._heap.remove((urgency(request), request))
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap, key=lambda entry: entry[0]))


QUEUES: Mapping[str, type[FcfsQueue] | type[PriorityQueue]] = {"fcfs": FcfsQueue, "priority": PriorityQueue}


class Draft(msgspec.Struct, eq=False):
    """A step while it is being decided; `BaseScheduler._seal` makes it a `StepPlan`."""

    budget: int  # tokens left
    tokens: dict[str, int] = {}
    new: dict[str, NewRequest] = {}
    new_blocks: dict[str, list[int]] = {}
    preempted: list[str] = []
    copies: list[tuple[int, int]] = []
    left_out: dict[str, Reason] = {}
    stopped_by: Reason | None = None  # why the head of `waiting` was not admitted

    def give(self, request: Request, num_tokens: int) -> None:
        self.tokens[request.id] = num_tokens
        self.budget -= num_tokens

    def take_back(self, request: Request) -> None:
        self.budget += self.tokens.pop(request.id)
        self.new_blocks.pop(request.id, None)


class Share(NamedTuple):
    """One request's part in a scheduled step: what `update` must know of it, whatever was decided in between."""

    request: Request  # not its id, which another one may bear by then
    num_computed_tokens: int  # when the step is done
    samples: bool  # it has caught up by then: one token
    num_preemptions: int  # while this has not grown, its blocks are the ones that the step wrote to


class BaseScheduler:
    """Everything but the policy: queues, room for one more request, preemption, results, ends."""

    default_watermark: ClassVar[float] = 0.0
    fixed: ClassVar[Mapping[str, object]] = {"preemption_mode": "recompute"}  # fields that it takes one value of

    def __init__(self, config: EngineConfig, blocks: KVCacheManager) -> None:
        self.blocks = blocks
        self.budget = config.budget
        self.max_num_seqs = config.max_num_seqs
        self.max_model_len = config.model_len
        self.long_prefill_token_threshold = config.long_prefill_token_threshold
        self.reserve_full_prompt = config.reserve_full_prompt
        self.watermark_blocks = config.watermark_blocks
        self.by_priority = config.policy == "priority"
        self.swaps = config.preemption_mode == "swap"
        self.requests: dict[str, Request] = {}  # all that are alive
        self.waiting: WaitingQueue = QUEUES[config.policy]()
        self.running: list[Request] = []
        self.swapped: deque[Request] = deque()
        self.num_preemptions = 0
        self._step = 0
        self._finished: list[str] = []  # since the last plan
        self._ended: list[EngineOutput] = []  # ended inside schedule()
        self._in_flight: dict[int, tuple[list[Share], list[EngineOutput]]] = {}  # by step; with what it ended

    @classmethod
    def check_config(cls, config: EngineConfig) -> None:
        """ValueError for what this policy would have to ignore."""
        for name, value in cls.fixed.items():
            if (given := getattr(config, name)) != value:
                raise ValueError(
                    f"{name}={given!r} means nothing to {cls.__name__}, which works as with {value!r}; leave it out, "
                    "or use another scheduler."
                )

    @classmethod
    def check_resolved(cls, config: EngineConfig) -> None:
        """The same, for limits that are known only when the engine is built."""

    @classmethod
    def default_budget(cls, max_model_len: int, device: str) -> int:
        """Tokens a step when the config leaves `max_num_batched_tokens` open."""
        return 512 if device == "cpu" else 2048

    # What the core calls

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def can_schedule(self) -> bool:
        """Whether anyone has tokens to compute, before it is known what the steps in flight sample."""
        for request in self.requests.values():
            if request.num_behind > 0 and (request.status is Status.RUNNING or not request.num_placeholders):
                return True
        return False

    def add(self, request: Request) -> None:
        if request.id in self.requests:
            raise ValueError(f"request id {request.id!r} is in use; ids of live requests must differ.")
        self.requests[request.id] = request
        self.waiting.push(request)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        aborted = []
        for request_id in request_ids:
            if request := self.requests.get(request_id):
                self._finish(request, Status.FINISHED_ABORTED)
                aborted.append(request_id)
        return aborted

    def schedule(self) -> StepPlan:
        raise NotImplementedError(f"{type(self).__name__} is not a policy: schedule() is what a policy writes.")

    def update(self, plan: StepPlan, sampled: Mapping[str, list[int]]) -> list[EngineOutput]:
        """By the shares of this plan: its requests may have got more tokens since, or lost all they had."""
        shares, outputs = self._in_flight.pop(plan.step)
        for request, num_computed_tokens, samples, num_preemptions in shares:
            request.num_placeholders -= samples
            if request.is_finished:
                continue  # aborted meanwhile, or stopped by the token before this one
            if request.num_preemptions == num_preemptions:
                self.blocks.commit(request, num_computed_tokens)
            if samples and (tokens := sampled.get(request.id)):
                outputs.append(self._accept(request, tokens))
        return outputs

    def reset_prefix_cache(self, force: bool = False) -> bool:
        """Empty the prefix cache. While requests run it is refused (False), or they are preempted first (`force`);
        they go back to waiting in their old order. A step may be in flight: it writes to blocks that are free then,
        and whoever gets them writes in a later step."""
        if force:
            draft = Draft(0)
            while self.running:
                BaseScheduler._preempt(self, self.running[-1], draft)
            self._finished += draft.preempted  # the runner drops their rows with the next plan
        return self.blocks.reset()

    # Verbs that policies are written in

    def _admit(self, request: Request, num_tokens: int, hit: PrefixHit, draft: Draft, watermark_blocks: int) -> bool:
        """Give the head of `waiting` its blocks and tokens, or set `draft.stopped_by` and change nothing."""
        if request.num_placeholders:  # preempted while its step runs: it comes back whole, its next token included
            draft.stopped_by = Reason("nothing_to_compute")
            return False
        reserve = min(request.num_tokens, self.max_model_len) if self.reserve_full_prompt else 0
        blocks = self.blocks.allocate(
            request, num_tokens, hit, reserve_tokens=reserve, watermark_blocks=watermark_blocks
        )
        if blocks is None:
            need = self.blocks.demand(request, num_tokens, hit, reserve_tokens=reserve)
            free = self.blocks.num_free_blocks
            code, need = ("blocks", need) if need > free else ("watermark", need + watermark_blocks)
            draft.stopped_by = Reason(code, need=need, free=free)
            return False
        self.waiting.pop()
        if not request.num_preemptions:
            request.num_hit_tokens = hit.num_tokens
        self._start(request, num_tokens, hit.num_tokens, draft)
        return True

    def _start(self, request: Request, num_tokens: int, num_computed_tokens: int, draft: Draft) -> None:
        request.status = Status.RUNNING
        request.num_computed_tokens = num_computed_tokens
        self.running.append(request)
        draft.give(request, num_tokens)
        draft.new[request.id] = NewRequest(
            request.id,
            list(request.token_ids),
            request.num_prompt_tokens,
            list(request.block_ids),
            num_computed_tokens,
            request.params,
            request.eos_token_id,
        )

    def _grow(self, request: Request, num_tokens: int, draft: Draft) -> bool:
        """Give a running request its next tokens, preempting others, then itself, while there is no room."""
        while (blocks := self.blocks.allocate(request, num_tokens)) is None:
            victim = max(self.running, key=urgency) if self.by_priority else self.running[-1]
            self._preempt(victim, draft)
            if victim is request:
                return False
        if blocks:
            draft.new_blocks[request.id] = blocks
        draft.give(request, num_tokens)
        return True

    def _decode_everyone(self, draft: Draft) -> None:
        """One token for every running request that has one to compute, oldest first."""
        for request in list(self.running):
            is_victim = request.status is not Status.RUNNING  # of one before it
            if request.num_behind and not is_victim and draft.budget > 0:
                self._grow(request, 1, draft)

    def _preempt(self, victim: Request, draft: Draft) -> None:
        """By recompute: all blocks go back, the output so far is kept and becomes part of the prompt."""
        self._withdraw(victim, draft)
        self.blocks.free(victim)
        victim.status = Status.PREEMPTED
        victim.num_computed_tokens = 0
        self.waiting.push_front(victim)

    def _withdraw(self, victim: Request, draft: Draft) -> None:
        """Take a running request out of the batch, and out of this very step if it was already given tokens."""
        self.running.remove(victim)
        if victim.id in draft.tokens:
            # Its blocks were hashed on the promise of this step; nobody may find KV that will never be written.
            self.blocks.forget(victim, victim.num_computed_tokens)
            draft.take_back(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        draft.preempted.append(victim.id)

    def _ignore(self, request: Request) -> None:
        """Drop a request that could never fit."""
        self._finish(request, Status.FINISHED_IGNORED)
        self._end(request)

    def _seal(self, draft: Draft) -> StepPlan:
        """Count the step as computed, and as sampled, and say why each of the others got nothing."""
        shares = [self._count(self.requests[request_id], n) for request_id, n in draft.tokens.items()]
        finished, self._finished = self._finished, []
        self._step += 1
        self._in_flight[self._step], self._ended = (shares, self._ended), []
        self._explain(draft)
        return StepPlan(
            self._step,
            draft.tokens,
            list(draft.new.values()),
            draft.new_blocks,
            self.blocks.take_replaced(),
            draft.preempted,
            finished,
            draft.copies,
            draft.left_out,
        )

    def _count(self, request: Request, num_tokens: int) -> Share:
        """A token that the step will sample is counted from now on; its id is the runner's to know first."""
        request.num_computed_tokens += num_tokens
        samples = request.num_behind == 0
        request.num_placeholders += samples
        return Share(request, request.num_computed_tokens, samples, request.num_preemptions)

    def _explain(self, draft: Draft) -> None:
        if len(draft.tokens) == len(self.running) and not self.waiting and not self.swapped:
            return  # everyone got something
        preemption = Reason("preemption_this_step")
        out_of_budget = preemption if draft.preempted and draft.budget > 0 else Reason("budget")
        for request in self.running:
            if request.id not in draft.tokens:
                if not request.num_behind:
                    draft.left_out[request.id] = Reason("nothing_to_compute")
                draft.left_out.setdefault(request.id, out_of_budget)
        full = Reason("seq_cap" if len(self.running) >= self.max_num_seqs else "budget")
        for request in self.swapped:
            draft.left_out.setdefault(request.id, preemption if draft.preempted else full)
        if draft.preempted:
            draft.left_out.update(dict.fromkeys((request.id for request in self.waiting), preemption))
        elif self.waiting:
            head = self.waiting.peek()
            behind = Reason("fcfs_behind", behind=head.id)
            draft.left_out.update(dict.fromkeys((request.id for request in self.waiting), behind))
            draft.left_out[head.id] = draft.stopped_by or full

    # Ends

    def _accept(self, request: Request, tokens: list[int]) -> EngineOutput:
        """Append sampled tokens up to the one that stops it; the surplus is dropped."""
        accepted: list[int] = []
        for token_id in tokens:
            request.token_ids.append(token_id)
            accepted.append(token_id)
            if status := self._stop_status(request, token_id):
                self._finish(request, status)
                break
        return EngineOutput(
            id=request.id,
            new_token_ids=accepted,
            finish_reason=request.status.finish_reason if request.is_finished else None,
            stop_reason=request.stop_reason,
            num_cached_tokens=request.num_hit_tokens,
        )

    def _stop_status(self, request: Request, token_id: int) -> Status | None:
        params, num_tokens = request.params, len(request.token_ids)
        num_outputs = num_tokens - request.num_prompt_tokens
        if num_outputs >= params.min_tokens:
            if token_id == request.eos_token_id and not params.ignore_eos:
                return Status.FINISHED_STOPPED
            if token_id in params.stop_token_ids:
                request.stop_reason = token_id
                return Status.FINISHED_STOPPED
        if num_tokens >= self.max_model_len or num_outputs >= request.max_tokens:
            return Status.FINISHED_LENGTH
        return None

    def _finish(self, request: Request, status: Status) -> None:
        """Out of its queue, blocks back, out of the table; from then on its id is unknown."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.SWAPPED:
            self.swapped.remove(request)
        else:
            self.waiting.remove(request)
        self._close(request, status)

    def _close(self, request: Request, status: Status) -> None:
        request.status = status
        self.blocks.free(request)
        del self.requests[request.id]
        self._finished.append(request.id)

    def _end(self, request: Request, error: str | None = None) -> None:
        """Report an end that no token announces."""
        self._ended.append(
            EngineOutput(
                id=request.id,
                new_token_ids=[],
                finish_reason=request.status.finish_reason,
                num_cached_tokens=request.num_hit_tokens,
                error=error,
            )
        )


class PhaseSplitScheduler(BaseScheduler):
    """v0: while a prompt waits that fits, a step is prompts, whole; only otherwise is it one token for everyone.

    So one long prompt freezes every stream for as long as it takes: head-of-line blocking. Mirrors
    `vllm/core/scheduler.py: Scheduler._schedule_default` of 0.8.5 (v0 could chunk; it was off by default).
    """

    default_watermark: ClassVar[float] = 0.01
    fixed: ClassVar[Mapping[str, object]] = {"long_prefill_token_threshold": 0, "reserve_full_prompt": True}

    @classmethod
    def check_resolved(cls, config: EngineConfig) -> None:
        longest = config.model_len - 1
        if config.budget < longest:
            raise ValueError(
                f"max_num_batched_tokens={config.budget} is smaller than the longest prompt, {longest} tokens, and "
                f"{cls.__name__} does not chunk; raise it to {longest}, lower max_model_len, or use UnifiedScheduler."
            )

    @classmethod
    def default_budget(cls, max_model_len: int, device: str) -> int:
        return max(max_model_len, 2048)

    def schedule(self) -> StepPlan:
        draft = Draft(self.budget)
        running_before = list(self.running)
        if self.swapped:
            draft.stopped_by = Reason("paused", behind=self.swapped[0].id)
        else:
            self._prefill(draft)
        if draft.tokens:
            first = next(iter(draft.tokens))
            draft.left_out = dict.fromkeys((r.id for r in running_before), Reason("paused", behind=first))
        else:
            self._decode_everyone(draft)
            if not draft.preempted:
                self._swap_in(draft)
        return self._seal(draft)

    def _prefill(self, draft: Draft) -> None:
        while self.waiting:
            request = self.waiting.peek()
            if request.num_tokens > min(self.max_model_len, self.budget) or not self.blocks.fits(request.num_tokens):
                self._ignore(request)
                continue
            hit = self.blocks.lookup(request)
            n = request.num_tokens - hit.num_tokens
            if n > draft.budget or len(self.running) >= self.max_num_seqs:
                return
            if not self._admit(request, n, hit, draft, self.watermark_blocks):
                return

    def _preempt(self, victim: Request, draft: Draft) -> None:
        if not self.swaps:
            super()._preempt(victim, draft)
            return
        self._withdraw(victim, draft)
        pairs = self.blocks.swap_out(victim)
        if pairs is None:  # v0 crashes here
            need = len(victim.block_ids)
            self._close(victim, Status.FINISHED_ERROR)
            self._end(victim, f"not enough swap space for {need} blocks; raise num_swap_blocks.")
            return
        draft.copies += pairs
        victim.status = Status.SWAPPED
        self.swapped.append(victim)

    def _swap_in(self, draft: Draft) -> None:
        """Bring swapped requests back, oldest first; they decode in this same step."""
        while self.swapped and draft.budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.swapped[0]
            if request.num_placeholders:  # as in `_admit`
                draft.left_out[request.id] = Reason("nothing_to_compute")
                return
            if not self.blocks.fits(request.num_tokens):
                self._ignore(request)
                continue
            need = cdiv(request.num_tokens, self.blocks.block_size) + self.watermark_blocks
            free = self.blocks.num_free_blocks
            if need > free:
                behind = Reason("fcfs_behind", behind=request.id)
                draft.left_out.update(dict.fromkeys((r.id for r in self.swapped), behind))
                draft.left_out[request.id] = Reason("blocks", need=need, free=free)
                return
            pairs = self.blocks.swap_in(request)
            grown = self.blocks.allocate(request, 1)
            assert pairs is not None, f"{free} free blocks were enough"
            assert grown is not None, f"{free} free blocks were enough"
            draft.copies += pairs
            self.swapped.popleft()
            self._start(request, 1, request.num_computed_tokens, draft)


class ChunkedNoMixScheduler(BaseScheduler):
    """Ours, to teach: a prompt may be cut to the budget, but a step is still either prompts or decodes.

    Shows that chunking alone does not help: the decodes wait for all the chunks. Several small engines do this today.
    """

    fixed: ClassVar[Mapping[str, object]] = {"long_prefill_token_threshold": 0, "preemption_mode": "recompute"}

    def schedule(self) -> StepPlan:
        draft = Draft(self.budget)
        running_before = list(self.running)
        self._prefill(draft)
        if draft.tokens:
            first = next(iter(draft.tokens))
            paused = Reason("paused", behind=first)
            draft.left_out = {r.id: paused for r in running_before if r.id not in draft.tokens}
        else:
            self._decode_everyone(draft)
        return self._seal(draft)

    def _prefill(self, draft: Draft) -> None:
        for request in list(self.running):
            n = min(request.num_behind, draft.budget)
            is_decode = request.num_behind == 1 and request.num_output_tokens + request.num_placeholders > 0
            if is_decode or n == 0 or request.status is not Status.RUNNING:
                continue
            self._grow(request, n, draft)
        while self.waiting and draft.budget > 0 and len(self.running) < self.max_num_seqs and not draft.preempted:
            request = self.waiting.peek()
            if request.num_tokens >= self.max_model_len or not self.blocks.fits(request.num_tokens):
                self._ignore(request)
                continue
            hit = self.blocks.lookup(request)
            n = min(request.num_tokens - hit.num_tokens, draft.budget)
            watermark = self.watermark_blocks if self.running else 0
            if not self._admit(request, n, hit, draft, watermark):
                return


class UnifiedScheduler(BaseScheduler):
    """v1: no phases. Each request has computed some of its known tokens; each step lets everyone catch up, running
    requests first, inside one token budget. A decode is a request that is one token behind; a long prompt is one
    that takes several steps, in what the decodes leave over. Mirrors `vllm/v1/core/sched/scheduler.py: schedule`.
    """

    def schedule(self) -> StepPlan:
        draft = Draft(self.budget)
        threshold = self.long_prefill_token_threshold if len(self.requests) > 1 else 0

        index = 0
        while index < len(self.running) and draft.budget > 0:
            request = self.running[index]
            n = request.num_behind
            if 0 < threshold < n:
                n = threshold
            n = min(n, draft.budget)
            if n == 0:
                index += 1
                continue
            num_victims = len(draft.preempted)
            if not self._grow(request, n, draft):
                break
            if len(draft.preempted) > num_victims:  # by priority, a victim may have stood before it
                index = self.running.index(request)
            index += 1

        while self.waiting and draft.budget > 0 and len(self.running) < self.max_num_seqs and not draft.preempted:
            request = self.waiting.peek()
            if request.num_tokens >= self.max_model_len or not self.blocks.fits(request.num_tokens):
                self._ignore(request)
                continue
            hit = self.blocks.lookup(request)
            n = request.num_tokens - hit.num_tokens
            if 0 < threshold < n:
                n = threshold
            n = min(n, draft.budget)
            watermark = self.watermark_blocks if self.running else 0
            if not self._admit(request, n, hit, draft, watermark):
                break

        return self._seal(draft)
