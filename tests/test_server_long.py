"""The server under crowds, deserters and nonsense: `nanoserve serve` as people run it, minutes of it.

The load comes from a niced process of its own (tests/stream_load.py). What was measured is printed: `pytest -s`.
NANOSERVE_TEST_STREAMS, _DESERTERS and _FUZZED make it shorter.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve_process import ServeProcess, serve

from nanoserve import LLM, STAGES, SamplingParams
from nanoserve.client import InProcessClient
from nanoserve.lab.stories import story

pytestmark = pytest.mark.slow

NUM_STREAMS = int(os.environ.get("NANOSERVE_TEST_STREAMS", "300"))
NUM_DESERTERS = int(os.environ.get("NANOSERVE_TEST_DESERTERS", "200"))
NUM_FUZZED = int(os.environ.get("NANOSERVE_TEST_FUZZED", "2000"))
NUM_WARM_UP = NUM_FUZZED // 10
LOAD_LIMIT_S = 600.0
ENGINE = {"max_model_len": 1024, "num_blocks": 8193, "max_num_seqs": 128}
SERVE = ("--max-model-len", "1024", "--num-gpu-blocks-override", "8193", "--max-num-seqs", "128")
MAX_BYTES = 100_000


@pytest.fixture(autouse=True, scope="module")
def enough_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@pytest.fixture(scope="module")
def served() -> Iterator[ServeProcess]:
    with serve(*SERVE, "--debug-endpoints", "--max-request-bytes", str(MAX_BYTES)) as served:
        yield served


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


# A crowd


def crowd(num_streams: int) -> list[dict[str, Any]]:
    """Bodies with prompts of 10 to 400 tokens, some with a common beginning, and answers of 8 to 96."""
    rng = random.Random(3)
    shared = story(rng)
    bodies = []
    for i in range(num_streams):
        text = " ".join(story(rng) for _ in range(rng.randint(1, 3)))
        prompt = shared + text[: rng.randint(40, 1200)] if i % 3 == 0 else text[: rng.randint(40, 1600)]
        body = {"prompt": prompt, "max_tokens": rng.randint(8, 96), "temperature": 0.0, "ignore_eos": i % 2 == 0}
        bodies.append(body)
    return bodies


def offline(bodies: list[dict[str, Any]]) -> list[tuple[str, int, str | None]]:
    """Text, number of tokens and finish reason of every body, from an engine without processes or HTTP."""
    params = [SamplingParams(**{k: v for k, v in body.items() if k != "prompt"}) for body in bodies]
    with LLM(config=STAGES["shared"], client=InProcessClient, **ENGINE) as llm:
        outputs = llm.generate([body["prompt"] for body in bodies], params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return [(answer.text, len(answer.token_ids), answer.finish_reason) for answer in answers]


def watch_health(served: ServeProcess, load: subprocess.Popen[bytes]) -> list[float]:
    """Seconds that /health took, one question after the other, while the load runs."""
    took: list[float] = []
    connection = served.connect()
    deadline_s = time.monotonic() + LOAD_LIMIT_S
    while True:
        start_s = time.monotonic()
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read()) == {"status": "ok"}
        took.append(time.monotonic() - start_s)
        try:
            load.wait(0.02)  # the pace of the questions
        except subprocess.TimeoutExpired:
            assert time.monotonic() < deadline_s, "the load does not end"
            continue
        connection.close()
        return took


def test_every_one_of_many_streams_tells_the_offline_text_and_health_answers_meanwhile(
    served: ServeProcess, tmp_path: Path
) -> None:
    bodies = crowd(NUM_STREAMS)
    expected = offline(bodies)
    (tmp_path / "bodies.json").write_text(json.dumps(bodies))
    script, answers = Path(__file__).with_name("stream_load.py"), tmp_path / "answers.json"
    server_cpu_s = served.cpu_s()
    command = [sys.executable, str(script), served.url, str(tmp_path / "bodies.json"), str(answers)]
    with subprocess.Popen(command) as load:
        try:
            health_s = watch_health(served, load)
        finally:
            load.kill()
    assert load.returncode == 0
    result = json.loads(answers.read_text())
    wall_s, found = result["wall_s"], result["answers"]
    print(
        f"\n{NUM_STREAMS} streams, {sum(tokens for _, tokens, _ in expected)} tokens in {wall_s:.1f} s; "
        f"TTFT P50 {percentile([a.get('ttft_s', 0.0) for a in found], 0.5):.2f} s; "
        f"CPU: load {result['cpu_s'] / wall_s:.0%}, server {(served.cpu_s() - server_cpu_s) / wall_s:.0%} of one core; "
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    print(
        f"/health, {len(health_s)} times: P50 {percentile(health_s, 0.5) * 1e3:.1f} ms, "
        f"P99 {percentile(health_s, 0.99) * 1e3:.1f} ms, max {max(health_s) * 1e3:.1f} ms"
    )
    assert [answer["error"] for answer in found if "error" in answer] == []
    told = [(answer["text"], answer["completion_tokens"], answer["finish_reason"]) for answer in found]
    different = [(i, e, t) for i, (e, t) in enumerate(zip(expected, told, strict=True)) if e != t]
    assert different == [], f"{len(different)} of {len(found)} answers differ, the first: {different[0]}"
    assert percentile(health_s, 0.99) < 1.0
    served.until_idle(5.0)


# Deserters


def desert(served: ServeProcess, i: int) -> None:
    """Read the beginning of an answer, then go away: by closing, by a reset, or by half a goodbye and then closing."""
    body = {"prompt": f"Once upon a time, number {i}", "max_tokens": 900, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    with socket.create_connection(("127.0.0.1", served.port), 60.0) as sock:
        sock.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + data)
        received = b""
        while b"data: " not in received:
            received += sock.recv(4096)
            assert received.startswith(b"HTTP/1.1 200"), received
        if i % 3 == 1:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        elif i % 3 == 2:
            sock.shutdown(socket.SHUT_WR)


def test_every_deserted_stream_gives_back_its_blocks_within_a_second(served: ServeProcess) -> None:
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda i: desert(served, i), range(NUM_DESERTERS)))
    took_s = served.until_idle(1.0)
    print(f"\n{NUM_DESERTERS} left in the middle; everything was back {took_s * 1e3:.0f} ms after the last one")


# Nonsense

STREAMS = ("/v1/completions", "/v1/chat/completions")
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1, 2]},
}
INTEGERS = ("n", "max_tokens", "seed", "top_k", "min_tokens", "prompt_logprobs", "priority")
NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty")
BOOLEANS = ("stream", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")

paths = st.sampled_from(sorted(VALID))
sampling_paths = st.sampled_from(STREAMS)
texts = st.text(max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=8), json_values, min_size=1, max_size=3)
no_number = texts | st.booleans() | st.lists(st.integers(), max_size=2) | objects
huge = st.integers(10**19, 10**400) | st.integers(-(10**400), -(10**19))
unknown_names = st.text(min_size=1, max_size=12).map(lambda name: f"x-{name}")


def with_field(path: str, name: str, value: Any) -> tuple[str, bytes]:
    return path, json.dumps({**VALID[path], name: value}).encode()


def nested(depth: int, path: str) -> tuple[str, bytes]:
    return path, b'{"prompt":' + b"[" * depth + b"]" * depth + b"}"


# Every request is wrong by how it is made. (path, body)
nonsense = st.one_of(
    st.tuples(paths, st.binary(max_size=200).map(lambda data: b"\xff" + data)),
    st.tuples(paths, st.binary(min_size=1, max_size=20)).map(
        lambda made: (made[0], b'{"prompt": "' + made[1].replace(b'"', b"") + b'\xff"}')
    ),
    st.tuples(paths, st.integers(1, 20)).map(lambda made: (made[0], json.dumps(VALID[made[0]]).encode()[: -made[1]])),
    st.tuples(paths, json_values.filter(lambda value: not isinstance(value, dict))).map(
        lambda made: (made[0], json.dumps(made[1]).encode())
    ),
    st.builds(with_field, paths, unknown_names, json_values),
    st.builds(with_field, sampling_paths, st.sampled_from([*INTEGERS, *NUMBERS]), no_number),
    st.builds(with_field, sampling_paths, st.sampled_from(INTEGERS), huge | st.floats(0.1, 0.9)),
    st.builds(with_field, sampling_paths, st.sampled_from(NUMBERS[:-1]), huge),
    st.builds(with_field, sampling_paths, st.sampled_from(BOOLEANS), st.integers() | texts | objects),
    st.builds(
        with_field, sampling_paths, st.sampled_from(LISTS), st.integers() | texts | st.lists(objects, min_size=1)
    ),
    st.builds(with_field, sampling_paths, st.just("logit_bias"), st.lists(st.integers()) | texts),
    st.builds(with_field, st.just("/v1/completions"), st.just("prompt"), st.integers() | objects | st.just([])),
    st.builds(with_field, st.just("/v1/chat/completions"), st.just("messages"), st.integers() | objects | st.just([])),
    st.builds(
        with_field, st.just("/detokenize"), st.just("tokens"), st.lists(huge | texts, min_size=1, max_size=3) | texts
    ),
    st.builds(with_field, sampling_paths, st.just("max_tokens"), st.integers(10_000, 10**6)),
    st.builds(nested, st.integers(50, 20_000), st.just("/v1/completions")),
    st.tuples(paths, st.integers(MAX_BYTES + 1, 4 * MAX_BYTES)).map(lambda made: (made[0], b" " * made[1])),
    st.tuples(texts.map(lambda text: f"/v1/{text.encode().hex()}"), st.binary(max_size=20)),
)


class Critic:
    """Sends requests over one connection and counts the answers; every one must be a refusal in the right shape."""

    def __init__(self, served: ServeProcess) -> None:
        self._connection: HTTPConnection = served.connect()
        self.statuses: Counter[int] = Counter()

    def send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> int:
        try:
            self._connection.request(method, path, body, headers)
            response = self._connection.getresponse()
        except (HTTPException, OSError):  # closed by the server after the answer before; a second try must do
            self._connection.close()
            self._connection.request(method, path, body, headers)
            response = self._connection.getresponse()
        data = response.read()
        self.statuses[response.status] += 1
        if response.status != 200:
            assert 400 <= response.status < 500, f"{response.status} {data[:500]!r} for {method} {path} {body!r:.300}"
            if method != "HEAD":
                error = json.loads(data)["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert isinstance(error["message"], str)
        return response.status

    def refuse(self, made: tuple[str, bytes]) -> None:
        path, body = made
        status = self.send("POST", path, body, {"content-type": "application/json"})
        assert status != 200, f"accepted: {path} {body[:300]!r}"

    def close(self) -> None:
        self._connection.close()


def without_limits(max_examples: int) -> settings:
    return settings(max_examples=max_examples, database=None, suppress_health_check=list(HealthCheck))


def fuzz(critic: Critic, max_examples: int) -> None:
    @without_limits(max_examples)
    @given(nonsense)
    def law(made: tuple[str, bytes]) -> None:
        critic.refuse(made)

    law()


def test_every_malformed_request_is_refused_and_costs_no_memory(served: ServeProcess) -> None:
    critic = Critic(served)
    fuzz(critic, NUM_WARM_UP)
    before_mib = served.rss_mib()
    start_s = time.monotonic()
    fuzz(critic, NUM_FUZZED - NUM_WARM_UP)
    took_s, after_mib = time.monotonic() - start_s, served.rss_mib()
    critic.close()
    print(
        f"\n{critic.statuses.total()} malformed requests, {dict(critic.statuses)}, in {took_s:.0f} s; "
        f"memory {before_mib:.0f} -> {after_mib:.0f} MiB"
    )
    assert critic.statuses.total() >= NUM_FUZZED * 0.9, "hypothesis found fewer that differ"
    assert served.is_alive
    assert served.get("/health") == {"status": "ok"}
    served.until_idle(5.0)
    assert after_mib < 1.1 * before_mib


# What the schema says


def small(path: str, body: Any) -> Any:
    """The same body, asking for little, and for the model that is there: what breaks the schema stays."""
    if not isinstance(body, dict):
        return body
    body = {name: value for name, value in body.items() if name != "model" or not isinstance(value, str)}
    if path not in STREAMS:
        return body
    for name, most in (("n", 2), ("max_tokens", 1), ("max_completion_tokens", 1), ("min_tokens", 1)):
        if type(body.get(name)) is int and 0 < body[name] <= 1024:
            body[name] = min(body[name], most)
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        body["max_tokens"] = 1
    return body


def ask_by_the_schema(critic: Critic, document: dict[str, Any], path: str, mode: Any) -> Counter[int]:
    """The statuses of generated bodies. One that is answered keeps the schema."""
    import schemathesis  # takes a second
    from jsonschema_rs import Draft202012Validator

    operation = schemathesis.openapi.from_dict(document)[path]["POST"]
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = Draft202012Validator({**reference, "components": document["components"]})
    statuses: Counter[int] = Counter()

    @without_limits(max(NUM_FUZZED // 20, 10))
    @given(operation.as_strategy(generation_mode=mode))
    def law(case: Any) -> None:
        body = small(path, case.body)
        if isinstance(body, schemathesis.core.NotSet):
            body = b""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status = critic.send("POST", path, data, {"content-type": "application/json"})
        statuses[status] += 1
        if status == 200:  # null means "not given"
            given_fields = {name: value for name, value in json.loads(data).items() if value is not None}
            assert validator.is_valid(given_fields), given_fields

    law()
    return statuses


def test_what_breaks_the_schema_is_refused_and_what_keeps_it_is_never_a_failure(served: ServeProcess) -> None:
    """schemathesis reads /openapi.json and makes bodies that break it, and bodies that keep it."""
    from schemathesis import GenerationMode

    critic, document = Critic(served), served.get("/openapi.json")
    for path, mode in itertools.product(VALID, GenerationMode):
        statuses = ask_by_the_schema(critic, document, path, mode)
        print(f"\n{path}, {mode.value}: {dict(statuses)}", end="")
        assert statuses[200] or mode is GenerationMode.NEGATIVE
    critic.close()
    assert served.get("/health") == {"status": "ok"}
    served.until_idle(5.0)
