"""Laws of `LLM`: what it hands to an engine, what it makes of the answers, and that no request outlives its call.

Most of them need no engine: a client plays back a script. The last section asks the real one.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve import LLM, STAGES, EngineConfig, SamplingParams
from nanoserve.api.generation import Generation
from nanoserve.api.outputs import RequestOutput
from nanoserve.api.text import OutputText
from nanoserve.api.tokenizer import Tokenizer
from nanoserve.blocks import PrivateBlocks, SharedBlocks
from nanoserve.checkpoint import resolve_model_dir
from nanoserve.client import EngineDeadError, InProcessClient
from nanoserve.request import EngineInfo, EngineOutput, EngineRequest, OutputKind, TokenLogprobs

MODEL_LEN = 64
TOKENIZER = Tokenizer.load(resolve_model_dir("nanostory"))
VOCAB = TOKENIZER.vocab_size
STORY = " there was a little dog. He ran to the tree and saw a cat."


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class ScriptedClient:
    """An engine that answers from a script, `per_poll` tokens of every live request a poll. Refuses what no front
    end may send: a bad request, an id in use."""

    script: ClassVar[Callable[[EngineRequest], list[int]]]
    per_poll: ClassVar[int] = 1
    made: ClassVar[list[ScriptedClient]]

    def __init__(self, config: EngineConfig, observer: object = None) -> None:
        self.info = EngineInfo(
            model=config.model, max_model_len=MODEL_LEN, vocab_size=VOCAB, num_blocks=8, block_size=16,
            device="cpu", dtype="float32",
        )  # fmt: skip
        self.submitted: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.live: dict[str, list[int]] = {}
        self.closed = 0
        self._news: list[EngineOutput] = []
        self.made.append(self)

    def submit(self, request: EngineRequest) -> None:
        assert request.id not in self.live, "id in use"
        assert request.params.n == 1
        assert 0 < len(request.prompt_token_ids) < MODEL_LEN
        self.submitted.append(request)
        self.live[request.id] = list(type(self).script(request))

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            if self.live.pop(request_id, None) is not None:
                self._news.append(EngineOutput(id=request_id, new_token_ids=[], finish_reason="abort"))

    def poll(self, timeout: float | None = None) -> list[EngineOutput]:
        assert self._news or self.live or timeout is not None, "a real engine would never return"
        news, self._news = self._news, []
        return news + [self._answer(request_id) for request_id in list(self.live)]

    def _answer(self, request_id: str) -> EngineOutput:
        left = self.live[request_id]
        new, left[:] = left[: self.per_poll], left[self.per_poll :]
        request = next(r for r in self.submitted if r.id == request_id)
        ends_at_eos = bool(new) and new[-1] == request.eos_token_id and not request.params.ignore_eos
        reason = "stop" if ends_at_eos else None if left else "length"
        if reason is not None:
            del self.live[request_id]
        return EngineOutput(
            id=request_id, new_token_ids=new, finish_reason=reason, num_cached_tokens=3,
            logprobs=self._logprobs(new, request.params.logprobs), prompt_logprobs=self._prompt_logprobs(request),
        )  # fmt: skip

    def _logprobs(self, token_ids: list[int], k: int | None) -> list[TokenLogprobs] | None:
        if k is None:
            return None
        return [TokenLogprobs([i, *range(k)], [-0.5] * (k + 1), [k + 1, *range(1, k + 1)]) for i in token_ids]

    def _prompt_logprobs(self, request: EngineRequest) -> list[TokenLogprobs | None] | None:
        if request.params.prompt_logprobs is None:
            return None
        return [None, *(TokenLogprobs([i], [-1.0], [1]) for i in request.prompt_token_ids[1:])]

    def call(self, method: str, *args: Any) -> Any:
        assert method == "reset_prefix_cache"
        return not self.live

    def close(self) -> None:
        self.closed += 1


def scripted(answer: str | list[int] | Callable[[EngineRequest], list[int]], *, per_poll: int = 1) -> type[Any]:
    """A client class whose engine answers every request like this."""
    if isinstance(answer, str):
        answer = ids_of(answer)
    script = answer if callable(answer) else lambda request: answer
    return type("Scripted", (ScriptedClient,), {"script": staticmethod(script), "per_poll": per_poll, "made": []})


def scripted_llm(answer: Any = STORY, *, per_poll: int = 1, **options: Any) -> tuple[LLM, Any]:
    """An LLM and its client."""
    client = scripted(answer, per_poll=per_poll)
    llm = LLM(client=client, **options)
    return llm, client.made[0]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 50, **fields})


# --- What reaches the engine


def test_every_form_of_a_prompt_becomes_the_same_tokens() -> None:
    llm, client = scripted_llm()
    ids = ids_of("Once upon a time")
    llm.generate(["Once upon a time", ids, {"prompt": "Once upon a time"}, {"prompt_token_ids": tuple(ids)}])
    llm.generate("Once upon a time")
    llm.generate(ids)
    assert [r.prompt_token_ids for r in client.submitted] == [ids] * 6
    assert llm.generate([]) == []


def test_every_answer_of_n_is_a_request_with_a_seed_of_its_own() -> None:
    llm, client = scripted_llm()
    (output,) = llm.generate("Once", params(n=3, seed=7, prompt_logprobs=0))
    assert [r.params.seed for r in client.submitted] == [7, 8, 9]
    assert [r.params.n for r in client.submitted] == [1, 1, 1]
    assert [r.id.rsplit("-", 1)[0] for r in client.submitted] == ["0-0", "0-1", "0-2"]
    assert [r.params.prompt_logprobs for r in client.submitted] == [0, None, None]
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert output.prompt_logprobs is not None
    llm.generate("Once", params(n=2))
    assert [r.params.seed for r in client.submitted[3:]] == [None, None]


@pytest.mark.parametrize("seed", [-(2**63), -3, -2, 0, 2**63 - 2, 2**63 - 1])
def test_every_answer_has_a_seed_of_its_own_whatever_the_first_is(seed: int) -> None:
    llm, client = scripted_llm()
    llm.generate("Once", params(n=4, seed=seed))
    seeds = [r.params.seed for r in client.submitted]
    assert seeds[0] == seed
    assert None not in seeds
    assert len(set(seeds)) == 4


def test_ids_in_the_engine_are_never_used_twice() -> None:
    llm, client = scripted_llm()
    for _ in range(3):
        stream = llm.stream("Once", params())
        next(stream)
        stream.close()
    assert len({r.id for r in client.submitted}) == 3
    generation = [Generation("x", llm._inputs.prompt("Once"), params(), TOKENIZER) for _ in range(2)]
    assert generation[0].requests[0].id != generation[1].requests[0].id


def model_with_eos(folder: Path, eos: list[int]) -> str:
    """nanostory's tokenizer, in a folder whose generation config lists these EOS ids."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(resolve_model_dir("nanostory") / name, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return str(folder)


