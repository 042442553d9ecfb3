"""`LLM`: offline generation in the caller's own loop. The names mirror vLLM's (`vllm/entrypoints/llm.py`).

Owns the requests from submission to their last output, and the promise that none of them outlives the call that
made it. Reaches the engine through an `EngineClient` and knows nothing behind it; what a prompt may be is
`inputs.py`, what an output means is `generation.py`. Laws: tests/test_llm.py.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nanoserve.api.engine_options import engine_config
from nanoserve.api.generation import Generation
from nanoserve.api.inputs import InputProcessor, PromptLike, TokenPrompt, as_prompts, check_priority, one_each
from nanoserve.api.outputs import RequestOutput
from nanoserve.api.tokenizer import Tokenizer
from nanoserve.checkpoint import TEXT_FILES, resolve_model_dir
from nanoserve.client import EngineDeadError, whole_despite_interrupts
from nanoserve.request import EngineOutput, OutputKind, SamplingParams

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig
    from nanoserve.record import Observer
    from nanoserve.request import EngineInfo, EngineRequest

Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
ABORT_TIMEOUT_S = 5.0


class LLM:
    """An engine and its tokenizer, for one thread.

    `stage` names one of `STAGES` (default: the last one built), `config` is an `EngineConfig` of your own; any
    field of it can be overridden by keyword, under its own name or vLLM's. `observer` sees every step. Raises
    TypeError for an unknown keyword, ValueError for a model or a config that cannot work.

    Unlike vLLM, the sampling defaults of a checkpoint's generation_config.json are not applied; its EOS ids are.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        stage: str | None = None,
        config: EngineConfig | None = None,
        observer: Observer | None = None,
        **options: Any,
    ) -> None:
        if model is not None:
            options["model"] = model
        self.config = engine_config(stage=stage, config=config, **options)
        self._tokenizer = Tokenizer.load(resolve_model_dir(self.config.model, patterns=TEXT_FILES))
        self._client = self.config.client(self.config, observer=observer)
        self._inputs = InputProcessor(self._client.info, self._tokenizer)
        self._request_ids = map(str, itertools.count())
        self._routes: dict[str, tuple[Generation, dict[str, Generation]]] = {}  # live id -> whose, and whose news
        self._aborting: set[str] = set()  # asked for, not yet confirmed
        self._users = Counter[int]()  # open generations of each thread
        self._users_lock = threading.Lock()
        self._closed = False

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """All answers, in the order of the prompts: a text, token ids, {"prompt_token_ids": ids}, or a list of them.

        Every prompt is checked before any is submitted. Generation ends with `length` where prompt and answer reach
        max_model_len, also when max_tokens asks for more. `use_tqdm` shows a progress bar on a terminal. Raises
        ValueError for bad input, EngineDeadError when the engine dies.
        """
        prepared = self._prepare_texts(prompts, sampling_params, priority, cache_salt, OutputKind.FINAL_ONLY)
        return self._collect(prepared, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """The same for one conversation or a list of them, put into text by the model's chat template."""
        prepared = self._prepare_chats(messages, sampling_params, priority, cache_salt, OutputKind.FINAL_ONLY)
        return self._collect(prepared, use_tqdm)

    def stream(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: Params = None,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | Sequence[str] | None = None,
    ) -> Generator[RequestOutput]:
        """News of all prompts as they come, as `output_kind` of the parameters says: cumulative, deltas, or the end.

        The call checks; the iterator works, and closing it early aborts what still runs. Requests are numbered in
        the order of the prompts, from 0 in a new `LLM`.
        """
        return self._run(self._prepare_texts(prompts, sampling_params, priority, cache_salt))

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | Sequence[str] | None = None,
    ) -> Generator[RequestOutput]:
        """`stream` for conversations."""
        return self._run(self._prepare_chats(messages, sampling_params, priority, cache_salt))

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def info(self) -> EngineInfo:
        """Sizes of the engine as it was built."""
        return self._client.info

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing happens, while requests hold blocks."""
        return self._client.call("reset_prefix_cache")

    def close(self) -> None:
        """Stop the engine; idempotent. Nothing is left running."""
        self._closed = True
        self._routes.clear()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # From prompts to generations: nothing is submitted before all of them have passed.

    def _prepare_texts(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: Params,
        priority: int | Sequence[int] | None,
        cache_salt: str | Sequence[str] | None,
        kind: OutputKind | None = None,
    ) -> list[Generation]:
        each = as_prompts(prompts)
        salts = one_each("cache_salt", cache_salt, len(each))
        checked = [self._inputs.prompt(prompt, salt) for prompt, salt in zip(each, salts, strict=True)]
        return self._prepare(checked, params, priority, kind)

    def _prepare_chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params,
        priority: int | Sequence[int] | None,
        cache_salt: str | Sequence[str] | None,
        kind: OutputKind | None = None,
    ) -> list[Generation]:
        chats: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        salts = one_each("cache_salt", cache_salt, len(chats))
        checked = [self._inputs.chat(chat, salt) for chat, salt in zip(chats, salts, strict=True)]
        return self._prepare(checked, params, priority, kind)

    def _prepare(
        self,
        prompts: list[TokenPrompt],
        params: Params,
        priority: int | Sequence[int] | None,
        kind: OutputKind | None,
    ) -> list[Generation]:
        if self._closed:
            raise RuntimeError("this LLM is closed; build a new one.")
        params = one_each("sampling_params", SamplingParams() if params is None else params, len(prompts))
        checked = {id(given): self._inputs.params(given, kind) for given in params}  # most often one for all
        priorities = one_each("priority", 0 if priority is None else priority, len(prompts))
        for urgency in priorities:
            check_priority(urgency, self.config.policy)
        now_s = time.monotonic()
        return [
            Generation(next(self._request_ids), prompt, checked[id(given)], self._tokenizer, urgency, now_s)
            for prompt, given, urgency in zip(prompts, params, priorities, strict=True)
        ]

    # The loop

    def _collect(self, generations: list[Generation], use_tqdm: bool) -> list[RequestOutput]:
        with closing(self._run(generations)) as outputs:  # at once, though a traceback may keep it alive
            watched = _with_progress(outputs, len(generations)) if use_tqdm and sys.stderr.isatty() else outputs
            done = {output.request_id: output for output in watched}
        return [done[generation.request_id] for generation in generations]

    def _run(self, generations: list[Generation]) -> Generator[RequestOutput]:
        thread = self._enter()
        news: dict[str, Generation] = {}
        unfinished = {generation.request_id for generation in generations}
        try:
            for generation in generations:
                for request in generation.requests:
                    self._submit(request, generation, news)
            while unfinished:
                if not news:  # else another stream's steps have brought some
                    self._step()
                while news:
                    output = news.pop(next(iter(news))).news()
                    if output is not None:
                        unfinished -= {output.request_id} if output.finished else set()
                        yield output
        finally:
            try:
                self._abort(request.id for generation in generations for request in generation.requests)
            finally:
                self._leave(thread)

    def _enter(self) -> int:
        """One thread at a time: two that poll would take each other's news. RuntimeError for the second."""
        thread = threading.get_ident()
        with self._users_lock:
            if self._users and thread not in self._users:
                raise RuntimeError(
                    "another thread is generating with this LLM, which serves one at a time; wait for it, or use "
                    "AsyncLLM, which batches the requests of many."
                )
            self._users[thread] += 1
        return thread

    def _leave(self, thread: int) -> None:
        with self._users_lock:
            self._users[thread] -= 1
            self._users += Counter()  # drops those at 0

    def _submit(self, request: EngineRequest, generation: Generation, news: dict[str, Generation]) -> None:
        try:
            self._client.submit(request)
            self._routes[request.id] = (generation, news)
        except BaseException:  # an interrupt may come after the engine has taken it
            self._client.abort([request.id])
            raise

    def _step(self, timeout: float | None = None) -> None:
        """Take what the engine has to say to whom it concerns; abort what a stop string has ended."""
        if self._closed:
            raise RuntimeError("this LLM was closed while a stream was open.")
        try:
            outputs = self._client.poll(timeout)
            with whole_despite_interrupts():
                self._route(outputs)
        except KeyboardInterrupt:
            self._abandon()
            raise

    def _route(self, outputs: Sequence[EngineOutput]) -> None:
        now_s, ended = time.monotonic(), []
        for output in outputs:
            if output.finish_reason is not None:
                self._aborting.discard(output.id)
            if output.id not in self._routes:
                continue  # it was aborted meanwhile
            generation, news = self._routes[output.id]
            news[generation.request_id] = generation
            if generation.take(output, now_s):
                del self._routes[output.id]
                if output.finish_reason is None:
                    ended.append(output.id)
        if ended:
            self._aborting.update(ended)
            self._client.abort(ended)

    def _abort(self, request_ids: Iterable[str]) -> None:
        """Abort those that are live, and return once the engine holds none of them, nor any aborted before."""
        live = [request_id for request_id in request_ids if self._routes.pop(request_id, None) is not None]
        if self._closed or not (live or self._aborting):
            return
        with suppress(EngineDeadError):  # then nothing is live, and the next call says so
            self._aborting.update(live)
            self._client.abort(live)
            self._await_aborts()

    def _await_aborts(self) -> None:
        """An interrupt may have come before the engine knew of a request, so the wait for its end has one too."""
        deadline_s = time.monotonic() + ABORT_TIMEOUT_S
        while self._aborting and time.monotonic() < deadline_s:
            self._step(timeout=0.1)
        self._aborting.clear()

    def _abandon(self) -> None:
        """After an interrupt, which may have taken news with it: end every request, of other streams too, and forget
        every cached block."""
        with suppress(EngineDeadError):
            self._aborting.update(self._routes)
            self._client.abort(list(self._routes))
            self._await_aborts()
            self._route([EngineOutput(id=i, new_token_ids=[], finish_reason="abort") for i in self._routes])
            self.reset_prefix_cache()


def _with_progress(outputs: Iterator[RequestOutput], total: int) -> Iterator[RequestOutput]:
    """The same outputs, with a bar on stderr that counts prompts and output tokens."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task, num_tokens, start_s = progress.add_task("", total=total, speed=""), 0, time.monotonic()
        for output in outputs:
            num_tokens += sum(len(answer.token_ids) for answer in output.outputs)
            speed = num_tokens / (time.monotonic() - start_s)
            progress.update(task, advance=1, speed=f"{speed:.0f} tokens/s")
            yield output
