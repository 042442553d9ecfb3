"""Engine flags, shared by every command that builds an engine, and the config that they ask for.

Each flag overrides one field of the stage; the seam flags come from `config.SEAMS`, so a new class there is a
new choice here. Names are vLLM's where the meaning is the same. A flag that is not given is None.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

from nanoserve.api.engine_options import FIELDS, engine_config
from nanoserve.compilation import CompileMode
from nanoserve.config import SEAMS, STAGES, EngineConfig
from nanoserve.graphs import GraphMode
from nanoserve.record import JsonlRecorder

_UNITS = {
    "": 1,
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_LARGEST = 2**63 - 1
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[kKmMgGtT]?)(?P<ending>(?:iB|B)?)")


def parse_size(text: str) -> int:
    """A count such as 4096, 16k, 512M or 2GiB. Lower-case units are powers of 1000 and upper-case ones of 1024,
    as in vLLM's flags; `kB`, `MB`, `GB` and `TB` are powers of 1000, `KiB` ... `TiB` of 1024. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it like 4096, 512M or 2GiB.")
    unit = match["unit"].lower() if match["ending"] == "B" else match["unit"]
    if match["ending"] == "iB":
        unit = unit.upper()
    whole, _, fraction = match["number"].partition(".")
    whole, fraction = whole.lstrip("0"), fraction.rstrip("0")
    # the lengths first: Python refuses to convert thousands of digits, and no unit makes 41 decimals whole
    size = Fraction(f"0{whole[:20]}.{fraction[:40]}0") * _UNITS[unit]
    if len(fraction) > 40 or size.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number; write it like 4096, 512M or 2GiB.")
    if len(whole) > 20 or size > _LARGEST:
        raise ValueError(f"{text!r} is too large; give at most {_LARGEST}.")
    return int(size)


def as_argument(parse: Callable[[str], object]) -> Callable[[str], object]:
    """`parse` for argparse, which would replace the message of a ValueError by its own."""

    def parse_argument(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None

    return parse_argument


def _model_len(text: str) -> int | str:
    return text if text == "auto" else parse_size(text)


def _api_key(text: str) -> str:
    if not (text.isascii() and text.isprintable()):
        raise ValueError("the key holds characters that no HTTP header can; use printable ASCII.")
    return text


def _sizes(text: str) -> tuple[int, ...]:
    sizes = [size.strip() for size in text.split(",")]
    if not all(size.isascii() and size.isdigit() and len(size) < 19 for size in sizes):
        raise ValueError(f"{text!r} is not a list of sizes in tokens; write it like 1,2,4,8.")
    return tuple(map(int, sizes))


size_argument = as_argument(parse_size)
sizes_argument = as_argument(_sizes)
api_key_argument = as_argument(_api_key)


def add_engine_arguments(
    parser: argparse.ArgumentParser, *, seed_use: str = "of random weights, and of sampling"
) -> None:
    """All flags that choose an engine; `config_from_args` reads them. `seed_use`: all that `--seed` is for."""
    engine = parser.add_argument_group("engine (each flag overrides one field of the stage)")
    engine.add_argument("--model", metavar="PATH_OR_HUB_ID", help="default: the embedded nanostory")
    engine.add_argument("--stage", help=f"{', '.join(STAGES)}; default: the last")
    for seam, classes in SEAMS.items():
        engine.add_argument(f"--{seam.replace('_', '-')}", choices=tuple(classes))
    engine.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="the same as --blocks shared / --blocks private",
    )
    engine.add_argument("--device", help="auto, cpu, cuda, rocm")
    engine.add_argument("--dtype", help="auto, float32, bfloat16, float16")
    engine.add_argument("--quantization", help="int8: of weight matrices alone, on a CPU; default: none")
    engine.add_argument("--load-format", help="auto, or dummy: random weights from the model's config alone")
    engine.add_argument("--num-threads", type=int, metavar="N", help="of a CPU; default: by the size of the model")
    engine.add_argument("--seed", type=int, help=seed_use)
    _add_execution_arguments(parser.add_argument_group("execution"))
    _add_memory_arguments(parser.add_argument_group("KV pool"))
    _add_scheduler_arguments(parser.add_argument_group("scheduler"))
    _add_process_arguments(parser.add_argument_group("processes"))
    parser.add_argument("--record", metavar="FILE", help="write what every step did, one JSON line a step")


