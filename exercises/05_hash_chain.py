# title: The hash chain
# question: When do two blocks hold the same keys and values?
# minutes: 20
# seams: blocks
# needs: lesson 06

# %% [markdown]
# # Exercise 5: When do two blocks hold the same keys and values?
#
# A prefix cache knows blocks by a hash. Keys and values of a token depend on *all* tokens before it; so must the hash of a block. It is a chain: each block's hash goes into the next one's.
#
# You write one link of it. If it says too little, a request reads KV of another text, and nobody gets an error: the answer is merely wrong. If it says too much, nothing is ever found.
#
# About 20 minutes.

# %%
import hashlib

import msgspec

from nanoserve.blocks import SharedBlocks, extra_keys_of_block
from nanoserve.lab.check import check, show_solution
from nanoserve.lab.show import show_source
from nanoserve.request import Request

# %% [markdown]
# ## The rules
#
# `hash_block(request, index, parent)` returns `bytes`: the hash of the block of tokens `index * block_size` up to `(index + 1) * block_size` of `request.token_ids`. It covers
#
# 1. `parent`, the hash of the block before (32 bytes; a constant for the first block),
# 2. the tokens of the block, in order and without ambiguity: `1, 12` is not `11, 2`; ids may need 64 bits. `self._pack(*ids)` writes a block's ids as so many 64-bit integers,
# 3. what else its KV depends on: `extra_keys_of_block(request, start, end)`, a list, empty for most. `msgspec.msgpack.encode` makes bytes of it. An adapter is in every block; an image where it lies; a salt, which keeps tenants apart, in block 0 only: why is that enough?
#
# Python's own `hash` will not do: it is no secret how to find two texts with one hash.

# %%
show_source(extra_keys_of_block)

# %% [markdown]
# ## Your turn


# %%
class MyHashes(SharedBlocks):
    def hash_block(self, request: Request, index: int, parent: bytes) -> bytes:
        raise NotImplementedError("about 5 lines: SHA-256 over parent, tokens and extra keys")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>Name two prompts that end in the same block and differ before it. What keeps their hashes apart?</details>
#
# <details><summary>Hint 2: the invariant</summary>Two blocks have one hash exactly when everything up to their ends is equal: tokens, order, adapter, images, salt.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# body = parent + packed tokens of this block
# if there are extra keys of this block: body += them, encoded
# return hashlib.sha256(body).digest()
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(5, MyHashes)

# %%
show_solution(5)

# %% [markdown]
# In vLLM, look at `vllm/v1/core/kv_cache_utils.py`, `hash_block_tokens` and `generate_block_hash_extra_keys`.
