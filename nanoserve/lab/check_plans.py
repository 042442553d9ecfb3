"""Aims of the exercises that write a policy: the plans of the built-in one step by step, and who is never let in.

A plan that is another is told in words: who got how much, what of that was cached, ended a prompt or was lost before,
and the reasons of whoever got nothing. Laws: tests/test_exercises.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from nanoserve.blocks import PrivateBlocks
from nanoserve.config import EngineConfig
from nanoserve.core import EngineCore
from nanoserve.lab.fakes import DigestRunner
from nanoserve.lab.laws import Verdict, broken
from nanoserve.lab.trial_loads import Job
from nanoserve.record import StepRecord

if TYPE_CHECKING:
    from nanoserve.lab.check_engine import Pairs

MAX_TOLD = 3  # requests whose part in a step is told


def same_plans(mine: type, pairs: Pairs) -> tuple[str, Verdict]:
    """Each step gives the same requests the same tokens as the built-in class does."""
    for load, (yours, expected) in pairs.items():
        for one, other in zip(yours.trace.records, expected.trace.records, strict=False):
            if one.num_scheduled_tokens != other.num_scheduled_tokens:
                before = [record for record in expected.trace.records if record.step <= other.step]
                return load, _other_plan(one, other, before)
        numbers = [len(ran.trace.records) for ran in (yours, expected)]
        if numbers[0] != numbers[1] and not yours.outcome.error:
            return load, broken("policy", min(numbers), "", f"{numbers[1]} steps in all", f"{numbers[0]}")
    return "", Verdict(law="policy")


def _other_plan(mine: StepRecord, expected: StepRecord, so_far: Iterable[StepRecord]) -> Verdict:
    """`so_far`: the right steps, this one included; those before it were the same in both."""
    plans = [record.num_scheduled_tokens for record in (expected, mine)]
    different = [i for i in dict.fromkeys((*plans[0], *plans[1])) if plans[0].get(i, 0) != plans[1].get(i, 0)]
    notes = _notes(so_far)
    wanted, got = (_told(record, different[:MAX_TOLD], notes) for record in (expected, mine))
    return broken("policy", expected.step, different[0], wanted, got)


def _notes(records: Iterable[StepRecord]) -> Mapping[str, str]:
    """Of the requests that the last of these steps gives tokens, what their number does not say: that they are the end
    of a prompt begun before, or computed again after a preemption."""
    lengths: dict[str, int] = {}
    sampled: dict[str, int] = {}
    computed: dict[str, int] = {}
    lost: dict[str, int] = {}  # request -> step of its last preemption
    notes: dict[str, str] = {}
    for record in records:
        lengths |= {request.id: len(request.prompt_token_ids) for request in record.arrivals}
        lost |= dict.fromkeys(record.preempted, record.step)
        computed |= dict.fromkeys(record.preempted, 0) | record.hit_tokens
        notes = {}
        for request_id, n in record.num_scheduled_tokens.items():
            before, num_outputs = computed[request_id], sampled.get(request_id, 0)
            computed[request_id] = before + n
            if request_id in lost and before < lengths[request_id] + num_outputs - 1:
                own = f", the {num_outputs} tokens of its answer included" if num_outputs else ""
                notes[request_id] = f"of what its preemption in step {lost[request_id]} lost{own}"
            elif before and before + n == lengths[request_id] and request_id not in record.hit_tokens:
                notes[request_id] = "the end of its prompt"
        for request_id, token_ids in record.sampled.items():
            sampled[request_id] = sampled.get(request_id, 0) + len(token_ids)
    return notes


def _told(record: StepRecord, different: Iterable[str], known: Mapping[str, str]) -> str:
    """The step's tokens; of the different requests also what they were for, and why they got none."""
    different, parts = list(different), []
    for request_id, n in record.num_scheduled_tokens.items():
        hit = record.hit_tokens.get(request_id, 0)
        notes = [f"{hit} of its tokens are cached"] if hit else []
        notes += [known[request_id]] if request_id in known and n else []
        told = f" ({', '.join(notes)})" if notes and request_id in different else ""
        parts.append(f"{request_id} {n}{told}")
    text = ", ".join(parts) or "nobody"
    nothing = [f"{i} nothing: {record.left_out[i]}" for i in different if i in record.left_out]
    return "; ".join([text, *nothing])


