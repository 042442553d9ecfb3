"""`nanoserve ladder`: every stage on the same loads, side by side; tables, ladder.json, charts and one HTML report.

Rounds are interleaved (v0, chunked, ..., v0, chunked, ...), each on a fresh engine, so that whatever else the
machine does hits all stages alike; tables show medians. A stage that moves the client, and the one above it, also
serve hundreds of streams (`front_end.py`). The greedy tokens of all runs must agree. The same stages are simulated for
a production set-up. A stage joins by being in `STAGES`: nothing here knows any by name. Laws: tests/test_ladder.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve import __version__
from nanoserve.config import DEFAULT_MODEL, MAX_COUNT, STAGES, EngineConfig, get_stage
from nanoserve.lab.arrivals import Uniform, story_words
from nanoserve.lab.charts import Setting
from nanoserve.lab.climb import climb, climb_front_end, moving_stages, split_costs
from nanoserve.lab.front_end import FrontEndLoad, busy_front_end, missing_packages
from nanoserve.lab.ladder_admission import admission_costs
from nanoserve.lab.ladder_files import Drawn, draw, write
from nanoserve.lab.ladder_production import ProductionRuns, production_ladder
from nanoserve.lab.ladder_progress import LadderProgress
from nanoserve.lab.ladder_report import (
    LADDER_VERSION,
    AdmissionCost,
    LadderReport,
    Run,
    ServerRun,
    StageReport,
    report_front_end,
    report_load,
)
from nanoserve.lab.ladder_story import stage_stories
from nanoserve.lab.ladder_tables import show
from nanoserve.lab.workload import (
    TokenSource,
    Workload,
    long_prompt_among_decodes,
    random_tokens,
    shared_system_prompt,
    story_tokens,
)
from nanoserve.machine import Machine, describe_machine

if TYPE_CHECKING:
    from nanoserve.api.tokenizer import Tokenizer
    from nanoserve.lab.boundary import BoundaryCost

DEFAULT_OUT = "ladder-results"
CPU_BUDGET = 256  # SARATHI's smaller chunk: on a CPU even the default of 512 takes long beside a decode
ADMISSION_LEN = 6144  # tokens of a prompt that nobody shares
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
    parser.add_argument(
        "--no-simulated", dest="simulated", action="store_false", help="leave the production set-up out"
    )
    parser.add_argument("--json", action="store_true", help="print ladder.json instead of the tables")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts; default: %(default)s")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, rocm")
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


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be run."""

    sizes: Sizes
    stages: dict[str, EngineConfig]
    workloads: list[Workload]
    servers: dict[str, EngineConfig]  # the stages that `front_end` goes to
    front_end: FrontEndLoad | None
    left_out: dict[str, str]
    seed: int
    simulates: bool

    @property
    def num_output_tokens(self) -> int:
        """Over all rounds of all real runs."""
        each = len(self.stages) * sum(workload.num_output_tokens for workload in self.workloads)
        served = len(self.servers) * self.front_end.num_output_tokens if self.front_end else 0
        return self.sizes.rounds * (each + served)


@dataclass(frozen=True, slots=True)
class Climbed:
    """What came of it."""

    runs: dict[str, list[Run]]  # by workload
    built: dict[str, StageReport]
    costs: list[BoundaryCost]
    lives: list[ServerRun]
    admission: list[AdmissionCost]
    production: ProductionRuns | None


def run(args: argparse.Namespace) -> int:
    """Climb, write and print; 1 when two runs emitted different tokens. ValueError for bad input, before anything is
    measured; what was measured is on disk before anything is drawn."""
    plan = _plan(args)
    out = args.out or Path(f"{DEFAULT_OUT}-quick" if args.quick else DEFAULT_OUT)
    out.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    with LadderProgress(plan.num_output_tokens) as progress:
        climbed = _climb(plan, progress)
        prompts = "random token ids" if args.random_prompts else "stories in the model's own tokens"
        report = _report(plan, climbed, machine, prompts)
        written = write(report, Drawn(), out)
        if args.charts:
            drawn = _draw(plan, climbed, progress)
            report = replace(report, charts=list(drawn.charts), pages=drawn.names_of_pages)
            written = write(report, drawn, out)
    show(report, written, as_json=args.json)
    return IDENTICAL if report.identical else DIFFERENT


def _plan(args: argparse.Namespace) -> Plan:
    sizes, stages = _sizes(args), _stages(args)
    workloads, servers = _workloads(args, sizes), moving_stages(stages)
    front_end, left_out = _front_end_load(args, sizes, servers)
    return Plan(sizes, stages, workloads, servers, front_end, left_out, args.seed, args.simulated)


def _climb(plan: Plan, progress: LadderProgress) -> Climbed:
    """The real runs first: nothing else has used the process when they begin."""
    sizes, load = plan.sizes, plan.front_end
    runs, built = climb(plan.stages, plan.workloads, sizes.rounds, progress)
    costs = split_costs(plan.stages, load.num_streams, sizes.rounds, progress) if load else []
    lives = climb_front_end(plan.servers, load, sizes.rounds, progress) if load else []
    admission = admission_costs(plan.stages, ADMISSION_LEN)
    production = None
    if plan.simulates:
        bare = {name: STAGES[name] for name in plan.stages}
        production = production_ladder(bare, plan.seed, progress.announce)
    return Climbed(runs, built, costs, lives, admission, production)


def _draw(plan: Plan, climbed: Climbed, progress: LadderProgress) -> Drawn:
    progress.announce("drawing")
    device = next(iter(climbed.built.values())).engine.device
    setting = Setting(load="", device=device, clock="wall", seed=plan.seed)
    served = (plan.front_end, climbed.lives)
    return draw(plan.workloads, climbed.runs, climbed.built, served, climbed.production, setting)


def _report(plan: Plan, climbed: Climbed, machine: Machine, prompts: str) -> LadderReport:
    loads = [report_load(workload, climbed.runs[workload.name]) for workload in plan.workloads]
    front_end = report_front_end(plan.front_end, climbed.lives, climbed.costs) if plan.front_end else None
    production = climbed.production.report if climbed.production else None
    return LadderReport(
        version=LADDER_VERSION,
        nanoserve=__version__,
        clock="wall",
        seed=plan.seed,
        num_rounds=plan.sizes.rounds,
        prompts=prompts,
        machine=machine,
        stages=climbed.built,
        loads=loads,
        front_end=front_end,
        admission=climbed.admission,
        left_out=plan.left_out,
        production=production,
        stories=stage_stories(climbed.built, loads, front_end, climbed.admission, production),
        charts=[],
        pages=[],
    )


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
    else:
        _check_budget(budget, stages)
    return {n: replace(c, max_num_batched_tokens=budget) if _cuts_prompts(c) else c for n, c in stages.items()}


def _check_budget(budget: int, stages: Mapping[str, EngineConfig]) -> None:
    """ValueError for what an engine would refuse, after others have been measured."""
    cutting = {name: config for name, config in stages.items() if _cuts_prompts(config)}
    if not cutting:
        raise ValueError(
            f"--max-num-batched-tokens {budget} means nothing to stages that take prompts whole ({', '.join(stages)}); "
            "leave it out, or name a stage that cuts them (--stages)."
        )
    lowest = max(config.max_num_seqs for config in cutting.values())
    if not lowest <= budget <= MAX_COUNT:
        raise ValueError(
            f"--max-num-batched-tokens must be >= {lowest} (max_num_seqs: a step holds one token of every running "
            f"request) and <= {MAX_COUNT}, got {budget}."
        )


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
