"""Laws of `AsyncLLM`: streams tell all, block nobody, and leave nothing behind. Every process layout is one engine."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from fakes_client import HandClient, hand_client, tokens

from nanoserve import LLM, STAGES, SamplingParams
from nanoserve.api import async_llm
from nanoserve.api.async_llm import AsyncLLM, OutputStream, QueueFullError
from nanoserve.api.outputs import RequestOutput
from nanoserve.api.tokenizer import Tokenizer
from nanoserve.client import CoreProcessClient, EngineDeadError, InProcessClient
from nanoserve.request import EngineRequest, OutputKind

T = TypeVar("T")
SMALL = {"max_model_len": 256, "num_blocks": 129, "max_num_seqs": 16, "check_invariants": True}
PROMPTS = ["Once upon a time", "The cat", "One day, Tom and Lily went to the park. They"]
WAIT_S = 60.0
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}


class Engine:
    """An `AsyncLLM` and the loop that it belongs to."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def in_time() -> T:
            return await asyncio.wait_for(work, WAIT_S)

        return self.runner.run(in_time())

    def close(self) -> None:
        self.llm.close()
        self.runner.close()


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """What the offline engine says to PROMPTS."""
    with LLM(stage="v0", **SMALL) as llm:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False)]


@pytest.fixture(scope="module", params=[InProcessClient, CoreProcessClient])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(AsyncLLM(config=STAGES["shared"], client=request.param, **SMALL))
    yield engine
    engine.close()


@pytest.fixture
def hand() -> Iterator[tuple[Engine, HandClient]]:
    client = hand_client()
    engine = Engine(AsyncLLM(client=client))
    yield engine, client.made[0]
    engine.close()


async def all_of(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    """Ends when the condition holds; the caller's time limit ends it otherwise."""
    while True:
        result = condition()
        if await result if isinstance(result, Awaitable) else result:
            return
        await asyncio.sleep(0.005)


async def until_idle(llm: AsyncLLM) -> None:
    """The engine holds no request and no block."""

    async def is_idle() -> bool:
        blocks = await llm.call("block_map")
        return not blocks["tables"] and blocks["num_free_blocks"] == blocks["num_blocks"] - 1

    await until(is_idle)
    assert llm.num_open == 0


# Real engines


def test_every_layout_and_output_kind_tells_the_offline_text(engine: Engine, expected: list[str]) -> None:
    async def ask(prompt: str, kind: OutputKind) -> list[RequestOutput]:
        return await all_of(engine.llm.generate(prompt, SamplingParams(**GREEDY, output_kind=kind)))

    async def ask_all() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(ask(prompt, kind) for kind in OutputKind for prompt in PROMPTS))

    told = engine.run(ask_all())
    cumulative, delta, final = (told[i : i + len(PROMPTS)] for i in range(0, len(told), len(PROMPTS)))
    assert ["".join(o.outputs[0].text for o in outputs) for outputs in delta] == expected
    assert [outputs[-1].outputs[0].text for outputs in cumulative] == expected
    assert [outputs[-1].outputs[0].text for outputs in final] == expected
    assert all(len(outputs) == 1 for outputs in final)
    for outputs in told:
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for parts, whole in zip(delta, final, strict=True):
        assert [i for output in parts for i in output.outputs[0].token_ids] == whole[0].outputs[0].token_ids


def test_chat_goes_through_the_models_template(engine: Engine, expected: list[str]) -> None:
    stream = engine.llm.chat([{"role": "user", "content": PROMPTS[0]}], SamplingParams(**GREEDY))
    assert engine.run(all_of(stream))[-1].outputs[0].text == expected[0]


def test_every_stream_that_is_closed_or_cancelled_frees_everything(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, output_kind=OutputKind.DELTA)

    async def leave_early(i: int) -> None:
        stream = engine.llm.generate(f"{PROMPTS[0]} {i}", params)
        for _ in range(i % 3 + 1):
            await anext(stream)
        await stream.aclose()

    async def cancel(i: int) -> None:
        task = asyncio.ensure_future(all_of(engine.llm.generate(f"{PROMPTS[1]} {i}", params)))
        await until(lambda: engine.llm.num_open > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def leave_at_once(i: int) -> None:
        generation = await engine.llm.prepare(f"{PROMPTS[2]} {i}", params)
        engine.llm.start([generation]).close()

    async def all_leave() -> None:
        kinds = (leave_early, cancel, leave_at_once)
        await asyncio.gather(*(kinds[i % 3](i) for i in range(36)))
        await until_idle(engine.llm)

    engine.run(all_leave())


def test_every_answer_of_n_is_a_stream_of_its_own(engine: Engine) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=8, output_kind=OutputKind.DELTA)
    outputs = engine.run(all_of(engine.llm.generate(PROMPTS[0], params)))
    texts = {i: "".join(a.text for o in outputs for a in o.outputs if a.index == i) for i in range(3)}
    final = engine.run(
        all_of(engine.llm.generate(PROMPTS[0], SamplingParams(n=3, seed=7, max_tokens=8, output_kind="final_only")))
    )
    assert [texts[answer.index] for answer in final[-1].outputs] == [answer.text for answer in final[-1].outputs]
    ends = [answer.index for output in outputs for answer in output.outputs if answer.finish_reason]
    assert sorted(ends) == [0, 1, 2]


