"""The flags of `nanoserve bench`, what they may not say together, and the load that they describe.

Knows no target: what is asked, when, and what of it goes into a report. An engine's own flags are `cli_engine`'s.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable
from dataclasses import fields
from itertools import islice
from pathlib import Path

from nanoserve.api.cli_engine import add_engine_arguments, api_key_argument, as_argument, parse_size, size_argument
from nanoserve.config import SEAMS, EngineConfig
from nanoserve.lab.arrivals import (
    ARRIVALS,
    MIXES,
    BenchRequest,
    LoadSpec,
    PromptSource,
    draw_requests,
    parse_lengths,
    read_requests,
    story_words,
)
from nanoserve.lab.bench_report import parse_slo
from nanoserve.lab.workload import random_tokens

DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 8
DEFAULT_BURST = 10
URL_VOCAB = 1000  # ids below are in every vocabulary
LENGTHS = "128, uniform:LOW:HIGH, lognormal:MEAN:SIGMA:LONGEST"


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(f"{text} is not a finite number > 0.")
    return value


def _count(text: str) -> int:
    value = parse_size(text)
    if value < 1:
        raise ValueError(f"{text} is not an integer >= 1.")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("target")
    target.add_argument("--url", help="of an OpenAI-compatible server; default: an engine in this process")
    target.add_argument("--allow-remote", action="store_true", help="let --url be another machine")
    target.add_argument(
        "--api-key",
        type=api_key_argument,
        default=os.environ.get("NANOSERVE_API_KEY"),
        metavar="KEY",
        help="default: $NANOSERVE_API_KEY",
    )
    target.add_argument("--no-ignore-eos", dest="ignore_eos", action="store_false", help="let answers end early")
    target.add_argument("--warmup", type=size_argument, default=1, metavar="N", help="uncounted requests; default: 1")
    target.add_argument(
        "--timeout", type=as_argument(_positive), default=300.0, metavar="SECONDS", help="a request; default: 300"
    )
    _add_load_arguments(parser.add_argument_group("load"))
    _add_output_arguments(parser.add_argument_group("output"))
    add_engine_arguments(parser, seed_use="of the load, of random weights, and of sampling")


def _add_load_arguments(load: argparse._ArgumentGroup) -> None:
    load.add_argument(
        "--request-rate", type=as_argument(_positive), metavar="R", help="requests a second, whatever becomes of them"
    )
    load.add_argument("--arrivals", choices=ARRIVALS, help="of --request-rate; default: poisson")
    load.add_argument("--burst-size", type=as_argument(_count), metavar="N", help=f"default: {DEFAULT_BURST}")
    load.add_argument(
        "--concurrency",
        type=as_argument(_count),
        metavar="N",
        help=f"instead of a rate: that many at a time; default: {DEFAULT_CONCURRENCY}",
    )
    load.add_argument(
        "--num-requests", type=as_argument(_count), metavar="N", help=f"default: {DEFAULT_REQUESTS}, or --duration's"
    )
    load.add_argument("--duration", type=as_argument(_positive), metavar="SECONDS", help="send none after that")
    load.add_argument("--mix", choices=tuple(MIXES), help="named lengths of prompts and outputs")
    load.add_argument("--prompt-len", type=as_argument(parse_lengths), metavar="LEN", help=f"{LENGTHS}; default: 128")
    load.add_argument("--output-len", type=as_argument(parse_lengths), metavar="LEN", help="default: 64")
    load.add_argument("--prefix-len", type=size_argument, metavar="N", help="tokens before it that prompts share")
    load.add_argument("--num-prefixes", type=as_argument(_count), metavar="N", help="different ones; default: 1")
    load.add_argument(
        "--prompts", choices=("tokens", "text"), help="random token ids, or stories (lengths count words)"
    )
    load.add_argument(
        "--vocab-size", type=as_argument(_count), metavar="N", help=f"of random ids; default: {URL_VOCAB}, the engine's"
    )
    load.add_argument(
        "--workload", type=Path, metavar="FILE", help="JSONL of at_s, max_tokens, and prompt or prompt_len"
    )


def _add_output_arguments(output: argparse._ArgumentGroup) -> None:
    output.add_argument(
        "--slo", type=as_argument(parse_slo), metavar="LIMITS", help="ttft=500,itl=100 (ms; also tpot, e2e): goodput"
    )
    output.add_argument("--json", action="store_true", help="print the report as JSON")
    output.add_argument("--out", type=Path, metavar="FILE", help="write it there as well")
    output.add_argument("--detailed", action="store_true", help="with every request in it")


def check(args: argparse.Namespace) -> None:
    """What argparse cannot say: which flags have no meaning beside which."""

    def refuse(names: Iterable[str], why: str) -> None:
        for name in names:
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} has no meaning {why}; leave one of the two out.")

    if args.request_rate is None:
        refuse(["arrivals"], "without --request-rate")
    else:
        refuse(["concurrency"], "beside --request-rate")
    if args.arrivals != "burst":
        refuse(["burst_size"], "without --arrivals burst")
    if args.mix is not None:
        refuse(["prompt_len", "output_len"], "beside --mix")
    if not args.prefix_len:
        refuse(["num_prefixes"], "without --prefix-len")
    if args.prompts == "text":
        refuse(["vocab_size"], "beside --prompts text")
    if args.workload is not None:
        drawn = ["request_rate", "mix", "prompt_len", "output_len", "prefix_len"]
        refuse(drawn, "beside --workload, which says it")
    if args.url is not None:
        refuse(_engine_flags(args), "beside --url, whose engine has been built")
    elif args.allow_remote:
        raise ValueError("--allow-remote has no meaning without --url; leave it out.")


def _engine_flags(args: argparse.Namespace) -> list[str]:
    names = {field.name for field in fields(EngineConfig)} | set(SEAMS)
    names |= {"stage", "enable_prefix_caching", "record"}
    return sorted(name for name in names - {"model", "seed"} if hasattr(args, name))


def prompt_source(args: argparse.Namespace, vocab_size: int) -> PromptSource:
    return story_words if args.prompts == "text" else random_tokens(args.vocab_size or vocab_size)


def requests(args: argparse.Namespace, vocab_size: int) -> Iterable[BenchRequest]:
    """The whole load; an iterator where only time ends it."""
    source = prompt_source(args, vocab_size)
    if args.workload is not None:
        return read_requests(args.workload, source, args.seed or 0)[: args.num_requests]
    spec = _spec(args)
    drawn = draw_requests(spec, source)
    return drawn if spec.num_requests is None else list(islice(drawn, spec.num_requests))


def _spec(args: argparse.Namespace) -> LoadSpec:
    num_requests = args.num_requests
    if num_requests is None and args.duration is None:
        num_requests = DEFAULT_REQUESTS
    prompt_len, output_len = MIXES[args.mix] if args.mix else (args.prompt_len, args.output_len)
    return LoadSpec(
        num_requests=num_requests,
        prompt_len=prompt_len or parse_lengths("128"),
        output_len=output_len or parse_lengths("64"),
        prefix_len=args.prefix_len or 0,
        num_prefixes=args.num_prefixes or 1,
        arrivals=None if args.request_rate is None else args.arrivals or "poisson",
        request_rate=args.request_rate or 1.0,
        burst_size=args.burst_size or DEFAULT_BURST,
        seed=args.seed or 0,
    )


def concurrency(args: argparse.Namespace) -> int | None:
    """Seats of a closed loop; None: an open one."""
    if args.request_rate is not None or (args.workload is not None and args.concurrency is None):
        return None
    return args.concurrency or DEFAULT_CONCURRENCY


def parameters(args: argparse.Namespace, vocab_size: int) -> dict[str, str | int | float | bool | None]:
    """Every parameter of the run as it was in the end."""
    described: dict[str, str | int | float | bool | None] = {
        "loop": "open" if concurrency(args) is None else "closed",
        "concurrency": concurrency(args),
        "duration_s": args.duration,
        "timeout_s": args.timeout,
        "warmup": args.warmup,
        "ignore_eos": args.ignore_eos,
        "prompts": args.prompts or "tokens",
        "vocab_size": None if args.prompts == "text" else args.vocab_size or vocab_size,
        "seed": args.seed or 0,
    }
    if args.workload is not None:
        return described | {"workload": str(args.workload), "num_requests": args.num_requests}
    spec = _spec(args)
    return described | {
        "num_requests": spec.num_requests,
        "mix": args.mix,
        "prompt_len": str(spec.prompt_len),
        "output_len": str(spec.output_len),
        "prefix_len": spec.prefix_len,
        "num_prefixes": spec.num_prefixes,
        "arrivals": spec.arrivals,
        "request_rate": None if spec.arrivals is None else spec.request_rate,
        "burst_size": spec.burst_size if spec.arrivals == "burst" else None,
    }
