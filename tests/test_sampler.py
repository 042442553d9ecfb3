"""Laws of the sampler: against a slow per-row reference, against distributions, and against planted bugs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nanoserve import sampler, sampling_inputs
from nanoserve.request import SamplingParams, TokenLogprobs
from nanoserve.sampler import SamplingInputs, SamplingRow, prompt_logprobs, sample

INF = math.inf
MARGIN = 1e-4  # nearer to a decision than this, float32 and the reference may differ
EOS = 3
VOCAB = 24


def splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def reference_noise(seed: int, index: int, token_id: int) -> float:
    key = splitmix64(splitmix64(seed % 2**64) + index * 0x9E3779B97F4A7C15)
    uniform = (splitmix64(key + token_id * 0x9E3779B97F4A7C15) >> 1) / 2**63
    return -math.log(-math.log1p(-min(max(uniform, 2.0**-64), 1 - 2.0**-24)))


def reference_logits(row: SamplingRow, raw: Sequence[float]) -> list[float]:
    """Steps 2 to 6: what a greedy row takes the largest of."""
    params, output = row.params, list(row.output_token_ids)
    logits = [float(x) for x in raw]
    if params.allowed_token_ids is not None:
        logits = [x if i in params.allowed_token_ids else -INF for i, x in enumerate(logits)]
    masked = list(logits)
    for word in params.bad_words_token_ids:
        if len(output) >= len(word) - 1 and output[len(output) - len(word) + 1 :] == word[:-1]:
            masked[word[-1]] = -INF
    if len(output) < params.min_tokens:
        for token_id in {row.eos_token_id, *params.stop_token_ids} - {None}:
            masked[token_id] = -INF
    logits = masked if max(masked) > -INF else logits
    for token_id, value in params.logit_bias.items():
        logits[token_id] += value
    for i in range(len(logits)):
        if i in row.prompt_token_ids or i in output:
            logits[i] = (
                logits[i] / params.repetition_penalty if logits[i] > 0 else logits[i] * params.repetition_penalty
            )
        logits[i] -= params.frequency_penalty * output.count(i)
        logits[i] -= params.presence_penalty * (i in output)
    return logits


def reference_distribution(logits: Sequence[float], params: SamplingParams) -> tuple[dict[int, float], float]:
    """Steps 8 to 10: the probability of each id that is left, and how near the nearest decision was."""
    scaled = [x / params.temperature for x in logits]
    largest, nearest = max(scaled), INF
    weights = {i: math.exp(x - largest) for i, x in enumerate(scaled) if x > -INF}
    if params.min_p > 0:
        nearest = min(abs(math.log(max(w, 1e-300) / params.min_p)) for w in weights.values())
        weights = {i: w for i, w in weights.items() if w >= params.min_p}
    order = sorted(weights, key=lambda i: (-logits[i], i))
    if params.top_k > 0:
        if params.top_k < len(order):
            nearest = min(nearest, logits[order[params.top_k - 1]] - logits[order[params.top_k]])
        order = order[: params.top_k]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if params.top_p < 1:
            nearest = min(nearest, abs(mass / total - params.top_p))
            if mass >= params.top_p * total:
                break
        mass += weights[i]
        kept.append(i)
    return {i: weights[i] / mass for i in kept}, nearest


def reference_id(row: SamplingRow, raw: Sequence[float]) -> tuple[int, float]:
    """The id of a greedy or seeded row, and how near the nearest decision was."""
    logits = reference_logits(row, raw)
    if row.params.is_greedy:
        scores, nearest = dict(enumerate(logits)), INF
    else:
        probabilities, nearest = reference_distribution(logits, row.params)
        seed, index = row.params.seed or 0, len(row.output_token_ids)
        scores = {i: math.log(p) + reference_noise(seed, index, i) for i, p in probabilities.items()}
    best, *others = sorted(scores, key=lambda i: (-scores[i], i))
    if others:
        nearest = min(nearest, scores[best] - scores[others[0]])
    return best, nearest


def reference_logprobs(raw: Sequence[float], token_id: int, k: int) -> TokenLogprobs:
    total = math.log(sum(math.exp(x) for x in raw))
    order = sorted(range(len(raw)), key=lambda i: (-raw[i], i))
    ids = [token_id] + [i for i in order[: len(raw) if k == -1 else k] if i != token_id]
    return TokenLogprobs(ids, [raw[i] - total for i in ids], [order.index(i) + 1 for i in ids])


def row_of(
    prompt: Sequence[int] = (), output: Sequence[int] = (), eos: int | None = None, **params: Any
) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), prompt, output, eos)


def sample_ids(
    logits: torch.Tensor | Sequence[Sequence[float]], rows: Sequence[SamplingRow], generator_seed: int = 0
) -> list[int]:
    logits_SV = torch.as_tensor(logits)
    inputs = SamplingInputs.build(rows, logits_SV.shape[1], "cpu")
    return sample(logits_SV, inputs, torch.Generator().manual_seed(generator_seed)).token_ids


def support(row: SamplingRow, logits: Sequence[float], num_draws: int = 400) -> set[int]:
    rows = [row] * num_draws
    return set(sample_ids(torch.tensor([logits]).expand(num_draws, -1), rows))


def assert_close(found: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert (found.token_ids, found.ranks) == (expected.token_ids, expected.ranks)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)


token_ids = st.integers(0, VOCAB - 1)
id_lists = st.lists(token_ids, max_size=6)


def maybe(feature: st.SearchStrategy, off: Any) -> st.SearchStrategy:
    return st.one_of(st.just(off), feature)


@st.composite
def sampling_rows(draw: st.DrawFn) -> SamplingRow:
    output = draw(st.lists(st.integers(0, 5), max_size=8))
    ending = output[-draw(st.integers(0, 2)) :] if output else []
    bad_words = [[*draw(st.sampled_from([[], ending, [7]])), draw(token_ids)] for _ in range(draw(st.integers(0, 2)))]
    params = SamplingParams(
        temperature=draw(st.sampled_from([0, 0, 0.3, 1.0, 1.0, 2.0])),
        top_k=draw(maybe(st.integers(1, VOCAB + 2), 0)),
        top_p=draw(maybe(st.floats(0.05, 0.999), 1.0)),
        min_p=draw(maybe(st.floats(0.01, 0.9), 0.0)),
        repetition_penalty=draw(maybe(st.floats(0.5, 2.0), 1.0)),
        frequency_penalty=draw(maybe(st.floats(-2, 2), 0.0)),
        presence_penalty=draw(maybe(st.floats(-2, 2), 0.0)),
        seed=draw(st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != -1)),
        min_tokens=draw(st.integers(0, 10)),
        stop_token_ids=draw(id_lists),
        logit_bias=draw(st.dictionaries(token_ids, st.floats(-6, 6), max_size=3)),
        allowed_token_ids=draw(maybe(st.lists(token_ids, min_size=1, max_size=12), None)),
        bad_words_token_ids=bad_words,
        logprobs=draw(st.sampled_from([None, None, 0, 1, 4, -1])),
    )
    return SamplingRow(params, draw(id_lists), output, draw(st.sampled_from([None, EOS])))


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, list[SamplingRow]]:
    rows = draw(st.lists(sampling_rows(), min_size=1, max_size=5))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return random.normal(0, 3, (len(rows), VOCAB)).astype(np.float32), rows


def check_against_the_reference(batch: tuple[np.ndarray, list[SamplingRow]]) -> None:
    raw, rows = batch
    logits_SV = torch.from_numpy(raw.copy())
    sampled = sample(logits_SV, SamplingInputs.build(rows, VOCAB, "cpu"))
    for index, row in enumerate(rows):
        expected, nearest = reference_id(row, raw[index].tolist())
        assume(nearest > MARGIN)
        assert sampled.token_ids[index] == expected
    asked = {index: row.params.logprobs for index, row in enumerate(rows) if row.params.logprobs is not None}
    assert set(sampled.logprobs) == set(asked)
    for index, k in asked.items():
        assert_close(sampled.logprobs[index], reference_logprobs(raw[index].tolist(), sampled.token_ids[index], k))
    assert np.array_equal(logits_SV.numpy(), raw), "the caller's logits changed"


@settings(max_examples=150)
@given(batches())
def test_every_row_gets_what_a_slow_reference_gets(batch: tuple[np.ndarray, list[SamplingRow]]) -> None:
    check_against_the_reference(batch)


def test_greedy_takes_the_largest_after_all_changes() -> None:
    logits = [1.0, 4.0, 3.0, 2.0]
    for params, expected in (
        ({}, 1),
        ({"repetition_penalty": 2.0}, 2),
        ({"presence_penalty": 1.5}, 2),
        ({"frequency_penalty": 1.0}, 2),
        ({"logit_bias": {3: 2.5}}, 3),
        ({"bad_words_token_ids": [[1], [1, 2]]}, 3),
        ({"min_tokens": 5, "stop_token_ids": [1, 2]}, 3),
        ({"allowed_token_ids": [0, 3]}, 3),
        ({"top_k": 1, "top_p": 1e-9, "min_p": 1.0}, 1),
    ):
        assert sample_ids([logits], [row_of(output=[1, 1], temperature=0, **params)]) == [expected], params


def test_min_tokens_masks_eos_and_stop_ids_until_that_many_are_out() -> None:
    logits = [[0.0, 5.0, 4.0, 3.0]]
    params = {"temperature": 0, "min_tokens": 2, "stop_token_ids": [2]}
    for length, expected in ((0, 3), (1, 3), (2, 1)):
        assert sample_ids(logits, [row_of(output=[0] * length, eos=1, **params)]) == [expected]
    assert sample_ids(logits, [row_of(eos=1, ignore_eos=True, **params)]) == [3]


def test_frequency_and_presence_see_the_output_and_repetition_the_prompt_too() -> None:
    logits = [1.0, 4.0, 3.0, 0.0]
    for params, prompt, output, expected in (
        ({"frequency_penalty": 0.4}, [1, 1, 1], [1, 1], 1),
        ({"frequency_penalty": 0.4}, [], [1, 1, 1], 2),
        ({"presence_penalty": 0.9}, [1], [0], 1),
        ({"presence_penalty": 0.9}, [1], [1, 1], 1),
        ({"presence_penalty": 1.1}, [], [1], 2),
        ({"repetition_penalty": 1.5}, [1], [], 2),
        ({"repetition_penalty": 1.5}, [1, 2], [], 1),
        ({"repetition_penalty": 1.2}, [1, 1, 1], [1], 1),
    ):
        row = row_of(prompt, output, temperature=0, **params)
        assert sample_ids([logits], [row]) == [expected], (params, prompt, output)


def test_a_bad_word_loses_its_last_id_once_the_output_ends_with_the_others() -> None:
    logits = [[1.0, 4.0, 3.0, 2.0]]
    for word, output, expected in (
        ([1], [], 2),
        ([3, 1], [], 1),  # the prompt ends with 3
        ([3, 1], [3], 2),
        ([3, 1], [3, 0], 1),
        ([0, 3, 1], [3], 1),
        ([0, 3, 1], [2, 0, 3], 2),
    ):
        row = row_of([0, 3], output, temperature=0, bad_words_token_ids=[word])
        assert sample_ids(logits, [row]) == [expected], (word, output)


def test_repetition_comes_after_the_bias_and_before_the_subtractions() -> None:
    # (2 + 4) / 2 = 3 loses to 3.5; without the bias inside, 2 / 2 + 4 = 5 would win.
    assert sample_ids([[2.0, 3.5]], [row_of(prompt=[0], temperature=0, repetition_penalty=2, logit_bias={0: 4})]) == [1]
    # 4 / 2 - 1 = 1 loses to 1.25; (4 - 1) / 2 = 1.5 would win.
    assert sample_ids([[4.0, 1.25]], [row_of(output=[0], temperature=0, repetition_penalty=2, presence_penalty=1)]) == [
        1
    ]


def test_top_p_is_measured_on_what_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert support(row_of(top_k=2, top_p=0.55), logits) == {0}  # 0.4 / 0.7 is enough; of the whole, two ids are needed
    assert support(row_of(top_p=0.55), logits) == {0, 1}
    assert support(row_of(top_k=2, top_p=0.6), logits) == {0, 1}


def test_top_p_is_measured_on_what_min_p_left_and_min_p_after_temperature() -> None:
    logits = np.log([0.5, 0.26, 0.14, 0.1]).tolist()
    assert support(row_of(min_p=0.5, top_p=0.65), logits) == {0}  # 0.5 / 0.76 is enough
    assert support(row_of(min_p=0.5), logits) == {0, 1}
    assert support(row_of(min_p=0.5, temperature=0.5), logits) == {0}  # 0.26² / 0.5² < 0.5
    assert support(row_of(min_p=0.5, temperature=2), logits) == {0, 1, 2}


def test_any_top_p_and_min_p_leave_at_least_one_id() -> None:
    for params in ({"top_p": 5e-324}, {"top_p": 1e-9, "top_k": 3}, {"min_p": 1.0}):
        assert support(row_of(temperature=2, **params), [0.1, 0.2, 0.4, 0.3]) == {2}


@given(st.lists(st.sampled_from([-INF, -1.0, -0.0, 0.0, 0.5, 1.0, INF]), min_size=1, max_size=120), st.data())
def test_the_most_likely_ids_come_in_order_and_the_lower_first_among_equals(
    values: list[float], data: st.DataObject
) -> None:
    k = data.draw(st.integers(0, len(values)))
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    logits, ids = sampler.most_likely(torch.tensor([values, values[::-1]]), k)
    assert ids[0].tolist() == expected
    assert logits[0].tolist() == [values[i] for i in expected]


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=100), st.integers(0, 2**32))
def test_top_k_1_equals_greedy_even_among_equals(values: list[float], seed: int) -> None:
    logits = torch.tensor([values, values])
    for dtype in (torch.float32, torch.bfloat16):
        rows = [row_of(temperature=0), row_of(temperature=2, top_k=1, seed=seed)]
        assert sample_ids(logits.to(dtype), rows) == [values.index(max(values))] * 2


def test_top_k_keeps_exactly_k_of_equals() -> None:
    assert support(row_of(top_k=2), [1.0] * 80) == {0, 1}
    assert support(row_of(top_k=30), [1.0] * 80, num_draws=2000) == set(range(30))
    assert support(row_of(top_p=0.5), [1.0] * 8) == {0, 1, 2, 3}


def chi_square_is_plausible(ids: Sequence[int], probabilities: dict[int, float]) -> bool:
    """Six standard deviations; an id outside of the support is never plausible."""
    counts = Counter(ids)
    if not set(counts) <= set(probabilities):
        return False
    statistic = sum((counts[i] - len(ids) * p) ** 2 / (len(ids) * p) for i, p in probabilities.items())
    freedom = max(1, len(probabilities) - 1)
    return statistic < freedom + 6 * math.sqrt(2 * freedom)


LOGITS = [2.0, -1.0, 0.5, 1.5, 0.5, -0.2, 1.1, -3.0, 0.0, 0.9]
DISTRIBUTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_k": 4, "temperature": 0.7},
    {"top_p": 0.7},
    {"top_p": 0.95, "temperature": 1.5},
    {"min_p": 0.2},
    {"min_p": 0.2, "temperature": 2.0},
    {"top_k": 5, "top_p": 0.8, "min_p": 0.1, "temperature": 1.3},
]
NUM_DRAWS = 6000


def draws_of(way: str, **params: Any) -> list[int]:
    """Many draws: of one generator, of as many seeds, or of as many tokens of one seed."""
    if way == "unseeded":
        rows = [row_of(prompt=[0], **params)] * NUM_DRAWS
    elif way == "seeds":
        rows = [row_of(prompt=[0], seed=seed, **params) for seed in range(NUM_DRAWS)]
    else:
        rows = [SamplingRow(SamplingParams(seed=7, **params), [0], range(8, 8 + n)) for n in range(NUM_DRAWS)]
    return sample_ids(torch.tensor([LOGITS]).expand(NUM_DRAWS, -1), rows)


@pytest.mark.parametrize(
    ("way", "params"),
    [("unseeded", params) for params in DISTRIBUTIONS]
    + [(way, params) for way in ("seeds", "indices") for params in (DISTRIBUTIONS[0], DISTRIBUTIONS[-1])],
    ids=str,
)
def test_every_draw_follows_the_distribution(way: str, params: dict[str, Any]) -> None:
    probabilities, _ = reference_distribution(LOGITS, SamplingParams(**params))
    assert chi_square_is_plausible(draws_of(way, **params), probabilities)


def test_a_draw_follows_the_distribution_after_bias_penalty_and_mask() -> None:
    params = {"logit_bias": {7: 4.0}, "repetition_penalty": 1.5, "allowed_token_ids": [0, 1, 2, 7]}
    probabilities, _ = reference_distribution(reference_logits(row_of(prompt=[0], **params), LOGITS), SamplingParams())
    assert chi_square_is_plausible(draws_of("seeds", **params), probabilities)


@pytest.mark.parametrize("way", ["unseeded", "seeds", "indices"])
def test_two_draws_in_a_row_are_independent(way: str) -> None:
    ids = draws_of(way, allowed_token_ids=[0, 3, 6])
    single, _ = reference_distribution([LOGITS[i] if i in (0, 3, 6) else -INF for i in range(10)], SamplingParams())
    pairs = {10 * a + b: single[a] * single[b] for a, b in itertools.product(single, single)}
    assert chi_square_is_plausible([10 * a + b for a, b in itertools.pairwise(ids)][::2], pairs)


def test_no_part_of_a_large_vocabulary_is_preferred() -> None:
    rows = [row_of(seed=seed) for seed in range(1000)]
    ids = sample_ids(torch.zeros(1000, 4096), rows)
    assert chi_square_is_plausible([i // 256 for i in ids], dict.fromkeys(range(16), 1 / 16))
    assert chi_square_is_plausible([i % 16 for i in ids], dict.fromkeys(range(16), 1 / 16))


def test_the_noise_is_the_references_and_finite() -> None:
    seeds, ids = [0, 1, 2**63 - 1, -(2**63)], torch.arange(3000)
    keys = torch.tensor([[sampling_inputs.draw_key(seed, 5)] for seed in seeds])
    noise = sampler.gumbel_noise(keys, ids)
    expected = [[reference_noise(seed, 5, i) for i in range(3000)] for seed in seeds]
    np.testing.assert_allclose(noise, expected, rtol=1e-4, atol=1e-5)
    # The ids whose uniform number is the least and the largest that 64 bits can give.
    step_back = pow(0x9E3779B97F4A7C15, -1, 2**64)
    extreme = torch.tensor([[sampling_inputs.signed64(-(i + 1) * step_back % 2**64)] for i in range(64)])
    assert sampler.gumbel_noise(extreme, ids[:64]).isfinite().all()


MATES: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"seed": 5},
    {"top_k": 2, "seed": 9},
    {"top_p": 0.3},
    {"min_p": 0.5, "frequency_penalty": 1.0},
    {"allowed_token_ids": [1], "logprobs": 3},
]
SEEDED: list[dict[str, Any]] = [
    {"seed": 1},
    {"seed": 1, "top_k": 3},
    {"seed": 2, "top_p": 0.9, "temperature": 0.8},
    {"seed": 3, "min_p": 0.05, "repetition_penalty": 1.2},
    {"seed": 4, "top_k": 20, "top_p": 0.8, "presence_penalty": 0.5},
]


def toy_logits(token_ids: Sequence[int], vocab_size: int = 48) -> torch.Tensor:
    """A model: the logits depend on the last two tokens."""
    generator = torch.Generator().manual_seed(hash(tuple(token_ids[-2:])) % 2**31)
    return torch.randn(vocab_size, generator=generator) * 2


def generate(params: Sequence[dict[str, Any]], num_tokens: int, shuffle_seed: int | None) -> list[list[int]]:
    """Outputs of one request for each params: one at a time (None), or in random steps of random rows with mates."""
    random = np.random.default_rng(shuffle_seed)
    outputs: list[list[int]] = [[] for _ in params]
    while waiting := [i for i, output in enumerate(outputs) if len(output) < num_tokens]:
        if shuffle_seed is None:
            batch = waiting[:1]
        else:
            size = random.integers(1, len(waiting) + 1)
            batch = random.permutation(waiting)[:size].tolist()
        rows = [SamplingRow(SamplingParams(**params[i]), [1, 2], outputs[i]) for i in batch]
        logits = [toy_logits([1, 2, *outputs[i]]) for i in batch]
        if shuffle_seed is not None:
            for mate in random.permutation(len(MATES))[: random.integers(0, 4)]:
                place = random.integers(0, len(rows) + 1)
                rows.insert(place, row_of(output=[4, 5], **MATES[mate]))
                logits.insert(place, toy_logits([mate]))
                batch.insert(place, -1)
        for i, token_id in zip(batch, sample_ids(torch.stack(logits), rows), strict=True):
            if i >= 0:
                outputs[i].append(token_id)
    return outputs


@pytest.mark.parametrize("shuffle_seed", range(6))
def test_every_seeded_output_is_the_same_in_any_batch_at_any_place_with_any_mates(shuffle_seed: int) -> None:
    assert generate(SEEDED, 12, shuffle_seed) == generate(SEEDED, 12, None)


def test_different_seeds_and_different_tokens_of_a_seed_draw_differently() -> None:
    rows = [row_of(seed=seed, output=[0] * index) for seed in range(-8, 8) if seed != -1 for index in range(8)]
    ids = sample_ids(torch.zeros(len(rows), 50_000), rows)
    assert len(set(ids)) >= len(ids) - 3
    keys = {sampling_inputs.draw_key(seed, index) for seed in range(-100, 100) for index in range(100)}
    assert len(keys) == 20_000


def test_rows_without_a_seed_follow_the_generator_and_differ_from_each_other() -> None:
    logits, rows = torch.zeros(40, 50_000), [row_of()] * 40
    first = sample_ids(logits, rows, generator_seed=1)
    assert first == sample_ids(logits, rows, generator_seed=1)
    assert len(set(first)) >= 39
    generator = torch.Generator().manual_seed(1)
    inputs = SamplingInputs.build(rows, 50_000, "cpu")
    assert sample(logits, inputs, generator).token_ids == first
    assert not set(sample(logits, inputs, generator).token_ids) & set(first)


def test_logprobs_have_k_entries_or_one_more_and_those_of_the_raw_logits() -> None:
    raw = [0.0, 3.0, 2.0, 1.0, 2.0]
    bias = {"temperature": 0, "logit_bias": {0: 50}}  # samples id 0, the least likely
    for k, params, expected_ids, expected_ranks in (
        (0, {"temperature": 0}, [1], [1]),
        (1, {"temperature": 0}, [1], [1]),
        (2, {"temperature": 0}, [1, 2], [1, 2]),
        (0, bias, [0], [5]),
        (2, bias, [0, 1, 2], [5, 1, 2]),
        (4, bias, [0, 1, 2, 4, 3], [5, 1, 2, 3, 4]),
        (5, bias, [0, 1, 2, 4, 3], [5, 1, 2, 3, 4]),
        (99, bias, [0, 1, 2, 4, 3], [5, 1, 2, 3, 4]),
        (-1, bias, [0, 1, 2, 4, 3], [5, 1, 2, 3, 4]),
    ):
        rows = [row_of(temperature=0), row_of(logprobs=k, **params)]
        found = sample(torch.tensor([raw, raw]), SamplingInputs.build(rows, 5, "cpu")).logprobs
        assert list(found) == [1]
        assert found[1].token_ids == expected_ids
        assert found[1].ranks == expected_ranks
        total = math.log(sum(map(math.exp, raw)))
        assert found[1].logprobs == pytest.approx([raw[i] - total for i in expected_ids], abs=1e-6)


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([0, 1, 3, 12, -1]))
def test_prompt_logprobs_are_the_references(seed: int, num_rows: int, k: int) -> None:
    raw = np.random.default_rng(seed).integers(-8, 8, (num_rows, 12)).astype(np.float32) / 4
    ids = np.random.default_rng(seed + 1).integers(0, 12, num_rows).tolist()
    for found, logits, token_id in zip(prompt_logprobs(torch.from_numpy(raw), ids, k), raw.tolist(), ids, strict=True):
        assert_close(found, reference_logprobs(logits, token_id, k))
    assert prompt_logprobs(torch.empty(0, 12), [], k) == []


def test_contradicting_masks_drop_all_but_the_allowed_ids() -> None:
    logits = [[1.0, 3.0, 2.0, 5.0]] * 4
    contradicting = {"allowed_token_ids": [0, 1], "min_tokens": 4, "stop_token_ids": [1], "bad_words_token_ids": [[0]]}
    rows = [
        row_of(eos=3, temperature=0, **contradicting),
        row_of(eos=3, temperature=0, bad_words_token_ids=[[0], [1], [2], [3]]),
        row_of(eos=3, temperature=0, allowed_token_ids=[3], min_tokens=1),
        row_of(eos=3, temperature=0, min_tokens=1),
    ]
    assert sample_ids(logits, rows) == [1, 3, 3, 1]
    assert support(row_of(**contradicting), logits[0]) == {0, 1}


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_logits_that_are_all_minus_infinity_give_a_defined_id(params: dict[str, Any]) -> None:
    logits = torch.full((1, 80), -INF)
    assert sample_ids(logits, [row_of(**params)]) == [0]
    assert sample_ids(logits, [row_of(allowed_token_ids=[7, 9], top_k=1)]) == [7]
    assert sample_ids(logits, [row_of(allowed_token_ids=[7, 9], **params)])[0] in (7, 9)
    assert sample_ids(logits, [row_of(min_tokens=1, eos=0, repetition_penalty=2, **params)]) == [0]


def test_a_masked_id_is_never_drawn_whatever_the_other_parameters_say() -> None:
    extremes = {"logit_bias": {5: 100}, "frequency_penalty": -2, "presence_penalty": -2}
    for penalty in (5e-324, 1e-30, 1e30, 1e300):
        params = {"allowed_token_ids": [1, 2], "repetition_penalty": penalty, "temperature": 2, **extremes}
        for logits in ([-9.0, -20.0, -30.0, 0.0, 0.0, 9.0], [0.0] * 6, [9.0, 20.0, 30.0, 1e38, -INF, 0.0]):
            row = row_of(output=[5] * 9, prompt=[0, 1, 2], top_k=5, **params)
            assert support(row, logits, num_draws=40) <= {1, 2}


def test_ids_beyond_the_vocabulary_block_nothing() -> None:
    row = row_of(eos=99, temperature=0, min_tokens=2, stop_token_ids=[5, 2**62], bad_words_token_ids=[[77]])
    assert sample_ids([[1.0, 2.0, 3.0]], [row]) == [2]
    with pytest.raises(AssertionError, match="logit_bias of id 3"):
        sample_ids([[1.0, 2.0, 3.0]], [row_of(logit_bias={3: 1.0})])
    with pytest.raises(AssertionError, match="allowed id 3"):
        sample_ids([[1.0, 2.0, 3.0]], [row_of(allowed_token_ids=[1, 3])])


class Recorder(TorchDispatchMode):
    """The torch operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_plain_greedy_batch_costs_one_argmax() -> None:
    with Recorder() as build:
        inputs = SamplingInputs.build([row_of(temperature=0, top_p=0.5, top_k=3)] * 4, 100, "cpu")
    assert inputs == SamplingInputs(4, 100)
    assert build.names == []
    for device, expected in (("meta", {"aten.argmax.default"}), ("cpu", set())):  # there it is numpy's
        logits = torch.zeros(4, 100, device=device)
        with Recorder() as step:
            sample(logits, inputs)
        assert set(step.names) - {"aten.lift_fresh.default", "aten.detach.default"} == expected


