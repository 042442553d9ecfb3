"""Laws of the batch: whatever the plans are, the arrays that stay give the inputs that records made anew would give,
bit for bit, what they gave never changes afterwards, and no step's Python grows with the number of requests."""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.config import EngineConfig
from nanoserve.input_batch import HostInputs, InputBatch, RebuiltBatch
from nanoserve.persistent_batch import PersistentBatch
from nanoserve.request import NewRequest, SamplingParams, StepPlan
from nanoserve.sampling_columns import SamplingColumns, TokenCounts, draw_keys
from nanoserve.sampling_inputs import draw_key, mix64

VOCAB = 12
MODEL_LEN = 40
CAPACITY = 5
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=None)


def make(form: type[InputBatch], block_size: int = 4, capacity: int = CAPACITY) -> InputBatch:
    config = EngineConfig(max_num_seqs=capacity, block_size=block_size)
    resolved = config.resolve(model_len=MODEL_LEN, pool_blocks=10**6, device="cpu")
    return form(resolved, vocab_size=VOCAB, device=CPU)


def random_params(rng: random.Random, may_read: bool) -> SamplingParams:
    """Half of them plain; the others use any mix of features, if `may_read` those too that wait for every result."""

    def maybe(value: Any, off: Any, reads: bool = False) -> Any:
        return value if rng.random() < 0.25 and (may_read or not reads) else off

    if rng.random() < 0.5:
        return rng.choice([GREEDY, SamplingParams(max_tokens=None), SamplingParams(seed=rng.randrange(2**63))])
    words = [rng.choices(range(VOCAB), k=rng.randint(1, 2)) for _ in range(3)]
    return SamplingParams(
        max_tokens=None,
        temperature=rng.choice([0, 0.3, 1.0, 2.0]),
        seed=rng.choice([None, -(2**63), 0, 2**63 - 1, rng.randrange(10**6)]),
        top_k=maybe(rng.choice([1, 3, VOCAB, 2**62]), rng.choice([0, -1])),
        top_p=maybe(rng.random() or 1.0, 1.0),
        min_p=maybe(rng.random(), 0.0),
        repetition_penalty=maybe(rng.choice([1e-300, 0.5, 1.3, 1e300]), 1.0, reads=True),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0, reads=True),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0, reads=True),
        min_tokens=maybe(rng.randint(1, 6), 0),
        stop_token_ids=maybe([2, VOCAB + 3], []),
        logit_bias=maybe({rng.randrange(VOCAB): rng.uniform(-5, 5)}, {}),
        allowed_token_ids=maybe(rng.sample(range(VOCAB), 3), None),
        bad_words_token_ids=maybe(words, [], reads=True),
        logprobs=maybe(rng.choice([0, 2, -1]), None),
    )


@dataclasses.dataclass(eq=False)
class Told:
    """What a scheduler knows of a request that it told the batch of."""

    id: str
    params: SamplingParams
    num_prompt_tokens: int
    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    num_in_flight: int = 0

    @property
    def num_known(self) -> int:
        return len(self.token_ids) + self.num_in_flight

    @property
    def behind(self) -> int:
        return self.num_known - self.num_computed_tokens


