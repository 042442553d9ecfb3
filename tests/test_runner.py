"""Laws of the runner: whatever the plans are that bring a request's tokens to it, the request's tokens and scores are
those of one forward pass over its whole text, with neither cache nor batch. No scheduler: the tests are the scheduler.
"""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.attention import TorchAttention
from nanoserve.config import EngineConfig
from nanoserve.graph_runner import GraphRunner
from nanoserve.input_batch import HostInputs, InputBatch, RebuiltBatch, RequestRow
from nanoserve.kv_cache import KVCache
from nanoserve.persistent_batch import PersistentBatch
from nanoserve.request import NewRequest, SamplingParams, StepPlan, StepResult, TokenLogprobs
from nanoserve.runner import MAX_POOL_BLOCKS, EagerRunner, StepAttention

VOCAB = 61
NUM_BLOCKS = 500
NUM_HOST_BLOCKS = 20
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
WHOLE_VOCABULARY = SamplingParams(temperature=0, max_tokens=None, logprobs=-1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return str(folder)


@pytest.fixture(scope="session", params=[RebuiltBatch, PersistentBatch])
def form(request: pytest.FixtureRequest) -> type[InputBatch]:
    """Of the batch: a runner does the same with either."""
    return request.param


def engine_config(model: str, **fields: object) -> EngineConfig:
    chosen = {"device": "cpu", "load_format": "dummy", "num_blocks": NUM_BLOCKS, "max_model_len": "auto", **fields}
    return EngineConfig(model=model, preemption_mode="swap", num_swap_blocks=NUM_HOST_BLOCKS, **chosen)


def build(model: str, cls: type[EagerRunner] = EagerRunner, **fields: object) -> EagerRunner:
    """A runner whose cache is NaN until it is written."""
    config = engine_config(model, **fields)
    runner = cls(config)
    pool_blocks = runner.pool_blocks(config.block_size)
    runner.allocate(config.resolve(model_len=runner.model_len, pool_blocks=pool_blocks, device=runner.device))
    runner.cache.blocks.fill_(torch.nan)
    runner.cache.host_blocks.fill_(torch.nan)
    return runner


class Driver:
    """Sends plans for whatever the test wants done next. Its own record of every request is the scheduler's view."""

    def __init__(self, runner: EagerRunner, seed: int = 0) -> None:
        self.runner = runner
        self.block_size = runner.cache.block_size
        self.free = list(range(1, NUM_BLOCKS))
        random.Random(seed).shuffle(self.free)
        self.rows: dict[str, RequestRow] = {}
        self.to_send: set[str] = set()
        self.step_number = 0
        self.logprobs: dict[str, list[TokenLogprobs]] = {}

    def add(self, name: str, prompt: Sequence[int], params: SamplingParams = WHOLE_VOCABULARY) -> None:
        self.rows[name] = RequestRow(name, params, None, len(prompt), list(prompt), [], 0)
        self.to_send.add(name)
        self.logprobs[name] = []

    def step(self, tokens: dict[str, int], **plan: object) -> StepResult:
        new, new_blocks = [], {}
        for name, n in tokens.items():
            row = self.rows[name]
            missing = -(-(row.num_computed_tokens + n) // self.block_size) - len(row.block_ids)
            grown = [self.free.pop() for _ in range(missing)]
            row.block_ids += grown
            if name in self.to_send:
                new.append(self.whole(name))
            elif grown:
                new_blocks[name] = grown
        self.to_send -= tokens.keys()
        self.step_number += 1
        result = self.runner.launch(StepPlan(self.step_number, tokens, new, new_blocks, **plan)).wait()
        for name, n in tokens.items():
            row = self.rows[name]
            row.num_computed_tokens += n
            sampled = result.token_ids.get(name, [])
            assert bool(sampled) == (row.num_computed_tokens == len(row.token_ids)), f"{name} sampled {sampled}"
            row.token_ids += sampled
            self.logprobs[name] += result.logprobs.get(name, [])
        return result

    def whole(self, name: str) -> NewRequest:
        row = self.rows[name]
        return NewRequest(
            name,
            list(row.token_ids),
            row.num_prompt_tokens,
            list(row.block_ids),
            row.num_computed_tokens,
            row.params,
            row.eos_token_id,
        )

    def drop(self, name: str) -> None:
        """Preempt: the caller names it in the next plan. Its blocks go to the others, NaN in them."""
        row = self.rows[name]
        self.runner.cache.blocks[:, :, row.block_ids] = torch.nan
        self.free += row.block_ids
        row.block_ids, row.num_computed_tokens = [], 0
        self.to_send.add(name)

    def behind(self, name: str) -> int:
        row = self.rows[name]
        return len(row.token_ids) - row.num_computed_tokens

    def num_outputs(self, name: str) -> int:
        return len(self.rows[name].token_ids) - self.rows[name].num_prompt_tokens

    def finish(self, name: str, num_outputs: int, **plan: object) -> None:
        while self.num_outputs(name) < num_outputs:
            self.step({name: self.behind(name)}, **plan)
            plan = {}


def dense_attention(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Of one request that is all there: no cache."""
    group = q_THD.shape[1] // k_TKD.shape[1]
    k_THD, v_THD = k_TKD.repeat_interleave(group, dim=1), v_TKD.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,lhd->htl", q_THD, k_THD) * q_THD.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("htl,lhd->thd", scores.masked_fill(hidden, -torch.inf).softmax(dim=-1), v_THD)


@torch.inference_mode()
def reference_logprobs(runner: EagerRunner, token_ids: Sequence[int]) -> Tensor:
    """Log-probabilities of the token after each position, from one pass over the text: [T, V]."""
    hidden = runner.model(torch.tensor(token_ids), torch.arange(len(token_ids)), dense_attention)
    return runner.model.logits(hidden).log_softmax(dim=-1)


def by_id(scores: TokenLogprobs) -> Tensor:
    whole = torch.full((VOCAB,), torch.nan)
    whole[scores.token_ids] = torch.tensor(scores.logprobs)
    return whole


def check_text(driver: Driver, name: str) -> None:
    """Every output token of a greedy request is the reference's, and so are the scores of the whole vocabulary."""
    row = driver.rows[name]
    expected = reference_logprobs(driver.runner, row.token_ids)[row.num_prompt_tokens - 1 : -1]
    output = row.token_ids[row.num_prompt_tokens :]
    assert output == expected.argmax(dim=-1).tolist(), f"{name}: wrong tokens"
    found = torch.stack([by_id(scores) for scores in driver.logprobs[name]])
    error = (found - expected).abs().max().item()
    assert error < 2e-5, f"{name}: scores are off by {error}"  # NaN fails too


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


# Chunks and mixes


def test_the_reference_is_worth_comparing_with(model_dir):
    """Greedy text of the random model neither repeats itself nor ignores its prompt: broken attention would show."""
    driver = Driver(build(model_dir))
    texts = []
    for seed in range(4):
        driver.add(f"r{seed}", prompt_of(9, seed))
        driver.finish(f"r{seed}", 12)
        check_text(driver, f"r{seed}")
        texts.append(tuple(driver.rows[f"r{seed}"].token_ids[9:]))
    assert len(set(texts)) == 4
    assert all(len(set(text)) >= 4 for text in texts)


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("chunks", [[37], [36, 1], [1] * 37, [16, 16, 5], [3, 30, 4], [20, 17]])
def test_every_split_of_a_prompt_gives_the_text_of_one_pass(model_dir, form, chunks, block_size):
    driver = Driver(build(model_dir, batch=form, block_size=block_size))
    driver.add("a", prompt_of(37))
    for n in chunks:
        driver.step({"a": n})
    driver.finish("a", 4)
    check_text(driver, "a")


@settings(max_examples=25)
@given(
    data=st.data(), block_size=st.sampled_from([1, 3, 16]), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6)
)
def test_every_mix_of_requests_gives_each_the_text_it_has_alone(model_dir, form, data, block_size, lengths):
    """Any order, any chunks, preemption at any time: prefills, chunks and decodes meet in one step."""
    driver = Driver(build(model_dir, batch=form, block_size=block_size))
    names = [f"r{i}" for i in range(len(lengths))]
    for i, (name, length) in enumerate(zip(names, lengths, strict=True)):
        driver.add(name, prompt_of(length, i))
    while unfinished := [name for name in names if driver.num_outputs(name) < 3]:
        held = sorted(driver.rows.keys() - driver.to_send)
        preempted = data.draw(st.lists(st.sampled_from(held), max_size=1)) if held else []
        for name in preempted:
            driver.drop(name)
        runnable = st.sampled_from([name for name in unfinished if name not in preempted] or [None])
        chosen = [name for name in data.draw(st.lists(runnable, min_size=1, unique=True)) if name]
        tokens = {name: data.draw(st.integers(1, driver.behind(name))) for name in chosen}
        if data.draw(st.booleans()):  # else hypothesis would hardly ever let a prompt end
            tokens = {name: driver.behind(name) for name in chosen}
        driver.step(tokens, preempted=preempted)
    for name in names:
        check_text(driver, name)


@pytest.mark.parametrize("runner", [EagerRunner, GraphRunner])
def test_every_step_computes_only_the_tokens_that_sample_behind_the_last_attention(
    model_dir, form, runner, monkeypatch
):
    """Of the others nobody reads more than the keys and values, unless their prompt is scored."""
    driver = Driver(build(model_dir, runner, batch=form, runner=runner))
    rows, attend = [], StepAttention.__call__

    def counting(self, layer, q_THD, k_TKD, v_TKD):
        if layer == MODEL["num_hidden_layers"] - 1:
            rows.append(len(q_THD))
        return attend(self, layer, q_THD, k_TKD, v_TKD)

    monkeypatch.setattr(StepAttention, "__call__", counting)
    driver.add("a", prompt_of(20))
    driver.add("b", prompt_of(9, 1))
    driver.add("c", prompt_of(9, 2), SCORED)
    driver.step({"a": 7})
    driver.step({"a": 5, "b": 9})
    driver.step({"b": 1, "a": 8})
    driver.step({"a": 1, "c": 9, "b": 1})
    assert rows == [0, 1, 2, 11]


@pytest.mark.parametrize("runner", [EagerRunner, GraphRunner])
def test_a_sampling_token_that_is_taken_for_another_row_is_seen(model_dir, monkeypatch, runner):
    right = HostInputs.sampling_rows_S
    monkeypatch.setattr(HostInputs, "sampling_rows_S", property(lambda inputs: right.fget(inputs) * 0))
    driver = Driver(build(model_dir, runner, runner=runner))
    driver.add("a", prompt_of(12))
    driver.add("b", prompt_of(9, 1))
    driver.step({"a": 7, "b": 9})
    with pytest.raises(AssertionError, match=r"^b: (wrong tokens|scores are off)"):
        check_text(driver, "b")


def test_every_seeded_request_draws_the_same_tokens_in_any_company(model_dir, form):
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=None)
    alone, together = Driver(build(model_dir, batch=form)), Driver(build(model_dir, batch=form), seed=1)
    for driver in (alone, together):
        driver.add("a", prompt_of(12), params)
    alone.finish("a", 8)
    together.add("b", prompt_of(30, 1), SamplingParams(temperature=1.5, max_tokens=None))
    together.step({"b": 4, "a": 5})
    together.step({"a": 7, "b": 26})
    while together.num_outputs("a") < 8:
        together.step({"b": 1, "a": 1})
    assert alone.rows["a"].token_ids == together.rows["a"].token_ids


def shared_blocks_in_one_step(driver: Driver) -> None:
    """b's table starts with blocks that a fills in this very step, and b stands before a in the batch."""
    prompt = prompt_of(8)
    driver.add("a", prompt)
    driver.add("b", [*prompt, 5, 6])
    a, b = driver.rows["a"], driver.rows["b"]
    a.block_ids = [driver.free.pop(), driver.free.pop()]
    b.block_ids, b.num_computed_tokens = list(a.block_ids), 8
    driver.step({"b": 2, "a": 8})
    driver.finish("b", 3)
    driver.finish("a", 3)
    check_text(driver, "a")
    check_text(driver, "b")


def test_every_row_sees_what_others_of_its_step_write(model_dir, form):
    shared_blocks_in_one_step(Driver(build(model_dir, batch=form, block_size=4)))


def test_every_row_that_has_not_caught_up_samples_nothing(model_dir, form):
    driver = Driver(build(model_dir, batch=form))
    driver.add("a", prompt_of(10))
    driver.add("b", prompt_of(4))
    assert driver.step({"a": 9}).token_ids == {}
    assert list(driver.step({"b": 4}).token_ids) == ["b"]
    assert list(driver.step({"a": 1, "b": 1}).token_ids) == ["a", "b"]


# Rows come, change and go


def resume_with_other_blocks(driver: Driver) -> None:
    driver.add("a", prompt_of(11))
    driver.add("b", prompt_of(9, 1))
    driver.finish("a", 3)
    driver.drop("a")
    driver.step({"b": 9}, preempted=["a"])  # into blocks that were a's
    driver.finish("a", 6)
    driver.finish("b", 3)
    check_text(driver, "a")
    check_text(driver, "b")


def test_every_resume_after_preemption_continues_the_same_text(model_dir, form):
    resume_with_other_blocks(Driver(build(model_dir, batch=form, block_size=4)))


def swap_and_return(driver: Driver) -> None:
    """Out, and back to other blocks, while someone else writes to the old ones."""
    driver.add("a", prompt_of(11))
    driver.finish("a", 3)
    row = driver.rows["a"]
    old, host = list(row.block_ids), [NUM_BLOCKS + 7, NUM_BLOCKS, NUM_BLOCKS + 3, NUM_BLOCKS + 19]
    driver.add("b", prompt_of(16, 1))
    driver.rows["b"].block_ids = list(old)
    driver.step({"b": 16}, preempted=["a"], copies=list(zip(old, host, strict=True)))
    row.block_ids = [driver.free.pop() for _ in old]
    driver.to_send.add("a")
    driver.finish("a", 6, copies=list(zip(host, row.block_ids, strict=True)))
    driver.finish("b", 2)
    check_text(driver, "a")
    check_text(driver, "b")


def test_every_swapped_request_continues_the_same_text(model_dir, form):
    swap_and_return(Driver(build(model_dir, batch=form, block_size=4)))


def replace_a_block(driver: Driver) -> None:
    """v0's cache finds a's second block equal to b's, hands b's to a, and a's own to somebody else."""
    prompt = prompt_of(8)
    driver.add("b", prompt)
    driver.add("a", prompt)
    driver.step({"b": 8, "a": 8})
    row, kept = driver.rows["a"], driver.rows["b"].block_ids[1]
    driver.runner.cache.blocks[:, :, row.block_ids[1]] = torch.nan
    row.block_ids[1] = kept
    driver.finish("a", 4, replaced_blocks={"a": [(1, kept)]})
    check_text(driver, "a")


def test_every_replaced_block_is_read_from_then_on(model_dir, form):
    replace_a_block(Driver(build(model_dir, batch=form, block_size=4)))


def test_every_plan_without_tokens_still_changes_the_rows(model_dir, form):
    driver = Driver(build(model_dir, batch=form))
    for name in "abc":
        driver.add(name, prompt_of(4))
    driver.step({"a": 4, "b": 4, "c": 2})
    assert driver.step({}).token_ids == {}
    assert driver.step({}, finished=["a", "never came"], preempted=["b"]).token_ids == {}
    assert driver.runner.batch.request_ids == ["c"]
    driver.add("a", prompt_of(5))  # the id of one that ended may come again
    driver.finish("a", 2)
    check_text(driver, "a")


def test_every_plan_that_breaks_the_contract_is_refused(model_dir, form):
    driver = Driver(build(model_dir, batch=form, block_size=4))
    driver.add("a", prompt_of(6))
    driver.step({"a": 4})
    plan = partial(StepPlan, 9)
    request = NewRequest("a", [1, 2], 2, [3], 0, WHOLE_VOCABULARY, None)
    scored = NewRequest("s", [1, 2, 3], 3, [3], 2, SamplingParams(prompt_logprobs=1), None)
    broken = {
        r"step 9 names b; the runner holds \['a'\]": [
            plan({"b": 1}),
            plan({}, preempted=["b"]),
            plan({}, new_blocks={"b": [1]}),
            plan({}, replaced_blocks={"b": [(0, 1)]}),
        ],
        "step 9: a is new": [plan({"a": 2}, [request])],
        "a: tokens 4..6 are scheduled, 6 are known, its blocks hold 4": [plan({"a": 2})],
        "a: tokens 4..7 are scheduled, 6 are known, its blocks hold 8": [plan({"a": 3}, new_blocks={"a": [8]})],
        "a: tokens 4..4": [plan({"a": 0})],
        "s wants prompt_logprobs but starts at token 2": [plan({"s": 1}, [scored])],
    }
    for message, plans in broken.items():
        for each in plans:
            with pytest.raises(AssertionError, match=message):
                driver.runner.launch(each)


def test_every_closed_runner_stays_closed(model_dir):
    runner = build(model_dir)
    runner.close()
    runner.close()
    with pytest.raises(AssertionError, match="after close"):
        runner.launch(StepPlan(1, {}))


@pytest.mark.parametrize("cls", [EagerRunner, GraphRunner])
def test_every_closed_runner_gives_its_memory_back(model_dir, cls):
    runner = build(model_dir, cls, runner=cls)
    held = [weakref.ref(runner.cache), weakref.ref(runner.model)]
    runner.close()
    gc.collect()  # a model's pieces are its own bound methods
    assert [ref() for ref in held] == [None, None]


# Scores of the prompt


SCORED = SamplingParams(temperature=0, max_tokens=None, prompt_logprobs=-1)


def check_prompt_scores(driver: Driver, name: str, found: list[TokenLogprobs | None]) -> None:
    row = driver.rows[name]
    prompt = row.token_ids[: row.num_prompt_tokens]
    expected = reference_logprobs(driver.runner, prompt)
    assert found[0] is None
    assert [scores.token_ids[0] for scores in found[1:] if scores] == prompt[1:]
    assert len(found) == len(prompt)
    for position, scores in enumerate(found[1:]):
        assert scores is not None
        torch.testing.assert_close(by_id(scores), expected[position], atol=2e-5, rtol=0)


@pytest.mark.parametrize("chunks", [[21], [20, 1], [1] * 21, [5, 5, 11]])
def test_every_split_of_a_prompt_gives_the_prompt_scores_of_one_pass(model_dir, chunks, monkeypatch):
    monkeypatch.setattr("nanoserve.prompt_scores.PROMPT_ROWS_AT_ONCE", 8)
    driver = Driver(build(model_dir))
    driver.add("a", prompt_of(21), SCORED)
    driver.add("b", prompt_of(40, 1))
    for n in chunks[:-1]:
        assert driver.step({"b": 1, "a": n}).prompt_logprobs == {}
    check_prompt_scores(driver, "a", driver.step({"b": 1, "a": chunks[-1]}).prompt_logprobs["a"])
    assert driver.step({"a": 1}).prompt_logprobs == {}  # handed out once


def test_every_preempted_prompt_is_scored_whole_and_once(model_dir):
    driver = Driver(build(model_dir))
    driver.add("a", prompt_of(21), SCORED)
    driver.step({"a": 13})
    driver.drop("a")
    driver.step({}, preempted=["a"])
    driver.step({"a": 7})
    check_prompt_scores(driver, "a", driver.step({"a": 14}).prompt_logprobs["a"])
    driver.drop("a")
    driver.step({}, preempted=["a"])
    assert driver.step({"a": 22}).prompt_logprobs == {}


def test_every_prompt_of_one_token_has_one_empty_score(model_dir):
    driver = Driver(build(model_dir))
    driver.add("a", [3], SCORED)
    assert driver.step({"a": 1}).prompt_logprobs == {"a": [None]}


# The cache


def small_cache() -> KVCache:
    shape = {"num_layers": 2, "num_blocks": 6, "num_kv_heads": 2, "block_size": 3, "head_dim": 4}
    cache = KVCache(**shape, dtype=torch.float32, device=torch.device("cpu"), num_host_blocks=5)
    cache.blocks.normal_()
    cache.host_blocks.normal_()
    return cache


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10)), max_size=12))
def test_every_list_of_copies_acts_as_if_one_came_after_the_other(pairs):
    cache = small_cache()
    memory = [*cache.blocks.unbind(2), *cache.host_blocks.unbind(2)]  # ids 0..5 on the device, 6..10 on the host
    memory = [block.clone() for block in memory]
    for source, target in pairs:
        memory[target] = memory[source].clone()
    cache.copy(pairs)
    found = [*cache.blocks.unbind(2), *cache.host_blocks.unbind(2)]
    assert all(torch.equal(a, b) for a, b in zip(found, memory, strict=True))


