# title: Graphs and compilation
# question: Why does a fast GPU wait for Python?
# minutes: 40
# seams: runner, batch, compile, async_scheduling
# needs: lesson 03; lesson 07 helps

# %% [markdown] slide
# # Why does a fast GPU wait for Python?
#
# A GPU does nothing by itself: the host, in Python, launches one operation after the other. With thousands of tokens in a step that is nothing; where everybody gets one token, it can be most of the time. This lesson counts the launches, records them once as a **graph**, and pays the price, fixed shapes, with padding. Then it makes the operations fewer, the host's other work less, and hides the rest behind the device.
#
# About 40 minutes. Seams: `runner`, `batch`, `compile`, `async_scheduling`. No GPU needed: on a CPU a graph records calls of compiled C++; sizes, padding and mistakes are those of a GPU.

# %% [markdown] slide
# ## Predict
#
# 1. A model with five layers computes one token of one request. How many operations does the host launch? And one token each of 64 requests?
# 2. To launch takes 5 µs, to run a kernel 2 µs, whichever it is. How busy is the GPU?
# 3. A graph fits one number of tokens. Steps have 1 to 8,192 of them. How many graphs would you record?
# 4. A step of 100 tokens is padded to 104. Whose text do the four others change?

# %%
from dataclasses import replace

import torch

from nanoserve import LLM, SamplingParams
from nanoserve.client import InProcessClient
from nanoserve.config import STAGES
from nanoserve.core import EngineCore
from nanoserve.cpu_graphs import Recording
from nanoserve.graph_runner import GraphRunner
from nanoserve.graphs import Dispatcher, GraphMode, default_sizes
from nanoserve.lab.charts import Setting
from nanoserve.lab.kernel_charts import input_costs, lanes, launch_lanes, operations, padding_chart, replays
from nanoserve.lab.show import show_diff, show_figure, show_source
from nanoserve.ops import TorchOps
from nanoserve.record import ListRecorder
from nanoserve.request import EngineRequest, NewRequest, StepPlan
from nanoserve.runner import EagerRunner
from nanoserve.weights import load_model

# %% [markdown] slide
# ## Run the old stage: eager
#
# What torch is asked to compute in a step of decodes (without views, which compute nothing):

# %% slide
# NBVAL_CHECK_OUTPUT
small = {"client": InProcessClient, "dtype": "float32", "compile": "none", "max_model_len": 256, "num_blocks": 320}
eager = replace(STAGES["shared"], ops=TorchOps, max_num_batched_tokens=2048, **small)
params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
counts = {}
with InProcessClient(eager) as client:
    for n in (1, 8, 64):
        for i in range(n):
            client.submit(EngineRequest(id=f"{n}-{i}", prompt_token_ids=list(range(3 + i, 20 + i)), params=params))
        client.poll(1)  # a step: the prompts
        counts[n] = sum(operations(lambda: client.poll(1)).values())
        while client.core.has_work:
            client.poll(1)
print("requests -> operations of a decode step:", counts)
assert counts[1] == counts[8] == counts[64]

# %% [markdown]
# The same number, however many requests: about 30 in each of five layers, and two kernels of attention, which are not counted.
#
# Now 28 layers (Qwen3-0.6B) on an H100, with two typical numbers: 5 µs to launch an operation from Python, 2 µs for a kernel, however small. The four matrix products of a layer must also read the weights.

# %% slide
from nanoserve.lab.costs import Roofline, StepLoad
from nanoserve.lab.gpus import Memory, get_gpu, get_model

h100 = Roofline(Memory(model=get_model("qwen3-0.6b"), gpu=get_gpu("h100")))
weights_us = h100.step_us(StepLoad(num_tokens=1, num_requests=1))
product = weights_us / 28 / 4
plain = ([product] + [2.0] * 7) * 4 * 28  # a layer: 4 products, 26 others, 2 of attention
ways = {"eager": lanes([5.0] * len(plain), [[kernel] for kernel in plain]), "one graph": lanes([10.0], [plain])}
print(f"{len(plain)} launches; reading all weights takes {weights_us} µs")
assert ways["eager"].busy < 0.5 and ways["one graph"].busy > 0.99
assert ways["eager"].end_us > 2 * ways["one graph"].end_us
larger = Roofline(Memory(model=get_model("llama-3-8b"), gpu=get_gpu("h100")))
assert larger.step_us(StepLoad(num_tokens=512, num_requests=1)) > 5 * 32 * 32  # to launch 32 in each of 32 layers
assert h100.step_us(StepLoad(num_tokens=2048, num_requests=1)) < 5 * len(plain)
setting = Setting("one token of Qwen3-0.6B", "H100, 5 µs a launch, 2 µs a kernel", "simulated", 0)
show_figure(launch_lanes(ways, 60, setting))

