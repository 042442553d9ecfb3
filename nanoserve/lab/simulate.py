"""`nanoserve simulate`: schedulers and block managers at a scale that no laptop has, on a virtual clock.

Reads the flags, runs each policy on the workload (or the study of that name), prints and writes. Costs are linear,
a table from `nanoserve calibrate`, or a roofline of GPUs and a model. Two equal commands write equal bytes.
Laws: tests/test_simulate_cli.py.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from nanoserve import __version__
from nanoserve.api.cli_engine import as_argument, size_argument
from nanoserve.config import SEAMS
from nanoserve.lab.costs import CostModel, Roofline, Table, parse_costs
from nanoserve.lab.files import check_inputs, check_outputs, file_argument, naming, refuse_device, write_file
from nanoserve.lab.gpus import DEFAULT_MEMORY_USE, DTYPE_BYTES, GPUS, MODELS, Memory, get_gpu, get_model
from nanoserve.lab.metrics import ALL
from nanoserve.lab.policies import Policy, parse_policies
from nanoserve.lab.scenarios import SCENARIOS, SESSION_LEN, SYSTEM_PROMPT_LEN, Scenario
from nanoserve.lab.simulate_report import (
    SIMULATE_VERSION,
    MemoryReport,
    PolicyReport,
    SessionMemory,
    SimulateReport,
    session_memory,
)
from nanoserve.lab.simulate_tables import show, show_json, working
from nanoserve.lab.simulator import Host, complete_config, simulate
from nanoserve.lab.studies import STUDIES
from nanoserve.lab.study import Setup
from nanoserve.lab.workload import Workload
from nanoserve.lab.workload_files import read_workload
from nanoserve.record import JsonlRecorder
from nanoserve.runner import MAX_POOL_BLOCKS

DEFAULT_GPU, DEFAULT_TP, DEFAULT_MODEL, DEFAULT_DTYPE = "h100", 8, "llama-3-70b", "bf16"
DEFAULT_BLOCKS = 20_000  # where the costs name no hardware
FILE_POLICIES = "phase_split:16384,unified:2048"


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:12]) < 10**9:
        raise ValueError(f"{text} is not an integer >= 1.")
    return int(text)


count_argument = as_argument(_positive)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        required=True,
        metavar="NAME|FILE",
        help=f"{', '.join([*SCENARIOS, *STUDIES])}; or a JSONL file of arrivals, or a trace in Mooncake's form",
    )
    parser.add_argument(
        "--policies",
        metavar="A,B,...",
        help="SCHEDULER or STAGE[:BUDGET][+BLOCKS][+CLIENT][+ahead], like unified:512+shared; default: the scenario's",
    )
    parser.add_argument("--seed", type=int, default=0, help="of what the scenario draws; default: %(default)s")
    costs = parser.add_argument_group("costs of a step")
    costs.add_argument(
        "--costs", metavar="MODEL", help="linear:BASE,TOKEN (us), table:FILE, roofline; default: roofline"
    )
    costs.add_argument("--gpu", metavar="NAME", help=f"{', '.join(GPUS)}; default: {DEFAULT_GPU}")
    costs.add_argument("--tp", type=count_argument, metavar="N", help=f"GPUs of a replica; default: {DEFAULT_TP}")
    costs.add_argument("--model", metavar="NAME", help=f"{', '.join(MODELS)}; default: {DEFAULT_MODEL}")
    costs.add_argument("--dtype", choices=tuple(DTYPE_BYTES), help=f"of the weights; default: {DEFAULT_DTYPE}")
    costs.add_argument("--kv-cache-dtype", choices=tuple(DTYPE_BYTES), help="default: --dtype's, of fp8 bf16")
    costs.add_argument(
        "--efficiency", metavar="F,B", help="shares of the peak operations and bandwidth; default: 0.6,0.8"
    )
    host = parser.add_argument_group("host (microseconds; default: 0, of a table its gap)")
    host.add_argument("--host-step-us", type=int, metavar="US", help="to decide and launch a step")
    host.add_argument("--host-request-us", type=float, metavar="US", help="more of that for each request in it")
    host.add_argument("--front-end-us", type=float, metavar="US", help="for each token that goes out")
    _add_engine_arguments(parser.add_argument_group("engine"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--record",
        type=file_argument,
        metavar="FILE",
        help="every step as a JSON line; of several policies each gets a file: of run.jsonl run-unified-512.jsonl, ...",
    )
    output.add_argument("--json", action="store_true", help="print the report as JSON")
    output.add_argument("--out", type=file_argument, metavar="FILE", help="write the JSON there as well")


def _add_engine_arguments(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument("--blocks", choices=tuple(SEAMS["blocks"]), help="of policies that name no block manager")
    engine.add_argument("--num-gpu-blocks-override", type=size_argument, dest="num_blocks", metavar="BLOCKS")
    engine.add_argument(
        "--gpu-memory-utilization", type=float, metavar="SHARE", help=f"of a roofline's; default: {DEFAULT_MEMORY_USE}"
    )
    engine.add_argument("--block-size", type=count_argument, default=16, metavar="TOKENS", help="default: %(default)s")
    engine.add_argument("--max-num-seqs", type=count_argument, metavar="N", help="default: 128, or the scenario's")
    engine.add_argument("--long-prefill-token-threshold", type=int, metavar="N", help="most prompt tokens a step")
    engine.add_argument("--check-invariants", action="store_true", help="after every step; slower")


def run(args: argparse.Namespace) -> int:
    """Simulate, print, write. ValueError for bad input."""
    check_inputs(_inputs(args))
    check_outputs([("--out", args.out), ("--record", args.record)], _inputs(args))
    refuse_device("--record", args.record)
    costs = _costs(args)
    host = _host(args, costs)
    with working(f"simulating {args.workload}"):
        try:
            report = _study(args, costs, host) if args.workload in STUDIES else _runs(args, costs, host)
        except OverflowError:
            raise ValueError(
                f"with the costs {costs} a step takes longer than a clock can tell; correct them."
            ) from None
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
    if args.out is not None:
        write_file(args.out, encoded)
    if args.json:
        show_json(encoded)
    else:
        show(report)
    return 0


# What was asked for


def _inputs(args: argparse.Namespace) -> list[Path]:
    """The files that are read; one that is not there is told of by who reads it."""
    kind, _, table = (args.costs or "").partition(":")
    load = "" if args.workload in (*SCENARIOS, *STUDIES) else args.workload
    names = [load, table if kind == "table" else ""]
    return [Path(name) for name in names if name and Path(name).exists()]


def _costs(args: argparse.Namespace) -> CostModel:
    names = ("gpu", "tp", "model", "dtype", "kv_cache_dtype", "efficiency", "gpu_memory_utilization")
    given = [name for name in names if getattr(args, name) is not None]
    if args.costs not in (None, "roofline"):
        if given:
            flag = given[0].replace("_", "-")
            raise ValueError(f"--{flag} is of a roofline, and --costs is {args.costs!r}; leave one of the two out.")
        return parse_costs(args.costs)
    memory = Memory(
        model=get_model(args.model or DEFAULT_MODEL),
        gpu=get_gpu(args.gpu or DEFAULT_GPU),
        tp=args.tp or (1 if args.gpu else DEFAULT_TP),
        dtype=args.dtype or DEFAULT_DTYPE,
        kv_dtype=args.kv_cache_dtype,
        block_size=args.block_size,
        use=DEFAULT_MEMORY_USE if args.gpu_memory_utilization is None else args.gpu_memory_utilization,
    )
    return Roofline(memory, *_shares(args.efficiency)) if args.efficiency else Roofline(memory)


def _shares(text: str) -> tuple[float, float]:
    try:
        flops, bandwidth = (float(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"--efficiency {text!r} is not a pair of shares; write 0.6,0.8.") from None
    return flops, bandwidth


def _host(args: argparse.Namespace, costs: CostModel) -> Host:
    gap_us = round(costs.gap_us) if isinstance(costs, Table) else 0
    step_us = gap_us if args.host_step_us is None else args.host_step_us
    return Host(step_us, args.host_request_us or 0.0, args.front_end_us or 0.0)


def _num_blocks(args: argparse.Namespace, costs: CostModel) -> int:
    """Refused, or no more than that many by itself: each is an object here, as on an engine's host."""
    if args.num_blocks is not None:
        if args.num_blocks > MAX_POOL_BLOCKS:
            raise ValueError(
                f"--num-gpu-blocks-override {args.num_blocks} is more than the simulator keeps; give at most "
                f"{MAX_POOL_BLOCKS}, or a larger --block-size."
            )
        return args.num_blocks
    if not isinstance(costs, Roofline):
        return DEFAULT_BLOCKS
    fit = costs.memory.num_blocks
    if fit > MAX_POOL_BLOCKS:
        warnings.warn(
            f"{fit:,} blocks fit in the memory, and the pool has {MAX_POOL_BLOCKS:,}, the most that an engine takes by "
            "itself; a larger --block-size makes fewer of it.",
            stacklevel=2,
        )
    return min(fit, MAX_POOL_BLOCKS)


