"""What the HTTP server answers: OpenAI's objects, whole or as chunks of a stream, with vLLM's additions.

Turns `RequestOutput`s into plain JSON values; knows neither HTTP nor the engine. A `Reply` keeps what a stream has to
remember between two chunks: who has had a role, where the text stands, how many tokens there were.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nanoserve.api.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from nanoserve.api.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # JSON knows no infinity; vLLM's stand-in

Json = dict[str, Any]


class Reply:
    """The answer to one HTTP request. Choice `i * n + k` is answer k to prompt i."""

    kind: str  # the `object` of a whole answer
    chunk_kind: str

    def __init__(
        self,
        reply_id: str,
        model: str,
        request_ids: Sequence[str],
        n: int,
        *,
        include_usage: bool = False,
        with_prompt_logprobs: bool = False,
    ) -> None:
        """`request_ids`: of the prompts in their order; `n`: answers to each."""
        self.id = reply_id
        self.model = model
        self.created = int(time.time())
        self._prompt_index = {request_id: i for i, request_id in enumerate(request_ids)}
        self._n = n
        self._include_usage = include_usage
        self._with_prompt_logprobs = with_prompt_logprobs
        self._num_prompt_tokens: dict[str, int] = {}
        self._num_cached_tokens: dict[str, int] = {}
        self._num_output_tokens = 0
        self._begun: set[int] = set()  # choices that have had a chunk

    def chunks(self, output: RequestOutput) -> Iterator[Json]:
        """One chunk for each answer that has anything to show. Of a stream of deltas."""
        self._count(output)
        for answer in output.outputs:
            index = self._index(output, answer)
            first = index not in self._begun
            choice = self._chunk(output, answer, index, first)
            if choice is not None:
                self._begun.add(index)
                choice |= {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
                yield self._object(self.chunk_kind, [choice])

    def last_chunk(self) -> Json | None:
        """What ends a stream when usage was asked for."""
        if not self._include_usage:
            return None
        return self._object(self.chunk_kind, []) | {"usage": self.usage}

    def whole(self, outputs: Iterable[RequestOutput]) -> Json:
        """The answer of a request that does not stream, from the final outputs."""
        choices: list[Json] = []
        for output in outputs:
            self._count(output)
            for answer in output.outputs:
                choice = self._choice(output, answer, self._index(output, answer))
                choice |= {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
                if self._with_prompt_logprobs and output.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = [_prompt_position(position) for position in output.prompt_logprobs]
                choices.append(choice)
        choices.sort(key=lambda choice: choice["index"])
        return self._object(self.kind, choices) | {"usage": self.usage}

    @property
    def usage(self) -> Json:
        prompt_tokens = sum(self._num_prompt_tokens.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens.values())},
        }

    def _index(self, output: RequestOutput, answer: CompletionOutput) -> int:
        return self._prompt_index[output.request_id] * self._n + answer.index

    def _count(self, output: RequestOutput) -> None:
        self._num_prompt_tokens[output.request_id] = len(output.prompt_token_ids)
        self._num_cached_tokens[output.request_id] = output.num_cached_tokens
        self._num_output_tokens += sum(len(answer.token_ids) for answer in output.outputs)

    def _object(self, kind: str, choices: list[Json]) -> Json:
        body = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        if self._include_usage and kind == self.chunk_kind:
            body["usage"] = None  # the last chunk has it
        return body

    def _chunk(self, output: RequestOutput, answer: CompletionOutput, index: int, first: bool) -> Json | None:
        """One choice of a chunk; None when there is nothing to show yet."""
        raise NotImplementedError

    def _choice(self, output: RequestOutput, answer: CompletionOutput, index: int) -> Json:
        raise NotImplementedError


class ChatReply(Reply):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, reply_id: str, model: str, request_ids: Sequence[str], n: int, *, top_logprobs: int = 0, **options: Any
    ) -> None:
        super().__init__(reply_id, model, request_ids, n, **options)
        self._top_logprobs = top_logprobs

    def _chunk(self, output: RequestOutput, answer: CompletionOutput, index: int, first: bool) -> Json | None:
        if not (answer.text or answer.finish_reason or answer.logprobs):
            return None
        delta: Json = {"role": "assistant", "content": answer.text} if first else {}
        if answer.text:
            delta["content"] = answer.text
        return {"index": index, "delta": delta, "logprobs": _chat_logprobs(answer.logprobs, self._top_logprobs)}

    def _choice(self, output: RequestOutput, answer: CompletionOutput, index: int) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": _chat_logprobs(answer.logprobs, self._top_logprobs),
        }


class CompletionReply(Reply):
    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        reply_id: str,
        model: str,
        request_ids: Sequence[str],
        n: int,
        *,
        tokenizer: Tokenizer,
        echo: bool = False,
        only_prompt: bool = False,
        **options: Any,
    ) -> None:
        """`echo`: begin with the prompt. `only_prompt`: show nothing else (max_tokens was 0)."""
        super().__init__(reply_id, model, request_ids, n, **options)
        self._tokenizer = tokenizer
        self._echo = echo
        self._only_prompt = only_prompt
        self._num_chars: dict[int, int] = {}  # of each choice's text, for text_offset

    def _count(self, output: RequestOutput) -> None:
        super()._count(output)
        if self._only_prompt:
            self._num_output_tokens = 0

    def _chunk(self, output: RequestOutput, answer: CompletionOutput, index: int, first: bool) -> Json | None:
        choice = self._text_choice(output, answer, index, first)
        return choice if choice["text"] or choice["logprobs"] or answer.finish_reason else None

    def _choice(self, output: RequestOutput, answer: CompletionOutput, index: int) -> Json:
        return self._text_choice(output, answer, index, True)

    def _text_choice(self, output: RequestOutput, answer: CompletionOutput, index: int, first: bool) -> Json:
        text = "" if self._only_prompt else answer.text
        positions: list[tuple[int, PositionLogprobs | None]] = []
        if self._echo and first:
            text = self._prompt_text(output) + text
            if answer.logprobs is not None and output.prompt_logprobs is not None:
                positions += zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if answer.logprobs is not None and not self._only_prompt:
            positions += zip(answer.token_ids, answer.logprobs, strict=True)
        logprobs = None if answer.logprobs is None else self._logprobs(index, positions)
        return {"index": index, "text": text, "logprobs": logprobs}

    def _prompt_text(self, output: RequestOutput) -> str:
        return output.prompt if output.prompt is not None else self._tokenizer.decode(output.prompt_token_ids)

    def _logprobs(self, index: int, positions: list[tuple[int, PositionLogprobs | None]]) -> Json:
        """The old format: parallel lists. The first token of an echoed prompt has no log-probability."""
        lists: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = self._num_chars.get(index, 0)
        for token_id, position in positions:
            chosen = None if position is None else position[token_id]
            token = self._tokenizer.decode([token_id], skip_special_tokens=False)
            lists["tokens"].append(token)
            lists["token_logprobs"].append(None if chosen is None else _finite(chosen))
            lists["top_logprobs"].append(None if position is None else _by_text(position))
            lists["text_offset"].append(offset)
            offset += len(token)
        self._num_chars[index] = offset
        return lists


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, MIN_LOGPROB)


def _by_text(position: PositionLogprobs) -> dict[str, float]:
    """Two ids may look alike as text; the first one, the sampled or the more likely, stays."""
    found: dict[str, float] = {}
    for logprob in position.values():
        found.setdefault(logprob.decoded_token or "", _finite(logprob))
    return found


def _prompt_position(position: PositionLogprobs | None) -> dict[str, Json] | None:
    if position is None:
        return None
    return {
        str(token_id): {"logprob": _finite(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token_id, entry in position.items()
    }


def _chat_logprobs(positions: list[PositionLogprobs] | None, k: int) -> Json | None:
    """The new format: an entry a token, each with the k most likely ones."""
    if positions is None:
        return None
    return {"content": [_chat_position(position, k) for position in positions]}


def _chat_position(position: PositionLogprobs, k: int) -> Json:
    entries = list(position.values())
    likeliest = sorted((entry for entry in entries if (entry.rank or 0) <= k), key=lambda entry: entry.rank or 0)
    return _chat_entry(entries[0]) | {"top_logprobs": [_chat_entry(entry) for entry in likeliest]}


def _chat_entry(entry: Logprob) -> Json:
    token = entry.decoded_token or ""
    return {"token": token, "logprob": _finite(entry), "bytes": list(token.encode())}
