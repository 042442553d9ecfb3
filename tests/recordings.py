"""Random recorded runs for the laws of traces: every scheduler with every block manager, in step and one step ahead,
with arrivals, aborts and cache resets at any moment, also while a step runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from engines import WatchedRunner, engine_request, make_core
from hypothesis import strategies as st

from nanoserve.blocks import PrivateBlocks
from nanoserve.config import SEAMS
from nanoserve.core import EngineCore
from nanoserve.lab.trace import Trace
from nanoserve.record import ListRecorder
from nanoserve.request import EngineRequest, SamplingParams
from nanoserve.scheduler import BaseScheduler, PhaseSplitScheduler

COMBINATIONS = list(product(SEAMS["scheduler"].values(), SEAMS["blocks"].values(), (False, True)))
EOS = 7


@dataclass(frozen=True)
class Script:
    """What is done to a core, and with which core. A move is done before its step, or, late, while that step runs."""

    scheduler: type[BaseScheduler]
    blocks: type[PrivateBlocks]
    ahead: bool
    config: dict[str, Any]
    requests: list[EngineRequest]
    moves: list[tuple[int, bool, str, int]] = field(default_factory=list)  # step, late, kind, request

    def core(self, recorder: ListRecorder | None, runner: type[WatchedRunner] = WatchedRunner) -> EngineCore:
        seams = {"scheduler": self.scheduler, "blocks": self.blocks, "async_scheduling": self.ahead}
        return make_core(recorder, runner=runner, **seams, **self.config)


@st.composite
def scripts(draw: st.DrawFn, **forced: Any) -> Script:
    def number(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    scheduler, blocks, ahead = draw(st.sampled_from(COMBINATIONS))
    scheduler, blocks = forced.pop("scheduler", scheduler), forced.pop("blocks", blocks)
    block_size, usable = number(1, 4), number(4, 9)
    model_len, seats = usable * block_size, number(1, 5)
    config: dict[str, Any] = {
        "block_size": block_size,
        "num_blocks": usable + 1,
        "watermark": 0.0,
        "max_model_len": "auto",
        "max_num_seqs": seats,
        "max_num_batched_tokens": seats + number(0, 12),
        "free_order": draw(st.sampled_from(["uncached_first", "append"])),
        "reserve_full_prompt": draw(st.booleans()),
        "long_prefill_token_threshold": min(model_len, draw(st.sampled_from([0, 0, 1, 3]))),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
    } | dict(scheduler.fixed)
    if issubclass(scheduler, PhaseSplitScheduler):
        config["max_num_batched_tokens"] += model_len
        if blocks.can_swap and draw(st.booleans()):
            config |= {"preemption_mode": "swap", "num_swap_blocks": number(1, 12)}
    requests, moves = [], []
    for i in range(number(1, 7)):
        pieces = draw(st.lists(st.integers(0, 1), max_size=3))
        prompt = [100 * piece + j for piece in pieces for j in range(block_size)] + [300 + i] * number(0, block_size)
        params = SamplingParams(temperature=0.0, max_tokens=number(1, 12), min_tokens=0)
        request = engine_request(
            f"r{i}", (prompt or [1])[: model_len - 1], params=params, priority=number(0, 2), arrival_s=float(i),
            eos_token_id=EOS if number(0, 3) == 0 else None, cache_salt="s" if number(0, 9) == 0 else "",
        )  # fmt: skip
        requests.append(request)
        arrives = number(0, 8)
        moves.append((arrives, False, "add", i))
        if number(0, 2) == 0:
            moves.append((arrives + number(0, 10), draw(st.booleans()), "abort", i))
    for _ in range(max(0, number(-2, 2))):
        moves.append((number(0, 15), False, "reset", number(0, 1)))
    return Script(scheduler, blocks, ahead, config | forced, requests, sorted(moves, key=lambda move: move[0]))


def play(
    script: Script,
    recorder: ListRecorder,
    runner: type[WatchedRunner] = WatchedRunner,
    watch: Callable[[EngineCore], None] = lambda core: None,
) -> EngineCore:
    """Run a script to its end; `watch` is called when a step was decided and launched."""
    core = script.core(recorder, runner)
    assert isinstance(core.runner, WatchedRunner)
    moves = list(script.moves)
    for step in range(10_000):
        if not moves and not core.has_work:
            break
        due = [move for move in moves if move[0] <= step]
        moves = [move for move in moves if move[0] > step]
        for _, late, kind, i in due:
            if not late:
                do(core, script, kind, i)

        def in_flight(late: tuple[tuple[int, bool, str, int], ...] = tuple(m for m in due if m[1])) -> None:
            watch(core)
            for _, _, kind, i in late:
                do(core, script, kind, i)

        core.runner.in_flight = in_flight
        core.step()
    assert not core.has_work, "no end"
    core.runner.in_flight = lambda: None
    return core


def do(core: EngineCore, script: Script, kind: str, i: int) -> None:
    if kind == "add":
        core.add(script.requests[i])
    elif kind == "abort":
        core.abort([script.requests[i].id] * 2)
    else:
        core.call("reset_prefix_cache", [bool(i)])


def record(script: Script, runner: type[WatchedRunner] = WatchedRunner) -> Trace:
    recorder = ListRecorder()
    play(script, recorder, runner)
    return Trace(recorder.header, recorder.records)
