"""One prompt's generation as the front end sees it: n answers, each a request of its own in the engine.

Turns `EngineOutput`s into `RequestOutput`s: text, stop strings, log-probabilities, what is new since the last time.
Sends nothing: `take` says when a stop string has ended a request that the engine still runs. Offline and online
front ends share it. Mirrors `vllm/v1/engine/output_processor.py` and `parallel_sampling.py`.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec

from nanoserve.api.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from nanoserve.api.text import OutputText
from nanoserve.request import EngineRequest, OutputKind

if TYPE_CHECKING:
    from nanoserve.api.inputs import TokenPrompt
    from nanoserve.api.tokenizer import Tokenizer
    from nanoserve.request import EngineOutput, SamplingParams, TokenLogprobs


class Generation:
    """The answers to one prompt. `requests` go to the engine; their outputs come back through `take`.

    Answer i has the id `<request_id>-<i>` (the request's own where there is one answer) and a random ending, so
    that an id used again right after an abort cannot meet the old request, and seed + i.
    """

    def __init__(
        self,
        request_id: str,
        prompt: TokenPrompt,
        params: SamplingParams,
        tokenizer: Tokenizer,
        priority: int = 0,
        arrival_s: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self._prompt = prompt
        self._kind = params.output_kind
        self._tokenizer = tokenizer
        self._arrival_s = arrival_s
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._num_cached_tokens = 0
        self._error: str | None = None
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        ending = secrets.token_hex(4)
        self.requests: list[EngineRequest] = []
        self._answers: dict[str, Answer] = {}
        for index in range(params.n):
            answer_id = request_id if params.n == 1 else f"{request_id}-{index}"
            request = EngineRequest(
                id=f"{answer_id}-{ending}",
                prompt_token_ids=prompt.token_ids,
                params=_params_of_answer(params, index),
                eos_token_id=tokenizer.eos_token_id,
                arrival_s=arrival_s,
                priority=priority,
                cache_salt=prompt.cache_salt,
            )
            self.requests.append(request)
            self._answers[request.id] = Answer(index, request, tokenizer)

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self._answers.values())

    def take(self, output: EngineOutput, now_s: float) -> bool:
        """Account for news of one answer; True once that answer is over.

        When the engine has not ended it itself (`output.finish_reason` is None), a stop string has: abort it there.
        """
        self._error = self._error or output.error
        answer = self._answers[output.id]
        answer.take(output)
        if output.new_token_ids:
            self._first_token_s = now_s if self._first_token_s is None else self._first_token_s
            self._last_token_s = now_s
        if answer.index == 0:
            self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = [
                None if position is None else position_logprobs(position, self._tokenizer)
                for position in output.prompt_logprobs
            ]
        return answer.finish_reason is not None

    def news(self) -> RequestOutput | None:
        """What there is to tell since the last call, in the form of `output_kind`; None when that is nothing.

        Raises RuntimeError when the engine has reported that the request failed.
        """
        if self._error is not None:
            raise RuntimeError(f"request {self.request_id} failed in the engine: {self._error}")
        if self._kind is OutputKind.FINAL_ONLY and not self.finished:
            return None
        delta = self._kind is OutputKind.DELTA
        told = [answer for answer in self._answers.values() if answer.has_news or not delta]
        if not any(answer.has_news for answer in told):
            return None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=[answer.tell(delta=delta) for answer in told],
            finished=self.finished,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            metrics=RequestMetrics(self._arrival_s, self._first_token_s, self._last_token_s),
        )


def _params_of_answer(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of answer `index`: a seed of its own, and the prompt's log-probabilities computed only once."""
    if params.n == 1:
        return params
    seed = params.seed
    if seed is not None:
        seed += index + (seed < -1 <= seed + index)  # -1 would mean none
        seed -= 2**64 * (seed >= 2**63)
    return msgspec.structs.replace(
        params, n=1, seed=seed, prompt_logprobs=params.prompt_logprobs if index == 0 else None
    )


class Answer:
    """One answer while it grows: ids, text and log-probabilities, and how much of them was told."""

    def __init__(self, index: int, request: EngineRequest, tokenizer: Tokenizer) -> None:
        params = request.params
        self.index = index
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._text = OutputText(tokenizer, params, request.prompt_token_ids)
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self._cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self._num_told = 0  # tokens
        self.has_news = False

    def take(self, output: EngineOutput) -> None:
        """Add what the engine made; a stop string in it ends the answer, and drops the tokens after it."""
        assert self.finish_reason is None, f"answer {output.id} has ended, got {output}"
        self.has_news = True
        hit = self._text.append(
            output.new_token_ids,
            finished_by_stop_token=output.finish_reason == "stop",
            finished=output.finish_reason is not None,
        )
        kept = len(output.new_token_ids) if hit is None else hit.num_tokens
        self._token_ids += output.new_token_ids[:kept]
        self._add_logprobs(output, kept)
        if hit is not None:
            self.finish_reason, self._stop_reason = "stop", hit.stop
        else:
            self.finish_reason, self._stop_reason = output.finish_reason, output.stop_reason

    def _add_logprobs(self, output: EngineOutput, kept: int) -> None:
        if self._logprobs is None or self._cumulative_logprob is None:
            return
        positions = output.logprobs or []
        assert len(positions) == len(output.new_token_ids), f"{output.id}: {len(positions)} entries for {output}"
        self._logprobs += [position_logprobs(position, self._tokenizer) for position in positions[:kept]]
        self._cumulative_logprob += sum(position.logprobs[0] for position in positions[:kept])

    def tell(self, *, delta: bool) -> CompletionOutput:
        """The answer so far, or only what was not told before. The cumulative log-probability is always the whole."""
        ended = self.finish_reason is not None
        start = self._num_told if delta else 0
        self._num_told, self.has_news = len(self._token_ids), False
        return CompletionOutput(
            index=self.index,
            text=self._text.delta(ended) if delta else self._text.so_far(ended),
            token_ids=self._token_ids[start:],
            cumulative_logprob=self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[start:],
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )


def position_logprobs(position: TokenLogprobs, tokenizer: Tokenizer) -> PositionLogprobs:
    """One position with its tokens as text. Unlike vLLM, the bytes of half a character are not joined to the tokens
    before them: they show as U+FFFD."""
    return {
        token_id: Logprob(logprob, rank, tokenizer.decode([token_id], skip_special_tokens=False))
        for token_id, logprob, rank in zip(position.token_ids, position.logprobs, position.ranks, strict=True)
    }