def test_every_block_survives_a_swap_out_and_in():
    cache = small_cache()
    before = cache.blocks.clone()
    cache.copy([(1, 6), (4, 10), (2, 8)])
    cache.blocks.fill_(torch.nan)
    cache.copy([(6, 2), (10, 3), (8, 5)])
    assert torch.equal(cache.blocks[:, :, [2, 3, 5]], before[:, :, [1, 4, 2]])


def test_every_pool_holds_the_blocks_its_bytes_allow(model_dir):
    token_bytes = 2 * 2 * 2 * 16 * 4  # layers, k and v, heads, head_dim, float32
    for num_bytes, block_size in ((token_bytes * 160, 16), (token_bytes * 175, 16), (token_bytes * 15, 16)):
        runner = EagerRunner(engine_config(model_dir, kv_cache_memory_bytes=num_bytes))
        assert runner.pool_blocks(block_size) == num_bytes // token_bytes // block_size
    assert runner.pool_blocks(1) == 15
    assert EagerRunner(engine_config(model_dir)).pool_blocks(16) > 1000


def test_every_pool_of_more_bytes_than_are_used_is_refused_with_the_most(model_dir):
    most = MAX_POOL_BLOCKS * 16 * 2 * 2 * 2 * 16 * 4
    assert EagerRunner(engine_config(model_dir, kv_cache_memory_bytes=most)).pool_blocks(16) == MAX_POOL_BLOCKS
    runner = EagerRunner(engine_config(model_dir, kv_cache_memory_bytes=2 * most))
    with pytest.raises(ValueError, match=rf"={2 * most} is room for 2,097,152 .* 1,048,576 .* at most {most}, or"):
        runner.pool_blocks(16)


