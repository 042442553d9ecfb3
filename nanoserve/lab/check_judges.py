"""Who judges each exercise: a seam of the engine with loads and aims, or facts about a function on its own.

Each makes a judge for the exercise of that name, and imports what it needs then: some need torch. How a class is judged
is check_engine.py's and its neighbours'; which exercise has which judge is check_exercises.py's. Laws:
tests/test_exercises.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanoserve.lab.check_report import Report

Judge = Callable[[Any], Report]
_LIMITS = "Who could never run is ignored, at once, and nobody else is."


def phase_split(name: str) -> Judge:
    from nanoserve.blocks import PrivateBlocks
    from nanoserve.lab.check_engine import Aim, InEngine, fixed
    from nanoserve.lab.check_loads import CACHED_BY_V0, WATERMARK
    from nanoserve.lab.check_plans import limits_of, same_plans
    from nanoserve.scheduler import PhaseSplitScheduler

    return InEngine(
        exercise=name,
        seam="scheduler",
        built_in=PhaseSplitScheduler,
        loads=(
            *fixed("long-prompts", "burst", "tight-pool", "stream-of-shorts", "aborts"),
            CACHED_BY_V0,
            WATERMARK,
        ),
        fields={"blocks": PrivateBlocks},
        aims=[
            Aim("policy", "Every step is the one that v0's policy decides.", same_plans, always=True),
            Aim("limits", _LIMITS, limits_of(PhaseSplitScheduler)),
        ],
    )


def chunking(name: str) -> Judge:
    from nanoserve.blocks import PrivateBlocks
    from nanoserve.lab.check_engine import Aim, InEngine, fixed
    from nanoserve.lab.check_figures import not_enough
    from nanoserve.lab.check_loads import CACHED, LOST_HALF_WAY, WATERMARK
    from nanoserve.lab.check_plans import limits_of, same_plans
    from nanoserve.scheduler import ChunkedNoMixScheduler

    return InEngine(
        exercise=name,
        seam="scheduler",
        built_in=ChunkedNoMixScheduler,
        loads=(
            *fixed("burst", "long-prompts", "tight-pool", "stream-of-shorts", "aborts"),
            CACHED,
            WATERMARK,
            LOST_HALF_WAY,
        ),
        fields={"blocks": PrivateBlocks},
        aims=[
            Aim("policy", "Every step is the one that this policy decides.", same_plans, always=True),
            Aim("limits", _LIMITS, limits_of(ChunkedNoMixScheduler)),
        ],
        note=not_enough,
    )


def mixing(name: str) -> Judge:
    from nanoserve.blocks import PrivateBlocks
    from nanoserve.lab.check_engine import Aim, InEngine, fixed
    from nanoserve.lab.check_figures import MIXING_GAP_MS, first_tokens_stay, gaps_are_short
    from nanoserve.lab.check_loads import CACHED, LOST_HALF_WAY, WATERMARK
    from nanoserve.lab.check_plans import limits_of, same_plans
    from nanoserve.scheduler import UnifiedScheduler

    return InEngine(
        exercise=name,
        seam="scheduler",
        built_in=UnifiedScheduler,
        loads=(
            *fixed("long-prompts", "burst", "tight-pool", "stream-of-shorts", "aborts"),
            CACHED,
            WATERMARK,
            LOST_HALF_WAY,
        ),
        fields={"blocks": PrivateBlocks},
        aims=[
            Aim("gap", f"No gap of a stream beside long prompts is over {MIXING_GAP_MS} ms.", gaps_are_short),
            Aim("first token", "The long prompts' first tokens come as soon as the budget allows.", first_tokens_stay),
            Aim("policy", "Every step is the one that these rules decide.", same_plans),
            Aim("limits", _LIMITS, limits_of(UnifiedScheduler)),
        ],
    )


def chunk_size(name: str) -> Judge:
    from nanoserve.lab import check_puzzles as puzzles
    from nanoserve.lab.check_engine import Fact, OnItsOwn

    return OnItsOwn(
        exercise=name,
        facts=[
            Fact("promise", "The longest gap is no longer than promised.", puzzles.promise_is_kept),
            Fact("first token", "No budget that keeps the promise has it sooner.", puzzles.first_token_is_soon),
            Fact("thrift", f"It measures {puzzles.MAX_MEASUREMENTS} times at most.", puzzles.measures_little),
        ],
    )


def hash_chain(name: str) -> Judge:
    from nanoserve.blocks import SharedBlocks
    from nanoserve.lab.check_engine import Aim, Fact, InEngine, fixed, same_hits
    from nanoserve.lab.check_puzzles import keys_are_right

    return InEngine(
        exercise=name,
        seam="blocks",
        built_in=SharedBlocks,
        loads=fixed("repeats", "shared-prefix"),
        facts=[Fact("keys", "A hash covers all that a block's KV depends on, and nothing else.", keys_are_right)],
        aims=[Aim("hits", "Whatever is cached and of use is found.", same_hits)],
    )


def reference_counts(name: str) -> Judge:
    from nanoserve.blocks import SharedBlocks
    from nanoserve.lab.check_engine import Aim, Fact, InEngine, fixed, same_hits
    from nanoserve.lab.check_puzzles import counts_are_right, queue_is_right

    return InEngine(
        exercise=name,
        seam="blocks",
        built_in=SharedBlocks,
        loads=fixed("repeats", "shared-prefix", "tight-pool", "aborts"),
        facts=[
            Fact("counts", "A block counts the tables that hold it, and is free at 0.", counts_are_right),
            Fact("queue", "What is of no use to others goes first, a prefix last.", queue_is_right),
        ],
        aims=[Aim("hits", "Whatever is cached and of use is found.", same_hits)],
    )


def last_token(name: str) -> Judge:
    from nanoserve.blocks import SharedBlocks
    from nanoserve.lab.check_engine import Aim, Fact, InEngine, fixed, same_hits
    from nanoserve.lab.check_puzzles import hits_are_as_long_as_they_may, lookups_change_nothing

    return InEngine(
        exercise=name,
        seam="blocks",
        built_in=SharedBlocks,
        loads=fixed("repeats", "shared-prefix"),
        facts=[
            Fact("lengths", "A hit is as long as it may be, and no longer.", hits_are_as_long_as_they_may),
            Fact("pure", "Looking up changes nothing.", lookups_change_nothing),
        ],
        aims=[Aim("hits", "Whatever is cached and of use is found.", same_hits)],
    )


def eviction(name: str) -> Judge:
    from nanoserve.blocks import V0CachedBlocks
    from nanoserve.lab.check_engine import Aim, InEngine, fixed, same_evictions, same_hits
    from nanoserve.lab.check_figures import COMES_BACK

    return InEngine(
        exercise=name,
        seam="blocks",
        built_in=V0CachedBlocks,
        loads=(*fixed("shared-prefix", "tight-pool", "repeats"), COMES_BACK),
        aims=[
            Aim("order", "The oldest goes first; of one age, the one with most tokens before it.", same_evictions),
            Aim("hits", "Whatever is cached and of use is found.", same_hits),
        ],
    )


def planted(fault: str, *others: str, plug: Callable[[type], type] = lambda mine: mine) -> Callable[[str], Judge]:
    def make(name: str) -> Judge:
        from nanoserve.blocks import SharedBlocks
        from nanoserve.lab.check_engine import Aim, InEngine, fixed, same_hits
        from nanoserve.lab.faults import fault_trial, get_fault
        from nanoserve.scheduler import UnifiedScheduler

        found = get_fault(fault)
        right = {"scheduler": UnifiedScheduler, "blocks": SharedBlocks, **found.healthy}
        seam = next(iter(found.seam))
        healthy = fault_trial(found, plant=False)
        return InEngine(
            exercise=name,
            seam=seam,
            built_in=right[seam],
            loads=(found.load, *fixed(*others)),
            fields=found.healthy,
            aims=[Aim("hits", "Whatever is cached and of use is found.", same_hits)] if seam == "blocks" else [],
            plug=plug,
            make_runner=healthy.make_runner,
            alone=healthy.alone,
        )

    return make


def with_inputs(mine: type) -> type:
    from nanoserve.graph_runner import GraphRunner

    return type("RunnerOfYours", (GraphRunner,), {"static_inputs": mine})


def core_process(name: str) -> Judge:
    from nanoserve.lab.check_core import InProcessOfItsOwn

    return InProcessOfItsOwn(exercise=name)


def store_kv(name: str) -> Judge:
    from nanoserve.lab.check_engine import OnItsOwn
    from nanoserve.lab.check_kernels import STORE_FACTS

    return OnItsOwn(exercise=name, facts=STORE_FACTS)


def paged_attention(name: str) -> Judge:
    from nanoserve.lab.check_engine import OnItsOwn
    from nanoserve.lab.check_kernels import ATTENTION_FACTS

    return OnItsOwn(exercise=name, facts=ATTENTION_FACTS)


def dispatcher(name: str) -> Judge:
    from nanoserve.lab import check_puzzles as puzzles
    from nanoserve.lab.check_engine import Fact, OnItsOwn

    return OnItsOwn(
        exercise=name,
        facts=[
            Fact("captured", "Only graphs that were captured are replayed.", puzzles.only_captured_graphs),
            Fact(
                "fits",
                "A graph has room for all tokens, and for rows of their lengths.",
                puzzles.graphs_hold_their_steps,
            ),
            Fact("best", "It is the smallest, and covers the most, of those that fit.", puzzles.best_graph_is_chosen),
        ],
    )


def fairness(name: str) -> Judge:
    from nanoserve.lab.check_engine import Aim, InEngine, fixed
    from nanoserve.lab.check_figures import FAIR, fairer
    from nanoserve.scheduler import UnifiedScheduler

    return InEngine(
        exercise=name,
        seam="scheduler",
        built_in=UnifiedScheduler,
        loads=(FAIR, *fixed("stream-of-shorts", "long-prompts", "tight-pool", "aborts")),
        aims=[Aim("fairness", "All are slowed down alike, more so than by the built-in policy.", fairer)],
    )
