"""A runner in a process of its own, behind the same interface: plans go out and results come back through a ring.

The layout of the popular description of vLLM v1, and of its tensor-parallel workers; a single-GPU runner really
shares the engine core's process. Knows nothing of what a runner does. New requests travel whole, running ones as
differences, because a `StepPlan` is written that way. Laws: tests/test_layouts.py, tests/test_faults.py,
tests/test_one_step_ahead.py.
"""

from __future__ import annotations

import traceback
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from nanoserve.execution import Execution
from nanoserve.process import ChildDiedError, ChildProcess, Link, told_to_parent
from nanoserve.request import StepPlan, StepResult
from nanoserve.ring import DEFAULT_CAPACITY, PeerGoneError, RingChannel

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig

RESULT, FAILED = b"R", b"E"
ROOM = DEFAULT_CAPACITY - 4096  # bytes of plans in flight that a ring holds for certain, lengths included
_encode = msgspec.msgpack.Encoder().encode


class RunnerError(RuntimeError):
    """The runner failed in a step, died, or did not answer in time."""


class RemoteStep:
    """The handle of a plan that was sent. Results come in the order of the plans."""

    def __init__(self, runner: RunnerProcess, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.result: StepResult | None = None
        self._runner = runner

    def wait(self) -> StepResult:
        """RunnerError when a step up to this one failed, or the child died, or did not answer in time."""
        while self.result is None:
            self._runner.receive()
        return self.result


class RunnerProcess:
    """Speaks `Runner` on this side. Raises what the child raised while it starts; RunnerError afterwards."""

    captures_graphs: ClassVar[bool] = False  # that is a question for the class that the child builds

    def __init__(self, config: EngineConfig) -> None:
        self._timeout_s = config.execute_timeout_s
        self._start_timeout_s = config.start_timeout_s
        self._channel, fds = RingChannel.create()
        self._child = ChildProcess("runner", runner_main, pass_fds=fds)
        self._decoder = msgspec.msgpack.Decoder(StepResult)
        self._in_flight: deque[RemoteStep] = deque()
        self.execution = Execution()
        try:
            self._child.link.send(config)
            self.model_len, self.vocab_size, self.device, self.dtype = self._answer()
        except BaseException:
            self.close()
            raise

    def _answer(self) -> Any:
        ok, value = self._child.recv(self._start_timeout_s)
        if not ok:
            raise value
        return value

    def pool_blocks(self, block_size: int) -> int:
        self._child.link.send(block_size)
        return self._answer()

    def allocate(self, config: EngineConfig) -> None:
        self._child.link.send(config)
        self.execution = self._answer()

    def launch(self, plan: StepPlan) -> RemoteStep:
        message = _encode(msgspec.structs.replace(plan, left_out={}))
        # A child that waits until its result is read reads no plan: what the ring cannot hold waits for the results.
        while self._in_flight and sum(step.num_bytes for step in self._in_flight) + len(message) > ROOM:
            self.receive()
        step = RemoteStep(self, len(message))
        try:
            self._channel.send(message)
        except PeerGoneError:
            raise self._gone() from None
        self._in_flight.append(step)
        return step

    def receive(self) -> None:
        """Wait for the oldest result that is missing, and give it to its handle."""
        assert self._in_flight, "no plan is in flight"
        try:
            message = self._channel.recv(self._timeout_s)
        except PeerGoneError:
            raise self._gone() from None
        except TimeoutError:
            raise RunnerError(
                f"the runner did not answer within execute_timeout_s={self._timeout_s:g}; give it more "
                "(--execute-timeout), or a step fewer tokens (--max-num-batched-tokens)"
            ) from None
        if message[:1] == FAILED:
            raise RunnerError(f"the runner failed in a step:\n{message[1:].decode()}")
        self._in_flight.popleft().result = self._decoder.decode(message[1:])

    def _gone(self) -> RunnerError:
        self._child.stop()
        return RunnerError(f"the runner process {self._child.describe_exit()}")

    def close(self) -> None:
        self._channel.close()
        self._child.stop()


def runner_main(link: Link, memory_fd: int, wake_fd: int) -> int:
    """The child: builds the runner, answers the start-up calls, then runs plans until the core hangs up."""
    channel = RingChannel.from_fds(memory_fd, wake_fd)
    config: EngineConfig = link.recv()
    try:
        runner = config.runner(config)
        link.send((True, (runner.model_len, runner.vocab_size, runner.device, runner.dtype)))
        link.send((True, runner.pool_blocks(link.recv())))
        runner.allocate(link.recv())
        link.send((True, runner.execution))
    except EOFError:
        return 1
    except Exception as error:
        link.send((False, told_to_parent(error, ChildDiedError)))
        return 1
    plans = msgspec.msgpack.Decoder(StepPlan)
    try:
        while True:
            plan = plans.decode(channel.recv())
            try:
                answer = RESULT + _encode(runner.launch(plan).wait())
            except Exception:
                answer = FAILED + traceback.format_exc().encode()
            channel.send(answer)
    except PeerGoneError:
        runner.close()
        return 0