@pytest.mark.parametrize(("ignore_eos", "wanted"), [(False, [9, 5]), (True, [9])])
def test_further_eos_ids_stop_unless_eos_is_ignored(ignore_eos: bool, wanted: list[int], tmp_path: Path) -> None:
    first = TOKENIZER.eos_token_id
    assert first is not None
    llm, client = scripted_llm(model=model_with_eos(tmp_path, [first, 5]))
    llm.generate("Once", params(stop_token_ids=[9], ignore_eos=ignore_eos, min_tokens=2))
    assert client.submitted[0].params.stop_token_ids == wanted
    assert client.submitted[0].eos_token_id == first


def test_bad_words_reach_the_engine_as_ids() -> None:
    llm, client = scripted_llm()
    llm.generate("Once", params(bad_words=["dog"]))
    assert ids_of(" dog") in client.submitted[0].params.bad_words_token_ids


def test_priority_and_salt_are_handed_on_one_for_all_or_one_each() -> None:
    llm, client = scripted_llm(policy="priority")
    llm.generate(["a", "b"], priority=[2, 1], cache_salt="x")
    llm.generate([{"prompt": "a", "cache_salt": "y"}, "b"], priority=3)
    assert [(r.priority, r.cache_salt) for r in client.submitted] == [(2, "x"), (1, "x"), (3, "y"), (3, "")]


