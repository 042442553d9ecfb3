"""What a load can be put on: any OpenAI-compatible server, or an engine in this process.

Owns the way of asking and the names of what can go wrong; knows no arrival times and no figures. Greedy, and with
the end of sequence ignored unless told otherwise, so that lengths are those that were asked for.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from nanoserve.lab.async_load import Outcome, RequestFailedError
from nanoserve.lab.sse_client import Address, BrokenStreamError, HttpError, ProtocolError, get, post_events

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nanoserve.api.async_llm import AsyncLLM
    from nanoserve.lab.arrivals import BenchRequest

DONE = b"[DONE]"


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """One event of a streamed completion: the fields that matter here."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class UrlTarget:
    """`POST /v1/completions` of a server, streamed; one connection a request."""

    def __init__(self, address: Address, model: str, *, api_key: str | None = None, ignore_eos: bool = True) -> None:
        self.address = address
        self.model = model
        self._headers = _headers(api_key)
        self._ignore_eos = ignore_eos
        self._encode = msgspec.json.Encoder().encode
        self._decoder = msgspec.json.Decoder(Chunk)

    async def ask(self, request: BenchRequest, outcome: Outcome) -> None:
        try:
            events = post_events(self.address, "/v1/completions", self._body(request), self._headers)
            async with aclosing(events):
                async for data in events:
                    if data == DONE:
                        break
                    self._take(self._decoder.decode(data), outcome)
        except HttpError as error:
            raise RequestFailedError(f"http_{error.status}", str(error)) from None
        except BrokenStreamError as error:
            raise RequestFailedError("disconnect", str(error)) from None
        except (ProtocolError, msgspec.MsgspecError) as error:
            raise RequestFailedError("protocol", str(error)) from None
        except TimeoutError:
            raise
        except OSError as error:
            raise RequestFailedError("connect", str(error)) from None
        if outcome.finish_reason is None:
            raise RequestFailedError("disconnect", "the stream ended without a finish_reason.")
        check_end(request, outcome, self._ignore_eos)

    def _body(self, request: BenchRequest) -> bytes:
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return self._encode(body | {"ignore_eos": True} if self._ignore_eos else body)

    def _take(self, chunk: Chunk, outcome: Outcome) -> None:
        if chunk.error is not None:
            raise RequestFailedError("error_event", str(chunk.error)[:500])
        for choice in chunk.choices:
            outcome.finish_reason = choice.finish_reason or outcome.finish_reason
            if choice.text or choice.finish_reason is None:  # text may be held back; a bare end brings no token
                outcome.event_s.append(time.monotonic())
                outcome.num_output_tokens += 1  # until the server says how many there were
        if chunk.usage is not None:
            outcome.num_prompt_tokens = chunk.usage.prompt_tokens
            outcome.num_output_tokens = chunk.usage.completion_tokens or outcome.num_output_tokens
            details = chunk.usage.prompt_tokens_details
            outcome.num_cached_tokens = None if details is None else details.cached_tokens


def check_end(request: BenchRequest, outcome: Outcome, ignore_eos: bool) -> None:
    """RequestFailedError for an end that is none: an abort, or fewer tokens than no end of sequence could cause."""
    if outcome.finish_reason not in ("stop", "length"):
        raise RequestFailedError("aborted", f"the answer ended with reason {outcome.finish_reason!r}.")
    if ignore_eos and outcome.num_output_tokens < request.max_tokens:
        got = f"{outcome.num_output_tokens} of {request.max_tokens} tokens"
        raise RequestFailedError("short", f"{got} came; does prompt and answer fit the model's length?")


def _headers(api_key: str | None) -> Mapping[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


async def first_model(address: Address, api_key: str | None, timeout_s: float) -> str:
    """The first model that the server names; a server that does not answer is a ValueError."""
    try:
        async with asyncio.timeout(timeout_s):
            listing = msgspec.json.decode(await get(address, "/v1/models", _headers(api_key)))
        return str(listing["data"][0]["id"])
    except (OSError, HttpError, ValueError, msgspec.MsgspecError) as error:
        reason = str(error) or f"nothing within {timeout_s:g} s"
    except (KeyError, IndexError, TypeError):
        reason = "its answer names no model"
    raise ValueError(
        f"no OpenAI-compatible server answers at {address.authority} ({reason}); start one with `nanoserve serve`, "
        "give another --url, or name the model with --model."
    )


class EngineTarget:
    """An engine behind an `AsyncLLM`: everything that a server does but HTTP."""

    def __init__(self, llm: AsyncLLM, *, ignore_eos: bool = True) -> None:
        self._llm = llm
        self._ignore_eos = ignore_eos

    async def ask(self, request: BenchRequest, outcome: Outcome) -> None:
        from nanoserve.client import EngineDeadError
        from nanoserve.request import OutputKind, SamplingParams

        try:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.max_tokens,
                ignore_eos=self._ignore_eos,
                output_kind=OutputKind.DELTA,
            )
            async with aclosing(self._llm.generate(request.prompt, params, request.id)) as outputs:
                async for output in outputs:
                    answer = output.outputs[0]
                    if answer.token_ids:
                        outcome.event_s.append(time.monotonic())
                        outcome.num_output_tokens += len(answer.token_ids)
                    outcome.num_prompt_tokens = len(output.prompt_token_ids)
                    outcome.num_cached_tokens = output.num_cached_tokens
                    outcome.finish_reason = answer.finish_reason
        except EngineDeadError as error:
            raise RequestFailedError("engine_dead", str(error)) from None
        except ValueError as error:
            raise RequestFailedError("refused", str(error)) from None
        check_end(request, outcome, self._ignore_eos)
