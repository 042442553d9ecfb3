# title: Prefix caching
# question: Why compute and store the same beginning a thousand times?
# minutes: 40
# seams: blocks
# needs: lesson 01, or knowing what a KV cache in blocks is

# %% [markdown] slide
# # Why compute and store the same beginning a thousand times?
#
# Every chat session of a product begins with the same system prompt. For the engine it is just tokens: it computes their keys and values, and keeps a copy, once for each session. This lesson turns private copies into shared blocks, in four steps: a name for a block, a count of its owners, an order in which blocks are forgotten, and one rule that everybody gets wrong the first time.
#
# About 40 minutes. Seam: `blocks`. No GPU needed.

# %% [markdown] slide
# ## Predict
#
# Eight sessions arrive at once. Their prompts share 128 tokens, then each has 16 of its own, and 8 are generated. A block holds 16 tokens.
#
# 1. How many prompt tokens does an engine compute that keeps private copies? One that shares?
# 2. How many blocks does each need?
# 3. A prompt of exactly 32 tokens was just computed. The same prompt arrives again. How many tokens must be computed?
# 4. Llama-3-70B, a system prompt of 30,000 tokens, 1,000 sessions: how many bytes of KV without sharing?

# %%
from dataclasses import replace

from nanoserve.blocks import PrivateBlocks, SharedBlocks, V0CachedBlocks
from nanoserve.config import STAGES
from nanoserve.lab.block_history import BlockHistory
from nanoserve.lab.charts import blocks_in_use, tokens_computed
from nanoserve.lab.lesson_charts import block_map
from nanoserve.lab.metrics import measure
from nanoserve.lab.planted import HitsTheWholePrompt
from nanoserve.lab.rehearsal import rehearse
from nanoserve.lab.show import show_diff, show_figure, show_source
from nanoserve.lab.widgets import memory_calculator, trace_scrubber
from nanoserve.lab.workload import random_tokens, shared_system_prompt

# %% [markdown] slide
# ## Run the old stage: private copies
#
# Stage `multiprocess` has the first two shifts, and private blocks. The engine and its blocks are real, the model and the clock are not: a step costs 8 ms and 30 µs a token.

# %%
# NBVAL_CHECK_OUTPUT
load = shared_system_prompt(random_tokens(1000), num_requests=8, prefix_len=128, tail_len=16, output_tokens=8)
private = rehearse(STAGES["multiprocess"], load, max_num_batched_tokens=2048, num_blocks=128)
figures = measure(private.records)
print(figures.prompt_tokens_computed, "prompt tokens computed,", figures.peak_used_blocks, "blocks")
assert figures.prompt_tokens_computed == 8 * (128 + 16)

# %% [markdown]
# Flip one field, and draw which block holds what, in the second step of each run:

# %%
# NBVAL_CHECK_OUTPUT
shared = rehearse(STAGES["shared"], load, max_num_batched_tokens=2048, num_blocks=128)
figures = measure(shared.records)
print(figures.prompt_tokens_computed, "prompt tokens computed,", figures.peak_used_blocks, "blocks")
assert figures.prompt_tokens_computed == 128 + 8 * 16
assert figures.peak_used_blocks == 8 + 8 * 2

# %% slide
first = shared.records[0]
assert len(first.num_scheduled_tokens) == 8
assert [first.hit_tokens[f"session-{i}"] for i in range(8)] == [0] + [128] * 7
maps = {"multiprocess": BlockHistory(private.trace).at(2), "shared": BlockHistory(shared.trace).at(2)}
assert set(maps["multiprocess"].refs.values()) == {1}
assert sorted(maps["shared"].refs.values()) == [1] * 16 + [8] * 8
show_figure(block_map(maps, 96, private.setting))

# %% [markdown] slide
# Blue is the common prompt, grey what a session has to itself. Above, eight copies of the same eight blocks; below, each is there once and stands in eight tables. All eight sessions were admitted *in the same step*; the first one's blocks did not exist yet when the other seven found them. That is sound because a layer stores the keys and values of the whole batch before anybody reads them.
#
# ## 1. A name for a block: the hash chain
#
# When may one request use a block of another? Keys and values at a position depend on *all tokens before it*, not only on the 16 in the block. So a block's name must cover everything up to its end. Each hash takes in the hash before it; the first one may take a salt, `cache_salt`, for customers who must not share:

# %% slide
show_source(SharedBlocks, "lookup", "hash_block")

# %% [markdown]
# `lookup` walks the chain and stops at the first name that is not known. Let us talk to the block manager alone, without any engine. Two requests share 48 tokens, three blocks:

# %% slide
# NBVAL_CHECK_OUTPUT
from nanoserve.request import EngineRequest, Request, SamplingParams


def request(name, token_ids):
    params = SamplingParams(temperature=0.0, max_tokens=8)
    return Request.from_engine_request(EngineRequest(id=name, prompt_token_ids=token_ids, params=params), 4096)


common = list(range(48))
a, b = request("A", common + [100] * 7), request("B", common + [200] * 5)
blocks = SharedBlocks(num_blocks=11, block_size=16)
for one in (a, b):
    hit = blocks.lookup(one)
    blocks.allocate(one, one.num_tokens - hit.num_tokens, hit)
    print(one.id, "hit", hit.num_tokens, "tokens, table", one.block_ids)

# %% [markdown]
# Why not hash the 16 tokens alone? Because the same 16 tokens behind another beginning have other keys and values. The same text in the middle of two prompts is no hit, and must not be:

# %%
moved = request("C", [999] * 16 + common)
assert blocks.lookup(moved).num_tokens == 0
assert blocks.hash_block(moved, 1, b"one parent") != blocks.hash_block(moved, 1, b"another")
assert blocks.lookup(request("D", [999, *common[1:], 7])).num_tokens == 0  # question 1: only the first token differs
salted = request("E", [*common, 7])
salted.cache_salt = "another customer"
assert blocks.lookup(salted).num_tokens == 0 < blocks.lookup(request("F", [*common, 7])).num_tokens

# %% [markdown] slide
# ## 2. Owners: reference counts
#
# A shared block may not be handed out again while anybody reads it. Each block counts the tables that hold it.

# %% slide
# NBVAL_CHECK_OUTPUT
print({block_id: blocks.pool.blocks[block_id].ref for block_id in (1, 2, 3, 4, 5)})
blocks.free(a)
print({block_id: blocks.pool.blocks[block_id].ref for block_id in (1, 2, 3, 4, 5)})

# %% [markdown] slide
# ## 3. Forgetting: the free queue is the cache
#
# There is no separate cache with a size of its own. A block that nobody holds goes into the *free queue*, and keeps its name. As long as it is not handed out it can be found; when it is, its name is dropped. That is eviction, and it costs nothing until the memory is needed.

# %% slide
# NBVAL_CHECK_OUTPUT
blocks.free(b)
print("handed out next:", [block.id for block in blocks.pool])
assert [block.id for block in blocks.pool][:2] == [5, 4] and [block.id for block in blocks.pool][-3:] == [3, 2, 1]
assert blocks.num_free_blocks == 10 and blocks.lookup(request("D", [*common, 7])).num_tokens == 48

# %% [markdown] slide
# Read the queue. 5 and 4 come first: half-filled tails without a name, of no use to anybody. 3, 2, 1 come last, and in that order: a request gives back its **tail first**, so the end of a prefix is forgotten before its beginning. The other way round, the loss of block 1 would make 2 and 3 unreachable, since a lookup starts at the beginning.
#
# Ask for more than the unnamed blocks, and the chain shrinks from its end:

# %% slide
# NBVAL_CHECK_OUTPUT
big = request("big", list(range(500, 500 + 8 * 16)))
blocks.allocate(big, big.num_tokens)
print("table of big:", big.block_ids)
print("still found:", blocks.lookup(request("E", [*common, 7])).num_tokens, "of 48 tokens")
assert big.block_ids[-1] == 3

# %%
# The same sessions, one after another. In JupyterLab: scrub through the steps, and watch counts and '-'.
late = [replace(a, at_s=0.03 * i) for i, a in enumerate(load.arrivals)]
staggered = rehearse(STAGES["shared"], replace(load, arrivals=late), max_num_batched_tokens=2048, num_blocks=128)
assert max(record.num_used_blocks for record in staggered.records) < figures.peak_used_blocks
trace_scrubber(staggered, start=12)

