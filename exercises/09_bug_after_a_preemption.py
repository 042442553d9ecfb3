# title: A bug after a preemption
# question: Why does a request get a token too early?
# minutes: 25
# seams: scheduler
# needs: exercise 3

# %% [markdown]
# # Exercise 9: Why does a request get a token too early?
#
# A scheduler with a planted bug. Nothing crashes, and no token is wrong: the bug shows in the trace only, where somebody counts. Find out what is wrong in which step, and write the method right.
#
# About 25 minutes.

# %%
from nanoserve.lab.check import check, show_solution
from nanoserve.lab.check_report import timeline_lines
from nanoserve.lab.faults import run_fault
from nanoserve.lab.planted import TakesOutputForDecode
from nanoserve.request import Request
from nanoserve.scheduler import Share

# %% [markdown]
# ## The trace
#
# Five requests in a pool that cannot hold them all to their ends: some are preempted, and come back. A row is a request, a column a step: its tokens, `.` for none, `x` where it was preempted.

# %%
# NBVAL_CHECK_OUTPUT
outcome = run_fault("output-means-decode")
print(outcome.first)
for step in (11, 26):
    print(*timeline_lines("request", outcome.records, step, ["r0", "r1", "r2", "r3", "r4"]), sep="\n")

# %% [markdown]
# Look at `r2`. When was it preempted, how many tokens did it know by then (its prompt has 12), and how many of them are computed in each step after it came back?
#
# ## Your turn
#
# `_count(request, num_tokens)` is called for each request of a step that is decided. It
#
# - adds the tokens to `request.num_computed_tokens`,
# - decides whether the step will sample a token for it (`samples`),
# - if so adds 1 to `request.num_placeholders`: a token that is on its way,
# - returns `Share(request, computed tokens when the step is done, samples, request.num_preemptions)`.


# %%
class MyCount(TakesOutputForDecode):
    def _count(self, request: Request, num_tokens: int) -> Share:
        raise NotImplementedError("about 4 lines: count the tokens, and say whether this step samples one")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>After its preemption a request comes back in several chunks. After which of them is it sampled?</details>
#
# <details><summary>Hint 2: the invariant</summary>A step samples a row exactly when its computed tokens reach its known tokens. Whether it has output does not matter.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# num_computed_tokens += num_tokens
# samples = it is no token behind any more (num_behind)
# num_placeholders += samples
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(9, MyCount)

# %%
show_solution(9)

# %% [markdown]
# "Prefill" and "decode" are not states of a request in v1; whoever asks for one of them in code, as the planted class does, gets preemption wrong.
