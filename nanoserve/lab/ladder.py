"""`nanoserve ladder`: every stage on the same loads, side by side; tables, ladder.json and charts.

Rounds are interleaved (v0, chunked, ..., v0, chunked, ...), each on a fresh engine, so that whatever else the
machine does hits all stages alike; tables show medians. All figures come from the records of the steps, and the
greedy tokens of all runs must agree. A stage joins by being in `STAGES`: nothing here knows any by name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nanoserve import __version__
from nanoserve.config import DEFAULT_MODEL, STAGES, EngineConfig, get_stage
from nanoserve.lab.climb import climb
from nanoserve.lab.ladder_report import LADDER_VERSION, LadderReport, Run, describe_machine, report_load
from nanoserve.lab.workload import (
    TokenSource,
    Workload,
    long_prompt_among_decodes,
    random_tokens,
    shared_system_prompt,
    story_tokens,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

DEFAULT_OUT = "ladder-results"
CPU_BUDGET = 256  # SARATHI's smaller chunk: on a CPU even the default of 512 takes long beside a decode
IDENTICAL, DIFFERENT = 0, 1  # exit codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How big the ladder is; each field is a flag. Lengths are in tokens."""

    rounds: int = 3
    streams: int = 8
    stream_tokens: int = 160
    long_prompts: int = 2
    long_prompt_len: int = 6144
    requests: int = 24
    prefix_len: int = 1024
    tail_len: int = 32


QUICK = Sizes(rounds=1, stream_tokens=64, long_prompts=1, long_prompt_len=2048, requests=8, prefix_len=512)
MAX_SIZE = 10**6

SIZE_HELP: Mapping[str, str] = {
    "rounds": "runs of each stage on each load, of which the tables show medians",
    "streams": "requests that decode when the long prompts land",
    "stream_tokens": "tokens that each of them emits",
    "long_prompts": "prompts that land among them, one after another",
    "long_prompt_len": "tokens of each",
    "requests": "requests with a common prefix, all at once",
    "prefix_len": "tokens of the prefix",
    "tail_len": "prompt tokens of each request after the prefix",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="PATH_OR_HUB_ID", help="default: %(default)s")
    parser.add_argument("--stages", metavar="A,B,...", help=f"default: all of {','.join(STAGES)}")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"default: {DEFAULT_OUT}, with --quick {DEFAULT_OUT}-quick"
    )
    parser.add_argument("--quick", action="store_true", help="one round at a small size: a look, not a measurement")
    parser.add_argument("--no-charts", dest="charts", action="store_false", help="write ladder.json alone")
    parser.add_argument("--json", action="store_true", help="print ladder.json instead of the tables")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts; default: %(default)s")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    parser.add_argument("--random-prompts", action="store_true", help="token ids drawn at random instead of stories")
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help=f"token budget of a step in the stages that cut prompts; default: {CPU_BUDGET} on a CPU, else theirs",
    )
    sizes = parser.add_argument_group("size (default, with --quick)")
    for field in fields(Sizes):
        sizes.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=int,
            metavar="N",
            help=f"{SIZE_HELP[field.name]} ({field.default}, {getattr(QUICK, field.name)})",
        )


def run(args: argparse.Namespace) -> int:
    """Climb, write and print; 1 when two runs emitted different tokens. ValueError for bad input."""
    sizes = _sizes(args)
    stages = _stages(args)
    workloads = _workloads(args, sizes)
    out = args.out or Path(f"{DEFAULT_OUT}-quick" if args.quick else DEFAULT_OUT)
    out.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    with _progress(workloads, len(stages) * sizes.rounds) as (announce, on_tokens):
        runs, built = climb(stages, workloads, sizes.rounds, announce=announce, on_tokens=on_tokens)

    device = next(iter(built.values())).engine.device
    charts: dict[str, Figure] = {}
    for workload in workloads if args.charts else ():
        charts |= _draw(workload, runs[workload.name], device, args.seed)
    report = LadderReport(
        version=LADDER_VERSION,
        nanoserve=__version__,
        clock="wall",
        seed=args.seed,
        num_rounds=sizes.rounds,
        prompts="random token ids" if args.random_prompts else "stories in the model's own tokens",
        machine=machine,
        stages=built,
        loads=[report_load(workload, runs[workload.name]) for workload in workloads],
        charts=list(charts),
    )
    written = _write(report, charts, out)
    _show(report, written, as_json=args.json)
    return IDENTICAL if report.identical else DIFFERENT


def _sizes(args: argparse.Namespace) -> Sizes:
    given = {f.name: value for f in fields(Sizes) if (value := getattr(args, f.name)) is not None}
    for name, value in given.items():
        if not 1 <= value <= MAX_SIZE:
            raise ValueError(f"--{name.replace('_', '-')} must be an integer >= 1 and <= {MAX_SIZE}, got {value}.")
    return replace(QUICK if args.quick else Sizes(), **given)


