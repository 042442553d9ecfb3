"""The scenario library: loads with a name, a seed and a claim, for the simulator.

A scenario says what a shift is about, in a load where it shows: `SCENARIOS[name].build(seed)` is its workload. Prompts
are runs of token ids (prompts.py): lengths and common beginnings are all that counts. Distributions are stated, in
parameters or here; every draw comes from a generator of its own. Laws: tests/test_scenarios.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nanoserve.lab.arrivals import MIXES, Lognormal, Uniform
from nanoserve.lab.prompts import OUTPUT_TOKEN, PartIds, TokenRuns
from nanoserve.lab.workload import Arrival, Workload

Run = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A row of the library."""

    build: Callable[[int], Workload]  # of a seed
    policies: str  # that tell its story, as `--policies` takes them
    ttft_group: str  # whose first tokens the table shows
    max_num_seqs: int = 128


def generator(seed: int, use: str) -> random.Random:
    """Another use of the same seed draws other numbers, and none changes the others."""
    return random.Random(f"{seed}: {use}")


def poisson_times(rng: random.Random, rate: float, until_s: float) -> Iterator[float]:
    """Arrivals at `rate` a second on average, up to a time; in whole microseconds."""
    now_s = rng.expovariate(rate)
    while now_s < until_s:
        yield round(now_s, 6)
        now_s += rng.expovariate(rate)


def long_prompt(seed: int = 0) -> Workload:
    """The reference load of semantics.md, section 10: nothing in it is drawn."""
    ids = PartIds()
    streams = [_arrival(f"stream-{i}", "stream", [(ids.own(), 20)], 200) for i in range(8)]
    longs = [_arrival(f"long-{q}", "long", [(ids.own(), 16_384)], 4, 0.1 + 0.8 * q) for q in range(4)]
    return Workload(
        name="long-prompt",
        claim="One long prompt freezes everyone who decodes, unless it is computed in chunks beside them.",
        watched="stream",
        seed=seed,
        parameters={"streams": 8, "stream_tokens": 200, "long_prompts": 4, "long_prompt_len": 16_384},
        arrivals=streams + longs,
    )


def burst(seed: int = 0) -> Workload:
    ids, rng = PartIds(), generator(seed, "burst")
    streams = [
        _arrival(f"stream-{i}", "stream", [(ids.own(), rng.randint(64, 256))], 1500, round(rng.uniform(0, 0.5), 6))
        for i in range(32)
    ]
    at_s = round(rng.uniform(3, 6), 6)
    longs = [_arrival(f"long-{q}", "long", [(ids.own(), 16_000)], 4, at_s) for q in range(3)]
    return Workload(
        name="burst",
        claim="Three long prompts at once: one gap in a thousand is hit, so P99 stays low while the maximum explodes.",
        watched="stream",
        seed=seed,
        parameters={"streams": 32, "stream_tokens": 1500, "long_prompts": 3, "long_prompt_len": 16_000},
        arrivals=streams + longs,
    )


SYSTEM_PROMPT_LEN, SESSION_LEN, SESSION_OUTPUTS, NUM_SESSIONS = 30_000, 100, 64, 1000


def system_prompt(seed: int = 0, num_sessions: int = NUM_SESSIONS) -> Workload:
    """Of the 100 tokens that a session has to itself, 64 are its answer."""
    ids = PartIds()
    prefix, own = (ids.named("system prompt"), SYSTEM_PROMPT_LEN), SESSION_LEN - SESSION_OUTPUTS
    return Workload(
        name="system-prompt-1000",
        claim="A thousand sessions behind one long system prompt need it computed and stored once, not once each.",
        watched="session",
        seed=seed,
        parameters={"sessions": num_sessions, "prefix_len": SYSTEM_PROMPT_LEN, "own_len": SESSION_LEN},
        arrivals=[
            _arrival(f"session-{i}", "session", [prefix, (ids.own(), own)], SESSION_OUTPUTS)
            for i in range(num_sessions)
        ],
    )


def chat(seed: int = 0, num_sessions: int = 120) -> Workload:
    """Messages of uniform:20:120 tokens, answers lognormal with a mean of 200, 2 to 6 turns, about 8 s to think."""
    ids, rng = PartIds(), generator(seed, "chat")
    answers, arrivals = Lognormal(200, 0.8, 1024), []
    starts = poisson_times(generator(seed, "times"), 4.0, float("inf"))
    for number, start_s in zip(range(num_sessions), starts, strict=False):
        context: list[Run] = [(ids.named("system prompt"), 600)]
        before = ""
        for turn in range(rng.randint(2, 6)):
            context = [*context, (ids.own(), rng.randint(20, 120))]
            num_answer = answers.draw(rng)
            request_id = f"session-{number}-turn-{turn}"
            at_s = round(rng.expovariate(1 / 8), 6) if before else start_s
            group = "later turn" if before else "first turn"
            arrivals.append(_arrival(request_id, group, context, num_answer, at_s, before))
            before = request_id
            context = [*context, (OUTPUT_TOKEN, num_answer)]
    return Workload(
        name="chat-multiturn",
        claim="Each turn repeats the whole conversation: a prefix cache computes the new message alone.",
        watched="later turn",
        seed=seed,
        parameters={"sessions": num_sessions, "requests": len(arrivals), "system_prompt_len": 600},
        arrivals=arrivals,
    )