def test_chat_uses_the_models_template() -> None:
    llm, client = scripted_llm()
    messages = [{"role": "user", "content": "Once upon a time"}, {"role": "assistant", "content": " there was"}]
    (one,) = llm.chat(messages)
    assert one.prompt == "Once upon a time there was"
    assert client.submitted[0].prompt_token_ids == ids_of(one.prompt)
    assert len(llm.chat([messages, messages])) == 2


# --- What is refused, before anything is submitted

BAD_PROMPTS = {
    "empty text": ("", "prompt is empty"),
    "empty ids": ({"prompt_token_ids": []}, "prompt is empty"),
    "not ids": ([1, "2"], "'2'"),
    "booleans": ({"prompt_token_ids": [True]}, "True"),
    "negative": ([3, -1], "holds -1"),
    "outside": ([3, VOCAB], f"holds {VOCAB}, the vocabulary ends at {VOCAB - 1}"),
    "too long": ([1] * MODEL_LEN, f"has {MODEL_LEN} tokens, at most {MODEL_LEN - 1}"),
    "not a prompt": (3.5, "3.5"),
    "no key": ({}, "neither"),
    "both": ({"prompt": "a", "prompt_token_ids": [1]}, "both"),
    "unknown key": ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data"),
    "bytes": ({"prompt_token_ids": b"abc"}, "b'abc'"),
    "half a surrogate": ("a\ud800", "at position 1"),
    "text as ids": ({"prompt": [1]}, "prompt_token_ids"),
    "salt": ({"prompt": "a", "cache_salt": 3}, "cache_salt must be a string, got 3"),
    "half a surrogate as salt": ({"prompt": "a", "cache_salt": "\udce9"}, "cache_salt is not valid Unicode"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_every_bad_prompt_is_refused_before_any_is_submitted(name: str) -> None:
    prompt, message = BAD_PROMPTS[name]
    llm, client = scripted_llm()
    with pytest.raises(ValueError, match=re.escape(message)):
        llm.generate(["Once", prompt])
    assert client.submitted == []
    assert llm.generate("Once")[0].finished, "the engine serves on"


BAD_PARAMS = {
    "stop_token_ids": ({"stop_token_ids": [VOCAB]}, f"stop_token_ids holds {VOCAB}"),
    "allowed_token_ids": ({"allowed_token_ids": [VOCAB]}, f"allowed_token_ids holds {VOCAB}"),
    "logit_bias": ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias holds {VOCAB}"),
    "stop": ({"stop": ["\udce9"]}, "stop is not valid Unicode"),
    "bad_words": ({"bad_words": ["\udce9"]}, "bad_words is not valid Unicode"),
    "bad_words_token_ids": ({"bad_words_token_ids": [[VOCAB]]}, f"bad_words_token_ids holds {VOCAB}"),
    "logprobs": ({"logprobs": VOCAB + 1}, f"logprobs={VOCAB + 1} is larger than the vocabulary of {VOCAB}"),
    "prompt_logprobs": ({"prompt_logprobs": VOCAB + 1}, f"prompt_logprobs={VOCAB + 1}"),
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_every_parameter_that_the_model_cannot_honour_is_refused(name: str) -> None:
    fields, message = BAD_PARAMS[name]
    llm, client = scripted_llm()
    with pytest.raises(ValueError, match=message):
        llm.generate(["a", "b"], [params(), params(**fields)])
    assert client.submitted == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling_params": [params()]}, "sampling_params has 1 entries for 2 prompts"),
        ({"sampling_params": {"temperature": 1}}, "must be a SamplingParams"),
        ({"priority": [1]}, "priority has 1 entries for 2 prompts"),
        ({"priority": 1}, "policy='priority'"),
        ({"priority": "high"}, "priority must be an integer"),
        ({"priority": 2**63}, "64 bits"),
        ({"cache_salt": ["a", "b", "c"]}, "cache_salt has 3 entries for 2 prompts"),
    ],
)
def test_every_bad_argument_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    llm, client = scripted_llm()
    with pytest.raises(ValueError, match=message):
        llm.generate(["a", "b"], **options)
    assert client.submitted == []


def test_a_stream_checks_when_it_is_called_and_works_when_it_is_read() -> None:
    llm, client = scripted_llm()
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.stream("")
    stream = llm.stream("Once")
    assert client.submitted == []
    next(stream)
    assert len(client.submitted) == 1


# --- Which engine is built


def test_any_field_can_be_overridden_under_our_name_or_vllms() -> None:
    base = scripted(STORY)
    assert LLM(client=base).config.blocks is list(STAGES.values())[-1].blocks
    llm = LLM("nanostory", stage="v0", client=base, scheduling_policy="priority", num_gpu_blocks_override=99)
    assert (llm.config.policy, llm.config.num_blocks) == ("priority", 99)
    assert llm.config.scheduler is STAGES["v0"].scheduler
    assert LLM(client=base, stage="v0", enable_prefix_caching=True).config.blocks is SharedBlocks
    assert LLM(client=base, enable_prefix_caching=False).config.blocks is PrivateBlocks
    mine = EngineConfig(client=base, max_num_seqs=3)
    assert LLM(config=mine).config is not None
    assert LLM(config=mine, block_size=8).config.max_num_seqs == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_num_seq": 3}, TypeError, "did you mean 'max_num_seqs'"),
        ({"tensor_parallel_size": 2}, TypeError, "'tensor_parallel_size' is not an engine option"),
        ({"stage": "v7"}, ValueError, "use one of v0"),
        ({"stage": "v0", "config": EngineConfig()}, ValueError, "give one of them"),
        ({"scheduler": "unified"}, ValueError, "UnifiedScheduler"),
        ({"enable_prefix_caching": True, "blocks": PrivateBlocks}, ValueError, "give one of the two"),
        ({"policy": "fcfs", "scheduling_policy": "fcfs"}, ValueError, "given twice"),
        ({"block_size": 0}, ValueError, "block_size"),
        ({"model": "no/such/folder/here"}, ValueError, "no/such/folder/here"),
    ],
)
def test_every_bad_engine_option_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(**({} if "config" in options else {"client": scripted(STORY)}), **options)


