"""Judges the message loop of an engine core: the reader's server in a process of its own, and a front end by hand.

The front end speaks the wire (nanoserve/messages.py) message by message, some of them nonsense, and each answer has a
few seconds. The core is the real one, with a digest for a model. A verdict's step is the number of the message. Laws:
tests/test_exercises.py.
"""

from __future__ import annotations

import logging
import select
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from nanoserve import messages
from nanoserve.core import EngineCore
from nanoserve.lab.check_engine import mishap
from nanoserve.lab.check_report import Line, Report
from nanoserve.lab.fakes import DigestRunner, reference_tokens
from nanoserve.lab.laws import Verdict, broken
from nanoserve.lab.trial_config import trial_config
from nanoserve.lab.trial_loads import Job, Load, sizes
from nanoserve.messages import CoreOutputs, UtilityCall
from nanoserve.process import ChildProcess, Link
from nanoserve.request import EngineOutput

ANSWER_S, START_S = 5.0, 60.0
PROMPT = [5, 6, 7, 8, 9]
LOAD = Load(name="by-hand", claim="Messages one by one.", jobs=[], fields=sizes(800, 64, 8))


def serve(link: Link) -> int:
    """The child: the reader's server around a core; what it raises goes to the parent as a verdict."""
    logging.disable(logging.CRITICAL)  # dropped messages are what the front end sends on purpose
    mine, input_address, output_address = link.recv()
    core = EngineCore.build(trial_config(LOAD, {}), make_runner=DigestRunner)

    def report(error: BaseException | None) -> str:
        if error is not None:
            link.send(mishap(error, mine))
        return "nowhere"

    core.dump_crash = report
    threading.excepthook = lambda args: report(args.exc_value) and None
    try:
        server = mine(core, input_address, output_address)
    except BaseException as error:
        report(error)
        return 1
    return server.run()


