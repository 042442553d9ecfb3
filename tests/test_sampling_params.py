"""Laws of `SamplingParams`: what is refused, how the refusal reads, and what is made of what is accepted."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve import request
from nanoserve.request import MIN_TEMPERATURE, OutputKind, SamplingParams

NAN, INF = math.nan, math.inf
HUGE = 10**400  # float() of it overflows
ENORMOUS = 10**5000  # repr() of it is refused
NOT_NUMBERS: list[Any] = ["1", "", None, True, False, [1], {}, b"1", 1j, NAN, INF, -INF, HUGE, -HUGE, ENORMOUS]
NOT_COUNTS: list[Any] = [*NOT_NUMBERS, 1.0, 2**63]
NOT_LISTS: list[Any] = ["1", 1, 1.0, True, False, NAN, {1: 1}, {1}]
NOT_IDS: list[Any] = ["1", None, True, 1.0, -1, 2**63, HUGE, NAN, [1]]
NOT_WORDS: list[Any] = ["", None, 1, True, b"stop", ["stop"]]

# Field -> refused values of that field alone, from the rules and from values of a wrong type.
REFUSED: dict[str, list[Any]] = {
    "n": [*NOT_COUNTS, 0, -1, 16_385],
    "temperature": [*NOT_NUMBERS, -1, -1e-9, 2.0001, 3],
    "top_p": [*NOT_NUMBERS, 0, 0.0, -0.1, 1.0001, 2],
    "top_k": [*NOT_COUNTS, -2],
    "min_p": [*NOT_NUMBERS, -0.001, 1.001],
    "presence_penalty": [*NOT_NUMBERS, -2.001, 2.001],
    "frequency_penalty": [*NOT_NUMBERS, -2.001, 2.001],
    "repetition_penalty": [*NOT_NUMBERS, 0, 0.0, -1.0],
    "seed": [v for v in NOT_COUNTS if v is not None] + [-1.0, -(2**63) - 1],
    "max_tokens": [v for v in NOT_COUNTS if v is not None] + [0, -1],
    "min_tokens": [*NOT_COUNTS, -1],
    "stop": [*[v for v in NOT_LISTS if v != "1"], ""],
    "stop_token_ids": NOT_LISTS,
    "ignore_eos": [None, 0, 1, "yes", 1.0],
    "include_stop_str_in_output": [None, 0, 1, "yes"],
    "logprobs": [v for v in NOT_COUNTS if v not in (None, True)] + [-2],
    "prompt_logprobs": [v for v in NOT_COUNTS if v not in (None, True)] + [-2],
    "detokenize": [None, 0, 1, "no"],
    "skip_special_tokens": [None, 0, 1, "no"],
    "logit_bias": [1, "1", [1], True, [(1, 1.0)]],
    "allowed_token_ids": [*NOT_LISTS, []],
    "bad_words": NOT_LISTS,
    "bad_words_token_ids": NOT_LISTS,
    "output_kind": ["everything", "DELTA", None, 1, []],
}
# Field -> refused items of an otherwise good list.
REFUSED_ITEMS: dict[str, list[Any]] = {
    "stop": NOT_WORDS,
    "stop_token_ids": NOT_IDS,
    "allowed_token_ids": NOT_IDS,
    "bad_words": NOT_WORDS,
    "bad_words_token_ids": [[], "1", 1, None, *([item] for item in NOT_IDS)],
}
GOOD_ITEM: dict[str, Any] = {"stop": "a", "bad_words": "a", "bad_words_token_ids": [1]}


def refusal(**fields: Any) -> str:
    with pytest.raises(ValueError, match=re.escape(next(iter(fields)))) as caught:
        SamplingParams(**fields)
    return str(caught.value)


def shown(value: object) -> str:
    return "thousands of digits" if isinstance(value, int) and value == ENORMOUS else repr(value)[:200]


def test_every_field_has_refusals() -> None:
    assert set(REFUSED) == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", REFUSED)
def test_every_refusal_names_the_field_the_value_and_the_limit(name: str) -> None:
    for value in REFUSED[name]:
        message = refusal(**{name: value})
        assert message.startswith(name), message
        assert " must be " in message
        assert shown(value) in message or (name, value) == ("stop", ""), message
        assert "\n" not in message
        assert len(message) < 400


@pytest.mark.parametrize("name", REFUSED_ITEMS)
def test_every_bad_item_is_named_by_its_place(name: str) -> None:
    for item in REFUSED_ITEMS[name]:
        message = refusal(**{name: [GOOD_ITEM.get(name, 1), item]})
        assert message.startswith(f"{name}[1] must be "), message
        assert shown(item) in message


@pytest.mark.parametrize("key", ["a", "-1", "1.0", "", " 1", "9" * 30, -1, 1.5, None, True, 2**63, (1,)])
def test_every_bad_key_of_logit_bias_is_refused(key: Any) -> None:
    assert repr(key) in refusal(logit_bias={key: 1.0})


@pytest.mark.parametrize("value", ["1", None, True, NAN, [1]])
def test_every_bad_value_of_logit_bias_is_refused(value: Any) -> None:
    assert refusal(logit_bias={7: value}).startswith("logit_bias[7] must be a number")


def test_every_rule_between_two_fields_holds() -> None:
    assert "max_tokens=4" in refusal(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=10**9, max_tokens=None).min_tokens == 10**9
    assert "temperature 0" in refusal(n=2, temperature=0)
    assert "temperature 0" in refusal(n=2, temperature=9e-6)
    assert SamplingParams(n=2, temperature=0.5).n == 2
    assert "stop strings" in refusal(detokenize=False, stop=["a"])
    assert SamplingParams(detokenize=False, stop_token_ids=[1]).stop_token_ids == [1]


ACCEPTED: list[dict[str, Any]] = [
    {"temperature": 0, "n": 1},
    {"n": 16_384},
    {"temperature": 2},
    {"temperature": -0.0},
    {"top_p": 1},
    {"top_p": 5e-324},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 2**63 - 1},
    {"min_p": 0},
    {"min_p": 1},
    {"presence_penalty": -2, "frequency_penalty": 2},
    {"repetition_penalty": 5e-324},
    {"repetition_penalty": 1e300},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"max_tokens": None},
    {"min_tokens": 0, "max_tokens": 1},
    {"logprobs": 0, "prompt_logprobs": -1},
    {"stop_token_ids": [0, 0]},
    {"allowed_token_ids": [0]},
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_every_limit_itself_is_accepted(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields


def test_every_default_is_accepted_and_is_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert not params.is_greedy


def test_every_normalised_value_means_what_vllm_means() -> None:
    assert SamplingParams(stop="end").stop == ["end"]
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(logprobs=True, prompt_logprobs=True).prompt_logprobs == 1
    nones = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, bad_words_token_ids=None, logit_bias=None)
    assert nones == SamplingParams()
    tuples = SamplingParams(stop=("a",), stop_token_ids=(1,), bad_words_token_ids=((1, 2),))
    assert tuples == SamplingParams(stop=["a"], stop_token_ids=[1], bad_words_token_ids=[[1, 2]])
    assert SamplingParams(output_kind="delta").output_kind is OutputKind.DELTA
    bias = SamplingParams(logit_bias={"3": 1, 4: INF, 5: -INF, 6: HUGE, 7: -100.5, 8: -0.5}).logit_bias
    assert bias == {3: 1.0, 4: 100.0, 5: -100.0, 6: 100.0, 7: -100.0, 8: -0.5}
    assert all(type(value) is float for value in bias.values())


def test_a_small_temperature_is_raised_with_a_warning_at_the_callers_line() -> None:
    with pytest.warns(UserWarning, match=r"temperature=0\.001 is raised to 0\.01") as caught:
        assert SamplingParams(temperature=0.001).temperature == MIN_TEMPERATURE
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SamplingParams(temperature=MIN_TEMPERATURE).temperature == MIN_TEMPERATURE
        assert SamplingParams(temperature=9e-6).is_greedy
        assert SamplingParams(temperature=0).is_greedy


def test_no_list_is_shared_with_the_caller() -> None:
    stop_ids, bias, words = [1], {1: 1.0}, [[1]]
    params = SamplingParams(stop_token_ids=stop_ids, logit_bias=bias, bad_words_token_ids=words)
    stop_ids.append(-5)
    bias[-5] = NAN
    words.append([])
    assert (params.stop_token_ids, params.logit_bias, params.bad_words_token_ids) == ([1], {1: 1.0}, [[1]])
    assert SamplingParams().stop is not SamplingParams().stop


@pytest.mark.parametrize("name", ["best_of", "logits_processors", "guided_decoding", "structured_outputs", "topp"])
def test_every_field_that_is_not_supported_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: None})


def test_parameters_do_not_change() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


numbers = st.one_of(st.floats(), st.integers(), st.booleans(), st.none(), st.text(max_size=2), st.just(ENORMOUS))
anything = st.one_of(
    numbers, st.lists(numbers, max_size=3), st.dictionaries(st.integers() | st.text(max_size=2), numbers, max_size=2)
)


@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), anything, max_size=4))
def test_any_value_is_accepted_whole_or_refused_with_a_value_error(fields: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            params = SamplingParams(**fields)
        except ValueError as error:
            message = str(error)
        else:
            message = ""
    if message:
        assert any(name in message for name in fields), message
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what was raised once is not raised again
        wire = msgspec.msgpack.encode(params)
        assert msgspec.msgpack.decode(wire, type=SamplingParams) == params
        assert msgspec.structs.replace(params) == params
    assert all(math.isfinite(value) for value in params.logit_bias.values())
    assert params.is_greedy or MIN_TEMPERATURE <= params.temperature <= 2


def test_a_planted_range_check_that_lets_nan_pass_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_types(ok: bool, name: str, value: object, limit: str) -> None:
        if not ok and value == value:
            raise ValueError(f"{name} must be {limit}, got {value!r:.200}.")

    monkeypatch.setattr(request, "_require", without_types)
    with pytest.raises(pytest.fail.Exception):
        test_every_refusal_names_the_field_the_value_and_the_limit("top_p")


@pytest.mark.parametrize("value", [2**64, 2**53 + 1, 10**300])
def test_every_large_number_travels(value: int) -> None:
    params = SamplingParams(repetition_penalty=value)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