# --- What comes back


def test_outputs_come_in_the_order_of_the_prompts() -> None:
    def script(request: EngineRequest) -> list[int]:
        return ids_of(STORY)[: 12 - 3 * int(request.id[0])]  # the last ends first

    llm, _ = scripted_llm(script)
    prompts = ["One", "Two", "Three"]
    outputs = llm.generate(prompts)
    assert [output.prompt for output in outputs] == prompts
    assert [output.request_id for output in outputs] == ["0", "1", "2"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 9, 6]


def test_a_parent_finishes_when_all_its_answers_do() -> None:
    def script(request: EngineRequest) -> list[int]:
        return ids_of(STORY)[: 2 + 4 * int(request.id.split("-")[1])]

    llm, _ = scripted_llm(script)
    seen = list(llm.stream("Once", params(n=3, output_kind=OutputKind.DELTA)))
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    ends = [answer.index for output in seen for answer in output.outputs if answer.finished()]
    assert ends == [0, 1, 2]
    (final,) = llm.generate("Once", params(n=3))
    assert [len(answer.token_ids) for answer in final.outputs] == [2, 6, 10]


def test_output_has_one_logprob_entry_for_every_token() -> None:
    llm, _ = scripted_llm(per_poll=3)
    (output,) = llm.generate("Once upon", params(logprobs=2, prompt_logprobs=0))
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert answer.cumulative_logprob == pytest.approx(-0.5 * len(answer.token_ids))
    assert len(answer.logprobs) == len(answer.token_ids)
    for token_id, position in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(position)) == token_id
        assert position[token_id].rank == 3
        assert position[token_id].decoded_token == TOKENIZER.decode([token_id])
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [next(iter(p or {})) for p in output.prompt_logprobs[1:]] == output.prompt_token_ids[1:]
    (plain,) = llm.generate("Once upon", params())
    assert (plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None, None)
    assert plain.prompt_logprobs is None


