"""The OpenAI-compatible HTTP interface of one engine: routes, refusals, streams. Hops 1, 2 and 10 of a request.

What a body may hold is `protocol.py`, what an answer looks like `responses.py`, how it is kept running `listen.py`.
Everything that can be refused is refused with a status before a stream begins; a client that leaves ends its request,
streaming or not. Laws: tests/test_server.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from nanoserve import __version__
from nanoserve.api import protocol, sse
from nanoserve.api.async_llm import AsyncLLM, OutputStream, QueueFullError
from nanoserve.api.generation import Generation
from nanoserve.api.metrics import CONTENT_TYPE, ServerMetrics
from nanoserve.api.openapi import openapi_document
from nanoserve.api.protocol import ApiError, ChatRequest, CompletionRequest, SamplingBody, parse_body
from nanoserve.api.responses import ChatReply, CompletionReply, Json, Reply
from nanoserve.client import EngineDeadError
from nanoserve.core import NUM_RECENT_STEPS

logger = logging.getLogger("nanoserve.server")
PAGE = Path(__file__).parent / "static" / "index.html"
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
CLIENT_LEFT = 499  # nginx's status for it; nobody reads it
RETRY_AFTER_S = "1"
DRAINED_BODIES = 4  # an oversized body is read and dropped up to that many times the limit, so that the client listens

T = TypeVar("T")
B = TypeVar("B", bound=protocol.Body)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What `nanoserve serve` can be told about HTTP. Sizes in bytes, times in seconds."""

    model_names: tuple[str, ...] = ()  # () = the engine's model
    api_key: str | None = None
    max_request_bytes: int = 8 * 2**20
    request_timeout_s: float | None = None  # for the whole of a request; None: no limit
    debug_endpoints: bool = False