def _stages(args: argparse.Namespace) -> dict[str, EngineConfig]:
    names = [name.strip() for name in args.stages.split(",")] if args.stages is not None else list(STAGES)
    chosen = [get_stage(name) for name in names]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--stages names {', '.join(sorted(repeated))} twice; name each stage once.")
    common = {"model": args.model, "device": args.device, "dtype": args.dtype, "max_model_len": "auto"}
    stages = {name: replace(stage, **common) for name, stage in zip(names, chosen, strict=True)}
    budget = args.max_num_batched_tokens
    if budget is None:
        from nanoserve.platforms import resolve_platform

        if resolve_platform(args.device).name != "cpu":
            return stages
        budget = CPU_BUDGET
    return {n: replace(c, max_num_batched_tokens=budget) if _cuts_prompts(c) else c for n, c in stages.items()}


def _cuts_prompts(config: EngineConfig) -> bool:
    """A scheduler that takes prompts whole needs a budget as large as the longest."""
    very_long = 1 << 30
    return config.scheduler.default_budget(very_long, "cpu") < very_long


def _workloads(args: argparse.Namespace, sizes: Sizes) -> list[Workload]:
    source = _token_source(args)
    return [
        long_prompt_among_decodes(
            source,
            seed=args.seed,
            num_streams=sizes.streams,
            stream_tokens=sizes.stream_tokens,
            num_long=sizes.long_prompts,
            long_prompt_len=sizes.long_prompt_len,
        ),
        shared_system_prompt(
            source,
            seed=args.seed,
            num_requests=sizes.requests,
            prefix_len=sizes.prefix_len,
            tail_len=sizes.tail_len,
        ),
    ]


def _token_source(args: argparse.Namespace) -> TokenSource:
    from nanoserve.checkpoint import TEXT_FILES, read_model_config, resolve_model_dir

    if args.random_prompts:
        return random_tokens(read_model_config(args.model).vocab_size)
    from nanoserve.api.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_model_dir(args.model, patterns=TEXT_FILES))
    return story_tokens(lambda text: tokenizer.encode(text, add_special_tokens=False))


@contextmanager
def _progress(
    workloads: Sequence[Workload], runs_each: int
) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """A bar over all output tokens, on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<34}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=runs_each * sum(w.num_output_tokens for w in workloads))
        yield (
            lambda what: progress.update(task, description=what),
            lambda num_tokens: progress.advance(task, num_tokens),
        )


def _draw(workload: Workload, runs: Sequence[Run], device: str, seed: int) -> dict[str, Figure]:
    """File name -> chart, of each stage's run of median length."""
    from nanoserve.lab.charts import Setting, blocks_in_use, itl_strip, step_timeline, tokens_computed

    by_stage: dict[str, list[Run]] = {}
    for one in runs:
        by_stage.setdefault(one.stage, []).append(one)
    shown = {stage: _middle(several).records for stage, several in by_stage.items()}
    setting = Setting(load=workload.name, device=device, clock="wall", seed=seed)
    return {
        f"{workload.name}-itl.png": itl_strip(shown, workload.groups, workload.watched, setting),
        f"{workload.name}-timeline.png": step_timeline(shown, setting),
        f"{workload.name}-blocks.png": blocks_in_use(shown, setting),
        f"{workload.name}-tokens.png": tokens_computed(shown, setting),
    }


def _middle(runs: Sequence[Run]) -> Run:
    by_length = sorted(runs, key=lambda one: one.records[-1].end_s - one.records[0].start_s)
    return by_length[(len(by_length) - 1) // 2]


def _write(report: LadderReport, charts: Mapping[str, Figure], out: Path) -> list[Path]:
    path = out / "ladder.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    for name, figure in charts.items():
        figure.savefig(out / name)
    return [path, *(out / name for name in charts)]


BUSY_LOAD = 1.0


def _show(report: LadderReport, written: Sequence[Path], *, as_json: bool) -> None:
    from nanoserve.lab.ladder_tables import HISTORY, load_table, sentences, verdict

    console, errors = _console(stderr=False), _console(stderr=True)
    if as_json:
        sys.stdout.write(written[0].read_text(encoding="utf-8"))
        for line in verdict(report):
            errors.print(line)
        return
    first = next(iter(report.stages.values())).engine
    where = (
        f"{first.model}, {first.device}, {first.dtype}, wall clock, {_rounds(report.num_rounds)}, seed {report.seed}"
    )
    for load in report.loads:
        console.print()
        console.print(load_table(load, f"Load {load.name}: {where}"))
        for line in sentences(load):
            console.print(f"- {line}")
    console.print()
    for line in verdict(report):
        console.print(line)
    if (load := report.machine.load_average_1m) is not None and load > BUSY_LOAD:
        console.print(f"Something else was running too (load average {load:.1f} at the start): read times with care.")
    console.print("Written:", *(str(path) for path in written), sep="\n  ")
    console.print(HISTORY)


def _rounds(number: int) -> str:
    return f"median of {number} rounds" if number > 1 else "one round"


def _console(*, stderr: bool) -> Console:
    """rich's console; where there is no terminal to ask, wide enough for the tables."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, markup=False, width=110)