# %% [markdown] slide
# Above, the device waits after each kernel. Below, the host says once: *this graph*.
#
# ## Record once, replay
#
# A graph is a list of kernels **with the addresses of their arguments**. So a step's inputs are copied to the same memory each time. A toy, and below it the real thing on a CPU (CUDA's is `CudaGraphPool`):

# %%
tokens, result = torch.zeros(4), torch.zeros(4)
graph = [lambda: torch.mul(tokens, 2, out=result), lambda: result.add_(1)]  # a toy: calls, with their memory
for step in ([1, 2, 3, 4], [5, 6, 7, 8]):
    tokens.copy_(torch.tensor(step))
    assert [call() for call in graph][-1].tolist() == [2 * n + 1 for n in step]
show_source(Recording, "__init__")

# %% [markdown] slide
# ## Fixed shapes
#
# Addresses are fixed, and so are lengths. A graph for each number of tokens would be 8,192 of them. vLLM's list has 51, and a step is padded to the next:

# %% slide
# NBVAL_CHECK_OUTPUT
sizes = default_sizes(max_num_seqs=256, max_num_batched_tokens=8192)
dispatcher = Dispatcher(GraphMode.FULL_AND_PIECEWISE, sizes, max_num_seqs=256)
print(len(sizes), "sizes:", *sizes[:6], "...", *sizes[-3:])
print({n: str(dispatcher.dispatch(n, is_uniform=False) or "no graph") for n in (3, 9, 100, 257, 513)})
assert len(sizes) == 51 and dispatcher.dispatch(513, is_uniform=False) is None

# %%
show_source(Dispatcher, "dispatch")

# %% slide
padded = [dispatcher.dispatch(n, is_uniform=False).size for n in range(1, 513)]
assert sum(padded) / sum(range(1, 513)) < 1.03
assert max(size - n for n, size in enumerate(padded, 1)) == 15
show_figure(padding_chart(dispatcher, 520, Setting("every step once", "51 sizes", "simulated", 0)))

# %% [markdown] slide
# A step of more than 512 tokens replays nothing. An 8B model then computes for longer than launching takes (our 0.6B only from some 2,200 tokens on).
#
# ## Full and piecewise
#
# What can be recorded? Everything that looks at *shapes* only. In a decode step each row has one token, so the shape says it all: the whole pass is recorded (**full**). In a mixed step attention's work depends on how the tokens are spread over rows. So all but attention is recorded, in pieces, and attention runs between them, as it is (**piecewise**). Mode `full` records mixed steps too: that takes a backend whose launch depends on shapes alone and which reads the spread on the device, as lesson 07's kernel does (`graph_support`).

# %% slide
# NBVAL_CHECK_OUTPUT
for mode in GraphMode:
    one = Dispatcher(mode, sizes, max_num_seqs=256)
    decode, mixed = one.dispatch(8, is_uniform=True), one.dispatch(100, is_uniform=False)
    print(f"{mode:<20} 8 decodes: {decode or '-'!s:<15} 100 mixed: {mixed or '-'!s:<15} {len(one.keys)} graphs")
assert (str(decode), str(mixed)) == ("full decode 8", "piecewise 104")

# %% [markdown] slide
# ## How chunked prefill meets fixed shapes
#
# Chunks made any number of tokens possible in a step. A real run: four streams, one long prompt. Every step's record says what it replayed, and the dispatcher predicts it:

# %% slide
from nanoserve.lab.climb import run_once
from nanoserve.lab.scale import scale

here = scale()
load = here.long_prompt()
budget = {"client": InProcessClient, "compile": "none", "max_num_seqs": 64, "max_num_batched_tokens": here.chunk}
records, _ = run_once(here.fit(replace(STAGES["v1"], **budget)), load)
here_dispatcher = Dispatcher(GraphMode.FULL_AND_PIECEWISE, default_sizes(64, here.chunk), 64)
for record in records:
    counts_now = record.num_scheduled_tokens.values()
    key = here_dispatcher.dispatch(sum(counts_now), is_uniform=set(counts_now) == {1}) if counts_now else None
    assert record.graph == str(key or "")
