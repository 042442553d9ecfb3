"""Laws of `nanoserve bench`: a load is what its seed says, figures are what happened, and every wait ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import msgspec
import pytest
from fake_openai import HEAD, Exchange, FakeServer, Script

from nanoserve.api import cli
from nanoserve.client import CoreProcessClient, InProcessClient
from nanoserve.config import STAGES
from nanoserve.lab import bench_report
from nanoserve.lab.arrivals import (
    ARRIVALS,
    MIXES,
    BenchRequest,
    Fixed,
    LoadSpec,
    Lognormal,
    Uniform,
    arrival_times,
    draw_requests,
    parse_lengths,
    read_requests,
    story_words,
)
from nanoserve.lab.async_load import LoadResult, Outcome, RequestFailedError, run_load
from nanoserve.lab.bench_report import BenchReport, Latency, measure_load, meets, parse_slo
from nanoserve.lab.fakes import DigestRunner
from nanoserve.lab.sse_client import Address, ChunkedBody, EventParser, ProtocolError
from nanoserve.lab.targets import EngineTarget, UrlTarget
from nanoserve.lab.workload import random_tokens

SLACK_S = 0.25  # between a write here and a read there, on a loaded machine
LIMIT_S = 30.0  # far more than any of these loads takes
WORDS = random_tokens(1000)


def spec_of(**changes: object) -> LoadSpec:
    return replace(LoadSpec(num_requests=40, prompt_len=Uniform(5, 50), output_len=Uniform(1, 9), seed=3), **changes)


def load(target: object, requests: list[BenchRequest], **options: object) -> LoadResult:
    return asyncio.run(run_load(target, requests, **{"timeout_s": LIMIT_S} | options))  # type: ignore[arg-type]


def ask(script: Script, num_requests: int = 1, **options: object) -> tuple[LoadResult, list[Exchange]]:
    """A load of requests for three tokens on a server with that script, in an open loop, all at once."""
    requests = [BenchRequest(id=f"r{i}", prompt=f"r{i}", max_tokens=3) for i in range(num_requests)]
    with FakeServer(script) as server:
        return load(UrlTarget(Address.parse(server.url), "fake-model"), requests, **options), server.exchanges


def bench(*words: str) -> int:
    try:
        return cli.main(["bench", *words])
    except SystemExit as end:
        return int(end.code or 0)


# --- The load


def test_every_load_is_what_its_seed_says() -> None:
    for arrivals in (None, *ARRIVALS):
        spec = spec_of(arrivals=arrivals, prefix_len=8, num_prefixes=3)
        first, again = list(draw_requests(spec, WORDS)), list(draw_requests(spec, WORDS))
        assert first == again
        assert [r.id for r in first] == [f"bench-{i}" for i in range(40)]
        assert list(draw_requests(replace(spec, seed=4), WORDS)) != first


def test_another_rate_or_output_length_leaves_the_prompts_alone() -> None:
    prompts = [r.prompt for r in draw_requests(spec_of(), WORDS)]
    for changes in ({"arrivals": "poisson", "request_rate": 9.0}, {"output_len": Fixed(7)}, {"arrivals": "burst"}):
        assert [r.prompt for r in draw_requests(spec_of(**changes), WORDS)] == prompts


@pytest.mark.parametrize("arrivals", ARRIVALS)
@pytest.mark.parametrize("rate", [0.5, 200.0])
def test_every_arrival_process_has_its_rate(arrivals: str, rate: float) -> None:
    times = list(islice(arrival_times(spec_of(arrivals=arrivals, request_rate=rate, burst_size=10)), 20_001))
    assert times == sorted(times)
    assert len(times) / (times[-1] + 1 / rate) == pytest.approx(rate, rel=0.03)


def test_arrival_processes_differ_in_their_gaps() -> None:
    gaps = {}
    for arrivals in ARRIVALS:
        times = list(islice(arrival_times(spec_of(arrivals=arrivals, request_rate=4.0, burst_size=10)), 10_001))
        gaps[arrivals] = [b - a for a, b in pairwise(times)]
    assert set(gaps["constant"]) == {0.25}
    assert statistics.mean(gaps["poisson"]) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps["poisson"]) == pytest.approx(0.25, rel=0.05)  # exponential: as large as the mean
    assert gaps["burst"][:10] == [0.0] * 9 + [2.5]


def test_prompts_of_a_group_share_exactly_the_prefix() -> None:
    prompts = [r.prompt for r in draw_requests(spec_of(prefix_len=8, num_prefixes=3), WORDS)]
    heads = {tuple(prompt[:8]) for prompt in prompts}
    assert len(heads) == 3
    assert len({tuple(prompt[:9]) for prompt in prompts}) > 3
    assert all(13 <= len(prompt) <= 58 for prompt in prompts)
    more = [r.prompt for r in draw_requests(spec_of(prefix_len=8, num_prefixes=3, num_requests=80), WORDS)]
    assert more[:40] == prompts


def test_text_prompts_have_as_many_words_as_asked_for() -> None:
    for r in draw_requests(spec_of(prompt_len=Fixed(20), prefix_len=5), story_words):
        assert isinstance(r.prompt, str)
        assert len(r.prompt.split()) == 25


def test_lengths_have_the_distribution_that_they_name() -> None:
    import random

    rng = random.Random(0)
    assert {parse_lengths("7").draw(rng) for _ in range(9)} == {7}
    assert {parse_lengths("uniform:3:5").draw(rng) for _ in range(200)} == {3, 4, 5}
    drawn = [Lognormal(200.0, 0.8, 100_000).draw(rng) for _ in range(20_000)]
    assert statistics.mean(drawn) == pytest.approx(200, rel=0.05)
    assert statistics.median(drawn) == pytest.approx(200 / 2.718281828**0.32, rel=0.05)
    assert max(Lognormal(200.0, 0.8, 256).draw(rng) for _ in range(1000)) == 256
    for lengths in [Fixed(7), Uniform(3, 5), *(each for mix in MIXES.values() for each in mix)]:
        assert parse_lengths(str(lengths)) == lengths


@pytest.mark.parametrize(
    "text", ["", "0", "x", "uniform:5", "uniform:5:3", "lognormal:10:1", "lognormal:0:1:5", "zipf:1"]
)
def test_bad_lengths_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="length"):
        parse_lengths(text)


def test_a_workload_file_is_the_load_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text('{"at_s": 2, "prompt": "Once", "max_tokens": 4}\n\n{"prompt": [1, 2], "max_tokens": 5}\n'
                    '{"at_s": 1, "prompt_len": 6, "max_tokens": 7}\n')  # fmt: skip
    first, second, third = read_requests(path, WORDS, seed=1)
    assert (first.prompt, first.max_tokens, first.at_s) == ([1, 2], 5, 0.0)
    assert (len(second.prompt), second.max_tokens, second.at_s) == (6, 7, 1.0)
    assert (third.prompt, third.max_tokens, third.at_s) == ("Once", 4, 2.0)
    assert len({first.id, second.id, third.id}) == 3
    assert read_requests(path, WORDS, seed=1)[1] == second


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2"),
        ('{"max_tokens": 3}', "prompt_len"),
        ('{"max_tokens": 3, "prompt": "a", "prompt_len": 2}', "either"),
        ('{"max_tokens": 0, "prompt": "a"}', "max_tokens"),
        ('{"max_tokens": 3, "prompt": ""}', "empty"),
        ('{"max_tokens": 3, "prompt": "a", "at_s": -1}', "at_s"),
        ('{"max_tokens": 3, "prompt": "a", "when": 1}', "when"),
    ],
)
def test_a_bad_line_of_a_workload_file_is_named(line: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text('{"prompt": "Once", "max_tokens": 4}\n' + line + "\n")
    with pytest.raises(ValueError, match=complaint) as caught:
        read_requests(path, WORDS)
    assert "line 2" in str(caught.value)


# --- The wire


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_their_bytes_come(size: int) -> None:
    events = [b"a" * 40, b"", b"[DONE]"]
    stream = b": a comment\r\n\r\ndata:" + events[0] + b"\n\ndata: x\ndata: y\r\n\r\ndata: [DONE]\n\n"
    wire = b"".join(b"%x;ext\r\n" % len(part) + part + b"\r\n" for part in (stream[:9], stream[9:])) + b"0\r\n\r\n"
    body, parser, seen = ChunkedBody(), EventParser(), []
    for start in range(0, len(wire), size):
        seen += parser.feed(body.feed(wire[start : start + size]))
    assert body.done
    assert seen == [b"a" * 40, b"x\ny", b"[DONE]"]


def test_a_chunk_without_a_size_is_refused() -> None:
    with pytest.raises(ProtocolError):
        ChunkedBody().feed(b"data: {}\r\n")


def test_addresses_are_parsed_and_told_apart() -> None:
    assert Address.parse("http://127.0.0.1:8000/v1/") == Address("127.0.0.1", 8000)
    assert Address.parse("https://[::1]/a/v1") == Address("::1", 443, tls=True, prefix="/a")
    for host in ("127.0.0.1", "127.3.2.1", "[::1]", "localhost"):
        assert Address.parse(f"http://{host}:1").is_loopback
    for host in ("10.0.0.1", "0.0.0.0", "localhost.example.org", "127.0.0.1.example.org"):
        assert not Address.parse(f"http://{host}:1").is_loopback
    for url in ("127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://a:b@127.0.0.1", "http://127.0.0.1:99999"):
        with pytest.raises(ValueError, match="URL"):
            Address.parse(url)


# --- What happened, against the server's own clock


def test_latencies_are_those_of_the_servers_own_clock() -> None:
    delays = [0.3, 0.02, 0.4]
    result, exchanges = ask(lambda exchange: exchange.answer(delays), num_requests=5)
    assert [outcome.error for outcome in result.outcomes] == [None] * 5
    seen = {exchange.body["prompt"]: exchange for exchange in exchanges}
    for outcome in result.outcomes:
        exchange = seen[outcome.id]
        assert exchange.body["stream"] is True
        assert exchange.body["ignore_eos"] is True
        for ours, theirs in zip(outcome.event_s, exchange.event_s, strict=True):
            assert theirs <= ours <= theirs + SLACK_S
        assert outcome.ttft_s is not None
        assert delays[0] <= outcome.ttft_s <= delays[0] + 2 * SLACK_S
        assert outcome.itl_s[1] == pytest.approx(delays[2], abs=SLACK_S)
        assert outcome.tpot_s == pytest.approx((outcome.event_s[2] - outcome.event_s[0]) / 2)
        assert outcome.e2e_s >= sum(delays)
        assert (outcome.num_output_tokens, outcome.num_prompt_tokens, outcome.num_cached_tokens) == (3, 10, 4)
    metrics = measure_load(result)
    assert metrics.hit_rate == 0.4
    assert (metrics.num_ok, metrics.output_tokens, metrics.prompt_tokens) == (5, 15, 50)
    assert metrics.duration_s == pytest.approx(sum(delays), abs=3 * SLACK_S)
    assert metrics.output_tokens_per_s == pytest.approx(15 / metrics.duration_s)


def test_a_late_sender_hides_no_latency() -> None:
    """An open loop counts from when a request was due."""

    class Blocks:
        async def ask(self, request: BenchRequest, outcome: Outcome) -> None:
            time.sleep(0.2)  # the generator's own loop stands still: the next request is sent late
            outcome.event_s.append(time.monotonic())
            outcome.num_output_tokens = 1

    requests = [BenchRequest(id=str(i), prompt="a", max_tokens=1) for i in range(3)]
    result = load(Blocks(), requests)
    assert [outcome.ttft_s > 0.2 * (i + 1) - 1e-3 for i, outcome in enumerate(result.outcomes)] == [True] * 3
    metrics = measure_load(result)
    assert metrics.send_lag_s is not None
    assert metrics.send_lag_s.max >= 0.39


def test_an_open_loop_sends_on_time_and_a_closed_loop_keeps_its_seats() -> None:
    running = peak = 0

    class Counts:
        async def ask(self, request: BenchRequest, outcome: Outcome) -> None:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0.05)
            running -= 1

    requests = [BenchRequest(id=str(i), prompt="a", max_tokens=1, at_s=i * 0.02) for i in range(12)]
    result = load(Counts(), requests, concurrency=3)
    assert (peak, len(result.outcomes)) == (3, 12)
    assert all(outcome.sent_s == pytest.approx(outcome.due_s, abs=SLACK_S) for outcome in result.outcomes)
    result = load(Counts(), requests)
    sent = [outcome.sent_s - result.start_s for outcome in result.outcomes]
    assert all(request.at_s <= at_s <= request.at_s + SLACK_S for request, at_s in zip(requests, sent, strict=True))


def test_nothing_is_sent_after_the_duration() -> None:
    class Quick:
        async def ask(self, request: BenchRequest, outcome: Outcome) -> None:
            await asyncio.sleep(0.01)

    endless = draw_requests(spec_of(num_requests=None, arrivals="constant", request_rate=50.0), WORDS)
    result = load(Quick(), endless, duration_s=0.2)  # type: ignore[arg-type]
    assert len(result.outcomes) == 10
    endless = draw_requests(spec_of(num_requests=None), WORDS)
    result = load(Quick(), endless, concurrency=2, duration_s=0.2)  # type: ignore[arg-type]
    assert 2 <= len(result.outcomes) <= 42


# --- Errors


async def cut(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.token()


async def cut_in_a_chunk(exchange: Exchange) -> None:
    await exchange.raw(HEAD + b"ff\r\ndata: {")


async def refuse(exchange: Exchange) -> None:
    await exchange.raw(b"HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\ncome back")


async def close_at_once(exchange: Exchange) -> None:
    exchange.writer.transport.abort()


async def fail(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.token()
    await exchange.event({"error": {"message": "the engine is dead"}})


async def babble(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.event(b'{"choices": 7}')


async def speak_another_protocol(exchange: Exchange) -> None:
    await exchange.raw(b"220 mail.example.org ESMTP\r\n\r\n")


async def stop_short(exchange: Exchange) -> None:
    await exchange.answer([0.0, 0.0])


async def abort(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.token(end="abort")
    await exchange.finish(1)


async def never_end(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.token()
    await exchange.raw(b"0\r\n\r\n")


ERRORS = {
    "disconnect": (cut, cut_in_a_chunk, close_at_once, never_end),
    "http_503": (refuse,),
    "error_event": (fail,),
    "protocol": (babble, speak_another_protocol),
    "short": (stop_short,),
    "aborted": (abort,),
}


@pytest.mark.parametrize(("kind", "script"), [(kind, script) for kind, each in ERRORS.items() for script in each])
def test_every_error_is_counted_by_its_kind(kind: str, script: Script) -> None:
    async def second_fails(exchange: Exchange) -> None:
        await (script(exchange) if exchange.body["prompt"] == "r1" else exchange.answer([0.0] * 3))

    result, _ = ask(second_fails, num_requests=3)
    metrics = measure_load(result)
    assert metrics.errors == {kind: 1}
    assert metrics.num_ok == 2
    assert metrics.error_examples[kind]


async def hang(exchange: Exchange) -> None:
    await asyncio.sleep(600)


async def hang_in_the_middle(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.token()
    await asyncio.sleep(600)


async def drip(exchange: Exchange) -> None:
    await exchange.head()
    while True:
        await exchange.token()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("script", [hang, hang_in_the_middle, drip])
@pytest.mark.parametrize("concurrency", [None, 4])
def test_every_wait_ends_at_the_timeout(script: Script, concurrency: int | None) -> None:
    start_s = time.monotonic()
    result, _ = ask(script, num_requests=4, timeout_s=0.3, concurrency=concurrency)
    assert 0.3 <= time.monotonic() - start_s < 10
    assert measure_load(result).errors == {"timeout": 4}


def test_a_server_that_is_not_there_is_an_error_of_each_request() -> None:
    with FakeServer(hang) as server:
        address = Address.parse(server.url)
    result = load(UrlTarget(address, "fake-model"), [BenchRequest(id="a", prompt="a", max_tokens=1)])
    assert measure_load(result).errors == {"connect": 1}


def test_an_interrupted_load_keeps_what_it_has() -> None:
    class Half:
        async def ask(self, request: BenchRequest, outcome: Outcome) -> None:
            if request.id == "1":
                asyncio.get_running_loop().call_soon(main.cancel)
                await asyncio.sleep(LIMIT_S)

    async def interrupted() -> LoadResult:
        nonlocal main
        main = asyncio.ensure_future(run_load(Half(), requests, timeout_s=LIMIT_S, concurrency=1))
        return await main

    main: asyncio.Future[LoadResult]
    requests = [BenchRequest(id=str(i), prompt="a", max_tokens=1) for i in range(3)]
    result = asyncio.run(interrupted())
    assert result.interrupted
    assert [(outcome.id, outcome.error) for outcome in result.outcomes] == [("0", None), ("1", "interrupted")]


# --- Figures


def outcome_of(token_s: list[float], error: str | None = None, due_s: float = 10.0) -> Outcome:
    return Outcome(
        id="a",
        due_s=due_s,
        sent_s=due_s + 0.1,
        end_s=(token_s or [due_s])[-1] + 0.5,
        event_s=token_s,
        num_output_tokens=len(token_s),
        error=error,
    )


HAND_MADE = LoadResult(
    [
        outcome_of([11.0, 12.0, 15.0]),  # ttft 1, gaps 1 and 3, tpot 2, e2e 5.5
        outcome_of([13.0, 13.5], due_s=11.0),  # ttft 2, gap 0.5, tpot 0.5, e2e 3
        outcome_of([], error="timeout"),
        outcome_of([10.1, 19.5], error="disconnect"),
    ],
    start_s=10.0,
    interrupted=False,
)


def check_hand_made() -> None:
    metrics = measure_load(HAND_MADE, {"ttft": 1.5})
    assert metrics.ttft_s == Latency(2, 1.5, 1.0, 2.0, 2.0, 2.0)
    assert metrics.itl_s == Latency(3, 1.5, 1.0, 3.0, 3.0, 3.0)
    assert metrics.tpot_s == Latency(2, 1.25, 0.5, 2.0, 2.0, 2.0)
    assert metrics.e2e_s == Latency(2, 4.25, 3.0, 5.5, 5.5, 5.5)
    assert (metrics.duration_s, metrics.requests_per_s, metrics.output_tokens_per_s) == (10.0, 0.2, 0.5)
    assert (metrics.num_requests, metrics.num_ok, metrics.output_tokens) == (4, 2, 5)
    assert metrics.errors == {"timeout": 1, "disconnect": 1}
    assert metrics.prompt_tokens is metrics.cached_tokens is metrics.hit_rate is None
    assert metrics.goodput == bench_report.Goodput({"ttft": 1.5}, 1, 0.25, 0.1)


def test_every_figure_is_the_one_by_hand() -> None:
    check_hand_made()


def test_a_planted_interpolation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_report, "percentile", lambda values, percent: statistics.fmean(values))
    with pytest.raises(AssertionError):
        check_hand_made()


def test_a_load_of_nothing_has_no_figures() -> None:
    metrics = measure_load(LoadResult([], 1.0, True), {"ttft": 1.0})
    assert metrics.ttft_s is metrics.itl_s is None
    assert (metrics.duration_s, metrics.requests_per_s) == (0.0, 0.0)


def test_goodput_asks_for_every_limit() -> None:
    outcome = outcome_of([11.0, 12.0, 15.0])
    for name, value in {"ttft": 1.0, "itl": 3.0, "tpot": 2.0, "e2e": 5.5}.items():
        assert meets(outcome, {name: value})
        assert not meets(outcome, {name: value - 0.001})
        assert not meets(outcome, {"ttft": 9.0, "itl": 9.0, "tpot": 9.0, "e2e": 9.0, name: value - 0.001})
    assert meets(outcome_of([11.0]), {"itl": 0.001})  # one token has no gap
    assert not meets(outcome_of([11.0], error="short"), {"ttft": 9.0})


def test_an_slo_is_read_in_milliseconds_or_refused() -> None:
    assert parse_slo("ttft=500, itl=100") == {"ttft": 0.5, "itl": 0.1}
    for text in ("", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=nan", "ttft=inf", "p99=3", "itl=1,itl=2"):
        with pytest.raises(ValueError, match="is not a limit"):
            parse_slo(text)


# --- An engine in this process


@pytest.mark.parametrize("client", [InProcessClient, CoreProcessClient], ids=lambda cls: cls.__name__)
def test_an_engine_answers_every_request_whole(client: type) -> None:
    from nanoserve.api.async_llm import AsyncLLM

    config = replace(STAGES["shared"], client=client, runner=DigestRunner, max_model_len=256)
    spec = spec_of(num_requests=20, prompt_len=Fixed(20), prefix_len=32, output_len=Uniform(2, 6))
    requests = list(draw_requests(spec, WORDS))

    async def drive() -> LoadResult:
        async with AsyncLLM(config=config) as llm:
            return await run_load(EngineTarget(llm), requests, timeout_s=LIMIT_S, concurrency=6)

    result = asyncio.run(drive())
    assert [outcome.error for outcome in result.outcomes] == [None] * 20
    assert [o.num_output_tokens for o in result.outcomes] == [r.max_tokens for r in requests]
    metrics = measure_load(result)
    assert metrics.prompt_tokens == 20 * 52
    assert metrics.cached_tokens is not None
    assert metrics.cached_tokens >= 14 * 32  # those that were not in the first seats find the prefix


def test_a_prompt_that_does_not_fit_and_a_dead_engine_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanoserve.api.async_llm import AsyncLLM

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # for the crash dump

    class Cursed(DigestRunner):
        def launch(self, plan):
            if plan.step > 3:
                raise RuntimeError("a step is cursed")
            return super().launch(plan)

    config = replace(STAGES["shared"], client=InProcessClient, runner=Cursed, max_model_len=64)

    async def drive() -> LoadResult:
        async with AsyncLLM(config=config) as llm:
            requests = [
                BenchRequest(id="long", prompt=[1] * 100, max_tokens=1),
                BenchRequest(id="short", prompt=[1] * 62, max_tokens=9),
                BenchRequest(id="ends", prompt=[1] * 8, max_tokens=9),
            ]
            return await run_load(EngineTarget(llm), requests, timeout_s=LIMIT_S, concurrency=1)

    outcomes = {outcome.id: outcome.error for outcome in asyncio.run(drive()).outcomes}
    assert outcomes == {"long": "refused", "short": "short", "ends": "engine_dead"}


# --- The command


def test_the_command_measures_a_server_and_writes_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"

    async def answer(exchange: Exchange) -> None:
        await exchange.answer([0.0] * exchange.body["max_tokens"])

    with FakeServer(answer) as server:
        words = ["--url", f"{server.url}/v1", "--request-rate", "400", "--num-requests", "30", "--output-len", "4"]
        words += ["--prompt-len", "uniform:3:9", "--prefix-len", "5", "--seed", "7", "--slo", "ttft=5000,itl=5000"]
        assert bench(*words, "--json", "--detailed", "--out", str(out)) == 0
        bodies = [exchange.body for exchange in server.exchanges]
        assert bench(*words) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(out.read_text())
    assert "ITL" in printed
    assert "goodput" in printed
    report = msgspec.json.decode(out.read_bytes(), type=BenchReport)
    assert (report.version, report.model, report.interrupted) == (1, "fake-model", False)
    assert report.metrics.num_ok == 30
    assert report.metrics.output_tokens == 120
    assert report.metrics.goodput is not None
    assert report.metrics.goodput.share == 1.0
    assert report.requests is not None
    assert all(0 <= r.due_s <= r.sent_s <= r.end_s <= report.metrics.duration_s + 1e-6 for r in report.requests)
    expected = {"arrivals": "poisson", "request_rate": 400.0, "prompt_len": "uniform:3:9", "prefix_len": 5, "seed": 7}
    assert expected.items() <= report.parameters.items()
    spec = LoadSpec(
        num_requests=30, prompt_len=Uniform(3, 9), output_len=Fixed(4), prefix_len=5, seed=7, arrivals="poisson"
    )
    sent = [body["prompt"] for body in bodies[1:]]  # the first is the warm-up
    assert sorted(sent) == sorted(r.prompt for r in draw_requests(spec, WORDS))


def test_the_command_fails_when_a_request_did(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(refuse) as server:
        assert bench("--url", server.url, "--num-requests", "3", "--concurrency", "2") == 1
    assert "error http_503: 3, such as: HTTP 503: come back" in capsys.readouterr().out


def test_the_command_measures_an_engine_on_every_seam(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--num-requests",
        "4",
        "--concurrency",
        "2",
        "--prompt-len",
        "20",
        "--output-len",
        "3",
        "--prompts",
        "text",
    ]
    words += ["--stage", "v0", "--blocks", "shared", "--max-model-len", "256", "--num-gpu-blocks-override", "64"]
    trace = tmp_path / "trace.jsonl"
    assert bench(*words, "--record", str(trace), "--json") == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=BenchReport)
    assert report.target == "engine"
    assert report.engine_config is not None
    assert report.engine_config["blocks"] == "SharedBlocks"
    assert report.engine is not None
    assert report.engine.output_tokens == report.metrics.output_tokens == 12  # without the warm-up
    assert report.engine.prompt_tokens == report.metrics.prompt_tokens
    assert report.machine is not None
    assert trace.stat().st_size > 0


BAD_INPUT = {
    "another machine": ("--url http://192.0.2.1:8000", ["http://192.0.2.1:8000", "--allow-remote"]),
    "not a URL": ("--url somewhere", ["'somewhere'", "http://127.0.0.1:8000"]),
    "nobody there": ("--url http://127.0.0.1:9", ["127.0.0.1:9", "nanoserve serve"]),
    "two loops": ("--request-rate 3 --concurrency 3", ["--concurrency", "--request-rate"]),
    "arrivals of nothing": ("--arrivals poisson", ["--arrivals", "--request-rate"]),
    "bursts": ("--request-rate 3 --burst-size 3", ["--burst-size", "--arrivals burst"]),
    "no rate": ("--request-rate 0", ["--request-rate", "0"]),
    "no requests": ("--num-requests 0", ["--num-requests", "0"]),
    "two lengths": ("--mix sharegpt-like --prompt-len 3", ["--prompt-len", "--mix"]),
    "lengths": ("--prompt-len zipf:3", ["'zipf:3'", "lognormal"]),
    "prefixes": ("--num-prefixes 3", ["--num-prefixes", "--prefix-len"]),
    "words": ("--prompts text --vocab-size 3", ["--vocab-size", "--prompts text"]),
    "slo": ("--slo fast", ["'fast'", "ttft=500"]),
    "engine of a server": ("--url http://127.0.0.1:9 --stage v0", ["--stage", "--url"]),
    "file and flags": ("--workload x.jsonl --prompt-len 3", ["--prompt-len", "--workload"]),
    "remote nothing": ("--allow-remote", ["--allow-remote", "--url"]),
    "ids": ("--vocab-size 1M", ["1048576", "2048"]),
    "no file": ("--workload no-such.jsonl", ["no-such.jsonl"]),
    "no folder": ("--out no/such/folder/x.json", ["no/such/folder", "make it"]),
    "stage": ("--stage v9", ["'v9'"]),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_every_bad_input_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = BAD_INPUT[name]
    assert bench(*words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert [part for part in expected if part not in captured.err] == []


def test_an_interrupt_prints_what_there_is() -> None:
    """A real Ctrl-C on the real command: half of the requests have ended, the others never will."""

    async def half(exchange: Exchange) -> None:
        await (exchange.answer([0.0] * 3) if len(server.exchanges) <= 3 else hang(exchange))

    with FakeServer(half) as server:
        command = [sys.executable, "-m", "nanoserve", "bench", "--url", server.url, "--warmup", "0", "--json"]
        command += ["--concurrency", "1", "--output-len", "3"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + LIMIT_S
        while len(server.exchanges) < 4 and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, err
    report = json.loads(out)
    assert report["interrupted"] is True
    assert report["metrics"]["num_ok"] == 3
    assert report["metrics"]["errors"] == {"interrupted": 1}
    assert err == ""


def test_hundreds_of_streams_lose_nothing() -> None:
    """Every event of 300 streams at once arrives, in less than a third of a core's time for the client."""

    async def answer(exchange: Exchange) -> None:
        await exchange.answer([0.1] * 10)

    requests = [BenchRequest(id=f"r{i}", prompt=f"r{i}", max_tokens=10) for i in range(300)]
    with FakeServer(answer) as server:
        target = UrlTarget(Address.parse(server.url), "fake-model")
        cpu_s = time.thread_time()
        result = load(target, requests)
        cpu_s = time.thread_time() - cpu_s
    assert [outcome.error for outcome in result.outcomes] == [None] * 300
    assert all(len(outcome.event_s) == 10 for outcome in result.outcomes)
    assert cpu_s / 3000 < 1e-3  # seconds an event, connections included


def test_an_error_of_a_target_is_a_kind_of_its_own() -> None:
    class Fails:
        async def ask(self, request: BenchRequest, outcome: Outcome) -> None:
            raise RequestFailedError("odd", "it is odd") if int(request.id) % 2 else KeyError("a bug")

    result = load(Fails(), [BenchRequest(id=str(i), prompt="a", max_tokens=1) for i in range(5)])
    assert measure_load(result).errors == {"KeyError": 3, "odd": 2}
