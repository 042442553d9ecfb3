# title: The phase-split loop
# question: How does v0 decide a step?
# minutes: 25
# seams: scheduler
# needs: lessons 00 and 02

# %% [markdown]
# # Exercise 1: How does v0 decide a step?
#
# You write v0's policy: a step is *either* whole prompts *or* one token for everyone who runs. The engine, the queues and the blocks are there. `check` runs the real engine with your class, beside the built-in one.
#
# About 25 minutes.

# %%
from nanoserve.lab.check import check, show_solution
from nanoserve.lab.show import show_source
from nanoserve.request import Reason, StepPlan
from nanoserve.scheduler import BaseScheduler, Draft, PhaseSplitScheduler

# %% [markdown]
# ## The rules
#
# A `Draft` is a step that is being decided: `draft.tokens` is who gets how many, `draft.budget` how many are left.
#
# **`_prefill`** admits from the head of `self.waiting` (`peek()`), until somebody has to stop it:
#
# 1. A prompt longer than `self.max_model_len` or `self.budget`, or that `self.blocks.fits(num_tokens)` denies, could never run: `self._ignore(request)`, and on to the next in this same step. (One of exactly `max_model_len` tokens may run in v0: it ends with its first token.)
# 2. `hit = self.blocks.lookup(request)` says which of its tokens are cached; the others must be computed in this step, all of them. Not enough `draft.budget`, or as many in `self.running` as `self.max_num_seqs`: stop.
# 3. `self._admit(request, n, hit, draft, self.watermark_blocks)` takes blocks and tokens. `False`: there is no room; stop. (Never skip the head: who came first is served first.)
#
# **`schedule`** makes `draft = Draft(self.budget)`, tries prompts, and only if nobody got tokens lets everyone decode: `self._decode_everyone(draft)`. If prompts run, say why the others wait: `draft.left_out` (a request's id → `Reason`) holds, for each request that was running before, `Reason("paused", behind=...)` with the id of the step's first prompt. The end is `return self._seal(draft)`.
#
# Swapping is not used here: `self.swapped` is always empty.

# %%
show_source(BaseScheduler, "_admit", "_decode_everyone")

# %% [markdown]
# ## Your turn


# %%
class MyPhaseSplit(PhaseSplitScheduler):
    def schedule(self) -> StepPlan:
        raise NotImplementedError("about 10 lines: prompts if there are any, else a token for everyone")

    def _prefill(self, draft: Draft) -> None:
        raise NotImplementedError("about 11 lines: whole prompts from the head of the queue, until one has no room")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>When a prompt does not fit, is it because it never will, or because it does not fit now? What must happen in either case?</details>
#
# <details><summary>Hint 2: the invariant</summary>A step has prompts or decodes, never both. Whoever gets nothing has a true reason: a request that waits for others' prompts is <i>paused</i>, not out of budget.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# schedule:
#     remember who is running
#     prefill
#     if somebody got tokens: the remembered ones are paused behind the first of them
#     else: decode everyone
#     seal
# prefill:
#     while someone waits:
#         head; could it ever run? no: ignore it, go on
#         n = its tokens - those that are cached
#         no budget for n, or no seat: return
#         admit it; no room: return
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(1, MyPhaseSplit)

# %% [markdown]
# ## When it passes
#
# Where in your code is the freeze of lesson 02? It is one line: the `else` (or `if`) that lets nobody decode in a step with prompts. Exercises 2 and 3 try to get rid of it.

# %%
show_solution(1)

# %% [markdown]
# In vLLM 0.8.5, look at `vllm/core/scheduler.py`, `_schedule_default` and `_schedule_prefills`.
