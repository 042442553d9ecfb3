# title: A tour
# question: What happens between a prompt and its answer?
# minutes: 25
# seams: all of them, from afar
# needs: Python, and having called a language model from it

# %% [markdown] slide
# # What happens between a prompt and its answer?
#
# You send a text and get a text. In between, a serving engine takes one request through ten hops, together with everybody else's. This lesson follows one request, looks at each hop, and shows which of them vLLM's second engine, v1, changed.
#
# About 25 minutes. No GPU needed: a model of 1.25 million parameters comes with the package and tells children's stories.

# %% [markdown] slide
# ## Predict
#
# A prompt of ten tokens is answered with 24 tokens.
#
# 1. How often does the model run?
# 2. How many tokens go into the model in the first run? In the second?
# 3. How many tokens have keys and values in the cache at the end: 34, or another number?
# 4. Five stages of the engine, from v0 to v1, answer the same prompt. Do their answers differ?

# %%
from dataclasses import replace

from nanoserve import LLM, SamplingParams
from nanoserve.client import InProcessClient
from nanoserve.config import STAGES
from nanoserve.lab.charts import Setting, step_timeline
from nanoserve.lab.metrics import request_times
from nanoserve.lab.show import show_diff, show_figure, show_source
from nanoserve.record import ListRecorder

# %% [markdown] slide
# ## Run the old stage
#
# `LLM` and `SamplingParams` are named as vLLM names them. `stage="v0"` is an engine as vLLM was up to 0.8; `observer` gets a record of every step. Temperature 0 means: always the most likely token.

# %% slide
# NBVAL_CHECK_OUTPUT
prompt = "Once upon a time, there was a little dog"
params = SamplingParams(temperature=0.0, max_tokens=24)
recorder = ListRecorder()
with LLM(stage="v0", device="cpu", observer=recorder) as llm:
    [output] = llm.generate(prompt, params)
    tokenizer, info = llm.get_tokenizer(), llm.info
print(output.outputs[0].text)

# %% [markdown] slide
# ## Hops 1 to 3: from text to a request
#
# 1. A server checks the request (here `LLM` does).
# 2. The tokenizer turns text into numbers.
# 3. A *client* hands them to the engine: tokens only, and plain data, so that the engine may live in another process.

# %% slide
# NBVAL_CHECK_OUTPUT
first, *others = recorder.records
[request] = first.arrivals
print(request.prompt_token_ids, "is", [tokenizer.decode([i]) for i in request.prompt_token_ids])
assert request.prompt_token_ids == tokenizer.encode(prompt)

# %% [markdown] slide
# ## Hops 4 to 9: a step
#
# Everything that the engine does, it does in steps. A step is three verbs: *decide* who gets how many tokens (the scheduler), *run* the model on them (the runner), *take* what it sampled. This is the loop of the whole engine:

# %% slide
from nanoserve.core import EngineCore

show_source(EngineCore, "_step", "_launch")

# %% [markdown]
# **Hop 4**, the scheduler queues the request. **Hop 5**, it decides. The decision is a *plan*: request → number of tokens. Nothing else is said about phases, prompts or answers. What was decided in the first three steps:

# %% slide
# NBVAL_CHECK_OUTPUT
for record in recorder.records[:3]:
    [num_tokens] = record.num_scheduled_tokens.values()
    [token_id] = record.sampled[request.id]
    print(f"step {record.step}: {num_tokens} tokens computed, sampled {token_id} = {tokenizer.decode([token_id])!r}")

# %% [markdown]
# The first step computes the whole prompt (**prefill**), each of the others one token: the one that was sampled before (**decode**). So 24 tokens take 24 steps. The last token that is sampled is never computed: nobody needs what would come after it.

# %%
steps = [record.num_scheduled_tokens[request.id] for record in recorder.records]
assert steps == [10] + [1] * 23
assert sum(steps) == 10 + 24 - 1

# %% [markdown]
# Why can a decode step get by with one token? Because the **KV cache** keeps the keys and values of all before it. It is cut into *blocks* of 16 tokens; a request has a table of blocks, as a process has a table of memory pages. The scheduler asked the block manager for room, and the record says which blocks it gave, and when:

