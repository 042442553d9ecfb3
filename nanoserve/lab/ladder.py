"""`nanoserve ladder`: every stage on the same loads, side by side; tables, ladder.json and charts.

Rounds are interleaved (v0, chunked, ..., v0, chunked, ...), each on a fresh engine, so that whatever else the
machine does hits all stages alike; tables show medians. A stage that moves the client, and the one above it, also
serve hundreds of streams (`front_end.py`). The greedy tokens of all runs must agree. A stage joins by being in
`STAGES`: nothing here knows any by name. Laws: tests/test_ladder.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nanoserve import __version__
from nanoserve.config import DEFAULT_MODEL, STAGES, EngineConfig, get_stage
from nanoserve.lab.arrivals import Uniform, story_words
from nanoserve.lab.charts import Setting
from nanoserve.lab.climb import climb, climb_front_end, moving_stages, split_costs
from nanoserve.lab.front_end import FrontEndLoad, busy_front_end, missing_packages
from nanoserve.lab.ladder_progress import LadderProgress
from nanoserve.lab.ladder_report import (
    LADDER_VERSION,
    LadderReport,
    Run,
    ServerRun,
    middle_round,
    report_front_end,
    report_load,
)
from nanoserve.lab.ladder_tables import show
from nanoserve.lab.workload import (
    TokenSource,
    Workload,
    long_prompt_among_decodes,
    random_tokens,
    shared_system_prompt,
    story_tokens,
)
from nanoserve.machine import describe_machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nanoserve.api.tokenizer import Tokenizer
    from nanoserve.lab.boundary import BoundaryCost

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
    front_end_streams: int = 120
    front_end_requests: int = 3
    front_end_prompt_words: int = 40
    front_end_tokens: int = 32


QUICK = Sizes(
    rounds=1, stream_tokens=64, long_prompts=1, long_prompt_len=2048, requests=8, prefix_len=512,
    front_end_streams=48, front_end_requests=2, front_end_tokens=16,
)  # fmt: skip
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
    "front_end_streams": "clients of a server at the same time, where the client moves",
    "front_end_requests": "requests that each of them sends, one after another",
    "front_end_prompt_words": "words of a prompt, on average (with --random-prompts: tokens)",
    "front_end_tokens": "tokens of each answer",
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
    servers = moving_stages(stages)
    front_end, left_out = _front_end_load(args, sizes, servers)
    total = sum(len(stages) * sizes.rounds * workload.num_output_tokens for workload in workloads)
    total += len(servers) * sizes.rounds * front_end.num_output_tokens if front_end else 0
    costs: list[BoundaryCost] = []
    lives: list[ServerRun] = []
    with LadderProgress(total) as progress:
        runs, built = climb(stages, workloads, sizes.rounds, progress)
        if front_end:
            costs = split_costs(stages, front_end.num_streams, sizes.rounds, progress)
            lives = climb_front_end(servers, front_end, sizes.rounds, progress)

    charts: dict[str, Figure] = {}
    if args.charts:
        setting = Setting(load="", device=next(iter(built.values())).engine.device, clock="wall", seed=args.seed)
        for workload in workloads:
            charts |= _draw(workload, runs[workload.name], setting)
        charts |= _draw_gaps(front_end, lives, setting) if front_end else {}
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
        front_end=report_front_end(front_end, lives, costs) if front_end else None,
        left_out=left_out,
        charts=list(charts),
    )
    show(report, _write(report, charts, out), as_json=args.json)
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


def _front_end_load(
    args: argparse.Namespace, sizes: Sizes, servers: Mapping[str, EngineConfig]
) -> tuple[FrontEndLoad | None, dict[str, str]]:
    """The load for servers; without one, why."""
    if not servers:
        why = "no stage here moves the client."
    elif missing := missing_packages():
        why = f"a server needs {', '.join(missing)}; pip install 'nanoserve[serve]'."
    elif args.random_prompts and (error := _tokenizer_error(args.model)):
        why = f"a server needs a tokenizer: {error}"
    else:
        mean = sizes.front_end_prompt_words
        load = busy_front_end(
            random_tokens(_vocab_size(args.model)) if args.random_prompts else story_words,
            seed=args.seed,
            num_streams=sizes.front_end_streams,
            requests_per_stream=sizes.front_end_requests,
            prompt_len=Uniform(max(1, mean // 2), mean + mean // 2),
            output_tokens=sizes.front_end_tokens,
        )
        return load, {}
    return None, {FrontEndLoad.NAME: why}


def _vocab_size(model: str) -> int:
    from nanoserve.checkpoint import read_model_config

    return read_model_config(model).vocab_size


def _tokenizer(model: str) -> Tokenizer:
    from nanoserve.api.tokenizer import Tokenizer
    from nanoserve.checkpoint import TEXT_FILES, resolve_model_dir

    return Tokenizer.load(resolve_model_dir(model, patterns=TEXT_FILES))


def _tokenizer_error(model: str) -> str | None:
    """Why a model's text cannot be served; None: it can."""
    try:
        _tokenizer(model)
    except ValueError as error:
        return str(error)
    return None


def _token_source(args: argparse.Namespace) -> TokenSource:
    if args.random_prompts:
        return random_tokens(_vocab_size(args.model))
    tokenizer = _tokenizer(args.model)
    return story_tokens(lambda text: tokenizer.encode(text, add_special_tokens=False))


def _draw(workload: Workload, runs: Sequence[Run], setting: Setting) -> dict[str, Figure]:
    """File name -> chart, of the round of median length."""
    from nanoserve.lab.charts import blocks_in_use, itl_strip, step_timeline, tokens_computed

    number = middle_round(runs)
    shown = {one.stage: one.records for one in runs if one.round == number}
    setting = replace(setting, load=workload.name, round=_which(number, runs))
    return {
        f"{workload.name}-itl.png": itl_strip(shown, workload.groups, workload.watched, setting),
        f"{workload.name}-timeline.png": step_timeline(shown, setting),
        f"{workload.name}-blocks.png": blocks_in_use(shown, setting),
        f"{workload.name}-tokens.png": tokens_computed(shown, setting),
    }


def _draw_gaps(load: FrontEndLoad, runs: Sequence[ServerRun], setting: Setting) -> dict[str, Figure]:
    from nanoserve.lab.charts import gap_strip

    number = middle_round(runs)
    shown = {one.stage: one.result.gaps_s for one in runs if one.round == number}
    return {f"{load.name}-gaps.png": gap_strip(shown, replace(setting, load=load.name, round=_which(number, runs)))}


def _which(number: int, runs: Sequence[Run] | Sequence[ServerRun]) -> str:
    return f"round {number} of {max(run.round for run in runs)}"


def _write(report: LadderReport, charts: Mapping[str, Figure], out: Path) -> list[Path]:
    path = out / "ladder.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    for name, figure in charts.items():
        figure.savefig(out / name)
    return [path, *(out / name for name in charts)]