@given(
    st.lists(st.lists(st.sampled_from([-INF, -1.0, -0.0, 0.0, 1.5, INF]), min_size=7, max_size=7), min_size=1),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_every_row_takes_its_largest_and_the_lower_first_among_equals(rows: list[list[float]], dtype: Any) -> None:
    values = torch.tensor(rows, dtype=dtype)
    expected = [row.index(max(row)) for row in rows]
    assert sampler.largest(values).tolist() == expected
    assert sampler.largest(torch.stack([values, values], dim=2)[:, :, 0]).tolist() == expected, "with gaps"


@settings(max_examples=30)
@given(st.lists(sampling_rows(), min_size=1, max_size=4))
def test_no_step_waits_for_the_device_before_the_ids_are_asked_for(rows: list[SamplingRow]) -> None:
    """Tensors of the meta device have no values: whatever would look at one fails."""
    inputs = SamplingInputs.build([*rows, row_of(top_p=0.5, logprobs=2)], VOCAB, "meta")
    sampled = sample(torch.empty(len(rows) + 1, VOCAB, device="meta"), inputs)
    assert sampled.ids_S.shape == (len(rows) + 1,)
    assert sampled.ids_S.dtype == torch.int64


def test_ids_and_logprobs_of_a_step_come_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row_of(logprobs=k) for k in (None, 0, 3, -1)] * 3
    sampled = sample(torch.randn(12, 20), SamplingInputs.build(rows, 20, "cpu"))
    copies = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: copies.append(1) or original(tensor))
    with Recorder() as step:
        assert len(sampled.token_ids) == 12
        assert sorted(sampled.logprobs) == [i for i in range(12) if i % 4]
        assert [len(sampled.logprobs[i].token_ids) for i in (1, 3)] == [1, 20]
    assert len(copies) == 1
    assert not [name for name in step.names if "_local_scalar_dense" in name]
    assert sampled.token_ids == sampled.ids_S.tolist()