# %% slide
# NBVAL_CHECK_OUTPUT
for record in recorder.records:
    for block_ids in record.new_blocks.values():
        print(f"step {record.step}: block {block_ids}")
assert [record.step for record in recorder.records if record.new_blocks] == [1, 8, 24]

# %% [markdown]
# Step 1 fills ten places of the first block; step 8 computes token 17, which needs a second; step 24 computes token 33, which needs a third.
#
# **Hop 6** turns the plan into tensors. The important one says where each token's key and value go: `slot = block_id * 16 + offset`. **Hop 7** runs the model. In each layer the new keys and values are stored first, then every token attends to those before it, through the table. **Hop 8** picks the next token from the last row's scores. Hop 7 in its plainest form:

# %%
from nanoserve.attention import TorchAttention

show_source(TorchAttention, "store")

# %% [markdown]
# **Hop 9**, `update`, appends the token to the request, and asks whether that was the end. Then its blocks go back:

# %%
# NBVAL_CHECK_OUTPUT
last = recorder.records[-1]
print("finished:", list(last.finished.values()), "blocks still in use:", last.num_used_blocks)
assert last.num_used_blocks == 0

# %% [markdown]
# ## Hop 10: back to text
#
# The tokens leave the engine as plain data, and become text outside of it.

# %%
[story] = request_times(recorder.records).values()
assert story.token_ids == output.outputs[0].token_ids
assert tokenizer.decode(story.token_ids) == output.outputs[0].text

# %% [markdown] slide
# ## Several at once
#
# An engine that serves one request wastes its machine. Here are four, with answers of different lengths. A lane is a request (beside it the id that the engine gave it), a cell a step. Prompts that were there from the start are computed in one step; who finishes leaves the batch, and the others' next step goes on without him: each step is decided anew (*continuous batching*), and if somebody were waiting, he would be in it. v0 has that already. White between two cells is time in which no step runs.

# %% slide
together = ListRecorder()
lengths = [SamplingParams(temperature=0.0, max_tokens=n) for n in (6, 12, 18, 24)]
with LLM(stage="v0", device="cpu", observer=together) as llm:
    answers = llm.generate([prompt] * 4, lengths)
setting = Setting("four stories", info.device, "wall", 0)
show_figure(step_timeline({"v0": together.records}, setting))

# %%
sizes = [len(record.num_scheduled_tokens) for record in together.records]
assert sizes == [4] * 6 + [3] * 6 + [2] * 6 + [1] * 6
assert all(output.outputs[0].text.startswith(answer.outputs[0].text) for answer in answers)

# %% [markdown] slide
# ## Watch one run
#
# Sixteen requests, one every fifth of a second. In JupyterLab the picture follows the run, and a button stops it; elsewhere you see its end. All prompts begin with the same 256 tokens, and stage `shared` keeps those in the same 16 blocks for all (lesson 06). From the top: blocks in use, tokens in each step, gaps between two tokens.

# %% slide
from nanoserve.lab.gpus import get_model
from nanoserve.lab.scale import scale
from nanoserve.lab.widgets_live import live_view
from nanoserve.lab.workload import random_tokens, shared_system_prompt

here = scale()
assert round(get_model("nanostory").num_params / 1e6, 2) == 1.25
load = shared_system_prompt(random_tokens(here.vocab_size), num_requests=16, prefix_len=256, output_tokens=400)
load = replace(load, arrivals=[replace(a, at_s=0.2 * i) for i, a in enumerate(load.arrivals)])
assert len({tuple(a.prompt_token_ids[:256]) for a in load.arrivals}) == 1 and 16 * STAGES["shared"].block_size == 256
live_view(here.fit(STAGES["shared"]), load, here.setting(load))

# %% [markdown] slide
# ## Flip one field
#
# The engine is put together from classes, and its config names them. A stage is the stage before it with a field or two replaced. The rows below are the three architectural shifts from v0 to v1, and with `v1` a fourth stage that makes the host faster. A place where classes can be exchanged in this way is a *seam*; `scheduler` is what decides (hop 5), `client` is hops 3 and 10, `blocks` is where hop 5 gets its room, the last row's fields are hops 6 and 7:

# %% slide
# NBVAL_CHECK_OUTPUT
seams = ("scheduler", "client", "blocks", "runner", "batch", "async_scheduling")
before = STAGES["v0"]
for name, config in STAGES.items():
    moved = {seam: getattr(config, seam) for seam in seams if getattr(config, seam) != getattr(before, seam)}
    print(f"{name:<13}", {seam: getattr(value, "__name__", value) for seam, value in moved.items()})
    before = config

# %% [markdown]
# Each lesson takes one of them. All stages must give the same answer; that is the first law that the engine is tested by. (The client is kept in this process here, so that nothing has to start up.)

# %%
for name, config in STAGES.items():
    with LLM(config=replace(config, client=InProcessClient, device="cpu")) as llm:
        [again] = llm.generate(prompt, params)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids, name

# %% [markdown]
# As a taste, the smallest of the differences: how the front end reaches the engine. On the left a call, on the right a message to another process.

# %% slide
show_diff(InProcessClient, STAGES["multiprocess"].client, "submit")

# %% [markdown] slide
# ## What it costs
#
# Every shift has a price: chunks delay the long prompt, processes cost a message per step, shared blocks have to be hashed, captured graphs take time and memory at the start. Each lesson charts the price beside the gain; `nanoserve ladder` measures all of it on your machine.
#
# ## Honest history
#
# - vLLM is much larger than this: hundreds of thousands of lines, dozens of models, speculation, multi-modal inputs. What is here are the parts that make it what it is, under the same names.
# - The story "v1 is fast because of X" is always too short. Continuous batching and paged blocks, the two best-known ideas, were in v0 from its first day.
# - Much of what v1 switched on was an option in v0. The lessons say so where it is.

# %% [markdown] slide
# ## Questions
#
# 1. Why are only 33 tokens computed for a prompt of 10 and an answer of 24?
# <details><summary>Answer</summary>The last sampled token is not computed: that would only serve to sample a 25th.</details>
#
# 2. What crosses the border between front end and engine?
# <details><summary>Answer</summary>Tokens and plain numbers. Text stays outside, tensors stay inside.</details>
#
# 3. Which hop knows whether a token belongs to a prompt or to an answer?
# <details><summary>Answer</summary>None after the scheduler. A plan says how many tokens, not what kind.</details>
#
# 4. Where does the token at position 20 (the first is at 0) of a request with the block table [1, 7, 3] lie?
# <details><summary>Answer</summary>It is in the second block, offset 4: slot 7 × 16 + 4 = 116.</details>
#
# 5. Four requests run, one finishes. When does its place in the batch help somebody else?
# <details><summary>Answer</summary>In the very next step.</details>

# %% [markdown]
# ## Exercise
#
# Change `max_tokens` to 8 and the block size to 4. In which steps are blocks handed out? Write the list before you run.

# %%
my_steps = None

config = replace(STAGES["v0"], block_size=4, device="cpu")
small = ListRecorder()
with LLM(config=config, observer=small) as llm:
    llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8))
handed_out = [record.step for record in small.records if record.new_blocks]
assert my_steps in (None, handed_out), f"not {my_steps}: which token is the first of a block?"

# %% [markdown]
# ### Solution
#
# <details><summary>Show</summary>The prompt takes three blocks in step 1, with two places left. Step 2 computes token 11, step 3 token 12, step 4 token 13: a block; step 8 token 17: another one. So [1, 4, 8].</details>

# %%
assert handed_out == [1, 4, 8]
assert [1, 7, 3][20 // 16] * 16 + 20 % 16 == 116  # question 4

# %% [markdown]
# ## In vLLM, look at
#
# - `vllm/v1/engine/core.py`: `EngineCore.step`, the same three verbs.
# - `vllm/v1/core/sched/output.py`: `SchedulerOutput`, the plan; `num_scheduled_tokens` is its heart.
# - `vllm/v1/worker/gpu_model_runner.py`: hops 6 to 8, and much more.
#
# On the command line, `nanoserve generate --record run.jsonl` and `nanoserve trace run.jsonl` show a run of your own as an interactive timeline. Next: **01, paged KV and continuous batching**.
