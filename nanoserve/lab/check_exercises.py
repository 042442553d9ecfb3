"""The exercises: which name a notebook has to define, who judges it, and where its solution stands.

A judge (check_judges.py) is made when it is asked for, so that the list costs nothing and needs no torch. Knows where
notebooks and solutions lie. Laws: tests/test_exercises.py.
"""

from __future__ import annotations

import importlib
import json
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nanoserve.lab import check_judges as judges
from nanoserve.lab.check_judges import Judge
from nanoserve.lab.show import source_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """`answer`: what the notebook defines. `twin`: `module:Name` of the package that answers it, with the `methods`
    that are holes; "" where exercises/solutions has a file instead. `base`: what the answer derives from."""

    number: int
    name: str
    answer: str
    make_judge: Callable[[str], Judge]
    twin: str = ""
    base: str = ""  # "": no class
    methods: tuple[str, ...] = ()

    def judge(self) -> Judge:
        return self.make_judge(self.name)

    @property
    def solution_name(self) -> str:
        return self.twin.partition(":")[2] or f"exercises/solutions/{self.name}.py"


def get_exercise(number: int) -> Exercise:
    """ValueError for a number that there is none of."""
    if number not in EXERCISES:
        raise ValueError(f"exercise {number!r} is not known; use one of 1 to {max(EXERCISES)}.")
    return EXERCISES[number]


def exercises_dir() -> Path:
    """In an installed package a part of it; in a clone, beside it. ValueError when they are nowhere."""
    package = Path(str(files("nanoserve")))
    for folder in (package / "exercises", package.parent / "exercises"):
        if any(folder.glob("*.ipynb")):
            return folder
    raise ValueError("the exercises are not installed; reinstall nanoserve, or take them from its repository.")


def question_of(exercise: Exercise) -> str:
    """As its notebook says it."""
    notebook = (exercises_dir() / f"{exercise.name}.ipynb").read_text(encoding="utf-8")
    return json.loads(notebook)["metadata"]["nanoserve"]["question"]


def solution_source(exercise: Exercise) -> str:
    """What the cell with the holes becomes."""
    if not exercise.twin:
        return (exercises_dir() / "solutions" / f"{exercise.name}.py").read_text(encoding="utf-8").rstrip("\n")
    twin = twin_of(exercise)
    if not exercise.base:
        held = getattr(twin, "fn", twin)
        return source_of(held).replace(f"def {held.__name__}(", f"def {exercise.answer}(")
    methods = (textwrap.indent(source_of(vars(twin)[name]), "    ") for name in exercise.methods)
    return "\n\n".join([f"class {exercise.answer}({exercise.base}):", *methods]).replace("\n\n", "\n", 1)


def twin_of(exercise: Exercise) -> Any:
    module, _, name = exercise.twin.partition(":")
    return getattr(importlib.import_module(module), name)


_SCHEDULER, _BLOCKS = "nanoserve.scheduler", "nanoserve.blocks"
_EXERCISES = [
    Exercise(
        number=1,
        name="01_phase_split",
        answer="MyPhaseSplit",
        make_judge=judges.phase_split,
        twin=f"{_SCHEDULER}:PhaseSplitScheduler",
        base="PhaseSplitScheduler",
        methods=("schedule", "_prefill"),
    ),
    Exercise(
        number=2,
        name="02_chunking",
        answer="MyChunks",
        make_judge=judges.chunking,
        twin=f"{_SCHEDULER}:ChunkedNoMixScheduler",
        base="ChunkedNoMixScheduler",
        methods=("_prefill",),
    ),
    Exercise(
        number=3,
        name="03_mixing",
        answer="MyMix",
        make_judge=judges.mixing,
        twin=f"{_SCHEDULER}:UnifiedScheduler",
        base="UnifiedScheduler",
        methods=("schedule",),
    ),
    Exercise(number=4, name="04_chunk_size", answer="pick_budget", make_judge=judges.chunk_size),
    Exercise(
        number=5,
        name="05_hash_chain",
        answer="MyHashes",
        make_judge=judges.hash_chain,
        twin=f"{_BLOCKS}:SharedBlocks",
        base="SharedBlocks",
        methods=("hash_block",),
    ),
    Exercise(
        number=6,
        name="06_reference_counts",
        answer="MyCounts",
        make_judge=judges.reference_counts,
        twin=f"{_BLOCKS}:SharedBlocks",
        base="SharedBlocks",
        methods=("_hold", "free"),
    ),
    Exercise(
        number=7,
        name="07_last_token",
        answer="MyLookup",
        make_judge=judges.last_token,
        twin=f"{_BLOCKS}:SharedBlocks",
        base="SharedBlocks",
        methods=("lookup",),
    ),
    Exercise(
        number=8,
        name="08_eviction",
        answer="MyEviction",
        make_judge=judges.eviction,
        twin=f"{_BLOCKS}:V0CachedBlocks",
        base="V0CachedBlocks",
        methods=("_evict",),
    ),
    Exercise(
        number=9,
        name="09_bug_after_a_preemption",
        answer="MyCount",
        make_judge=judges.planted("output-means-decode", "long-prompts", "aborts"),
        twin=f"{_SCHEDULER}:BaseScheduler",
        base="TakesOutputForDecode",
        methods=("_count",),
    ),
    Exercise(
        number=10,
        name="10_bug_within_a_step",
        answer="MyForget",
        make_judge=judges.planted("hash-before-compute", "shared-prefix", "repeats"),
        twin=f"{_BLOCKS}:SharedBlocks",
        base="NeverForgets",
        methods=("forget",),
    ),
    Exercise(
        number=11,
        name="11_bug_in_the_padding",
        answer="MyInputs",
        make_judge=judges.planted("padding-stores", plug=judges.with_inputs),
        twin="nanoserve.static_inputs:StaticInputs",
        base="KeepsOldSlots",
        methods=("fill_tokens",),
    ),
    Exercise(
        number=12,
        name="12_core_process",
        answer="MyCore",
        make_judge=judges.core_process,
        twin="nanoserve.worker:CoreServer",
        base="CoreServer",
        methods=("_receive", "_handle", "_call"),
    ),
    Exercise(
        number=13,
        name="13_store_kv",
        answer="my_store_kv",
        make_judge=judges.store_kv,
        twin="nanoserve.kernels:_store_kv",
    ),
    Exercise(number=14, name="14_paged_attention", answer="my_paged_attention", make_judge=judges.paged_attention),
    Exercise(
        number=15,
        name="15_graph_dispatcher",
        answer="MyDispatcher",
        make_judge=judges.dispatcher,
        twin="nanoserve.graphs:Dispatcher",
        base="Dispatcher",
        methods=("dispatch",),
    ),
    Exercise(number=16, name="16_fairness", answer="MyPolicy", make_judge=judges.fairness),
]
EXERCISES: Mapping[int, Exercise] = MappingProxyType({exercise.number: exercise for exercise in _EXERCISES})
