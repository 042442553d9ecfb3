"""`nanoserve bench`: one load on a running server (`--url`), or on an engine in this process (`--stage`, seam flags).

Reads the flags, runs the load, prints and writes the report. A load is drawn (`arrivals.LoadSpec`) or comes from a
file; it is an open loop with `--request-rate`, else a closed one. Only addresses of this machine are loaded unless
`--allow-remote` says otherwise. Exit code 1 when any request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from nanoserve import __version__
from nanoserve.api.cli_engine import announce_compiling, config_from_args
from nanoserve.lab import bench_options
from nanoserve.lab.arrivals import BenchRequest, LoadSpec, draw_requests, parse_lengths
from nanoserve.lab.async_load import LoadResult, Outcome, Target, run_load
from nanoserve.lab.bench_report import BENCH_VERSION, BenchReport, latency_table, measure_load, sentences
from nanoserve.lab.sse_client import Address

if TYPE_CHECKING:
    from nanoserve.api.async_llm import AsyncLLM
    from nanoserve.lab.metrics import RunMetrics

ALL_OK, SOME_FAILED, INTERRUPTED = 0, 1, 130  # exit codes
MODELS_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 30.0  # for an engine in this process; one that is stuck in a step ends with the process
add_arguments = bench_options.add_arguments


def run(args: argparse.Namespace) -> int:
    """Load, print, write. ValueError for bad input, and for a server that does not answer."""
    bench_options.check(args)
    if args.out is not None and not args.out.resolve().parent.is_dir():
        raise ValueError(f"--out {args.out} is in a folder that does not exist; make it first.")
    report = _bench_url(args) if args.url is not None else _bench_engine(args)
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
    if args.out is not None:
        args.out.write_bytes(encoded)
    if args.json:
        sys.stdout.write(encoded.decode())
    else:
        _show(report)
    if report.interrupted:
        return INTERRUPTED
    return SOME_FAILED if report.metrics.errors else ALL_OK


# The two kinds of targets


def _bench_url(args: argparse.Namespace) -> BenchReport:
    address = Address.parse(args.url)
    if not address.is_loopback and not args.allow_remote:
        raise ValueError(
            f"--url {args.url} is not this machine (127.0.0.1, ::1, localhost); a load may hurt whoever runs it: "
            "ask them, and give --allow-remote."
        )
    from nanoserve.lab.targets import UrlTarget, first_model

    vocab_size = bench_options.URL_VOCAB
    requests = bench_options.requests(args, vocab_size)

    async def bench() -> tuple[str, LoadResult, float]:
        model = args.model or await first_model(address, args.api_key, min(MODELS_TIMEOUT_S, args.timeout))
        target = UrlTarget(address, model, api_key=args.api_key, ignore_eos=args.ignore_eos)
        result, cpu_share = await _load(args, target, requests, vocab_size)
        return model, result, cpu_share

    model, result, cpu_share = asyncio.run(bench())
    return _report(args, result, target=args.url, model=model, vocab_size=vocab_size, cpu_share=cpu_share)


def _bench_engine(args: argparse.Namespace) -> BenchReport:
    config = config_from_args(args)
    announce_compiling(config)
    from nanoserve.checkpoint import read_model_config

    vocab_size = read_model_config(config.model).vocab_size
    if (args.vocab_size or 0) > vocab_size:
        raise ValueError(f"--vocab-size {args.vocab_size} is larger than the model's {vocab_size}; use at most that.")
    requests = bench_options.requests(args, vocab_size)  # before the engine, which takes a while
    from nanoserve.api.async_llm import AsyncLLM
    from nanoserve.machine import describe_machine
    from nanoserve.record import JsonlRecorder

    machine = describe_machine()
    with ExitStack() as stack:
        path = Path(args.record or Path(stack.enter_context(TemporaryDirectory())) / "trace.jsonl")
        if args.record:
            path.open("wb").close()  # now, while it is cheap to hear that it cannot be written
        recorder = JsonlRecorder(path)
        stack.callback(recorder.close)
        llm = AsyncLLM(config=config, observer=recorder)
        stack.callback(_close, llm)
        info = llm.info
        result, cpu_share = asyncio.run(_load_engine(args, llm, requests, vocab_size))
        _close(llm)
        recorder.close()
        metrics = _engine_metrics(path, result)
        described = _described(path)
    report = _report(args, result, target="engine", model=info.model, vocab_size=vocab_size, cpu_share=cpu_share)
    return replace(report, engine_config=described, engine=metrics, machine=machine)


async def _load_engine(
    args: argparse.Namespace, llm: AsyncLLM, requests: Iterable[BenchRequest], vocab_size: int
) -> tuple[LoadResult, float]:
    from nanoserve.lab.targets import EngineTarget

    return await _load(args, EngineTarget(llm, ignore_eos=args.ignore_eos), requests, vocab_size)


def _close(llm: AsyncLLM) -> None:
    """Idempotent. Not for ever: an engine that hangs in a step of this process cannot be closed."""
    closing = threading.Thread(target=llm.close, daemon=True)
    closing.start()
    closing.join(CLOSE_TIMEOUT_S)


def _engine_metrics(path: Path, result: LoadResult) -> RunMetrics | None:
    """From the records of the load. None after anything but good ends: then they do not tell whole stories."""
    from nanoserve.lab.metrics import measure
    from nanoserve.record import read_trace

    if result.interrupted or not result.outcomes or any(outcome.error for outcome in result.outcomes):
        return None
    _, records = read_trace(path)
    first = next(i for i, record in enumerate(records) if any(r.id.startswith("bench-") for r in record.arrivals))
    return measure(records[first:])


def _described(path: Path) -> dict[str, str | int | float | bool | None] | None:
    """The config of the trace's header, as the engine filled it in. None when the engine was killed before it wrote."""
    from nanoserve.record import TraceHeader

    with path.open("rb") as file:
        header = file.readline()
    return msgspec.json.decode(header, type=TraceHeader).config if header.endswith(b"\n") else None


