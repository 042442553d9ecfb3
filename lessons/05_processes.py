# title: Processes
# question: What happens when the engine moves into another process?
# minutes: 30
# seams: client
# needs: lesson 04

# %% [markdown] slide
# # What happens when the engine moves into another process?
#
# Lesson 04 gave the engine an interpreter of its own, and with it a border. Nothing crosses that by itself any more: no object, no exception, no Ctrl-C. This lesson looks at what is sent across, what that costs, and who dies with whom.
#
# About 30 minutes. Seam: `client`. No GPU needed.

# %% [markdown] slide
# ## Predict
#
# 1. 64 requests decode. How many bytes go to the front end in each step?
# 2. A prompt of 1,000 tokens goes to the engine. How many bytes is that? And in a later step, when it decodes?
# 3. How many microseconds does the border add to a step?
# 4. `kill -9` hits the engine, in the middle of an answer. What does the user see?
# 5. `kill -9` hits the front end. Who ends the engine, and who gives its memory back?

# %%
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil

from nanoserve import LLM, SamplingParams, messages
from nanoserve.client import CoreProcessClient, EngineDeadError, InProcessClient, SplitRunnerClient
from nanoserve.config import STAGES
from nanoserve.core import EngineCore
from nanoserve.lab.boundary import crossing_bytes, measure_step
from nanoserve.lab.charts import Setting
from nanoserve.lab.fakes import DigestRunner, reference_tokens
from nanoserve.lab.process_charts import Border, Unread, border_costs, ring_map
from nanoserve.lab.scale import scale
from nanoserve.lab.show import show_diff, show_figure, show_source
from nanoserve.request import EngineOutput, EngineRequest, StepPlan

# %% [markdown] slide
# ## Run the old stage
#
# In one process, the border is a call. We use an engine without a model, since models are not the point: `DigestRunner` answers with a digest of everything before, so any mistake on the way changes the tokens.

# %%
prompt = list(range(100, 140))
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
story = EngineRequest(id="story-1", prompt_token_ids=prompt, params=params)
config = replace(STAGES["chunked"], runner=DigestRunner, max_model_len=1024)


# %%
def ask(client, request):
    client.submit(request)
    tokens = []
    while len(tokens) < request.params.max_tokens:
        tokens += [token for output in client.poll(30) for token in output.new_token_ids]
    return tokens


# %% slide
# NBVAL_CHECK_OUTPUT
with InProcessClient(config) as client:
    print(ask(client, story))

# %% [markdown] slide
# ## Flip one field
#
# Three classes, three layouts:
#
#     InProcessClient      [ front end, core, runner ]
#     CoreProcessClient    [ front end ] = sockets = [ core, runner ]
#     SplitRunnerClient    [ front end ] = sockets = [ core ] = shared memory = [ runner ]
#
# We look at the children of this process meanwhile, and afterwards.


# %%
def children():  # what each runs -> process
    ours = [
        process for process in psutil.Process().children(recursive=True) if "nanoserve.process" in process.cmdline()
    ]
    return {process.cmdline()[4]: process for process in ours}


# %% slide
# NBVAL_CHECK_OUTPUT
for layout in (InProcessClient, CoreProcessClient, SplitRunnerClient):
    with layout(config) as client:
        print(f"{layout.__name__:<18}", list(children()))
        assert ask(client, story) == reference_tokens(prompt, 12)
assert not children()

# %% [markdown]
# The same tokens from all three, and nobody is left. The two ends of the border, beside each other. (`_open` refuses an id that is in use: the client knows those that live, so nothing has to be sent for that.)

# %% slide
show_diff(InProcessClient, CoreProcessClient, "submit", "abort")

# %% [markdown]
# On the other side, three threads: one reads the socket, one writes, and the main thread does nothing but this. While it is in a step, the reader still takes in what comes: an abort is noted at once, and honoured when the step ends.

# %% slide
from nanoserve.worker import CoreServer

show_source(CoreServer, "_loop")

