"""Log-probabilities of the prompt's own tokens, for requests that ask for them.

Owns the scores of a prompt while its chunks are computed, and hands them out whole, once, with the request's first
token. Knows nothing of caches or tables: only where a row's hidden states lie. Laws: tests/test_runner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanoserve.request import StepPlan, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve.input_batch import HostInputs

PROMPT_ROWS_AT_ONCE = 1024  # prompt positions whose logits exist at the same time


@dataclass(slots=True)
class _Prompt:
    token_ids: list[int]
    num_logprobs: int
    scores: list[TokenLogprobs | None] = field(default_factory=lambda: [None])  # the first token has none


class PromptScores:
    """Follows the plans, as the batch does; a plan without scored prompts costs two looks."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}

    def apply(self, plan: StepPlan) -> None:
        """Forget who is gone; a prompt that comes back before its first token is scored from the start."""
        if self._prompts:
            for request_id in (*plan.preempted, *plan.finished):
                self._prompts.pop(request_id, None)
        for new in plan.new:
            wanted = new.params.prompt_logprobs
            if wanted is not None and len(new.token_ids) == new.num_prompt_tokens:  # else it was scored
                assert new.num_computed_tokens == 0, (
                    f"{new.id} wants prompt_logprobs but starts at token {new.num_computed_tokens}"
                )
                self._prompts[new.id] = _Prompt(new.token_ids, wanted)

    def find(self, inputs: HostInputs) -> list[tuple[_Prompt, int, int, int]]:
        """The scored prompts of a step: each with the position of its first hidden state among the T, and its
        positions [first, end) of this step. Called when the step is launched: afterwards the rows may change."""
        if not self._prompts:
            return []
        starts, seq_lens = inputs.query_start_loc_R1.tolist(), inputs.seq_lens_R.tolist()
        found = []
        for row, request_id in enumerate(inputs.request_ids):
            if prompt := self._prompts.get(request_id):
                first = seq_lens[row] - (starts[row + 1] - starts[row])
                found.append((prompt, starts[row], first, seq_lens[row]))
        return found

    def score(
        self,
        found: Iterable[tuple[_Prompt, int, int, int]],
        hidden_TE: Tensor,
        logits_of: Callable[[Tensor], Tensor],
    ) -> None:
        """Position p scores token p + 1, which is known even when the next chunk is the one to compute it."""
        from nanoserve.sampler import prompt_logprobs

        for prompt, start, first, end in found:
            assert len(prompt.scores) == first + 1, f"{len(prompt.scores)} scores of a prompt at token {first}"
            targets = prompt.token_ids[first + 1 : end + 1]
            hidden_PE = hidden_TE[start : start + len(targets)]
            for at in range(0, len(targets), PROMPT_ROWS_AT_ONCE):
                part = slice(at, at + PROMPT_ROWS_AT_ONCE)
                prompt.scores += prompt_logprobs(logits_of(hidden_PE[part]), targets[part], prompt.num_logprobs)

    def take(self, sampling_ids: Iterable[str]) -> dict[str, _Prompt]:
        """The prompts that end with this step, and are nobody's from then on."""
        if not self._prompts:
            return {}
        return {i: self._prompts.pop(i) for i in sampling_ids if i in self._prompts}
