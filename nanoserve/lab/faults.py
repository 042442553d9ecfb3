"""The fault lab: classic bugs, planted one at a time, with the law that catches each and the load that shows it.

`run_fault` runs one and writes its trace, so that a learner can look for the bug; `hints` help in three stages: the
question to ask, the invariant, the pseudo-code. The classes are in planted.py. Every fault dies by its law, and the
right classes pass all laws on the same load: tests/test_faults_lab.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from nanoserve.blocks import PrivateBlocks
from nanoserve.core import EngineCore
from nanoserve.lab import planted
from nanoserve.lab.fakes import DigestRunner, reference_tokens
from nanoserve.lab.trial import Alone, MakeRunner, Outcome, Trial
from nanoserve.lab.trial_loads import FIXED, Job, Load, sizes
from nanoserve.record import JsonlRecorder, Observer
from nanoserve.request import EngineRequest, SamplingParams

PLANTED_FILE = str(planted.__file__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planted bug. `seam`: field of the config -> class. `load` shows it; what it runs on is real where the
    runner's inputs are at fault (`needs_model`), else the digest runner."""

    name: str
    description: str
    seam: Mapping[str, type]
    law: str
    load: Load
    hints: tuple[str, str, str]
    healthy: Mapping[str, Any] = field(default_factory=dict)  # fields of the right engine beside it, where not v1's

    @property
    def needs_model(self) -> bool:
        return not self.seam.keys() & {"scheduler", "blocks"}

    @property
    def planted_class(self) -> type:
        return next(iter(self.seam.values()))


def _story(num_blocks: int, *, max_num_seqs: int, jobs: list[Job], **fields: Any) -> Load:
    claim = "A model of tensors, whose keys and values lie in blocks."
    return Load(name="stories", claim=claim, jobs=jobs, fields=sizes(num_blocks, 32, max_num_seqs, **fields))


_STORIES = [Job(id=f"r{i}", prompt=list(range(50 + 100 * i, 50 + 100 * i + 7 + i)), max_tokens=12) for i in range(3)]
_CROWDED = _story(11, max_num_seqs=3, jobs=_STORIES)  # not room for all three to the end
_ROOMY = _story(40, max_num_seqs=3, jobs=_STORIES)