def test_metrics_hold_only_what_happened() -> None:
    llm, _ = scripted_llm()
    (output,) = llm.generate("Once")
    metrics = output.metrics
    assert metrics is not None
    assert metrics.first_token_s is not None
    assert metrics.last_token_s is not None
    assert metrics.arrival_s <= metrics.first_token_s < metrics.last_token_s
    assert output.num_cached_tokens == 3
    refused, _ = scripted_llm([])
    (output,) = refused.generate("Once")
    assert output.metrics is not None
    assert (output.metrics.first_token_s, output.metrics.last_token_s, output.metrics.ttft_s) == (None, None, None)


def test_without_detokenizing_there_is_no_text() -> None:
    llm, _ = scripted_llm()
    (output,) = llm.generate("Once", params(detokenize=False))
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids == ids_of(STORY)


def test_eos_is_a_token_but_not_text() -> None:
    eos = TOKENIZER.eos_token_id
    assert eos is not None
    llm, _ = scripted_llm([*ids_of(STORY), eos])
    (output,) = llm.generate("Once", params(skip_special_tokens=False))
    answer = output.outputs[0]
    assert (answer.text, answer.token_ids[-1], answer.finish_reason, answer.stop_reason) == (STORY, eos, "stop", None)


# --- Stop strings


@pytest.mark.parametrize("per_poll", [1, 4, 100])
def test_a_stop_string_ends_the_request_here_and_in_the_engine(per_poll: int) -> None:
    llm, client = scripted_llm(per_poll=per_poll)
    (output,) = llm.generate("Once", params(stop=["little", "tree"], logprobs=0))
    answer = output.outputs[0]
    assert answer.text == STORY[: STORY.index("little")]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "little")
    assert TOKENIZER.decode(answer.token_ids[:-1]).count("little") == 0
    assert TOKENIZER.decode(answer.token_ids).endswith("little")
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    assert answer.cumulative_logprob == pytest.approx(-0.5 * len(answer.token_ids))
    assert client.live == {}, "nothing runs on"
    ended_itself = per_poll == 100
    assert client.aborted == ([] if ended_itself else [client.submitted[0].id])


def test_a_stop_string_of_one_answer_leaves_the_others_running() -> None:
    def script(request: EngineRequest) -> list[int]:
        return ids_of(STORY) if request.id.startswith("0-1") else ids_of(" a b c d e f g h")

    llm, client = scripted_llm(script)
    (output,) = llm.generate("Once", params(n=2, stop=["little"]))
    assert [answer.finish_reason for answer in output.outputs] == ["length", "stop"]
    assert output.outputs[0].text == " a b c d e f g h"
    assert client.aborted == [client.submitted[1].id]


def texts(outputs: Iterable[RequestOutput], index: int = 0) -> list[str]:
    return [answer.text for output in outputs for answer in output.outputs if answer.index == index]


@functools.cache
def playing_llm() -> tuple[LLM, Any]:
    """One LLM for many answers: its engine plays whatever `client.answer` is."""
    llm, client = scripted_llm(lambda request: client.answer)
    return llm, client


def check_streams_agree(answer: list[int], per_poll: int, **fields: Any) -> None:
    """The law: deltas add up to the final text and ids, and so does the last of the cumulative outputs."""
    llm, client = playing_llm()
    client.answer, client.per_poll = answer, per_poll
    kinds = {}
    for kind in OutputKind:
        kinds[kind] = list(llm.stream("Once", params(**fields, logprobs=0, output_kind=kind)))
    (final,) = kinds[OutputKind.FINAL_ONLY]
    whole = final.outputs[0]
    deltas, running = kinds[OutputKind.DELTA], kinds[OutputKind.CUMULATIVE]
    assert "".join(texts(deltas)) == whole.text
    assert [i for output in deltas for i in output.outputs[0].token_ids] == whole.token_ids
    assert [p for output in deltas for p in output.outputs[0].logprobs or []] == whole.logprobs
    assert running[-1].outputs[0] == whole
    for earlier, later in zip(texts(running), texts(running)[1:], strict=False):
        assert later.startswith(earlier), "what was shown is never taken back"


token_lists = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)