def _add_execution_arguments(group: argparse._ArgumentGroup) -> None:
    compiled, captured = [str(mode) for mode in CompileMode], [str(mode) for mode in GraphMode]
    group.add_argument("--compile", choices=compiled, help="torch.compile; default: the stage's")
    group.add_argument("--graph-mode", choices=captured, help="what --runner graph captures; default: by device")
    group.add_argument("--graph-sizes", type=sizes_argument, metavar="N,N,...", help="tokens; default: vLLM's sizes")
    group.add_argument("--enforce-eager", action="store_true", default=None, help="--runner eager --compile none")
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="decide and launch a step while the one before it runs",
    )


def _add_memory_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-model-len", type=as_argument(_model_len), metavar="TOKENS|auto")
    group.add_argument("--block-size", type=int, metavar="TOKENS")
    group.add_argument("--num-gpu-blocks-override", type=size_argument, metavar="BLOCKS", dest="num_blocks")
    group.add_argument("--kv-cache-memory-bytes", type=size_argument, metavar="SIZE", help="such as 512M or 2GiB")
    group.add_argument("--num-swap-blocks", type=size_argument, metavar="BLOCKS", help="for --preemption-mode swap")
    group.add_argument("--free-order", help="uncached_first, or append: which free block is reused first")


def _add_scheduler_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="most requests in one step")
    group.add_argument("--max-num-batched-tokens", type=size_argument, metavar="N", help="token budget of one step")
    group.add_argument(
        "--long-prefill-token-threshold", type=int, metavar="N", help="most prompt tokens a step; 0: off"
    )
    group.add_argument("--scheduling-policy", dest="policy", metavar="POLICY", help="fcfs or priority")
    group.add_argument("--preemption-mode", metavar="MODE", help="recompute or swap")
    group.add_argument("--watermark", type=float, metavar="SHARE", help="of the pool, kept free at admission")
    group.add_argument(
        "--reserve-full-prompt",
        action=argparse.BooleanOptionalAction,
        help="admit a request only when its whole prompt fits",
    )
    group.add_argument("--check-invariants", action="store_true", default=None, help="after every step; slower")


def _add_process_arguments(group: argparse._ArgumentGroup) -> None:
    for flag, use in (
        ("start", "for a child to load its model"),
        ("execute", "for a runner process to answer a step"),
        ("shutdown", "for open requests to finish after SIGTERM; 0 aborts them"),
    ):
        group.add_argument(f"--{flag}-timeout", type=float, dest=f"{flag}_timeout_s", metavar="SECONDS", help=use)


def config_from_args(args: argparse.Namespace) -> EngineConfig:
    """The config that the engine flags ask for. Raises ValueError."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    fields = {name: given[name] for name in FIELDS if name in given}
    for seam, classes in SEAMS.items():
        if seam in fields:
            fields[seam] = classes[fields[seam]]
    for name in ("enable_prefix_caching", "enforce_eager"):
        if name in given:
            fields[name] = given[name]
    return engine_config(stage=given.get("stage"), **fields)


def announce_compiling(config: EngineConfig) -> None:
    """One line on stderr before a start that takes long."""
    if config.compile not in (None, CompileMode.NONE):
        print(f"compiling ({config.compile}): up to a minute the first time, then from the cache", file=sys.stderr)


@contextmanager
def open_recorder(path: str | None) -> Iterator[JsonlRecorder | None]:
    """What `--record` asks for, closed at the end; None without the flag. Raises OSError."""
    if path is None:
        yield None
        return
    Path(path).open("wb").close()  # here, where it is bad input; the core may live in another process
    recorder = JsonlRecorder(path)
    try:
        yield recorder
    finally:
        recorder.close()
