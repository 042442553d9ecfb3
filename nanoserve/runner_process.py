"""A runner in a process of its own, behind the same interface: plans go out and results come back through a ring.

The layout of the popular description of vLLM v1, and of its tensor-parallel workers; a single-GPU runner really
shares the engine core's process. Knows nothing of what a runner does. New requests travel whole, running ones as
differences, because a `StepPlan` is written that way. Laws: tests/test_layouts.py, tests/test_faults.py.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import msgspec

from nanoserve.process import ChildDiedError, ChildProcess, Link
from nanoserve.request import StepPlan, StepResult
from nanoserve.ring import PeerGoneError, RingChannel

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig

RESULT, FAILED = b"R", b"E"
_encode = msgspec.msgpack.Encoder().encode


class RunnerError(RuntimeError):
    """The runner failed in a step, died, or did not answer in time."""


class RunnerProcess:
    """Speaks `Runner` on this side. Raises what the child raised while it starts; RunnerError afterwards."""

    def __init__(self, config: EngineConfig) -> None:
        self._timeout_s = config.execute_timeout_s
        self._start_timeout_s = config.start_timeout_s
        self._channel, fds = RingChannel.create()
        self._child = ChildProcess("runner", runner_main, pass_fds=fds)
        self._decoder = msgspec.msgpack.Decoder(StepResult)
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
        self._child.link.send(("pool_blocks", block_size))
        return self._answer()

    def allocate(self, config: EngineConfig) -> None:
        self._child.link.send(("allocate", config))
        self._answer()

    def launch(self, plan: StepPlan) -> RunnerProcess:
        """One step at a time: the handle is this object."""
        try:
            self._channel.send(_encode(msgspec.structs.replace(plan, left_out={})))
        except PeerGoneError:
            raise self._gone() from None
        return self

    def wait(self) -> StepResult:
        try:
            message = self._channel.recv(self._timeout_s)
        except PeerGoneError:
            raise self._gone() from None
        except TimeoutError:
            raise RunnerError(f"the runner did not answer within execute_timeout_s={self._timeout_s:g}") from None
        if message[:1] == FAILED:
            raise RunnerError(f"the runner failed in a step:\n{message[1:].decode()}")
        return self._decoder.decode(message[1:])

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
        while True:
            call, argument = link.recv()
            link.send((True, getattr(runner, call)(argument)))
            if call == "allocate":
                break
    except EOFError:
        return 1
    except Exception as error:
        expected = isinstance(error, ValueError)
        link.send((False, ValueError(str(error)) if expected else ChildDiedError(traceback.format_exc())))
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
