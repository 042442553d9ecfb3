"""Server-sent events over plain ASGI, and the one thing that frameworks leave open: noticing that a client left.

Whoever waits for a model must hear of a disconnect at once, also while nothing is being sent: `run_while_connected`
listens beside the work and cancels it. Knows no OpenAI and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that know it pass events on at once
)
_encode = msgspec.json.Encoder().encode


class ClientLeftError(Exception):
    """Nobody is there to answer."""


def event(body: Any) -> bytes:
    """One event; JSON has no raw newlines, so it is one line."""
    return b"data: " + _encode(body) + b"\n\n"


async def run_while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`. When the client leaves first, or the caller is cancelled, `work` is cancelled and has
    ended when this returns; ClientLeftError in the first case. The request's body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError
    finally:
        for other in (task, gone):
            if not other.done():
                other.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await other


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An ASGI response that sends events as they are made. `close` is called however it ends, even before it began."""

    def __init__(self, events: AsyncGenerator[bytes], close: Callable[[], None]) -> None:
        self._events = events
        self._close = close

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientLeftError, OSError):
                await run_while_connected(self._send(send), receive)
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