class Gone(Exception):
    """The server has ended; `verdict` says of what."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


class FrontEnd:
    """Sends messages and hears answers, with sockets of the kinds that `CoreProcessClient` has."""

    def __init__(self, mine: type) -> None:
        import zmq

        self._folder = tempfile.mkdtemp(prefix="check-core-")
        self._context = zmq.Context()
        self._router, self._pull = self._context.socket(zmq.ROUTER), self._context.socket(zmq.PULL)
        addresses = [f"ipc://{self._folder}/{name}" for name in ("input", "output")]
        for socket, address in zip((self._router, self._pull), addresses, strict=True):
            socket.bind(address)
        self._child = ChildProcess("engine core", serve)
        self._child.link.send((mine, *addresses))
        self._heard: list[CoreOutputs] = []
        self.num_sent = 0
        self._core_id = b""

    def connect(self) -> None:
        """Until the core has said hello."""
        deadline = time.monotonic() + START_S
        while not self._router.poll(50):
            self._look_for_an_end()
            if time.monotonic() > deadline:
                raise Gone(broken("runs", 0, "", "a server that connects", f"none within {START_S:g} s"))
        self._core_id, _ = self._router.recv_multipart()

    def send(self, kind: bytes, payload: bytes) -> None:
        self.num_sent += 1
        self._router.send_multipart([self._core_id, kind, payload])

    def add(self, request_id: str, max_tokens: int) -> None:
        request = Job(id=request_id, prompt=PROMPT, max_tokens=max_tokens).request()
        self.send(messages.ADD, messages.encode_request(request))

    def call(self, call_id: int, method: str, *args: Any) -> None:
        self.send(messages.UTILITY, messages.encode(UtilityCall(call_id, method, list(args))))

    def outputs(self, request_id: str) -> list[EngineOutput]:
        return [output for news in self._heard for output in news.outputs if output.id == request_id]

    def result(self, call_id: int) -> messages.UtilityResult | None:
        return next((r for news in self._heard for r in news.results if r.call_id == call_id), None)

    def hear_until(self, is_enough: Callable[[], Any]) -> bool:
        """Whether it came within the time for an answer."""
        deadline = time.monotonic() + ANSWER_S
        while not is_enough():
            if time.monotonic() > deadline:
                return False
            if not self._pull.poll(20):
                self._look_for_an_end()
                continue
            kind, payload = self._pull.recv_multipart()
            if kind == messages.OUTPUTS:
                self._heard.append(messages.decode(kind, payload))
            elif kind == messages.DEAD:
                self._look_for_an_end(ANSWER_S)
        return True

    def _look_for_an_end(self, patience_s: float = 0.0) -> None:
        if select.select([self._child.link.sock], [], [], patience_s)[0]:
            try:
                verdict = self._child.link.recv(ANSWER_S)
            except EOFError:
                self._child.stop()
                got = f"the process {self._child.describe_exit()}"
                verdict = broken("runs", 0, "", "a server that goes on", got)
            raise Gone(msgspec.structs.replace(verdict, step=self.num_sent))

    def close(self) -> None:
        self._child.stop(0.5)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


Stage = Callable[[FrontEnd], Verdict]


def requests_are_answered(front_end: FrontEnd) -> Verdict:
    front_end.add("a", 6)
    front_end.hear_until(lambda: any(output.finish_reason for output in front_end.outputs("a")))
    news = front_end.outputs("a")
    tokens = [token_id for output in news for token_id in output.new_token_ids]
    expected = f"{reference_tokens(PROMPT, 6)}, ended by length"
    reason = news[-1].finish_reason if news else None
    if tokens != reference_tokens(PROMPT, 6) or reason != "length":
        got = f"{tokens}, ended by {reason}" if news else "nothing"
        return broken("answers", front_end.num_sent, "a", expected, got)
    return Verdict(law="answers")


def calls_are_answered(front_end: FrontEnd) -> Verdict:
    front_end.call(7, "reset_prefix_cache")
    front_end.hear_until(lambda: front_end.result(7))
    if (result := front_end.result(7)) is None or result.value is not True or result.error is not None:
        return broken("calls", front_end.num_sent, "call 7", "value True, no error", _told(result))
    front_end.call(8, "no_such_utility")
    front_end.hear_until(lambda: front_end.result(8))
    result = front_end.result(8)
    if result is None or not result.error or "no_such_utility" not in result.error:
        expected = "an error that names 'no_such_utility'; the core goes on"
        return broken("calls", front_end.num_sent, "call 8", expected, _told(result))
    return Verdict(law="calls")


def _told(result: messages.UtilityResult | None) -> str:
    return "no answer" if result is None else f"value {result.value!r}, error {result.error!r}"


def nonsense_is_dropped(front_end: FrontEnd) -> Verdict:
    for what, kind, payload in (
        ("a message of unknown type", b"\x7f", messages.encode([])),
        ("a request that cannot be decoded", messages.ADD, b"\xc1"),
    ):
        front_end.send(kind, payload)
        request_id = f"after {what}"
        front_end.add(request_id, 1)
        if not front_end.hear_until(lambda request_id=request_id: front_end.outputs(request_id)):
            step = front_end.num_sent
            return broken("nonsense", step, "", f"the request that comes {request_id} to be answered", "no answer")
    return Verdict(law="nonsense")


def aborts_are_honoured(front_end: FrontEnd) -> Verdict:
    front_end.add("long", 2500)
    if not front_end.hear_until(lambda: front_end.outputs("long")):
        return broken("aborts", front_end.num_sent, "long", "its first token", "none")
    front_end.send(messages.ABORT, messages.encode(["long"]))
    front_end.hear_until(lambda: any(output.finish_reason for output in front_end.outputs("long")))
    reason = front_end.outputs("long")[-1].finish_reason
    if reason != "abort":
        got = f"its end by {reason}" if reason else "more of its tokens"
        return broken("aborts", front_end.num_sent, "long", "its end by abort", got)
    return Verdict(law="aborts")


STAGES: tuple[tuple[str, str, Stage], ...] = (
    ("answers", "A request that is added is answered: all its tokens, then its end.", requests_are_answered),
    ("calls", "A call is answered under its number, by a value or by an error.", calls_are_answered),
    ("nonsense", "What cannot be read is dropped, and what comes next is served.", nonsense_is_dropped),
    ("aborts", "An abort ends its request at once, also while it runs.", aborts_are_honoured),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessOfItsOwn:
    """How the exercise is judged: stage by stage, up to the first law that is broken."""

    exercise: str

    def __call__(self, mine: type) -> Report:
        found: dict[str, Verdict] = {}
        front_end = FrontEnd(mine)
        try:
            front_end.connect()
            for law, _, stage in STAGES:
                found[law] = stage(front_end)
                if not found[law].holds:
                    break
        except Gone as end:
            found[next(law for law, _, _ in STAGES if law not in found)] = end.verdict
        finally:
            front_end.close()
        lines = [Line(law=law, meaning=meaning, verdict=found.get(law)) for law, meaning, _ in STAGES]
        first = next((line for line in lines if line.verdict and not line.verdict.holds), None)
        return Report(exercise=self.exercise, lines=lines, first=first)