def test_half_precision_logits_sample_as_their_float32_values() -> None:
    logits = torch.randn(6, 60).to(torch.bfloat16)
    before = logits.clone()
    rows = [row_of(seed=i, top_k=4 * (i % 2), logprobs=2, presence_penalty=i % 3, output=[1]) for i in range(5)]
    rows.append(row_of(temperature=0))
    found, expected = (sample(x, SamplingInputs.build(rows, 60, "cpu")) for x in (logits, logits.float()))
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs
    assert torch.equal(logits, before)


def test_an_empty_batch_gives_no_ids() -> None:
    assert sample_ids(torch.empty(0, 10), []) == []


def test_logits_of_another_shape_than_the_inputs_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"\(2, 5\)"):
        sample(torch.zeros(2, 5), SamplingInputs.build([row_of()], 5, "cpu"))


original_draw = sampler.draw
original_truncate = sampler.truncate
original_penalise = sampler.penalise
original_change = sampler.change_logits
original_measure = sampler._measure
original_penalties = sampling_inputs._build_penalties
original_blocked = sampling_inputs._blocked_ids
original_key = sampling_inputs.draw_key


def top_p_before_top_k(logits_NV: torch.Tensor, draws: sampling_inputs.Draws, generator: Any) -> torch.Tensor:
    logits_NK, ids_NK = sampler.most_likely(logits_NV, logits_NV.shape[1])
    of_all = original_truncate((logits_NK - logits_NK[:, :1]) / draws.temperature_N1, draws)
    kept_NV = torch.full_like(logits_NV, -INF).scatter(1, ids_NK, torch.where(of_all > -INF, logits_NK, of_all))
    return original_draw(kept_NV, dataclasses.replace(draws, top_p_N1=None), generator)


