"""Plain data that crosses the seams: what a user asks for, what a step will do, what came of it.

Owns no behaviour beyond validation and derived values, and imports no torch. A `Request` is the scheduler's
mutable record of one generation; everything else is an immutable message. The one number that drives all
schedulers is `Request.num_computed_tokens`: nothing here, or below the scheduler, knows a phase.
"""

from __future__ import annotations

import enum
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nanoserve.execution import Execution

GREEDY_EPSILON = 1e-5  # temperatures below this are greedy
MIN_TEMPERATURE = 0.01  # other temperatures are raised to this
MAX_N = 16_384  # answers to one prompt, as in vLLM (VLLM_MAX_N_SEQUENCES)


class OutputKind(enum.StrEnum):
    """What a stream yields each time: everything so far, only what is new, or one final output."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


def _show(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an integer of thousands of digits
        text = "an integer of thousands of digits"
    return text if len(text) <= 200 else text[:200] + "..."


def _require(ok: bool, field_name: str, value: object, limit: str) -> None:
    if not ok:
        raise ValueError(f"{field_name} must be {limit}, got {_show(value)}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**63


def _is_token_id(value: object) -> bool:
    return _is_count(value, 0)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value != ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to draw tokens and when to stop; the names and defaults are vLLM's (`vllm/sampling_params.py`).

    Raises ValueError naming the field, the value and the limit. Unlike vLLM, a field that is not supported
    here (`best_of`, `logits_processors`, structured outputs, ...) does not exist and is refused by name.
    As in vLLM, None stands for an empty list or mapping, and `logprobs=True` for 1. Lists are copied.
    `bad_words_token_ids` is filled in by the front end, which owns the tokenizer; that the ids are in the
    vocabulary is its check as well.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # -1 = None
    max_tokens: int | None = 16  # None = to the model's length
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # -1 = the whole vocabulary
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    bad_words_token_ids: list[list[int]] = []
    output_kind: OutputKind = OutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        self._check_lists()
        if self.logit_bias:
            self._set(logit_bias=_checked_bias(self.logit_bias))
        if not self.is_greedy and self.temperature < MIN_TEMPERATURE:
            warnings.warn(f"temperature={self.temperature} is raised to {MIN_TEMPERATURE}.", stacklevel=2)
            self._set(temperature=MIN_TEMPERATURE)

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            msgspec.structs.force_setattr(self, name, value)

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            self._set(stop=[self.stop])
        for name in ("stop", "stop_token_ids", "bad_words", "bad_words_token_ids"):
            if getattr(self, name) is None:
                self._set(**{name: []})
        if self.logit_bias is None:
            self._set(logit_bias={})
        if self.logprobs is True:
            self._set(logprobs=1)
        if self.prompt_logprobs is True:
            self._set(prompt_logprobs=1)
        if isinstance(self.output_kind, str) and self.output_kind in tuple(OutputKind):
            self._set(output_kind=OutputKind(self.output_kind))

    def _check_numbers(self) -> None:
        def in_range(name: str, low: float, high: float, limit: str) -> None:
            value = getattr(self, name)  # nan and the infinities fail the comparison too
            _require(_is_number(value) and low <= value <= high, name, value, f"a number {limit}")
            if not isinstance(value, float):  # a large integer is not a number that travels
                self._set(**{name: float(value)})

        _require(_is_count(self.n, 1) and self.n <= MAX_N, "n", self.n, f"an integer >= 1 and <= {MAX_N}")
        in_range("temperature", 0, 2, "in [0, 2]")
        in_range("top_p", math.ulp(0.0), 1, "in (0, 1]")
        _require(_is_count(self.top_k, -1), "top_k", self.top_k, "an integer >= -1 (0 and -1 switch it off)")
        in_range("min_p", 0, 1, "in [0, 1]")
        in_range("presence_penalty", -2, 2, "in [-2, 2]")
        in_range("frequency_penalty", -2, 2, "in [-2, 2]")
        in_range("repetition_penalty", math.ulp(0.0), sys.float_info.max, "> 0 and finite (1: off)")
        seed_ok = self.seed is None or _is_count(self.seed, -(2**63))
        _require(seed_ok, "seed", self.seed, "an integer of 64 bits with sign, or None")
        if self.seed == -1:
            self._set(seed=None)
        if self.max_tokens is not None:
            limit = "an integer >= 1 (or None: up to the model's length)"
            _require(_is_count(self.max_tokens, 1), "max_tokens", self.max_tokens, limit)
        _require(_is_count(self.min_tokens, 0), "min_tokens", self.min_tokens, "an integer >= 0")
        min_ok = self.max_tokens is None or self.min_tokens <= self.max_tokens
        _require(min_ok, "min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or _is_count(value, -1), name, value, "an integer >= -1 (-1: all) or None")
        if self.is_greedy:
            _require(self.n == 1, "n", self.n, "1 with temperature 0 (the n answers would be the same)")

    def _check_lists(self) -> None:
        self._check_items("stop", _is_word, "a non-empty string")
        self._check_items("bad_words", _is_word, "a non-empty string")
        self._check_items("stop_token_ids", _is_token_id, "a token id >= 0")
        if self.allowed_token_ids is not None:
            self._check_items("allowed_token_ids", _is_token_id, "a token id >= 0")
            _require(bool(self.allowed_token_ids), "allowed_token_ids", [], "None or a non-empty list")

        def is_id_sequence(word: object) -> bool:
            return isinstance(word, list | tuple) and len(word) > 0 and all(_is_token_id(i) for i in word)

        self._check_items("bad_words_token_ids", is_id_sequence, "a non-empty list of token ids >= 0")
        is_mapping = isinstance(self.logit_bias, Mapping)
        _require(is_mapping, "logit_bias", self.logit_bias, "a mapping of token ids to numbers")
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        has_text = self.detokenize or not self.stop
        _require(has_text, "detokenize", self.detokenize, "True when stop strings are given")
        kinds = f"one of {', '.join(OutputKind)}"
        _require(isinstance(self.output_kind, OutputKind), "output_kind", self.output_kind, kinds)

    def _check_items(self, name: str, ok: Callable[[object], bool], limit: str) -> None:
        values = getattr(self, name)
        _require(isinstance(values, list | tuple), name, values, "a list")
        for index, value in enumerate(values):
            _require(ok(value), f"{name}[{index}]", value, limit)
        self._set(**{name: [list(v) if isinstance(v, tuple) else v for v in values]})

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def reads_output(self) -> bool:
        """Whether a draw depends on which tokens came before it."""
        penalised = self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty
        return bool(penalised or self.bad_words_token_ids)


def _checked_bias(logit_bias: Mapping[Any, Any]) -> dict[int, float]:
    """Ids as integers (JSON has them as digits) and values within +-100, as in OpenAI's API and vLLM."""
    bias: dict[int, float] = {}
    for key, value in logit_bias.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token_id: Any = int(key) if digits else key
        _require(_is_token_id(token_id), "logit_bias: the key", key, "a token id >= 0")
        number = _is_number(value) and value == value  # nan differs from itself
        _require(number, f"logit_bias[{token_id}]", value, "a number (it is clamped to [-100, 100])")
        bias[token_id] = float(max(-100, min(100, value)))  # float() of a huge integer would overflow
    return bias