@given(
    answer=st.one_of(token_lists, st.sampled_from([ids_of(STORY), ids_of("é 漢字 🙂 a")])),
    per_poll=st.integers(1, 5),
    stop=st.lists(st.sampled_from(["e", " a", "tree", "dog. H", "\ufffd", "🙂"]), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_every_stream_adds_up_to_the_final_output(
    answer: list[int], per_poll: int, stop: list[str], include: bool, min_tokens: int
) -> None:
    check_streams_agree(
        answer, per_poll, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens, ignore_eos=True
    )


def test_a_stream_that_holds_nothing_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def delta(self: OutputText, finished: bool) -> str:
        unsent, self._unsent = "".join(self._unsent), []
        return unsent

    monkeypatch.setattr(OutputText, "delta", delta)
    with pytest.raises(AssertionError):
        check_streams_agree(ids_of(STORY), 1, stop=["dog. H"])


# --- No request outlives the call that made it


def interrupted_after(num_polls: int, error: BaseException) -> type[Any]:
    class Interrupted(scripted(STORY)):
        made: ClassVar[list[Any]] = []
        polls = 0

        def poll(self, timeout: float | None = None) -> list[EngineOutput]:
            self.polls += 1
            if self.polls == num_polls:
                raise error
            return super().poll(timeout)

    return Interrupted


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), RuntimeError("boom")])
def test_whatever_ends_generate_aborts_every_request(error: BaseException) -> None:
    client_class = interrupted_after(3, error)
    llm = LLM(client=client_class)
    with pytest.raises(type(error)):
        llm.generate(["a", "b"], params(n=2))
    (client,) = client_class.made
    assert len(client.submitted) == 4
    assert client.live == {}
    assert set(client.aborted) == {r.id for r in client.submitted}
    assert llm.generate("Once")[0].outputs[0].text == STORY, "the engine serves on"


def test_an_interrupt_within_a_step_ends_other_streams_too_and_empties_the_cache() -> None:
    class Watched(interrupted_after(3, KeyboardInterrupt())):
        made: ClassVar[list[Any]] = []
        resets = 0

        def call(self, method: str, *args: Any) -> Any:
            self.resets += 1
            return super().call(method, *args)

    llm = LLM(client=Watched)
    other = llm.stream("a", params(output_kind=OutputKind.DELTA))
    next(other)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("b", params())
    assert [output.outputs[0].finish_reason for output in other] == ["abort"]
    assert Watched.made[0].live == {}
    assert Watched.made[0].resets == 1


@pytest.mark.parametrize("where", ["generation.py", "text.py", "llm.py"])
def test_no_stream_loses_tokens_whichever_line_of_the_front_end_an_interrupt_comes_at(where: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_kind=OutputKind.CUMULATIVE)
    one, other = {"prompt_token_ids": [*range(10, 30)]}, {"prompt_token_ids": [*range(50, 80)]}
    config = replace(STAGES["shared"], client=InProcessClient, num_blocks=40, max_model_len=128)
    seen = 0

    def interrupt_at(line: int) -> Callable[..., Any]:
        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal seen
            if event == "line" and frame.f_code.co_filename.endswith(where) and frame.f_code.co_name != "_step":
                seen += 1
                if seen == line:
                    signal.raise_signal(signal.SIGINT)
            return trace

        return trace

    with LLM(config=config) as llm:
        expected = llm.generate([other], params, use_tqdm=False)[0].outputs[0].token_ids
        for line in range(3, 400, 17):
            seen, taken = 0, llm.stream(other, params)
            next(taken)
            sys.settrace(interrupt_at(line))
            with suppress(KeyboardInterrupt):
                llm.generate([one], params, use_tqdm=False)
            sys.settrace(None)
            last = [output.outputs[0] for output in taken][-1:]
            assert all(out.token_ids == expected or out.finish_reason == "abort" for out in last), f"line {line}"


def test_an_interrupt_while_submitting_aborts_what_was_submitted() -> None:
    class Full(scripted(STORY)):
        made: ClassVar[list[Any]] = []

        def submit(self, request: EngineRequest) -> None:
            super().submit(request)
            if len(self.submitted) == 3:
                raise KeyboardInterrupt

    llm = LLM(client=Full)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c", "d"], params())
    assert Full.made[0].live == {}


