# title: A fairer policy
# question: Who should be served first?
# minutes: 40
# seams: scheduler
# needs: exercise 3, lesson 10

# %% [markdown]
# # Exercise 16: Who should be served first?
#
# The built-in policy serves whoever came first. Behind three long prompts, a dozen short requests wait many times as long as they would take. Is that fair? It depends on what you measure. Here it is *slowdown*: how much longer a request took than it would have taken alone. Fairness is Jain's index over all slowdowns: 1 when all are slowed down alike, 1/n when one bears it all.
#
# You write an order for those who wait, and beat the built-in policy by 0.03. All laws must hold as well: the one that catches the obvious idea is `progress`.
#
# About 40 minutes. No answer is the only one.

# %%
from nanoserve.lab.check import check, show_solution
from nanoserve.lab.check_figures import FAIR
from nanoserve.lab.check_policies import RankedScheduler
from nanoserve.lab.figures import figures_of
from nanoserve.lab.show import show_source
from nanoserve.lab.trial import Trial
from nanoserve.request import Request
from nanoserve.scheduler import PhaseSplitScheduler, UnifiedScheduler

# %%
# NBVAL_CHECK_OUTPUT
for policy in (PhaseSplitScheduler, UnifiedScheduler):
    figures = figures_of(Trial(FAIR, {"scheduler": policy}).run(), FAIR)
    print(f"{policy.__name__}: fairness {figures.fairness:.3f}, longest wait {figures.ttft_max_ms:.1f} ms")

# %% [markdown]
# ## The rules
#
# Before each step, those who wait are sorted by `rank(request, waited)`, the smallest first; `waited` is how many steps ago it came. Of a request you know `num_tokens` and `max_tokens`.

# %%
show_source(RankedScheduler)

# %% [markdown]
# ## Your turn


# %%
class MyPolicy(RankedScheduler):
    def rank(self, request: Request, waited: int) -> float:
        raise NotImplementedError("about 1 line: who goes first?")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>Two requests have waited for ten steps. One would take 3 steps alone, the other 30. Whose slowdown is worse? And what happens to the long one if short ones keep coming?</details>
#
# <details><summary>Hint 2: the invariant</summary>However the others come, the rank of one that waits must overtake theirs some day.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# its length, less something for every step that it has waited
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(16, MyPolicy)

# %%
show_solution(16)

# %% [markdown]
# With `nanoserve grade` (docs/grade.md) the same class meets more loads and drawn ones. In vLLM, look at `vllm/v1/core/sched/request_queue.py`: what would a queue of your own be?