class Story:
    """A random scheduler, at odds with everyone: requests come, are preempted, come back with other blocks, end, and
    leave their ids and rows to others; tables grow and change; prompts come in chunks; results may be a step late.
    Now and then it is calm: nobody comes, and everyone has all that it wants, mostly in the same order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.block_size = self.rng.choice([1, 3, 4, 16])
        self.runs_ahead = self.rng.random() < 0.7
        self.may_read = self.rng.random() < 0.5
        self.held: dict[str, Told] = {}
        self.preempted: dict[str, Told] = {}
        self.step = 0
        self.is_calm = False

    def blocks(self, n: int) -> list[int]:
        return [self.rng.randrange(1, 10**5) for _ in range(n)]

    def grow(self, told: Told, num_tokens: int) -> list[int]:
        """Blocks for that many tokens, and sometimes one more."""
        most = -(-MODEL_LEN // self.block_size)
        one_more = self.rng.choice([0, 0, 0, 1]) if not self.is_calm else 0
        wanted = min(-(-num_tokens // self.block_size) + one_more, most)
        grown = self.blocks(wanted - len(told.block_ids))
        told.block_ids += grown
        return grown

    def leave(self) -> tuple[list[str], list[str]]:
        """(preempted, finished) of the next plan."""
        share = 0.0 if self.is_calm else 0.08
        preempted = [i for i in self.held if self.rng.random() < share]
        for request_id in preempted:
            self.preempted[request_id] = self.held.pop(request_id)
        full = [i for i, told in self.held.items() if told.num_known >= MODEL_LEN - 1]
        finished = full + [i for i in self.held if i not in full and self.rng.random() < share]
        for request_id in finished:
            del self.held[request_id]
        return preempted, finished + self.rng.choice([[], [] if self.is_calm else ["never came"]])

    def arrive(self) -> list[NewRequest]:
        new = []
        while not self.is_calm and len(self.held) < CAPACITY and self.rng.random() < 0.6:
            request_id = self.rng.choice("abcdefgh")
            if request_id in self.held:
                continue
            told = self.preempted.pop(request_id, None)
            if told is None:
                prompt = self.rng.choices(range(VOCAB), k=self.rng.randint(1, 20))
                told = Told(request_id, random_params(self.rng, self.may_read), len(prompt), prompt, [], 0)
            hit = self.rng.choice([0, self.rng.randrange(len(told.token_ids))])
            told = Told(request_id, told.params, told.num_prompt_tokens, list(told.token_ids), [], hit)
            self.grow(told, hit)
            self.held[request_id] = told
            eos = self.rng.choice([None, 1])
            whole = (told.num_prompt_tokens, list(told.block_ids), told.num_computed_tokens, told.params, eos)
            new.append(NewRequest(request_id, list(told.token_ids), *whole))
        return new

    def next_plan(self) -> StepPlan:
        rng = self.rng
        self.is_calm ^= rng.random() < 0.15
        preempted, finished = self.leave()
        before = list(self.held.values())
        new = self.arrive()
        replaced = {}
        for told in before:
            if told.block_ids and rng.random() < (0.02 if self.is_calm else 0.1):
                index, (block_id,) = rng.randrange(len(told.block_ids)), self.blocks(1)
                told.block_ids[index] = block_id
                replaced[told.id] = [(index, block_id)]
        tokens, new_blocks = {}, {}
        everyone = list(self.held.values())
        if rng.random() < (0.1 if self.is_calm else 1):
            rng.shuffle(everyone)
        for told in everyone:
            if told.behind == 0 or (not self.is_calm and rng.random() < 0.15):
                continue
            is_whole = self.is_calm or rng.random() < 0.7
            n = tokens[told.id] = told.behind if is_whole else rng.randint(1, told.behind)
            told.num_computed_tokens += n
            if grown := self.grow(told, told.num_computed_tokens):
                new_blocks[told.id] = grown
        self.step += 1
        return StepPlan(self.step, tokens, new, new_blocks, replaced, preempted, finished)

    def launched(self, plan: StepPlan) -> list[Told]:
        """Who samples in this step, in order: each has a token in flight from now on."""
        rows = [told for i in plan.num_scheduled_tokens if (told := self.held[i]).behind == 0]
        for told in rows:
            told.num_in_flight += 1
        return rows


class Pair:
    """Both forms, told the same; every step is compared, and at the end once more with what it was when it was new."""

    def __init__(self, form: type[InputBatch], block_size: int) -> None:
        self.forms = (make(form, block_size), make(RebuiltBatch, block_size))
        self.kept: list[tuple[HostInputs, HostInputs]] = []
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> list[HostInputs | None]:
        self.plans.append(plan)
        for batch in self.forms:
            batch.apply(plan)
        assert_same(*(batch.request_ids for batch in self.forms), f"step {plan.step}: rows")
        assert_same(*(batch.reads_output for batch in self.forms), f"step {plan.step}: reads_output")
        found, expected = (batch.build(plan) for batch in self.forms)
        assert_same(found, expected, f"step {plan.step}")
        if found is not None:
            assert found.block_table_RB.flags.c_contiguous
            self.kept.append((found, copy.deepcopy(found)))
        return [found, expected]

    def fill(self, inputs: list[HostInputs | None], token_ids: list[int]) -> None:
        for batch, each in zip(self.forms, inputs, strict=True):
            if each is not None:
                batch.fill(each, token_ids)

    @property
    def inputs(self) -> list[HostInputs]:
        return [now for now, _ in self.kept]

    def check_the_past(self) -> None:
        for now, then in self.kept:
            assert_same(now, then, "a step of the past")


def assert_same(found: Any, expected: Any, where: str) -> None:
    """Field by field, to the bit and to the type; a receipt is each form's own."""
    assert type(found) is type(expected), f"{where}: {found} instead of {expected}"
    if dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            if field.name != "receipt":
                assert_same(getattr(found, field.name), getattr(expected, field.name), f"{where}.{field.name}")
    elif isinstance(found, np.ndarray | torch.Tensor):
        same = found.dtype == expected.dtype and found.shape == expected.shape and bool((found == expected).all())
        assert same, f"{where}: {found} instead of {expected}"
    else:
        assert found == expected, f"{where}: {found} instead of {expected}"


