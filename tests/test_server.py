"""Laws of the HTTP server, most of them seen through OpenAI's own client; the refusals through plain requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from fakes_client import HandClient, hand_client, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoserve import LLM, STAGES, SamplingParams, __version__
from nanoserve.api import cli, sse
from nanoserve.api.async_llm import AsyncLLM
from nanoserve.api.listen import Listener, address_of, bind
from nanoserve.api.outputs import RequestOutput
from nanoserve.api.protocol import ChatRequest, CompletionRequest
from nanoserve.api.responses import CompletionReply
from nanoserve.api.server import ApiServer, ServerOptions
from nanoserve.client import CoreProcessClient, InProcessClient
from nanoserve.request import EngineRequest, TokenLogprobs

SMALL = {"max_model_len": 256, "num_blocks": 129, "max_num_seqs": 16, "check_invariants": True}
PROMPT = "Once upon a time"
WAIT_S = 60.0
JSON = {"content-type": "application/json"}


class Served:
    """A server on a port, with its own thread and loop."""

    def __init__(self, llm: AsyncLLM, **options: Any) -> None:
        self.llm = llm
        self.server = ApiServer(llm, ServerOptions(**options))
        sock = bind("127.0.0.1", 0)
        self.url = address_of(sock)
        ready = threading.Event()

        async def run() -> None:
            self._listener = Listener(self.server, sock)
            await self._listener.run(ready.set)

        self._thread = threading.Thread(target=lambda: asyncio.run(run()))
        self._thread.start()
        assert ready.wait(WAIT_S)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=WAIT_S)

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=WAIT_S).raise_for_status().json()

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=content, headers=JSON, timeout=WAIT_S, **options)

    def until_idle(self, within_s: float = WAIT_S) -> None:
        """No request and no block is held."""
        deadline = time.monotonic() + within_s
        while True:
            blocks, stats = self.get("/debug/blocks"), self.get("/stats")
            if not blocks["tables"] and not stats["num_running"] and not stats["num_waiting"]:
                break
            assert time.monotonic() < deadline, f"still held: {blocks['tables']}, {stats}"
        assert blocks["num_free_blocks"] == blocks["num_blocks"] - 1

    def close(self) -> None:
        self.client.close()
        self._listener.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.llm.close()


@pytest.fixture(scope="module", params=[InProcessClient, CoreProcessClient])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    served = Served(AsyncLLM(config=STAGES["shared"], client=request.param, **SMALL), debug_endpoints=True)
    yield served
    served.close()


Choice = dict[str, Any]


def completion(client: openai.OpenAI, *, stream: bool, **body: Any) -> tuple[list[Choice], Any]:
    """Choices as plain values, and the usage; a stream is put together chunk by chunk."""
    body = {"model": "nanostory", "prompt": PROMPT, "temperature": 0, **body}
    if not stream:
        whole = client.completions.create(**body)
        return [choice.model_dump() for choice in whole.choices], whole.usage
    choices: dict[int, Choice] = {}
    usage = None
    for chunk in client.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        assert usage is None, "usage comes last"
        usage = chunk.usage
        for part in chunk.choices:
            grown = choices.setdefault(part.index, {"index": part.index, "text": "", "logprobs": None})
            assert grown.get("finish_reason") is None, "a choice ends once"
            grown |= {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
            grown["text"] += part.text
            if part.logprobs is not None:
                new = part.logprobs.model_dump()
                old = grown["logprobs"] or {name: [] for name in new}
                grown["logprobs"] = {name: old[name] + new[name] for name in new}
    return [choices[index] for index in sorted(choices)], usage


def chat(client: openai.OpenAI, *, stream: bool, **body: Any) -> tuple[list[Choice], Any]:
    body = {"model": "nanostory", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, **body}
    if not stream:
        whole = client.chat.completions.create(**body)
        found = [choice.model_dump(exclude_none=True) for choice in whole.choices]
        for choice in found:
            choice.setdefault("stop_reason", None)
        return found, whole.usage
    choices: dict[int, Choice] = {}
    usage = None
    for chunk in client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        assert usage is None, "usage comes last"
        usage = chunk.usage
        for part in chunk.choices:
            assert (part.delta.role == "assistant") == (part.index not in choices), "the first chunk has the role"
            grown = choices.setdefault(
                part.index, {"index": part.index, "message": {"role": "assistant", "content": ""}}
            )
            assert grown.get("finish_reason") is None, "a choice ends once"
            grown |= {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
            grown["message"]["content"] += part.delta.content or ""
            if part.logprobs is not None:
                grown.setdefault("logprobs", {"content": []})
                grown["logprobs"]["content"] += part.logprobs.model_dump(exclude_none=True)["content"]
    return [choices[index] for index in sorted(choices)], usage


# Through OpenAI's client


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 20},
        {},
        {"max_tokens": 12, "logprobs": 3},
        {"max_tokens": 8, "echo": True, "logprobs": 0},
        {"max_tokens": 0, "echo": True, "logprobs": 2},
        {"max_tokens": 60, "stop": ["girl", "zebra"]},
        {"max_tokens": 60, "stop": "girl", "extra_body": {"include_stop_str_in_output": True}},
        {"max_tokens": 8, "n": 3, "temperature": 1.0, "seed": 5},
        {"max_tokens": 6, "prompt": [[5, 6, 7], [8, 9]], "n": 2, "temperature": 1.0, "seed": 1},
        {"max_tokens": 12, "logit_bias": {"5": 3.5}, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"max_tokens": 12, "extra_body": {"repetition_penalty": 1.3, "min_tokens": 3, "bad_words": ["little"]}},
    ],
    ids=lambda body: ",".join(body) or "defaults",
)
def test_a_streamed_completion_is_the_whole_one_in_pieces(served: Served, body: dict[str, Any]) -> None:
    whole, usage = completion(served.client, stream=False, **body)
    pieces, streamed_usage = completion(served.client, stream=True, **body)
    for choice in whole:
        choice.pop("prompt_logprobs", None)
    assert pieces == whole
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        streamed_usage.prompt_tokens,
        streamed_usage.completion_tokens,
    )
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize(
    "body",
    [
        {"max_completion_tokens": 20},
        {"max_tokens": 9, "logprobs": True, "top_logprobs": 2},
        {"max_tokens": 9, "logprobs": True},
        {"max_tokens": 60, "stop": ["girl"]},
        {"max_tokens": 8, "n": 2, "temperature": 0.9, "seed": 3},
    ],
    ids=",".join,
)
def test_a_streamed_chat_is_the_whole_one_in_pieces(served: Served, body: dict[str, Any]) -> None:
    whole, usage = chat(served.client, stream=False, **body)
    pieces, streamed_usage = chat(served.client, stream=True, **body)
    assert pieces == whole
    assert usage.completion_tokens == streamed_usage.completion_tokens > 0


def test_chat_and_completion_say_the_same_to_the_same_tokens(served: Served) -> None:
    (by_prompt,), _ = completion(served.client, stream=False, max_tokens=16)
    (by_chat,), _ = chat(served.client, stream=False, max_tokens=16)
    assert by_chat["message"]["content"] == by_prompt["text"]


def test_logprobs_have_the_shapes_that_openai_gives_them(served: Served) -> None:
    (choice,), _ = completion(served.client, stream=False, max_tokens=5, logprobs=2, echo=True)
    lists = choice["logprobs"]
    assert "".join(lists["tokens"]) == choice["text"]
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    assert all(len(values) == len(lists["tokens"]) == 4 + 5 for values in lists.values())
    for offset, token in zip(lists["text_offset"], lists["tokens"], strict=True):
        assert choice["text"][offset:].startswith(token)
    for token, value, top in list(zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True))[
        1:
    ]:
        assert top[token] == value <= 0
        assert len(top) in (2, 3)
    (choice,), _ = chat(served.client, stream=False, max_tokens=5, logprobs=True, top_logprobs=3)
    for entry in choice["logprobs"]["content"]:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3


def test_finish_and_stop_reasons(served: Served) -> None:
    (choice,), _ = completion(served.client, stream=False, max_tokens=60, stop=["girl"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "girl")
    assert "girl" not in choice["text"]
    (choice,), _ = completion(served.client, stream=False, max_tokens=3)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_usage_counts_what_came_from_the_cache(served: Served) -> None:
    body = {"prompt": list(range(100, 148)), "max_tokens": 2, "extra_body": {"cache_salt": f"{time.time()}"}}
    _, first = completion(served.client, stream=False, **body)
    _, second = completion(served.client, stream=True, **body)
    assert (first.prompt_tokens_details.cached_tokens, second.prompt_tokens_details.cached_tokens) == (0, 32)
    _, other = completion(served.client, stream=False, **{**body, "extra_body": {"cache_salt": "other"}})
    assert other.prompt_tokens_details.cached_tokens == 0


def test_every_client_that_leaves_frees_everything(served: Served) -> None:
    def leave(i: int) -> None:
        body = {"prompt": f"{PROMPT} {i}", "max_tokens": 200, "ignore_eos": True, "stream": i % 4 > 0}
        with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), WAIT_S) as sock:
            data = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
            sock.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + data)
            if i % 4 == 1:
                sock.recv(1)  # the answer has begun
            elif i % 4 == 2:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset, not closed

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(40)))
    start_s = time.monotonic()
    served.until_idle()
    assert time.monotonic() - start_s < 5.0


def check_many_streams(served: Served, num_streams: int) -> None:
    """Every one of many streams at once tells the text of the offline engine."""
    prompts = [f"{PROMPT}, number {i}" * (1 + i % 5) for i in range(num_streams)]
    with LLM(config=STAGES["shared"], client=InProcessClient, **SMALL) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    expected = [(answer.text, len(answer.token_ids)) for output in outputs for answer in output.outputs]

    def ask(prompt: str) -> tuple[str, int]:
        (choice,), usage = completion(served.client, stream=True, prompt=prompt, max_tokens=24)
        return choice["text"], usage.completion_tokens

    with ThreadPoolExecutor(num_streams) as pool:
        told = list(pool.map(ask, prompts))
    assert told == expected


def test_no_stream_of_many_loses_or_doubles_a_token(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    check_many_streams(served, 40)
    served.until_idle()

    chunks = CompletionReply.chunks

    def with_an_echo(reply: CompletionReply, output: RequestOutput) -> Iterator[Choice]:
        once = list(chunks(reply, output))
        return iter(once if output.finished else once * 2)

    monkeypatch.setattr(CompletionReply, "chunks", with_an_echo)  # a planted bug
    with pytest.raises(AssertionError):
        check_many_streams(served, 2)
    served.until_idle()


def test_errors_arrive_as_the_clients_own_exceptions(served: Served) -> None:
    create = served.client.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-17", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="max_model_len") as too_long:
            create(model="nanostory", prompt="a " * 400, stream=stream)
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="do not fit in max_model_len=256"):
            create(model="nanostory", prompt=PROMPT, max_tokens=253, stream=stream)
    with pytest.raises(openai.BadRequestError, match="tools is not supported") as unsupported:
        served.client.chat.completions.create(
            model="nanostory",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    assert unsupported.value.param == "tools"


def test_a_request_id_in_use_is_refused(served: Served) -> None:
    body = {"model": "nanostory", "prompt": PROMPT, "max_tokens": 200}
    extra = {"request_id": "twice", "ignore_eos": True}
    with served.client.completions.create(**body, stream=True, extra_body=extra) as stream:
        assert next(iter(stream)).id == "cmpl-twice"
        with pytest.raises(openai.BadRequestError, match="'twice' is in use"):
            served.client.completions.create(**body, extra_body=extra)


def test_the_rest_of_the_endpoints(served: Served) -> None:
    assert served.get("/health") == {"status": "ok"}
    assert served.get("/version") == {"version": __version__}
    (model,) = served.client.models.list().data
    assert (model.id, model.max_model_len) == ("nanostory", 256)
    assert served.client.models.retrieve("nanostory").id == "nanostory"
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("other/model")
    ids = served.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json()
    assert ids["count"] == len(ids["tokens"]) == len(ids["token_strs"]) == 4
    assert served.post("/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": PROMPT}
    messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    assert served.post("/tokenize", {"messages": messages}).json()["tokens"] == ids["tokens"]
    completion(served.client, stream=False, max_tokens=2)
    assert [step["step"] for step in served.get("/debug/trace?limit=1")["steps"]] == [served.get("/stats")["num_steps"]]
    page = httpx.get(served.url)
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page.text), "works offline"


def test_metrics_have_vllms_names_and_add_up(served: Served) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(f"{served.url}/metrics").text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    before = read()
    _, usage = completion(served.client, stream=True, max_tokens=7, n=2, temperature=1, extra_body={"ignore_eos": True})
    after = read()

    def grew(name: str, label: str = "") -> float:
        key = f'vllm:{name}{{{label}model_name="nanostory"}}'
        return after[key] - before[key]

    assert usage.completion_tokens == 14 == grew("generation_tokens_total")
    assert grew("prompt_tokens_total") == 8
    assert grew("time_to_first_token_seconds_count") == 2
    assert grew("inter_token_latency_seconds_count") == 12
    assert grew("request_success_total", 'finished_reason="length",') == 2
    assert grew("prefix_cache_queries_total") == 8
    assert grew("num_preemptions_total") == 0
    assert after['vllm:num_requests_running{model_name="nanostory"}'] == 0
    for name in ("num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total"):
        assert f'vllm:{name}{{model_name="nanostory"}}' in after


def test_when_the_core_is_killed_streams_end_with_an_error_and_health_says_so() -> None:
    served = Served(AsyncLLM(config=STAGES["shared"], client=CoreProcessClient, **SMALL))
    try:
        body = {"model": "nanostory", "prompt": PROMPT, "max_tokens": 250}
        stream = iter(served.client.completions.create(**body, stream=True, extra_body={"ignore_eos": True}))
        next(stream)
        start_s = time.monotonic()
        os.kill(served.llm._client._child.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(openai.APIError, match="SIGKILL"):
            list(stream)
        assert time.monotonic() - start_s < 2.0
        with pytest.raises(openai.InternalServerError, match="SIGKILL"):
            served.client.completions.create(**body)
        health = httpx.get(f"{served.url}/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
    finally:
        served.close()


# Refusals: an application without a port, an engine in the hand of the test


def answer_at_once(request: EngineRequest) -> list[Any]:
    """Two tokens and the end."""
    count = request.params.logprobs
    logprobs = None if count is None else [TokenLogprobs([7], [-0.5], [1]), TokenLogprobs([8], [float("-inf")], [2])]
    prompt = None
    if request.params.prompt_logprobs is not None:
        prompt = [None, *(TokenLogprobs([i], [-1.0], [1]) for i in request.prompt_token_ids[1:])]
    output = tokens(request, 7, 8, end="length")
    fields = {name: getattr(output, name) for name in output.__struct_fields__}
    return [type(output)(**{**fields, "logprobs": logprobs, "prompt_logprobs": prompt})]


class App:
    """Requests to an `ApiServer` in this thread."""

    def __init__(
        self,
        answer: Callable[[EngineRequest], list[Any]] | None = answer_at_once,
        *,
        engine: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        client = hand_client(answer)
        self.llm = AsyncLLM(client=client, **(engine or {}))
        self.engine: HandClient = client.made[0]
        self.server = ApiServer(self.llm, ServerOptions(**options))
        self.runner = asyncio.Runner()
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.server.app), base_url="http://test")

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.run(self.http.post(path, content=content, headers=JSON | (headers or {})))

    def run(self, work: Any) -> Any:
        async def in_time() -> Any:
            return await asyncio.wait_for(work, WAIT_S)

        return self.runner.run(in_time())

    def close(self) -> None:
        self.run(self.http.aclose())
        self.llm.close()
        self.runner.close()


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with contextlib.closing(App(max_request_bytes=2000)) as app:
        yield app


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["code"], str)
    return error


BAD_COMPLETIONS: list[tuple[Any, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b'{"prompt": "\xff"}', None),
    (b'{"prompt": "\\ud800"}', None),
    (b'{"prompt": "x", "temperature": 1e999}', None),
    (b'{"prompt": "x", "seed": ' + b"9" * 1500 + b"}", "seed"),
    (b"[" * 1900, None),
    ({}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [5, "x"]}, "prompt"),
    ({"prompt": [9999]}, "prompt"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "temperature": 2.1}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": 10**9}, "n"),
    ({"prompt": "x", "n": 2, "temperature": 0}, "n"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "max_tokens": -1, "echo": True}, "max_tokens"),
    ({"prompt": "x", "stop": ["a"] * 5}, "stop"),
    ({"prompt": "x", "stop": ""}, "stop"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"9999": 1}}, "logit_bias"),
    ({"prompt": "x", "priority": 1}, "priority"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"prompt": "x", "request_id": ""}, "request_id"),
    ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"prompt": "x", "no_such_field": None}, "no_such_field"),
]


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS, ids=lambda value: repr(value)[:50])
def test_every_bad_completion_is_refused_by_name(app: App, body: Any, param: str | None) -> None:
    error = error_of(app.post("/v1/completions", body), 400)
    assert error["param"] == param
    if param == "max_tokens":
        assert f"got {body[param]}" in error["message"], "another value than the one that was sent"
    assert app.llm.num_open == 0


USER = {"role": "user", "content": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
BAD_CHATS: list[tuple[Any, str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{**USER, "name": "Tom"}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
    ({"messages": [USER], "logprobs": 2}, "logprobs"),
    ({"messages": [USER], "max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens"),
    ({"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
]


@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=lambda value: repr(value)[:50])
def test_every_bad_chat_is_refused_by_name(app: App, body: Any, param: str) -> None:
    assert error_of(app.post("/v1/chat/completions", body), 400)["param"] == param


def test_no_id_that_cannot_be_one_is_decoded(app: App) -> None:
    for token_id in (-1, 2**31, 10**19):
        assert error_of(app.post("/detokenize", {"tokens": [5, token_id]}), 400)["param"] == "tokens"
    assert app.post("/detokenize", {"tokens": [2**31 - 1]}).json() == {"prompt": ""}


def test_a_null_means_not_given(app: App) -> None:
    fields = ("n", "temperature", "stop", "logprobs", "stream", "tools", "best_of", "max_tokens", "logit_bias")
    assert app.post("/v1/completions", {"prompt": "x", **dict.fromkeys(fields)}).status_code == 200


def test_json_knows_no_infinity(app: App) -> None:
    answer = app.post("/v1/completions", {"prompt": "x", "logprobs": 1}).json()
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -9999.0]


def test_other_refusals_have_the_shape_too(app: App) -> None:
    assert error_of(app.post("/v1/completions", b"x" * 2001), 413)["code"] == "request_too_large"
    assert error_of(app.post("/v1/completions", b"x" * 10**6), 413)["code"] == "request_too_large"
    assert error_of(app.post("/v1/completions", {}, {"content-type": "text/plain"}), 415)
    assert error_of(app.post("/no/such/path", {}), 404)
    assert error_of(app.run(app.http.get("/v1/completions")), 405)
    assert error_of(app.run(app.http.get("/debug/blocks")), 404), "without --debug-endpoints"
    assert error_of(app.post("/v1/completions", {"prompt": "x", "model": "other"}), 404)["param"] == "model"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELD_NAMES = st.sampled_from(
    [*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__, "tokens", "return_token_strs"]
)


@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]),
    body=st.binary(max_size=60)
    | JSON_VALUES.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(FIELD_NAMES | st.text(max_size=5), JSON_VALUES, max_size=4).map(
        lambda fields: json.dumps({"prompt": "x", **fields}).encode()
    ),
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_malformed_request_gets_a_4xx_with_the_shape(app: App, path: str, body: bytes) -> None:
    response = app.post(path, body)
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, response.text
        error_of(response, response.status_code)


def test_the_api_key_guards_all_but_health_and_metrics() -> None:
    with contextlib.closing(App(api_key="secret")) as app:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            error = error_of(app.post("/v1/completions", {"prompt": "x"}, headers), 401)
            assert error["code"] == "invalid_api_key"
        for path in ("/v1/models", "/stats", "/v1/models/nanostory"):
            error_of(app.run(app.http.get(path)), 401)
        for path in ("/health", "/metrics", "/version", "/", "/openapi.json"):
            assert app.run(app.http.get(path)).status_code == 200
        right = {"authorization": "Bearer secret"}
        assert app.post("/v1/completions", {"prompt": "x"}, right).status_code == 200


def test_beyond_max_waiting_clients_are_told_to_come_back() -> None:
    with contextlib.closing(App(None, engine={"max_num_seqs": 1, "max_waiting": 1})) as app:

        async def crowd() -> httpx.Response:
            body = {"prompt": "x"}
            open_requests = [asyncio.ensure_future(app.http.post("/v1/completions", json=body)) for _ in range(2)]
            while app.llm.num_open < 2:
                await asyncio.sleep(0)
            refused = await app.http.post("/v1/completions", json=body)
            app.engine.say(*(tokens(request, 7, end="stop") for request in app.engine.submitted))
            assert [(await response).status_code for response in open_requests] == [200, 200]
            return refused

        refused = app.run(crowd())
        assert error_of(refused, 503)["code"] == "queue_full"
        assert refused.headers["retry-after"] == "1"


async def stream_by_hand(app: App, on_body: Callable[[bytes], bool]) -> None:
    """One streaming request over plain ASGI. After each piece of the answer `on_body` says whether the client stays."""
    data = json.dumps({"prompt": "x", "stream": True, "max_tokens": 100}).encode()
    left = asyncio.Event()
    inbox = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        is_last = message["type"] == "http.response.body" and not message["body"]
        if not is_last and not on_body(message.get("body", b"")):
            left.set()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    await app.server.app(scope, receive, send)


def test_one_event_a_step_for_a_client_that_keeps_up() -> None:
    with contextlib.closing(App(None)) as app:
        events: list[bytes] = []
        word = app.llm.get_tokenizer().encode(" dog", add_special_tokens=False)

        def next_step(body: bytes) -> bool:
            events.append(body)
            step = len(events)  # the first is the start of the response
            if step <= 10:
                app.engine.say(tokens(app.engine.submitted[0], *word, end="length" if step == 10 else None))
            return True

        app.run(stream_by_hand(app, next_step))
        assert [event.count(b"data:") for event in events] == [0] + [1] * 11
        assert all(json.loads(event[6:])["choices"][0]["text"] == " dog" for event in events[1:-1])
        assert events[-1] == sse.DONE


def check_leaving(app: App) -> None:
    async def leave() -> None:
        await asyncio.wait_for(stream_by_hand(app, lambda body: False), 1.0)

    app.run(leave())
    assert app.engine.aborted == [app.engine.submitted[0].id]
    assert app.llm.num_open == 0


def test_a_client_that_leaves_ends_its_request_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(App(None)) as app:
        check_leaving(app)

    async def deaf(work: Any, receive: Any) -> Any:
        return await work

    monkeypatch.setattr(sse, "run_while_connected", deaf)  # a planted bug
    with contextlib.closing(App(None)) as app, pytest.raises(TimeoutError):
        check_leaving(app)


def drained_with_half_a_body(app: App) -> httpx.Response:
    """The answer to a client that has sent half of what it announced when the server is told to end."""
    waits = asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield b'{"prompt":'
        waits.set()
        await asyncio.Event().wait()

    async def drain() -> httpx.Response:
        answer = asyncio.ensure_future(app.http.post("/v1/completions", content=half(), headers=JSON))
        await waits.wait()
        app.server.drain()
        done, _ = await asyncio.wait({answer}, timeout=1.0)
        assert done, "the rest of the body is waited for"
        return await answer

    return app.run(drain())


def test_no_half_sent_body_holds_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(App()) as app:
        assert error_of(drained_with_half_a_body(app), 503)["code"] == "shutting_down"
    monkeypatch.setattr(ApiServer, "drain", lambda server: setattr(server, "draining", True))  # a planted bug
    with contextlib.closing(App()) as app, pytest.raises(AssertionError, match="waited for"):
        drained_with_half_a_body(app)


def failures_of_an_unread_end(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Tracebacks that are logged when the server ends before an open stream does."""
    caplog.clear()
    served = Served(AsyncLLM(client=hand_client()))
    body = {"prompt": "x", "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=WAIT_S) as response:
        assert response.status_code == 200
        served.close()
    assert any("timeout graceful shutdown exceeded" in record.message for record in caplog.records)
    return [record for record in caplog.records if record.exc_info]


def test_a_stream_that_is_cut_off_at_the_end_is_no_failure(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.api.listen.LAST_WRITES_S", 0.1)
    assert not failures_of_an_unread_end(caplog)

    async def passes_on(listener: Any, scope: Any, receive: Any, send: Any) -> None:
        await listener._server.app(scope, receive, send)

    monkeypatch.setattr(Listener, "_app", passes_on)  # a planted bug
    assert failures_of_an_unread_end(caplog)


def test_a_request_that_takes_too_long_is_ended_and_freed() -> None:
    with contextlib.closing(App(None, request_timeout_s=0.05)) as app:
        assert error_of(app.post("/v1/completions", {"prompt": "x"}), 504)["code"] == "timeout"
        events = app.post("/v1/completions", {"prompt": "x", "stream": True}).text.strip().split("\n\n")
        assert [json.loads(event.removeprefix("data: "))["error"]["code"] for event in events] == ["timeout"]
        assert sorted(app.engine.aborted) == sorted(request.id for request in app.engine.submitted)
        assert len(app.engine.aborted) == 2


def test_priority_reaches_the_engine_where_the_policy_heeds_it() -> None:
    with contextlib.closing(App(engine={"policy": "priority"})) as app:
        assert app.post("/v1/completions", {"prompt": "x", "priority": -3}).status_code == 200
        assert app.engine.submitted[0].priority == -3


def test_the_openapi_document_describes_every_route(app: App) -> None:
    document = app.run(app.http.get("/openapi.json")).json()
    served = {re.sub(r"\{.*", "", route.path).rstrip("/") for route in app.server.app.routes}  # type: ignore[attr-defined]
    assert {path.rstrip("/") for path in document["paths"]} == served
    fields = document["components"]["schemas"]["CompletionRequest"]
    assert fields["additionalProperties"] is False
    assert fields["required"] == ["prompt"]


# The command


def test_the_command_serves_until_a_signal_and_leaves_in_good_order() -> None:
    command = [sys.executable, "-m", "nanoserve", "serve", "--port", "0", "--max-model-len", "2000"]
    command += ["--num-gpu-blocks-override", "200"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            found = re.fullmatch(r"nanoserve is ready: nanostory at (http://127\.0\.0\.1:\d+)\n", ready)
            assert found, ready
            body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{found[1]}/v1/completions", json=body, timeout=WAIT_S) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                events = [line for line in lines if line]
            assert events[-1] == "data: [DONE]"
            assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def test_no_answer_waits_for_an_acknowledgement() -> None:
    """asyncio switches Nagle's algorithm off, which holds a second small write back for 40 ms, on TCP sockets only."""
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        with socket.create_connection(sock.getsockname(), WAIT_S), sock.accept()[0] as accepted:

            async def is_undelayed() -> bool:
                transport, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, accepted)
                options = transport.get_extra_info("socket")
                undelayed = options.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                transport.close()
                return bool(undelayed)

            assert asyncio.run(is_undelayed())


def test_what_cannot_be_served_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def complaint(*arguments: str) -> str:
        assert cli.main(["serve", *arguments]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1, err
        return err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port} on 127.0.0.1 cannot be used" in complaint("--port", port)
    assert "given twice" in complaint("nanostory", "--model", "nanostory")
    assert "is not an address" in complaint("--host", "no such host")
    monkeypatch.delitem(sys.modules, "nanoserve.api.listen")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'nanoserve[serve]'" in complaint()
