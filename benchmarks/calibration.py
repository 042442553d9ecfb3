"""How far a calibrated simulation is from real runs of this machine that it was not fitted to.

    python benchmarks/calibration.py [--rounds 12] [--keep 3] [--engines shared] [--device auto] [--out FILE]

Engines in one process, not a step ahead. Costs are fitted to five loads at stage `shared`; held out are five others at
that stage, and with `--engines shared v0` also at `v0`. All take turns, each on an empty cache; of each load's runs
those count in which a yardstick says that the machine was least disturbed. Simulated are the recorded arrivals.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from nanoserve.api.tokenizer import Tokenizer
from nanoserve.checkpoint import resolve_model_dir
from nanoserve.client import InProcessClient
from nanoserve.config import STAGES, EngineConfig
from nanoserve.lab.arrivals import MIXES
from nanoserve.lab.calibrate import fit, measured_steps
from nanoserve.lab.costs import Table
from nanoserve.lab.held_out import COMPARED, Comparison, compare, error
from nanoserve.lab.loadgen import drive
from nanoserve.lab.scenarios import generator, poisson_times
from nanoserve.lab.workload import Arrival, TokenSource, Workload, story_tokens
from nanoserve.machine import describe_machine
from nanoserve.record import JsonlRecorder, ListRecorder, StepRecord, TraceHeader

Request = tuple[list[int], int, float]  # prompt, tokens to answer with, seconds
TARGETS = {"mean_itl_ms": 0.10, "p99_itl_ms": 0.20, "output_tokens_per_s": 0.10}
MODEL_LEN, SEATS, BUDGET, NUM_BLOCKS = 4096, 64, 512, 4096
ENGINES: Mapping[str, EngineConfig] = {  # the first one is calibrated
    "shared": replace(STAGES["shared"], max_num_batched_tokens=BUDGET),
    "v0": STAGES["v0"],
}


# Fitted to


def ramp(source: TokenSource) -> Iterator[Request]:
    """From 32 rows down to one, with long contexts."""
    rng = generator(1, "ramp")
    return ((source(rng, rng.randint(16, 1000)), 8 + 5 * i, 0.0) for i in range(32))


def short(source: TokenSource) -> Iterator[Request]:
    """The same with short ones."""
    rng = generator(2, "short")
    return ((source(rng, 4 + 2 * i), 20 + 6 * i, 0.0) for i in range(32))


def mixed(source: TokenSource) -> Iterator[Request]:
    """Chunks beside decodes."""
    rng = generator(3, "mixed")
    return ((source(rng, rng.randint(16, 1200)), rng.randint(8, 64), at_s) for at_s in poisson_times(rng, 14, 2))


def chunks(source: TokenSource) -> Iterator[Request]:
    """Prompts of many chunks beside six decodes."""
    rng = generator(4, "chunks")
    for i in range(6):
        yield source(rng, 16 + 32 * i), 120, 0.0
    for i in range(3):
        yield source(rng, 700 * (1 + i)), 8, 0.2 + 0.3 * i


def few(source: TokenSource) -> Iterator[Request]:
    """One or two rows."""
    rng = generator(5, "few")
    return ((source(rng, 20 + 150 * i), 60, 0.12 * i) for i in range(6))


# Held out


def longer(source: TokenSource) -> Iterator[Request]:
    """Six at once, each prompt longer than most of those above, and answers longer than all."""
    rng = generator(6, "longer")
    return ((source(rng, 1400 + 60 * i), 220, 0.0) for i in range(6))


def crowd(source: TokenSource) -> Iterator[Request]:
    """More rows than in any load above."""
    rng = generator(7, "crowd")
    return ((source(rng, 30 + 3 * i), 90, 0.0) for i in range(48))


def long_prompts(source: TokenSource) -> Iterator[Request]:
    """Two prompts of 3,000 tokens among eight decodes."""
    rng = generator(8, "long prompts")
    for i in range(8):
        yield source(rng, 20 + i), 240, 0.0
    for i in range(2):
        yield source(rng, 3000), 8, 0.25 + 0.35 * i


def poisson(source: TokenSource) -> Iterator[Request]:
    """Ordinary traffic; a quarter of the answers' usual lengths, so that a run takes seconds."""
    rng = generator(9, "poisson")
    prompt_len, output_len = MIXES["sharegpt-like"]
    for at_s in poisson_times(rng, 10, 2):
        yield source(rng, prompt_len.draw(rng)), max(1, output_len.draw(rng) // 4), at_s


def prefixes(source: TokenSource) -> Iterator[Request]:
    """Three system prompts, found in the cache by all but the first of their requests."""
    rng = generator(10, "prefixes")
    systems = [source(rng, n) for n in (400, 640, 880)]
    for at_s in poisson_times(rng, 14, 2):
        yield rng.choice(systems) + source(rng, rng.randint(10, 120)), rng.randint(16, 64), at_s


FITTED: Sequence[Callable[[TokenSource], Iterator[Request]]] = (ramp, short, mixed, chunks, few)
HELD_OUT: Sequence[Callable[[TokenSource], Iterator[Request]]] = (longer, crowd, long_prompts, poisson, prefixes)


def workload(name: str, claim: str, requests: Iterator[Request]) -> Workload:
    arrivals = [
        Arrival(id=f"{name}-{i}", group=name, prompt_token_ids=prompt, max_tokens=max_tokens, at_s=at_s)
        for i, (prompt, max_tokens, at_s) in enumerate(requests)
    ]
    return Workload(name=name, claim=claim, watched=name, seed=0, parameters={}, arrivals=arrivals)


# Real runs


@dataclass(frozen=True, slots=True)
class Run:
    """One real run, and how disturbed the machine was meanwhile: which decides whether it counts, not its figures."""

    header: TraceHeader
    records: list[StepRecord]
    yardstick_us: float  # mean, of all through the run: a core that somebody else uses needs half as long again
    others: float  # share of a core that other processes took

    @property
    def disturbance(self) -> float:
        return self.yardstick_us * (1 + self.others)


class Yardstick:
    """Plain Python between two steps, a third of a millisecond twenty times a second: how fast is the machine?"""

    def __init__(self) -> None:
        self.times_us: list[float] = []
        self._next_s = 0.0

    def __call__(self, num_tokens: int = 0) -> None:
        start_s = time.perf_counter()
        if start_s < self._next_s:
            return
        sum(number * number for number in range(8000))
        end_s = time.perf_counter()
        self.times_us.append((end_s - start_s) * 1e6)
        self._next_s = end_s + 0.05


def run(client: InProcessClient, recorder: ListRecorder, load: Workload) -> Run:
    assert client.call("reset_prefix_cache"), "something runs"
    recorder.records.clear()
    gc.collect()
    yardstick = Yardstick()
    start_s, before_s = time.monotonic(), busy_s() - time.process_time()
    drive(client, load, on_tokens=yardstick)
    others_s, lasted_s = busy_s() - time.process_time() - before_s, time.monotonic() - start_s
    others = max(0.0, others_s / lasted_s)
    return Run(recorder.header, list(recorder.records), statistics.fmean(yardstick.times_us), others)


def busy_s() -> float:
    """Seconds that all processors together have worked; those of this process alone where nobody tells."""
    path = Path("/proc/stat")  # of Linux
    if not path.exists():
        return time.process_time()
    user, nice, system, _idle, _waiting, interrupts, soft, *_ = map(int, path.read_text().split("\n")[0].split()[1:])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def record(args: argparse.Namespace) -> dict[tuple[str, str], list[Run]]:
    """(engine, load) -> a run a round. One engine a name for all rounds."""
    tokenizer = Tokenizer.load(resolve_model_dir(args.model))
    source = story_tokens(lambda text: tokenizer.encode(text, add_special_tokens=False))
    loads = {make.__name__: workload(make.__name__, make.__doc__ or "", make(source)) for make in (*FITTED, *HELD_OUT)}
    runs: dict[tuple[str, str], list[Run]] = {}
    with ExitStack() as stack:
        engines: dict[str, tuple[InProcessClient, ListRecorder]] = {}
        for name in args.engines:
            config = ENGINES[name]
            config = replace(config, model=args.model, device=args.device, client=InProcessClient, max_num_seqs=SEATS)
            config = replace(config, async_scheduling=False, num_blocks=NUM_BLOCKS, max_model_len=MODEL_LEN)
            recorder = ListRecorder()
            engines[name] = stack.enter_context(InProcessClient(config, recorder)), recorder
            run(*engines[name], loads[FITTED[0].__name__])  # warms up
        for number in range(1, args.rounds + 1):
            for engine, load in turns(args.engines, loads):
                runs.setdefault((engine, load.name), []).append(run(*engines[engine], load))
            print(f"round {number} of {args.rounds} is done", file=sys.stderr, flush=True)
    return runs


def turns(engines: Sequence[str], loads: Mapping[str, Workload]) -> Iterator[tuple[str, Workload]]:
    calibrated, *others = engines
    for load in loads.values():
        yield calibrated, load
    for make in HELD_OUT:
        for engine in others:
            yield engine, loads[make.__name__]


def save(runs: Mapping[tuple[str, str], Sequence[Run]], folder: Path) -> None:
    """Files for `nanoserve calibrate`."""
    folder.mkdir(parents=True, exist_ok=True)
    for (engine, load), repeats in runs.items():
        for number, one in enumerate(repeats, 1):
            recorder = JsonlRecorder(folder / f"{engine}-{load}-{number}.jsonl")
            recorder.on_start(one.header)
            for step in one.records:
                recorder.on_step(step)
            recorder.close()


# What comes of them


def summary(rounds: Sequence[Comparison]) -> dict[str, dict[str, float]]:
    """Of each figure: medians, error, and how far the real rounds are from their median."""
    figures = {}
    for name in COMPARED:
        real = [getattr(c.real, name) for c in rounds]
        middle, simulated = statistics.median(real), statistics.median(getattr(c.simulated, name) for c in rounds)
        figures[name] = {
            "real": middle,
            "simulated": simulated,
            "error": error(simulated, middle),
            "real_lowest": min(real) / middle - 1,
            "real_highest": max(real) / middle - 1,
        }
    return figures


def show(results: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]], table: Table) -> None:
    print(f"{table}: error of a step, median {table.median_error:.1%}, P90 {table.p90_error:.1%}\n")
    print("| engine, load | " + " | ".join(COMPARED) + " |")
    print("|---" * (len(COMPARED) + 1) + "|")
    for engine, loads in results.items():
        for load, figures in loads.items():
            cells = [
                f"{f['real']:,.2f} -> {f['simulated']:,.2f} {f['error']:+.1%} "
                f"({f['real_lowest']:+.0%}, {f['real_highest']:+.0%})"
                for f in figures.values()
            ]
            print(f"| {engine}, {load} | " + " | ".join(cells) + " |")
    print("\nmedian of real rounds -> simulated, error (lowest and highest real round beside their median)\n")
    for engine, loads in results.items():
        for name, limit in TARGETS.items():
            worst = max((abs(loads[make.__name__][name]["error"]), make.__name__) for make in HELD_OUT)
            verdict = "met" if worst[0] <= limit else "MISSED"
            print(f"{engine}, {name}: held out, at most {worst[0]:.1%} ({worst[1]}); <= {limit:.0%} is {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--keep", type=int, default=3, help="runs of each load that count: the least disturbed")
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=list(ENGINES)[:1], help="the first is fitted to"
    )
    parser.add_argument("--model", default="nanostory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="save the recorded runs that count there")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "calibration.json")
    args = parser.parse_args()
    every = record(args)
    runs = {key: sorted(repeats, key=lambda one: one.disturbance)[: args.keep] for key, repeats in every.items()}
    if args.traces:
        save(runs, args.traces)
    calibrated = args.engines[0]
    fitted = [one for make in FITTED for one in runs[calibrated, make.__name__]]
    table = fit(
        [step for one in fitted for step in measured_steps(one.records)], f"{args.model} on {fitted[0].header.device}"
    )
    results: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    rounds: dict[str, list[dict[str, object]]] = {}
    for (engine, load), repeats in runs.items():
        compared = [compare(one.header, one.records, table) for one in repeats]
        results.setdefault(engine, {})[load] = summary(compared)
        rounds[f"{engine}, {load}"] = [asdict(comparison) for comparison in compared]
    show(results, table)
    result = {
        "what": "figures of real runs and of their simulation with costs fitted to other runs",
        "command": "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": msgspec.to_builtins(describe_machine()),
        "execution": fitted[0].header.execution,
        "fitted_to": {make.__name__: make.__doc__ for make in FITTED},
        "held_out": {make.__name__: make.__doc__ for make in HELD_OUT},
        "table": msgspec.to_builtins(table),
        "medians": results,
        "yardstick_us": {", ".join(key): sorted(one.yardstick_us for one in repeats) for key, repeats in every.items()},
        "rounds": rounds,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
