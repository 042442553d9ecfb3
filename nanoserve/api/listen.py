"""Keeps an `ApiServer` on a socket until it is told to stop, and ends it in good order.

    SIGTERM or SIGINT: refuse new requests -> wait for open ones, `shutdown_timeout_s` at most -> abort the rest
    a second one: abort at once

Knows uvicorn and signals; no routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from nanoserve.api.server import ApiServer

SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.02
LAST_WRITES_S = 5  # for clients to read what is left of an aborted answer


def bind(host: str, port: int) -> socket.socket:
    """A socket that is taken but does not listen yet, so that nobody waits while a model is loaded.

    ValueError if the address cannot be had. Port 0: any free one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, protocol, _, address = found[0]
        # asyncio sends small answers at once (TCP_NODELAY) only on a socket that says it is TCP.
        sock = socket.socket(family, socket.SOCK_STREAM, protocol)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ValueError(f"host {host!r} is not an address to listen on: {error}; use 127.0.0.1 or 0.0.0.0.") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise ValueError(f"port {port} on {host} cannot be used ({reason}); choose another --port (0: any).") from None
    return sock


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers, which would end streams in the middle, and with a start to wait for."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


class Listener:
    """One server on one socket. `stop` may be called from any thread."""

    def __init__(self, server: ApiServer, sock: socket.socket, shutdown_timeout_s: float = 0.0) -> None:
        self._server = server
        self._sock = sock
        self._shutdown_timeout_s = shutdown_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._num_stops = 0

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`, or until a signal when this is the main thread. Then open requests are finished or
        aborted; the engine is the caller's to close."""
        loop = self._loop = asyncio.get_running_loop()
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=LAST_WRITES_S,
        )
        handles_signals = threading.current_thread() is threading.main_thread()
        if handles_signals:
            for number in SIGNALS:
                loop.add_signal_handler(number, self._on_stop)
        uvicorn_server = _Uvicorn(config, on_ready)
        drain = loop.create_task(self._drain(uvicorn_server))
        try:
            await uvicorn_server.serve([self._sock])
        finally:
            drain.cancel()
            if handles_signals:
                for number in SIGNALS:
                    loop.remove_signal_handler(number)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        """The server's. Its last answers may be cancelled, when nobody reads them in time: that is no failure."""
        try:
            await self._server.app(scope, receive, send)
        except asyncio.CancelledError:
            if not self._num_stops:
                raise

    def stop(self) -> None:
        assert self._loop is not None, "run() comes first"
        self._loop.call_soon_threadsafe(self._on_stop)

    def _on_stop(self) -> None:
        self._num_stops += 1
        self._stop.set()

    async def _drain(self, uvicorn_server: uvicorn.Server) -> None:
        await self._stop.wait()
        self._server.drain()
        llm, clock = self._server.llm, asyncio.get_running_loop().time
        deadline = clock() + self._shutdown_timeout_s
        while llm.num_open and clock() < deadline and self._num_stops < 2:
            await asyncio.sleep(POLL_S)
        await llm.abort_all()
        uvicorn_server.should_exit = True  # lets responses end first
