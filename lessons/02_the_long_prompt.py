# title: The long prompt
# question: Why does one long prompt freeze everyone?
# minutes: 30
# seams: scheduler
# needs: lesson 01, or knowing what a KV cache and continuous batching are

# %% [markdown] slide
# # Why does one long prompt freeze everyone?
#
# Your chat service answers at a steady 120 tokens a second per user. Then somebody pastes a contract of 16,000 tokens, and for half a second all *others* get nothing. This lesson finds the line of code that does it, and why your dashboard may not show it.
#
# About 30 minutes. Seam: `scheduler`. No GPU needed.

# %% [markdown] slide
# ## Predict
#
# Eight users are being streamed to. Every 0.8 s a request with a 16,384-token prompt arrives, four in all. A step of the engine takes 8 ms, plus 30 µs for each token in it. Write down, before you run:
#
# 1. The usual gap between two tokens of a user, in ms.
# 2. The longest gap.
# 3. How many of each user's 199 gaps are long ones.
# 4. Whether a P99 over all gaps of all users would show it.

# %%
from dataclasses import replace

from nanoserve.config import STAGES
from nanoserve.lab.charts import step_timeline
from nanoserve.lab.lesson_charts import itl_strip
from nanoserve.lab.rehearsal import rehearse
from nanoserve.lab.scenarios import SCENARIOS
from nanoserve.lab.show import show_diff, show_figure, show_source
from nanoserve.lab.widgets import stage_toggle

# %% [markdown] slide
# ## Run the old stage
#
# `rehearse` runs the real core, scheduler and block manager. Only the model and the clock are replaced: a cost model says how long a step takes, and a virtual clock moves by that. So the figures are exact, and the same on your machine. A measured run follows.
#
# Stage `v0` is vLLM as it was up to 0.8, with its defaults.

# %% slide
# NBVAL_CHECK_OUTPUT
load = SCENARIOS["long-prompt"].build(0)
v0 = rehearse(STAGES["v0"], load, max_num_batched_tokens=16_384)
gaps = v0.run.itl_us("stream")
print(f"{gaps.count} gaps: P50 {gaps.p50 / 1000:.2f} ms, P99 {gaps.p99 / 1000:.2f} ms, max {gaps.max / 1000:.2f} ms")
assert gaps.p50 == 8_000 + 8 * 30
assert gaps.max > 60 * gaps.p50 and gaps.p99 == gaps.max and gaps.count == 8 * 199
assert 1e6 / gaps.p50 > 120  # tokens a second

# %% [markdown]
# Usually 8.24 ms: 8 ms and eight tokens at 30 µs. But the longest gap is over half a second, sixty times that.
#
# ## See it
#
# Each dot is one gap (inter-token latency, ITL) of one user: 1,560 on the left, which look like one block, and 32 on the right. Note the logarithmic axis: between them there is nothing.

# %% slide
show_figure(itl_strip({"v0": v0.records}, load.groups, "stream", v0.setting))

# %% [markdown]
# The same run, a lane for each request and a cell for each step. In a wide cell one lane works, and eight are grey: they wait.

# %% slide
show_figure(step_timeline({"v0": v0.records}, v0.setting))

# %% [markdown] slide
# ## Why: a step is prompts, or it is decodes
#
# An engine has two kinds of work. **Prefill** computes a whole prompt, thousands of tokens in one go. **Decode** computes one new token for each running request. The v0 scheduler never puts both into one step. Here is its policy, whole (a `Draft` is a step being decided, `_seal` makes the plan of it):

# %% slide
show_source(STAGES["v0"].scheduler, "schedule")

# %% [markdown]
# Read the two branches. First `_prefill`: take waiting prompts, whole, as many as the budget holds. If that gave anybody tokens, the step is done, and those who were running are left out with the reason `paused`. Only when no prompt could be taken does `_decode_everyone` run.
#
# Is that what happened? Look at who shared the step of the first long prompt; the loop checks that *every* step of the run is of one kind.