def test_every_pool_that_cannot_be_allocated_is_refused(model_dir):
    with pytest.raises(ValueError, match=r"num_blocks=1000000000000 .* GiB, more than cpu memory has; lower them"):
        build(model_dir, num_blocks=10**12)


def test_every_runner_says_what_it_is(model_dir):
    runner = build(model_dir)
    assert (runner.device, runner.dtype, runner.model_len, runner.vocab_size) == ("cpu", "float32", 256, VOCAB)
    assert build(model_dir, dtype="bfloat16").dtype == "bfloat16"


# Planted bugs


class KeepsOldTable(RebuiltBatch):
    """After a resume, goes on with the table from before."""

    def apply(self, plan: StepPlan) -> None:
        tables = {request_id: list(row.block_ids) for request_id, row in self.rows.items()}
        self.tables = getattr(self, "tables", {}) | tables
        super().apply(plan)
        for new in plan.new:
            old = self.tables.get(new.id, [])
            self.rows[new.id].block_ids[: len(old)] = old


class IgnoresReplacedBlocks(RebuiltBatch):
    def apply(self, plan: StepPlan) -> None:
        plan.replaced_blocks.clear()
        super().apply(plan)


class CopiesNothing(RebuiltBatch):
    def apply(self, plan: StepPlan) -> None:
        plan.copies.clear()
        super().apply(plan)


