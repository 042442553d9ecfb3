"""`AsyncLLM`: generation for an event loop. Requests open streams; one thread polls the engine for all of them.

    pump thread     client.poll -> batches of `EngineOutput`, whatever the layout
    event loop      batches -> generations, in slices; a stream tells its consumer what is new when it asks

A consumer that is slow finds everything merged into one output: nothing is lost and nothing waits for it. Knows no
HTTP. Mirrors `vllm/v1/engine/async_llm.py`. Laws: tests/test_async_llm.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from nanoserve.api.engine_options import engine_config
from nanoserve.api.generation import Generation
from nanoserve.api.inputs import InputProcessor, PromptLike, TokenPrompt, check_priority
from nanoserve.api.tokenizer import Tokenizer
from nanoserve.checkpoint import TEXT_FILES, resolve_model_dir
from nanoserve.client import EngineDeadError
from nanoserve.request import SamplingParams

if TYPE_CHECKING:
    from nanoserve.api.outputs import RequestOutput
    from nanoserve.config import EngineConfig
    from nanoserve.messages import SchedulerStats
    from nanoserve.record import Observer
    from nanoserve.request import EngineInfo, EngineOutput

logger = logging.getLogger("nanoserve.engine")
Message = Mapping[str, Any]
SLICE = 128  # outputs that are taken in before the event loop gets its turn
TURNS = 8  # of the event loop, that consumers get to read a step's news
POLL_S = 1.0  # the pump looks up this often; anything that happens wakes it at once
INLINE_SIZE = 2048  # characters or ids that are tokenized and checked on the event loop; longer prompts are not


class QueueFullError(RuntimeError):
    """More requests would wait than `max_waiting` allows; try again later."""


class Listener(Protocol):
    """Told, on the event loop, what becomes of every answer. Times are the pump's: the loop's delay is not in them."""

    def on_first_token(self, num_prompt_tokens: int, ttft_s: float) -> None: ...
    def on_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """`gap_s`: since the answer's last news; None for its first."""
        ...

    def on_end(self, reason: str, latency_s: float) -> None: ...


@dataclass(slots=True)
class _Route:
    """Whose an answer is, and when it last had news. Written by `AsyncLLM` on the event loop."""

    generation: Generation
    stream: OutputStream
    num_prompt_tokens: int
    arrival_s: float
    last_s: float | None = None


class OutputStream:
    """News of one or more generations, in the order in which they have any; an async iterator.

    What is pending is not a queue: a generation keeps what it has not told, and is asked when its turn comes, so a
    slow consumer gets deltas concatenated and cumulative outputs replaced. `close` aborts what still runs.
    """

    def __init__(self, generations: Sequence[Generation], close: Callable[[OutputStream], None]) -> None:
        self.generations = list(generations)
        self._close = close
        self._news: dict[str, Generation] = {}
        self._unfinished = {generation.request_id for generation in generations}
        self._error: Exception | None = None
        self._closed = False
        self._bell = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """Raises EngineDeadError when the engine dies, RuntimeError when it could not do this request."""
        while not self._closed:
            if (output := self._pop()) is not None:
                return output
            if self._error is not None:
                self.close()
                raise self._error
            self._bell.clear()
            await self._bell.wait()
        raise StopAsyncIteration

    def _pop(self) -> RequestOutput | None:
        while self._news:
            output = self._news.pop(next(iter(self._news))).news()
            if output is None:
                continue
            if output.finished:
                self._unfinished.discard(output.request_id)
                if not self._unfinished:
                    self.close()
            return output
        return None

    def notify(self, generation: Generation) -> None:
        """It has news."""
        self._news[generation.request_id] = generation
        self._bell.set()

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def fail(self, error: Exception) -> None:
        """What came before is still delivered; then the consumer gets `error`."""
        self._error = self._error or error
        self._bell.set()

    def close(self) -> None:
        """Idempotent; what still runs is aborted. The consumer's next request ends the iteration."""
        if not self._closed:
            self._closed = True
            self._bell.set()
            self._close(self)


