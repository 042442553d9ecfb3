"""Who arrives when, with which prompt, asking for how many tokens: a load drawn from a seed, or read from a file.

Arrival times, lengths, choice of prefix and content come from generators of their own, so that another rate or
another output length leaves every prompt as it is. Knows no clock and no server. Laws: tests/test_bench.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import msgspec

from nanoserve.lab.stories import story

ARRIVALS = ("poisson", "constant", "burst")
Pieces = list[int] | list[str]  # token ids, or words
PromptSource = Callable[[random.Random, int], Pieces]  # (generator, n) -> n of them


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request: due `at_s` seconds after the start (a closed loop ignores that)."""

    id: str
    prompt: list[int] | str
    max_tokens: int
    at_s: float = 0.0


class Lengths(Protocol):
    """A distribution of lengths >= 1; `str()` of it is what `parse_lengths` reads."""

    def draw(self, rng: random.Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    value: int

    def __post_init__(self) -> None:
        _check_at_least("a length", self.value, 1)

    def draw(self, rng: random.Random) -> int:
        return self.value

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length in [low, high] is as likely as any other."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_at_least("the low end of uniform lengths", self.low, 1)
        _check_at_least("the high end of uniform lengths", self.high, self.low)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"uniform:{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class Lognormal:
    """exp(N(mu, sigma)) with the given mean, rounded, cut at `longest`: so the mean of what is drawn is a bit lower."""

    mean: float
    sigma: float
    longest: int

    def __post_init__(self) -> None:
        if not 1 <= self.mean < math.inf or not 0 < self.sigma < 10:
            raise ValueError(
                f"lognormal lengths need a mean >= 1 and a sigma in (0, 10), got {self.mean:g} and {self.sigma:g}."
            )
        _check_at_least("the longest of lognormal lengths", self.longest, 1)

    def draw(self, rng: random.Random) -> int:
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, min(self.longest, round(rng.lognormvariate(mu, self.sigma))))

    def __str__(self) -> str:
        return f"lognormal:{self.mean:g}:{self.sigma:g}:{self.longest}"


def _check_at_least(what: str, value: float, low: float) -> None:
    if value < low:
        raise ValueError(f"{what} must be at least {low:g}, got {value:g}.")


def parse_lengths(text: str) -> Lengths:
    """128, uniform:LOW:HIGH, or lognormal:MEAN:SIGMA:LONGEST. Raises ValueError."""
    kind, *numbers = text.split(":")
    try:
        if not numbers:
            return Fixed(int(kind))
        if kind == "uniform" and len(numbers) == 2:
            return Uniform(*map(int, numbers))
        if kind == "lognormal" and len(numbers) == 3:
            return Lognormal(float(numbers[0]), float(numbers[1]), int(numbers[2]))
    except ValueError as error:
        if "invalid literal" not in str(error) and "could not convert" not in str(error):
            raise
    raise ValueError(
        f"{text!r} is not a distribution of lengths; write 128, uniform:LOW:HIGH or lognormal:MEAN:SIGMA:LONGEST."
    )


