"""Law 1 over the product of everything that must not change a token: form of the batch, graphs, compiled code, one step
ahead, scheduler and block manager, on the embedded model and on a random Llama. `make test` runs a covering sample,
`make test-long` the whole product."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint

from nanoserve.client import InProcessClient
from nanoserve.compilation import CompileMode
from nanoserve.config import SEAMS, EngineConfig, get_stage
from nanoserve.graph_runner import GraphRunner
from nanoserve.graphs import GraphMode
from nanoserve.input_batch import HostInputs
from nanoserve.record import ListRecorder
from nanoserve.request import EngineRequest, SamplingParams
from nanoserve.runner import EagerRunner

MODELS = ("nanostory", "llama")
BATCHES = tuple(SEAMS["batch"])
EXECUTION: dict[str, dict[str, Any]] = {"eager": {"runner": EagerRunner}} | {
    str(mode): {"runner": GraphRunner, "graph_mode": str(mode)} for mode in GraphMode if mode is not GraphMode.NONE
}
SCHEDULERS, BLOCKS = tuple(SEAMS["scheduler"]), tuple(SEAMS["blocks"])
AHEAD = (False, True)
NUM_TOKENS = 14
Combination = tuple[str, str, bool, str, str]  # batch, execution, ahead, scheduler, blocks


def covering() -> Iterator[Combination]:
    """Every pair of values meets in some combination: greedily, from the whole product."""
    product = list(itertools.product(BATCHES, EXECUTION, AHEAD, SCHEDULERS, BLOCKS))
    missing = {pair for combination in product for pair in pairs_of(combination)}
    while missing:
        best = max(product, key=lambda combination: len(missing & pairs_of(combination)))
        missing -= pairs_of(best)
        yield best


def pairs_of(combination: Combination) -> set[tuple[Any, Any]]:
    return set(itertools.combinations(enumerate(combination), 2))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"nanostory": "nanostory", "llama": str(write_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))}


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> dict[str, dict[str, list[int]]]:
    """Each request alone, in plain stage v0: what tests/test_model.py holds against transformers."""
    answers = {}
    for name, model in models.items():
        answers[name] = {}
        for request in requests():
            config = EngineConfig(model=model, device="cpu", max_model_len=96)
            answers[name] |= run(config, [request])[0]
    return answers


def requests() -> list[EngineRequest]:
    """Some share a prefix, one is block-aligned, one longer than the budget; together they do not fit the pool."""
    torch.manual_seed(3)
    prefix = torch.randint(3, 120, (16,)).tolist()
    own = [torch.randint(3, 120, (n,)).tolist() for n in (5, 16, 9, 30, 75)]
    prompts = [[*prefix, *own[0]], own[1], [*prefix, *own[2]], own[3], own[4], [*prefix, *own[0]]]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [EngineRequest(id=f"r{i}", prompt_token_ids=p, params=params) for i, p in enumerate(prompts)]


def run(config: EngineConfig, work: list[EngineRequest]) -> tuple[dict[str, list[int]], ListRecorder]:
    recorder = ListRecorder()
    tokens: dict[str, list[int]] = {request.id: [] for request in work}
    with InProcessClient(config, recorder) as client:
        waiting, num_ended = list(work), 0
        while num_ended < len(work):
            for request in waiting[:2]:  # the others come while they run
                client.submit(request)
            waiting = waiting[2:]
            for output in client.poll(5):
                tokens[output.id] += output.new_token_ids
                num_ended += output.finish_reason is not None
        while client.core.has_work:
            client.poll(5)
        assert client.core.scheduler.blocks.num_free_blocks == client.core.scheduler.blocks.num_blocks - 1
    return tokens, recorder


def check(combination: Combination, compile: str, model: str, expected: dict[str, list[int]]) -> None:
    batch, execution, ahead, scheduler, blocks = combination
    config = EngineConfig(
        model=model,
        device="cpu",
        max_model_len=96,
        num_blocks=13,
        block_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=128 if scheduler == "phase_split" else 32,
        scheduler=SEAMS["scheduler"][scheduler],
        blocks=SEAMS["blocks"][blocks],
        batch=SEAMS["batch"][batch],
        compile=compile,
        async_scheduling=ahead,
        check_invariants=True,
        **EXECUTION[execution],
    )
    found, recorder = run(config, requests())
    assert found == expected
    assert sum(len(record.preempted) for record in recorder.records) > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("combination", list(covering()), ids=lambda combination: "-".join(map(str, combination)))
def test_every_pair_of_switches_emits_the_tokens_of_v0(combination, name, models, expected):
    check(combination, "none", models[name], expected[name])


SAMPLINGS: dict[str, dict[str, Any]] = {
    "seeded": {"temperature": 0.9, "seed": 5},
    "seeded top-p": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 6},
    "penalised": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "bad words": {"temperature": 0, "bad_words_token_ids": [[12], [263, 267], [263]]},
    "at least": {"temperature": 0, "min_tokens": 5, "stop_token_ids": list(range(600))},
    "biased": {"temperature": 0, "logit_bias": {9: 4.0, 12: -100}},
}


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_kind_of_sampling_reads_its_own_output(batch, ahead):
    """What a draw depends on may be in flight: the last token of a penalised row is waited for."""
    work = [
        EngineRequest(
            id=name,
            prompt_token_ids=list(range(40 + i, 52 + 2 * i)),
            params=SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **params),
        )
        for i, (name, params) in enumerate(SAMPLINGS.items())
    ]
    plain = EngineConfig(device="cpu", max_model_len=96)
    alone = {name: tokens for request in work for name, tokens in run(plain, [request])[0].items()}
    v1 = replace(get_stage("v1"), client=InProcessClient, device="cpu", max_model_len=96, async_scheduling=ahead)
    assert run(replace(v1, batch=SEAMS["batch"][batch]), work)[0] == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == len(work)


def test_a_token_in_flight_that_is_not_put_in_its_place_is_seen(models, expected, monkeypatch):
    monkeypatch.setattr(HostInputs, "take_in_flight", lambda self, *tensors: None)
    check(("rebuilt", "eager", False, "unified", "shared"), "none", models["llama"], expected["llama"])
    with pytest.raises(AssertionError):
        check(("rebuilt", "eager", True, "unified", "shared"), "none", models["llama"], expected["llama"])


@pytest.mark.slow
@pytest.mark.needs_cxx
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compile", CompileMode)
def test_the_whole_product_of_switches_emits_the_tokens_of_v0(compile, name, models, expected, tmp_path):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    for combination in itertools.product(BATCHES, EXECUTION, AHEAD, SCHEDULERS, BLOCKS):
        check(combination, compile, models[name], expected[name])


def test_the_sample_covers_every_pair():
    sample = list(covering())
    product = itertools.product(BATCHES, EXECUTION, AHEAD, SCHEDULERS, BLOCKS)
    assert {p for c in sample for p in pairs_of(c)} == {p for c in product for p in pairs_of(c)}
    assert len(sample) < 30