show_figure(replays(records, here.setting(load)))

# %% [markdown] slide
# Full chunks are larger than any graph. The *rest* of a prompt is piecewise. Between prompts, where launches hurt most, all is full.
#
# ## Padding must do nothing
#
# Prediction 4: nobody's, if three things are so. A padding token has slot -1, so its key is not stored; a padding row has key length 0, so it reads nothing; both are reset **in every step**:

# %% slide
from nanoserve.static_inputs import StaticInputs

show_source(StaticInputs, "fill_tokens")

# %% [markdown]
# The loop's last line looks like tidiness. `StoresPadding` leaves it out for the slots, which stay those of a longer step before:

# %% slide
# NBVAL_CHECK_OUTPUT
from nanoserve.lab.planted import StoresPadding

v1 = replace(STAGES["v1"], **small | {"num_blocks": 64}, graph_sizes=(8, 32), max_num_seqs=4, max_num_batched_tokens=64)
v1 = replace(v1, async_scheduling=False)  # one set of inputs for all steps
beginnings = ["Once upon a time, there was a little dog", "One day, Tom", "The cat sat on the"]


def tell(config):
    with LLM(config=config) as llm:
        return [o.outputs[0].text for o in llm.generate(beginnings, SamplingParams(temperature=0.0, max_tokens=16))]


right, wrong = tell(v1), tell(replace(v1, runner=StoresPadding))
print(f"right:{right[0]}\nwrong:{wrong[0]}")
assert right[0] != wrong[0] and right[1:] == wrong[1:]

# %% [markdown] slide
# Nothing crashed, and it *reads well*. A decode of three is padded to eight, and its five padding tokens kept slots 3 to 7 of the prompts' step: keys of the first prompt were overwritten. So the law is: a replayed step gives the tokens of an eager one.
#
# ## Flip one field

# All modes give the same text. Then the quickest decode step here, each way three times in turn, first to warm up. A CPU launches nothing; what is spared is Python and torch around each call:

# %%
assert tell(replace(v1, runner=EagerRunner, graph_sizes=None)) == right
assert all(tell(replace(v1, graph_mode=str(mode))) == right for mode in list(GraphMode)[1:])  # the first is none
quickest = {}
for runner in (EagerRunner, GraphRunner) * 3:
    done, _ = run_once(here.fit(replace(STAGES["shared"], runner=runner, **budget)), load)
    decodes = [r.end_s - r.start_s for r in done if set(r.num_scheduled_tokens.values()) == {1}]
    quickest.setdefault(runner, []).append(min(decodes) * 1000)
    print(f"{runner.__name__:<12}{quickest[runner][-1]:.2f} ms on {here.device}")
assert min(quickest[GraphRunner]) < min(quickest[EagerRunner])

# %% [markdown] slide
# ## When to capture, and who pays
#
# At the start: the largest first, since smaller ones then fit in its memory. And *before the KV pool is sized*, for the pool takes all that is left. The runner captures once with hardly any cache, counts what the graphs hold, and drops all:

# %%
show_source(GraphRunner, "_reserved_bytes")

# %% [markdown] slide
# ## Fewer operations: compile
#
# A graph makes launches cheap; each kernel still takes its 2 µs. But most of the 30 are small change between two matrix products. What is between the attention of one layer and that of the next:

# %% slide
# NBVAL_CHECK_OUTPUT
flow = (model := load_model("nanostory", device="cpu")).first(torch.arange(3), torch.arange(3))
run = torch.inference_mode()(lambda: model.pieces.cross(*model.layers[:2], flow.q_THD, flow, model.ops))
cross = operations(run)
print(sum(cross.values()), "operations,", cross["linear"], "of them products")
assert cross["linear"] == 4 and sum(cross.values()) == 30

# %% [markdown]
# A compiler can make *one* kernel of what stands between two products: eight in all. `ops=TritonOps` has the same four written by hand. `compile="layers"` compiles this function once for all layers and any number of tokens; `"model"` the whole pass, with attention as an operator that it does not look into. Compiling takes too long for a lesson; the repository measured this on a CPU; below, the lanes once more:

# %% slide
from nanoserve.lab.results import read_result

fused = [product, 2.0, 2.0, product, 2.0] * 2 * 28  # a layer: 4 products, 4 between them, 2 of attention
ways["compiled"] = lanes([5.0] * len(fused), [[kernel] for kernel in fused])
ways["compiled, one graph"] = lanes([10.0], [fused])
measured = read_result("execution")
for name in ("eager", "compiled layers", "compiled model", "fused by hand", "fused by hand + graphs"):
    step_ms, eager_ms = (measured["medians"][way]["1"]["step_ms"] for way in (name, "eager"))
    print(f"{name:<24}{step_ms:.2f} ms a step of one token, {step_ms / eager_ms:4.0%} of eager's; "
          f"{measured['execution'][name].get('compile_s', 0):.0f} s of compiling")  # fmt: skip
assert ways["compiled"].end_us < ways["one graph"].end_us > 2 * ways["compiled, one graph"].end_us
show_figure(launch_lanes(ways, 60, setting))

# %% [markdown] slide
# ## The host's other work
#
# Before any launch the host makes the step's inputs: ids, positions, slots, tables. v0 made them anew, request by request. v1 keeps arrays with a row for each, which a plan patches (`IN_FLIGHT` comes below):

# %%
from nanoserve.input_batch import RebuiltBatch
from nanoserve.persistent_batch import PersistentBatch

show_diff(RebuiltBatch, PersistentBatch, "build")

# %%
from time import perf_counter


def make_inputs(form, num_requests, num_steps=12):
    """The inputs of the last step, and the least microseconds that one step's took."""
    ids, greedy = [f"r{i}" for i in range(num_requests)], SamplingParams(temperature=0.0)
    new = [NewRequest(id, list(range(3, 19)), 16, [2 * i + 1, 2 * i + 2], 0, greedy, None) for i, id in enumerate(ids)]
    config = replace(eager, max_num_seqs=num_requests).resolve(model_len=256, pool_blocks=0, device="cpu")
    batch, took = form(config, vocab_size=2048, device=torch.device("cpu")), []
    for step in range(num_steps):
        start = perf_counter()
        plan = StepPlan(step, dict.fromkeys(ids, 1 if step else 16), new=[] if step else new)
        batch.apply(plan)
        batch.fill(inputs := batch.build(plan), [7] * num_requests)
        took.append((perf_counter() - start) * 1e6)
    return inputs, min(took[1:])


# %% slide
forms = {"rebuilt": RebuiltBatch, "persistent": PersistentBatch}
made = {name: {n: make_inputs(form, n) for n in (1, 4, 16, 64, 256)} for name, form in forms.items()}
for one, other in zip(made["rebuilt"].values(), made["persistent"].values(), strict=True):
    for array in ("input_ids_T", "positions_T", "slot_mapping_T", "seq_lens_R", "block_table_RB"):
        assert (getattr(one[0], array) == getattr(other[0], array)).all()
assert made["persistent"][256][1] < made["rebuilt"][256][1] / 2
took = {name: {n: us for n, (_, us) in each.items()} for name, each in made.items()}
show_figure(input_costs(took, Setting("greedy decodes", "CPU, one thread", "wall", 0)))

# %% [markdown] slide
# The same arrays, to the last number. Vectors have a fixed price: few requests win nothing, with 256 the old form takes at least twice as long. The new one's price: what is forgotten to be patched stays (lesson 07's wrong key length was planted there).
#
# ## One step ahead
#
# Even so the device waits while the host takes a step's tokens and decides the next. With `async_scheduling` the host plans and launches step n + 1 while the device runs n. It does not know the tokens of n yet: in their place a row holds `IN_FLIGHT`, and the device puts in what it has just sampled. *How many* tokens there are is known, so an end by `max_tokens` is foreseen. A stop token is not: one token too many is on its way. What is computed for a prompt of 17:


# %%
def run_to_end(ahead, stop=()):
    """How many tokens were computed, and the answer."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=list(stop))
    story, steps = EngineRequest(id="story", prompt_token_ids=list(range(3, 20)), params=params), ListRecorder()
    with InProcessClient(replace(v1, async_scheduling=ahead), observer=steps) as client:
        client.submit(story)
        while client.poll(1) or client.core.has_work:
            pass
    assert client.info.execution.graph_bytes > 0 and client.info.execution.graph_sizes == [8, 32]
    computed = sum(sum(step.num_scheduled_tokens.values()) for step in steps.records)
    return computed, [token for step in steps.records for token in step.sampled.get("story", [])]


for ahead in (False, True):
    (computed, answer), (stopped, begin) = run_to_end(ahead), run_to_end(ahead, stop=run_to_end(ahead)[1][4:5])
    print(f"ahead: {ahead!s:<6}{computed} for an answer of {len(answer)}; {stopped} for {len(begin)} and a stop token")
    assert (computed, stopped) == (17 + len(answer) - 1, 17 + len(begin) - 1 + ahead)

# %%
show_source(EngineCore, "_step", "_step_ahead")

# %% [markdown]
# ## What it costs
#
# - **Start-up**: up to 86 graphs are captured, each after a run to warm up; compiling takes many seconds for the smallest of models.
# - **Memory** that the KV pool does not get, and up to 15 tokens of padding in a step.
# - **A token for each stop**, one step ahead. On a CPU the host is hidden behind greedy decodes alone, and if a core is to spare: a thread of C++ makes their recorded calls meanwhile (`cpu_stream.py`).
# - **Debugging**: a print inside a graph prints once, when it is captured. `--enforce-eager` is the first thing to try.
#
# ## Honest history
#
# - **v0 captured graphs**, for decodes only. v1 compiles the model by default and cuts it at attention; since 0.10 or so full graphs for decodes are back beside the pieces.
# - **A big model needs graphs less.** A 70B step reads its weights for milliseconds, and launches hide behind that.
# - **No GPU was measured here**: the lanes are arithmetic with two assumed numbers.
#
# ## Questions
#
# 1. Prediction 2: how busy is a GPU with 5 µs a launch and 2 µs for every kernel?
# <details><summary>Answer</summary>40 %: it waits for 3 of every 5 µs. A little more where some kernels take longer, as in the lanes above.</details>
#
# 2. Why is the largest size captured first?
# <details><summary>Answer</summary>All graphs share one pool of memory; the smaller ones fit into what the largest took.</details>
#
# 3. Why is attention left out of a piecewise graph?
# <details><summary>Answer</summary>Its work depends on how tokens are spread over rows, which a number of tokens does not say.</details>
#
# 4. Why does a step of 2,048 tokens replay nothing?
# <details><summary>Answer</summary>The largest graph has 512. A large model's kernels take longer than their launches by then.</details>
#
# 5. Which three things make a padding row harmless?
# <details><summary>Answer</summary>Slot -1, key length 0, and a reset of both in every step.</details>

# %% [markdown] slide
# ## Exercise
#
# An engine with `max_num_seqs=8` captures 1, 2, 4, 8 and 16. How many tokens are computed for steps of 3, 5, 9 and 17? And which size would you add for batches of six decodes?

# %%
my_sizes = {3: None, 5: None, 9: None, 17: None}

tiny = Dispatcher(GraphMode.FULL_AND_PIECEWISE, default_sizes(8, 8192), max_num_seqs=8)
computed = {n: key.size if (key := tiny.dispatch(n, is_uniform=False)) else n for n in my_sizes}
assert sum(computed.values()) == 45
assert all(guess in (None, computed[n]) for n, guess in my_sizes.items()), "the next of 1, 2, 4, 8, 16; or no graph"

# %% [markdown]
# ### Solution
#
# <details><summary>Show</summary>4, 8, 16, and 17: above the largest size nothing is padded. With 6 in <code>graph_sizes</code> the six decodes waste nothing; without it a quarter of each step is padding.</details>
#
# ## In vLLM, look at
#
# - `vllm/v1/cudagraph_dispatcher.py`: the dispatcher; `vllm/config/compilation.py`: modes and sizes.
# - `vllm/compilation/backends.py`: how a compiled model is cut at attention.
# - `vllm/v1/worker/gpu_input_batch.py`: the persistent batch; `gpu_model_runner.py`: `capture_model`.
#
# Compile for yourself: `nanoserve generate --compile layers "Once upon a time"`. `python benchmarks/execution.py` measures all ways. Exercises 11 and 15 go on here. Next: **09, from v0 to v1**.