def test_an_aborted_request_ends_its_stream_with_that_reason(engine: Engine) -> None:
    async def abort_one() -> None:
        params = SamplingParams(n=2, max_tokens=200, ignore_eos=True, output_kind=OutputKind.DELTA)
        stream = engine.llm.generate(PROMPTS[0], params, "mine")
        await anext(stream)
        await engine.llm.abort("mine")
        await engine.llm.abort("nobody's")
        rest = await all_of(stream)
        assert rest[-1].finished
        assert {a.finish_reason for o in rest for a in o.outputs if a.finish_reason} == {"abort"}
        await until_idle(engine.llm)

    engine.run(abort_one())


def test_an_id_is_refused_while_it_is_in_use_and_free_afterwards(engine: Engine) -> None:
    async def ask_twice() -> None:
        params = SamplingParams(max_tokens=40, ignore_eos=True, output_kind=OutputKind.DELTA)
        first = engine.llm.generate(PROMPTS[0], params, "same")
        await anext(first)
        with pytest.raises(ValueError, match="'same' is in use"):
            await anext(engine.llm.generate(PROMPTS[1], params, "same"))
        assert (await all_of(first))[-1].finished, "the first one goes on"
        assert (await all_of(engine.llm.generate(PROMPTS[1], params, "same")))[-1].finished

    engine.run(ask_twice())


def test_utilities_answer_beside_running_requests(engine: Engine) -> None:
    async def look() -> dict[str, Any]:
        params = SamplingParams(max_tokens=100, ignore_eos=True, output_kind=OutputKind.DELTA)
        stream = engine.llm.generate(PROMPTS[2], params)
        await anext(stream)
        blocks, steps = await engine.llm.call("block_map"), await engine.llm.call("recent_steps", 3)
        await stream.aclose()
        with pytest.raises(RuntimeError, match="'no_such' is not known"):
            await engine.llm.call("no_such")
        return {"blocks": blocks, "steps": steps}

    seen = engine.run(look())
    blocks = seen["blocks"]
    (table,) = blocks["tables"].values()
    assert sorted(block_id for block_id, _, _ in blocks["used"]) == sorted(table)
    assert all(count == 1 for _, count, _ in blocks["used"])
    assert sum(count for _, count in blocks["free"]) == blocks["num_free_blocks"]
    assert [step["step"] for step in seen["steps"]] == sorted(step["step"] for step in seen["steps"])


def test_a_core_that_is_killed_ends_every_stream_and_every_later_call() -> None:
    engine = Engine(AsyncLLM(config=STAGES["shared"], client=CoreProcessClient, **SMALL))
    params = SamplingParams(max_tokens=200, ignore_eos=True, output_kind=OutputKind.DELTA)

    async def kill() -> float:
        streams = [engine.llm.generate(prompt, params) for prompt in PROMPTS]
        for stream in streams:
            await anext(stream)
        start_s = time.monotonic()
        os.kill(engine.llm._client._child.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        for stream in streams:
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await all_of(stream)
        end_s = time.monotonic()
        with pytest.raises(EngineDeadError):
            engine.llm.check_alive()
        with pytest.raises(EngineDeadError):
            await anext(engine.llm.generate(PROMPTS[0], params))
        return end_s - start_s

    try:
        assert engine.run(kill()) < 2.0
    finally:
        engine.close()


def test_an_abort_that_meets_a_running_step_is_not_lost_for_a_request_behind_it() -> None:
    with InProcessClient(STAGES["v0"]) as client:
        request = EngineRequest(id="late", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=50))
        client.submit(request)
        client.abort(["late"])
        client.core._abort_now()  # what a step that runs meanwhile does before it takes its tokens
        assert [(output.id, output.finish_reason) for output in client.poll(0)] == [("late", "abort")]
        assert client.core.num_steps == 0


# Engines in the hand of the test