async def _load(
    args: argparse.Namespace, target: Target, requests: Iterable[BenchRequest], vocab_size: int
) -> tuple[LoadResult, float]:
    """The load and what it cost this process, after the warm-up."""
    await _warm_up(args, target, vocab_size)
    total = len(requests) if isinstance(requests, list) and args.duration is None else None
    cpu_s, start_s = time.process_time(), time.monotonic()
    with _progress(total) as on_end:
        result = await run_load(
            target,
            requests,
            timeout_s=args.timeout,
            concurrency=bench_options.concurrency(args),
            duration_s=args.duration,
            on_end=on_end,
        )
    return result, (time.process_time() - cpu_s) / max(time.monotonic() - start_s, 1e-9)


async def _warm_up(args: argparse.Namespace, target: Target, vocab_size: int) -> None:
    """Requests of no interest, one after another: what a fresh engine sets up is not the load's. What fails here
    will fail again, and be counted."""
    if not args.warmup:
        return
    source = bench_options.prompt_source(args, vocab_size)
    spec = LoadSpec(num_requests=args.warmup, prompt_len=parse_lengths("16"), output_len=parse_lengths("8"), seed=-1)
    requests = [msgspec.structs.replace(r, id=f"warm-up-{i}") for i, r in enumerate(draw_requests(spec, source))]
    result = await run_load(target, requests, timeout_s=args.timeout, concurrency=1)
    if result.interrupted:
        raise asyncio.CancelledError


# What a user sees


def _report(
    args: argparse.Namespace, result: LoadResult, *, target: str, model: str, vocab_size: int, cpu_share: float
) -> BenchReport:
    return BenchReport(
        version=BENCH_VERSION,
        nanoserve=__version__,
        target=target,
        model=model,
        parameters=bench_options.parameters(args, vocab_size),
        interrupted=result.interrupted,
        metrics=measure_load(result, args.slo),
        cpu_share=cpu_share,
        engine_config=None,
        engine=None,
        machine=None,
        requests=[_from_start(outcome, result.start_s) for outcome in result.outcomes] if args.detailed else None,
    )


def _from_start(outcome: Outcome, start_s: float) -> Outcome:
    return replace(
        outcome,
        due_s=outcome.due_s - start_s,
        sent_s=outcome.sent_s - start_s,
        end_s=outcome.end_s - start_s,
        event_s=[event_s - start_s for event_s in outcome.event_s],
    )


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[Outcome], None]]:
    """A bar over requests, on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=total)

        def on_end(outcome: Outcome) -> None:
            nonlocal failed
            failed += outcome.error is not None
            progress.update(task, advance=1, description=f"requests ({failed} failed)" if failed else "requests")

        yield on_end


def _show(report: BenchReport) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=110)
    how = {name: value for name, value in report.parameters.items() if value is not None}
    console.print(f"{report.model} at {report.target}: " + ", ".join(f"{name}={value}" for name, value in how.items()))
    console.print(latency_table(report.metrics))
    for line in sentences(report):
        console.print(line)
