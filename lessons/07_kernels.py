# title: Kernels
# question: How does one kernel serve prompts, chunks and answers at once?
# minutes: 40
# seams: attention
# needs: lesson 03, and having used tensors in torch; Triton is explained as far as it is used

# %% [markdown] slide
# # How does one kernel serve prompts, chunks and answers at once?
#
# Lesson 03 mixed whole prompts, pieces of prompts and single tokens in one step. That pays only if the GPU takes the mix in one go. This lesson reads the two kernels that do it: `store_kv` writes to the paged cache, `paged_attention` reads from it. They are written in Triton, a language for GPU kernels inside Python.
#
# About 40 minutes. Seam: `attention`. No GPU needed: without one, kernels run in Triton's interpreter, far slower.

# %% [markdown] slide
# ## Predict
#
# 1. A step holds a prompt, a chunk of another prompt, and two answers. How often is attention launched in each layer?
# 2. A request has 34 tokens in the cache and computes 6 more of its prompt of 100. How many keys may the kernel read for it?
# 3. One user of an 8B model is 32,000 tokens into a chat. The GPU has 132 cores. How many of them work on attention?
# 4. A batch is padded with a token that belongs to nobody. Where does its key go?

# %%
import os
from importlib.util import find_spec

import torch

if find_spec("triton") is None:
    raise ModuleNotFoundError("this lesson needs triton: pip install 'nanoserve[gpu]' (Linux), then restart the kernel")
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any is imported
from nanoserve import attention_kernels, kernels
from nanoserve.attention import AttentionBatch, TorchAttention
from nanoserve.attention_kernels import Tile, paged_attention, paged_attention_twin
from nanoserve.kv_cache import KVCache
from nanoserve.lab.charts import Setting
from nanoserve.lab.gpus import format_bytes, get_gpu, get_model
from nanoserve.lab.kernel_charts import decode_grid, grid_sizes, operations, programs, read_map
from nanoserve.lab.show import show_diff, show_figure, show_source
from nanoserve.triton_attention import TritonAttention

# %% [markdown] slide
# ## A batch of everything
#
# Each row is (new tokens, all tokens up to here): a whole prompt, six tokens of a long one, two answers, and a row that only pads the batch. The new tokens lie end to end; `starts` (in the kernel `query_start_loc`) says where each row begins. A row of `tables` says which blocks of the cache hold its keys.

# %%
rows = {"prompt": (9, 9), "chunk": (6, 40), "answer a": (1, 33), "answer b": (1, 20), "padding": (1, 0)}
starts = torch.tensor([0, 9, 15, 16, 17, 18], device=device)
seq_lens = torch.tensor([9, 40, 33, 20, 0], device=device)
tables = torch.tensor([[3, 0, 0], [7, 1, 5], [2, 9, 4], [8, 6, 0], [0, 0, 0]], device=device)
assert [n for n, _ in rows.values()] == starts.diff().tolist()
assert [m for _, m in rows.values()] == seq_lens.tolist()

# %% [markdown] slide
# ## Store: a slot for each token
#
# A key goes to the slot `block_id * 16 + offset`, found through the table. The padding token gets -1.