async def opened(
    engine: Engine, prompt: str = "Once", request_id: str | None = None, **fields: Any
) -> tuple[OutputStream, EngineRequest]:
    params = SamplingParams(**{"max_tokens": 5000, "output_kind": OutputKind.DELTA, **fields})
    generation = await engine.llm.prepare(prompt, params, request_id)
    return engine.llm.start([generation]), generation.requests[0]


def ids_of(text: str, engine: Engine) -> list[int]:
    return engine.llm.get_tokenizer().encode(text, add_special_tokens=False)


@pytest.mark.parametrize("kind", [OutputKind.DELTA, OutputKind.CUMULATIVE])
def test_a_slow_consumer_finds_one_output_that_holds_everything(
    hand: tuple[Engine, HandClient], kind: OutputKind
) -> None:
    engine, client = hand
    ids = ids_of(" there was a little dog" * 100, engine)

    async def fall_behind() -> RequestOutput:
        stream, request = await opened(engine, output_kind=kind)
        for token_id in ids:
            client.say(tokens(request, token_id))
        client.say(tokens(request, end="length"))
        await until(lambda: engine.llm.num_open == 0)  # all was taken in, though nobody reads
        output = await anext(stream)
        assert await all_of(stream) == []
        return output

    output = engine.run(fall_behind())
    assert output.outputs[0].token_ids == ids
    assert output.outputs[0].text == engine.llm.get_tokenizer().decode(ids)
    assert output.finished


def test_a_consumer_that_keeps_up_finds_the_news_of_each_step_by_itself(hand: tuple[Engine, HandClient]) -> None:
    """Even when the news of many steps comes in one piece, and there is something to do about each."""
    engine, client = hand
    ids = ids_of(" there was a little dog" * 10, engine)

    async def keep_up() -> list[list[int]]:
        stream, request = await opened(engine)
        client.say(*(tokens(request, token_id) for token_id in ids), tokens(request, end="length"))
        seen = []
        async for output in stream:
            seen.append(list(output.outputs[0].token_ids))
            for _ in range(3):
                await asyncio.sleep(0)
        return seen

    assert [found for found in engine.run(keep_up()) if found] == [[token_id] for token_id in ids]


def count_turns(engine: Engine, client: HandClient, num_outputs: int) -> int:
    """How often another task gets a turn while one batch is taken in."""

    async def take_one_batch() -> int:
        pairs = [await opened(engine, ids) for ids in [[5, 6]] * num_outputs]  # type: ignore[arg-type]
        turns = 0
        client.say(*(tokens(request, 7, end="length") for _, request in pairs))
        while engine.llm.num_open:
            turns += engine.llm.num_open < num_outputs  # between two slices
            await asyncio.sleep(0)
        for stream, _ in pairs:
            await all_of(stream)
        return turns

    return engine.run(take_one_batch())


def test_a_large_batch_leaves_turns_to_others(hand: tuple[Engine, HandClient], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, client = hand
    slices = 4
    assert count_turns(engine, client, slices * async_llm.SLICE) >= slices - 1
    monkeypatch.setattr(async_llm, "SLICE", 10**6)  # a planted bug: all in one go
    assert count_turns(engine, client, 512) == 0


def test_every_bad_request_is_refused_before_the_engine_sees_it(hand: tuple[Engine, HandClient]) -> None:
    engine, client = hand

    async def ask(*args: Any, **options: Any) -> None:
        await anext(engine.llm.generate(*args, **options))

    bad: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        (("",), {}, "prompt is empty"),
        (([1] * 256,), {}, "max_model_len"),
        (("word " * 10**5,), {}, "max_model_len"),
        (([2048],), {}, "vocabulary"),
        (("a", SamplingParams(stop_token_ids=[9999])), {}, "stop_token_ids"),
        (("a", {"n": 1}), {}, "sampling_params"),
        (("a", None, ""), {}, "request_id"),
        (("a",), {"priority": 1}, "priority=1 has no effect"),
        (("a",), {"priority": 0.5}, "priority must be an integer"),
        (("a",), {"cache_salt": 5}, "cache_salt"),
    ]
    for args, options, message in bad:
        with pytest.raises(ValueError, match=message):
            engine.run(ask(*args, **options))
    assert client.submitted == []
    assert engine.llm.num_open == 0


