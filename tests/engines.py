"""Schedulers and engines without a model, for the laws of scheduler, blocks and core. Imports no torch.

`Bench` drives a bare scheduler by hand, outside of a config's validation. `WatchedRunner` is the digest runner with a
hook while a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nanoserve.blocks import PrivateBlocks, V0CachedBlocks
from nanoserve.config import EngineConfig
from nanoserve.core import EngineCore
from nanoserve.invariants import check_blocks, check_plan, check_queues
from nanoserve.lab.fakes import DigestRunner, DigestStep
from nanoserve.record import Observer
from nanoserve.request import EngineOutput, EngineRequest, Request, SamplingParams, StepPlan, StepResult
from nanoserve.scheduler import BaseScheduler, UnifiedScheduler

EOS = 2
TOKEN = 7  # what a bench samples unless it is told otherwise


class Bench:
    """A bare scheduler; every step is checked against the invariants."""

    def __init__(
        self,
        scheduler: type[BaseScheduler] = UnifiedScheduler,
        manager: type[PrivateBlocks] = PrivateBlocks,
        *,
        num_blocks: int = 101,
        block_size: int = 16,
        budget: int = 64,
        max_model_len: int = 1000,
        watermark: float = 0.0,
        **fields: Any,
    ) -> None:
        self.config = EngineConfig(
            scheduler=scheduler,
            blocks=manager,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            watermark=watermark,
            **fields,
        )
        self.blocks = manager(
            num_blocks,
            block_size,
            watermark_blocks=self.config.watermark_blocks,
            free_order=self.config.free_order,
            num_swap_blocks=self.config.num_swap_blocks,
        )
        self.scheduler = scheduler(self.config, self.blocks)
        self.outputs: dict[str, list[EngineOutput]] = {}

    def add(self, request_id: str, prompt: int | list[int], max_tokens: int | None = 100, **fields: Any) -> Request:
        """`prompt`: its tokens, or how many of its own."""
        tokens = [len(self.outputs) * 1000 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        self.outputs.setdefault(request_id, [])
        names = ("min_tokens", "ignore_eos", "stop_token_ids", "prompt_logprobs")
        params = SamplingParams(max_tokens=max_tokens, **{k: fields.pop(k) for k in names if k in fields})
        fields.setdefault("eos_token_id", EOS)
        request = Request.from_engine_request(
            EngineRequest(id=request_id, prompt_token_ids=tokens, params=params, **fields), self.scheduler.max_model_len
        )
        self.scheduler.add(request)
        return request

    def update(self, plan: StepPlan, sampled: Mapping[str, list[int]] | None = None) -> list[str]:
        """Let the rows that caught up sample `TOKEN`, or what `sampled` says. Returns whom there is news of."""
        caught_up = [
            request_id
            for request_id in plan.num_scheduled_tokens
            if (request := self.scheduler.requests.get(request_id))
            and request.num_computed_tokens >= request.num_tokens
        ]
        return self.take(self.scheduler.update(plan, {i: (sampled or {}).get(i, [TOKEN]) for i in caught_up}))

    def take(self, outputs: list[EngineOutput]) -> list[str]:
        for output in outputs:
            self.outputs[output.id].append(output)
        return [output.id for output in outputs]

    def step(self, **sampled: list[int]) -> StepPlan:
        plan = self.scheduler.schedule()
        self.update(plan, sampled)
        self.check(plan)
        return plan

    def check(self, plan: StepPlan) -> None:
        check_plan(plan, self.scheduler)
        self.check_state()

    def check_state(self) -> None:
        check_queues(self.scheduler)
        check_blocks(self.blocks, self.scheduler.requests.values(), self.scheduler.max_model_len)

    def run(self, max_steps: int = 1000) -> list[StepPlan]:
        """To the end of everyone; all blocks are back then."""
        plans = []
        while self.scheduler.has_work:
            assert len(plans) < max_steps, f"no end after {max_steps} steps"
            plans.append(self.step())
        assert self.blocks.num_free_blocks == self.blocks.num_blocks - 1
        return plans

    def ids(self, queue: str) -> str:
        """The one-letter ids in a queue, in order."""
        return "".join(request.id for request in getattr(self.scheduler, queue))

    def tokens(self, request_id: str) -> list[int]:
        return [token_id for output in self.outputs[request_id] for token_id in output.new_token_ids]

    def end(self, request_id: str) -> tuple[str | None, int | str | None]:
        """finish_reason and stop_reason, of the last output; only the last has any."""
        *others, last = self.outputs[request_id]
        assert not any(output.finish_reason for output in others)
        return last.finish_reason, last.stop_reason


def reasons(plan: StepPlan) -> dict[str, str]:
    return {request_id: str(reason) for request_id, reason in plan.left_out.items()}


class WatchedRunner(DigestRunner):
    """Keeps the plans, and lets a test act while a step runs: launched, not yet updated.

    With v0's cache it insists that what a request hits was there before its step: no sharing within a step.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.plans: list[StepPlan] = []
        self.in_flight: Callable[[], None] = lambda: None
        self.no_same_step_sharing = issubclass(config.blocks, V0CachedBlocks)

    def launch(self, plan: StepPlan) -> DigestStep:
        self.plans.append(plan)
        handle = super().launch(plan)
        self.in_flight()
        return handle

    def execute(self, plan: StepPlan) -> StepResult:
        if self.no_same_step_sharing:
            for new in plan.new:
                hit = [new.block_ids[i // self.block_size] for i in range(new.num_computed_tokens)]
                slots = [b * self.block_size + i % self.block_size for i, b in enumerate(hit)]
                assert all(slot in self.cells for slot in slots), f"{new.id} hits blocks of its own step"
        return super().execute(plan)


def make_core(
    observer: Observer | None = None, runner: type[DigestRunner] = WatchedRunner, **fields: Any
) -> EngineCore:
    """A core over the digest runner, with every invariant checked after every step."""
    return EngineCore.build(EngineConfig(runner=runner, check_invariants=True, **fields), observer)


def engine_request(request_id: str, prompt: list[int], max_tokens: int | None = 8, **fields: Any) -> EngineRequest:
    params = fields.pop("params", None) or SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return EngineRequest(id=request_id, prompt_token_ids=prompt, params=params, **fields)
