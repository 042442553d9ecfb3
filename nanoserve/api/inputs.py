"""What a user asks for, checked and turned into token ids: hop 2, before anything reaches the engine.

Every refusal is a ValueError that names the field, the value, the limit and the fix. Knows the tokenizer and
the sizes of the engine (`EngineInfo`), not the engine itself. Offline and online front ends share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from nanoserve.request import OutputKind, SamplingParams

if TYPE_CHECKING:
    from nanoserve.api.tokenizer import Tokenizer
    from nanoserve.request import EngineInfo

# One prompt: text, token ids, or a mapping with `prompt` or `prompt_token_ids`, and perhaps `cache_salt`.
PromptLike = str | Sequence[int] | Mapping[str, Any]
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt that fits the engine. `text` is None when it came as token ids."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str = ""


def as_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """One prompt or many, as a list. A sequence that starts with an integer is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be a text, a list of token ids or a list of prompts, got {prompts!r:.80}.")
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def one_each(name: str, value: Any, count: int) -> list[Any]:
    """`value` for each of `count` prompts, or the values when it is a list of as many. Raises ValueError."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts; give one for all, or one for each.")
    return list(value)


def _check_unicode(name: str, text: str) -> None:
    """Half a surrogate pair, which is what Python makes of an argument that is not UTF-8, fits no message."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not valid Unicode: {text[error.start]!r} at position {error.start}; convert it to UTF-8."
        ) from None


def check_priority(priority: Any, policy: str) -> None:
    """ValueError for a priority that is no integer, or that the scheduling policy would ignore."""
    if not isinstance(priority, int) or isinstance(priority, bool) or not -(2**63) <= priority < 2**63:
        raise ValueError(f"priority must be an integer of 64 bits (lower is more urgent), got {priority!r:.80}.")
    if priority and policy != "priority":
        raise ValueError(
            f"priority={priority!r:.80} has no effect with policy={policy!r}; build with policy='priority'."
        )


class InputProcessor:
    """Validates prompts and sampling parameters against one engine and its tokenizer."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer) -> None:
        self._info = info
        self._tokenizer = tokenizer

    def prompt(self, prompt: PromptLike, cache_salt: str | None = None) -> TokenPrompt:
        """Token ids of one prompt. Text is encoded with the tokenizer's special tokens (BOS where it has one)."""
        if not isinstance(prompt, Mapping):
            prompt = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        text, ids, salt = self._unpack(prompt)
        if text is not None:
            _check_unicode("prompt", text)
            ids = self._encode(text)
        salt = cache_salt if cache_salt is not None else salt
        if not isinstance(salt, str):
            raise ValueError(f"cache_salt must be a string, got {salt!r}.")
        _check_unicode("cache_salt", salt)
        return TokenPrompt(self._checked_ids(ids), text, salt)

    def chat(self, messages: Sequence[Mapping[str, Any]], cache_salt: str | None = None) -> TokenPrompt:
        """Token ids of a conversation, put into text by the model's chat template, which writes BOS itself."""
        text = self._tokenizer.apply_chat_template(messages)
        ids = self._encode(text, add_special_tokens=False)
        prompt = self.prompt({"prompt_token_ids": ids}, cache_salt)
        return TokenPrompt(prompt.token_ids, text, prompt.cache_salt)

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; one that cannot fit is refused before it costs the time and the memory of encoding it."""
        limit = self._info.max_model_len * self._tokenizer.max_chars_per_token
        if len(text) > limit:
            raise ValueError(
                f"prompt has {len(text)} characters, at most {limit} could fit in "
                f"max_model_len={self._info.max_model_len} tokens; shorten it or raise max_model_len."
            )
        return self._tokenizer.encode(text, add_special_tokens)

    def _unpack(self, prompt: Mapping[str, Any]) -> tuple[str | None, Any, Any]:
        if unknown := [key for key in prompt if key not in _PROMPT_KEYS]:
            raise ValueError(f"prompt key {unknown[0]!r} is not supported; the keys are {', '.join(_PROMPT_KEYS)}.")
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if (text is None) == (ids is None):
            raise ValueError(
                f"a prompt needs either prompt or prompt_token_ids, got {'both' if text is not None else 'neither'}."
            )
        if text is not None and not isinstance(text, str):
            raise ValueError(f"prompt must be text, got {text!r:.80}; give token ids as prompt_token_ids.")
        return text, ids, prompt.get("cache_salt", "")

    def _checked_ids(self, ids: Any) -> list[int]:
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise ValueError(f"prompt_token_ids must be a list of integers, got {ids!r:.80}.")
        if len(ids) == 0:
            raise ValueError("prompt is empty (0 tokens); give at least one token.")
        self._check_vocabulary("prompt_token_ids", ids)
        limit = self._info.max_model_len
        if len(ids) >= limit:
            raise ValueError(
                f"prompt has {len(ids)} tokens, at most {limit - 1} leave room for one more in max_model_len={limit}; "
                f"shorten it or raise max_model_len."
            )
        return list(ids)

    def _check_vocabulary(self, name: str, ids: Sequence[Any] | Mapping[int, float]) -> None:
        size = self._info.vocab_size
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise ValueError(f"{name} must hold integers, got {token_id!r:.80}.")
            if not 0 <= token_id < size:
                raise ValueError(
                    f"{name} holds {token_id}, the vocabulary ends at {size - 1}; use ids in [0, {size - 1}]."
                )

    def params(self, params: SamplingParams, kind: OutputKind | None = None) -> SamplingParams:
        """The same parameters with what the tokenizer knows filled in: further EOS ids and the ids of bad words;
        and with `kind` as the output kind, if given.

        As in vLLM, an end-of-sequence id beside the first stops with `stop_reason` = that id.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, got {params!r:.80}.")
        for name in ("stop", "bad_words"):
            for text in getattr(params, name):
                _check_unicode(name, text)
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        self._check_vocabulary("logit_bias", params.logit_bias)
        for words in params.bad_words_token_ids:
            self._check_vocabulary("bad_words_token_ids", words)
        size = self._info.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > size:
                raise ValueError(
                    f"{name}={getattr(params, name)} is larger than the vocabulary of {size}; use -1 for all."
                )
        further_eos = () if params.ignore_eos else self._tokenizer.extra_stop_ids
        return msgspec.structs.replace(
            params,
            output_kind=params.output_kind if kind is None else kind,
            stop_token_ids=list(dict.fromkeys([*params.stop_token_ids, *further_eos])),
            bad_words_token_ids=[
                *params.bad_words_token_ids,
                *self._tokenizer.bad_words_token_ids(params.bad_words),
            ],
        )
