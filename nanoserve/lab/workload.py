"""Workloads as plain data: who arrives when, with which tokens, asking for how many. From a seed, no engine.

An arrival is due at a time, or once a group of requests has come so far (`Progress`): so a prompt lands among
decodes on a fast machine as on a slow one. End of sequence is ignored, so lengths are exact, and sampling is
greedy, so every engine must answer with the same tokens. Prompts are story text in the model's own tokens
(`story_tokens`), ids drawn from the vocabulary for a model without a tokenizer (`random_tokens`), or runs of ids for
a simulator, which looks at lengths and equal beginnings alone (prompts.py; the library of them is scenarios.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nanoserve.lab.stories import story
from nanoserve.request import EngineRequest, SamplingParams

TokenSource = Callable[[random.Random, int], list[int]]  # (generator, n) -> n prompt token ids


@dataclass(frozen=True, slots=True)
class Progress:
    """Reached when every request of `group` has emitted at least `num_tokens` tokens."""

    group: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request: due `at_s` seconds after the start and, where given, not before `after` is reached. With `follows`
    it is the next turn of a session: due `at_s` seconds after that request has ended (simulator only)."""

    id: str
    group: str
    prompt_token_ids: Sequence[int] = field(repr=False)
    max_tokens: int
    at_s: float = 0.0
    after: Progress | None = None
    follows: str = ""

    def request(self, arrival_s: float) -> EngineRequest:
        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True)
        return EngineRequest(
            id=self.id, prompt_token_ids=list(self.prompt_token_ids), params=params, arrival_s=arrival_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Arrivals, and what they are meant to show. Raises ValueError where an arrival could never be due."""

    name: str
    claim: str  # what the load tests, in one sentence
    watched: str  # the group whose token gaps matter
    headlines: tuple[str, ...] = ()  # keys of `ladder_report.Row`: the figures that should move, or pay for it
    seed: int
    parameters: Mapping[str, int]
    arrivals: list[Arrival] = field(repr=False)

    def __post_init__(self) -> None:
        shortest: dict[str, int] = {}
        for a in self.arrivals:
            shortest[a.group] = min(a.max_tokens, shortest.get(a.group, a.max_tokens))
        seen: set[str] = set()
        for a in self.arrivals:
            if a.id in seen:
                raise ValueError(f"workload {self.name}: two arrivals share the id {a.id!r}; ids must be unique.")
            if a.follows and a.follows not in seen:
                raise ValueError(
                    f"workload {self.name}: {a.id} follows {a.follows!r}, which does not come before it; "
                    "list the turns of a session in order."
                )
            if a.follows and a.after:
                raise ValueError(f"workload {self.name}: {a.id} has `follows` and `after`; give one of the two.")
            seen.add(a.id)
            if a.after and a.after.num_tokens > shortest.get(a.after.group, 0):
                raise ValueError(
                    f"workload {self.name}: {a.id} waits for {a.after.num_tokens} tokens of every "
                    f"{a.after.group!r} request, but one emits {shortest.get(a.after.group, 0)}; "
                    "ask for more tokens or wait for fewer."
                )

    @property
    def groups(self) -> dict[str, str]:
        """Request id -> group."""
        return {a.id: a.group for a in self.arrivals}

    @property
    def num_output_tokens(self) -> int:
        return sum(a.max_tokens for a in self.arrivals)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(len(a.prompt_token_ids) + a.max_tokens for a in self.arrivals)


def long_prompt_among_decodes(
    source: TokenSource,
    *,
    seed: int = 0,
    num_streams: int = 8,
    stream_prompt_len: int = 16,
    stream_tokens: int = 160,
    num_long: int = 2,
    long_prompt_len: int = 6144,
    long_tokens: int = 8,
) -> Workload:
    """`num_streams` requests decode; prompts of `long_prompt_len` tokens land among them, one after another.

    The first lands when every stream has a twelfth of its tokens, the last before two thirds of them.
    """
    parameters = {
        "num_streams": num_streams,
        "stream_prompt_len": stream_prompt_len,
        "stream_tokens": stream_tokens,
        "num_long": num_long,
        "long_prompt_len": long_prompt_len,
        "long_tokens": long_tokens,
    }
    _check_counts("long-prompt", parameters)
    rng = random.Random(seed)
    streams = [
        Arrival(
            id=f"stream-{i}",
            group="stream",
            prompt_token_ids=source(rng, stream_prompt_len),
            max_tokens=stream_tokens,
        )
        for i in range(num_streams)
    ]
    first, last = max(1, stream_tokens // 12), max(1, stream_tokens * 2 // 3)
    long_prompts = [
        Arrival(
            id=f"long-{i}",
            group="long",
            prompt_token_ids=source(rng, long_prompt_len),
            max_tokens=long_tokens,
            after=Progress("stream", first + (last - first) * i // num_long),
        )
        for i in range(num_long)
    ]
    return Workload(
        name="long-prompt",
        claim="One long prompt freezes everyone who decodes, unless it is computed in chunks beside them.",
        watched="stream",
        headlines=("itl_max", "ttft_long_p50"),
        seed=seed,
        parameters=parameters,
        arrivals=streams + long_prompts,
    )


def shared_system_prompt(
    source: TokenSource,
    *,
    seed: int = 0,
    num_requests: int = 24,
    prefix_len: int = 1024,
    tail_len: int = 32,
    output_tokens: int = 32,
) -> Workload:
    """`num_requests` arrive at once; their prompts share `prefix_len` tokens, then each has its own tail."""
    parameters = {
        "num_requests": num_requests,
        "prefix_len": prefix_len,
        "tail_len": tail_len,
        "output_tokens": output_tokens,
    }
    _check_counts("system-prompt", parameters)
    rng = random.Random(seed)
    prefix = source(rng, prefix_len)
    return Workload(
        name="system-prompt",
        claim="Sessions that begin alike need their common prefix computed and stored once, not once each.",
        watched="session",
        headlines=("prompt_tokens_computed", "peak_used_blocks", "ttft_session_max"),
        seed=seed,
        parameters=parameters,
        arrivals=[
            Arrival(
                id=f"session-{i}",
                group="session",
                prompt_token_ids=prefix + source(rng, tail_len),
                max_tokens=output_tokens,
            )
            for i in range(num_requests)
        ],
    )


def _check_counts(name: str, parameters: Mapping[str, int]) -> None:
    for key, value in parameters.items():
        if value < 1:
            raise ValueError(f"{key} of workload {name} must be an integer >= 1, got {value}.")


def random_tokens(vocab_size: int, first_id: int = 1) -> TokenSource:
    """Ids drawn evenly from [first_id, vocab_size): no text, but any model takes them."""
    if not 0 <= first_id < vocab_size:
        raise ValueError(f"first_id must be in [0, vocab_size={vocab_size}), got {first_id}.")
    return lambda rng, n: [rng.randrange(first_id, vocab_size) for _ in range(n)]


def story_tokens(encode: Callable[[str], list[int]]) -> TokenSource:
    """Stories of `stories.story`, one after another, encoded and cut to n tokens."""

    def source(rng: random.Random, n: int) -> list[int]:
        token_ids: list[int] = []
        while len(token_ids) < n:
            token_ids += encode(story(rng))
        return token_ids[:n]

    return source