def follow(seed: int, form: type[InputBatch] = PersistentBatch, num_steps: int = 25) -> Pair:
    """Tell both forms the same story. A result comes before the next plan, or after the step of the next plan."""
    story = Story(seed)
    pair = Pair(form, story.block_size)
    late: list[Callable[[], None]] = []

    def fill(inputs: list[HostInputs | None], rows: list[Told]) -> None:
        token_ids = story.rng.choices(range(VOCAB), k=len(rows))
        pair.fill(inputs, token_ids)
        for told, token_id in zip(rows, token_ids, strict=True):
            told.token_ids.append(token_id)
            told.num_in_flight -= 1

    for _ in range(num_steps):
        if pair.forms[1].reads_output or not story.runs_ahead:
            while late:
                late.pop()()
        plan = story.next_plan()
        inputs = pair.launch(plan)
        while late:
            late.pop()()
        late.append(partial(fill, inputs, story.launched(plan)))
    pair.check_the_past()
    return pair


def follow_many(form: type[InputBatch] = PersistentBatch) -> None:
    for seed in range(30):
        follow(seed, form)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
def test_every_sequence_of_plans_gives_the_inputs_of_records_made_anew(seed: int) -> None:
    follow(seed)


def test_the_stories_are_worth_telling() -> None:
    pairs = [follow(seed) for seed in range(30)]
    plans = [plan for pair in pairs for plan in pair.plans]
    inputs = [each for pair in pairs for each in pair.inputs]
    for field in ("allowed", "blocked", "bias", "penalties", "plain", "truncated", "logprobs"):
        assert any(each.sampling and getattr(each.sampling, field) for each in inputs), field
    assert any(plan.replaced_blocks for plan in plans)
    assert any(new.num_computed_tokens for plan in plans for new in plan.new)
    assert any({new.id for new in plan.new} & {*plan.finished} for plan in plans), "no id was used again"
    resumed = [new for plan in plans for new in plan.new if len(new.token_ids) > new.num_prompt_tokens]
    assert len(resumed) > 20
    assert sum(len(each.in_flight_T) for each in inputs) > 100
    assert sum(len(each.in_flight_T) for each in inputs if each.sampling and each.sampling.blocked) > 20
    assert any(len(each.sampling_ids) < len(each.request_ids) < each.num_tokens for each in inputs)
    again = [
        now for pair in pairs for now, before in zip(pair.inputs[1:], pair.inputs, strict=False) if goes_on(now, before)
    ]
    assert sum(len(each.request_ids) > 1 for each in again) > 50
    assert sum(len(each.in_flight_T) > 0 for each in again) > 10
    assert sum(len(each.in_flight_T) == 0 for each in again) > 20
    assert sum(bool(each.sampling and (each.sampling.plain or each.sampling.blocked)) for each in again) > 20


