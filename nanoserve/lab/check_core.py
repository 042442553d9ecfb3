"""Judges the message loop of an engine core: the reader's server in a process of its own, and a front end by hand.

The front end speaks the wire (nanoserve/messages.py) message by message, some of them nonsense, and each answer has a
few seconds. The core is the real one, with a digest for a model, whose steps can be held (check_hold.py). A verdict's
step is the number of the message. Laws: tests/test_exercises.py.
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
from nanoserve.config import EngineConfig
from nanoserve.core import EngineCore
from nanoserve.lab.check_engine import mishap
from nanoserve.lab.check_hold import HELD, RELEASE, SHUT_DOWN, HoldingRunner, WatchedInbox
from nanoserve.lab.check_report import Line, Report
from nanoserve.lab.fakes import reference_tokens
from nanoserve.lab.laws import Verdict, broken
from nanoserve.lab.trial_config import trial_config
from nanoserve.lab.trial_loads import Job, Load, sizes
from nanoserve.messages import CoreOutputs, UtilityCall
from nanoserve.process import ChildProcess, Link
from nanoserve.request import EngineOutput
from nanoserve.runner import Runner

ANSWER_S, START_S = 5.0, 60.0
PROMPT = [5, 6, 7, 8, 9]
LOAD = Load(name="by-hand", claim="Messages one by one.", jobs=[], fields=sizes(800, 64, 8))


def serve(link: Link) -> int:
    """The child: the reader's server around a core; what it raises goes to the parent as a verdict."""
    logging.disable(logging.CRITICAL)  # dropped messages are what the front end sends on purpose
    mine, input_address, output_address = link.recv()
    gate = threading.Event()

    def make_runner(config: EngineConfig) -> Runner:
        runner = HoldingRunner(config)
        runner.gate, runner.tell = gate, lambda: link.send(HELD)
        return runner

    core = EngineCore.build(trial_config(LOAD, {}), make_runner=make_runner)

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
    server._inbox = WatchedInbox(gate, server.shut_down)
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
        self.num_held = 0  # steps
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

    def hold(self, request_id: str, max_tokens: int) -> bool:
        """Add a request whose first step is held; whether it is."""
        num_held = self.num_held
        self.add(request_id, max_tokens)
        return self.hear_until(lambda: self.num_held > num_held)

    def abort(self, *request_ids: str) -> None:
        self.send(messages.ABORT, messages.encode(request_ids))

    def outputs(self, request_id: str) -> list[EngineOutput]:
        return [output for news in self._heard for output in news.outputs if output.id == request_id]

    def end(self, request_id: str) -> str:
        """Its finish reason; "" before that."""
        return next((output.finish_reason for output in self.outputs(request_id) if output.finish_reason), "")

    def num_tokens(self, request_id: str) -> int:
        return sum(len(output.new_token_ids) for output in self.outputs(request_id))

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
                if verdict == HELD:
                    self.num_held += 1
                    return
            except EOFError:
                if self._pull.poll(100):
                    return  # what it said last is heard first
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
    for number, method, args, word in (
        (8, "no_such_utility", [], "ValueError"),
        (9, "reset_prefix_cache", [1, 2, 3], "TypeError"),
    ):
        front_end.call(number, method, *args)
        front_end.hear_until(lambda number=number: front_end.result(number))
        result = front_end.result(number)
        if result is None or not result.error or method not in result.error or word not in result.error:
            expected = f"an error that begins with {word!r} and names {method!r}; the core goes on"
            return broken("calls", front_end.num_sent, f"call {number}", expected, _told(result))
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
    front_end.abort("long")
    front_end.hear_until(lambda: front_end.end("long"))
    if front_end.end("long") != "abort":
        reason = front_end.end("long")
        got = f"its end by {reason}" if reason else "more of its tokens"
        return broken("aborts", front_end.num_sent, "long", "its end by abort", got)
    return _aborts_in_a_step(front_end)


def _aborts_in_a_step(front_end: FrontEnd) -> Verdict:
    """While a step runs that would end one of them; the other is in the inbox, and not yet known to the core."""
    if not front_end.hold(HELD, 1):
        return broken("aborts", front_end.num_sent, HELD, "a step that runs", "none")
    front_end.add("late", 3)
    front_end.abort(HELD, "late")
    front_end.call(RELEASE, "reset_prefix_cache")
    front_end.hear_until(lambda: front_end.end(HELD) and front_end.end("late"))
    for request_id, why in (
        (HELD, "the abort came while its last step ran, and is honoured at once"),
        ("late", "it was in the inbox when its abort came, and is aborted when it has been added"),
    ):
        reason, n = front_end.end(request_id), front_end.num_tokens(request_id)
        if reason != "abort" or n:
            got = f"{n} of its tokens, and {f'its end by {reason}' if reason else 'no end'}"
            expected = f"its end by abort, and none of its tokens: {why}"
            return broken("aborts", front_end.num_sent, request_id, expected, got)
    return Verdict(law="aborts")


def calls_during_shutdown_are_answered(front_end: FrontEnd) -> Verdict:
    """The call comes while a step runs, and with it the order to end."""
    request_id = f"{HELD} at the end"
    if not front_end.hold(request_id, 3):
        return broken("shutdown", front_end.num_sent, request_id, "a step that runs", "none")
    front_end.call(SHUT_DOWN, "reset_prefix_cache")
    try:
        front_end.hear_until(lambda: front_end.result(SHUT_DOWN))
    except Gone as end:
        if end.verdict.where:
            raise
    result = front_end.result(SHUT_DOWN)
    if result is None or not result.error or "shutting down" not in result.error:
        expected = "an error that says that the core is shutting down"
        return broken("shutdown", front_end.num_sent, f"call {SHUT_DOWN}", expected, _told(result))
    return Verdict(law="shutdown")


STAGES: tuple[tuple[str, str, Stage], ...] = (
    ("answers", "A request that is added is answered: all its tokens, then its end.", requests_are_answered),
    ("calls", "A call is answered under its number, by a value or by an error.", calls_are_answered),
    ("nonsense", "What cannot be read is dropped, and what comes next is served.", nonsense_is_dropped),
    ("aborts", "An abort ends its request at once: while its step runs, and in the inbox.", aborts_are_honoured),
    ("shutdown", "While the core shuts down, a call is answered by an error.", calls_during_shutdown_are_answered),
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
