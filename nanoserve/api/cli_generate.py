"""`nanoserve generate`: prompts in, text out as it comes, or one JSON object a prompt.

All prompts run together; they are printed in their order, each as soon as those before it are done. Imports no
torch until the arguments have been read.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve.api.cli_engine import (
    add_engine_arguments,
    announce_compiling,
    config_from_args,
    open_recorder,
    size_argument,
)
from nanoserve.api.cli_output import Tally, print_json, print_text
from nanoserve.request import OutputKind, SamplingParams

if TYPE_CHECKING:
    from nanoserve.api.llm import LLM
    from nanoserve.api.outputs import RequestOutput

MAX_PROMPT_BYTES = 64 * 2**20  # of a file

# flag -> field of SamplingParams, where the flag is the field's name
SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids",
    "ignore_eos", "include_stop_str_in_output", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logprobs", "prompt_logprobs", "bad_words",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [PROMPT ...] [options]"
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="- reads standard input, which is also read when there is no prompt and it is not a terminal",
    )
    parser.add_argument(
        "--file", action="append", default=[], metavar="FILE", help="the whole file is one prompt; may be repeated"
    )
    parser.add_argument("--lines", action="store_true", help="each line of --file or standard input is a prompt")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message to the chat template")
    parser.add_argument(
        "--echo",
        action=argparse.BooleanOptionalAction,
        help="repeat the prompt before its text; default: prompts given as arguments, without --chat",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt, at its end")
    parser.add_argument("--stats", action="store_true", help="one line of counts and times on stderr")
    _add_sampling_arguments(parser.add_argument_group("sampling (names and meanings are vLLM's)"))
    add_engine_arguments(parser)


def _add_sampling_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-tokens", type=size_argument, default=200, metavar="N", help="default: 200")
    group.add_argument("--min-tokens", type=int, metavar="N")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="default: 0, the likeliest token")
    group.add_argument("--top-p", type=float, metavar="X")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--min-p", type=float, metavar="X")
    group.add_argument("--n", type=int, metavar="N", help="answers to each prompt; more than one needs a temperature")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument("--stop-token-ids", type=int, action="append", metavar="ID", help="the same for a token")
    group.add_argument("--ignore-eos", action="store_true", default=None)
    group.add_argument("--include-stop-str-in-output", action="store_true", default=None)
    group.add_argument("--presence-penalty", type=float, metavar="X")
    group.add_argument("--frequency-penalty", type=float, metavar="X")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--bad-words", action="append", metavar="TEXT", help="never write this; may be repeated")
    group.add_argument("--logprobs", type=int, metavar="K", help="with --json: of the K likeliest tokens; -1: all")
    group.add_argument("--prompt-logprobs", type=int, metavar="K", help="with --json: the same for the prompt")


def run(args: argparse.Namespace) -> int:
    start_s = time.monotonic()
    if sys.stdout is None:
        raise ValueError("standard output is closed, so that no text would be seen; send it to a file or a pipe.")
    params = sampling_params(args)
    prompts = read_prompts(args)
    config = config_from_args(args)
    announce_compiling(config)

    from nanoserve.api.llm import LLM  # brings torch

    with ExitStack() as stack:
        recorder = stack.enter_context(open_recorder(args.record))
        llm = stack.enter_context(LLM(config=config, observer=recorder))
        tally = Tally(load_s=time.monotonic() - start_s)
        stream = tally.watch(_stream(llm, prompts, params, chat=args.chat))
        if args.json:
            print_json(stream, sys.stdout)
        else:
            echoed = prompts if _echoes(args) else [""] * len(prompts)
            print_text(stream, echoed, params.n, sys.stdout)
        if args.stats:
            print(tally, file=sys.stderr)
    return 0


def _echoes(args: argparse.Namespace) -> bool:
    if args.echo is not None:
        return args.echo
    return bool(args.prompts) and not (args.chat or args.file or "-" in args.prompts)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the sampling flags ask for. Raises ValueError, also for flags whose result would not be seen."""
    given = {name: getattr(args, name) for name in SAMPLING_FIELDS if getattr(args, name) is not None}
    for name in ("logprobs", "prompt_logprobs"):
        if name in given and not args.json:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {given[name]} shows nothing without --json; add --json.")
    kind = OutputKind.FINAL_ONLY if args.json else OutputKind.DELTA
    return SamplingParams(**given, output_kind=kind)


# --- Prompts


def read_prompts(args: argparse.Namespace) -> list[str]:
    """All prompts, arguments first, then files. Raises ValueError or OSError.

    A text that was read loses one newline at its end, which is the file's and not the prompt's.
    """
    names = list(args.prompts)
    if not names and not args.file:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError('there is no prompt; give one as an argument ("Once upon a time"), by --file or by stdin.')
        names = ["-"]
    prompts: list[str] = []
    for name in names:
        prompts += _split(_read_text(None), args.lines) if name == "-" else [name]
    for name in args.file:
        prompts += _split(_read_text(None if name == "-" else Path(name)), args.lines)
    if not prompts:
        raise ValueError("there is no prompt: 0 lines with text were read; write at least one.")
    return prompts


def _read_text(path: Path | None) -> str:
    """UTF-8 text of a file, or of standard input."""
    if path is None:
        if sys.stdin is None:
            raise ValueError("standard input is closed; give the prompt as an argument or by --file.")
        data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    else:
        with path.open("rb") as file:
            data = file.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise ValueError(
            f"{path or 'standard input'} is longer than the {MAX_PROMPT_BYTES} bytes of a prompt file; split it."
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path or 'standard input'} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; "
            f"convert it, for example with iconv -t UTF-8."
        ) from None


def _split(text: str, lines: bool) -> list[str]:
    if lines:
        return [line for line in text.splitlines() if line.strip()]
    return [text.removesuffix("\n").removesuffix("\r")]


def _stream(llm: LLM, prompts: list[str], params: SamplingParams, *, chat: bool) -> Iterator[RequestOutput]:
    if chat:
        return llm.stream_chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    return llm.stream(prompts, params)