def test_a_stream_that_is_closed_early_aborts_every_answer() -> None:
    llm, client = scripted_llm()
    stream = llm.stream(["a", "b"], params(n=2, output_kind=OutputKind.DELTA))
    next(stream)
    assert len(client.live) == 4
    stream.close()
    assert client.live == {}
    assert llm._routes == {}


def test_a_front_end_that_forgets_to_abort_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "_abort", lambda self, request_ids: None)
    with pytest.raises(AssertionError):
        test_a_stream_that_is_closed_early_aborts_every_answer()


def test_interleaved_streams_each_get_their_own() -> None:
    llm, _ = scripted_llm()
    kind = params(output_kind=OutputKind.DELTA)
    streams = [llm.stream(prompt, kind) for prompt in ("a", "b")]
    seen: list[list[RequestOutput]] = [[], []]
    for turn in range(100):
        for output in [next(streams[turn % 2], None)]:
            if output is not None:
                seen[turn % 2].append(output)
    assert ["".join(texts(outputs)) for outputs in seen] == [STORY, STORY]
    assert [{output.prompt for output in outputs} for outputs in seen] == [{"a"}, {"b"}]


def test_a_stream_that_another_one_has_carried_to_its_end_is_still_read() -> None:
    llm, _ = scripted_llm(lambda request: ids_of(STORY)[: 3 if request.id.startswith("0") else 9])
    first, second = (llm.stream("a", params(output_kind=OutputKind.DELTA)) for _ in range(2))
    seen = [next(first)]
    assert len(list(second)) == 9
    seen += first
    assert [i for output in seen for i in output.outputs[0].token_ids] == ids_of(STORY)[:3]


def test_a_dead_engine_ends_every_stream_and_hangs_none() -> None:
    class Dead(interrupted_after(2, EngineDeadError("gone"))):
        made: ClassVar[list[Any]] = []

        def poll(self, timeout: float | None = None) -> list[EngineOutput]:
            if self.polls >= 2:
                raise EngineDeadError("gone")
            return super().poll(timeout)

    llm = LLM(client=Dead)
    stream = llm.stream("a", params())
    next(stream)
    with pytest.raises(EngineDeadError):
        llm.generate("b")
    with pytest.raises(EngineDeadError):
        next(stream)


def test_a_request_that_fails_in_the_engine_is_an_error() -> None:
    class Failing(scripted(STORY)):
        made: ClassVar[list[Any]] = []

        def _answer(self, request_id: str) -> EngineOutput:
            if not request_id.startswith("1"):
                return super()._answer(request_id)
            del self.live[request_id]
            return EngineOutput(id=request_id, new_token_ids=[], finish_reason="error", error="nan in the logits")

    llm = LLM(client=Failing)
    other = llm.stream("a", params(output_kind=OutputKind.DELTA))
    first = next(other)
    with pytest.raises(RuntimeError, match="nan in the logits"):
        llm.generate("b")
    assert first.outputs[0].text + "".join(texts(other)) == STORY, "other requests run on"


def test_a_closed_llm_refuses_and_closes_its_client_once_or_more() -> None:
    llm, client = scripted_llm()
    with llm:
        stream = llm.stream("a", params())
        next(stream)
    llm.close()
    assert client.closed >= 1
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")


def test_the_progress_bar_is_for_terminals_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = scripted_llm()
    llm.generate(["a", "b"])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert len(llm.generate(["a", "b"])) == 2
    assert "prompts" in capsys.readouterr().err
    llm.generate(["a", "b"], use_tqdm=False)
    assert capsys.readouterr().err == ""


# --- With the real engine

REAL = {"kv_cache_memory_bytes": 8 * 2**20, "max_model_len": 256, "check_invariants": True}
PROMPTS = ["Once upon a time", "The cat said", "Once upon a time there was a dog. The dog"]


def greedy(**fields: Any) -> SamplingParams:
    return params(temperature=0.0, **fields)


@pytest.fixture(scope="module")
def real() -> Iterator[LLM]:
    with LLM(**REAL) as llm:
        yield llm