def top_p_of_at_most_p(scores_NK: torch.Tensor, draws: sampling_inputs.Draws) -> torch.Tensor:
    if draws.top_p_N1 is None:
        return original_truncate(scores_NK, draws)
    mass_NK = scores_NK.softmax(dim=-1).cumsum(dim=-1)
    return scores_NK.masked_fill(mass_NK > draws.top_p_N1, -INF)


def min_p_after_top_p(scores_NK: torch.Tensor, draws: sampling_inputs.Draws) -> torch.Tensor:
    first = original_truncate(scores_NK, dataclasses.replace(draws, log_min_p_N1=None))
    return original_truncate(first, dataclasses.replace(draws, top_k_N1=None, top_p_N1=None))


def counting_the_prompt(rows: Sequence[SamplingRow], picked: list[int], *size_and_device: Any) -> Any:
    wrong = [dataclasses.replace(row, output_token_ids=[*row.prompt_token_ids, *row.output_token_ids]) for row in rows]
    return original_penalties(wrong, picked, *size_and_device)


def forgetting_the_prompt(rows: Sequence[SamplingRow], picked: list[int], *size_and_device: Any) -> Any:
    return original_penalties([dataclasses.replace(row, prompt_token_ids=[]) for row in rows], picked, *size_and_device)


