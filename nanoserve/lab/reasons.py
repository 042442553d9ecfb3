"""Why a request got nothing in a step, in words. Knows the reason codes of semantics, no pictures."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nanoserve.request import Reason

SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "budget": "the token budget of the step was used up before its turn",
        "seq_cap": "every seat is taken: as many requests run as max_num_seqs allows",
        "blocks": "it needs {need} free KV blocks, and {free} are free",
        "watermark": "it and the reserve (watermark) need {need} free KV blocks, and {free} are free",
        "fcfs_behind": "first come, first served: it waits behind {behind}",
        "preemption_this_step": "blocks ran out in this step: a request was preempted, and nobody is admitted",
        "paused": "it is paused: the step is one of prompts, for {behind}",
        "nothing_to_compute": "its next token is still on its way from a step in flight",
    }
)


def in_words(reason: Reason) -> str:
    """A clause that says it; of an unknown code, the code."""
    sentence = SENTENCES.get(reason.code)
    return sentence.format(need=reason.need, free=reason.free, behind=reason.behind) if sentence else str(reason)