# %% [markdown] slide
# ## 4. The last-token rule
#
# The whole prompt is in the cache. Is there nothing to compute? There is: the *next* token is sampled from the output at the last position, and the cache holds keys and values, not outputs. At least one token must be computed, and since hits are whole blocks, a prompt of exactly two blocks computes 16 tokens again, one of 33 tokens just 1.

# %% slide
# NBVAL_CHECK_OUTPUT
blocks = SharedBlocks(num_blocks=11, block_size=16)
first = request("first", common)
blocks.allocate(first, 48)
for length in (32, 33):
    hit = blocks.lookup(request(f"again-{length}", common[:length]))
    print(f"{length} tokens, all cached: {hit.num_tokens} hit, {length - hit.num_tokens} to compute")
    assert length - hit.num_tokens == {32: 16, 33: 1}[length]

careless = HitsTheWholePrompt(num_blocks=11, block_size=16)
careless.allocate(request("first", common), 48)
again = request("again", common)
try:
    hit = careless.lookup(again)
    careless.allocate(again, again.num_tokens - hit.num_tokens, hit)
except AssertionError as error:
    print(error)

# %% [markdown]
# It is the `- 1` in `lookup`. `HitsTheWholePrompt` leaves it out: the request would get zero tokens, and never a first one. Here an assertion says so.
#
# ## The two classes beside each other

# %% slide
show_diff(PrivateBlocks, SharedBlocks, "lookup", "allocate", "free")

# %% [markdown]
# ## See it: work and memory

# %% slide
runs = {"multiprocess": private.records, "shared": shared.records}
show_figure(tokens_computed(runs, private.setting))

# %% slide
assert shared.run.ttft_us().max < 0.4 * private.run.ttft_us().max
show_figure(blocks_in_use(runs, private.setting))

# %% [markdown]
# ## What it costs
#
# Hashing is paid by everybody, also by those who never hit: one SHA-256 per 16 tokens, once in a request's life. Traffic with nothing in common shows what else the cache costs: not a single step may differ. Then the hashing itself, measured on this machine.

# %%
from time import perf_counter

from nanoserve.lab.scenarios import poisson_mix

strangers = poisson_mix(0, rate=16.0, until_s=5.0)
without, with_cache = (rehearse(STAGES[stage], strangers, max_num_batched_tokens=2048) for stage in runs)
assert with_cache.run.hit_tokens == 0
assert with_cache.run.itl_us() == without.run.itl_us() and with_cache.run.end_us == without.run.end_us
long = request("long", list(range(16_000)))
start = perf_counter()
SharedBlocks(num_blocks=2, block_size=16).lookup(long)
print(
    f"16,000 tokens hashed in {(perf_counter() - start) * 1000:.1f} ms on this machine, {len(long.block_hashes)} hashes"
)
assert len(long.block_hashes) == 999

# %% [markdown] slide
# ## 30,000 tokens, 1,000 sessions
#
# A 70B model in bf16 keeps 327,680 bytes of KV for each token. First the memory of 1,000 sessions; then the time, on simulated H100s, of 100 that come at once: one computes the prompt, with the whole budget of each step, and 99 wait for that.

# %% slide
# NBVAL_CHECK_OUTPUT
from nanoserve.lab.costs import Roofline
from nanoserve.lab.gpus import Memory, format_bytes, get_gpu, get_model, session_blocks
from nanoserve.lab.scenarios import system_prompt

memory = Memory(model=get_model("llama-3-70b"), gpu=get_gpu("h100"), tp=8)
alone, own = session_blocks(prefix_len=30_000, own_len=100, block_size=16)
assert memory.kv_bytes_per_token == 327_680
print("one copy of the prompt:", format_bytes(30_000 * memory.kv_bytes_per_token))
print("1000 copies:", format_bytes(1000 * 30_000 * memory.kv_bytes_per_token))
print(f"blocks for 1000 sessions: {1000 * alone:,} with private copies, {30_000 // 16 + 1000 * own:,} shared")
print("sessions that fit on 8 x H100 at once: {} private, {:,} shared".format(*memory.sessions(30_000, 100)))

