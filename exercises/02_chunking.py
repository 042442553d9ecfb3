# title: Chunks alone
# question: Does it help to cut a long prompt into chunks?
# minutes: 20
# seams: scheduler
# needs: exercise 1

# %% [markdown]
# # Exercise 2: Does it help to cut a long prompt into chunks?
#
# The obvious repair of exercise 1: a prompt that is longer than what is left of the budget is cut, and goes on in the next step. A step is still either prompts or decodes. You write it, and then see whether the streams are better off.
#
# About 20 minutes. *Predict first:* v0's longest freeze was 508 ms in lesson 02. With chunks of 512 tokens, is it shorter, the same or longer?

# %%
from nanoserve.lab.check import check, show_solution
from nanoserve.lab.show import show_source
from nanoserve.request import Status
from nanoserve.scheduler import BaseScheduler, ChunkedNoMixScheduler, Draft

# %% [markdown]
# ## The rules
#
# `schedule` is given, and is yours of exercise 1 without the swapping. You write **`_prefill`**, now in two parts:
#
# 1. **Prompts that have begun.** Go over a copy of `self.running`. `request.num_behind` is how many known tokens are not computed yet; give it as many of them as the budget has: `self._grow(request, n, draft)`, which finds the blocks. Leave out whoever decodes: one token behind, *and* with output (`num_output_tokens`, or `num_placeholders` for one that is on its way). Leave out whoever gets no token, too. (The built-in class also asks for `Status.RUNNING`, as `_grow` may preempt others. Here only the last of `self.running` can be in the middle of its prompt, so nobody comes behind a preemption: not graded.)
# 2. **Prompts that wait**, from the head, as before, but cut to `draft.budget`. Stop when the budget or the seats are gone, when someone was preempted in this step, or when `_admit` says `False`. The watermark counts while somebody runs. (With nobody there the built-in class passes 0; but all blocks are free then, and `fits` has counted the watermark, so it makes no difference: not graded.) A prompt of `self.max_model_len` tokens *or more*, or one that never fits, is ignored: other than v0, this class and v1's want room for a token to come.

# %%
show_source(ChunkedNoMixScheduler, "schedule")

# %%
show_source(BaseScheduler, "_grow")

# %% [markdown]
# ## Your turn


# %%
class MyChunks(ChunkedNoMixScheduler):
    def _prefill(self, draft: Draft) -> None:
        raise NotImplementedError("about 15 lines: prompts that have begun, then those that wait, cut to the budget")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>Which of the running requests are in the middle of their prompt, and which decode? After a preemption a request has output <i>and</i> a prompt to compute. And what is left of a prompt may be a single token: then it is one behind, has no output, and is not a decode.</details>
#
# <details><summary>Hint 2: the invariant</summary>While somebody waits whose blocks fit, and a seat is free, the budget of a step with prompts is used up: the last one is cut to what is left.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# for each running request (of a copy):
#     n = min(tokens it is behind, budget left)
#     skip it if it decodes, or if n is 0
#     grow it by n
# while someone waits, and budget, seats, and nobody preempted:
#     head; could it ever run? no: ignore it, go on
#     n = min(its tokens - cached ones, budget left)
#     admit it, with the watermark if anyone runs; no room: return
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(2, MyChunks)

# %% [markdown]
# ## When it passes
#
# Read the last line of the verdict: *is it enough?* The streams now wait for all chunks of a prompt, and each chunk pays the fixed cost of a step again. The freeze is longer than v0's. What is wrong is not the length of a prompt's step, it is who is left out of it.

# %%
show_solution(2)

# %% [markdown]
# Small engines schedule like this today (prefill first, chunked); the price is the one that you measured.