def goes_on(now: HostInputs, before: HostInputs) -> bool:
    """Whether a step shares what the one before was given."""
    return now.block_table_RB is before.block_table_RB


@pytest.mark.parametrize("form", [RebuiltBatch, PersistentBatch])
def test_every_token_is_filled_in_once(form: type[InputBatch]) -> None:
    batch = make(form)
    plan = StepPlan(1, {"a": 2}, [NewRequest("a", [1, 2], 2, [1], 0, GREEDY, None)])
    batch.apply(plan)
    inputs = batch.build(plan)
    assert inputs is not None
    batch.fill(inputs, [3])
    with pytest.raises(AssertionError, match="a: token 2 was known already"):
        batch.fill(inputs, [3])


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31)), min_size=1))
def test_every_vector_of_keys_is_the_keys_of_its_rows(rows: list[tuple[int, int]]) -> None:
    seeds, indices = zip(*rows, strict=True)
    mixed = np.array([mix64(seed % 2**64) for seed in seeds], np.uint64)
    keys = draw_keys(mixed, np.array(indices))
    assert keys.tolist() == [draw_key(seed, index) for seed, index in rows]


def test_every_request_beyond_the_capacity_is_refused() -> None:
    batch = make(PersistentBatch)
    new = [NewRequest(f"r{i}", [1], 1, [1], 0, GREEDY, None) for i in range(CAPACITY + 1)]
    with pytest.raises(AssertionError, match=f"step 1: r{CAPACITY} is one request more than max_num_seqs={CAPACITY}"):
        batch.apply(StepPlan(1, {}, new))


def test_every_capacity_beyond_the_memory_is_refused() -> None:
    config = EngineConfig(max_num_seqs=2**40, max_num_batched_tokens=2**40)
    resolved = config.resolve(model_len=2**20, pool_blocks=2**20, device="cpu")
    with pytest.raises(ValueError, match=r"max_num_seqs=1099511627776 rows of .*; lower one of them"):
        PersistentBatch(resolved, vocab_size=VOCAB, device=CPU)


# What a step costs