sessions, costs, last_us = system_prompt(num_sessions=100), Roofline(memory), {}
for stage in runs:
    run = rehearse(STAGES[stage], sessions, costs, num_blocks=memory.num_blocks, max_num_batched_tokens=2048).run
    last_us[stage] = run.ttft_us().max
    print(f"{stage:<13} last first token after {run.ttft_us().max / 1e6:6.1f} s, {run.num_tokens:,} tokens computed")

# %% slide
assert last_us["multiprocess"] > 20 * last_us["shared"]
memory_calculator()  # in JupyterLab: another model, other GPUs, other sessions

# %% [markdown] slide
# ## Honest history
#
# - **v0 had a prefix cache**, off by default (`--enable-prefix-caching`). It was bolted onto mutable tables: a block became shareable when it was full *and computed*; if an equal one was there, the table entry was replaced, so the runner had to cope with changing ids; and admission counted blocks as if there were no hits.
# - v1's is on by default: above, it changed no step where nobody hits.
# - Before either, SGLang's RadixAttention (2023) kept a tree of prefixes. A hash chain finds the same whole blocks with a flat map.

# %%
# NBVAL_CHECK_OUTPUT
v0_cached = rehearse(
    replace(STAGES["multiprocess"], blocks=V0CachedBlocks), load, max_num_batched_tokens=2048, num_blocks=128
)
second = v0_cached.records[1]
print("computed:", measure(v0_cached.records).prompt_tokens_computed, "prompt tokens")
print("session-1, table entries replaced after the fact:", second.replaced_blocks["session-1"][:3], "...")
assert len(second.replaced_blocks) == 7
assert measure(v0_cached.records).prompt_tokens_computed == measure(private.records).prompt_tokens_computed == 1152
assert v0_cached.records[2].num_used_blocks < private.records[2].num_used_blocks / 2

# %% [markdown] slide
# v0's cache saves the memory here, and none of the work: sessions that arrive together find nothing, since nothing is computed yet.
#
# ## Questions
#
# 1. Two prompts differ in their first token and agree in the other 9,999. How many blocks do they share?
# <details><summary>Answer</summary>None. The chain differs from its first link.</details>
#
# 2. Why does a timestamp at the top of a system prompt hurt?
# <details><summary>Answer</summary>For the same reason. Put what changes at the end.</details>
#
# 3. Does the cache take memory away from running requests?
# <details><summary>Answer</summary>No. It lives in free blocks, and gives way when one is needed.</details>
#
# 4. Why is the tail of a request given back first?
# <details><summary>Answer</summary>So that a prefix is forgotten from its end; a lookup starts at its beginning.</details>
#
# 5. Which block is never shared?
# <details><summary>Answer</summary>One that is not full: it has no name yet, and it will be written to.</details>
#
# 6. What keeps two customers from finding out what the other asked, by timing?
# <details><summary>Answer</summary>A salt (<code>cache_salt</code>) in the first block's hash; it reaches all others through the chain.</details>
#
# ## Exercise
#
# A block size of 64 instead of 16: how many of the 1,152 prompt tokens are computed now, and how many with 100? Say it before you change `block_size`.

# %%
my_prediction = {16: 256, 64: None, 100: None}

computed = {}
for block_size in my_prediction:
    run = rehearse(STAGES["shared"], load, max_num_batched_tokens=2048, block_size=block_size)
    computed[block_size] = measure(run.records).prompt_tokens_computed
for block_size, guess in my_prediction.items():
    assert guess in (None, computed[block_size]), f"block_size={block_size}: not {guess}; what is a full block?"

# %% [markdown]
# ### Solution
#
# <details><summary>Show</summary>With 64 the prefix is still two full blocks: 128 + 8 × 16 = 256. With 100 only one block of it is full, and 28 tokens of it are computed again by each: 144 + 7 × 44 = 452.</details>

# %%
assert computed == {16: 256, 64: 256, 100: 452}

# %% [markdown]
# ## In vLLM, look at
#
# - `vllm/v1/core/block_pool.py` and `kv_cache_utils.py`: the pool, the free queue as a linked list, `hash_block_tokens`.
# - `vllm/v1/core/kv_cache_manager.py`: `get_computed_blocks` is `lookup` here, `allocate_slots` is `allocate`.
# - `vllm/core/block/prefix_caching_block.py` of 0.8.5: v0's.
#
# Exercises 05 to 08 (`nanoserve check 5`) have you write all four rules. Next: **07, kernels**.
