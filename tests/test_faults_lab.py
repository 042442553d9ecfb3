"""Laws of the fault lab: every planted bug dies by the law that is named for it, and the right class breaks none on the
same load. The other tests of schedulers and blocks see the same bugs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from itertools import product

import pytest
from test_blocks import hits_while_evicting
from test_scheduler_properties import Job as PropertyJob
from test_scheduler_properties import Load as PropertyLoad
from test_scheduler_properties import assert_seen, play

from nanoserve.block_pool import PrefixHit
from nanoserve.blocks import SharedBlocks
from nanoserve.config import SEAMS
from nanoserve.lab import laws
from nanoserve.lab.faults import FAULTS, get_fault, run_fault
from nanoserve.lab.laws import LAWS, Row
from nanoserve.lab.trial import Trial
from nanoserve.lab.trial_loads import FIXED, NUM_RANDOM, grading_loads, random_load
from nanoserve.record import read_trace
from nanoserve.request import Reason, Request, Status, StepPlan, StepResult
from nanoserve.scheduler import ChunkedNoMixScheduler, Draft, PhaseSplitScheduler, Share, UnifiedScheduler

DIGESTS = [name for name, fault in FAULTS.items() if not fault.needs_model]
RARE = "hash-before-compute"  # it takes a preemption within a step, and a return before the blocks are handed out
every_fault = pytest.mark.parametrize("name", FAULTS)


@every_fault
def test_every_fault_dies_by_its_law(name):
    fault = FAULTS[name]
    outcome = run_fault(name)
    first = outcome.first
    assert first is not None, f"{name}: all laws hold"
    assert first.law == fault.law, str(first)
    assert first.step > 0
    assert first.request in {job.id for job in fault.load.jobs}
    assert first.expected
    assert first.got
    assert first.expected != first.got


@every_fault
def test_every_right_class_passes_every_law_on_the_load_of_its_fault(name):
    outcome = run_fault(name, plant=False)
    assert list(outcome.verdicts) == list(LAWS)
    assert outcome.first is None, str(outcome.first)


@every_fault
def test_every_fault_is_a_small_difference_from_the_right_class(name):
    """It can be read beside what it overrides."""
    planted = FAULTS[name].planted_class
    assert planted.__doc__
    assert len(inspect.getsource(planted).splitlines()) <= 18
    assert len(planted.__mro__) == len(planted.__base__.__mro__) + 1
    assert planted.__base__.__module__.startswith("nanoserve.")
    overridden = [key for key in vars(planted) if not key.startswith("__")]
    assert overridden
    assert any(hasattr(planted.__base__, key) for key in overridden)


@every_fault
def test_every_fault_says_what_it_is_and_gives_three_hints(name):
    fault = FAULTS[name]
    assert fault.law in LAWS
    assert fault.description.endswith(".")
    assert fault.description.count(".") == 1
    assert fault.hints[0].endswith("?")
    assert len({fault.description, *fault.hints}) == 4


@every_fault
def test_every_fault_can_be_found_from_its_trace(name, tmp_path):
    """Every step up to the broken one is there; what stopped the engine, if anything did, stands in the last."""
    outcome = run_fault(name, tmp_path / "trace.jsonl")
    assert outcome.first is not None
    header, records = read_trace(tmp_path / "trace.jsonl")
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    assert header.config["num_blocks"] == FAULTS[name].load.fields["num_blocks"]
    assert outcome.first.request in {request.id for record in records for request in record.arrivals}
    assert len(records) >= outcome.first.step
    assert {record.step: record.error for record in records if record.error} == (
        {len(records): outcome.error} if outcome.error else {}
    )


def test_an_unknown_fault_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match="fault 'nope' is not known; use one of untouched-hit, "):
        get_fault("nope")


# The rest of the test suite sees them too


def _seen_on_random_loads(name: str) -> None:
    fault = FAULTS[name]
    classes = {"scheduler": UnifiedScheduler, "manager": SharedBlocks}
    classes["scheduler" if "scheduler" in fault.seam else "manager"] = fault.planted_class
    assert_seen(None, **classes)


def _seen_by_eviction(name: str) -> None:
    assert hits_while_evicting(SharedBlocks) != hits_while_evicting(FAULTS[name].planted_class)


def _seen_on_a_preemption_within_a_step(name: str) -> None:
    config = {"block_size": 4, "num_blocks": 9, "watermark": 0.0, "max_model_len": "auto", "max_num_seqs": 3}
    config |= {"long_prefill_token_threshold": 8, "policy": "priority"}
    victim, small = PropertyJob(tuple(range(30)), 2, priority=9), PropertyJob((1,), 1, priority=9)
    load = PropertyLoad([victim, small, PropertyJob(tuple(range(100, 108)), 2, arrives=1)], config, 16, 32)
    play(load, UnifiedScheduler, SharedBlocks)
    with pytest.raises(AssertionError):
        play(load, UnifiedScheduler, FAULTS[name].planted_class)


SEEN: dict[str, Callable[[str], None]] = {
    "head-first-free": _seen_by_eviction,
    RARE: _seen_on_a_preemption_within_a_step,
}


@pytest.mark.parametrize("name", DIGESTS)
def test_every_fault_of_scheduler_or_blocks_is_seen_by_the_laws_of_the_engine(name):
    SEEN.get(name, _seen_on_random_loads)(name)


@pytest.mark.parametrize("name", [name for name in DIGESTS if name != RARE])
def test_every_fault_of_scheduler_or_blocks_but_one_is_seen_on_other_loads_too(name):
    """Not on the one load that was made for it alone."""
    fault = FAULTS[name]
    loads = [load for load in grading_loads(0) if load.name != fault.load.name]
    loads += [random_load(seed, index) for seed in range(1, 30) for index in range(NUM_RANDOM)]
    first = next((o.first for load in loads if (o := Trial(load, dict(fault.seam)).run()).first), None)
    assert first is not None


# The laws themselves


@pytest.mark.parametrize(("scheduler", "blocks"), list(product(SEAMS["scheduler"].values(), SEAMS["blocks"].values())))
def test_every_built_in_class_keeps_every_law_on_every_load(scheduler, blocks):
    for seed in range(4):
        for load in grading_loads(seed) if seed == 0 else [random_load(seed, i) for i in range(NUM_RANDOM)]:
            outcome = Trial(load, {"scheduler": scheduler, "blocks": blocks}).run()
            assert outcome.first is None, f"{load.name}: {outcome.first}"


def test_every_fixed_load_gives_the_laws_something_to_do():
    """Preemptions, hits, cut prompts, aborts at each stage: a load in which nothing happens proves nothing."""
    records = {name: Trial(load, {}).run().records for name, load in FIXED.items()}
    preempted = {name for name, steps in records.items() if any(record.preempted for record in steps)}
    hits = {name for name, steps in records.items() if any(any(record.hit_tokens.values()) for record in steps)}
    assert {"tight-pool", "tight-pool-ahead", "priorities"} <= preempted
    assert {"shared-prefix", "repeats", "aborts"} <= hits
    resumed_in_chunks = [r for r in records["tight-pool"] if r.resumed and r.resumed[0] not in r.sampled]
    assert resumed_in_chunks
    ends = {reason for record in records["aborts"] for reason in record.finished.values()}
    assert ends == {"abort", "length"}


def test_every_trial_is_the_same_when_it_is_repeated():
    for load in grading_loads(7):
        assert Trial(load, {}).run() == Trial(load, {}).run()


def _decode_row() -> Row:
    return Row(known=9, computed=8, num_outputs=1, last=12)


def _scheduler(cls: type, **fields: object) -> UnifiedScheduler:
    trial = Trial(FIXED["burst"], {"scheduler": cls, **fields})
    trial.run()
    return trial.core.scheduler


PLANS = {
    "over budget": (UnifiedScheduler, StepPlan(1, {"a": 33}), "at most 32 tokens", "33 tokens"),
    "too many": (UnifiedScheduler, StepPlan(1, dict.fromkeys("abcdefghi", 1)), "at most 8 requests", "9 requests"),
    "an empty row": (UnifiedScheduler, StepPlan(1, {"a": 0}), "at least one token", "0 tokens"),
    "both": (UnifiedScheduler, StepPlan(1, {"a": 1}, left_out={"a": Reason("budget")}), "or a reason", "and a reason"),
}


@pytest.mark.parametrize("case", PLANS)
def test_every_illegal_plan_is_seen(case):
    cls, plan, expected, got = PLANS[case]
    verdict = laws.plan_is_legal(plan, _scheduler(cls))
    assert (verdict.law, verdict.holds) == ("plan", False)
    assert expected in verdict.expected
    assert got in verdict.got


UNTRUE = {
    "budget": Reason("budget"),
    "seq_cap": Reason("seq_cap"),
    "preemption_this_step": Reason("preemption_this_step"),
    "blocks": Reason("blocks", need=2, free=2),
    "watermark": Reason("watermark", need=1, free=2),
    "nothing_to_compute": Reason("nothing_to_compute"),
}


@pytest.mark.parametrize("code", UNTRUE)
def test_every_untrue_reason_is_seen(code):
    plan = StepPlan(3, {"b": 1}, left_out={"a": UNTRUE[code]})
    rows = {"a": _decode_row(), "b": _decode_row()}
    verdict = laws.reasons_are_true(plan, _scheduler(UnifiedScheduler), rows, {}, chunks=True)
    assert not verdict.holds
    assert (verdict.step, verdict.request) == (3, "a")


@pytest.mark.parametrize(
    ("cls", "tokens", "who"),
    [
        (PhaseSplitScheduler, {"d": 1, "p": 5}, "p"),
        (ChunkedNoMixScheduler, {"d": 1, "p": 5}, "p"),
        (UnifiedScheduler, {"p": 5}, "d"),
        (UnifiedScheduler, {"d": 1, "p": 2}, "p"),
    ],
)
def test_every_broken_promise_of_a_built_in_policy_is_seen(cls, tokens, who):
    rows = {"d": _decode_row(), "p": Row(known=5, computed=0, num_outputs=0, last=9)}
    verdict = laws.promises_are_kept(StepPlan(1, tokens), _scheduler(cls), rows, {"d"})
    assert not verdict.holds
    assert verdict.request == who


def test_every_lookup_that_changes_something_is_seen():
    class Counts(SharedBlocks):
        num_lookups = 0

        def lookup(self, request: Request) -> PrefixHit:
            self.num_lookups += 1
            return PrefixHit((1,) * self.num_lookups, 4 * self.num_lookups)

    outcome = Trial(FIXED["repeats"], {"blocks": Counts}).run()
    assert outcome.first is not None
    assert (outcome.first.law, outcome.first.expected) == ("blocks", "a lookup that changes nothing")


def test_every_token_too_few_or_too_many_is_seen():
    assert laws.tokens_are_those_alone("a", 1, 0, [5, 6], [5, 6]).holds
    assert "an end after 2 tokens" in laws.tokens_are_those_alone("a", 1, 2, [7], [5, 6]).expected
    assert laws.all_tokens_came("a", 1, 1, [5, 6], "length").expected == "2 tokens"
    assert laws.all_tokens_came("a", 1, 1, [5, 6], "abort", is_aborted=True).holds
    assert laws.all_tokens_came("a", 1, 1, [5, 6], "abort").got == "1, with reason 'abort'"
    assert laws.all_tokens_came("a", 1, 2, [5, 6], "").got == "2, and no end"
    assert laws.nothing_comes_after_the_end("a", 1, "").holds
    assert laws.nothing_comes_after_the_end("a", 1, "length").law == "tokens"


def test_every_token_computed_twice_is_seen():
    row = Row(known=12, computed=13, num_outputs=3, last=12)
    assert laws.work_is_accounted("a", row, 10, 3, 1).got == "13"
    row.computed = 12
    assert laws.work_is_accounted("a", row, 10, 3, 1).holds


def test_a_token_that_the_scheduler_does_not_count_on_is_seen():
    scheduler = _scheduler(UnifiedScheduler)
    request = FIXED["burst"].jobs[0]
    share = Share(Request(request.id, request.request().params, 40, 6), 8, False, 0)
    scheduler._in_flight[99] = ([share], [])
    verdict = laws.sampled_when_caught_up(StepPlan(99, {request.id: 8}), StepResult({request.id: [1]}), scheduler)
    assert (verdict.law, verdict.holds, verdict.request) == ("work", False, request.id)


def test_a_policy_that_gives_nobody_anything_makes_no_progress():
    class Idle(UnifiedScheduler):
        def schedule(self) -> StepPlan:
            return self._seal(Draft(self.budget))

    verdict = Trial(FIXED["tight-pool"], {"scheduler": Idle}).run().verdicts["progress"]
    assert (verdict.holds, verdict.request) == (False, "r0")


class IgnoresAborts(UnifiedScheduler):
    def abort(self, request_ids: Iterable[str]) -> list[str]:
        return []


class OnlySaysThatItAborts(UnifiedScheduler):
    def abort(self, request_ids: Iterable[str]) -> list[str]:
        return [request_id for request_id in request_ids if request_id in self.requests]


class AbortsInSilence(UnifiedScheduler):
    def abort(self, request_ids: Iterable[str]) -> list[str]:
        super().abort(request_ids)
        return []


class AbortsButKeepsTheBlocks(UnifiedScheduler):
    def abort(self, request_ids: Iterable[str]) -> list[str]:
        held = {i: self.requests[i].block_ids for i in request_ids if i in self.requests}
        for request_id in held:
            self.requests[request_id].block_ids = []
        return super().abort(held)


class AbortsLater(UnifiedScheduler):
    def abort(self, request_ids: Iterable[str]) -> list[str]:
        self.due = [i for i in request_ids if i in self.requests]
        return self.due

    def schedule(self) -> StepPlan:
        plan = super().schedule()
        super().abort(getattr(self, "due", []))
        return plan


ABORTS = {
    IgnoresAborts: ("returned", "no tokens for an aborted request"),
    OnlySaysThatItAborts: ("returned", "no tokens for an aborted request"),
    AbortsInSilence: ("tokens", "9 tokens"),
    AbortsButKeepsTheBlocks: ("blocks", "to be in its table or free again"),
    AbortsLater: ("returned", "no tokens for an aborted request"),
}


@pytest.mark.parametrize("load", ["aborts", "aborts-ahead"])
@pytest.mark.parametrize("cls", ABORTS)
def test_every_abort_that_does_not_end_its_request_is_seen(cls, load):
    first = Trial(FIXED[load], {"scheduler": cls}).run().first
    assert first is not None
    law, expected = ABORTS[cls]
    assert first.law == law, str(first)
    assert expected in first.expected
    assert first.request in {job.id for job in FIXED[load].jobs if job.abort_after is not None}


def test_every_aborted_request_that_stays_in_a_queue_is_seen():
    class Keeps(UnifiedScheduler):
        def abort(self, request_ids: Iterable[str]) -> list[str]:
            held = [self.requests[i] for i in request_ids if i in self.requests]
            self.swapped.extend(held)
            return super().abort(request.id for request in held)

    returned = Trial(FIXED["aborts"], {"scheduler": Keeps}).run().verdicts["returned"]
    assert (returned.holds, returned.got) == (False, "it is still in 'swapped'")


def test_every_place_that_still_holds_an_aborted_request_is_seen():
    scheduler = _scheduler(UnifiedScheduler)
    request = Request("a", FIXED["burst"].jobs[0].request().params, 4, 6)
    assert laws.abort_is_an_end("a", scheduler, 1).holds
    for place in (scheduler.waiting, scheduler.swapped, scheduler.running):
        place.push(request) if place is scheduler.waiting else place.append(request)
        verdict = laws.abort_is_an_end("a", scheduler, 1)
        assert (verdict.holds, verdict.request) == (False, "a")
        place.remove(request)
    assert laws.abort_is_an_end("a", scheduler, 1).holds


class Drops(UnifiedScheduler):
    """Ends a request in the fourth step, and tells nobody."""

    def schedule(self) -> StepPlan:
        if self._step == 3:
            self._finish(self.running[-1], Status.FINISHED_ABORTED)
        return super().schedule()


class TakesMore(UnifiedScheduler):
    def schedule(self) -> StepPlan:
        self.budget = 4 * FIXED["burst"].fields["max_num_batched_tokens"]
        return super().schedule()


class HasNothingToDo(UnifiedScheduler):
    has_work = False


class NeverCan(UnifiedScheduler):
    can_schedule = False


SHIRKS = {
    Drops: ("burst", "tokens", "and no end"),
    HasNothingToDo: ("burst", "tokens", "and no end"),
    TakesMore: ("burst", "plan", "128"),
    NeverCan: ("tight-pool-ahead", "progress", "none in 11 steps"),
}


@pytest.mark.parametrize("cls", SHIRKS)
def test_every_way_around_the_work_is_seen(cls):
    load, law, got = SHIRKS[cls]
    first = Trial(FIXED[load], {"scheduler": cls}).run().first
    assert first is not None
    assert first.law == law, str(first)
    assert got in first.got