def test_a_long_prompt_is_tokenized_off_the_event_loop(
    hand: tuple[Engine, HandClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = hand
    threads = []
    encode = Tokenizer.encode

    def recording(self: Tokenizer, *args: Any, **options: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(self, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", recording)
    engine.run(engine.llm.prepare("a" * 10))
    with pytest.raises(ValueError, match="max_model_len"):
        engine.run(engine.llm.prepare("a" * (async_llm.INLINE_SIZE + 1)))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def check_stop_string(engine: Engine, client: HandClient) -> None:
    async def stop() -> None:
        stream, request = await opened(engine, stop=["dog"])
        client.say(*(tokens(request, i) for i in ids_of(" a little dog. He ran", engine)))
        text = "".join([output.outputs[0].text async for output in stream])
        assert text == " a little "
        assert client.aborted == [request.id]

    engine.run(stop())


def test_a_stop_string_ends_the_request_in_the_engine_once(hand: tuple[Engine, HandClient]) -> None:
    check_stop_string(*hand)


def test_a_stop_that_is_not_passed_on_is_seen(hand: tuple[Engine, HandClient], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, client = hand
    monkeypatch.setattr(client, "abort", lambda request_ids: None)
    with pytest.raises(AssertionError):
        check_stop_string(engine, client)


def test_death_is_told_after_what_came_before_it_and_for_ever(hand: tuple[Engine, HandClient]) -> None:
    engine, client = hand

    async def die() -> None:
        stream, request = await opened(engine)
        idle, _ = await opened(engine)
        client.say(tokens(request, *ids_of(" there", engine)))
        client.die("it broke")
        assert (await anext(stream)).outputs[0].text == " there"
        for doomed in (stream, idle):
            with pytest.raises(EngineDeadError, match="it broke"):
                await anext(doomed)
        assert engine.llm.num_open == 0
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="it broke"):
                await opened(engine)
            with pytest.raises(EngineDeadError, match="it broke"):
                await engine.llm.call("block_map")
        assert client.aborted == [], "a dead engine is asked nothing"

    engine.run(die())


def test_a_death_before_the_first_request_is_told_to_it() -> None:
    client = hand_client()
    engine = Engine(AsyncLLM(client=client))
    client.made[0].die("stillborn")
    engine.llm._pump_thread.join(WAIT_S)
    with pytest.raises(EngineDeadError, match="stillborn"):
        engine.run(opened(engine))
    engine.close()


def test_news_of_strangers_is_ignored(hand: tuple[Engine, HandClient]) -> None:
    engine, client = hand

    async def listen() -> list[RequestOutput]:
        stream, request = await opened(engine)
        stranger = EngineRequest(id="stranger", prompt_token_ids=[1], params=SamplingParams())
        client.say(tokens(stranger, 5, end="stop"), tokens(request, 7, end="length"))
        return await all_of(stream)

    assert [output.outputs[0].token_ids for output in engine.run(listen())] == [[7]]


def test_a_request_that_the_engine_could_not_do_fails_alone(hand: tuple[Engine, HandClient]) -> None:
    engine, client = hand

    async def fail_one() -> None:
        (bad, bad_request), (good, good_request) = await opened(engine), await opened(engine)
        failed = tokens(bad_request, end="error")
        client.say(type(failed)(id=failed.id, new_token_ids=[], finish_reason="error", error="no swap space"))
        client.say(tokens(good_request, 7, end="length"))
        with pytest.raises(RuntimeError, match="no swap space"):
            await anext(bad)
        assert (await all_of(good))[-1].finished

    engine.run(fail_one())


def test_no_more_wait_than_max_waiting_allows() -> None:
    client = hand_client()
    engine = Engine(AsyncLLM(client=client, max_num_seqs=4, max_waiting=2))

    async def crowd() -> None:
        streams = [await opened(engine) for _ in range(6)]  # four seats, two may wait
        with pytest.raises(QueueFullError, match="3 requests would wait, at most 2 may"):
            await opened(engine)
        assert len(client.made[0].submitted) == 6
        streams[0][0].close()
        await opened(engine)

    engine.run(crowd())
    engine.close()


def test_an_engine_belongs_to_the_loop_that_used_it_first(hand: tuple[Engine, HandClient]) -> None:
    engine, _ = hand
    engine.run(opened(engine))
    with pytest.raises(RuntimeError, match="belongs to the event loop"):
        asyncio.run(opened(engine))  # type: ignore[arg-type]


def test_closing_ends_streams_and_the_pump(hand: tuple[Engine, HandClient]) -> None:
    engine, _ = hand

    async def close() -> None:
        stream, _ = await opened(engine)
        async with engine.llm:
            pass
        with pytest.raises(EngineDeadError, match="closed"):
            await anext(stream)

    engine.run(close())
    engine.llm.close()
    assert not engine.llm._pump_thread.is_alive()
