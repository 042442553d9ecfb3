"""The loads that policies are graded on: small enough to run in a second, chosen so that every law has work to do.

Pools force preemptions, prompts straddle budgets and block edges, prefixes come back, requests are aborted at every
stage of their lives. `FIXED` is the same for everyone; `random_load` draws more from a seed, so that no policy can be
fitted to the fixed ones. Times are microseconds of a virtual clock. Knows no engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from nanoserve.request import EngineRequest, SamplingParams

NUM_RANDOM = 6
VOCAB = 1000


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One request; `abort_after`: it is aborted once it has that many tokens (0: in the step after it came)."""

    id: str
    prompt: list[int]
    max_tokens: int
    at_us: int = 0
    priority: int = 0
    abort_after: int | None = None

    def request(self) -> EngineRequest:
        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True)
        return EngineRequest(
            id=self.id,
            prompt_token_ids=self.prompt,
            params=params,
            arrival_s=self.at_us / 1e6,
            priority=self.priority,
        )


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, and the sizes of the engine that they meet (fields of `EngineConfig`)."""

    name: str
    claim: str  # what it tests, in one sentence
    jobs: list[Job]
    fields: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        return sum(len(job.prompt) + job.max_tokens for job in self.jobs)


def sizes(num_blocks: int, budget: int, max_num_seqs: int, *, block_size: int = 4, **fields: Any) -> dict[str, Any]:
    return {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_num_batched_tokens": budget,
        "max_num_seqs": max_num_seqs,
        "max_model_len": "auto",
        "watermark": 0.0,
        **fields,
    }


def _own(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(n)]


def long_prompts() -> Load:
    rng = random.Random(1)
    streams = [Job(id=f"stream-{i}", prompt=_own(rng, 8), max_tokens=48) for i in range(4)]
    prompts = [Job(id=f"long-{i}", prompt=_own(rng, 150), max_tokens=3, at_us=25_000 + 60_000 * i) for i in range(3)]
    claim = "Long prompts land among requests that decode."
    return Load(name="long-prompts", claim=claim, jobs=streams + prompts, fields=sizes(200, 32, 8))


def shared_prefix() -> Load:
    """The prefix comes back again and again, and in between others take the blocks that are free."""
    rng = random.Random(2)
    prefix = _own(rng, 24)
    sessions = [Job(id=f"session-{i}", prompt=prefix + _own(rng, 5), max_tokens=6, at_us=30_000 * i) for i in range(8)]
    others = [Job(id=f"other-{i}", prompt=_own(rng, 25), max_tokens=4, at_us=16_000 + 30_000 * i) for i in range(7)]
    claim = "Sessions with one prefix come one after another, with others between them, in a pool that cannot keep all."
    return Load(name="shared-prefix", claim=claim, jobs=sessions + others, fields=sizes(14, 32, 4))


def repeats() -> Load:
    """Exact repeats whose length is a multiple of the block size; the same blocks in another order."""
    rng = random.Random(3)
    a, b, c = (_own(rng, 4) for _ in range(3))
    prompts = [a + b + c, a + b + c, a + b, b + a + c, a + c + b, c + a + b, a + b + c]
    jobs = [Job(id=f"r{i}", prompt=prompt, max_tokens=5, at_us=9_000 * i) for i, prompt in enumerate(prompts)]
    claim = "Prompts of whole blocks: exact repeats, and the same blocks in another order."
    return Load(name="repeats", claim=claim, jobs=jobs, fields=sizes(40, 16, 4))


def tight_pool() -> Load:
    """Everyone fits when it comes; nobody has room to finish beside the others."""
    rng = random.Random(4)
    jobs = [Job(id=f"r{i}", prompt=_own(rng, 12), max_tokens=24, at_us=2_000 * i) for i in range(5)]
    claim = "The pool runs out while requests decode, so that some are preempted and come back in several chunks."
    return Load(name="tight-pool", claim=claim, jobs=jobs, fields=sizes(16, 8, 5))


def priorities() -> Load:
    """An urgent prompt takes room from one that was given tokens in this very step."""
    rng = random.Random(5)
    jobs = [
        Job(id="big", prompt=_own(rng, 30), max_tokens=2, priority=9),
        Job(id="small", prompt=_own(rng, 1), max_tokens=1, priority=9),
        Job(id="urgent", prompt=_own(rng, 8), max_tokens=2, at_us=1_000),
        *(Job(id=f"r{i}", prompt=_own(rng, 9), max_tokens=8, at_us=9_000 * i, priority=i % 3) for i in range(1, 6)),
    ]
    fields = sizes(9, 16, 3, policy="priority", long_prefill_token_threshold=8)
    return Load(
        name="priorities", claim="Urgent requests preempt others in the middle of a step.", jobs=jobs, fields=fields
    )


def aborts() -> Load:
    """Aborted while waiting, in the middle of a prompt, and at various tokens; some share blocks with who stays."""
    rng = random.Random(6)
    prefix = _own(rng, 8)
    stages = [None, 3, 0, None, 1, 2, None, 0]
    jobs = [
        Job(
            id=f"r{i}",
            prompt=(prefix if i % 2 else []) + _own(rng, 14),
            max_tokens=9,
            at_us=4_000 * i,
            abort_after=stage,
        )
        for i, stage in enumerate(stages)
    ]
    return Load(
        name="aborts", claim="Requests are aborted at every stage of their lives.", jobs=jobs, fields=sizes(24, 16, 4)
    )


def stream_of_shorts() -> Load:
    """Whoever serves short prompts first never comes to the long one while they keep coming."""
    rng = random.Random(7)
    jobs = [Job(id=f"short-{i}", prompt=_own(rng, 6), max_tokens=3, at_us=1_500 * i) for i in range(80)]
    jobs.insert(3, Job(id="long", prompt=_own(rng, 40), max_tokens=3, at_us=4_000))
    claim = "Short prompts keep coming behind a long one: a policy that prefers them starves it."
    return Load(name="stream-of-shorts", claim=claim, jobs=jobs, fields=sizes(64, 12, 2))


def burst() -> Load:
    """The first prompt is longer than a budget, so that the edge of a step falls inside one prompt after another."""
    rng = random.Random(8)
    jobs = [Job(id=f"r{i}", prompt=_own(rng, 40 if i == 0 else 17 + i), max_tokens=6) for i in range(7)]
    return Load(name="burst", claim="Several prompts come at once.", jobs=jobs, fields=sizes(80, 32, 8))


def ahead(load: Load) -> Load:
    """The same, deciding each step before the results of the one before it."""
    fields = load.fields | {"async_scheduling": True}
    claim = f"{load.claim} Decided one step ahead."
    return Load(name=f"{load.name}-ahead", claim=claim, jobs=load.jobs, fields=fields)


def _fixed() -> Mapping[str, Load]:
    makers: list[Callable[[], Load]] = [long_prompts, burst, shared_prefix, repeats, tight_pool, priorities, aborts]
    loads = [*(make() for make in makers), stream_of_shorts(), ahead(tight_pool()), ahead(aborts())]
    return MappingProxyType({load.name: load for load in loads})


FIXED: Mapping[str, Load] = _fixed()
MEASURED = (
    "long-prompts",
    "burst",
    "shared-prefix",
    "tight-pool",
    "stream-of-shorts",
)  # whose figures are worth a table


def random_load(seed: int, index: int) -> Load:
    """One of many: up to nine requests that share blocks, in a pool that two or three of them fill."""
    rng = random.Random(seed * 1_000_003 + index)
    block_size, usable, seats = rng.randint(1, 4), rng.randint(6, 14), rng.randint(1, 5)
    longest = usable * block_size - 2
    jobs = []
    for i in range(rng.randint(4, 9)):
        pieces = [100 * rng.randint(1, 3) + j for _ in range(rng.randint(0, 4)) for j in range(block_size)]
        prompt = (pieces + [rng.randrange(400, VOCAB)] * rng.randint(0, block_size))[:longest] or [1]
        job = Job(
            id=f"r{i}",
            prompt=prompt,
            max_tokens=rng.randint(1, 12),
            at_us=rng.randint(0, 20_000),
            priority=rng.randint(0, 3),
            abort_after=rng.choice([None, None, None, None, 0, 2]),
        )
        jobs.append(job)
    fields = sizes(
        usable + 1,
        seats + rng.randint(0, 12),
        seats,
        block_size=block_size,
        policy=rng.choice(["fcfs", "priority"]),
        free_order=rng.choice(["uncached_first", "append"]),
        reserve_full_prompt=rng.random() < 0.5,
        long_prefill_token_threshold=rng.choice([0, 0, 3, 2 * block_size]),
        async_scheduling=rng.random() < 0.5,
    )
    return Load(name=f"random-{seed}-{index}", claim="Drawn from the seed.", jobs=jobs, fields=fields)


def grading_loads(seed: int) -> list[Load]:
    """All the fixed ones, then those of a seed."""
    return [*FIXED.values(), *(random_load(seed, index) for index in range(NUM_RANDOM))]


def find_loads(names: Iterable[str], seed: int) -> list[Load]:
    """Of those names. ValueError for an unknown one."""
    known = {load.name: load for load in grading_loads(seed)}
    for name in names:
        if name not in known:
            raise ValueError(f"load {name!r} is not known; use one of {', '.join(known)}.")
    return [known[name] for name in names]
