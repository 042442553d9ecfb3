# title: The chunk size for a promise
# question: Which budget keeps a promise, at the least cost?
# minutes: 20
# seams: none
# needs: exercise 3

# %% [markdown]
# # Exercise 4: Which budget keeps a promise, at the least cost?
#
# A service promises that no gap between two tokens is longer than so many milliseconds. `max_num_batched_tokens` bounds the longest gap: a smaller budget has shorter steps. But a long prompt then needs more of them, so its first token comes later. You look for the budget that keeps the promise and costs the least.
#
# On a real machine a measurement takes minutes. So you get a budget for measuring, too: 12 measurements.
#
# About 20 minutes.

# %%
from nanoserve.lab.check import check, show_solution
from nanoserve.lab.check_puzzles import Measure, measure_budget

# %% [markdown]
# ## What can be measured
#
# `measure(budget)` runs a load (four streams, three long prompts) and tells the longest gap and the median time to first token of the long prompts. Budgets go from 8 to 256:

# %%
# NBVAL_CHECK_OUTPUT
for budget in (8, 32, 128, 256):
    print(budget, measure_budget(budget))

# %% [markdown]
# ## Your turn
#
# No budget is worse for the gap than a larger one; none is better for the first token than a larger one.


# %%
def pick_budget(measure: Measure, max_gap_ms: float) -> int:
    raise NotImplementedError("about 8 lines: the largest budget from 8 to 256 whose gap_ms is within max_gap_ms")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>If a budget of 128 breaks the promise, which others do you know about without measuring them?</details>
#
# <details><summary>Hint 2: the invariant</summary>`low` keeps the promise, and everything above `high` breaks it; the answer is between the two.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# low, high = 8, 256
# while they differ:
#     middle, rounded up
#     keeps the promise: low = middle
#     else: high = middle - 1
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(4, pick_budget)

# %% [markdown]
# ## When it passes
#
# Halving needs 8 measurements. If you know that a step costs *a + b · tokens*, two are enough: which two, and why is the longest gap then a formula? Try it: `check` takes it as well.
#
# <details><summary>Answer</summary>Two whose steps are really filled, such as 32 and 128: there the longest gap is the time of a full step. This load never fills 256, so a line through 256 is too flat.</details>

# %%
show_solution(4)

# %% [markdown]
# In vLLM, look at the defaults of `max_num_batched_tokens` in `vllm/engine/arg_utils.py`: chosen by use and by GPU, and rarely by a promise.
