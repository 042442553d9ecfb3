# title: Eviction in the right order
# question: Which cached block is missed the least?
# minutes: 20
# seams: blocks
# needs: exercise 6, lesson 06

# %% [markdown]
# # Exercise 8: Which cached block is missed the least?
#
# v1's free queue is in the order of eviction by itself. v0's prefix cache had no such queue: it stamped each block with the step in which it was last used, and searched for a victim when it needed one. You write that search.
#
# About 20 minutes.

# %%
import heapq

from nanoserve.block_pool import Block
from nanoserve.blocks import V0CachedBlocks, _age
from nanoserve.lab.check import check, show_solution
from nanoserve.lab.show import show_source

# %% [markdown]
# ## The rules
#
# `self._evictable` holds the blocks that are cached and that nobody holds, by id. `_evict` is called when no other block is left. It
#
# 1. picks the block that was used longest ago (`last_accessed`). All blocks of a request get their stamp in one step, so many have the same age: of those, the one with most tokens before it (`num_hashed_tokens`) goes first,
# 2. takes it out of `self._evictable`,
# 3. lets it be forgotten: `self._drop_hash(block)`,
# 4. returns it.
#
# `self._eviction_order` is a heap of `(last_accessed, -num_hashed_tokens, id)`, one entry for each time that a block became evictable. Using it is optional: it is faster than a search, but has stale entries, of blocks that were found again since.

# %%
show_source(V0CachedBlocks, "_release", "_pop", "_drop_hash")

# %% [markdown]
# ## Your turn


# %%
class MyEviction(V0CachedBlocks):
    def _evict(self) -> Block:
        raise NotImplementedError("about 5 lines: pick, take out, forget, return")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>A prefix of three blocks is evictable, all of one age. If you may keep two, which two can still be found?</details>
#
# <details><summary>Hint 2: the invariant</summary>A cached block without the one before it is never found again: it only takes room.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# block = the smallest evictable one, by (last accessed, - hashed tokens, id)
# delete it from the evictable ones
# drop its hash
# return it
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(8, MyEviction)

# %% [markdown]
# ## When it passes
#
# Compare with exercise 6: v1 needs no stamps and no search. Blocks that are freed in reverse order, into a queue, are in this very order already. And each step that stamps a thousand blocks, in v0, is host time in which the GPU waits.

# %%
show_solution(8)

# %% [markdown]
# In vLLM 0.8.5, look at `vllm/core/evictor.py`, `LRUEvictor`.
