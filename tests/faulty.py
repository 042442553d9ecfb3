"""Engines that fail on purpose, and a look at what they leave behind. In a module, so that children can import it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nanoserve.config import EngineConfig
from nanoserve.lab.fakes import DigestRunner
from nanoserve.request import EngineRequest, SamplingParams
from nanoserve.scheduler import UnifiedScheduler

WAIT_S = 30.0  # a hang, on a loaded machine


class SlowRunner(DigestRunner):
    """A step takes 20 ms, so that a signal arrives while requests run."""

    def launch(self, plan):
        time.sleep(0.02)
        return super().launch(plan)


class RaisesInStep(DigestRunner):
    """The third step fails."""

    def launch(self, plan):
        if plan.step == 3:
            raise RuntimeError("the third step is cursed")
        return super().launch(plan)


class InterruptsInStep(DigestRunner):
    """The third step raises what is no Exception."""

    def launch(self, plan):
        if plan.step == 3:
            raise KeyboardInterrupt("the third step is cursed")
        return super().launch(plan)


class DiesInStep(DigestRunner):
    """The third step ends the process that it runs in."""

    def launch(self, plan):
        if plan.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().launch(plan)


class StuckInStep(DigestRunner):
    """The third step takes for ever."""

    def launch(self, plan):
        if plan.step == 3:
            time.sleep(3600)
        return super().launch(plan)


class RefusesToStart(DigestRunner):
    def __init__(self, config):
        raise ValueError("model 'nowhere' is not there; give it another.")


class CrashesAtStart(DigestRunner):
    def __init__(self, config):
        raise ZeroDivisionError("a bug in start-up")


class DiesAtStart(DigestRunner):
    def __init__(self, config):
        os.kill(os.getpid(), signal.SIGKILL)


def config_of(runner=DigestRunner, **fields) -> EngineConfig:
    fields = {"max_model_len": 1024, "scheduler": UnifiedScheduler, "check_invariants": True} | fields
    return replace(EngineConfig(), runner=runner, **fields)


def request(request_id: str, num_prompt: int = 20, max_tokens: int = 10, **fields) -> EngineRequest:
    first = sum(map(ord, request_id)) % 500
    prompt = [(first + i) % 1000 for i in range(num_prompt)]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
    return EngineRequest(id=request_id, prompt_token_ids=prompt, params=params, **fields)


def collect(client, num_requests: int, timeout: float = WAIT_S) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Poll until that many requests have ended: their tokens, and why they ended."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    deadline = time.monotonic() + timeout
    while len(ends) < num_requests:
        assert time.monotonic() < deadline, f"{ends} ended within {timeout} s, of {num_requests}"
        for output in client.poll(0.5):
            tokens.setdefault(output.id, []).extend(output.new_token_ids)
            if output.finish_reason:
                assert output.id not in ends, f"{output.id} ended twice"
                ends[output.id] = output.finish_reason
    return tokens, ends


def children_of(pid: int) -> list[int]:
    """Live descendants."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children_of(child)]
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.01)
