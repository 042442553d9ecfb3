# title: The last-token rule
# question: What is left to compute when a whole prompt is cached?
# minutes: 15
# seams: blocks
# needs: exercise 6

# %% [markdown]
# # Exercise 7: What is left to compute when a whole prompt is cached?
#
# Somebody asks the same question again, word for word. All its blocks are in the cache. If all of them are a hit, there is nothing to compute, hence no logits, hence no next token. So a hit must leave at least one token.
#
# About 15 minutes. *Predict:* blocks of 16, a prompt of 32 tokens that is cached whole. How many tokens are computed? And of 33?

# %%
from nanoserve.block_pool import NO_HIT, PrefixHit
from nanoserve.blocks import SharedBlocks
from nanoserve.lab.check import check, show_solution
from nanoserve.request import Request

# %% [markdown]
# ## The rules
#
# `lookup(request)` returns a `PrefixHit(block_ids, num_tokens)`: a tuple of leading blocks that are cached.
#
# 1. Only full blocks have a hash, and at least one token of the request must be left. How many blocks may the hit have at most?
# 2. `self._extend_hashes(request, num_full)` returns the request's hashes, `num_full` of them at least (there may be more).
# 3. `self._cached.get(block_hash)` is a dict of the blocks with that hash, by id (a hash may have several); take the first one's id. `None`: not cached; what lies behind it is of no use.
# 4. `request.skip_cache_read` (it wants log-probabilities of its prompt): `NO_HIT`.
# 5. Looking up changes nothing: no count, no order.

# %% [markdown]
# ## Your turn


# %%
class MyLookup(SharedBlocks):
    def lookup(self, request: Request) -> PrefixHit:
        raise NotImplementedError("about 10 lines: leading cached blocks, leaving one token at least")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>Of a prompt whose length is a multiple of the block size, which block may not be part of a hit?</details>
#
# <details><summary>Hint 2: the invariant</summary>hit tokens &lt; known tokens, and hit tokens = blocks times block size.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# most = (num_tokens - 1) // block_size
# for each of the first `most` hashes:
#     blocks that have it; none: stop
#     add the first one's id
# return the ids, and how many tokens they hold
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(7, MyLookup)

# %% [markdown]
# ## When it passes
#
# A prompt of 32 computes 16 tokens, one of 33 computes a single one. A whole block for one token: hits come in blocks, so the smallest rest of a full prompt is the largest.

# %%
show_solution(7)

# %% [markdown]
# In vLLM, look at `vllm/v1/core/kv_cache_manager.py`, `get_computed_blocks`: `max_cache_hit_length = request.num_tokens - 1`.
