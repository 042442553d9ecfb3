"""What a client of the HTTP server may send, and how it is told that it may not.

One struct a request body; the structs are also the schemas of `/openapi.json`. Names and meanings are OpenAI's, then
vLLM's further ones. A field that is not in a struct is refused by name, never ignored; null means "not given".
Ranges are `SamplingParams`' to check. Knows neither HTTP nor the engine. Laws: tests/test_server.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from nanoserve.request import OutputKind, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
MAX_STOP_STRINGS = 4
MAX_LOGPROBS = 20  # vLLM's --max-logprobs
MAX_ANSWERS = 1024  # of one HTTP request: prompts times n


class ApiError(Exception):
    """A refusal in OpenAI's shape: `{"error": {message, type, param, code}}`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": str(self),
                "type": _ERROR_TYPES.get(
                    self.status, "server_error" if self.status >= 500 else "invalid_request_error"
                ),
                "param": self.param,
                "code": self.code or ("invalid_value" if self.status == 400 else HTTPStatus(self.status).name.lower()),
            }
        }


_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error", 504: "timeout_error"}


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request body."""


def _number(low: float | None = None, high: float | None = None, **more: float) -> Meta:
    """A range for the schema; `SamplingParams` enforces it, with a message of its own."""
    limits = {"minimum": low, "maximum": high, **more}
    return Meta(extra_json_schema={name: value for name, value in limits.items() if value is not None})


_INT64 = {"low": -(2**63), "high": 2**63 - 1}
MAX_TOKEN_ID = 2**31 - 1
TokenId = Annotated[int, _number(0, MAX_TOKEN_ID)]


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None


class SamplingBody(Body, kw_only=True):
    """What both kinds of completions share."""

    # OpenAI's
    model: str | None = None  # None: the one that is served
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, _number(1, MAX_ANSWERS)] = 1
    temperature: Annotated[float, _number(0, 2)] = 1.0
    top_p: Annotated[float, _number(high=1, exclusiveMinimum=0)] = 1.0
    presence_penalty: Annotated[float, _number(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, _number(-2, 2)] = 0.0
    seed: Annotated[int, _number(**_INT64)] | None = None
    stop: (
        Annotated[str, Meta(extra_json_schema={"minLength": 1})]
        | Annotated[list[str], Meta(extra_json_schema={"maxItems": MAX_STOP_STRINGS})]
        | None
    ) = None
    logit_bias: dict[str, float] | None = None
    # vLLM's
    top_k: Annotated[int, _number(-1, 2**63 - 1)] = 0
    min_p: Annotated[float, _number(0, 1)] = 0.0
    repetition_penalty: Annotated[float, _number(exclusiveMinimum=0)] = 1.0
    min_tokens: Annotated[int, _number(0)] = 0
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Annotated[int, _number(0, MAX_LOGPROBS)] | None = None
    cache_salt: str | None = None
    priority: Annotated[int, _number(**_INT64)] = 0
    request_id: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(SamplingBody, kw_only=True):
    """The body of `POST /v1/completions`. `prompt`: a text, token ids, or a list of either."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, _number(0)] | None = None
    echo: bool = False
    logprobs: Annotated[int, _number(0, MAX_LOGPROBS)] | None = None


class TextPart(Body, tag_field="type", tag="text"):
    text: str


class ChatMessage(Body, kw_only=True):
    """One turn. `content` may be a list of text parts, which are joined by newlines."""

    role: str
    content: str | list[TextPart]


