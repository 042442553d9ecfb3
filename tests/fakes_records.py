"""Engines without a model for tests of the laboratory: the real core, scheduler and blocks over a runner that computes
nothing. `VirtualClock` makes time a figure, so that latencies can be checked to the microsecond.
"""

from __future__ import annotations

from collections.abc import Callable

from nanoserve.config import EngineConfig
from nanoserve.core import EngineCore
from nanoserve.execution import Execution
from nanoserve.record import ListRecorder, StepRecord
from nanoserve.request import EngineOutput, EngineRequest, SamplingParams, StepPlan, StepResult

VOCAB_SIZE = 997


class VirtualClock:
    """Seconds that pass only when someone lets them."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class FakeResult:
    def __init__(self, token_ids: dict[str, list[int]]) -> None:
        self._token_ids = token_ids

    def wait(self) -> StepResult:
        return StepResult(token_ids=self._token_ids)


class FakeRunner:
    """Samples a digest of all tokens known so far: whoever computes the wrong ones emits others."""

    captures_graphs = False
    execution = Execution(attention="none")
    model_len = 4096
    device = "cpu"
    dtype = "float32"
    vocab_size = VOCAB_SIZE

    def __init__(self, config: EngineConfig, on_launch: Callable[[int], None] = lambda num_tokens: None) -> None:
        self.on_launch = on_launch
        self.known: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}

    def pool_blocks(self, block_size: int) -> int:
        return 1024

    def allocate(self, config: EngineConfig) -> None:
        """There is no KV to make room for."""

    def launch(self, plan: StepPlan) -> FakeResult:
        for request_id in [*plan.finished, *plan.preempted]:
            self.known.pop(request_id, None)
        for new in plan.new:
            self.known[new.id] = list(new.token_ids)
            self.computed[new.id] = new.num_computed_tokens
        sampled: dict[str, list[int]] = {}
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self.computed[request_id] += num_tokens
            known = self.known[request_id]
            if self.computed[request_id] == len(known):
                known.append(self.sample(known))
                sampled[request_id] = known[-1:]
        self.on_launch(plan.num_tokens)
        return FakeResult(sampled)

    def sample(self, known: list[int]) -> int:
        return (sum(known) * 31 + len(known)) % VOCAB_SIZE

    def close(self) -> None:
        """Nothing was opened."""


class WrongRunner(FakeRunner):
    """A planted bug: late tokens are off by one."""

    def sample(self, known: list[int]) -> int:
        return super().sample(known) + (len(known) > 40)


class VirtualClient:
    """As much of an in-process client as `drive` needs, around a core that is already there."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    def submit(self, request: EngineRequest) -> None:
        self.core.add(request)

    def poll(self, timeout: float | None = None) -> list[EngineOutput]:
        return self.core.step()


def virtual_client(
    config: EngineConfig, cost_s: Callable[[int], float]
) -> tuple[VirtualClient, VirtualClock, list[StepRecord]]:
    """An engine whose steps take `cost_s(tokens)`. `config` must have every size filled in; nothing is validated."""
    clock, recorder = VirtualClock(), ListRecorder()
    runner = FakeRunner(config, on_launch=lambda num_tokens: clock.sleep(cost_s(num_tokens)))
    assert config.num_blocks is not None
    blocks = config.blocks(
        config.num_blocks,
        config.block_size,
        watermark_blocks=config.watermark_blocks,
        num_swap_blocks=config.num_swap_blocks,
    )
    core = EngineCore(config, config.scheduler(config, blocks), runner, recorder, clock)
    return VirtualClient(core), clock, recorder.records


def arrival(request_id: str, num_prompt_tokens: int, arrival_s: float = 0.0, max_tokens: int = 8) -> EngineRequest:
    """A request for records made by hand."""
    return EngineRequest(
        id=request_id,
        prompt_token_ids=list(range(1, num_prompt_tokens + 1)),
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        arrival_s=arrival_s,
    )