@pytest.fixture(scope="module")
def story(real: LLM) -> str:
    return real.generate(PROMPTS[0], greedy())[0].outputs[0].text


def greedy_ids(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy(max_tokens=24))]


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_writes_the_same_story(stage: str, real: LLM) -> None:
    with LLM(stage=stage, **REAL) as llm:
        assert greedy_ids(llm) == greedy_ids(real)


def test_an_answer_of_n_is_what_its_seed_alone_gives(real: LLM) -> None:
    (output,) = real.generate(PROMPTS[0], params(n=3, seed=5, max_tokens=12))
    alone = [params(seed=5 + i, max_tokens=12) for i in range(3)]
    outputs = real.generate([PROMPTS[0]] * 3, alone)
    assert [answer.token_ids for answer in output.outputs] == [o.outputs[0].token_ids for o in outputs]
    assert len({answer.text for answer in output.outputs}) > 1


def test_a_stopped_story_is_the_start_of_the_whole(real: LLM, story: str) -> None:
    stop = story[20:25]
    (output,) = real.generate(PROMPTS[0], greedy(stop=[stop]))
    assert output.outputs[0].text == story[: story.index(stop)]
    assert real.reset_prefix_cache(), "no request holds a block"


def test_real_deltas_add_up_to_the_story(real: LLM, story: str) -> None:
    deltas = list(real.stream(PROMPTS[0], greedy(output_kind=OutputKind.DELTA, stop=["no such text"])))
    assert "".join(texts(deltas)) == story
    assert deltas[-1].finished


def test_generation_ends_where_the_model_does(real: LLM) -> None:
    ids = ids_of(PROMPTS[0]) * 100
    longest = real.info.max_model_len - 1
    (full, near) = real.generate([ids[:longest], ids[: longest - 4]], greedy(max_tokens=200, ignore_eos=True))
    assert [len(output.outputs[0].token_ids) for output in (full, near)] == [1, 5]
    assert full.outputs[0].finish_reason == near.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match=f"prompt has {longest + 1} tokens, at most {longest}"):
        real.generate([ids[: longest + 1]])


def test_real_logprobs_rank_the_greedy_token_first(real: LLM) -> None:
    (output,) = real.generate(PROMPTS[0], greedy(max_tokens=6, logprobs=3, prompt_logprobs=1))
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert [len(position) for position in answer.logprobs] == [3] * 6
    assert all(answer.logprobs[i][token_id].rank == 1 for i, token_id in enumerate(answer.token_ids))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def interrupting_runner() -> type[Any]:
    """A runner that Ctrl-C meets in its first step, after the plan was made and before any KV is written."""
    from nanoserve.runner import EagerRunner

    class Interrupted(EagerRunner):
        steps = 0

        def launch(self, plan: Any) -> Any:
            type(self).steps += 1
            if type(self).steps == 1:
                signal.raise_signal(signal.SIGINT)
            return super().launch(plan)

    return Interrupted


def check_tokens_after_an_interrupt(wanted: list[int]) -> None:
    """The law: an interrupted step leaves nothing behind that changes a later answer."""
    prompt = ids_of(PROMPTS[2] * 6)
    with LLM(runner=interrupting_runner(), client=InProcessClient, **REAL) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt, prompt], greedy())
        (output,) = llm.generate([prompt], greedy(max_tokens=24))
        assert output.outputs[0].token_ids == wanted


def test_an_interrupted_step_does_not_change_later_answers(real: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (output,) = real.generate([ids_of(PROMPTS[2] * 6)], greedy(max_tokens=24))
    check_tokens_after_an_interrupt(output.outputs[0].token_ids)
    monkeypatch.setattr("nanoserve.client.whole_despite_interrupts", nullcontext)
    with pytest.raises(EngineDeadError, match="torn"):  # planted: half a step, whose blocks' KV was never written
        check_tokens_after_an_interrupt(output.outputs[0].token_ids)


def test_closing_leaves_no_thread_and_no_child() -> None:
    before = set(threading.enumerate())
    with LLM(**REAL) as llm:
        llm.generate("Once", greedy(max_tokens=2))
    assert set(threading.enumerate()) <= before
    assert multiprocessing.active_children() == []
