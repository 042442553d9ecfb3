# title: Chunked prefill
# question: How can a long prompt be read without anybody waiting for it?
# minutes: 35
# seams: scheduler
# needs: lesson 02

# %% [markdown] slide
# # How can a long prompt be read without anybody waiting for it?
#
# Lesson 02 ended with one flipped field and a freeze of 508 ms that shrank to 23. This lesson reads the policy that did it, turns its knob, and shows what the knob costs. Its idea fits into a sentence: *there are no phases; everybody is some tokens behind, and each step lets everybody catch up within one budget.*
#
# About 35 minutes. Seam: `scheduler`. No GPU needed.

# %% [markdown] slide
# ## Predict
#
# The load is that of lesson 02: eight streams, four prompts of 16,384 tokens, steps of 8 ms plus 30 µs a token. Suppose that a prompt may be cut into pieces of 512 tokens.
#
# 1. If a step still holds *either* prompts *or* decodes, how long is the longest gap of a stream?
# 2. If a piece of a prompt and the decodes may share a step?
# 3. What happens to the time to first token (TTFT) of the long prompt?
# 4. Is a smaller piece always better for the streams?

# %%
from dataclasses import replace
from itertools import pairwise

from nanoserve.config import STAGES
from nanoserve.lab.charts import step_timeline
from nanoserve.lab.lesson_charts import KnobPoint, chunk_tradeoff, itl_strip
from nanoserve.lab.rehearsal import rehearse
from nanoserve.lab.scenarios import SCENARIOS
from nanoserve.lab.show import show_diff, show_figure, show_source
from nanoserve.lab.widgets import chunk_slider
from nanoserve.scheduler import ChunkedNoMixScheduler, UnifiedScheduler

# %% [markdown] slide
# ## Chunking alone does not help
#
# The obvious repair is to cut the prompt and change nothing else. `ChunkedNoMixScheduler` does that; several small engines do it today. It exists here only for this cell.

# %% slide
# NBVAL_CHECK_OUTPUT
load = SCENARIOS["long-prompt"].build(0)
no_mix = replace(STAGES["v0"], scheduler=ChunkedNoMixScheduler)
v0 = rehearse(STAGES["v0"], load, max_num_batched_tokens=16_384)
cut = rehearse(no_mix, load, max_num_batched_tokens=512)
for name, result in {"whole prompts": v0, "cut, not mixed": cut}.items():
    print(f"{name:<16} longest gap {result.run.itl_us('stream').max / 1000:6.1f} ms, {result.run.num_steps} steps")

# %% [markdown] slide
# It got worse. The streams wait for all 32 pieces, since prompts still go first, and each piece pays the fixed 8 ms of a step. Where the prompt ends does not matter to somebody who has to wait for its end.

# %%
chunks = [record for record in cut.records if "long-0" in record.num_scheduled_tokens][:32]
assert [record.num_scheduled_tokens["long-0"] for record in chunks] == [512] * 32
assert all(set(record.num_scheduled_tokens) == {"long-0"} for record in chunks)
assert cut.run.itl_us("stream").max > v0.run.itl_us("stream").max

# %% [markdown] slide
# ## Mix: the policy without phases
#
# Now let a step hold both. Here is v1's policy, whole. A decode is not a special case: it is a request that is one token behind (`num_behind == 1`). A long prompt is one that is thousands behind.

# %% slide
show_source(UnifiedScheduler, "schedule")

# %% [markdown] slide
# What to see:
#
# - The first loop goes over the **running** requests, in order of admission. Streams were there before the long prompt, so each gets its one token first.
# - `n = min(n, draft.budget)`: whoever comes last gets what is left of the budget. That is all there is to chunking. (`long_prefill_token_threshold`, off by default, is a second limit: no prompt gets more than that in a step while others are there.) With `n == 0`, when all its tokens are in flight (lesson 08), a request is passed over.
# - `_grow` gets the blocks for `n` tokens; if none are free, it preempts from the end of `running`, at last the request itself.
# - The second loop admits **waiting** requests with what is left, unless somebody was just preempted. `_admit` preempts nobody: if the blocks of the whole prompt are not free (and a few more, the *watermark*, where one is set), the loop ends.
#
# The whole trick, as a toy:

# %% slide
# NBVAL_CHECK_OUTPUT
behind = {"stream-0": 1, "stream-1": 1, "stream-2": 1, "long": 1200}  # tokens that are known and not computed
for step in range(1, 4):
    budget, plan = 512, {}
    for request, n in behind.items():
        plan[request] = min(n, budget)
        budget -= plan[request]
    behind = {r: 1 if n == plan[r] else n - plan[r] for r, n in behind.items()}  # caught up: one new token is known
    print(step, plan)
assert sum(plan.values()) <= 512

# %% [markdown]
# And beside the policy of lesson 02:

# %% slide
show_diff(STAGES["v0"].scheduler, UnifiedScheduler, "schedule")

# %% [markdown] slide
# On the left an `if`: a step of prompts, or a step of decodes. On the right both loops run in every step, and each takes from one budget; they differ in who gives way when blocks run out. Nothing below the scheduler knows which is which: a plan is `{request: tokens}`, and the attention kernel takes any mix of lengths in one call. That kernel is what makes the mix possible at all (lesson 07).
#
# ## Flip one field

# %% slide
# NBVAL_CHECK_OUTPUT
mixed = rehearse(replace(no_mix, scheduler=UnifiedScheduler), load, max_num_batched_tokens=512)
gaps = mixed.run.itl_us("stream")
print(f"longest gap {gaps.max / 1000:.2f} ms, P50 {gaps.p50 / 1000:.2f} ms, {mixed.run.num_steps} steps")
assert gaps.max == 8_000 + 30 * 512

# %% slide
runs = {"v0": v0.records, "cut, not mixed": cut.records, "chunked": mixed.records}
show_figure(itl_strip(runs, load.groups, "stream", v0.setting))

# %% [markdown] slide
# The longest gap is now the length of the fullest step: 8 ms and 512 tokens. It does not depend on the prompt any more: prompts twice as long give the same 23.36 ms. In the timeline, the long prompt's lane turned from one wide cell into many narrow ones, and no stream is grey.

# %% slide
show_figure(step_timeline({"v0": v0.records, "chunked": mixed.records}, v0.setting))

# %%
shared = next(record for record in mixed.records if "long-0" in record.num_scheduled_tokens)
assert shared.num_scheduled_tokens["long-0"] == 512 - 8 and len(shared.num_scheduled_tokens) == 9
twice = [replace(a, prompt_token_ids=list(a.prompt_token_ids) * 2) for a in load.arrivals]
longer = rehearse(STAGES["chunked"], replace(load, arrivals=twice), max_num_batched_tokens=512)
assert longer.run.itl_us("stream").max == 23_360
for record in mixed.records:
    assert not any(reason.code == "paused" for reason in record.left_out.values())
refused = ""
try:
    replace(STAGES["chunked"], max_num_seqs=300, max_num_batched_tokens=256).resolve(
        model_len=16_384, pool_blocks=2_000, device="cpu"
    )
except ValueError as error:
    refused = str(error)
assert "max_num_seqs" in refused  # question 4

# %% [markdown] slide
# ## The knob
#
# The chunk size is not a field of its own: it is `max_num_batched_tokens`, less the decodes. (So the budget must be at least `max_num_seqs`, or some running request would get no token; the engine refuses less.) Turn it from 128 to 8,192:

# %% slide
# NBVAL_CHECK_OUTPUT
points = {}
for budget in (128, 256, 512, 1024, 2048, 4096, 8192):
    run = rehearse(STAGES["chunked"], load, max_num_batched_tokens=budget).run
    gaps, ttft = run.itl_us("stream"), run.ttft_us("long")
    points[budget] = KnobPoint(gaps.p50 / 1000, gaps.max / 1000, ttft.p50 / 1000)
    print(f"{budget:>5}: longest gap {gaps.max / 1000:6.1f} ms, P50 {gaps.p50 / 1000:5.1f} ms, "
          f"TTFT of the long prompts {ttft.p50 / 1000:7.1f} ms, {run.num_steps} steps")  # fmt: skip

# %% slide
show_figure(chunk_tradeoff(points, v0.setting))