# %%
# NBVAL_CHECK_OUTPUT
def slots_of(row, positions):
    return [int(tables[row, p // 16]) * 16 + p % 16 for p in positions]


old = [slot for row, (n, m) in enumerate(rows.values()) for slot in slots_of(row, range(m - n))]
new = [slot for row, (n, m) in enumerate(rows.values()) if m for slot in slots_of(row, range(m - n, m))] + [-1]
print(new)

# %% [markdown]
# A GPU runs many **programs** of a kernel side by side; `tl.program_id(0)` says which one this is. Here a program copies one token's key and value. A pointer is an address; adding a tensor of offsets makes a tensor of addresses. Letters name axes: T tokens, R rows, H query heads, K key heads, D numbers of a head; N blocks of the cache, P places in one, B blocks of a row's table.

# %% slide
show_source(kernels._store_kv.fn)

# %% [markdown]
# `if slot < 0: return` is the whole treatment of padding. Below, the cache starts as NaN; the tokens of earlier steps are written by the **twin** (what the kernel means, in plain torch), the new ones by the kernel.

# %%
random = torch.Generator().manual_seed(0)
q = torch.randn(18, 4, 16, generator=random).to(device)  # [tokens, query heads, numbers of a head]
k, v = torch.randn(2, 18, 2, 16, generator=random).to(device)  # two key heads: each serves two query heads
sizes = {"num_blocks": 10, "num_kv_heads": 2, "block_size": 16, "head_dim": 16}
cache = KVCache(num_layers=1, **sizes, dtype=torch.float32, device=torch.device(device))
cache.blocks.fill_(torch.nan)
kernels.store_kv_twin(*torch.randn(2, len(old), 2, 16, generator=random), *cache.blocks[0], torch.tensor(old))
kernels.store_kv(k, v, *cache.blocks[0], torch.tensor(new, device=device))
stored = cache.blocks.clone()
kernels.store_kv_twin(k, v, *stored[0], torch.tensor(new))
assert torch.equal(cache.blocks.nan_to_num(7), stored.nan_to_num(7))  # the twin has nothing to change
assert stored[0, 0, :, 0, :, 0].isfinite().sum() == sum(m for _, m in rows.values()) == 102
places = torch.zeros(32)  # a toy: torch takes -1 for the last place
places[torch.tensor([3, 4, -1])] = 1.0
assert places.nonzero().flatten().tolist() == [3, 4, 31]

# %% [markdown] slide
# Without that `if`, padding would land in the last place of the cache, which may be somebody's (lesson 08).
#
# ## Attend, the old way
#
# `TorchAttention` is the plain way, and the oracle that other backends are compared with: for each row, copy its scattered blocks into one piece, then call torch's attention.

# %% slide
# NBVAL_CHECK_OUTPUT
slot_mapping = torch.tensor(new, device=device)
batch = AttentionBatch(starts, seq_lens, tables, slot_mapping, starts.tolist(), seq_lens.tolist())
counted = operations(lambda: TorchAttention().attend(q, cache, 0, batch))
print(sum(counted.values()), "operations;", counted["index"], "of them pick and copy")
assert sum(counted.values()) > 20

# %% [markdown]
# More rows, more operations, and every key is copied before it is used. v0 had real kernels, but one for prompts and one for decodes, so that a mixed batch was cut in two. Beside it, the backend with one kernel: no loop over rows, no question what a row is.

# %% slide
show_diff(TorchAttention, TritonAttention, "attend")

# %%
args = (q, *cache.blocks[0], tables, starts, seq_lens)
out = paged_attention(*args)
assert torch.allclose(out, paged_attention_twin(*args), atol=1e-5)
assert torch.allclose(out, TorchAttention().attend(q, cache, 0, batch), atol=1e-5)
assert out.isfinite().all() and out[17].eq(0).all()

# %% [markdown] slide
# ## The kernel, whole
#
# 1. **Which row is mine?** A program has a *tile* of at most `TILE_QUERIES` queries, all of one row. It finds the row by binary search in `query_start_loc`.
# 2. **Load** these queries, for all query heads that share a key head.
# 3. **Loop over keys**, some tens at a time, each found through the block table; keep a **running maximum**, and to it the sum of the weights and the weighted sum.
# 4. **Divide and store.**
#
# `past = seq_len - (end - start)` is all that tells a prompt from a chunk from an answer: how many keys stand before the first query.
#
# Why may a softmax be computed in parts? A weight is a power of the score's difference to the greatest one. When a part brings a greater one, the sums before are scaled down by one factor. A toy, then the kernel (whose powers are of two, `exp2`, which GPUs have as an instruction: so `scale` carries log2(e)):

# %%
scores, values = torch.randn(2, 6, generator=random)
parts = []
for i, j in ((0, 4), (4, 6)):
    weights = (scores[i:j] - scores[i:j].max()).exp()
    parts.append((scores[i:j].max(), weights.sum(), weights @ values[i:j]))
top = max(greatest for greatest, _, _ in parts)
total = sum(summed * (greatest - top).exp() for greatest, summed, _ in parts)
joined = sum(weighted * (greatest - top).exp() for greatest, _, weighted in parts) / total
assert torch.allclose(joined, scores.softmax(0) @ values)
show_source(attention_kernels._paged_attention.fn)

# %% [markdown] slide
# ## See it: who reads what
#
# Our batch, for one of the two key heads. The host knows only shapes, so it launches one tile for each row more than the tokens fill; one too many has no queries and returns at once.

# %% slide
tile = Tile(rows=16, keys=32, num_warps=4, num_stages=1)  # 16 rows: 8 queries of the 2 heads that share keys
tiling = {"tile_queries": 8, "tile_keys": tile.keys}
grid = programs(list(rows.values()), **tiling)
assert len(grid) == 18 // 8 + 5 and [p.num_keys for p in grid if p.row == 1] == [40]
setting = Setting("five rows", "tiles of 8 queries", "simulated", 0)
show_figure(read_map({"one launch": grid}, list(rows), 16, setting, tables.tolist()))

# %% [markdown]
# The six queries of the chunk read 40 keys *once* for all of them. Is the picture true? Spoil one key of the chunk, and see whose results change. Then the classic bug, a wrong key length. Right is what was computed before *plus this step*; the prompt's length is too much for a chunk and too little for an answer, as if `answer a` forgot its last three tokens:


# %% slide
# NBVAL_CHECK_OUTPUT
def changed(cache_blocks, lens):
    different = (paged_attention(q, *cache_blocks[0], tables, starts, lens) != out).flatten(1).any(1)
    return [name for name, i, j in zip(rows, starts, starts[1:], strict=False) if different[i:j].any()]


[slot] = slots_of(1, [20])
stored[0, 0, slot // 16, :, slot % 16] = torch.nan
print("position 20 of the chunk is NaN; changed:", changed(stored, seq_lens))
print("three keys forgotten; changed:", changed(cache.blocks, seq_lens - torch.tensor([0, 0, 3, 0, 0], device=device)))

# %% [markdown]
# No crash, no NaN. With a model, the same bug, planted: every answer sees its prompt only.

# %% slide
# NBVAL_CHECK_OUTPUT
from dataclasses import replace

from nanoserve import LLM, SamplingParams
from nanoserve.client import InProcessClient
from nanoserve.config import STAGES
from nanoserve.lab.planted import KeysOfThePromptOnly

v1 = replace(STAGES["v1"], client=InProcessClient, device="cpu", max_model_len=256, num_blocks=64)


def tell(config, max_tokens=16):
    with LLM(config=config) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return llm.generate("Once upon a time, there was a little dog", params)[0].outputs[0].text


print("right:", right := tell(v1))
print("wrong:", wrong := tell(replace(v1, batch=KeysOfThePromptOnly)))
assert right != wrong and right.split()[0] == wrong.split()[0]

# %% [markdown] slide
# The first word is right: it comes from the prompt's own step.
#
# ## Split the keys
#
# To the third prediction. An 8B model has 8 key heads, and one answer is one tile: the grid has 8 programs for 132 cores, and each walks through 32,000 keys alone. The launch function sees that from the shapes, and cuts the keys of each tile among several programs. It counts all programs of the grid: of the 160 for 16 answers, 32 find no queries:

# %% slide
h100, model = kernels.Chip("cuda", num_cores=132, shared_bytes=227 * 1024), get_model("llama-3-8b")
points = {n: decode_grid(h100, model, n, num_keys=32_000) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)}
assert points[1] == (8, 256) and points[16][0] - 16 * 8 == 32
assert 16 * 8 < 132 < 17 * 8  # answers x key heads: the programs that work
assert all(split >= 132 for _, split in points.values())
show_figure(grid_sizes(points, 132, Setting("32,000 keys each", "8B model on an H100", "simulated", 0)))

# %% [markdown]
# As in the toy, each program keeps its part's greatest score and sums; a second kernel, `_join_splits`, joins them:

# %% slide
assert torch.allclose(paged_attention(*args, num_splits=4), out, atol=1e-5)
ways = {name: programs([(1, 160)], **tiling, num_splits=n) for name, n in (("whole", 1), ("4 splits", 4))}
assert [sum(p.num_keys for p in grid) for grid in ways.values()] == [160, 160]
assert [p.num_keys for p in ways["4 splits"]] == [64, 64, 32, 0]
show_figure(read_map(ways, ["answer"], 16, Setting("one answer behind 160 keys", "tiles of 32 keys", "simulated", 0)))

# %% [markdown] slide
# ## Flip one field
#
# The whole model with this backend: in the interpreter far slower, with the same tokens.

# %%
with_triton = replace(v1, attention=TritonAttention, device="auto", dtype="float32", compile="none")
assert tell(with_triton, max_tokens=4) == tell(v1, max_tokens=4)

# %% [markdown] slide
# ## Compiled without a GPU
#
# The interpreter shows that a kernel is right, not that it fits. So all are also compiled ahead of time for GPUs (`scripts/aot_kernels.py`). Head size 128, bf16, as in the repository's results:

# %% slide
# NBVAL_CHECK_OUTPUT
from nanoserve.lab.results import read_result

compiled = [r for r in read_result("kernels_aot")["rows"] if r["head_dim"]]
for r in compiled:
    if r["head_dim"] == 128 and r["case"] in ("store", "decode, 1 row", "prefill, 2048 tokens"):
        print(f"{r['target']:<7}{r['kernel']:<16}{r['case']:<21}{r['registers']:>4} registers,"
              f"{r['shared_bytes'] / 1024:4.0f} of {r['shared_limit_bytes'] / 1024:.0f} KiB shared,"
              f"{r['tensor_core_instructions']:>4} tensor-core instructions")  # fmt: skip
assert all(r["shared_bytes"] <= r["shared_limit_bytes"] for r in compiled)
assert not any(r["spilled"] for r in compiled if r["head_dim"] in (64, 128))
assert all(r["tensor_core_instructions"] for r in compiled if r["kernel"] == "paged_attention")

# %% [markdown] slide
# Registers that do not suffice *spill* to slow memory; with common head sizes none do.
#
# ## Bytes or arithmetic?
#
# Each key is read in bf16 and used by n queries of G heads: n × G operations a byte. An H100 does 295 operations in the time of one byte. In Llama-3-70B, G is 8: packed into one tile, they read the keys once.

# %% slide
# NBVAL_CHECK_OUTPUT
balance = get_gpu("h100").flops_of("bf16") / get_gpu("h100").bandwidth
for name, n in {"an answer": 1, "an answer, 8 heads packed": 8, "a chunk of 512, packed": 512 * 8}.items():
    print(f"{name:<26}{n:>5} operations a byte: arithmetic at most {min(1, n / balance):.1%} busy")
print("32,000 tokens of KV:", format_bytes(32_000 * get_model("llama-3-70b").kv_bytes_per_token("bf16")))
assert round(balance) == 295 and 8 < balance < 512 * 8

# %% [markdown] slide
# An answer waits for memory whatever the kernel does: without packing for eight times those 10.5 GB. A chunk waits for arithmetic. In one launch one fills what the other leaves idle.
#
# ## What it costs
#
# - A split needs a second launch, and float32 memory for the parts.
# - Tile and splits depend on the batch, and with them the order of sums: a row's *last bits* can change with who is beside it. `TritonAttention(tile=..., num_splits=...)` fixes both.
# - Each kind of launch is compiled when it first comes.
#
# ## Honest history
#
# - **v0 had paged kernels from its first day**: PagedAttention is its founding idea (Kwon et al., 2023), with a second version that split long contexts.
# - **v1's one call is mostly not Triton.** On NVIDIA it calls FlashAttention's kernel for rows of any length; the unified Triton kernel, which this one follows, came later, mainly for AMD.
# - **Nothing in the kernel is new.** Running softmax: Milakov and Gimelshein, 2018; tiles: FlashAttention, 2022; split keys: Flash-Decoding, 2023; grouped heads: Ainslie et al., 2023.

# %% [markdown] slide
# ## Questions
#
# 1. What does the kernel read to find out that a row is a decode?
# <details><summary>Answer</summary>Nothing. A decode is a row with one query; <code>past</code> is all it needs.</details>
#
# 2. Why does the grid have a tile for each row more than the tokens fill?
# <details><summary>Answer</summary>Each row may end in a tile that is not full, and the host does not look at lengths: it would have to wait for the device.</details>
#
# 3. Prediction 2: how many keys?
# <details><summary>Answer</summary>40: 34 + 6. The other 60 are known, but have no keys yet.</details>
#
# 4. Why are offsets into the cache 64 bits wide?
# <details><summary>Answer</summary>A block id times the numbers in a block passes 2^31 in a cache of a few GB.</details>
#
# 5. When is splitting useless?
# <details><summary>Answer</summary>When enough programs work (17 answers on 8 key heads are 136, for 132 cores), or there are few keys.</details>
#
# 6. Why must all keys of a step be stored before anyone attends?
# <details><summary>Answer</summary>A chunk's queries see keys of the same step; with shared blocks (lesson 06) so do other rows.</details>
#
# ## Exercise
#
# Tiles of 8 queries. How many programs does a key head get for each of these batches? How many of them find nothing to read?

# %%
my_programs = {"32 answers": None, "a prompt of 100": None, "7 answers and a prompt of 50": None}

batches = [[(1, 50)] * 32, [(100, 100)], [(1, 50)] * 7 + [(50, 50)]]
found = {name: programs(batch, **tiling) for name, batch in zip(my_programs, batches, strict=True)}
for name, guess in my_programs.items():
    assert guess in (None, len(found[name])), f"{name}: not {guess}; tokens // 8, and one for each row"

# %% [markdown]
# ### Solution
#
# <details><summary>Show</summary>32 // 8 + 32 = 36, 100 // 8 + 1 = 13, 57 // 8 + 8 = 15. Of the answers' programs four find nothing: 32 have a query each. The prompt of 100 fills all 13; in the mix one is left over.</details>

# %%
assert [len(grid) for grid in found.values()] == [36, 13, 15]
assert [sum(not p.num_keys for p in grid) for grid in found.values()] == [4, 0, 1]

# %% [markdown] slide
# ## In vLLM, look at
#
# - `vllm/v1/attention/ops/triton_unified_attention.py` (earlier in `vllm/attention/ops/`): the same packing, the same search.
# - `vllm/v1/attention/backends/flash_attn.py`: what runs on NVIDIA.
# - `csrc/attention/paged_attention_v1.cu` and `_v2.cu`: v0's, without and with split keys.
#
# Exercises 13 and 14 let you write both kernels. Next: **08, graphs and compile**: launching these kernels can cost the host more than running them costs the GPU.
