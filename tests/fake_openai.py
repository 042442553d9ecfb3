"""A server that speaks just enough of the completions API to be loaded, and does what a test's script says.

It runs on a thread of its own and notes when it read a request and when it wrote each event, on the clock that the
load generator reads too.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Exchange:
    """One request as the server saw it, and the way to answer it."""

    body: dict[str, Any]
    writer: asyncio.StreamWriter
    read_s: float
    event_s: list[float] = field(default_factory=list)

    async def head(self) -> None:
        await self.raw(HEAD)

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def event(self, body: object) -> None:
        data = b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"
        await self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def token(self, text: str = "word", end: str | None = None) -> None:
        self.event_s.append(time.monotonic())
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": end}], "usage": None})

    async def finish(self, num_tokens: int, num_prompt: int = 10, num_cached: int = 4) -> None:
        details = {"cached_tokens": num_cached}
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "prompt_tokens_details": details}
        await self.event({"choices": [], "usage": usage})
        await self.event(b"[DONE]")
        await self.raw(b"0\r\n\r\n")

    async def answer(self, delays: list[float]) -> None:
        """Whole: token i comes delays[i] seconds after the one before."""
        await self.head()
        for number, delay in enumerate(delays, 1):
            await asyncio.sleep(delay)
            await self.token(end="length" if number == len(delays) else None)
        await self.finish(len(delays))


Script = Callable[[Exchange], Awaitable[None]]


class FakeServer:
    """`with FakeServer(script) as server`: at `server.url`; what came is in `server.exchanges`."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.exchanges: list[Exchange] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._done.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("GET /v1/models "):
                body = json.dumps({"data": [{"id": "fake-model"}]}).encode()
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                return
            assert head.startswith("POST /v1/completions "), head
            length = next(line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-len"))
            body = json.loads(await reader.readexactly(int(length)))
            exchange = Exchange(body, writer, time.monotonic())
            self.exchanges.append(exchange)
            await self._script(exchange)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