# %% slide
# NBVAL_CHECK_OUTPUT
frozen = next(record for record in v0.records if "long-0" in record.num_scheduled_tokens)
print("step", frozen.step, "computes", frozen.num_scheduled_tokens)
print("stream-3 got nothing:", frozen.left_out["stream-3"])
assert set(frozen.num_scheduled_tokens) == {"long-0"}
for record in v0.records:
    biggest = max(record.num_scheduled_tokens.values())
    is_prefill = all(request_id in record.hit_tokens for request_id in record.num_scheduled_tokens)
    assert is_prefill or biggest == 1, f"step {record.step} mixes prompts and decodes"

# %% [markdown] slide
# This is **head-of-line blocking**: the work at the head of the line is big, and all others stand behind it. The freeze follows from arithmetic. A user waits for the prompt's step *and* for the decode step after it, which now has nine requests:

# %%
prompt_step_us = 8_000 + 30 * 16_384
decode_step_us = 8_000 + 30 * 9
assert gaps.max == prompt_step_us + decode_step_us == 507_790
counts = v0.run.members("stream")[0].gaps  # of all eight: gap in µs -> how often
assert sum(n for gap_us, n in counts.items() if gap_us > 100_000) == 8 * 4
assert sum(n for gap_us, n in counts.items() if gap_us < 9_000) == 8 * 195 == 1_560  # and nothing between

# %% [markdown] slide
# Why would anyone schedule like that? Because it is simple and keeps a GPU busy: the batch grows fast, and the first token of the *new* request comes as early as it can. The bill goes to those who are already being served.
#
# ## P99 says nothing about it
#
# Above, P99 equals the maximum, since one gap in 50 is long (four of 199). Now a service under more ordinary conditions: 32 users with answers of 1,500 tokens, and *once* three prompts of 16,000 tokens at the same moment.

# %% slide
# NBVAL_CHECK_OUTPUT
burst = SCENARIOS["burst"].build(0)
v0_burst = rehearse(STAGES["v0"], burst, max_num_batched_tokens=16_384)
gaps = v0_burst.run.itl_us("stream")
print(f"{gaps.count} gaps: P50 {gaps.p50 / 1000:.2f} ms, P99 {gaps.p99 / 1000:.2f} ms, max {gaps.max / 1000:.0f} ms")

# %% slide
streams = v0_burst.run.members("stream")
assert gaps.p99 == gaps.p50
assert all(user.worst_gap_us > 1_400_000 for user in streams)
assert len(streams) / gaps.count < 1 / 1000 and gaps.count == 32 * 1499
steps = [record.step for record in v0_burst.records if any("long" in i for i in record.hit_tokens)]
assert steps == [steps[0], steps[0] + 1, steps[0] + 2]  # no decode between them
show_figure(itl_strip({"v0": v0_burst.records}, burst.groups, "stream", v0_burst.setting))

# %% [markdown] slide
# P99 is the median. The maximum is 1.5 seconds, and *every* one of the 32 users saw it: the three prompts do not fit into one step, so three long steps follow each other with no decode between them. Each user has 1,499 gaps and one freeze, so fewer than one gap in a thousand is bad; P99 looks at the worst one in a hundred.
#
# It gets worse with the mean. *Time per output token*, the mean gap of a request, is on most dashboards:

# %%
# NBVAL_CHECK_OUTPUT
user = streams[0]
tpot_ms = (user.last_us - user.first_us) / (user.num_tokens - 1) / 1000
print(f"TPOT {tpot_ms:.1f} ms, longest gap {user.worst_gap_us / 1000:.0f} ms")
assert tpot_ms < 11

# %% [markdown]
# **Rule for your own dashboards:** always plot the maximum next to P99, per request (the worst gap of each user), not only over all gaps.
#
# ## The same on this machine
#
# Now with a real model and clock, at a size that fits (`scale()` decides): the embedded model on a CPU, a larger one on a GPU. Times differ from run to run, so the cell checks what does not: the long prompt has a step to itself, and everybody is left out of the long prompt's step.

# %% slide
from nanoserve.lab.climb import run_once
from nanoserve.lab.scale import scale

here = scale()
small = here.long_prompt()
measured, _ = run_once(here.fit(STAGES["v0"]), small)
[step] = [record for record in measured if "long-0" in record.hit_tokens]
assert set(step.num_scheduled_tokens) == {"long-0"}
assert len(step.left_out) == here.num_streams
show_figure(itl_strip({"v0": measured}, small.groups, "stream", here.setting(small)))