_FAULTS = [
    Fault(
        name="untouched-hit",
        description="A cache hit is not counted as held, and stays where the pool hands blocks out.",
        seam={"blocks": planted.ForgetsToTouch},
        law="blocks",
        load=FIXED["repeats"],
        hints=(
            "How many tables hold the first block of the second prompt, and what does its reference count say?",
            "A block's reference count is the number of tables that hold it; 0 is the same as being in the free queue.",
            "for each hit: if its count is 0, take it out of the free queue; add 1 to its count",
        ),
    ),
    Fault(
        name="hit-left-in-queue",
        description="A cache hit is counted as held, but never taken out of the free queue.",
        seam={"blocks": planted.LeavesHitsInTheQueue},
        law="blocks",
        load=FIXED["shared-prefix"],
        hints=(
            "Which blocks could be handed out next, and does anyone hold one of them?",
            "A block is in the free queue exactly when nobody holds it.",
            "if block.ref == 0: pool.remove(block), before the count goes up",
        ),
    ),
    Fault(
        name="head-first-free",
        description="Blocks are freed from the head of the table, so that a prefix is evicted before its tail.",
        seam={"blocks": planted.FreesHeadFirst},
        law="work",
        load=FIXED["shared-prefix"],
        hints=(
            "No token is wrong. How does the hit rate compare, and which block of a prefix is evicted first?",
            "A block can be hit only if all before it can: of one request, the last block must be evicted first.",
            "for block in reversed(table): give it back to the tail of the queue",
        ),
    ),
    Fault(
        name="whole-prompt-hit",
        description="A hit may cover a whole prompt, so that no token is left whose logits could be sampled from.",
        seam={"blocks": planted.HitsTheWholePrompt},
        law="blocks",
        load=FIXED["repeats"],
        hints=(
            "What is there to compute for a prompt that was asked before, token by token the same?",
            "A hit leaves at least one known token to compute.",
            "look up (num_tokens - 1) // block_size blocks",
        ),
    ),
    Fault(
        name="hash-without-parent",
        description="A block's hash covers its own tokens only, not those before them.",
        seam={"blocks": planted.HashesWithoutParent},
        law="tokens",
        load=FIXED["repeats"],
        hints=(
            "Which prompt hits blocks of another although the two differ before those blocks?",
            "Keys and values depend on all tokens before them, and so must the hash.",
            "hash(i) = H(hash(i - 1), tokens of block i)",
        ),
    ),
    Fault(
        name="hash-before-compute",
        description="A request preempted in the step that gave it tokens leaves hashes of KV that is never written.",
        seam={"blocks": planted.NeverForgets},
        law="tokens",
        load=FIXED["priorities"],
        hints=(
            "Who was given tokens and then preempted in one and the same step, and what is cached of it?",
            "Only KV that is written, or is being written by a step that runs, may be found.",
            "on taking tokens back: un-register the blocks from num_computed_tokens on",
        ),
    ),
    Fault(
        name="output-means-decode",
        description="After a preemption, a request that has output is taken for a decode while it computes its prompt.",
        seam={"scheduler": planted.TakesOutputForDecode},
        law="work",
        load=FIXED["tight-pool"],
        hints=(
            "After its preemption a request comes back in several chunks. After which of them is it sampled?",
            "A row samples exactly when its computed tokens reach its known tokens; output does not matter.",
            "samples = num_computed_tokens == num_tokens",
        ),
    ),
    Fault(
        name="first-prompt-chunks",
        description="Only the first prompt that a step admits may be cut, so that the rest of the budget is lost.",
        seam={"scheduler": planted.ChunksOnlyTheFirst},
        law="plan",
        load=FIXED["burst"],
        hints=(
            "A step left a prompt out for want of budget. How full is its budget?",
            "While someone waits whose blocks fit, the budget is used up: the last one admitted is cut to it.",
            "for every prompt: n = min(its missing tokens, budget left), whoever came before it",
        ),
    ),
    Fault(
        name="double-free",
        description="An aborted request gives its blocks back twice.",
        seam={"scheduler": planted.FreesTheAbortedTwice},
        law="blocks",
        load=FIXED["aborts"],
        hints=(
            "Follow the blocks of the aborted request: how often does each return?",
            "A block is given back as often as it was taken.",
            "free(request): give back the table's blocks, then empty the table",
        ),
    ),
    Fault(
        name="stale-table",
        description="A request that comes back after a preemption reads the block that it had first before.",
        seam={"batch": planted.KeepsTheTableOnResume},
        law="tokens",
        load=_CROWDED,
        hints=(
            "Who was preempted, and which blocks did it have before and after?",
            "A resumed request travels whole: its table replaces the old one.",
            "on resume: table = new.block_ids, nothing kept",
        ),
        healthy={"batch": planted.PersistentBatch, "blocks": PrivateBlocks},
    ),
    Fault(
        name="prompt-long-keys",
        description="A decode attends to as many keys as its prompt has tokens, so that it never sees its output.",
        seam={"batch": planted.KeysOfThePromptOnly},
        law="tokens",
        load=_ROOMY,
        hints=(
            "The first token of each request is right. What does the second depend on that the first does not?",
            "Key length = computed tokens before the step + tokens of the step.",
            "seq_len = num_computed_tokens + num_scheduled_tokens",
        ),
        healthy={"batch": planted.PersistentBatch},
    ),
    Fault(
        name="padding-stores",
        description="Padding tokens keep the slots of an earlier step, and overwrite KV that is alive.",
        seam={"runner": planted.StoresPadding},
        law="tokens",
        load=_ROOMY,
        hints=(
            "The steps that go wrong are smaller than their graph. What do the tokens that fill it up do?",
            "Padding touches nothing: slot -1, key length 0.",
            "slot_mapping[num_tokens:size] = -1, in every step",
        ),
        healthy={"runner": planted.GraphRunner, "graph_sizes": (8, 32), "graph_mode": "full_and_piecewise"},
    ),
]
FAULTS: Mapping[str, Fault] = MappingProxyType({fault.name: fault for fault in _FAULTS})


def get_fault(name: str) -> Fault:
    """ValueError with the known names for an unknown one."""
    if name not in FAULTS:
        raise ValueError(f"fault {name!r} is not known; use one of {', '.join(FAULTS)}.")
    return FAULTS[name]


def run_fault(name: str, path: str | os.PathLike[str] | None = None, *, plant: bool = True) -> Outcome:
    """The verdicts on a fault, on the load that shows it; its trace goes to `path`. Without `plant`, the right classes
    run instead. ValueError for an unknown name."""
    fault = get_fault(name)
    return fault_trial(fault, JsonlRecorder(path) if path is not None else None, plant=plant).run()


def fault_trial(
    fault: Fault, observer: Observer | None = None, *, plant: bool = True, load: Load | None = None
) -> Trial:
    fields = dict(fault.healthy) | (dict(fault.seam) if plant else {})
    make_runner, alone = (_real_runner, _model_alone()) if fault.needs_model else (DigestRunner, reference_tokens)
    return Trial(load or fault.load, fields, make_runner, alone, observer, policy_file=PLANTED_FILE)


_real_runner: MakeRunner = lambda config: config.runner(config)  # noqa: E731


def _model_alone() -> Alone:
    """What the model answers to one request at a time, in the plainest engine: v0, with room for all."""
    from nanoserve.config import EngineConfig

    core = EngineCore.build(EngineConfig(num_blocks=64, max_model_len="auto"))

    def alone(prompt: list[int], num_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        core.add(EngineRequest(id="alone", prompt_token_ids=prompt, params=params))
        tokens: list[int] = []
        while core.has_work:
            tokens += [token_id for output in core.step() for token_id in output.new_token_ids]
        return tokens

    return alone