# %% [markdown] slide
# ## What crosses: messages
#
# A message is a byte that says its kind, and plain data in msgpack. To the core go requests, aborts, and calls of a few utilities; back come outputs:

# %% slide
# NBVAL_CHECK_OUTPUT
there = messages.encode_request(msgspec.structs.replace(story, prompt_token_ids=[11, 300, 1500]))
back = messages.encode(
    messages.CoreOutputs([EngineOutput(id="story-1", new_token_ids=[123])], messages.SchedulerStats())
)
print(len(there), "bytes there:", there[:48], "...\n  which says", msgspec.msgpack.decode(there))
print(len(back), "bytes back:", back, "\n  which says", msgspec.msgpack.decode(back))
assert messages.decode(messages.OUTPUTS, back).outputs[0].new_token_ids == [123]

# %% [markdown] slide
# The names of the fields travel with a request, which comes once. Outputs come in every step, so they travel as bare lists. There is no text in them, which stays on this side, and no tensor, which stays on that. Nor is there any code: nothing is unpickled but the config, once, at the start.
#
# ## What crosses: differences
#
# With `SplitRunnerClient`, every *plan* crosses too. A request goes whole once; afterwards only what is new about it. We do the three verbs of a step by hand and weigh each plan:

# %% slide
# NBVAL_CHECK_OUTPUT
core = EngineCore.build(config)
core.add(EngineRequest(id="long", prompt_token_ids=[300] * 1000, params=params))
sizes = []
for _ in range(4):
    plan = core.scheduler.schedule()
    core.scheduler.update(plan, core.runner.launch(plan).wait().token_ids)
    sizes.append(len(messages.encode(plan)))
    print(f"step {plan.step}: {plan.num_scheduled_tokens}, {sizes[-1]} bytes")
core.close()
assert sizes[0] > 3000 and max(sizes[1:]) < 100

# %% [markdown] slide
# A token of the prompt is three bytes, once; the second step brings its second half, and only names the new blocks. That is why the runner must remember what it was told (its *rows*), and why a preempted request is sent whole when it comes back.
#
# ## How it crosses: sockets, and a ring
#
# Between front end and core: ZMQ sockets, since there may be several of either, and news may pile up. Between core and runner, one plan and one answer at a time: a ring of bytes in memory that both see. One writes, the other reads, and two counters say how far they are. With 64 bytes:

# %% slide
# NBVAL_CHECK_OUTPUT
from nanoserve.ring import HEADER_BYTES, Ring

ring = Ring(memoryview(bytearray(HEADER_BYTES + 64)))
a, b, c = Unread("plan 1", 0, 24), Unread("plan 2", 24, 24), Unread("plan 3", 48, 30)
ring.put(memoryview(bytes(a.length)))
ring.put(memoryview(bytes(b.length)))
print("two plans:", ring.num_unread, "bytes unread;", ring.put(memoryview(bytes(c.length))), "of 30 bytes had room")
ring.take(memoryview(bytearray(a.length)))
ring.put(memoryview(bytes(14)))  # the rest
print("one read: ", ring.num_unread, "bytes unread")
assert ring.num_unread == b.length + c.length

# %% slide
moments = {"two plans": [a, b], "plan 3 begins": [a, b, Unread("plan 3", 48, 16)], "plan 1 is read": [b, c]}
show_figure(ring_map(moments, 64, Setting("three plans", "64 bytes", "simulated", 0)))

# %% [markdown]
# Nobody spins on the counters: who waits sleeps on a small socket, and is woken by a byte. On two cores, a spinning reader would take one of them away.

# %% slide
show_source(Ring, "put")

# %% [markdown] slide
# ## What it costs
#
# The bytes of a step in which everybody decodes follow from the messages:

# %% slide
# NBVAL_CHECK_OUTPUT
for num_running in (1, 64, 256):
    core_bytes, split_bytes = (crossing_bytes(c, num_running) for c in (CoreProcessClient, SplitRunnerClient))
    print(
        f"{num_running:>3} requests: {core_bytes:>5,} bytes with a core process, {split_bytes:>6,} with a runner beside it"
    )