# Who is never let in

BLOCK_SIZE, MODEL_LEN, MAX_STEPS = 4, 16, 60


class Limits(NamedTuple):
    """`num_blocks` that can be held; fewer than an engine would have for such a `max_model_len`, so that it is `fits`
    that says no."""

    budget: int
    num_blocks: int

    def __str__(self) -> str:
        room = self.num_blocks * BLOCK_SIZE
        return f"with max_model_len={MODEL_LEN}, a budget of {self.budget}, and blocks for {room} tokens"


LIMITS = (Limits(budget=2 * MODEL_LEN, num_blocks=40), Limits(MODEL_LEN - 1, 40), Limits(2 * MODEL_LEN, 3))
PROMPT_LENS = (17, 5, 16, 13, 15, 12, 14, 18)


class End(NamedTuple):
    reason: str
    step: int
    num_tokens: int

    def __str__(self) -> str:
        if not self.num_tokens:  # whoever is ignored ends by length, too
            return f"ignored in step {self.step}"
        return f"served by step {self.step}, {self.num_tokens} {'token' if self.num_tokens == 1 else 'tokens'}"


def limits_of(built_in: type) -> Callable[[type, Pairs], tuple[str, Verdict]]:
    """Prompts about as long as may be end as with the built-in class."""

    def look(mine: type, pairs: Pairs) -> tuple[str, Verdict]:
        for limits in LIMITS:
            yours, expected = _ends(mine, limits), _ends(built_in, limits)
            for request_id, end in expected.items():
                if (got := yours.get(request_id)) != end:
                    told = f"{got}{_too_much(yours, got, limits)}" if got else f"no end in {MAX_STEPS} steps"
                    wanted = f"{end}, {limits}{_passed_over(expected, request_id)}"
                    return "", broken("limits", 0, request_id, wanted, told)
        return "", Verdict(law="limits")

    return look


def _passed_over(expected: Mapping[str, End], request_id: str) -> str:
    """Who is ignored before a request that is served in that same step."""
    order = list(expected)
    end, before = expected[request_id], order[: order.index(request_id)]
    ignored = [i for i in before if end.num_tokens and expected[i] == End("length", end.step, 0)]
    return f"; {', '.join(ignored)}, before it, ignored in that step" if ignored else ""


def _too_much(yours: Mapping[str, End], got: End, limits: Limits) -> str:
    """The prompts of one step, where they are more than its budget: none of them is cut, as each ends in that step."""
    together = [i for i, end in yours.items() if end.num_tokens and end.step == got.step]
    num_tokens = sum(int(i.removesuffix("-tokens")) for i in together)
    over = len(together) > 1 and num_tokens > limits.budget
    return f", as {' and '.join(together)}: {num_tokens} of a budget of {limits.budget}" if over else ""


def _ends(scheduler: type, limits: Limits) -> Mapping[str, End]:
    """Prompts of all lengths come at once."""
    config = EngineConfig(
        scheduler=scheduler,
        blocks=PrivateBlocks,
        num_blocks=64,
        block_size=BLOCK_SIZE,
        max_model_len=MODEL_LEN,
        max_num_batched_tokens=limits.budget,
        max_num_seqs=2,
        watermark=0.0,
        **scheduler.fixed,
    ).resolve(model_len=MODEL_LEN, pool_blocks=0, device="cpu")
    blocks = PrivateBlocks(limits.num_blocks + 1, BLOCK_SIZE)
    core = EngineCore(config, scheduler(config, blocks), DigestRunner(config))
    for n in PROMPT_LENS:
        core.add(Job(id=f"{n}-tokens", prompt=list(range(1, n + 1)), max_tokens=1).request())
    ends: dict[str, End] = {}
    counts: dict[str, int] = {}
    while core.has_work and core.num_steps < MAX_STEPS:
        for output in core.step():
            counts[output.id] = counts.get(output.id, 0) + len(output.new_token_ids)
            if output.finish_reason:
                ends[output.id] = End(output.finish_reason, core.num_steps, counts[output.id])
    core.close()
    return ends
