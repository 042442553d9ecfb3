"""What a user gets back; the names are vLLM's (`vllm/outputs.py`, `vllm/logprobs.py`). Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability at one position, from the model's raw logits. `rank` counts from 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One position: the sampled (or prompt) token first, then the most likely ones. Token id -> Logprob.
PositionLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `logprobs` has one entry a token of `token_ids`, when asked for."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort"; None while it runs
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it; None for EOS

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds of the process's monotonic clock, as the front end saw them; None: it has not happened."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, of whichever answer was first."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All answers to one prompt. `prompt_logprobs[0]` is None: nothing precedes the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in the cache
    metrics: RequestMetrics | None = None