def presence_by_count(logits_NV: torch.Tensor, penalties: sampling_inputs.Penalties) -> torch.Tensor:
    frequency = penalties.frequency_N1 + penalties.presence_N1
    wrong = dataclasses.replace(penalties, frequency_N1=frequency, presence_N1=0 * frequency)
    return original_penalise(logits_NV, wrong)


def repetition_last(logits_NV: torch.Tensor, penalties: sampling_inputs.Penalties) -> torch.Tensor:
    one, none = torch.ones_like(penalties.repetition_N1), torch.zeros_like(penalties.repetition_N1)
    logits_NV = original_penalise(logits_NV, dataclasses.replace(penalties, repetition_N1=one))
    return original_penalise(logits_NV, dataclasses.replace(penalties, frequency_N1=none, presence_N1=none))


def bias_after_penalties(logits_SV: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    logits_SV = original_change(logits_SV, dataclasses.replace(inputs, bias=None))
    return original_change(logits_SV, SamplingInputs(inputs.num_rows, inputs.vocab_size, bias=inputs.bias))


def bad_words_that_read_the_prompt(row: SamplingRow) -> list[int]:
    return original_blocked(dataclasses.replace(row, output_token_ids=[*row.prompt_token_ids, *row.output_token_ids]))


def min_tokens_one_short(row: SamplingRow) -> list[int]:
    return original_blocked(dataclasses.replace(row, output_token_ids=[*row.output_token_ids, 0]))


def rank_from_zero(logits_LV: torch.Tensor, ids_L: torch.Tensor, k: int) -> torch.Tensor:
    measured_LW = original_measure(logits_LV, ids_L, k)
    measured_LW[:, 1] -= 1
    return measured_LW


stateful = itertools.count()
PLANTED: list[tuple[Any, Callable[..., Any], Callable[[], None]]] = [
    ((sampler, "draw"), top_p_before_top_k, test_top_p_is_measured_on_what_top_k_left),
    ((sampler, "truncate"), top_p_of_at_most_p, test_top_p_is_measured_on_what_top_k_left),
    (
        (sampler, "truncate"),
        min_p_after_top_p,
        test_top_p_is_measured_on_what_min_p_left_and_min_p_after_temperature,
    ),
    (
        (sampler, "truncate"),
        lambda scores, draws: original_truncate(scores * 1.2, draws),
        lambda: test_every_draw_follows_the_distribution("unseeded", {}),
    ),
    ((sampler, "change_logits"), lambda logits, inputs: logits, test_greedy_takes_the_largest_after_all_changes),
    (
        (sampler, "change_logits"),
        bias_after_penalties,
        test_repetition_comes_after_the_bias_and_before_the_subtractions,
    ),
    (
        (sampler, "penalise"),
        repetition_last,
        test_repetition_comes_after_the_bias_and_before_the_subtractions,
    ),
    (
        (sampler, "penalise"),
        presence_by_count,
        test_frequency_and_presence_see_the_output_and_repetition_the_prompt_too,
    ),
    (
        (sampling_inputs, "_build_penalties"),
        counting_the_prompt,
        test_frequency_and_presence_see_the_output_and_repetition_the_prompt_too,
    ),
    (
        (sampling_inputs, "_build_penalties"),
        forgetting_the_prompt,
        test_frequency_and_presence_see_the_output_and_repetition_the_prompt_too,
    ),
    (
        (sampling_inputs, "_blocked_ids"),
        bad_words_that_read_the_prompt,
        test_a_bad_word_loses_its_last_id_once_the_output_ends_with_the_others,
    ),
    (
        (sampling_inputs, "_blocked_ids"),
        min_tokens_one_short,
        test_min_tokens_masks_eos_and_stop_ids_until_that_many_are_out,
    ),
    ((sampler, "_measure"), rank_from_zero, test_logprobs_have_k_entries_or_one_more_and_those_of_the_raw_logits),
    (
        (sampler, "_measure"),
        lambda logits, ids, k: original_measure(logits / 2, ids, k),
        test_logprobs_have_k_entries_or_one_more_and_those_of_the_raw_logits,
    ),
    (
        (sampling_inputs, "draw_key"),
        lambda seed, index: original_key(seed, 0),
        test_different_seeds_and_different_tokens_of_a_seed_draw_differently,
    ),
    (
        (sampling_inputs, "draw_key"),  # one generator for all seeded rows
        lambda seed, index: original_key(0, next(stateful)),
        lambda: test_every_seeded_output_is_the_same_in_any_batch_at_any_place_with_any_mates(0),
    ),
]


@pytest.mark.parametrize(("place", "bug", "law"), PLANTED)
def test_every_planted_bug_breaks_its_law(
    monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], bug: Callable[..., Any], law: Callable[[], None]
) -> None:
    monkeypatch.setattr(*place, bug)
    with pytest.raises(AssertionError):
        law()