# %% [markdown]
# ## Knobs that do not help
#
# Priorities order who waits; streams run, so they gain nothing. The next idea is to lower `max_num_batched_tokens`, the token budget of a step. The phase-split scheduler does not cut prompts, so a prompt above the budget would never run; the engine refuses to start:

# %%
# NBVAL_CHECK_OUTPUT
try:
    replace(STAGES["v0"], max_num_batched_tokens=512).resolve(model_len=16_384, pool_blocks=2_000, device="cpu")
except ValueError as error:
    print(error)

# %% [markdown] slide
# ## What operators did
#
# Three workarounds: refuse long prompts, give them replicas of their own, or buy more replicas. All on the same traffic, in a simulation of a 70B model on 8 × H100 in fp8: mostly short requests, one in twenty with 6,000 to 14,000 tokens. A good answer has its first token within 2 s and no gap over 200 ms; the goal is 99 % good answers.

# %% slide
# NBVAL_CHECK_OUTPUT
from nanoserve.lab.costs import Roofline
from nanoserve.lab.gpus import Memory, get_gpu, get_model
from nanoserve.lab.studies import Setup, length_classes

memory = Memory(model=get_model("llama-3-70b"), gpu=get_gpu("h100"), tp=8, dtype="fp8")
setup = Setup(costs=Roofline(memory), num_blocks=memory.num_blocks)
study = length_classes(setup, replicas=2, rate=12.0, until_s=10.0)
for row in study.rows:
    gap_ms = row["short_gap_p99"] / 1000
    print(f"{row['way']:<26}{row['replicas']} replicas, held: {row['held']:<10} P99 of the short ones' gaps {gap_ms:4.0f} ms, "
          f"requests at a time {row['emptiest']} to {row['fullest']}")  # fmt: skip

# %% [markdown] slide
# Refusing long prompts fails those who sent one. Twice the replicas only makes it rarer to be on the same one. Splitting by length holds the goal here; its price is in the last column: one replica is crowded, the other nearly idle. The last row is the next lesson's.

# %%
ways = {row["way"]: row for row in study.rows}
assert ways["v0, one pool"]["met"] < 0.99 and ways["v0, twice the replicas"]["met"] < 0.99
assert ways["v0, prompts under 6000"]["refused"] > 0.04
split = ways["v0, split by length"]
assert split["held"] == "yes" and split["fullest"] > 5 * split["emptiest"]
assert ways["v1, one pool"]["held"] == "yes" and ways["v1, one pool"]["replicas"] == 2

# %% [markdown] slide
# ## Flip one field
#
# One field of the config names the policy. The same load, the same engine otherwise, with a budget of 512 tokens a step:

# %% slide
chunked = rehearse(STAGES["chunked"], load, max_num_batched_tokens=512)
before, after = v0.run, chunked.run
assert after.itl_us("stream").max == after.itl_us("stream").p50 == 23_360
assert after.ttft_us("long").p50 > 1.5 * before.ttft_us("long").p50
runs = {"v0": v0.records, "chunked": chunked.records}
show_figure(itl_strip(runs, load.groups, "stream", v0.setting))

# %%
# In JupyterLab: switch between the two.
v1 = rehearse(STAGES["v1"], load, max_num_batched_tokens=512)
stage_toggle({"v0": v0, "v1": v1})

# %% [markdown] slide
# The freeze is gone: the longest gap falls from 508 to 23 ms. It is not free: the *usual* gap grows from 8 to 23 ms, since everybody's step now carries a piece of a prompt, and the first token of a long prompt comes later. Here are the two policies beside each other; lesson 03 reads the right one line by line.

# %% slide
show_diff(STAGES["v0"].scheduler, STAGES["chunked"].scheduler, "schedule")

# %% [markdown] slide
# ## Honest history
#
# - **v0 could chunk.** `--enable-chunked-prefill` was there, off by default for most models, and later versions switched it on by themselves for most models with a context of more than 32K. What v1 changed is that there is no other way, and that the code has no phases any more.
# - **Half a second is a big-prompt story.** A prompt of 16k tokens takes about 280 ms on a 70B model with 8 × H100 in fp8, twice that in bf16; on an 8B model far less. With prompts of 1,000 tokens the freeze is a hiccup.
# - **Not every freeze is a prefill.** Preemption, a busy front end (lesson 04) or a garbage collection look the same in a chart of gaps. Look at the step.