def _workload(args: argparse.Namespace) -> tuple[Workload, Scenario | None]:
    if args.workload in SCENARIOS:
        scenario = SCENARIOS[args.workload]
        return scenario.build(args.seed), scenario
    if not Path(args.workload).is_file():
        known = ", ".join([*SCENARIOS, *STUDIES])
        raise ValueError(f"--workload {args.workload!r} is no scenario and no file; use one of {known}.")
    if args.seed:
        raise ValueError(f"--seed {args.seed} means nothing to a file, in which nothing is drawn; leave it out.")
    return read_workload(args.workload), None


def _policies(args: argparse.Namespace, scenario: Scenario | None, longest: int, num_blocks: int) -> list[Policy]:
    common: dict[str, Any] = {
        "block_size": args.block_size,
        "max_num_seqs": args.max_num_seqs or (scenario.max_num_seqs if scenario else 128),
        "check_invariants": args.check_invariants,
    }
    if args.blocks is not None:
        common["blocks"] = SEAMS["blocks"][args.blocks]
    if args.long_prefill_token_threshold is not None:
        common["long_prefill_token_threshold"] = args.long_prefill_token_threshold
    policies = parse_policies(args.policies or (scenario.policies if scenario else FILE_POLICIES), **common)
    return [
        Policy(policy.name, complete_config(policy.config, max_model_len=longest, num_blocks=num_blocks))
        for policy in policies
    ]


