"""An engine client whose engine is the test: it says what comes, when, and sees what was asked for."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from nanoserve.client import EngineDeadError
from nanoserve.messages import SchedulerStats
from nanoserve.request import EngineInfo, EngineOutput, EngineRequest

MODEL_LEN = 256
VOCAB = 2048


class HandClient:
    """Answers with what `say` was given; or, when `answer` is set, with what it makes of every request at once."""

    answer: ClassVar[Callable[[EngineRequest], list[EngineOutput]] | None] = None
    made: ClassVar[list[HandClient]]

    def __init__(self, config: Any, observer: object = None) -> None:
        self.info = EngineInfo(
            model=config.model,
            max_model_len=MODEL_LEN,
            vocab_size=VOCAB,
            num_blocks=64,
            block_size=16,
            device="cpu",
            dtype="float32",
        )
        self.stats = SchedulerStats()
        self.submitted: list[EngineRequest] = []
        self.aborted: list[str] = []
        self._news: queue.SimpleQueue[list[EngineOutput] | Exception] = queue.SimpleQueue()
        self.made.append(self)

    def say(self, *outputs: EngineOutput) -> None:
        """One batch of news."""
        self._news.put(list(outputs))

    def die(self, reason: str) -> None:
        self._news.put(EngineDeadError(reason))

    def submit(self, request: EngineRequest) -> None:
        self.submitted.append(request)
        if type(self).answer is not None:
            self.say(*type(self).answer(request))

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids

    def poll(self, timeout: float | None = None) -> list[EngineOutput]:
        try:
            item = self._news.get(timeout=timeout)
        except queue.Empty:
            return []
        if isinstance(item, Exception):
            raise item
        return item

    def call(self, method: str, *args: Any) -> Any:
        return {"method": method, "args": args}

    def close(self) -> None:
        self.die("closed")


def hand_client(answer: Callable[[EngineRequest], list[EngineOutput]] | None = None) -> type[Any]:
    """A client class of its own; its instances are in `.made`."""
    return type("Hand", (HandClient,), {"answer": staticmethod(answer) if answer else None, "made": []})


def tokens(request: EngineRequest, *token_ids: int, end: str | None = None) -> EngineOutput:
    return EngineOutput(id=request.id, new_token_ids=list(token_ids), finish_reason=end)
