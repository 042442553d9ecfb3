"""An error that a policy caused, as a verdict: which law, and the line of the policy's own file.

An assertion of the engine is the law that it guards; anything else is broken code. The request is the one that the
innermost frame worked on, or that the message names.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from nanoserve.lab.laws import Verdict
from nanoserve.request import Request, StepPlan

PACKAGE = Path(__file__).resolve().parents[1]
QUEUES = "each live request in the queue of its status; whoever waits without blocks or computed tokens"
TABLES = "tables, reference counts, free queue and hash map that agree"
FREES = "blocks taken and given back as often as each other, and only for tokens to compute"
INPUTS = "a plan that can be computed: known tokens, in blocks that hold all before them"
GUARDS: Mapping[str, tuple[str, str]] = {  # of our own: function, or file where any function -> law, what it expects
    "check_queues": ("plan", QUEUES),
    "check_blocks": ("blocks", TABLES),
    "block_pool.py": ("blocks", FREES),
    "blocks.py": ("blocks", FREES),
    "scheduler.py": ("blocks", FREES),
    "fakes.py": ("tokens", INPUTS),
    "input_batch.py": ("tokens", INPUTS),
    "persistent_batch.py": ("tokens", INPUTS),
    "runner.py": ("tokens", INPUTS),
}
MAX_LEN = 400  # of a message
RUNS = ("runs", "code that runs to the end of the load")
_NOTHING = object()


def explain(error: BaseException, step: int, request_ids: Sequence[str], policy_file: str = "") -> Verdict:
    """`policy_file`: whose lines are named; absolute."""
    frames = list(_frames(error.__traceback__))
    law, expected = _guard(error, frames)
    message = message_of(error)
    got = message or type(error).__name__
    if law == "runs":
        got = _no_plan(frames) or _raised(error, message)
    return Verdict(
        law=law,
        holds=False,
        step=step,
        request=_request(frames, message, request_ids),
        expected=expected,
        got=got,
        where=_where(frames, policy_file),
        traceback=_told(lambda: "".join(traceback.format_exception(error))),
    )


def message_of(error: BaseException) -> str:
    """In one line, and not longer than can be read. Raises nothing, whatever the error's own `__str__` does."""
    text = _told(lambda: str(error), "its message cannot be read")
    return " ".join(text[: 10 * MAX_LEN].split())[:MAX_LEN]


def described(error: BaseException) -> str:
    """`KeyError: 'x'`, in one line."""
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _shown(value: object) -> str:
    return _told(lambda: f"{value!r:.80}", f"a {type(value).__name__}")


def _told(tell: Callable[[], str], otherwise: str = "it cannot be told") -> str:
    """What a policy's own `__str__` or `__repr__` says, which may do anything."""
    try:
        text = tell()
    except BaseException:
        return otherwise
    return str.__str__(text)


def _frames(tb: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Innermost first, with the line that each had come to."""
    found = []
    while tb is not None:
        found.append((tb.tb_frame, tb.tb_lineno))
        tb = tb.tb_next
    yield from reversed(found)


def _guard(error: BaseException, frames: list[tuple[FrameType, int]]) -> tuple[str, str]:
    if isinstance(error, AssertionError):
        for frame, _ in frames:
            path = Path(frame.f_code.co_filename)
            if not is_ours(path):
                break
            if guard := GUARDS.get(frame.f_code.co_name) or GUARDS.get(path.name):
                return guard
    return RUNS


def _no_plan(frames: list[tuple[FrameType, int]]) -> str:
    """The core takes what `schedule()` returned for a plan."""
    for frame, _ in frames:
        returned = frame.f_locals.get("plan", _NOTHING)
        if frame.f_code.co_name == "_launch" and returned is not _NOTHING and not isinstance(returned, StepPlan):
            return f"schedule() returned {_shown(returned)}, which is no StepPlan"
    return ""


def _raised(error: BaseException, message: str) -> str:
    if isinstance(error, MemoryError):
        return "it asked for more memory than a trial may use"
    if isinstance(error, SystemExit):
        return f"it ended the process (exit code {_shown(error.code)})"
    if isinstance(error, NotImplementedError) and not message:
        return "something that is not written yet"
    return described(error)


def _request(frames: list[tuple[FrameType, int]], message: str, request_ids: Sequence[str]) -> str:
    named = [i for i in request_ids if re.search(rf"(?<![\w-]){re.escape(i)}(?![\w-])", message)]
    if named:
        return named[0]
    for frame, _ in frames:
        for name in ("request", "victim"):
            if isinstance(request := frame.f_locals.get(name), Request) and request.id in request_ids:
                return request.id
    return ""


def is_ours(path: Path) -> bool:
    return PACKAGE in path.parents


def _where(frames: list[tuple[FrameType, int]], policy_file: str) -> str:
    """The innermost line of the policy's own; where there is none, the engine's that its answer led to."""
    places = (place_in(frame, line, policy_file) for frame, line in frames)
    engine = (f"{Path(f.f_code.co_filename).name}:{line}, in {f.f_code.co_name}" for f, line in frames)
    return next(filter(None, places), "") or next(engine, "")


def place_in(frame: FrameType, line: int, policy_file: str) -> str:
    """`my_policy.py:12, in schedule`; "" for a frame of any other file."""
    if not policy_file or frame.f_code.co_filename != policy_file:
        return ""
    return f"{Path(policy_file).name}:{line}, in {frame.f_code.co_name}"


def place_in_dump(dump: bytes, policy_file: str) -> str:
    """The same, from what `faulthandler` wrote of all threads; the main one comes last."""
    name = policy_file.encode("ascii", "backslashreplace")
    main = dump.rpartition(b"hread 0x")[2]
    if found := re.search(rb'^  File "' + re.escape(name) + rb'", line (\d+) in (.*)$', main, re.MULTILINE):
        return f"{Path(policy_file).name}:{int(found[1])}, in {found[2].decode(errors='replace')}"
    return ""