class StoresRowByRow(TorchAttention):
    """Each row attends before the rows behind it have stored."""

    def store(self, k_TKD, v_TKD, kv_cache, layer, slot_mapping_T):
        self._pending = k_TKD, v_TKD, slot_mapping_T

    def attend(self, q_THD, kv_cache, layer, batch):
        k_TKD, v_TKD, slots = self._pending
        out_THD = torch.empty_like(q_THD)
        for start, end in zip(batch.query_starts, batch.query_starts[1:], strict=False):
            super().store(k_TKD[start:end], v_TKD[start:end], kv_cache, layer, slots[start:end])
            out_THD[start:end] = super().attend(q_THD, kv_cache, layer, batch)[start:end]
        return out_THD


@pytest.mark.parametrize(
    ("law", "fields"),
    [
        (resume_with_other_blocks, {"batch": KeepsOldTable}),
        (swap_and_return, {"batch": CopiesNothing}),
        (replace_a_block, {"batch": IgnoresReplacedBlocks}),
        (shared_blocks_in_one_step, {"attention": StoresRowByRow}),
    ],
)
def test_every_planted_bug_is_seen(model_dir, law, fields):
    with pytest.raises(AssertionError, match=r"^[ab]: (wrong tokens|scores are off)"):
        law(Driver(build(model_dir, block_size=4, **fields)))