class ExtraKey(msgspec.Struct, frozen=True, array_like=True):
    """Something beside its tokens that a block's KV depends on: it enters the hash of every block that
    overlaps positions [start, end). An adapter covers the whole request, an image its placeholder span."""

    tag: str
    value: str
    start: int = 0
    end: int | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end hands to the engine: tokens only, already validated (hop 3)."""

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_id: int | None = None
    arrival_s: float = 0.0
    priority: int = 0  # lower = more urgent
    cache_salt: str = ""
    extra_keys: tuple[ExtraKey, ...] = ()


class Status(enum.IntEnum):
    """Order matters: everything after PREEMPTED is an end."""

    WAITING = 0
    RUNNING = 1
    SWAPPED = 2  # v0 only
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_IGNORED = 7  # could never fit
    FINISHED_ERROR = 8

    @property
    def is_finished(self) -> bool:
        return self > Status.PREEMPTED

    @property
    def finish_reason(self) -> str | None:
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    Status.FINISHED_STOPPED: "stop",
    Status.FINISHED_LENGTH: "length",
    Status.FINISHED_ABORTED: "abort",
    Status.FINISHED_IGNORED: "length",
    Status.FINISHED_ERROR: "error",
}


@dataclass(slots=True, eq=False)
class Request:
    """One generation inside the engine core. Each field names its only writer.

    When no step is in flight, a decoding request has `num_computed_tokens == num_tokens - 1`: the newest sampled
    token has no KV yet. Mirrors `vllm/v1/request.py: Request`.
    """

    # the front end, once
    id: str
    params: SamplingParams
    num_prompt_tokens: int
    max_tokens: int  # no more than the model's length has room for
    arrival_s: float = 0.0
    priority: int = 0
    eos_token_id: int | None = None
    cache_salt: str = ""
    extra_keys: tuple[ExtraKey, ...] = ()
    skip_cache_read: bool = False  # prompt logprobs need every position computed
    # scheduler.update
    token_ids: list[int] = field(default_factory=list)  # prompt, then output
    stop_reason: int | str | None = None
    # the scheduler
    status: Status = Status.WAITING
    num_computed_tokens: int = 0  # KV is written, or is being written by a step already scheduled
    num_placeholders: int = 0  # tokens that steps already scheduled will sample; the runner has them first
    num_preemptions: int = 0
    num_hit_tokens: int = 0  # prompt tokens found in the cache at first admission
    # the KV cache manager
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[Any] = field(default_factory=list)  # kept across preemption
    num_cached_blocks: int = 0  # leading blocks whose hash is registered

    @classmethod
    def from_engine_request(cls, r: EngineRequest, max_model_len: int) -> Request:
        room = max_model_len - len(r.prompt_token_ids)
        return cls(
            id=r.id,
            params=r.params,
            num_prompt_tokens=len(r.prompt_token_ids),
            max_tokens=room if r.params.max_tokens is None else min(r.params.max_tokens, room),
            arrival_s=r.arrival_s,
            priority=r.priority,
            eos_token_id=r.eos_token_id,
            cache_salt=r.cache_salt,
            extra_keys=r.extra_keys,
            skip_cache_read=r.params.prompt_logprobs is not None,
            token_ids=list(r.prompt_token_ids),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_behind(self) -> int:
        """Tokens that are known, or on their way, and that no scheduled step computes yet. 0 once the last token is on
        its way: it is never computed."""
        num_tokens = len(self.token_ids) + self.num_placeholders
        if self.num_placeholders and num_tokens >= self.num_prompt_tokens + self.max_tokens:
            return 0
        return num_tokens - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status > Status.PREEMPTED


class Reason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request got nothing in a step. Codes: budget, seq_cap, blocks (need, free), watermark,
    fcfs_behind (behind), preemption_this_step, paused (behind: whose prefill it waits for),
    nothing_to_compute."""

    code: str
    need: int = 0
    free: int = 0
    behind: str = ""

    def __str__(self) -> str:
        if self.code in ("blocks", "watermark"):
            return f"{self.code}(need {self.need}, free {self.free})"
        return f"{self.code}({self.behind})" if self.behind else self.code


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request the runner does not hold: new, resumed after a preemption, or swapped in. Travels whole."""

    id: str
    token_ids: list[int]  # prompt, then any output kept from before a preemption
    num_prompt_tokens: int
    block_ids: list[int]
    num_computed_tokens: int
    params: SamplingParams
    eos_token_id: int | None


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Everything a runner needs for one step. Continuing requests travel as differences.

    A row samples exactly when this step brings its computed tokens up to its known tokens.
    """

    step: int
    num_scheduled_tokens: dict[str, int]  # insertion order = batch order
    new: list[NewRequest] = []
    new_blocks: dict[str, list[int]] = {}  # continuing requests: appended to their tables
    replaced_blocks: dict[str, list[tuple[int, int]]] = {}  # (index, id): V0CachedBlocks only
    preempted: list[str] = []  # also swapped out: the runner drops these rows, a resume sends them whole
    finished: list[str] = []
    copies: list[tuple[int, int]] = []  # blocks (from, to), before the step; ids >= num_blocks: host blocks
    left_out: dict[str, Reason] = {}

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, from the model's raw logits, with as many entries in each list.

    Entry 0 is the sampled (or prompt) token; then the k most likely tokens in order, without that one: k
    entries where it is among the k most likely, else k + 1; 1 where k = 0. Ranks count from 1; among equals
    the lower id is the more likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class StepCost(msgspec.Struct, frozen=True, array_like=True):
    """What a runner says of how it ran a step."""

    host_s: float = 0.0  # on the host, before the device was on its own; on a CPU: before the work began
    graph: str = ""  # the one that was replayed: what it covers, and its size in tokens
    num_padding_tokens: int = 0


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step produced: ids of the rows that sampled, and log-probabilities where they were asked for."""

    token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}  # whole, with the request's first token
    cost: StepCost = StepCost()


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end must know of the engine it talks to; values may be smaller than those asked for."""

    model: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    device: str
    dtype: str
    execution: Execution = msgspec.field(default_factory=Execution)


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """News of one request after a step: new tokens, or its end (hop 10)."""

    id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