class ChatRequest(SamplingBody, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_tokens: Annotated[int, _number(1)] | None = None
    max_completion_tokens: Annotated[int, _number(1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, _number(0, MAX_LOGPROBS)] | None = None


class TokenizeRequest(Body, kw_only=True):
    """The body of `POST /tokenize`: one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None


B = TypeVar("B", bound=Body)

# Named by OpenAI or vLLM, and refused here unless it is null.
UNSUPPORTED = frozenset(
    (
        "audio", "best_of", "documents", "function_call", "functions", "guided_choice", "guided_grammar", "guided_json",
        "guided_regex", "kv_transfer_params", "length_penalty", "logits_processors", "metadata", "modalities",
        "parallel_tool_calls", "prediction", "prompt_embeds", "reasoning_effort", "response_format",
        "safety_identifier", "service_tier", "store", "structured_outputs", "suffix", "tool_choice", "tools",
        "truncate_prompt_tokens", "use_beam_search", "user", "verbosity", "web_search_options",
    )
)  # fmt: skip
_PATH = re.compile(r" - at `\$\.?(?P<path>.*)`$", re.DOTALL)
_FIELD = re.compile(r"Object (?P<problem>contains unknown|missing required) field `(?P<field>.*)`", re.DOTALL)


def parse_body(data: bytes, kind: type[B]) -> B:
    """The body as a struct. ApiError 400, naming the field, for anything else."""
    try:
        fields = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(fields).__name__}.", code="invalid_json")
    known = kind.__struct_fields__
    fields = {name: value for name, value in fields.items() if value is not None or _is_foreign(name, known)}
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _refusal(str(error)) from None


def _is_foreign(name: str, known: tuple[str, ...]) -> bool:
    return name not in known and name not in UNSUPPORTED


def _refusal(message: str) -> ApiError:
    """msgspec's message in our words: it ends with the path of what is wrong."""
    path = _PATH.search(message)
    name = path["path"] if path else ""
    text = _PATH.sub("", message)
    if (match := _FIELD.fullmatch(text)) is None:
        return ApiError(
            400, f"{name or 'body'}: {text[:1].lower()}{text[1:]}.", param=name or None, code="invalid_type"
        )
    field = ".".join(filter(None, (name, match["field"])))
    if match["problem"] == "missing required":
        return ApiError(400, f"{field} is required.", param=field, code="missing_parameter")
    text = f"{field:.100} is not supported; remove it (nothing is ignored silently)."
    return ApiError(400, text, param=f"{field:.100}", code="unsupported_parameter")


def as_api_error(error: ValueError) -> ApiError:
    """A refusal by the front end. Its messages start with the name of the field."""
    message = str(error)
    word = re.match(r"\w+", message)
    name = _ALIASES.get(word[0], word[0]) if word else ""
    code = "context_length_exceeded" if "max_model_len" in message else "invalid_value"
    return ApiError(400, message, param=name if name in _FIELDS else None, code=code)


_FIELDS = frozenset(field for kind in (CompletionRequest, ChatRequest) for field in kind.__struct_fields__)
_ALIASES = {"prompt_token_ids": "prompt"}


# Sampling parameters


def completion_params(body: CompletionRequest) -> SamplingParams:
    """ApiError or ValueError naming the field."""
    _check_common(body)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens must be >= 1, got 0; 0 goes with echo only.", param="max_tokens")
    _check_count("logprobs", body.logprobs)
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs is not supported with stream; leave one out.", param="prompt_logprobs")
    prompt_logprobs = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens or 1  # 0: only the prompt
    return _params(body, max_tokens, body.logprobs, prompt_logprobs)


def chat_params(body: ChatRequest) -> SamplingParams:
    """ApiError or ValueError naming the field. `max_tokens` None: to the end of the context."""
    _check_common(body)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        text = "max_tokens and max_completion_tokens mean the same; send one of them."
        raise ApiError(400, text, param="max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    _check_count("top_logprobs", body.top_logprobs)
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs is not supported with stream; leave one out.", param="prompt_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    return _params(body, max_tokens, logprobs, body.prompt_logprobs)


def _check_count(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise ApiError(400, f"{name} must be in [0, {MAX_LOGPROBS}], got {value!r:.40}.", param=name)


def _check_common(body: SamplingBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true.", param="stream_options")
    if isinstance(body.stop, list) and len(body.stop) > MAX_STOP_STRINGS:
        text = f"stop has {len(body.stop)} strings, at most {MAX_STOP_STRINGS} are supported."
        raise ApiError(400, text, param="stop")
    check_answers(body, 1)
    _check_count("prompt_logprobs", body.prompt_logprobs)


def check_answers(body: SamplingBody, num_prompts: int) -> None:
    if body.n > 0 and body.n * num_prompts > MAX_ANSWERS:
        text = f"n={body.n!r:.40} answers for {num_prompts} prompts are too many; at most {MAX_ANSWERS} in one request."
        raise ApiError(400, text, param="n")


def _params(
    body: SamplingBody, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    return SamplingParams(
        n=body.n,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or [],
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=body.logit_bias or {},  # type: ignore[arg-type]  # keys of digits become ids
        allowed_token_ids=body.allowed_token_ids,
        bad_words=body.bad_words or [],
        output_kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
    )


# Prompts


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts, each a text or token ids."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "prompt is an empty list; give a text, token ids, or a list of them.", param="prompt")
    if all(isinstance(item, int) for item in given):
        return [given]  # type: ignore[list-item]
    if any(isinstance(item, int) for item in given):
        raise ApiError(400, "prompt mixes token ids with prompts; give one or the other.", param="prompt")
    return given  # type: ignore[return-value]


def messages_of(messages: list[ChatMessage]) -> list[dict[str, str]]:
    return [
        {
            "role": message.role,
            "content": message.content
            if isinstance(message.content, str)
            else "\n".join(part.text for part in message.content),
        }
        for message in messages
    ]


def tokens_of(body: DetokenizeRequest) -> list[int]:
    """The ids to decode; one that is not in the vocabulary is no error, one that cannot be in any is."""
    for i, token_id in enumerate(body.tokens):
        if not 0 <= token_id <= MAX_TOKEN_ID:
            text = f"tokens[{i}] must be in [0, {MAX_TOKEN_ID}], got {token_id!r:.40}."
            raise ApiError(400, text, param="tokens")
    return body.tokens
