# title: A kernel that writes to the KV cache
# question: Where does a token's key go?
# minutes: 30
# seams: attention
# needs: lesson 07; Triton (nanoserve[gpu])

# %% [markdown]
# # Exercise 13: Where does a token's key go?
#
# Your first kernel of a paged cache, in Triton. One program handles one token: it finds the token's slot, and writes the keys and values of all heads there. Without a GPU, Triton's interpreter runs it, program by program, in Python.
#
# About 30 minutes.

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
import triton
import triton.language as tl

from nanoserve.kernels import store_kv_twin
from nanoserve.lab.check import check, show_solution
from nanoserve.lab.show import show_source

# %% [markdown]
# ## What it has to compute
#
# In plain torch, token by token. N blocks of P places; a slot is `block * P + place`:

# %%
show_source(store_kv_twin)

# %% [markdown]
# ## The rules
#
# 1. A program is a token: `tl.program_id(0)`. Make it 64 bits wide (`.to(tl.int64)`): a slot times the numbers of a token passes 2^31 in a cache of a few GB.
# 2. Its slot is `tl.load(slot_mapping_ptr + token)`. A negative one writes nothing: `return`.
# 3. Tiles have sizes of powers of two: `head = tl.arange(0, TILE_HEADS)[:, None]`, `dim = tl.arange(0, TILE_DIM)[None, :]`. What is beyond `NUM_HEADS` or `HEAD_DIM` is masked in each `tl.load` and `tl.store`.
# 4. Tensors come as pointers and strides: number `dim` of head `head` of token `token` of k is at `k_ptr + token * k_stride_t + head * k_stride_k + dim`. k and v have strides of their own. In the cache a block is `cache_stride_n` wide, a head `cache_stride_k`, a place `cache_stride_p`; keys and values alike.

# %% [markdown]
# ## Your turn


# %%
@triton.jit
def my_store_kv(
    k_ptr, v_ptr,  # [T, K, D]
    keys_ptr, values_ptr,  # [N, K, P, D]
    slot_mapping_ptr,  # [T]
    k_stride_t, k_stride_k, v_stride_t, v_stride_k,
    cache_stride_n, cache_stride_k, cache_stride_p,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    raise NotImplementedError("about 12 lines: the slot, the tile of heads and dimensions, two loads, two stores")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>Which block is a slot in, which place of it, and how far is that from the start of the cache?</details>
#
# <details><summary>Hint 2: the invariant</summary>After all programs have run, the slots of the mapping hold the tokens' keys and values, and every other number of the cache is what it was.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# token, slot; slot &lt; 0: return
# head [TILE_HEADS, 1], dim [1, TILE_DIM], mask: both are there
# k = load(k_ptr + token * its stride + head * its stride + dim, mask); v alike
# place = slot // BLOCK_SIZE * stride of a block + slot % BLOCK_SIZE * stride of a place
# store k and v at place + head * stride of a head + dim, with the mask
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(13, my_store_kv)

# %%
show_solution(13)

# %% [markdown]
# In vLLM, look at `csrc/cache_kernels.cu`, `reshape_and_cache_flash`.