def few_shot(seed: int = 0, num_requests: int = 400, num_tasks: int = 16) -> Workload:
    """Questions of uniform:30:150 tokens behind one of the tasks' examples (1500 tokens), answers of uniform:4:24."""
    ids, rng = PartIds(), generator(seed, "few-shot")
    times = poisson_times(generator(seed, "times"), 40.0, float("inf"))
    arrivals = []
    for number, at_s in zip(range(num_requests), times, strict=False):
        examples = (ids.named(f"task {rng.randrange(num_tasks)}"), 1500)
        prompt = [examples, (ids.own(), rng.randint(30, 150))]
        arrivals.append(_arrival(f"question-{number}", "question", prompt, rng.randint(4, 24), at_s))
    return Workload(
        name="few-shot",
        claim="The same examples lead every question of a task: they are computed once a task.",
        watched="question",
        seed=seed,
        parameters={"requests": num_requests, "tasks": num_tasks, "examples_len": 1500},
        arrivals=arrivals,
    )


def rag(seed: int = 0, num_requests: int = 300, num_documents: int = 200) -> Workload:
    """Four of the documents (500 tokens each), the k-th most popular drawn with weight 1 / k, ranked at random; behind
    300 tokens of instructions, before a question of uniform:20:80. Answers of uniform:60:200 tokens."""
    ids, rng = PartIds(), generator(seed, "rag")
    weights = [1 / rank for rank in range(1, num_documents + 1)]
    times = poisson_times(generator(seed, "times"), 10.0, float("inf"))
    arrivals = []
    for number, at_s in zip(range(num_requests), times, strict=False):
        documents = list(dict.fromkeys(rng.choices(range(num_documents), weights, k=4)))
        context = [(ids.named(f"document {d}"), 500) for d in documents]
        prompt = [(ids.named("instructions"), 300), *context, (ids.own(), rng.randint(20, 80))]
        arrivals.append(_arrival(f"query-{number}", "query", prompt, rng.randint(60, 200), at_s))
    return Workload(
        name="rag",
        claim="A cached block counts only behind the same beginning: popular documents in another order are no hit.",
        watched="query",
        seed=seed,
        parameters={"requests": num_requests, "documents": num_documents, "document_len": 500},
        arrivals=arrivals,
    )


def agents(seed: int = 0, num_tasks: int = 12, depth: int = 3, branches: int = 3) -> Workload:
    """A call's answer (uniform:50:150 tokens) is followed by calls that each add a tool's output (uniform:100:600)
    after uniform:0.2:2 seconds: a tree, every path of which begins with the tools' descriptions (2500 tokens)."""
    ids, rng = PartIds(), generator(seed, "agents")
    arrivals: list[Arrival] = []
    starts = poisson_times(generator(seed, "times"), 1.0, float("inf"))

    def call(name: str, context: list[Run], at_s: float, before: str, level: int) -> None:
        num_answer = rng.randint(50, 150)
        group = "branch" if before else "root"
        arrivals.append(_arrival(name, group, context, num_answer, at_s, before))
        if level < depth:
            for branch in range(branches):
                tool = (ids.own(), rng.randint(100, 600))
                wait_s = round(rng.uniform(0.2, 2), 6)
                call(f"{name}.{branch}", [*context, (OUTPUT_TOKEN, num_answer), tool], wait_s, name, level + 1)

    for number, start_s in zip(range(num_tasks), starts, strict=False):
        call(f"task-{number}", [(ids.named("tools"), 2500), (ids.own(), rng.randint(50, 300))], start_s, "", 1)
    return Workload(
        name="agents",
        claim="Branches of an agent share all that led to them: blocks with several owners, computed once.",
        watched="branch",
        seed=seed,
        parameters={"tasks": num_tasks, "depth": depth, "branches": branches, "requests": len(arrivals)},
        arrivals=arrivals,
    )


def poisson_mix(seed: int = 0, rate: float = 16.0, until_s: float = 60.0) -> Workload:
    """Poisson arrivals; prompt and output lengths of `arrivals.MIXES["sharegpt-like"]`, where their source stands."""
    ids, (prompts, outputs) = PartIds(), MIXES["sharegpt-like"]
    prompt_rng, output_rng = generator(seed, "prompt lengths"), generator(seed, "output lengths")
    arrivals = [
        _arrival(
            f"request-{number}", "request", [(ids.own(), prompts.draw(prompt_rng))], outputs.draw(output_rng), at_s
        )
        for number, at_s in enumerate(poisson_times(generator(seed, "times"), rate, until_s))
    ]
    return Workload(
        name="poisson-mix",
        claim="Ordinary traffic: short prompts at random moments. What does each policy cost when nothing is extreme?",
        watched="request",
        seed=seed,
        parameters={"requests": len(arrivals), "seconds": round(until_s), "requests_per_minute": round(rate * 60)},
        arrivals=arrivals,
    )