def bytecodes(work: Callable[[], None]) -> int:
    """How many the interpreter runs: the work that is done in Python, whatever it costs in C."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def step_bytecodes(form: type[InputBatch], num_requests: int, params: SamplingParams) -> int:
    """Of a decode step with new blocks for one request in sixteen, of the same again without, and of their results."""
    batch = make(form, block_size=4, capacity=1024)
    ids = [f"r{i}" for i in range(num_requests)]
    new = [NewRequest(i, [1, 2], 2, [1], 0, params, None) for i in ids]
    grown = {i: [2] for i in ids[::16]}
    tokens = dict.fromkeys(ids, 1)
    plans = [StepPlan(1, dict.fromkeys(ids, 2), new), StepPlan(2, tokens, [], grown), StepPlan(3, dict(tokens))]
    token_ids = [1] * num_requests

    def step(plan: StepPlan) -> None:
        batch.apply(plan)
        inputs = batch.build(plan)
        assert inputs is not None
        batch.fill(inputs, token_ids)

    step(plans[0])
    return sum(bytecodes(partial(step, plan)) for plan in plans[1:])


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(seed=7), SamplingParams(top_p=0.9, min_p=0.1), SamplingParams(presence_penalty=1)]
)
def test_every_step_runs_as_much_python_for_many_requests_as_for_few(params: SamplingParams) -> None:
    few, many = (step_bytecodes(PersistentBatch, n, params) for n in (64, 512))
    assert many == few
    assert step_bytecodes(RebuiltBatch, 512, params) > 512 * 20  # the law can fail


# Planted bugs


class KeepsTheTableOfTheLast(PersistentBatch):
    """A row is given away with its blocks."""

    def _drop(self, request_id: str) -> None:
        row = self._rows[request_id]
        table_B = self._block_table_CB[row].copy()
        super()._drop(request_id)
        self._block_table_CB[row] = table_B


class KeepsTheTableOnResume(PersistentBatch):
    """Who comes back goes on with the blocks from before."""

    def _drop(self, request_id: str) -> None:
        tables = self.__dict__.setdefault("tables", {})
        tables[request_id] = self._block_table_CB[self._rows[request_id]].copy()
        super()._drop(request_id)

    def _add(self, plan: StepPlan, new: NewRequest) -> None:
        super()._add(plan, new)
        old_B = self.__dict__.get("tables", {}).get(new.id)
        if old_B is not None and new.block_ids:
            self._block_table_CB[self._rows[new.id], 0] = old_B[0]


class FillsWhoeverHasTheRow(PersistentBatch):
    """That a row was given back meanwhile is not noticed where it has a new owner."""

    def fill(self, inputs: HostInputs, token_ids: Sequence[int]) -> None:
        self._left_C[list(self._rows.values())] = 0
        super().fill(inputs, token_ids)


class TrustsItsReaders(PersistentBatch):
    """Hands out the arrays of its own where they happen to have the right shape."""

    def build(self, plan: StepPlan) -> HostInputs | None:
        inputs = super().build(plan)
        rows = [self._rows[i] for i in plan.num_scheduled_tokens]
        if inputs is None or rows != list(range(len(rows))):
            return inputs
        return dataclasses.replace(inputs, seq_lens_R=self._num_computed_C[: len(rows)])


class GoesOnWhateverHappened(PersistentBatch):
    """What a plan changes does not end a run of equal steps."""

    def apply(self, plan: StepPlan) -> None:
        last = self._last
        super().apply(plan)
        self._last = last


class GoesOnIntoTheNextBlock(PersistentBatch):
    """A run of equal steps is a step too long."""

    def _gather(self, plan: StepPlan) -> HostInputs:
        inputs = super()._gather(plan)
        if self._last:
            self._last.num_more += 1
        return inputs


class GoesOnInTheOldOrder(PersistentBatch):
    """The same requests in another order pass for the same step."""

    def build(self, plan: StepPlan) -> HostInputs | None:
        last, tokens = self._last, plan.num_scheduled_tokens
        if last and tokens == last.num_scheduled_tokens:
            plan = StepPlan(plan.step, last.num_scheduled_tokens)
        return super().build(plan)


class GoesOnWithoutTheNews(PersistentBatch):
    """Tokens pass for being in flight though they are known."""

    def fill(self, inputs: HostInputs, token_ids: Sequence[int]) -> None:
        super().fill(inputs, token_ids)
        inputs.receipt.ids_S = None


@pytest.mark.parametrize(
    "form",
    [
        KeepsTheTableOfTheLast,
        KeepsTheTableOnResume,
        FillsWhoeverHasTheRow,
        TrustsItsReaders,
        GoesOnWhateverHappened,
        GoesOnIntoTheNextBlock,
        GoesOnInTheOldOrder,
        GoesOnWithoutTheNews,
    ],
)
def test_every_planted_bug_is_seen(form: type[PersistentBatch]) -> None:
    with pytest.raises(AssertionError, match=r"^(step \d+|a step of the past)"):
        follow_many(form)


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (TokenCounts, "append", lambda *_: None),
        (TokenCounts, "take", lambda self, places: (self._seen_PV[: len(places)], self._counts_PV[: len(places)])),
        (SamplingColumns, "drop", lambda *_: None),
    ],
)
def test_every_planted_bug_of_the_columns_is_seen(
    owner: type, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(AssertionError, match=r"^(step \d+|a step of the past)"):
        follow_many()
