# title: Paged KV and continuous batching
# question: How do requests of unknown length share one machine?
# minutes: 30
# seams: none yet; block_size, max_num_seqs, num_blocks
# needs: lesson 00, or knowing what a KV cache is

# %% [markdown] slide
# # How do requests of unknown length share one machine?
#
# Nobody knows how long an answer will be until it has ended. So who gets a seat in the next step, and how much memory? Two ideas answer that. Both were in vLLM from its first day, so they are where v0 starts, and the other lessons build on them: *decide anew in every step*, and *hand memory out in small blocks, when it is needed*.
#
# About 30 minutes. No GPU needed.

# %% [markdown] slide
# ## Predict
#
# Eight seats, 24 requests. Every eighth answer has 96 tokens, the others have 12.
#
# 1. A batch of eight is run until its longest answer is done, then the next batch. How many steps is that?
# 2. What share of the seats is used, on average?
# 3. Memory for the keys and values of 16,384 tokens; the model allows 2,048 tokens a request. How many requests can run, if each may need all of that?
# 4. 48 requests wait; in the end they need 375 tokens each, on average. How many of them run at once if memory is handed out in blocks of 16, when it is needed?

# %%
from dataclasses import replace
from random import Random

from nanoserve.blocks import PrivateBlocks
from nanoserve.config import STAGES
from nanoserve.lab.charts import Setting, step_timeline
from nanoserve.lab.costs import Roofline, StepLoad
from nanoserve.lab.gpus import Memory, get_gpu, get_model
from nanoserve.lab.lesson_charts import kv_fill, kv_held, table_map
from nanoserve.lab.metrics import request_times
from nanoserve.lab.rehearsal import rehearse
from nanoserve.lab.show import show_diff, show_figure, show_source
from nanoserve.lab.workload import Arrival, Workload
from nanoserve.request import EngineRequest, Request, SamplingParams
from nanoserve.scheduler import PhaseSplitScheduler

# %% [markdown] slide
# ## Run what was there before
#
# First a load. In a *static* batch, each request of a batch comes when the longest of the batch before has ended: one field of an arrival says so. Everything else is the real engine, on a virtual clock: a step costs 8 ms and 30 µs a token.


# %%
def load_of(name, prompt_lens, answer_lens):
    arrivals = [
        Arrival(id=f"chat-{i}", group="chat", prompt_token_ids=[i] * n, max_tokens=answer_len)
        for i, (n, answer_len) in enumerate(zip(prompt_lens, answer_lens, strict=True))
    ]
    return Workload(name=name, claim="", watched="chat", seed=0, parameters={}, arrivals=arrivals)


load = load_of("one-in-eight-is-long", [20] * 24, [96 if i % 8 == 0 else 12 for i in range(24)])
longest_before = {i: load.arrivals[i - i % 8 - 8].id for i in range(8, 24)}
in_batches = [replace(a, follows=longest_before.get(i, "")) for i, a in enumerate(load.arrivals)]

# %% slide
# NBVAL_CHECK_OUTPUT
eight = {"max_num_seqs": 8, "max_num_batched_tokens": 2048}
static = rehearse(STAGES["v0"], replace(load, arrivals=in_batches), **eight)
v0 = rehearse(STAGES["v0"], load, **eight)
for name, run in {"static batches": static.run, "v0": v0.run}.items():
    print(f"{name:<15}{run.num_steps} steps, {run.end_us / 1e6:.2f} s, {run.mean_running:.2f} of 8 seats used")

# %% [markdown] slide
# ## See it
#
# A lane is a request, a cell a step. Above, seven of eight seats stand empty while one long answer goes on (three in four on average), and the next batch has not been sent yet. Below, each seat is taken again in the very next step; grey lanes wait for one. A good half of the seats is used on average, not all: at the end a few long answers run on, and nobody waits any more.

# %% slide
assert static.run.num_steps == 3 * 96 and static.run.mean_running < 2
assert sum(len(record.num_scheduled_tokens) == 1 for record in static.records) == 3 * (96 - 12)  # one long one alone
assert 0.5 < v0.run.mean_running / 8 < 0.6
show_figure(step_timeline({"static batches": static.records, "v0": v0.records}, v0.setting))

# %% [markdown] slide
# ## Why: what is decided once, and what in every step
#
# Two loops as toys (lists of how many tokens each request still needs). What differs is where the batch is chosen:


# %% slide
def static_batches(queue, num_seats):
    steps = 0
    while queue:
        batch, queue = queue[:num_seats], queue[num_seats:]
        while any(batch):
            batch = [left - 1 for left in batch if left]
            steps += 1
    return steps


