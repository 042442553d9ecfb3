# title: A graph dispatcher
# question: Which captured graph does a step replay?
# minutes: 20
# seams: runner
# needs: lesson 08

# %% [markdown]
# # Exercise 15: Which captured graph does a step replay?
#
# A graph fits one number of tokens. A step of 9 tokens replays the graph of 16, with 7 tokens of padding; a step larger than every graph runs as it is. And there are two kinds: a graph of the whole pass (attention included) and graphs of the pieces between attention calls. One place decides, for all steps. You write it.
#
# About 20 minutes.

# %%
from bisect import bisect_left

from nanoserve.graphs import Dispatcher, GraphKey, GraphMode
from nanoserve.lab.check import check, show_solution
from nanoserve.lab.show import show_source

# %% [markdown]
# ## The rules
#
# `self.sizes` are the sizes in tokens, sorted; `self._keys` are the graphs that were captured, each a `GraphKey(mode, size, is_uniform)`:

# %%
show_source(Dispatcher, "__init__")

# %% [markdown]
# `dispatch(num_tokens, is_uniform)`; `is_uniform`: each row has one token, as when everybody decodes.
#
# 1. The size is the smallest that holds the step; none does: `None`.
# 2. Of that size, the graph that covers the most: the whole pass for uniform batches (only if this one is), the whole pass for any batch, the pieces. Only one that was captured; none was: `None`.

# %% [markdown]
# ## Your turn


# %%
class MyDispatcher(Dispatcher):
    def dispatch(self, num_tokens: int, is_uniform: bool) -> GraphKey | None:
        raise NotImplementedError("about 10 lines: the smallest size that fits, then the first of three kinds there is")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>For a batch of decodes, which graphs would give the right result, and which of them saves the most calls?</details>
#
# <details><summary>Hint 2: the invariant</summary>What is returned is in <code>self._keys</code>, has room for the step, and is uniform only if the step is.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# place of the first size &gt;= num_tokens; behind the last: None
# candidates: FULL uniform (if the step is), FULL, PIECEWISE, of that size
# the first of them that was captured, or None
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(15, MyDispatcher)

# %%
show_solution(15)

# %% [markdown]
# In vLLM, look at `vllm/v1/cudagraph_dispatcher.py`.
