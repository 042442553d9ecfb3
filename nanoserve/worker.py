"""The engine core's process: three threads around the step loop, and what happens when something dies.

    input thread   socket -> inbox (an abort also goes straight to the core: it is honoured while a step runs)
    main thread    inbox -> step -> outbox; sleeps when there is nothing to do
    output thread  outbox -> socket; what piled up goes out as one message

Knows no text. Mirrors `vllm/v1/engine/core.py: EngineCoreProc`. Laws: tests/test_layouts.py, tests/test_faults.py.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
import traceback
from typing import Any

import msgspec

from nanoserve import messages
from nanoserve.core import EngineCore
from nanoserve.messages import CoreOutputs, UtilityCall, UtilityResult
from nanoserve.process import Link, told_to_parent
from nanoserve.request import EngineOutput, EngineRequest
from nanoserve.runner_process import RunnerError

logger = logging.getLogger("nanoserve.core")
WAKE_UP = (b"", None)
GRACE_S = 2.0  # for an orderly end when the front end is gone


class CoreStart(msgspec.Struct, frozen=True):
    """What a core process is started with."""

    config: Any  # EngineConfig
    observer: Any  # Observer | None
    make_runner: Any  # Callable[[EngineConfig], Runner] | None: config.runner
    input_address: str
    output_address: str


def core_main(link: Link) -> int:
    """The child: builds the core, says that it is ready or why not, serves until it is told to end."""
    logging.basicConfig(format="%(levelname)s %(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    start: CoreStart = link.recv()
    try:
        core = EngineCore.build(start.config, start.observer, start.make_runner)
    except Exception as error:
        link.send((False, told_to_parent(error, RuntimeError)))
        return 1
    server = CoreServer(core, start.input_address, start.output_address)
    signal.signal(signal.SIGTERM, lambda *_: server.shut_down())

    def orphaned() -> None:
        server.shut_down(timeout_s=0.0)
        time.sleep(GRACE_S)

    link.on_gone = orphaned
    link.send((True, core.info))
    return server.run()


class CoreServer:
    """Serves one core to one front end."""

    def __init__(self, core: EngineCore, input_address: str, output_address: str) -> None:
        import zmq

        self.core = core
        self._inbox: queue.SimpleQueue[tuple[bytes, Any]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[CoreOutputs | str | None] = queue.SimpleQueue()
        self._deadline: float | None = None  # set: shutting down, at the latest then
        self._input = zmq.Context.instance().socket(zmq.DEALER)
        self._input.setsockopt(zmq.IDENTITY, b"core-0")
        self._input.connect(input_address)
        self._input.send(b"")  # the front end's router knows our address once it has this
        self._output_context = zmq.Context()  # of its own: its end waits until all is sent
        self._output = self._output_context.socket(zmq.PUSH)
        self._output.setsockopt(zmq.SNDHWM, 0)  # a slow front end never blocks the step
        self._output.setsockopt(zmq.LINGER, 2000)
        self._output.connect(output_address)

    def run(self) -> int:
        """Serve; the exit code."""
        threading.Thread(target=self._receive, name="core-input", daemon=True).start()
        sender = threading.Thread(target=self._send, name="core-output")
        sender.start()
        code = 0
        try:
            self._loop()
        except BaseException as error:  # whatever it was: the process must not live on without this thread
            code = 1
            where = self.core.describe_crash(error)
            if not isinstance(error, RunnerError):  # which says all there is to say
                logger.error("the engine core died in a step; %s\n%s", where, traceback.format_exc())
            self._outbox.put(f"{type(error).__name__}: {error} ({where})")
        self._outbox.put(None)
        sender.join()
        self.core.close()
        return code

    def shut_down(self, timeout_s: float | None = None) -> None:
        """End soon: finish what runs within `timeout_s` (None: the config's; 0: abort it), answer `abort` to the rest.
        Callable from signal handlers and other threads."""
        timeout_s = self.core.config.shutdown_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        self._inbox.put(WAKE_UP)

    # main thread

    def _loop(self) -> None:
        while True:
            self._drain_inbox()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self.core.abort(list(self.core.scheduler.requests))
            outputs = self.core.step()
            if outputs:
                self._outbox.put(CoreOutputs(outputs, self.core.stats))
            if self._deadline is not None and not self.core.has_work:
                return

    def _drain_inbox(self) -> None:
        """All that came in; sleeps first when there is nothing to do."""
        block = not self.core.has_work and self._deadline is None
        while True:
            try:
                self._handle(*self._inbox.get(block=block))
            except queue.Empty:
                return
            block = False

    def _handle(self, kind: bytes, item: Any) -> None:
        if kind == messages.ADD:
            self._add(item)
        elif kind == messages.ABORT:
            self.core.abort(item)  # again, for a request that was still in the inbox at the first time
        elif kind == messages.UTILITY:
            result = self._call(item)
            self._outbox.put(CoreOutputs([], self.core.stats, [result]))

    def _add(self, request: EngineRequest) -> None:
        if self._deadline is not None:
            self._outbox.put(CoreOutputs([EngineOutput(id=request.id, new_token_ids=[], finish_reason="abort")]))
            return
        self.core.add(request)

    def _call(self, call: UtilityCall) -> UtilityResult:
        if self._deadline is not None:
            return UtilityResult(call.call_id, error="the engine is shutting down")
        try:
            return UtilityResult(call.call_id, value=self.core.call(call.method, call.args))
        except Exception as error:
            return UtilityResult(call.call_id, error=f"{type(error).__name__}: {error}")

    # input thread

    def _receive(self) -> None:
        while True:
            kind, payload = self._input.recv_multipart()
            try:
                item = messages.decode(kind, payload)
            except msgspec.DecodeError as error:
                logger.error("a malformed message of type %r was dropped: %s", kind, error)
                continue
            if item is None:
                logger.warning("a message of unknown type %r was ignored", kind)
                continue
            if kind == messages.ABORT:
                self.core.abort(item)  # at once: the step that runs will honour it
            self._inbox.put((kind, item))  # also wakes the main thread

    # output thread

    def _send(self) -> None:
        is_open = True
        while is_open:
            batch: list[CoreOutputs] = []
            item = self._outbox.get()
            while isinstance(item, CoreOutputs):
                batch.append(item)
                if self._outbox.empty():
                    break
                item = self._outbox.get()
            if batch:
                self._output.send_multipart([messages.OUTPUTS, messages.encode(_merged(batch))])
            if isinstance(item, str):
                self._output.send_multipart([messages.DEAD, item.encode()])
            is_open = item is not None
        self._output.close()
        self._output_context.term()


def _merged(batch: list[CoreOutputs]) -> CoreOutputs:
    if len(batch) == 1:
        return batch[0]
    return CoreOutputs(
        [output for item in batch for output in item.outputs],
        batch[-1].stats,
        [result for item in batch for result in item.results],
    )