# %% [markdown] slide
# - **To the left** the longest gap shrinks, and the long prompt waits: every piece pays the fixed cost of a step again. At 128 and 256 a prompt needs longer than the 800 ms until the next one arrives, so they queue up: TTFT is 2.4 and 1.3 s.
# - **To the right** the freeze comes back, though never as long as in v0 unless the budget holds the whole prompt.
# - **In the middle** look at P50. At 512 *most* gaps are 23 ms, since a prompt is being read most of the time; at 2,048 most gaps are 8 ms and a few are 69. Which is better? That depends on what you promised: a steady stream or a fast one.

# %%
# In JupyterLab: move the slider, or click on it and use the arrow keys. Each position is a run of its own.
chunk_slider(load)

# %%
assert all(p.itl_max_ms < v0.run.itl_us("stream").max / 1000 for p in points.values())
assert all(a.itl_max_ms < b.itl_max_ms and a.ttft_ms > b.ttft_ms for a, b in pairwise(points.values()))
assert points[128].ttft_ms > 2000 and points[256].ttft_ms > 1200 > 800 > points[512].ttft_ms
assert points[512].itl_p50_ms > 2 * points[2048].itl_p50_ms and round(points[2048].itl_max_ms) == 69
whole = rehearse(STAGES["chunked"], load, max_num_batched_tokens=16_384 + 8).run
assert whole.itl_us("stream").max > 499_520  # a budget that holds the whole prompt
queue = rehearse(STAGES["chunked"], load, max_num_batched_tokens=128).records
for record in queue:  # question 5: a second prompt gets something only where the first one ends
    chunks = [i for i, n in record.num_scheduled_tokens.items() if i.startswith("long") and n > 1]
    assert len(chunks) < 2 or record.sampled[chunks[0]]

# %% [markdown] slide
# ## What it costs, on a large GPU
#
# A fixed 8 ms is a slow host, or a small model on a CPU. A large GPU has a floor of another kind. Its memory must deliver all weights once in a step, however few tokens there are; its arithmetic takes time for each token. A **roofline** takes the longer of the two, and the **knee** is the number of tokens at which they are equal. Below it a step costs the same with one token or with all of them.
#
# Take a 70B model in fp8 on 8 × H100, every layer cut into eight, one part a GPU (`tp=8`, tensor parallelism). Reading the weights takes 3.3 ms, and up to about 220 tokens ride along for nothing:

# %% slide
# NBVAL_CHECK_OUTPUT
from nanoserve.lab.costs import Roofline, StepLoad
from nanoserve.lab.gpus import Memory, get_gpu, get_model

h100s = Roofline(Memory(model=get_model("llama-3-70b"), gpu=get_gpu("h100"), tp=8, dtype="fp8"))
print(f"tokens that cost no more than reading the weights: {h100s.knee_tokens:.0f}")
big = {}
for name, config, budget in (("v0", STAGES["v0"], 16_384), ("chunked", STAGES["chunked"], 512)):
    big[name] = rehearse(config, load, h100s, max_num_batched_tokens=budget).run
    print(f"{name:<8} longest gap {big[name].itl_us('stream').max / 1000:5.1f} ms, TTFT "
          f"{big[name].ttft_us('long').p50 / 1000:.0f} ms, GPU busy {big[name].busy_us / 1e6:.2f} s")  # fmt: skip

# %% [markdown] slide
# The freeze goes from 284 to 10 ms, the TTFT stays, and the GPU has *less* to do: 5 % here. That is the original argument for mixing: decodes leave the arithmetic units idle, a chunk of prompt fills them. The roofline leaves out what the host adds to each step; the `linear` costs above show what that does.

# %%
assert (
    round(h100s.step_us(StepLoad(num_tokens=1, num_requests=1)) / 1000, 1) == 3.3
    and round(h100s.knee_tokens, -1) == 220
)
assert big["chunked"].itl_us("stream").max < 10_000 and big["v0"].itl_us("stream").max > 280_000
assert big["chunked"].busy_us < 0.96 * big["v0"].busy_us
assert abs(big["chunked"].ttft_us("long").p50 / big["v0"].ttft_us("long").p50 - 1) < 0.01