assert crossing_bytes(InProcessClient, 256) == 0 and split_bytes / 256 < 50

# %% [markdown]
# And the time, measured here, of steps whose runner computes nothing: what is left is everything *but* the model.

# %% slide
borders = {}
layouts = {"in process": InProcessClient, "core process": CoreProcessClient, "split runner": SplitRunnerClient}
for name, layout in layouts.items():
    cost = measure_step(replace(config, client=layout), num_running=64, num_steps=100)
    borders[name] = Border(crossing_bytes(layout, 64), cost.step_s * 1e6, cost.start_s)
assert borders["split runner"].step_us - borders["in process"].step_us < 10_000  # less than a step of 10 ms
assert borders["in process"].start_s < borders["core process"].start_s  # an interpreter has to start
show_figure(border_costs(borders, Setting("64 decodes, no model", scale().device, "wall", 0)))

# %% [markdown] slide
# On an idle machine the sockets add some tens of microseconds: the core does not wait for anybody to read them. The ring adds some hundreds, since the core does wait for the runner. Beside a step of 10 ms that is little, beside one of 1 ms it is not; a good reason to use a runner process only where it must be.
#
# Start-up: each process is a fresh interpreter that imports what it needs. With a model that means torch, and a few seconds. A fork would be quicker, but copies only the thread that forks: locks that others held stay locked for ever, and a GPU's state does not survive it.
#
# ## Who dies with whom
#
# **The engine dies.** A real model, in the middle of an answer:

# %% slide
# NBVAL_CHECK_OUTPUT
long = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
with LLM(config=scale().fit(STAGES["multiprocess"])) as llm:
    core = children()["nanoserve.worker:core_main"]
    sockets = Path(core.cmdline()[5])
    assert sockets.is_dir()
    try:
        for num_news, _ in enumerate(llm.stream("Once upon a time", long)):
            if num_news == 5:
                core.kill()
    except EngineDeadError as error:
        print("the stream:", error)
    try:
        llm.generate("Once more")
    except EngineDeadError:
        print("later calls: the same")
assert not children() and not sockets.exists()

# %% [markdown]
# The stream does not hang, which is what it would do if nobody cared: reading from a socket whose other side is gone just takes for ever. A thread waits for the child to end, and wakes whoever polls. Death is *sticky*: a dead engine stays dead, and a server answers 503 from then on.
#
# **The front end dies**, so suddenly that it can do nothing any more. Here is one, as a process of its own, with a core and a runner below it:

# %% slide
# NBVAL_CHECK_OUTPUT
front_end = """
import psutil
from dataclasses import replace
from nanoserve.client import SplitRunnerClient
from nanoserve.config import STAGES
from nanoserve.lab.fakes import DigestRunner
client = SplitRunnerClient(replace(STAGES["chunked"], runner=DigestRunner, max_model_len=1024))
print(*[process.pid for process in psutil.Process().children(recursive=True)], flush=True)
input()
"""
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
with subprocess.Popen([sys.executable, "-c", front_end], text=True, **pipes) as process:
    orphans = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    process.kill()
gone, alive = psutil.wait_procs(orphans, timeout=20)
print(len(orphans), "children,", len(gone), "gone")
assert len(orphans) == 2 and not alive

# %% [markdown]
# Each child holds one end of a *death pipe*: a socket on which nothing is ever said. When the other end closes, for whatever reason, the child ends. (On Linux it also asks the kernel for a signal.) The ring's memory has no name, so it goes with the last process that sees it; GPU memory likewise.
#
# **A request is wrong.** Nobody dies: the error goes back to whoever caused it, as text.

# %% slide
# NBVAL_CHECK_OUTPUT
for layout in (InProcessClient, CoreProcessClient):
    with layout(config) as client:
        try:
            client.call("explode")
        except RuntimeError as error:
            print(error)
        assert ask(client, story) == reference_tokens(prompt, 12)