# What comes of it


def _runs(args: argparse.Namespace, costs: CostModel, host: Host) -> SimulateReport:
    workload, scenario = _workload(args)
    num_blocks = _num_blocks(args, costs)
    policies = _policies(args, scenario, workload.longest, num_blocks)
    ttft_group = scenario.ttft_group if scenario else ALL
    records = _record_files(args.record, [policy.name for policy in policies])
    check_outputs([("--out", args.out), *(("--record", path) for path in records)], _inputs(args))
    rows = []
    for policy, path in zip(policies, records, strict=True):
        with _recorder(path) as recorder:
            simulated = simulate(policy.config, workload, costs, host, observer=recorder)
        rows.append(PolicyReport.of(policy.name, simulated, ttft_group))
    return SimulateReport(
        **_setting(args, costs, host, num_blocks),
        claim=workload.claim,
        parameters=dict(workload.parameters),
        num_requests=len(workload.arrivals),
        ttft_group=ttft_group,
        sessions=_sessions(args.workload, workload, costs),
        policies=rows,
        study=None,
    )


def _study(args: argparse.Namespace, costs: CostModel, host: Host) -> SimulateReport:
    names = ("policies", "blocks", "record", "long_prefill_token_threshold")
    if refused := [name for name in names if getattr(args, name) is not None]:
        flag = refused[0].replace("_", "-")
        raise ValueError(f"--{flag} means nothing to {args.workload}, which compares its own policies; leave it out.")
    if args.check_invariants:
        raise ValueError(f"--check-invariants is not for {args.workload}, which takes many runs; use a scenario.")
    num_blocks = _num_blocks(args, costs)
    setup = Setup(
        costs=costs,
        num_blocks=num_blocks,
        host=host,
        seed=args.seed,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs or 128,
    )
    study = STUDIES[args.workload](setup)
    return SimulateReport(
        **_setting(args, costs, host, num_blocks),
        claim=study.question,
        parameters={},
        num_requests=0,
        ttft_group=ALL,
        sessions=None,
        policies=[],
        study=study,
    )


def _setting(args: argparse.Namespace, costs: CostModel, host: Host, num_blocks: int) -> dict[str, Any]:
    return {
        "version": SIMULATE_VERSION,
        "nanoserve": __version__,
        "clock": "simulated",
        "workload": args.workload if args.workload in (*SCENARIOS, *STUDIES) else Path(args.workload).name,
        "seed": args.seed,
        "costs": str(costs),
        "host": host,
        "block_size": args.block_size,
        "num_blocks": num_blocks,
        "memory": MemoryReport.of(costs.memory) if isinstance(costs, Roofline) else None,
    }


def _sessions(name: str, workload: Workload, costs: CostModel) -> SessionMemory | None:
    if name != "system-prompt-1000" or not isinstance(costs, Roofline):
        return None
    return session_memory(costs.memory, len(workload.arrivals), SYSTEM_PROMPT_LEN, SESSION_LEN)


def _record_files(path: Path | None, policies: Sequence[str]) -> list[Path | None]:
    """What `--record` asks for; of several policies each gets a file, with its name in the file's."""
    if path is None or len(policies) == 1:
        return [path] * len(policies)
    names = [re.sub(r"[^A-Za-z0-9_]+", "-", policy) for policy in policies]
    return [path.with_name(f"{path.stem}-{name}{path.suffix}") for name in names]


@contextmanager
def _recorder(path: Path | None) -> Iterator[JsonlRecorder | None]:
    if path is None:
        yield None
        return
    recorder = JsonlRecorder(path)
    with naming(path):
        try:
            yield recorder
        finally:
            recorder.close()