# %% [markdown]
# ## The same on this machine
#
# A real model, a real clock, one long prompt among a few streams. Times vary; that the *tokens* are the same does not. Whatever shares a step, greedy answers stay equal, to the last token: in float32, as on a CPU here. In 16 bits (`is_exact` is False) a sum in another order can decide between two tokens that are as good as equal.

# %% slide
from nanoserve.lab.climb import run_once
from nanoserve.lab.metrics import request_times
from nanoserve.lab.scale import scale

here = scale()
small = here.long_prompt()
chunked = replace(STAGES["chunked"], max_num_batched_tokens=here.chunk)
measured = {
    stage: run_once(here.fit(config), small)[0] for stage, config in {"v0": STAGES["v0"], "chunked": chunked}.items()
}
answers = [{r.id: r.token_ids for r in request_times(records).values()} for records in measured.values()]
assert answers[0] == answers[1] or not here.is_exact
show_figure(itl_strip(measured, small.groups, "stream", here.setting(small)))

# %% [markdown] slide
# ## Honest history
#
# - **Chunking is older than v1.** The name and the mix are SARATHI's (Agrawal et al., 2023; Sarathi-Serve, OSDI 2024, with "stall-free" batches). Iteration-level scheduling, which it builds on, is Orca's (OSDI 2022). DeepSpeed-FastGen's SplitFuse is a sibling.
# - **v0 had it**, as an option (`_schedule_chunked_prefill`), beside the phase-split path. v1 made it the only path and took the phases out of the code. Less code is part of the gain.
# - **The sizes are not SARATHI's.** The papers' chunks are 256 to 512. vLLM v1's default budgets are 2,048 to 16,384 tokens a step, by use and GPU: the right side of the chart, since modern GPUs need more tokens to be busy, and throughput pays the bills. If your streams stutter, this is the first number to lower.

# %% [markdown] slide
# ## Questions
#
# 1. Why is `ChunkedNoMixScheduler` *worse* than v0 for the streams?
# <details><summary>Answer</summary>They wait for all pieces, and each piece pays a step's fixed cost.</details>
#
# 2. What bounds the longest gap of a stream under the unified policy?
# <details><summary>Answer</summary>The longest step: the budget bounds its tokens. It is only missed if the stream is preempted.</details>
#
# 3. Which line does the chunking?
# <details><summary>Answer</summary><code>n = min(n, draft.budget)</code>.</details>
#
# 4. What happens with <code>max_num_seqs=300</code> and a budget of 256?
# <details><summary>Answer</summary>The engine refuses to start: a step must hold a token of every running request, so the budget must be at least <code>max_num_seqs</code>.</details>
#
# 5. A second long prompt arrives while the first is being read. Who gets the budget?
# <details><summary>Answer</summary>The first takes all that the streams leave; the second waits for its last piece. <code>long_prefill_token_threshold</code> changes that.</details>
#
# 6. Why does the TTFT stay on the H100s, but grow with the linear costs?
# <details><summary>Answer</summary>There a chunk of 512 is far above the 220 tokens at which arithmetic takes over, so pieces cost in proportion. With 8 ms a step, each piece pays extra.</details>

# %% [markdown]
# ## Exercise
#
# Your promise: no gap over 50 ms, and the long prompts' median TTFT below 700 ms. Find all powers of two that keep it on this load.

# %%
my_budgets = []  # for example [256, 512]

kept = [budget for budget, p in points.items() if p.itl_max_ms <= 50 and p.ttft_ms < 700]
assert not my_budgets or my_budgets == kept, f"not {my_budgets}: look at the table again"

# %% [markdown]
# ### Solution
#
# <details><summary>Show</summary>Only 1,024: at 512 the TTFT is 767 ms, at 2,048 a gap is 69 ms. That one value is left shows how tight such a promise is.</details>

# %%
assert kept == [1024]

# %% [markdown]
# ## In vLLM, look at
#
# - `vllm/v1/core/sched/scheduler.py`, `schedule`: the same two loops, with speculative decoding, encoders and connectors in between.
# - `vllm/config/scheduler.py`: `max_num_batched_tokens`, `long_prefill_token_threshold`; the defaults by use are in `vllm/engine/arg_utils.py`.
# - `vllm/core/scheduler.py` of 0.8.5: the option that v0 had.
