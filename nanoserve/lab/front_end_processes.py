"""The two children of a front-end run: the server of `nanoserve serve`, and the load generator of `nanoserve bench`.

Each takes what it needs over its link and ends with its parent, whatever becomes of that one. The server gets a config
and not flags, so that classes of a user's own are served as well. Knows no figures: see `front_end.py`.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nanoserve.lab.arrivals import BenchRequest
from nanoserve.process import Link

if TYPE_CHECKING:
    from nanoserve.api.async_llm import AsyncLLM
    from nanoserve.lab.async_load import Outcome

HOST = "127.0.0.1"
NICENESS = 10  # the load is not what is measured: it gets what the server leaves
GRACE_S = 5.0  # for the server to end its engine, which writes the last records


class ServerStart(msgspec.Struct, frozen=True):
    """What a server is started with."""

    config: Any  # EngineConfig
    trace: Path  # the core writes its records there


class ServerReady(msgspec.Struct, frozen=True):
    url: str
    model: str  # the name to ask for
    info: Any  # EngineInfo


class LoadStart(msgspec.Struct, frozen=True):
    """What the load generator is started with."""

    url: str
    model: str
    requests: list[BenchRequest]
    num_streams: int  # seats of a closed loop
    timeout_s: float  # of each request


class LoadEnd(msgspec.Struct, frozen=True):
    metrics: Any  # BenchMetrics
    start_s: float  # of the monotonic clock, which all processes share
    cpu_share: float  # CPU seconds of this process / seconds of the load


def server_main(link: Link) -> int:
    """The child: answers (True, ServerReady) or (False, what went wrong), and serves until its parent hangs up."""
    from nanoserve.api.async_llm import AsyncLLM
    from nanoserve.api.listen import bind
    from nanoserve.record import JsonlRecorder

    start: ServerStart = link.recv()
    recorder = JsonlRecorder(start.trace)
    try:
        sock = bind(HOST, 0)
        llm = AsyncLLM(config=start.config, observer=recorder)
    except Exception as error:
        link.send((False, error if isinstance(error, ValueError) else RuntimeError(traceback.format_exc())))
        return 1
    ended = threading.Event()
    try:
        asyncio.run(_serve(link, llm, sock, ended))
    finally:
        llm.close()
        recorder.close()
        ended.set()
    return 0


async def _serve(link: Link, llm: AsyncLLM, sock: Any, ended: threading.Event) -> None:
    from nanoserve.api.listen import Listener, address_of
    from nanoserve.api.server import ApiServer, ServerOptions

    server = ApiServer(llm, ServerOptions())
    listener = Listener(server, sock)

    def hang_up() -> None:
        listener.stop()
        ended.wait(GRACE_S)

    def announce() -> None:
        link.on_gone = hang_up
        link.send((True, ServerReady(address_of(sock), server.model_names[0], llm.info)))

    await listener.run(announce)


def load_main(link: Link) -> int:
    """The child: the tokens of each request at its end, as they come, then a `LoadEnd`."""
    os.nice(NICENESS)
    start: LoadStart = link.recv()
    link.send(asyncio.run(_load(start, link)))
    return 0


async def _load(start: LoadStart, link: Link) -> LoadEnd:
    from nanoserve.lab.async_load import run_load
    from nanoserve.lab.bench_report import measure_load
    from nanoserve.lab.sse_client import Address
    from nanoserve.lab.targets import UrlTarget

    def on_end(outcome: Outcome) -> None:
        link.send(outcome.num_output_tokens)

    target = UrlTarget(Address.parse(start.url), start.model)
    warm_up = [msgspec.structs.replace(request, id="warm-up", max_tokens=8) for request in start.requests[-1:]]
    await run_load(target, warm_up, timeout_s=start.timeout_s, concurrency=1)
    cpu_s = time.process_time()
    result = await run_load(
        target, start.requests, timeout_s=start.timeout_s, concurrency=start.num_streams, on_end=on_end
    )
    cpu_share = (time.process_time() - cpu_s) / (time.monotonic() - result.start_s)
    return LoadEnd(measure_load(result), result.start_s, cpu_share)
