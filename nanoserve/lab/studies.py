"""Questions of an operator that take several simulations to answer: `length-classes`, `capacity`, `bursty-cache`.

Each row of a study is one way to run the same traffic, on one replica or on several, and each figure is simulated.
Laws: tests/test_scenarios.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from nanoserve.core import EngineCore
from nanoserve.lab.metrics import percentile
from nanoserve.lab.scenarios import LONG_CLASS_LEN, cache_bursts, length_mix
from nanoserve.lab.simulated import SimulatedRun, Story
from nanoserve.lab.simulator import simulate
from nanoserve.lab.study import SHARE_REQUIRED, Column, Setup, Slo, Study, Value
from nanoserve.lab.workload import Arrival, Workload

CLASS_LIMIT = LONG_CLASS_LEN.low  # prompts from here on are the long class
V0, V1 = "phase_split:16384", "unified:512+shared+core_process+ahead"


# Several replicas


def split(workload: Workload, num_replicas: int, route: Callable[[int, Arrival], int]) -> list[Workload]:
    """One workload a replica; `route` says which, of an arrival and its place. Replicas without any are left out."""
    parts: list[list[Arrival]] = [[] for _ in range(num_replicas)]
    for place, arrival in enumerate(workload.arrivals):
        parts[route(place, arrival)].append(arrival)
    return [replace(workload, arrivals=part) for part in parts if part]


def run_replicas(setup: Setup, policy: str, parts: Sequence[Workload]) -> list[SimulatedRun]:
    longest = max(part.longest for part in parts)
    config = setup.config(policy, longest)
    return [simulate(config, part, setup.costs, setup.host) for part in parts]


def _stories(runs: Sequence[SimulatedRun], group: str) -> list[Story]:
    return [story for run in runs for story in run.members(group)]


def _p99(values: Sequence[int]) -> float | None:
    return percentile(values, 99) if values else None


def _ttft_p99(stories: Sequence[Story]) -> float | None:
    return _p99([story.ttft_us for story in stories if story.ttft_us is not None])


def length_classes(setup: Setup, *, replicas: int = 4, rate: float = 24.0, until_s: float = 40.0) -> Study:
    """The workarounds that operators of v0 had for long prompts, and v1 without any."""
    traffic = length_mix(setup.seed, rate, until_s)
    slo = Slo(2000, 200)
    capped = replace(traffic, arrivals=[a for a in traffic.arrivals if len(a.prompt_token_ids) < CLASS_LIMIT])
    total, even = len(traffic.arrivals), _even(replicas)
    ways = [
        ("v0, one pool", V0, split(traffic, replicas, even)),
        (f"v0, prompts under {CLASS_LIMIT}", V0, split(capped, replicas, even)),
        ("v0, split by length", V0, split(traffic, replicas, _by_length(replicas))),
        ("v0, twice the replicas", V0, split(traffic, 2 * replicas, _even(2 * replicas))),
        ("v1, one pool", V1, split(traffic, replicas, even)),
    ]
    rows = [_length_row(name, run_replicas(setup, policy, parts), total, slo) for name, policy, parts in ways]
    return Study(
        name="length-classes",
        question="Long prompts freeze short requests under v0. What does each workaround cost, and does v1 need one?",
        assumptions=[
            *setup.assumptions(),
            f"traffic: {rate:g} requests a second for {until_s:g} s, one in twenty of {LONG_CLASS_LEN} prompt tokens, "
            "the others ShareGPT-like (arrivals.MIXES)",
            f"replicas take turns; split by length: one of {replicas} serves the prompts of {CLASS_LIMIT} and more",
            f"v0 is {V0}, v1 is {V1}; SLO of a request: {slo}; held: by {SHARE_REQUIRED:.0%} of all that were asked",
        ],
        columns=[
            Column("way", "way", "text"),
            Column("replicas", "replicas"),
            Column("refused", "refused %", "share"),
            Column("short_ttft_p99", "short: TTFT P99 ms", "us"),
            Column("short_gap_p99", "short: worst gap P99 ms", "us"),
            Column("short_met", "short: in SLO %", "share"),
            Column("long_ttft_p99", "long: TTFT P99 ms", "us"),
            Column("fullest", "requests at a time, fullest replica"),
            Column("emptiest", "emptiest"),
            Column("held", "SLO held"),
        ],
        rows=rows,
        findings=_length_findings(rows),
    )


def _even(num_replicas: int) -> Callable[[int, Arrival], int]:
    return lambda place, _: place % num_replicas


def _by_length(num_replicas: int) -> Callable[[int, Arrival], int]:
    def route(place: int, arrival: Arrival) -> int:
        is_long = len(arrival.prompt_token_ids) >= CLASS_LIMIT
        return num_replicas - 1 if is_long else place % (num_replicas - 1)

    return route


def _length_row(name: str, runs: Sequence[SimulatedRun], total: int, slo: Slo) -> dict[str, Value]:
    short, long = _stories(runs, "short"), _stories(runs, "long")
    running = [run.mean_running for run in runs]
    served = [*short, *long]
    met = sum(map(slo.is_met, served)) / total
    return {
        "way": name,
        "replicas": len(runs),
        "refused": 1 - len(served) / total,
        "short_ttft_p99": _ttft_p99(short),
        "short_gap_p99": _p99([story.worst_gap_us for story in short]),
        "short_met": slo.share(short),
        "long_ttft_p99": _ttft_p99(long),
        "fullest": round(max(running), 1),
        "emptiest": round(min(running), 1),
        "met": met,
        "held": "yes" if met >= SHARE_REQUIRED else f"no, {met:.1%}",
    }


def _length_findings(rows: Sequence[Mapping[str, Value]]) -> list[str]:
    told = []
    for row in rows:
        refused, met = row["refused"], row["met"]
        assert isinstance(refused, float)
        assert isinstance(met, float)
        how = f"{'holds' if row['held'] == 'yes' else 'does not hold'} the SLO ({met:.1%} of the requests)"
        price = f", refuses {refused:.1%} of the requests" if refused else ""
        told.append(f"{row['way']}: {how} with {row['replicas']} replicas{price}.")
    return told


# Requests a second

MIN_REQUESTS = 300  # of a run: with fewer, one in a hundred says nothing
RATES = tuple(round(2 ** (k / 4), 2) for k in range(-4, 25))  # requests a second: 0.5 to 64


def capacity(setup: Setup, *, until_s: float = 20.0, demand: float = 1000.0, rates: Sequence[float] = RATES) -> Study:
    """The highest of the rates up to which one replica holds an SLO, found by halving; and replicas for `demand`."""
    slos = [Slo(2000, 1000), Slo(2000, 200), Slo(2000, 50)]
    rows: list[dict[str, Value]] = []
    for policy in (V0, "unified:512", V1):
        runs: dict[float, SimulatedRun] = {}

        def run(rate: float, policy: str = policy, runs: dict[float, SimulatedRun] = runs) -> SimulatedRun:
            if rate not in runs:
                traffic = length_mix(setup.seed, rate, max(until_s, MIN_REQUESTS / rate))
                runs[rate] = simulate(setup.config(policy, traffic.longest), traffic, setup.costs, setup.host)
            return runs[rate]

        rows += [_capacity_row(policy, slo, run, demand, rates) for slo in slos]
    return Study(
        name="capacity",
        question="How many requests a second does a replica serve within an SLO, and how many replicas does that make?",
        assumptions=[
            *setup.assumptions(),
            f"traffic: Poisson for {until_s:g} s, or {MIN_REQUESTS} requests where that is more; one in twenty has "
            f"{LONG_CLASS_LEN} prompt tokens, the others are "
            "ShareGPT-like (arrivals.MIXES)",
            f"an SLO is held when {SHARE_REQUIRED:.0%} of the requests meet it; {len(rates)} rates were "
            f"tried, from {rates[0]:g} to {rates[-1]:g} in equal ratios; replicas share the demand evenly",
        ],
        columns=[
            Column("policy", "policy", "text"),
            Column("slo", "SLO of a request", "text"),
            Column("rate", "requests a second"),
            Column("met", "in SLO at that rate %", "share"),
            Column("tokens_per_s", "output tokens a second"),
            Column("replicas", f"replicas for {demand:g}/s"),
        ],
        rows=rows,
        findings=_capacity_findings(rows, slos),
    )


def _capacity_row(
    policy: str, slo: Slo, run: Callable[[float], SimulatedRun], demand: float, rates: Sequence[float]
) -> dict[str, Value]:
    low, high = -1, len(rates)  # holds at rates[low], does not at rates[high]
    while high - low > 1:
        middle = (low + high) // 2
        if slo.share(run(rates[middle]).members()) >= SHARE_REQUIRED:
            low = middle
        else:
            high = middle
    shown = rates[max(low, 0)]
    best = run(shown)
    holds = low >= 0
    return {
        "policy": policy,
        "slo": str(slo),
        "rate": shown if holds else f"under {shown:g}",
        "met": slo.share(best.members()),
        "tokens_per_s": round(best.output_tokens_per_s) if holds else None,
        "replicas": -int(-demand // shown) if holds else None,
    }


def _capacity_findings(rows: Sequence[Mapping[str, Value]], slos: Sequence[Slo]) -> list[str]:
    told = []
    for slo in slos:
        same = [row for row in rows if row["slo"] == str(slo)]
        rates = "; ".join(f"{row['policy']} {row['rate']}" for row in same)
        told.append(f"{slo}: {rates} requests a second.")
    return told


# Blocks under bursts


@dataclass(slots=True)
class Blocks:
    """What a probe saw after every step."""

    requests: int = 0  # that ran, summed over steps
    wasted: int = 0  # slots behind the newest token, in last blocks, summed over steps
    slots: int = 0  # in tables
    evictions: int = 0

    def look(self, core: EngineCore) -> None:
        blocks = core.scheduler.blocks
        blocks.record_events = True  # type: ignore[attr-defined]  # every manager of ours has it
        self.evictions += sum(event.kind == "removed" for event in blocks.take_events())
        for request in core.scheduler.running:
            held = len(request.block_ids) * blocks.block_size
            self.requests += 1
            self.slots += held
            self.wasted += held - request.num_computed_tokens


BURST_POOL = 601  # blocks: less than a burst asks for


def bursty_cache(setup: Setup) -> Study:
    """The three block managers in a pool that is too small."""
    traffic = cache_bursts(setup.seed)
    rows, waste = [], 0.0
    for manager in ("private", "v0_cached", "shared"):
        blocks = Blocks()
        config = setup.config(f"unified:2048+{manager}", traffic.longest, BURST_POOL)
        run = simulate(config, traffic, setup.costs, setup.host, on_step=blocks.look)
        rows.append(_bursty_row(manager, run, blocks))
        waste = max(waste, blocks.wasted / blocks.slots)
    return Study(
        name="bursty-cache",
        question="What is lost to `fragmentation` under bursts, and what to eviction and preemption?",
        assumptions=[
            *setup.assumptions()[:1],
            f"here a pool of {BURST_POOL:,} blocks, less than a burst asks for; unified:2048; seed {setup.seed}",
            f"traffic: {traffic.parameters['bursts']} bursts of {traffic.parameters['burst_size']} requests behind "
            f"{traffic.parameters['common_prompts']} common prompts",
        ],
        columns=[
            Column("manager", "blocks", "text"),
            Column("waste", "last-block waste % of held slots", "share"),
            Column("waste_tokens", "slots a request"),
            Column("hit_rate", "hit rate %", "share"),
            Column("computed", "tokens computed"),
            Column("evictions", "blocks evicted"),
            Column("preemptions", "preemptions"),
            Column("ttft_p99", "TTFT P99 ms", "us"),
            Column("end", "end ms", "us"),
        ],
        rows=rows,
        findings=[
            "Any free block serves any request, so no room is lost between blocks (external fragmentation is 0); "
            f"inside of them at most {setup.block_size - 1} slots a request are, {waste:.1%} of what was held here.",
            "What a small pool costs is paid in prompts computed again: after an eviction of what is asked for next, "
            "and after a preemption.",
        ],
    )


def _bursty_row(manager: str, run: SimulatedRun, blocks: Blocks) -> dict[str, Value]:
    return {
        "manager": manager,
        "waste": blocks.wasted / blocks.slots,
        "waste_tokens": round(blocks.wasted / blocks.requests, 1),
        "hit_rate": run.hit_rate,
        "computed": run.num_tokens,
        "evictions": blocks.evictions,
        "preemptions": run.num_preemptions,
        "ttft_p99": _ttft_p99(run.members()),
        "end": run.end_us,
    }


STUDIES: Mapping[str, Callable[[Setup], Study]] = MappingProxyType(
    {"length-classes": length_classes, "capacity": capacity, "bursty-cache": bursty_cache}
)
