# title: Mixing
# question: How do prompts and decodes share a step?
# minutes: 30
# seams: scheduler
# needs: exercise 2, lesson 03

# %% [markdown]
# # Exercise 3: How do prompts and decodes share a step?
#
# v1's answer has no phases: everybody is some tokens behind, a decode by one, a prompt by thousands; each step lets everybody catch up, those who run first. You write that loop. A bar is set, too: no gap of a stream may be longer than a full step takes.
#
# About 30 minutes. Close lesson 03 before you begin.

# %%
from nanoserve.lab.check import check, show_solution
from nanoserve.lab.show import show_source
from nanoserve.request import StepPlan
from nanoserve.scheduler import BaseScheduler, Draft, UnifiedScheduler

# %% [markdown]
# ## The rules
#
# 1. **Running first**, in the order of `self.running`, while there is budget: each gets the tokens that it is behind (`num_behind`), cut to `draft.budget`. Whoever is 0 behind is passed over. `self._grow(request, n, draft)` finds the blocks; if there are none it preempts the *last* of `self.running`, and returns `False` if that was the request itself: then this part ends.
# 2. **Then those who wait**, from the head, with what is left: while there is budget, a seat (`self.max_num_seqs`), and nobody was preempted in this step (`draft.preempted`). `_ignore` a request of `self.max_model_len` tokens or more (there must be room for a token to come), or one that never `fits`, and go on. Cut what is not cached to the budget. The watermark counts while somebody runs (with nobody there it makes no difference: not graded). `_admit` says `False`: stop.
#
# The list that you walk over changes while you walk: a preempted request leaves its end. In exercise 2 you walked over a copy, and nobody came behind a preemption; here somebody may, and a copy would still hold whoever has just lost everything. So go by place: an index, and `len(self.running)` looked at anew each time.
#
# `self.long_prefill_token_threshold` and priorities are in the built-in class as well; they are not asked for here.

# %%
show_source(BaseScheduler, "_grow", "_preempt")

# %% [markdown]
# ## Your turn


# %%
class MyMix(UnifiedScheduler):
    def schedule(self) -> StepPlan:
        raise NotImplementedError("about 20 lines: the running ones catch up, then those who wait get the rest")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>What does the longest gap of a stream depend on, if its token comes in <i>every</i> step?</details>
#
# <details><summary>Hint 2: the invariant</summary>Nobody who decodes misses a step unless somebody was preempted; and a step is full while anyone is behind.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# draft = Draft(budget)
# index = 0
# while index &lt; number of running and budget is left:
#     n = min(tokens that running[index] is behind, budget left)
#     if n &gt; 0 and it cannot grow by n: break
#     index += 1
# while someone waits, budget, a seat, and nobody preempted:
#     head; could it ever run? no: ignore it, go on
#     n = min(its tokens - cached ones, budget left)
#     admit it, with the watermark if anyone runs; no room: break
# seal
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(3, MyMix)

# %% [markdown]
# ## When it passes
#
# Your class has no line about chunks and none about decodes, and does both. The bar of the gap is the cost of one full step: 8 ms and 512 tokens of 30 µs.

# %%
show_solution(3)

# %% [markdown]
# In vLLM, look at `vllm/v1/core/sched/scheduler.py`, `schedule`: the same two loops.