# %%
# NBVAL_CHECK_OUTPUT
from nanoserve.lab.costs import StepLoad, attention_of

step_load = StepLoad(num_tokens=16_384, num_requests=1, context=16_384, attention=attention_of(0, 16_384))
for dtype in ("fp8", "bf16"):
    step_us = Roofline(replace(memory, dtype=dtype)).step_us(step_load)
    print(f"16,384 tokens in one step, 70B on 8 x H100, {dtype}: {step_us / 1000:.0f} ms")
assert Roofline(Memory(model=get_model("llama-3-8b"), gpu=get_gpu("h100"), tp=8)).step_us(step_load) < step_us / 5

# %% [markdown] slide
# ## Questions
#
# 1. A user is being streamed to when two prompts of 16,384 tokens arrive at once, the budget is 16,384. How long is the gap, with the costs above?
# <details><summary>Answer</summary>Two prompt steps and a decode step: 2 × 499.52 + 8.3 ms, over a second. They do not fit into one step, and prompts go first each time.</details>
#
# 2. Why does the request with the long prompt itself not complain?
# <details><summary>Answer</summary>Its prompt is computed at once, undisturbed: its TTFT is as good as it gets. The cost falls on others.</details>
#
# 3. P99 of all gaps is 9 ms. Can a user have seen a freeze of 1.5 s?
# <details><summary>Answer</summary>Yes, every user can: one bad gap in 1,499 is below one in a hundred.</details>
#
# 4. Would priorities help, with streams more urgent than long prompts?
# <details><summary>Answer</summary>No. A priority orders the waiting queue. Streams are not in it: they run, and a step with a prompt leaves them out.</details>
#
# 5. Which reason does the trace give for a stream that got nothing?
# <details><summary>Answer</summary><code>paused</code>, with the id of the request whose prefill it waits for.</details>
#
# ## Exercise
#
# Predict the longest gap when the prompts are 4,096 tokens long and three arrive at the same moment, all within one budget of 16,384. Put your number in and run the cell. Then change `4_096` to 8,192 and explain the new number (hint: how many steps is it now?).

# %%
my_prediction_ms = None

arrivals = [replace(a, prompt_token_ids=list(a.prompt_token_ids)[:4_096]) for a in burst.arrivals]
run = rehearse(STAGES["v0"], replace(burst, arrivals=arrivals), max_num_batched_tokens=16_384).run
answer_ms = run.itl_us("stream").max / 1000
if my_prediction_ms is not None:
    assert abs(my_prediction_ms - answer_ms) < 1, f"you said {my_prediction_ms}, the engine {answer_ms:.2f} ms"

# %% [markdown]
# ### Solution
#
# <details><summary>Show</summary>One step with all three: 8 + 0.03 × 3 × 4,096 = 376.64 ms, then a decode step of 35 requests: 9.05 ms. Together 385.69 ms. With 8,192 tokens only two fit into a step, and the third makes another: 8 + 0.03 × 16,384, then 8 + 0.03 × 8,192, then the decode step.</details>

# %%
assert answer_ms == 8 + 0.03 * 3 * 4_096 + 8 + 0.03 * 35
few = [a for a in load.arrivals if a.group == "stream"] + [
    replace(a, at_s=0.1) for a in load.arrivals if a.id < "long-2"
]
run = rehearse(STAGES["v0"], replace(load, arrivals=few), max_num_batched_tokens=16_384).run
assert run.itl_us("stream").max == 2 * 499_520 + 8_300  # question 1

# %% [markdown]
# ## In vLLM, look at
#
# - `vllm/core/scheduler.py` of 0.8.5: `_schedule_default` is the phase split, `_schedule_chunked_prefill` the opt-in other one.
# - `vllm/v1/core/sched/scheduler.py`: `schedule`, whose opening comment says that there is no prefill phase and no decode phase.
# - `vllm:inter_token_latency_seconds` among the metrics of a server: a histogram, so look at its last buckets.
#
# Exercise 01 (`nanoserve check 1`) has you write v0's policy. Next: **03, chunked prefill**.