class AsyncLLM:
    """An engine and its tokenizer, for one event loop: the one that first uses it.

    `stage`, `config` and engine options as for `LLM`. `max_waiting` limits the requests that have no seat yet (None:
    no limit); beyond it new ones raise QueueFullError. Building it loads the model, and blocks meanwhile.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        stage: str | None = None,
        config: EngineConfig | None = None,
        observer: Observer | None = None,
        listener: Listener | None = None,
        max_waiting: int | None = None,
        **options: Any,
    ) -> None:
        if model is not None:
            options["model"] = model
        self.config = engine_config(stage=stage, config=config, **options)
        self.listener = listener
        self.max_waiting = max_waiting
        self._tokenizer = Tokenizer.load(resolve_model_dir(self.config.model, patterns=TEXT_FILES))
        self._client = self.config.client(self.config, observer=observer)
        self._inputs = InputProcessor(self._client.info, self._tokenizer)
        self._routes: dict[str, _Route] = {}  # engine id -> whose; only answers that have not ended
        self._streams: dict[str, OutputStream] = {}  # request id -> its open stream
        self._death: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._batches: deque[tuple[float, list[EngineOutput]]] = deque()
        self._arrived: asyncio.Event | None = None
        self._deliverer: asyncio.Task[None] | None = None
        self._pump_thread = threading.Thread(target=self._pump, name="engine-pump", daemon=True)
        self._pump_thread.start()

    # What a user calls

    async def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """News of one prompt, in the form of `params.output_kind`, until it has ended.

        Closing the generator, or cancelling the task that waits for it, aborts the request. Raises ValueError for
        bad input and for an id that is in use, QueueFullError, EngineDeadError.
        """
        prepared = await self.prepare(prompt, params, request_id, priority=priority, cache_salt=cache_salt)
        with contextlib.closing(self.start([prepared])) as stream:
            async for output in stream:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """The same for a conversation, put into text by the model's chat template."""
        prepared = await self.prepare_chat(messages, params, request_id, priority=priority, cache_salt=cache_salt)
        with contextlib.closing(self.start([prepared])) as stream:
            async for output in stream:
                yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End these requests with reason `abort`; their streams deliver that end. Others are ignored."""
        names = {request_id} if isinstance(request_id, str) else set(request_id)
        self._client.abort([i for i, route in self._routes.items() if route.generation.request_id in names])

    async def abort_all(self) -> None:
        self._client.abort(list(self._routes))

    @property
    def num_open(self) -> int:
        """Answers that have not ended."""
        return len(self._routes)

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def is_dead(self) -> bool:
        """Whether the engine ended by itself."""
        return self._death is not None

    @property
    def stats(self) -> SchedulerStats:
        """As of the last news from the engine."""
        return self._client.stats

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def check_alive(self) -> None:
        """EngineDeadError, with the reason, once the engine has died."""
        if self._death is not None:
            raise EngineDeadError(self._death)

    async def call(self, method: str, *args: Any) -> Any:
        """One of the core's utilities; RuntimeError with the core's error if it raised."""
        self.check_alive()
        return await asyncio.to_thread(self._client.call, method, *args)

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing happens, while requests hold blocks."""
        return await self.call("reset_prefix_cache")

    def close(self) -> None:
        """Stop the engine; idempotent, from any thread. Open streams get EngineDeadError; nothing is left running."""
        self._death = self._death or "the engine was closed"
        self._client.close()
        if threading.current_thread() is not self._pump_thread:
            self._pump_thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)
        if self._deliverer is not None:
            await self._deliverer

    # From a prompt to an open stream: whatever can be refused is refused before anything is submitted.

    async def prepare(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Generation:
        """A checked and tokenized request, for `start`."""
        return await self._prepare(
            _size(prompt), lambda: self._inputs.prompt(prompt, cache_salt), params, request_id, priority
        )

    async def prepare_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Generation:
        """The same for a conversation."""
        size = sum(_size(message.get("content")) for message in messages if isinstance(message, Mapping))
        return await self._prepare(size, lambda: self._inputs.chat(messages, cache_salt), params, request_id, priority)

    async def _prepare(
        self,
        size: int,
        tokenize: Callable[[], TokenPrompt],
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
    ) -> Generation:
        self.check_alive()
        arrival_s = time.monotonic()
        if request_id is None:
            request_id = secrets.token_hex(8)
        self._check_id(request_id)
        check_priority(priority, self.config.policy)
        given = SamplingParams() if params is None else params

        def check() -> Generation:
            checked = self._inputs.params(given)
            return Generation(request_id, tokenize(), checked, self._tokenizer, priority, arrival_s)

        is_long = size + _params_size(given) > INLINE_SIZE
        return await asyncio.to_thread(check) if is_long else check()

    def _check_id(self, request_id: str) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id must be a non-empty string, got {request_id!r:.80}.")
        if request_id in self._streams:
            raise ValueError(f"request_id {request_id!r:.80} is in use; ids of live requests must differ.")

    def check_room(self, num_answers: int) -> None:
        """QueueFullError if that many more would make more than `max_waiting` wait."""
        if self.max_waiting is None:
            return
        # Seats that will be taken are known here at once; waiting for blocks only shows in the engine's last news.
        waiting = max(len(self._routes) + num_answers - self.config.max_num_seqs, 0)
        if self._routes and self.stats.num_waiting:
            waiting = max(waiting, self.stats.num_waiting + num_answers)
        if waiting > self.max_waiting:
            raise QueueFullError(f"{waiting} requests would wait, at most {self.max_waiting} may; try again later.")

    def start(self, generations: Sequence[Generation]) -> OutputStream:
        """Submit prepared requests and open one stream for their news. All of them or none."""
        self._bind_loop()
        self.check_alive()
        for generation in generations:
            self._check_id(generation.request_id)
        requests = [(request, generation) for generation in generations for request in generation.requests]
        self.check_room(len(requests))
        stream = OutputStream(generations, self._close_stream)
        self._streams.update(dict.fromkeys((generation.request_id for generation in generations), stream))
        try:
            for request, generation in requests:
                self._client.submit(request)
                self._routes[request.id] = _Route(generation, stream, len(request.prompt_token_ids), request.arrival_s)
        except BaseException:
            stream.close()
            raise
        return stream

    def _close_stream(self, stream: OutputStream) -> None:
        live = []
        for generation in stream.generations:
            self._streams.pop(generation.request_id, None)
            live += [request.id for request in generation.requests if request.id in self._routes]
        now_s = time.monotonic()
        for request_id in live:
            self._end(request_id, "abort", now_s)
        if live and self._death is None:
            self._client.abort(live)

    # From the engine to the streams

    def _bind_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._arrived = asyncio.Event()
            self._deliverer = loop.create_task(self._deliver(self._arrived), name="deliver-outputs")
            self._loop = loop
            self._arrived.set()  # the engine may have died before there was a loop
        elif self._loop is not loop:
            raise RuntimeError("an AsyncLLM belongs to the event loop that used it first; build one for each loop.")

    def _pump(self) -> None:
        """The thread that polls. It ends with the engine."""
        try:
            while True:
                outputs = self._client.poll(POLL_S)
                if outputs:
                    self._batches.append((time.monotonic(), outputs))
                    self._wake()
        except EngineDeadError as error:
            self._die(str(error))
        except Exception as error:
            self._die(f"polling the engine failed: {error!r}")
        self._wake()

    def _die(self, reason: str) -> None:
        if self._death is None:  # a death, not an end: whoever runs a server hears of it before the next request
            self._death = reason
            logger.error("%s", " ".join(reason.split()))

    def _wake(self) -> None:
        if self._loop is not None and self._arrived is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._arrived.set)

    async def _deliver(self, arrived: asyncio.Event) -> None:
        """Takes in what the pump brings, for as long as the engine lives; then ends every stream."""
        while True:
            await arrived.wait()
            arrived.clear()
            dead = self._death  # read first: the pump's last batch comes before its death
            while self._batches:
                now_s, outputs = self._batches.popleft()
                for part in slices(outputs):
                    await self._let_them_read(self._take(part, now_s))
            if dead is not None:
                self._fail_all(dead)
                return

    async def _let_them_read(self, streams: Sequence[OutputStream]) -> None:
        """A few turns of the loop: a consumer that keeps up finds the news of each step by itself, one that does not
        finds several steps in one."""
        for _ in range(TURNS):
            await asyncio.sleep(0)
            if not any(stream.has_news for stream in streams):
                return

    def _take(self, outputs: Sequence[EngineOutput], now_s: float) -> list[OutputStream]:
        """Give outputs to whom they concern; returns whom."""
        stopped, told = [], []
        for output in outputs:
            route = self._routes.get(output.id)
            if route is None:
                continue  # it was closed meanwhile
            self._tell_listener(route, output, now_s)
            try:
                ended = route.generation.take(output, now_s)
            except Exception as error:  # one request's text must not end the others
                route.stream.fail(RuntimeError(f"request {route.generation.request_id} failed: {error!r}"))
                ended = True
            if ended:
                self._end(output.id, output.finish_reason or "stop", now_s)
                if output.finish_reason is None:
                    stopped.append(output.id)
            route.stream.notify(route.generation)
            told.append(route.stream)
        if stopped:
            self._client.abort(stopped)
        return told

    def _tell_listener(self, route: _Route, output: EngineOutput, now_s: float) -> None:
        if not output.new_token_ids:
            return
        if self.listener is not None:
            if route.last_s is None:
                self.listener.on_first_token(route.num_prompt_tokens, now_s - route.arrival_s)
            gap_s = None if route.last_s is None else now_s - route.last_s
            self.listener.on_tokens(len(output.new_token_ids), gap_s)
        route.last_s = now_s

    def _end(self, request_id: str, reason: str, now_s: float) -> None:
        route = self._routes.pop(request_id)
        if self.listener is not None:
            self.listener.on_end(reason, now_s - route.arrival_s)

    def _fail_all(self, reason: str) -> None:
        now_s = time.monotonic()
        for request_id in list(self._routes):
            self._end(request_id, "error", now_s)
        for stream in set(self._streams.values()):
            stream.fail(EngineDeadError(reason))


def _params_size(params: Any) -> int:
    """Characters and ids in parameters that have to be tokenized or checked one by one."""
    if not isinstance(params, SamplingParams):
        return 0
    ids = (params.logit_bias, params.stop_token_ids, params.allowed_token_ids or ())
    return sum(map(len, ids)) + sum(map(len, params.bad_words))


def _size(prompt: Any) -> int:
    """Characters or token ids of a prompt of any form; 0 for what is none."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt") or prompt.get("prompt_token_ids")
    return len(prompt) if isinstance(prompt, str | Sequence) else 0


def slices(outputs: Sequence[EngineOutput]) -> Iterator[list[EngineOutput]]:
    """Cut into parts of at most `SLICE` outputs, in order, none with two of the same request."""
    part: dict[str, EngineOutput] = {}
    for output in outputs:
        if output.id in part or len(part) == SLICE:
            yield list(part.values())
            part = {}
        part[output.id] = output
    if part:
        yield list(part.values())
