# title: A bug within one step
# question: Who reads KV that was never written?
# minutes: 25
# seams: blocks
# needs: exercises 5 and 6

# %% [markdown]
# # Exercise 10: Who reads KV that was never written?
#
# A block manager with a planted bug. It needs three things in one step: a hash given on a promise, a preemption, and somebody who comes later with the same prompt. Find it in the trace, and write the method right.
#
# About 25 minutes.

# %%
from nanoserve.lab.check import check, show_solution
from nanoserve.lab.check_report import timeline_lines
from nanoserve.lab.faults import run_fault
from nanoserve.lab.planted import NeverForgets
from nanoserve.lab.show import show_source
from nanoserve.request import Request
from nanoserve.scheduler import BaseScheduler

# %% [markdown]
# ## The trace
#
# Blocks of 4 tokens, 8 of them, budget 16, by priority. `big` (30 tokens) runs; `urgent` takes its room in the middle of a step.

# %%
# NBVAL_CHECK_OUTPUT
outcome = run_fault("hash-before-compute")
print(outcome.first)
print(*timeline_lines("request", outcome.records, 3, ["big", "small", "urgent"]), sep="\n")
for record in outcome.records[:3]:
    print(f"step {record.step}: preempted {record.preempted}, hits {record.hit_tokens}")

# %% [markdown]
# A block is hashed when its step is *decided*, so that others of the same step can share it. That is a promise: the step will write its keys and values. A request that is preempted in the very step that gave it tokens breaks the promise. This is what the scheduler does about it:

# %%
show_source(BaseScheduler, "_withdraw")

# %% [markdown]
# ## Your turn
#
# `forget(request, num_computed_tokens)`: the KV from that token on will not be written after all. No later lookup may find it.
#
# - `request.block_ids` is its table; the first `request.num_cached_blocks` of it are hashed.
# - `self._drop_hash(block)` makes a block (`self.pool.blocks[block_id]`) unfindable.
# - What is computed already stays: it can be found when the request comes back.


# %%
class MyForget(NeverForgets):
    def forget(self, request: Request, num_computed_tokens: int) -> None:
        raise NotImplementedError("about 4 lines: drop the hashes of blocks that will not be written")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>Who was given tokens and then preempted in one and the same step, and what is cached of it?</details>
#
# <details><summary>Hint 2: the invariant</summary>Only KV that is written, or is being written by a step that runs, may be found.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# first = the block that token num_computed_tokens is in
# for each block of the table from `first` up to the last hashed one: drop its hash
# num_cached_blocks = at most `first`
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(10, MyForget)

# %%
show_solution(10)

# %% [markdown]
# In vLLM, look at `vllm/v1/core/sched/scheduler.py`: does its priority preemption take the hashes back?
