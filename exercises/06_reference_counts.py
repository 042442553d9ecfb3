# title: Reference counts and the free queue
# question: When may a block be given to somebody else?
# minutes: 25
# seams: blocks
# needs: exercise 5

# %% [markdown]
# # Exercise 6: When may a block be given to somebody else?
#
# A block that several requests share is free when the last of them has gone, and not before. And a free block that still has a hash is of use: it waits in the free queue, and may be found again before somebody else gets it. In which order free blocks are handed out decides what the cache remembers.
#
# About 25 minutes.

# %%
from nanoserve.block_pool import Block, BlockPool
from nanoserve.blocks import SharedBlocks
from nanoserve.lab.check import check, show_solution
from nanoserve.lab.show import show_source
from nanoserve.request import Request

# %% [markdown]
# ## The rules
#
# The pool's queue is handed out from its head: `self.pool.append(block)` puts a block at the tail, `prepend` at the head, `remove` takes it out of the middle.
#
# **`_hold(block)`**: one more table holds it. A hit with count 0 is in the free queue; it leaves.
#
# **`free(request)`** gives back all blocks of `request.block_ids`, each of which counts one table less:
#
# 1. from the **last to the first**: a block can be found only behind all blocks before it, so of one request the end must be evicted first,
# 2. at count 0 a block *without* a hash (`block_hash is None`), a half-filled tail, is of no use to anybody: `self._put_back(block)` lets it be handed out first,
# 3. at count 0 a block *with* a hash goes to the tail: it is remembered longest,
# 4. afterwards the request has no blocks: `block_ids` is empty, `num_cached_blocks` is 0.

# %%
show_source(SharedBlocks, "allocate", "_pop")

# %% [markdown]
# ## Your turn
#
# *Predict:* ten blocks of 16. A has 55 tokens, in blocks 1 to 4. B has the same first 48 and 5 of its own: it finds 1, 2, 3, and gets 5. A ends, then B. In which order are blocks handed out next?


# %%
class MyCounts(SharedBlocks):
    def _hold(self, block: Block) -> None:
        raise NotImplementedError("about 3 lines: out of the free queue if nobody held it, and one more that does")

    def free(self, request: Request) -> None:
        raise NotImplementedError("about 10 lines: one table less for each block, from the last to the first")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>Which blocks are in the free queue, and which of them would you miss the least?</details>
#
# <details><summary>Hint 2: the invariant</summary>A block's count is the number of tables that hold it, and it is in the free queue exactly when that is 0.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# hold: if its count is 0: remove it from the pool's queue; count += 1
# free: for each block of the table, last first:
#           count -= 1
#           at 0: without a hash put it back, with one append it
#       empty the table; nothing is cached of it any more
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(6, MyCounts)

# %% [markdown]
# ## When it passes
#
# The queue of the prediction: 5 and 4 (no hash) first, then those that were never used, then 3, 2, 1. Early v1 appended everything; its queue was `6 7 8 9 10 4 5 3 2 1`. What did it lose by that?

# %%
show_solution(6)

# %% [markdown]
# In vLLM, look at `vllm/v1/core/block_pool.py`, `touch` and `free_blocks`.
