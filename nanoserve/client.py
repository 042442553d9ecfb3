"""How a front end reaches an engine core. Shift 2 of vLLM v1.

Owns the boundary between the two; knows nothing of either side's work. v0: a call, and everything shares one
interpreter lock (`InProcessClient`). v1: a core in a process of its own over ZMQ (`CoreProcessClient`), and the
runner in another one behind a shared-memory ring (`SplitRunnerClient`). Laws: tests/test_layouts.py,
tests/test_faults.py.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]  (`signal` makes an enum of each handler: 15 us a step)
import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from nanoserve import messages
from nanoserve.core import EngineCore
from nanoserve.messages import CoreOutputs, SchedulerStats, UtilityCall
from nanoserve.process import ChildDiedError, ChildProcess
from nanoserve.request import EngineInfo, EngineOutput, EngineRequest
from nanoserve.runner_process import RunnerProcess
from nanoserve.worker import CoreStart, core_main

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig
    from nanoserve.record import Observer
    from nanoserve.runner import Runner

OWN_OUTPUT = "inproc://output"  # the way into the output socket from this process
MAX_SOCKET_PATH = 80  # characters of a folder that sockets fit in
FOLDER_PREFIX = "nanoserve-"  # of a folder with sockets
INPUT, OUTPUT = "input", "output"  # the sockets in it
TORN = "the engine was interrupted within a step, which is torn; start another one."
OWNER = "owner"  # a file beside them, locked as long as the front end lives: so that a leftover is known for one


class EngineDeadError(RuntimeError):
    """The engine is gone: every open request has failed, and so will every later call."""


class EngineClient(Protocol):
    """One interface for all layouts; greedy tokens are the same in all of them.

    `submit`, `abort` and `call` may come from any thread; one thread at a time polls.
    """

    starts_core: ClassVar[bool]  # whether start_timeout_s means anything to it
    starts_runner: ClassVar[bool]  # the same of execute_timeout_s
    info: EngineInfo
    stats: SchedulerStats  # as of the last poll

    def __init__(self, config: EngineConfig, observer: Observer | None = None) -> None:
        """Build the engine. ValueError for a config that cannot work; nothing is left running then."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """ValueError if the id is in use, or a number in it has more than 64 bits."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Idempotent. Each request that was alive ends with one output whose reason is `abort`."""
        ...

    def poll(self, timeout: float | None = None) -> list[EngineOutput]:
        """News, in process by running one step; [] when there is none within `timeout` seconds.
        EngineDeadError once the core is dead."""
        ...

    def call(self, method: str, *args: Any) -> Any:
        """One of the core's utilities (`EngineCore.utilities`); RuntimeError with the core's error if it raised."""
        ...

    def close(self) -> None:
        """Idempotent. Nothing is left running."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...


class _Client:
    """What the layouts share: live ids, a sticky death, and `with`."""

    def __init__(self) -> None:
        self.stats = SchedulerStats()
        self._live: set[str] = set()
        self._death: str | None = None

    def _open(self, request: EngineRequest) -> None:
        self._check_alive()
        if request.id in self._live:
            raise ValueError(f"request id {request.id!r} is in use; ids of live requests must differ.")
        self._live.add(request.id)

    def _note_ends(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        self._live.difference_update(output.id for output in outputs if output.finish_reason)
        return outputs

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


@contextlib.contextmanager
def whole_despite_interrupts() -> Iterator[None]:
    """Ctrl-C raises when all of this is done: a scheduler that has taken half a step is none to go on with. A second
    one does not wait, for a step that never ends. Python tells its main thread alone."""
    handler = _signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    waiting: list[tuple[Any, ...]] = []

    def wait(*interrupt: Any) -> None:
        if waiting:
            _signal.signal(signal.SIGINT, handler)
            handler(*waiting.pop())
        waiting.append(interrupt)

    _signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        _signal.signal(signal.SIGINT, handler)
        if waiting:
            handler(*waiting.pop())


class InProcessClient(_Client):
    """Front end, scheduler and runner share one interpreter, hence one lock: a busy front end delays the step."""

    starts_core: ClassVar[bool] = False
    starts_runner: ClassVar[bool] = False

    def __init__(self, config: EngineConfig, observer: Observer | None = None) -> None:
        super().__init__()
        self.core = EngineCore.build(config, observer)
        self.info = self.core.info
        self._inbox: deque[EngineRequest | list[str]] = deque()  # requests, and the ids of aborts
        self._outputs: list[EngineOutput] = []  # of a step that ended with an interrupt, for the next poll
        self._news = threading.Condition()
        self._step_lock = threading.RLock()

    def submit(self, request: EngineRequest) -> None:
        messages.encode_request(request)  # refuses what no wire could carry, so that layouts agree
        self._open(request)
        with self._news:
            self._inbox.append(request)
            self._news.notify()

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        self.core.abort(ids)  # at once: the step that runs will honour it
        with self._news:
            self._inbox.append(ids)  # and in its place behind the requests that are not in the core yet
            self._news.notify()

    def poll(self, timeout: float | None = None) -> list[EngineOutput]:
        self._check_alive()
        with self._news:
            self._news.wait_for(lambda: self._inbox or self.core.has_work or self._outputs or self._death, timeout)
        self._check_alive()
        with self._step_lock, whole_despite_interrupts():
            try:
                while self._inbox:
                    self._hand_over(self._inbox.popleft())
                self._outputs += self._note_ends(self.core.step())
            except Exception as error:
                self._death = f"the engine died in a step: {error!r} ({self.core.describe_crash(error)})"
                raise EngineDeadError(self._death) from error
            except BaseException:
                self._death = TORN
                raise
            self.stats = self.core.stats
        outputs, self._outputs = self._outputs, []
        return outputs

    def _hand_over(self, item: EngineRequest | list[str]) -> None:
        if isinstance(item, list):
            self.core.abort(item)
        else:
            self.core.add(item)

    def call(self, method: str, *args: Any) -> Any:
        self._check_alive()
        with self._step_lock, whole_despite_interrupts():
            try:
                return self.core.call(method, list(args))
            except Exception as error:
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            except BaseException:
                self._death = TORN
                raise

    def close(self) -> None:
        self._death = self._death or "the engine was closed"
        with self._news:
            self._news.notify_all()
        with self._step_lock:
            self.core.close()


class CoreProcessClient(_Client):
    """vLLM v1's layout: scheduler and runner in a process of their own, on the other side of two sockets.

    Tokenizing, detokenizing and HTTP then compete with the step for cores, but not for an interpreter lock.
    """

    starts_core: ClassVar[bool] = True
    starts_runner: ClassVar[bool] = False
    make_runner: ClassVar[Callable[[EngineConfig], Runner] | None] = None

    def __init__(self, config: EngineConfig, observer: Observer | None = None) -> None:
        import zmq

        super().__init__()
        self._folder, owner = _socket_folder()
        self._finalizers: list[Callable[[], Any]] = [weakref.finalize(self, _remove, self._folder, owner)]
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.ROUTER)
        self._input.setsockopt(zmq.SNDHWM, 0)
        self._input.setsockopt(zmq.LINGER, 0)
        self._input.bind(f"ipc://{self._folder}/{INPUT}")
        self._output = self._context.socket(zmq.PULL)
        self._output.setsockopt(zmq.RCVHWM, 0)
        self._output.bind(f"ipc://{self._folder}/{OUTPUT}")
        self._output.bind(OWN_OUTPUT)
        self._send_lock = threading.Lock()
        self._poll_lock = threading.Lock()
        self._pending: list[EngineOutput] = []  # came in while a utility call was waited for
        self._calls: dict[int, Future[Any]] = {}
        self._num_calls = 0
        try:
            self._child = ChildProcess("engine core", core_main, folder=self._folder, on_exit=self._on_exit)
            self._finalizers.append(weakref.finalize(self, self._child.stop))
            self.info = self._start(config, observer)
        except BaseException:
            self.close()
            raise

    def _start(self, config: EngineConfig, observer: Observer | None) -> EngineInfo:
        self._child.link.send(
            CoreStart(
                config,
                observer,
                type(self).make_runner,
                f"ipc://{self._folder}/{INPUT}",
                f"ipc://{self._folder}/{OUTPUT}",
            )
        )
        ok, value = self._child.recv(config.start_timeout_s)
        if not ok:
            raise value
        if not self._input.poll(10_000):
            raise ChildDiedError("the engine core did not connect to its input socket")
        self._core_id, _ = self._input.recv_multipart()
        return value

    def _on_exit(self) -> None:
        """From the thread that awaits the child: wake whoever polls. What the core sent before is read first."""
        import zmq

        with contextlib.suppress(zmq.ZMQError):
            socket = self._context.socket(zmq.PUSH)
            socket.connect(OWN_OUTPUT)
            socket.send_multipart([messages.DEAD, f"the engine core {self._child.describe_exit()}".encode()])
            socket.close(linger=1000)

    def submit(self, request: EngineRequest) -> None:
        payload = messages.encode_request(request)
        self._open(request)
        self._send(messages.ADD, payload)

    def abort(self, request_ids: Iterable[str]) -> None:
        if self._death is None:
            self._send(messages.ABORT, messages.encode(list(request_ids)))

    def _send(self, kind: bytes, payload: bytes) -> None:
        with self._send_lock:
            self._input.send_multipart([self._core_id, kind, payload])

    def poll(self, timeout: float | None = None) -> list[EngineOutput]:
        with self._poll_lock:
            if not self._pending:
                self._check_alive()
                self._receive(timeout)
                if not self._pending:
                    self._check_alive()
            outputs, self._pending = self._pending, []
        return self._note_ends(outputs)

    def _receive(self, timeout: float | None) -> None:
        """Take in everything that has come, waiting for the first message."""
        import zmq

        if not self._output.poll(None if timeout is None else max(0, int(timeout * 1000))):
            return
        with contextlib.suppress(zmq.Again):
            while self._death is None:
                kind, payload = self._output.recv_multipart(zmq.NOBLOCK)
                if kind == messages.DEAD:
                    self._die(payload.decode())
                elif kind == messages.OUTPUTS:
                    self._take(messages.decode(kind, payload))

    def _take(self, news: CoreOutputs) -> None:
        self._pending += news.outputs
        self.stats = news.stats or self.stats
        for result in news.results:
            future = self._calls.pop(result.call_id, None)
            if future is None:
                continue
            if result.error is None:
                future.set_result(result.value)
            else:
                future.set_exception(RuntimeError(result.error))

    def _die(self, reason: str) -> None:
        self._death = f"the engine is dead: {reason}"
        for future in self._calls.values():
            future.set_exception(EngineDeadError(self._death))
        self._calls.clear()

    def call(self, method: str, *args: Any) -> Any:
        self._check_alive()
        future: Future[Any] = Future()
        with self._send_lock:
            self._num_calls += 1
            call_id = self._num_calls
        self._calls[call_id] = future
        self._send(messages.UTILITY, messages.encode(UtilityCall(call_id, method, list(args))))
        while not future.done():
            self._check_alive()
            if self._poll_lock.acquire(timeout=0.01):  # else another thread polls, and will set the result
                try:
                    if not future.done():
                        self._receive(0.1)
                finally:
                    self._poll_lock.release()
            else:
                with contextlib.suppress(TimeoutError):
                    future.exception(timeout=0.1)
        return future.result()

    def close(self) -> None:
        if self._death is None:
            self._die("it was closed")
        for finalizer in reversed(self._finalizers):
            finalizer()
        with self._poll_lock, self._send_lock:
            self._context.destroy(linger=0)


class SplitRunnerClient(CoreProcessClient):
    """Three processes: the core keeps the scheduler, and its runner is in a process of its own behind a ring."""

    starts_runner: ClassVar[bool] = True
    make_runner: ClassVar[Callable[[EngineConfig], Runner] | None] = RunnerProcess


def _socket_folder() -> tuple[str, int]:
    """A private folder with a path short enough for a socket address, and the file descriptor that locks it."""
    folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
    if len(folder) > MAX_SOCKET_PATH:
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir="/tmp")
    owner = os.open(f"{folder}/{OWNER}", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(owner, fcntl.LOCK_EX)
    return folder, owner


def _remove(folder: str, owner: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(owner)
