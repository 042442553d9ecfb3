# title: Attention over a paged cache
# question: How does a query read keys that lie in pieces?
# minutes: 45
# seams: attention
# needs: exercise 13; Triton (nanoserve[gpu])

# %% [markdown]
# # Exercise 14: How does a query read keys that lie in pieces?
#
# A row's keys lie in blocks, anywhere in the cache; its block table says where. One program handles one query of one head: it walks over the table, block by block, and never has more than one block's scores at hand. So the softmax must be computed online: with a running maximum and a running sum.
#
# The package's kernel does the same for tiles of queries (lesson 07). This one is smaller, and serves prompts, chunks and decodes alike: it gets each query's row and position.
#
# About 45 minutes.

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
import triton
import triton.language as tl

from nanoserve.lab.check import check, show_solution

# %% [markdown]
# ## The online softmax
#
# Weights relative to the greatest score so far. When a greater one comes, all that was summed up shrinks to match. A toy, two scores at a time:

# %%
# NBVAL_CHECK_OUTPUT
scores, values = torch.tensor([3.0, 1.0, 8.0, 2.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
greatest, total, acc = -1e30, 0.0, 0.0
for start in (0, 2):
    new_greatest = max(greatest, scores[start : start + 2].max().item())
    weights = (scores[start : start + 2] - new_greatest).exp()
    rescale = torch.tensor(greatest - new_greatest).exp()
    total = total * rescale + weights.sum()
    acc = acc * rescale + (weights * values[start : start + 2]).sum()
    greatest = new_greatest
print(f"{acc / total:.4f}, {(scores.softmax(0) * values).sum():.4f}")
assert torch.isclose(acc / total, (scores.softmax(0) * values).sum())

# %% [markdown]
# ## Your turn
#
# What a program needs of its query is there. You write the loop over blocks, and store `acc_D / total`.
#
# - Block `index` of the row is `tl.load(table_ptr + index)`; make it 64 bits wide. Its keys for our head begin at `(block * num_kv_heads + kv_head) * BLOCK_SIZE * HEAD_DIM`, one place after another.
# - A query sees the keys up to its own `position`, and that one too. What lies behind is masked in the loads (it may be not a number) and is `-inf` as a score.
# - Scores are `scale * sum(q * k)` over the head's dimensions.


# %%
@triton.jit
def my_paged_attention(
    q_ptr,  # [T, H, D], contiguous, as all are
    keys_ptr, values_ptr,  # [N, K, P, D]
    block_table_ptr,  # [R, B]
    row_ptr, position_ptr,  # [T]: the row of each query, and its position there
    out_ptr,  # [T, H, D]
    table_len,  # B
    scale,  # 1 / sqrt(D)
    GROUP: tl.constexpr,  # H / K
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    kv_head, num_kv_heads = head // GROUP, num_heads // GROUP
    table_ptr = block_table_ptr + tl.load(row_ptr + token) * table_len
    position = tl.load(position_ptr + token)
    dim_D = tl.arange(0, TILE_DIM)
    place_P = tl.arange(0, BLOCK_SIZE)
    vector = (token * num_heads + head) * HEAD_DIM
    q_D = tl.load(q_ptr + vector + dim_D, mask=dim_D < HEAD_DIM, other=0.0)
    raise NotImplementedError("about 20 lines: an online softmax over the row's blocks, and the result at out_ptr")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>How many blocks does a query at this position see, and how many keys of the last one?</details>
#
# <details><summary>Hint 2: the invariant</summary>After each block, <code>acc / total</code> is the attention over the keys seen so far.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# greatest, total, acc_D = -1e30, 0, zeros
# for index from 0 to position // BLOCK_SIZE:
#     block id; which of its places are keys of ours
#     k_PD, v_PD: loads with a mask, other=0
#     score_P, -inf where there is no key
#     new greatest; rescale; weights
#     total and acc_D: shrink, then add
# store acc_D / total, masked
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(14, my_paged_attention)

# %% [markdown]
# ## When it passes
#
# One program a query reads every key of a row again for each query of a prompt. The package's kernel puts a tile of queries into one program: keys are read once for all of them.

# %%
show_solution(14)

# %% [markdown]
# In vLLM, look at `vllm/v1/attention/ops/triton_unified_attention.py`.