# %% [markdown] slide
# What is lost is the stack: an exception on the other side arrives as a message, and a breakpoint there has no terminal. To debug a scheduler, flip the field back to `InProcessClient`.
#
# ## Honest history
#
# - **Two layouts, because the popular picture mixes two.** "The scheduler talks to its workers over shared memory" is true in vLLM v1 *with tensor parallelism*: a ring broadcasts each plan to the workers. On a single GPU, scheduler and runner share the core process, and only the ZMQ border is there. `SplitRunnerClient` exists to show the other one with a single worker.
# - **v0 had both as well**, in other places: a ZMQ border in front of its whole engine since 0.5.4, and workers that were told every step from scratch by default. Differences came with v1's persistent batch.
# - **Offline use has a core process too** in v1. `VLLM_ENABLE_V1_MULTIPROCESSING=0` brings it back into yours, which is what one wants in a debugger.

# %% [markdown] slide
# ## Questions
#
# 1. Why may a config hold classes, and a request not?
# <details><summary>Answer</summary>The config is pickled, once, between a parent and its own child. Requests come from outside; nobody should unpickle those.</details>
#
# 2. Why is the core's outgoing socket without a limit?
# <details><summary>Answer</summary>So that a slow front end never holds up a step. What piles up goes out as one message.</details>
#
# 3. An abort arrives while a step runs. Why does a thread take it in?
# <details><summary>Answer</summary>The main thread is in the step. So it is honoured when the step ends, and no step is spent on it any more.</details>
#
# 4. Why is a child a fresh interpreter and not a fork?
# <details><summary>Answer</summary>Threads do not survive a fork, locks they held stay locked, and a GPU's state cannot be forked at all.</details>
#
# 5. A request comes with an id that is in use. Who says no?
# <details><summary>Answer</summary>The client, before anything is sent: it knows the ids that live.</details>
#
# 6. Which of the three layouts would you use with one GPU? With four that share a model?
# <details><summary>Answer</summary>A core process with the runner in it; with four, a runner process for each GPU, and the ring.</details>

# %% [markdown]
# ## Exercise
#
# Suppose that tables travelled whole, in each plan. 64 requests of 4,000 tokens, blocks of 16, block ids of three bytes each: how many bytes is a plan? Within 10 %:

# %%
my_bytes = None

ids = [f"request-{i}" for i in range(64)]
tables = {request_id: list(range(1000, 1250)) for request_id in ids}
whole = len(messages.encode(StepPlan(1000, dict.fromkeys(ids, 1), new_blocks=tables)))
assert my_bytes is None or abs(my_bytes / whole - 1) < 0.1, f"not {my_bytes}: how many blocks, how many bytes each?"

# %% [markdown]
# ### Solution
#
# <details><summary>Show</summary>4,000 tokens are 250 blocks; 64 × 250 × 3 bytes are 48,000, and a little for the names. A plan of differences, in which nobody needs a new block, is 772 bytes.</details>

# %%
assert 48_000 < whole < 52_000
assert len(messages.encode(StepPlan(1000, dict.fromkeys(ids, 1)))) == 772
assert whole > 15 * (crossing_bytes(SplitRunnerClient, 64) - crossing_bytes(CoreProcessClient, 64))

# %% [markdown]
# ## In vLLM, look at
#
# - `vllm/v1/engine/core.py`: `EngineCoreProc`, the process around the core: the same three threads.
# - `vllm/v1/engine/core_client.py` and `vllm/v1/serial_utils.py`: the clients, and the msgpack encoder.
# - `vllm/distributed/device_communicators/shm_broadcast.py`: `MessageQueue`, the ring; `vllm/v1/executor/multiproc_executor.py` uses it, and has the death pipe.
#
# `nanoserve doctor` finds what a crash of any engine left behind. Next: **06, prefix caching**.
