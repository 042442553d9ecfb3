"""The `nanoserve` command: one row of `COMMANDS` and one module with `add_arguments` and `run` per subcommand.

Only the module of the command that was asked for is imported, so that `nanoserve --help` needs no engine.
Exit codes: 0 done, 1 failed, 2 bad input (one line on stderr that names the value, the limit and the fix),
130 interrupted. Knows nothing of what a command does.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import NoReturn, Protocol

from nanoserve import __version__

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
_LONG_VALUE = re.compile(r"(?<!\w)'[^']{120,}'(?!\w)|\S{120,}")


@dataclass(frozen=True, slots=True)
class Command:
    """A row of `nanoserve --help`; `module` is imported when the command is used."""

    module: str
    summary: str


class CommandModule(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit code. A ValueError or OSError is reported as bad input."""
        ...


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "generate": Command("nanoserve.api.cli_generate", "text from a model, streamed to the terminal"),
        "serve": Command("nanoserve.api.cli_serve", "an OpenAI-compatible server, with a page to talk to the model"),
        "bench": Command("nanoserve.lab.bench", "one load on a running server or on an engine"),
        "doctor": Command("nanoserve.api.cli_doctor", "device, versions, memory, and what was left over"),
        "ladder": Command("nanoserve.lab.ladder", "the stages from v0 to v1 on the same loads, side by side"),
        "trace": Command("nanoserve.lab.cli_trace", "a recorded run as one HTML timeline, or two on one time axis"),
        "replay": Command("nanoserve.lab.cli_replay", "decide a recorded run again, and compare every step"),
        "simulate": Command("nanoserve.lab.simulate", "the schedulers on a virtual clock, on GPUs that are not here"),
        "calibrate": Command("nanoserve.lab.calibrate", "fit the costs of a step to a recorded run, for simulate"),
        "grade": Command("nanoserve.lab.grade", "a scheduler or block manager of yours against the laws"),
        "check": Command("nanoserve.api.cli_check", "your answers to the exercises of the course, graded"),
        "lessons": Command("nanoserve.api.cli_lessons", "the course, in JupyterLab, on a copy that is yours"),
    }
)


class OneLineParser(argparse.ArgumentParser):
    """argparse whose errors are one line; abbreviated flags are refused, so that a new flag breaks no script."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs, allow_abbrev=False)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {_one_line(message)} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` by default); returns its exit code. Parse errors raise SystemExit(2)."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in words if not word.startswith("-")), None)
    try:
        args, module = _parse(words, name)
        with _one_line_warnings():
            code = module.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()  # a closed pipe shows here, not while the interpreter exits
    except KeyboardInterrupt:
        if argv is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one has nothing to end but this end
        if sys.stderr.isatty():
            print(file=sys.stderr)  # leave the line of ^C
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return FAILED
    except (ValueError, OSError) as error:
        return _report(f"nanoserve {name}", error, BAD_INPUT)
    except RuntimeError as error:
        from nanoserve.client import EngineDeadError  # only loaded when an engine could be there

        if not isinstance(error, EngineDeadError):
            raise
        return _report(f"nanoserve {name}", error, FAILED)
    return code


def _parse(words: list[str], name: str | None) -> tuple[argparse.Namespace, CommandModule]:
    parser = OneLineParser(
        prog="nanoserve", description="An LLM serving engine in which every step from vLLM v0 to v1 is a switch."
    )
    parser.add_argument("--version", action="version", version=f"nanoserve {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers = {
        known: choices.add_parser(
            known, help=command.summary, description=f"{command.summary[:1].upper()}{command.summary[1:]}."
        )
        for known, command in COMMANDS.items()
    }
    if name not in parsers:
        parser.parse_args(words)  # --help, --version, or an error
        raise AssertionError(f"argparse accepted {words}, which name no command")
    module: CommandModule = import_module(COMMANDS[name].module)  # type: ignore[assignment]
    module.add_arguments(parsers[name])
    args, unknown = parser.parse_known_args(words)
    if unknown:
        parsers[name].error(f"{unknown[0]} is not known here")
    return args, module


def _report(prog: str, error: BaseException, code: int) -> int:
    print(f"{prog}: error: {_one_line(describe(error))}", file=sys.stderr)
    return code


def describe(error: BaseException) -> str:
    """An error as a sentence: an OSError as `file: what is wrong`, without its number."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}; give another path."
    return str(error) or type(error).__name__


def _one_line(text: str) -> str:
    """The text without line breaks, and of a value that goes on and on its start and its end."""
    return _LONG_VALUE.sub(lambda value: f"{value[0][:60]}...{value[0][-40:]}", " ".join(text.split()))


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Warnings as one line without file and line number, which tell a user of the command nothing."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        print(f"nanoserve: warning: {_one_line(str(message))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", module="nanoserve")
        warnings.showwarning = show
        yield


def _discard_stdout() -> None:
    """The reader has gone: keep the interpreter's last flush from complaining."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