def continuous_batches(queue, num_seats):
    steps, batch = 0, []
    while queue or batch:
        batch, queue = batch + queue[: num_seats - len(batch)], queue[num_seats - len(batch) :]
        batch = [left - 1 for left in batch if left > 1]
        steps += 1
    return steps


show_diff(static_batches, continuous_batches)

# %% slide
# NBVAL_CHECK_OUTPUT
lengths = [a.max_tokens for a in load.arrivals]
print("toys:", static_batches(lengths, 8), "and", continuous_batches(lengths, 8), "steps")
print("v0:", v0.run.num_steps, "steps; somebody is admitted in", [r.step for r in v0.records if r.hit_tokens])
assert static_batches(lengths, 8) == static.run.num_steps
assert v0.run.num_steps == continuous_batches(lengths, 8) + 1 < 0.5 * static.run.num_steps

# %% [markdown]
# They agree but for one step: v0 admits in a step of its own, which brings the first tokens, and everybody else waits meanwhile (the pale cuts in the picture). Here it is a hiccup; lesson 02 is about when it is not. The lines that fill the seats, whole (a `Draft` is a step being decided; the watermark is a few blocks that admission leaves free for those who run):

# %% slide
show_source(PhaseSplitScheduler, "_prefill")

# %% [markdown]
# Why share a step at all? Because on a GPU, a step mostly reads the weights, and reads them once for everybody. 70B, 8 × H100 in fp8, 500 tokens of context each:

# %% slide
# NBVAL_CHECK_OUTPUT
h100s = Roofline(Memory(model=get_model("llama-3-70b"), gpu=get_gpu("h100"), tp=8, dtype="fp8"))
step_us = {n: h100s.step_us(StepLoad(n, n, 500 * n, 500 * n)) for n in (1, 8, 64)}
print(step_us)
assert step_us[64] < 1.3 * step_us[1]

# %% [markdown] slide
# ## The other half: memory
#
# A seat is worth nothing without memory for keys and values. Before paging, a request got one piece of memory in a row, and since nobody knows the length of its answer, room for the longest one. We can run that: it is a *block* of 2,048 tokens, one for each request. 48 chats, all at once, answers of 60 to 500 tokens, memory for 16,384:

# %% slide
# NBVAL_CHECK_OUTPUT
rng = Random(0)
chats = load_of("chats", [rng.randint(40, 240) for _ in range(48)], [(60, 120, 250, 500)[i % 4] for i in range(48)])
memory, budget = 8 * 2048, {"max_num_batched_tokens": 2048}  # the budget: tokens that a step may hold
slabs = rehearse(STAGES["v0"], chats, block_size=2048, num_blocks=1 + memory // 2048, **budget)
print(f"{slabs.run.end_us / 1e6:.1f} s, at most {max(len(r.num_scheduled_tokens) for r in slabs.records)} in a step")
stored, held = kv_held(slabs.records, block_size=2048)
print(f"on average, memory for {held:,.0f} tokens is held, {stored:,.0f} are in it")
assert stored / held < 0.2 and max(len(r.num_scheduled_tokens) for r in slabs.records) == 8

# %% [markdown] slide
# Eight requests sit on all of the memory, and fill less than a fifth of it; forty wait outside.
#
# ## Flip one field
#
# `block_size=16`. A request gets a block when its next token needs one.

# %% slide
# NBVAL_CHECK_OUTPUT
paged = rehearse(STAGES["v0"], chats, block_size=16, num_blocks=1 + memory // 16, **budget)
print(f"{paged.run.end_us / 1e6:.1f} s, at most {max(len(r.num_scheduled_tokens) for r in paged.records)} in a step")
assert paged.run.num_tokens == 18_012 > memory and paged.run.num_preemptions == 0
assert paged.run.end_us < 0.4 * slabs.run.end_us and max(len(r.num_scheduled_tokens) for r in paged.records) == 48

# %% slide
fills = {"2,048 in a row": kv_held(slabs.records, 2048), "blocks of 16": kv_held(paged.records, 16)}
stored, held = fills["blocks of 16"]
assert stored / held > 0.95 and held - stored < 15 * paged.run.mean_running
show_figure(kv_fill(fills, memory, paged.setting))

# %% [markdown] slide
# What is left of the waste is the end of each last block: 0 to 15 places a request, however long it is. And all 48 run at once, though together they will have stored 18,012 tokens, more than there is room for: the short ones are gone before the long ones have grown.
#
# ## A table, and a slot
#
# Blocks of one request need not lie beside each other. Let us talk to the block manager alone: A, B and C come with 20 tokens each, B leaves, D comes with 60.


# %% slide
# NBVAL_CHECK_OUTPUT
def request(name, num_tokens):
    params = SamplingParams(temperature=0.0, max_tokens=64)
    return Request.from_engine_request(EngineRequest(id=name, prompt_token_ids=[0] * num_tokens, params=params), 4096)


blocks = PrivateBlocks(num_blocks=16, block_size=16)
a, b, c, d = request("A", 20), request("B", 20), request("C", 20), request("D", 60)
for one in (a, b, c):
    blocks.allocate(one, 20)
blocks.free(b)
blocks.allocate(d, 60)
a.num_computed_tokens = 20
blocks.allocate(a, 13)  # it has grown to 33 tokens
tables = {one.id: one.block_ids for one in (a, c, d)}
print(tables)

# %% slide
show_figure(table_map(tables, 16, Setting("four requests", "the block manager alone", "simulated", 0)))

# %% [markdown]
# So position *i* of a request lies in block `table[i // 16]`, at offset `i % 16`: the **slot** is `table[i // 16] * 16 + i % 16`. An operating system finds a byte in its pages in the same way. The runner stores keys and values at their slots, and attention reads them back through the table. Block 0 is the *null block*: padding may point to it, and nobody owns it.


# %% slide
# NBVAL_CHECK_OUTPUT
def slot(table, position):
    return table[position // 16] * 16 + position % 16


print("A's last token, position 32, is in slot", slot(a.block_ids, 32))
assert slot(a.block_ids, 32) == 9 * 16
every = [slot(one.block_ids, i) for one, n in ((a, 33), (c, 20), (d, 60)) for i in range(n)]
assert len(set(every)) == 33 + 20 + 60 and min(every) >= 16  # nobody shares; block 0 is never handed out
show_source(PrivateBlocks, "demand", "allocate")

# %% [markdown] slide
# ## What it costs
#
# **Bookkeeping.** Smaller blocks waste less, and make longer tables. Below 16 there is little left to win:

# %% slide
# NBVAL_CHECK_OUTPUT
filled, given = {}, {}
for block_size in (1, 16, 64, 256, 2048):
    sizes = {"block_size": block_size, "num_blocks": 1 + memory // block_size}
    run = rehearse(STAGES["v0"], chats, **sizes, **budget)
    stored, held = kv_held(run.records, block_size)
    filled[block_size] = stored / held
    given[block_size] = sum(len(ids) for record in run.records for ids in record.new_blocks.values())
    print(
        f"{block_size:>5}: {filled[block_size]:6.1%} filled, {run.run.end_us / 1e6:4.1f} s, {given[block_size]:>6,} blocks handed out"
    )
assert filled[1] - filled[16] < 0.03 and filled[16] - filled[256] > 0.1 and given[1] > 10 * given[16]

# %% [markdown]
# **No promise.** Who reserves nothing can run dry in the middle of an answer. Half the memory, and the engine admits more than it can finish. Then the youngest is thrown out (*preempted*): its blocks go back, and it is computed again later, prompt and answer so far in one go.

# %% slide
# NBVAL_CHECK_OUTPUT
half = {"block_size": 16, "num_blocks": 1 + memory // 32}
tight = rehearse(STAGES["v0"], chats, **half, **budget)
needed = sum(len(a.prompt_token_ids) + a.max_tokens - 1 for a in chats.arrivals)
print(f"{tight.run.num_preemptions} preemptions, {tight.run.num_tokens:,} tokens computed, {needed:,} needed")
assert paged.run.num_tokens == needed < tight.run.num_tokens and round(needed / 48) == 375

# %% slide
assert all(r.finish_reason == "length" for r in request_times(tight.records).values())
quarter = rehearse(STAGES["v0"], chats, block_size=16, num_blocks=1 + memory // 64, **budget)  # here some still wait
running, lost, known = [], set(), set()
for record in quarter.records:
    for victim in record.preempted:
        assert victim == running.pop()  # the youngest
        lost.add(victim)
    assert not lost - record.hit_tokens.keys() or record.hit_tokens.keys() <= known  # nobody new before they are back
    lost -= record.hit_tokens.keys()
    known |= record.hit_tokens.keys()
    running = [i for i in (*running, *record.hit_tokens) if i not in record.finished]
assert quarter.run.num_preemptions > 0 and len(known) == 48
show_figure(step_timeline({"half the memory": tight.records}, tight.setting))

# %% [markdown] slide
# Black is a request that has lost its memory. It comes back before anybody new, computes everything again (red), and ends late but whole.
#
# ## The same on this machine
#
# A real model and a real clock: eight requests, one seat and then eight. The tokens are the same, to the last one.

# %% slide
from nanoserve.lab.climb import run_once
from nanoserve.lab.scale import scale

here = scale()
small = load_of("eight-chats", [24] * 8, [8, 16, 24, 32] * 2)
alone = run_once(here.fit(replace(STAGES["v0"], max_num_seqs=1)), small)[0]
together = run_once(here.fit(STAGES["v0"]), small)[0]
answers = [{r.id: r.token_ids for r in request_times(records).values()} for records in (alone, together)]
assert answers[0] == answers[1] or not here.is_exact
show_figure(step_timeline({"one seat": alone, "v0": together}, here.setting(small)))

# %% [markdown] slide
# ## Honest history
#
# - **Neither idea is v1's.** Iteration-level scheduling is Orca's (OSDI 2022), paged KV is PagedAttention's (SOSP 2023), with which vLLM began. Its authors found 20 to 38 % of the KV memory of earlier systems holding tokens. Some of those reserved less clumsily than our 2,048, for example to the next power of two.
# - **Paging is not free on the device.** The first paged kernels were slower than those that read in a row; the larger batch paid for it. Modern kernels read blocks by nature (lesson 07).
# - What v0 does *not* do yet is share blocks by default (lesson 06), or admit beside decodes (lessons 02 and 03).
# - **v0 could also swap**: copy a victim's blocks to the host instead of computing them again. v1 dropped that way of preempting: recomputing is one prefill, and prefills are fast. The load above, with swapping:

# %% slide
# NBVAL_CHECK_OUTPUT
swap = {"preemption_mode": "swap", "num_swap_blocks": 1000}
swapped = rehearse(STAGES["v0"], chats, **half, **budget, **swap)
print(f"{swapped.run.num_preemptions} preemptions, {swapped.run.num_tokens:,} tokens computed,",
      sum(len(record.copies) for record in swapped.records), "blocks copied")  # fmt: skip
assert swapped.run.num_tokens == needed

# %% [markdown] slide
# ## Questions
#
# 1. Which figure got worse for a request because batching is continuous?
# <details><summary>Answer</summary>The gap between its tokens: it shares steps with more others, and in v0 it waits while they are admitted.</details>
#
# 2. A request of 33 tokens, blocks of 16. How many places are wasted?
# <details><summary>Answer</summary>15: three blocks, of which the last holds one token.</details>
#
# 3. Why does no block table name block 0?
# <details><summary>Answer</summary>It is the null block: padding may point to it, and no request ever owns it.</details>
#
# 4. Who is preempted, and who comes back first?
# <details><summary>Answer</summary>The one admitted last; and it goes to the front of the queue.</details>
#
# 5. Would it help to admit only as many as can surely finish?
# <details><summary>Answer</summary>It ends preemption, and is the old reservation again: most requests need far less than the most they may.</details>
#
# 6. The pool is full and nobody is waiting. Does that slow anybody down, as long as nobody needs another block?
# <details><summary>Answer</summary>No. But the next block that is needed costs somebody a preemption.</details>

# %% [markdown]
# ## Exercise
#
# How many tokens of memory do the 48 chats need so that nobody is preempted? Find the smallest multiple of 256. (All of them run at once. When is the pool fullest: when the short answers end, or later?)

# %%
my_memory = None  # for example 12 * 1024

preemptions = {}
for tokens in range(8 * 1024, 12 * 1024, 256):
    run = rehearse(STAGES["v0"], chats, block_size=16, num_blocks=1 + tokens // 16, **budget).run
    preemptions[tokens] = run.num_preemptions
enough = min(tokens for tokens, count in preemptions.items() if not count)
assert my_memory in (None, enough), f"{my_memory} tokens: {preemptions.get(my_memory)} preemptions, or not the smallest"

# %% [markdown]
# ### Solution
#
# <details><summary>Show</summary>All have their prompts in at the start, and grow together until the shortest answers end after 60 steps: that is the fullest moment, 630 blocks, or 10,080 tokens. The next multiple of 256 is 10,240.</details>

# %%
assert enough == 10_240
peak = max(paged.records, key=lambda record: record.num_used_blocks)
assert peak.num_used_blocks == 630 and enough - 256 < 630 * 16 <= enough
assert -33 % 16 == 15  # question 2

# %% [markdown]
# ## In vLLM, look at
#
# - `vllm/core/block_manager.py` and `vllm/core/scheduler.py` of 0.8.5: `can_append_slots`, `_preempt_by_recompute`, `_preempt_by_swap`.
# - `vllm/v1/worker/block_table.py`: block tables, and `compute_slot_mapping`.
# - `gpu_memory_utilization`, `block_size`, `max_num_seqs`, and the counter `vllm:num_preemptions`: if it grows, give the pool more memory or admit fewer.
#
# Next: **02, the long prompt**: what admission in a step of its own does to everybody else.