LONG_CLASS_LEN = Uniform(6000, 14_000)


def length_mix(seed: int = 0, rate: float = 8.0, until_s: float = 60.0, long_percent: int = 5) -> Workload:
    """`poisson-mix`, but for some prompts of uniform:6000:14000 tokens, with answers of uniform:50:300."""
    ids, (prompts, outputs) = PartIds(), MIXES["sharegpt-like"]
    lengths, classes = generator(seed, "lengths"), generator(seed, "classes")
    arrivals = []
    for number, at_s in enumerate(poisson_times(generator(seed, "times"), rate, until_s)):
        is_long = classes.randrange(100) < long_percent
        num_prompt = LONG_CLASS_LEN.draw(lengths) if is_long else prompts.draw(lengths)
        num_output = lengths.randint(50, 300) if is_long else outputs.draw(lengths)
        group = "long" if is_long else "short"
        arrivals.append(_arrival(f"{group}-{number}", group, [(ids.own(), num_prompt)], num_output, at_s))
    return Workload(
        name="length-mix",
        claim="Short requests with a few long prompts among them: the load behind most workarounds for v0.",
        watched="short",
        seed=seed,
        parameters={"requests": len(arrivals), "seconds": round(until_s), "long_percent": long_percent},
        arrivals=arrivals,
    )


def cache_bursts(seed: int = 0, num_bursts: int = 8, burst_size: int = 48, num_prompts: int = 12) -> Workload:
    """Every 6 s, `burst_size` requests at once, each behind one of `num_prompts` common prompts (uniform:200:1200
    tokens, the k-th with weight 1 / k), with uniform:10:90 tokens of its own and uniform:40:240 to come."""
    ids, rng = PartIds(), generator(seed, "bursts")
    lengths = [rng.randint(200, 1200) for _ in range(num_prompts)]
    weights = [1 / rank for rank in range(1, num_prompts + 1)]
    arrivals = []
    for number in range(num_bursts * burst_size):
        [k] = rng.choices(range(num_prompts), weights)
        prompt = [(ids.named(f"prompt {k}"), lengths[k]), (ids.own(), rng.randint(10, 90))]
        at_s = 6.0 * (number // burst_size)
        arrivals.append(_arrival(f"request-{number}", "request", prompt, rng.randint(40, 240), at_s))
    return Workload(
        name="cache-bursts",
        claim="Bursts in a small pool: blocks are evicted before they are asked for again, and requests preempted.",
        watched="request",
        seed=seed,
        parameters={"bursts": num_bursts, "burst_size": burst_size, "common_prompts": num_prompts},
        arrivals=arrivals,
    )


def _arrival(
    request_id: str, group: str, prompt: list[Run], max_tokens: int, at_s: float = 0.0, follows: str = ""
) -> Arrival:
    return Arrival(
        id=request_id,
        group=group,
        prompt_token_ids=TokenRuns(prompt),
        max_tokens=max_tokens,
        at_s=at_s,
        follows=follows,
    )


_CACHES = "unified:2048,unified:2048+v0_cached,unified:2048+shared"
_CHUNKS = "phase_split:16384,unified:256,unified:512,unified:1024,unified:2048"
SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        "long-prompt": Scenario(build=long_prompt, policies=_CHUNKS, ttft_group="long"),
        "burst": Scenario(
            build=burst, policies="phase_split:16384,chunked_no_mix:2048,unified:512,unified:2048", ttft_group="long"
        ),
        "system-prompt-1000": Scenario(
            build=system_prompt,
            policies="unified:2048,unified:2048+shared",
            ttft_group="session",
            max_num_seqs=NUM_SESSIONS,
        ),
        "chat-multiturn": Scenario(build=chat, policies=_CACHES, ttft_group="later turn"),
        "few-shot": Scenario(build=few_shot, policies=_CACHES, ttft_group="question"),
        "rag": Scenario(build=rag, policies=_CACHES, ttft_group="query"),
        "agents": Scenario(build=agents, policies=_CACHES, ttft_group="branch"),
        "poisson-mix": Scenario(build=poisson_mix, policies="v0,chunked,shared", ttft_group="request"),
        "length-mix": Scenario(build=length_mix, policies="phase_split:16384,unified:512", ttft_group="long"),
        "cache-bursts": Scenario(build=cache_bursts, policies=_CACHES, ttft_group="request"),
    }
)