class ApiServer:
    """The routes of one engine. `app` is the ASGI application."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self.llm = llm
        self.options = options
        self.model_names = options.model_names or (llm.config.model,)
        self.metrics = ServerMetrics(self.model_names[0], lambda: llm.stats)
        llm.listener = self.metrics
        self.draining = False  # set once no new request may start
        self._readers: set[asyncio.Task[Any]] = set()  # of bodies that have not come in whole
        self._created = int(time.time())
        self._page = PAGE.read_bytes()
        self._openapi = openapi_document(debug=options.debug_endpoints, secured=options.api_key is not None)
        routes = [
            self._route("/v1/completions", self.completions, "POST"),
            self._route("/v1/chat/completions", self.chat, "POST"),
            self._route("/v1/models", self.models),
            self._route("/v1/models/{name:path}", self.model),
            self._route("/tokenize", self.tokenize, "POST"),
            self._route("/detokenize", self.detokenize, "POST"),
            self._route("/health", self.health, public=True),
            self._route("/metrics", self.show_metrics, public=True),
            self._route("/version", self.version, public=True),
            self._route("/stats", self.stats),
            self._route("/openapi.json", self.openapi, public=True),
            self._route("/", self.page, public=True),
        ]
        if options.debug_endpoints:
            routes += [self._route("/debug/blocks", self.blocks), self._route("/debug/trace", self.trace)]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    def _route(
        self,
        path: str,
        handler: Callable[[Request], Awaitable[Any]],
        method: str = "GET",
        *,
        public: bool = False,
    ) -> Route:
        """A handler with its refusals in OpenAI's shape. Not `public`: it needs the API key, if there is one."""

        @functools.wraps(handler)
        async def endpoint(request: Request) -> Any:
            try:
                if not public:
                    self._check_key(request)
                return await handler(request)
            except (sse.ClientLeftError, ClientDisconnect):
                return Response(status_code=CLIENT_LEFT)
            except Exception as error:
                return _error_response(_api_error(error))

        return Route(path, endpoint, methods=[method])

    def drain(self) -> None:
        """From now on no request may start, nor one whose body is still on its way: nobody waits for that."""
        self.draining = True
        for task in self._readers:
            task.cancel()

    def _check_key(self, request: Request) -> None:
        if self.options.api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(key.encode(), self.options.api_key.encode()):
            raise ApiError(
                401,
                "a valid API key is needed; send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    # Completions

    async def completions(self, request: Request) -> Any:
        deadline = self._deadline()
        body = await self._body(request, CompletionRequest, deadline)
        with _refusals():
            params = protocol.completion_params(body)
        prompts = protocol.prompts_of(body)
        protocol.check_answers(body, len(prompts))
        ids = _request_ids(body, len(prompts))
        reply = CompletionReply(
            f"cmpl-{ids[0]}",
            body.model or self.model_names[0],
            ids,
            params.n,
            include_usage=body.include_usage,
            with_prompt_logprobs=body.prompt_logprobs is not None,
            tokenizer=self.llm.get_tokenizer(),
            echo=body.echo,
            only_prompt=body.max_tokens == 0,
        )

        async def prepare() -> list[Generation]:
            options = {"priority": body.priority, "cache_salt": body.cache_salt}
            generations = []
            for prompt, request_id in zip(prompts, ids, strict=True):
                generations.append(await self.llm.prepare(prompt, params, request_id, **options))
                await asyncio.sleep(0)  # a thousand short prompts must not hold up the others
            return generations

        return await self._answer(request, body, prepare, reply, deadline)

    async def chat(self, request: Request) -> Any:
        deadline = self._deadline()
        body = await self._body(request, ChatRequest, deadline)
        with _refusals():
            params = protocol.chat_params(body)
        messages = protocol.messages_of(body.messages)
        ids = _request_ids(body, 1)
        reply = ChatReply(
            f"chatcmpl-{ids[0]}",
            body.model or self.model_names[0],
            ids,
            params.n,
            include_usage=body.include_usage,
            with_prompt_logprobs=body.prompt_logprobs is not None,
            top_logprobs=body.top_logprobs or 0,
        )

        async def prepare() -> list[Generation]:
            options = {"priority": body.priority, "cache_salt": body.cache_salt}
            return [await self.llm.prepare_chat(messages, params, ids[0], **options)]

        return await self._answer(request, body, prepare, reply, deadline)

    async def _answer(
        self,
        request: Request,
        body: CompletionRequest | ChatRequest,
        prepare: Callable[[], Coroutine[Any, Any, list[Generation]]],
        reply: Reply,
        deadline: float | None,
    ) -> Any:
        """The response: a whole answer, or a stream that has been admitted."""

        async def admit() -> OutputStream:
            with _refusals():
                generations = await prepare()
                for generation in generations:
                    self._check_length(generation, body)
                if self.draining:
                    raise _shutting_down()
                return self.llm.start(generations)

        async def collect() -> Json:
            with contextlib.closing(await admit()) as stream:
                return reply.whole([output async for output in stream])

        if not body.stream:
            return _json(await self._in_time(sse.run_while_connected(collect(), request.receive), deadline))
        stream = await self._in_time(sse.run_while_connected(admit(), request.receive), deadline)
        return sse.EventStream(self._events(stream, reply, deadline), stream.close)

    async def _events(self, stream: OutputStream, reply: Reply, deadline: float | None) -> AsyncGenerator[bytes]:
        """A failure after the status was sent is an event, and the stream ends without [DONE]."""
        try:
            while (output := await self._in_time(anext(stream, None), deadline)) is not None:
                for chunk in reply.chunks(output):
                    yield sse.event(chunk)
        except Exception as error:
            yield sse.event(_api_error(error).body)
            return
        if (last := reply.last_chunk()) is not None:
            yield sse.event(last)
        yield sse.DONE

    def _check_length(self, generation: Generation, body: CompletionRequest | ChatRequest) -> None:
        """Both APIs refuse a request whose answer could not be as long as it asks for."""
        max_tokens = body.max_tokens
        if max_tokens is None and isinstance(body, ChatRequest):
            max_tokens = body.max_completion_tokens
        limit, num_prompt_tokens = self.llm.info.max_model_len, len(generation.requests[0].prompt_token_ids)
        if max_tokens is not None and num_prompt_tokens + max_tokens > limit:
            raise ApiError(
                400,
                f"max_tokens={max_tokens!r:.40} and a prompt of {num_prompt_tokens} tokens do not fit in "
                f"max_model_len={limit}; ask for at most {limit - num_prompt_tokens} tokens or shorten the prompt.",
                param="max_tokens",
                code="context_length_exceeded",
            )

    # Bodies

    async def _body(self, request: Request, kind: type[B], deadline: float | None = None) -> B:
        """The checked body of a request that may start now."""
        if self.draining:
            raise _shutting_down()
        with self._refused_by_drain():
            data = await self._in_time(self._read(request), deadline)
        body = parse_body(data, kind)
        model = getattr(body, "model", None)
        if model is not None and model not in self.model_names:
            raise _unknown_model(model, self.model_names)
        if isinstance(body, CompletionRequest | ChatRequest):
            self.llm.check_alive()
            self.llm.check_room(1)  # before the work of tokenizing; `start` looks again
        return body

    @contextlib.contextmanager
    def _refused_by_drain(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._readers.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.draining:
                raise
            task.uncancel()
            raise _shutting_down() from None
        finally:
            self._readers.discard(task)

    async def _read(self, request: Request) -> bytes:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            text = f"the content type must be application/json, got {media_type[:80]!r}."
            raise ApiError(415, text, code="unsupported_media_type")
        limit = self.options.max_request_bytes
        announced = request.headers.get("content-length", "0")
        size = int(announced) if announced.isdigit() and len(announced) < 20 else 0
        data = bytearray()
        if size <= limit * DRAINED_BODIES:
            size = 0
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    data += part
                elif size > limit * DRAINED_BODIES:
                    break
        if size > limit:
            text = f"the body is larger than {limit} bytes; send less or raise --max-request-bytes."
            raise ApiError(413, text, code="request_too_large", headers={"connection": "close"})
        return bytes(data)

    def _deadline(self) -> float | None:
        timeout_s = self.options.request_timeout_s
        return None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    async def _in_time(self, work: Awaitable[T], deadline: float | None) -> T:
        try:
            async with asyncio.timeout_at(deadline):
                return await work
        except TimeoutError:
            if deadline is None:
                raise  # not ours
            text = f"the request took longer than {self.options.request_timeout_s:g} s (--request-timeout)."
            raise ApiError(504, text, code="timeout") from None

    # The other endpoints

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._describe(name) for name in self.model_names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.model_names:
            raise _unknown_model(name, self.model_names)
        return _json(self._describe(name))

    def _describe(self, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "nanoserve",
            "root": self.llm.config.model,
            "max_model_len": self.llm.info.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, protocol.TokenizeRequest, self._deadline())
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt or messages is needed, and not both.", param="prompt")
        tokenizer = self.llm.get_tokenizer()

        def encode() -> list[int]:
            if body.messages is None:
                return tokenizer.encode(body.prompt or "", body.add_special_tokens)
            return tokenizer.encode_chat(protocol.messages_of(body.messages), body.add_generation_prompt)

        with _refusals():
            ids = await asyncio.to_thread(encode)
        answer: Json = {"count": len(ids), "max_model_len": self.llm.info.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.token(token_id) for token_id in ids]
        return _json(answer)

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, protocol.DetokenizeRequest, self._deadline())
        ids = protocol.tokens_of(body)
        text = await asyncio.to_thread(self.llm.get_tokenizer().decode, ids, skip_special_tokens=False)
        return _json({"prompt": text})

    async def health(self, request: Request) -> Response:
        try:
            self.llm.check_alive()
        except EngineDeadError as error:
            raise ApiError(503, str(error), code="engine_dead") from None
        if self.draining:
            raise _shutting_down()
        return _json({"status": "ok"})

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def stats(self, request: Request) -> Response:
        """What the page shows of the batch."""
        info, stats = self.llm.info, self.llm.stats
        return _json(
            {
                "model": self.model_names[0],
                "max_model_len": info.max_model_len,
                "has_chat_template": self.llm.get_tokenizer().has_chat_template,
                "max_num_seqs": self.llm.config.max_num_seqs,
                "num_blocks": info.num_blocks,
                "block_size": info.block_size,
                **msgspec.structs.asdict(stats),
            }
        )

    async def version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def openapi(self, request: Request) -> Response:
        return _json(self._openapi)

    async def page(self, request: Request) -> Response:
        headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": PAGE_POLICY}
        return Response(self._page, headers=headers)

    async def blocks(self, request: Request) -> Response:
        return _json(await self.llm.call("block_map"))

    async def trace(self, request: Request) -> Response:
        given = request.query_params.get("limit", str(NUM_RECENT_STEPS))
        if not (given.isascii() and given.isdigit() and len(given) < 4 and 1 <= int(given) <= NUM_RECENT_STEPS):
            raise ApiError(400, f"limit must be in [1, {NUM_RECENT_STEPS}], got {given[:40]!r}.", param="limit")
        return _json({"steps": await self.llm.call("recent_steps", int(given))})


def _request_ids(body: SamplingBody, num_prompts: int) -> list[str]:
    first = secrets.token_hex(8) if body.request_id is None else body.request_id
    return [first, *(f"{first}-prompt{i}" for i in range(1, num_prompts))]


# Refusals and failures


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """A ValueError of the front end is the client's mistake."""
    try:
        yield
    except ValueError as error:
        raise protocol.as_api_error(error) from None


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down.", code="shutting_down", headers={"retry-after": RETRY_AFTER_S})


def _unknown_model(name: str, served: tuple[str, ...]) -> ApiError:
    text = f"model {name[:100]!r} does not exist; this server has {', '.join(served)}."
    return ApiError(404, text, param="model", code="model_not_found")


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error), code="queue_full", headers={"retry-after": RETRY_AFTER_S})
    if isinstance(error, EngineDeadError):
        return ApiError(500, str(error), code="engine_dead")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed to answer; its log says why.", code="internal_error")


def _error_response(error: ApiError) -> Response:
    return _json(error.body, error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: an unknown path, a method that a path does not have."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:100]}: {error.detail}."
    return _error_response(ApiError(error.status_code, text, headers=error.headers))


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
