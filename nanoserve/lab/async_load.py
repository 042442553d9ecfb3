"""Puts a load on a target: requests at their times (open loop) or one after another on some seats (closed loop).

Owns the waiting, none of which is without a limit, and the account of what became of each request; knows neither
HTTP nor engines. A request that fails is counted and the load goes on. Laws: tests/test_bench.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from nanoserve.lab.arrivals import BenchRequest

INTERRUPTED = "interrupted"  # the kind of "error" of requests that were running when the user had seen enough


class RequestFailedError(Exception):
    """A request came to no good end. `kind` is a word to count by."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one request; times in seconds of the monotonic clock. The target writes what it hears into it,
    the loop the rest."""

    id: str
    due_s: float
    sent_s: float
    end_s: float = 0.0
    event_s: list[float] = field(default_factory=list)  # when events that bring tokens came: one token each, or more
    num_output_tokens: int = 0
    num_prompt_tokens: int | None = None  # None: the server does not say
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None  # its kind
    detail: str = ""

    @property
    def ttft_s(self) -> float | None:
        """From when the request was due, so that a late sender hides nothing. None before there is a token."""
        return self.event_s[0] - self.due_s if self.event_s else None

    @property
    def itl_s(self) -> list[float]:
        """The gaps between two consecutive events, as in vLLM's benchmark."""
        return [later - earlier for earlier, later in zip(self.event_s, self.event_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (tokens - 1). None if there are fewer than two tokens."""
        gaps = self.num_output_tokens - 1
        return (self.event_s[-1] - self.event_s[0]) / gaps if self.event_s and gaps > 0 else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s


class Target(Protocol):
    """Something that answers requests, for one event loop."""

    async def ask(self, request: BenchRequest, outcome: Outcome) -> None:
        """Send it, and write into `outcome` what comes until the answer is whole.

        Raises RequestFailedError. May be cancelled at any time, and lets go of the request then.
        """
        ...


@dataclass(frozen=True, slots=True)
class LoadResult:
    outcomes: list[Outcome]  # in the order in which the requests were sent
    start_s: float
    interrupted: bool


async def run_load(
    target: Target,
    requests: Iterable[BenchRequest],
    *,
    timeout_s: float,
    concurrency: int | None = None,
    duration_s: float | None = None,
    on_end: Callable[[Outcome], None] | None = None,
) -> LoadResult:
    """Send everything and wait for all the ends.

    `timeout_s` limits each request; after `duration_s` none is sent any more. `concurrency`: a closed loop on that
    many seats; None: an open loop, where a request is sent when it is due, whatever has become of those before.
    When this task is cancelled (Ctrl-C), what runs is cancelled as well, and the result is what there is.
    """
    load = _Load(target, timeout_s, on_end)
    interrupted = False
    try:
        if concurrency is None:
            await load.run_open(requests, duration_s)
        else:
            await load.run_closed(requests, concurrency, duration_s)
    except asyncio.CancelledError:
        interrupted = True
    finally:
        await load.cancel()
    return LoadResult(load.outcomes, load.start_s, interrupted)


class _Load:
    def __init__(self, target: Target, timeout_s: float, on_end: Callable[[Outcome], None] | None) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._tasks: set[asyncio.Task[None]] = set()
        self.outcomes: list[Outcome] = []
        self.start_s = time.monotonic()

    async def run_open(self, requests: Iterable[BenchRequest], duration_s: float | None) -> None:
        for request in requests:
            if duration_s is not None and request.at_s >= duration_s:
                break
            due_s = self.start_s + request.at_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self._spawn(self._send(request, due_s))
        await self._join()

    async def run_closed(self, requests: Iterable[BenchRequest], concurrency: int, duration_s: float | None) -> None:
        left = iter(requests)
        for _ in range(concurrency):
            self._spawn(self._keep_seat_busy(left, duration_s))
        await self._join()

    async def _keep_seat_busy(self, left: Iterator[BenchRequest], duration_s: float | None) -> None:
        while duration_s is None or time.monotonic() < self.start_s + duration_s:
            request = next(left, None)
            if request is None:
                return
            await self._send(request, time.monotonic())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

    async def _join(self) -> None:
        if self._tasks:
            await asyncio.gather(*self._tasks)

    async def cancel(self) -> None:
        """Idempotent; nothing runs any more when it returns."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, request: BenchRequest, due_s: float) -> None:
        outcome = Outcome(id=request.id, due_s=due_s, sent_s=time.monotonic())
        self.outcomes.append(outcome)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._target.ask(request, outcome)
        except asyncio.CancelledError:
            outcome.error = INTERRUPTED
            raise
        except TimeoutError:
            outcome.error, outcome.detail = "timeout", f"no end within {self._timeout_s:g} s"
        except RequestFailedError as error:
            outcome.error, outcome.detail = error.kind, str(error)
        except Exception as error:  # one request must not end the others
            outcome.error, outcome.detail = type(error).__name__, str(error)
        finally:
            outcome.end_s = time.monotonic()
            if self._on_end is not None:
                self._on_end(outcome)