# Prompt and output lengths. The means are those that the vLLM paper gives for the two data sets (Kwon et al. 2023,
# figure 11), the longest prompt is where its benchmark cuts; the shape and its sigma are an assumption of ours.
MIXES: Mapping[str, tuple[Lengths, Lengths]] = MappingProxyType(
    {
        "sharegpt-like": (Lognormal(161.31, 1.0, 1024), Lognormal(337.99, 1.0, 1024)),
        "alpaca-like": (Lognormal(19.31, 0.5, 1024), Lognormal(58.45, 1.0, 1024)),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """All that a drawn load depends on, beside the source of its prompts. Lengths are in tokens (of text: in words).

    `prompt_len` is what each request has of its own, behind a prefix of `prefix_len` that it shares with everyone
    who drew the same one of `num_prefixes`. `arrivals` None: no times (a closed loop). `num_requests` None: no end.
    """

    num_requests: int | None
    prompt_len: Lengths
    output_len: Lengths
    prefix_len: int = 0
    num_prefixes: int = 1
    arrivals: str | None = None
    request_rate: float = 1.0  # requests a second
    burst_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests is not None:
            _check_at_least("num_requests", self.num_requests, 1)
        _check_at_least("prefix_len", self.prefix_len, 0)
        _check_at_least("num_prefixes", self.num_prefixes, 1)
        _check_at_least("burst_size", self.burst_size, 1)
        if not 0 < self.request_rate < math.inf:
            raise ValueError(f"request_rate must be a finite number > 0, got {self.request_rate:g}.")
        if self.arrivals not in (None, *ARRIVALS):
            raise ValueError(f"arrivals={self.arrivals!r} is not known; use one of {', '.join(ARRIVALS)}.")


def arrival_times(spec: LoadSpec) -> Iterator[float]:
    """Seconds from the start, without end; `request_rate` a second on average, whatever the kind."""
    rng = _generator(spec.seed, "times")
    now_s, number = 0.0, 0
    while True:
        if spec.arrivals == "poisson":
            now_s += rng.expovariate(spec.request_rate)
        elif spec.arrivals == "burst":
            now_s = number // spec.burst_size * spec.burst_size / spec.request_rate
        elif spec.arrivals == "constant":
            now_s = number / spec.request_rate
        yield now_s
        number += 1


def draw_requests(spec: LoadSpec, source: PromptSource) -> Iterator[BenchRequest]:
    """The load. The same requests for the same spec and source; each is drawn when it is asked for."""
    prompts, outputs = _generator(spec.seed, "prompt lengths"), _generator(spec.seed, "output lengths")
    choices, content = _generator(spec.seed, "prefixes"), _generator(spec.seed, "content")
    prefixes = [source(_generator(spec.seed, f"prefix {k}"), spec.prefix_len) for k in range(spec.num_prefixes)]
    for number, at_s in enumerate(arrival_times(spec)):
        if number == spec.num_requests:
            return
        prefix = prefixes[choices.randrange(spec.num_prefixes)]
        yield BenchRequest(
            id=f"bench-{number}",
            prompt=join([*prefix, *source(content, spec.prompt_len.draw(prompts))]),
            max_tokens=spec.output_len.draw(outputs),
            at_s=at_s,
        )


def _generator(seed: int, use: str) -> random.Random:
    return random.Random(f"{seed}: {use}")


def join(pieces: list[int | str]) -> list[int] | str:
    """Token ids as they are; words as a text."""
    return " ".join(pieces) if isinstance(pieces[0], str) else pieces  # type: ignore[arg-type,return-value]


def story_words(rng: random.Random, n: int) -> list[str]:
    """The first n words of stories; the models of most servers need a little more than one token for each."""
    words: list[str] = []
    while len(words) < n:
        words += story(rng).split()
    return words[:n]


class WorkloadLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a workload file: a prompt (text or token ids), or the length of one to be drawn."""

    max_tokens: int
    prompt: str | list[int] | None = None
    prompt_len: int | None = None
    at_s: float = 0.0


def read_requests(path: Path, source: PromptSource, seed: int = 0) -> list[BenchRequest]:
    """The load in a JSONL file, in order of arrival. Raises OSError, and ValueError that names the line."""
    decoder = msgspec.json.Decoder(WorkloadLine)
    content = _generator(seed, "content")
    requests = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
            requests.append(_request(line, len(requests), content, source))
        except (msgspec.MsgspecError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not requests:
        raise ValueError(f"{path} holds no request; write one JSON object a line, such as "
                         '{"at_s": 0.5, "prompt_len": 128, "max_tokens": 64}.')  # fmt: skip
    return sorted(requests, key=lambda request: request.at_s)


def _request(line: WorkloadLine, number: int, content: random.Random, source: PromptSource) -> BenchRequest:
    if (line.prompt is None) == (line.prompt_len is None):
        raise ValueError("a request has either `prompt` or `prompt_len`; give one of the two.")
    if line.prompt is not None and not line.prompt:
        raise ValueError("`prompt` is empty; give at least one token.")
    _check_at_least("`max_tokens`", line.max_tokens, 1)
    if not 0 <= line.at_s < math.inf:
        raise ValueError(f"`at_s` must be a finite number of seconds >= 0, got {line.at_s:g}.")
    prompt = line.prompt
    if prompt is None:
        assert line.prompt_len is not None
        _check_at_least("`prompt_len`", line.prompt_len, 1)
        prompt = join([*source(content, line.prompt_len)])
    return BenchRequest(id=f"bench-{number}", prompt=prompt, max_tokens=line.max_tokens, at_s=line.at_s)
