# title: One process and the GIL
# question: Why does the next step wait for the web server?
# minutes: 30
# seams: client
# needs: lesson 01; having seen async Python helps

# %% [markdown] slide
# # Why does the next step wait for the web server?
#
# The engine has computed 64 tokens, one for each user. Now they are turned into text, wrapped in JSON and written to 64 sockets. Meanwhile the GPU could compute the next 64. In one Python process it does not: it waits. This lesson finds out what it waits for.
#
# About 30 minutes. Seam: `client`. No GPU needed.

# %% [markdown] slide
# ## Predict
#
# 64 users are streamed to. A step takes 8 ms and 30 µs for each token in it. Each token that goes out costs the *front end* (detokenizing, JSON, socket) 50 µs of Python.
#
# 1. Engine and front end take turns in one process. How long is the gap between two tokens of a user?
# 2. And if the front end works in a process of its own, beside the next step?
# 3. How many users does it take until that does not suffice either?
# 4. Forty operations of 0.3 ms each, which do not need Python while they run. In another *thread*, Python counts. Do they take as long as before, twice as long, or ten times?

# %%
import asyncio
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, sleep

from msgspec.structs import replace

from nanoserve.client import CoreProcessClient, InProcessClient
from nanoserve.config import STAGES
from nanoserve.lab.charts import Setting, step_timeline
from nanoserve.lab.front_end import step_gaps, tokens_by_prompt
from nanoserve.lab.metrics import step_times
from nanoserve.lab.process_charts import Hold, gap_histogram, lock_lanes, step_end, step_histogram
from nanoserve.lab.rehearsal import rehearse
from nanoserve.lab.show import show_diff, show_figure
from nanoserve.lab.simulator import Host
from nanoserve.lab.workload import Arrival, Workload

# %% [markdown] slide
# ## Run the old stage
#
# The real core and scheduler on a virtual clock. `Host` says what a token costs the front end. `chunked` has everything in one process.


# %%
def users(n):
    arrivals = [Arrival(id=f"user-{i}", group="user", prompt_token_ids=[i] * 20, max_tokens=40) for i in range(n)]
    return Workload(name=f"{n}-users", claim="", watched="user", seed=0, parameters={}, arrivals=arrivals)


def simulated(stage, num_users, front_end_us=50):
    sizes = {"max_num_seqs": 1024, "max_num_batched_tokens": 32_768}
    return rehearse(STAGES[stage], users(num_users), host=Host(front_end_us=front_end_us), **sizes)


def drawn(records, num_lanes=8):  # of the first steps
    kept, fields = {f"user-{i}" for i in range(num_lanes)}, ("num_scheduled_tokens", "hit_tokens", "sampled")
    few = [{f: {k: v for k, v in getattr(r, f).items() if k in kept} for f in fields} for r in records[:12]]
    few[0]["arrivals"] = [a for a in records[0].arrivals if a.id in kept]
    return [replace(r, **fewer) for r, fewer in zip(records, few, strict=False)]


# %% slide
# NBVAL_CHECK_OUTPUT
one = simulated("chunked", 64)
print(f"gap between two tokens of a user: {one.run.itl_us().p50 / 1000:.2f} ms")
print(f"gap between two steps: {max(step_gaps(one.records)) * 1000:.2f} ms")
assert one.run.itl_us().p50 == 8_000 + 64 * 30 + 64 * 50
assert (round(3.2 / 13.12, 2), round(3.2 / (9.92 / 2 + 3.2), 2)) == (0.24, 0.39)  # and with steps of half the length

# %% [markdown] slide
# ## See it
#
# The first steps of eight of the 64 users. The white cuts are the front end's work. In them the engine computes nothing, though every user waits for a token.

# %% slide
show_figure(step_timeline({"chunked": drawn(one.records)}, one.setting))

# %% [markdown] slide
# A quarter of the time. It grows with the users, as the step does, and no faster GPU takes it away: on the contrary, its *share* grows.
#
# ## Why: one interpreter, one lock
#
# So far they take turns, as `LLM` does: whoever calls `poll` runs a step, then handles its news. Could the front end not run in another thread, beside the step? It does, in every async server. In ours, `AsyncLLM`, a *pump* thread calls `poll`, and so runs the steps; the event loop has its own thread.
#
# But a Python process has one **global interpreter lock** (GIL): whoever executes Python holds it. Operations of torch give it back while they compute, so there should be room for others. A toy: a "step" of forty operations, each a wait of 0.3 ms without the lock, alone and beside a thread that only counts.


# %%
def step_ms():  # a toy: forty operations, each of which lets go of the lock
    start = perf_counter()
    for _ in range(40):
        sleep(0.0003)
    return (perf_counter() - start) * 1000


def count(done):  # a toy front end: Python without a pause
    while not done.is_set():
        sum(range(50))


# %%
def beside_ms():
    done = threading.Event()
    thread = threading.Thread(target=count, args=[done])
    thread.start()
    best = min(step_ms() for _ in range(5))
    done.set()
    thread.join()
    return best


alone, beside = min(step_ms() for _ in range(5)), beside_ms()
print(f"best of five: {alone:.0f} ms alone, {beside:.0f} ms beside a busy thread, {beside / alone:.0f} times as long")
assert beside > 2 * alone

# %% [markdown]
# The step has no more to do than before. What happened is this. An operation lets go of the lock, and the counting thread takes it. When the operation has ended, the step wants the lock back, and asks for it. Python lets the other thread go on for up to the **switch interval**, before it must give way:

# %% slide
# NBVAL_CHECK_OUTPUT
print(f"switch interval: {sys.getswitchinterval() * 1000:.0f} ms")

# %% [markdown]
# 5 ms, for an operation of a fraction of one. As a toy model, with operations of 0.3 ms:


# %% slide
def busy_beside(num_ops, switch_ms, op_ms=0.3, python_ms=0.05):
    holds, now_ms = [], 0.0
    for _ in range(num_ops):
        holds += [Hold("step", now_ms, python_ms), Hold("operation", now_ms + python_ms, op_ms)]
        now_ms += python_ms
        if switch_ms:
            holds.append(Hold("front end", now_ms, op_ms + switch_ms))
        now_ms += op_ms + switch_ms
    return holds


lanes = {"alone": busy_beside(4, switch_ms=0), "beside a busy thread": busy_beside(4, switch_ms=5)}
assert round(step_end(lanes["beside a busy thread"]) - step_end(lanes["alone"]), 6) == 15
assert round(step_end(lanes["alone"]), 6) == 1.4
show_figure(lock_lanes(lanes, Setting("four operations", "a toy", "simulated", 0)))

# %% [markdown]
# Four operations that take 1.4 ms wait 15 ms for the lock. The obvious knob is `sys.setswitchinterval`. In the toy model, for forty operations and for the hundreds of a real step; and below it with real threads:

# %% slide
# NBVAL_CHECK_OUTPUT
for switch_ms in (5, 0.5, 0.05, 0):
    forty, step = (step_end(busy_beside(n, switch_ms)) for n in (40, 400))
    print(f"switch interval {switch_ms:<4} ms: 40 operations {forty:7.1f} ms, 400 operations {step:7.1f} ms")
assert abs(step_end(busy_beside(40, 5)) - (40 * 0.35 + 39 * 5)) < 1e-6

# %%
default_s = sys.getswitchinterval()
for switch_ms in (5, 0.5, 0.05):
    sys.setswitchinterval(switch_ms / 1000)
    took = beside_ms()
    print(f"switch interval {switch_ms:<4} ms: 40 operations {took:6.1f} ms, best of five")
sys.setswitchinterval(default_s)
assert alone < took < beside

# %% [markdown] slide
# In the toy a very short interval costs next to nothing, since it hands the lock over for free. A real handover wakes a thread, and there is one for every operation: so real threads gain much, and stay above the time that the step takes alone. The interval is also the whole process's: everybody else is interrupted as often. And whatever it is, the step's Python and the front end's add up. Only another interpreter runs them side by side.
#
# How bad it gets depends: very short operations are over before another thread has woken up, and a front end that mostly waits is seldom in the way. Real ones are measured below.
#
# ## Flip one field
#
# Two classes say how a front end reaches the engine. On the left a step is run by whoever asks for news; on the right it runs by itself, elsewhere, and news are read from a socket:

# %% slide
show_diff(InProcessClient, CoreProcessClient, "submit", "poll")

# %% [markdown]
# The field is `client`; stage `multiprocess` is `chunked` with that one replaced. Same load, same chart:

# %% slide
# NBVAL_CHECK_OUTPUT
two = simulated("multiprocess", 64)
for name, result in {"chunked": one, "multiprocess": two}.items():
    itl_ms = result.run.itl_us().p50 / 1000
    print(f"{name:<13} {itl_ms:5.2f} ms a token, {1000 / itl_ms:.0f} tokens a second for each user")
assert two.run.itl_us().p50 == 8_000 + 64 * 30
assert max(step_gaps(two.records)) == 0

# %% slide
show_figure(step_timeline({"chunked": drawn(one.records), "multiprocess": drawn(two.records)}, one.setting))

# %% [markdown] slide
# The front end works as hard as before, and holds a lock that is not the engine's: a token comes after 9.9 ms instead of 13.1.
#
# ## The same on this machine
#
# `AsyncLLM` is the front end that `nanoserve serve` uses: it tokenizes, detokenizes and hands out news, on an event loop. Here the loop is in this notebook's process, and in stage `chunked` its pump thread computes the steps as well. 64 users, each of whom gets a JSON line for each token:

# %%
from pathlib import Path
from tempfile import TemporaryDirectory

from nanoserve import SamplingParams
from nanoserve.api.async_llm import AsyncLLM
from nanoserve.lab.scale import scale
from nanoserve.record import JsonlRecorder, read_trace
from nanoserve.request import OutputKind

here = scale()
params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, output_kind=OutputKind.DELTA)


async def answer(llm, number, sent):
    async for news in llm.generate(f"Once upon a time, there were {number} little dogs", params):
        sent.append(json.dumps({"id": number, "text": news.outputs[0].text}))


# %%
async def serve(config, num_users=64):
    sent = []
    with TemporaryDirectory() as folder:
        recorder = JsonlRecorder(Path(folder) / "trace.jsonl")  # written where the core lives
        async with AsyncLLM(config=config, observer=recorder) as llm:
            await asyncio.gather(*(answer(llm, number, sent) for number in range(num_users)))
        recorder.close()
        return read_trace(recorder.path)[1], sent


def run(config):  # a notebook has an event loop of its own, so this one gets a thread
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, serve(config)).result()


# %%
measured = {}
for stage in ("chunked", "multiprocess"):
    measured[stage], sent = run(here.fit(STAGES[stage]))
    assert len(sent) == 64 * 64 and json.loads(sent[0])["id"] == 0
tokens = {stage: tokens_by_prompt(records) for stage, records in measured.items()}
assert tokens["chunked"] == tokens["multiprocess"] or not here.is_exact

# %% slide
setting = Setting("64 stories", here.device, "wall", 0)
show_figure(gap_histogram({stage: step_gaps(records) for stage, records in measured.items()}, setting))

# %% [markdown]
# The gap is only what happens *between* two steps. Here nobody takes turns: the pump begins the next step as soon as it gets the lock, and it may be the step that is held up. Usually by less than in the toy, for the event loop has no more to do than a step's news. So look at the steps as well, and at both together:

# %% slide
for stage, records in measured.items():
    in_steps, between = (1000 * sum(times(records)) for times in (step_times, step_gaps))
    print(f"{stage:<13}{in_steps:4.0f} ms in steps + {between:4.0f} ms between = {in_steps + between:4.0f} ms")
show_figure(step_histogram({stage: step_times(records) for stage, records in measured.items()}, setting))

# %% [markdown] slide
# The model is the same, and so are the tokens. The sum is what the users waited. Where time is lost, between the steps or in them, differs from machine to machine and with what else it has to do; so do all figures of this section. What is left in two processes is the core's own work, and the competition for cores.
#
# ## What it costs
#
# - **A message for each step, and a start-up.** Lesson 05 weighs them.
# - **A second core.** Two processes on one core take turns as two threads do, if more politely.
# - **The front end can still be too slow.** Nobody waits for it any more, so it falls behind, and the user sees its pace:

# %% slide
# NBVAL_CHECK_OUTPUT
for n in (16, 64, 256, 512, 1024):
    in_one, in_two = (simulated(stage, n).run.itl_us().p50 / 1000 for stage in ("chunked", "multiprocess"))
    step = (8_000 + 30 * n) / 1000
    print(f"{n:>5} users: step {step:5.2f} ms; a token every {in_one:5.2f} ms in one process, {in_two:5.2f} in two")
assert in_two == 50 * 1024 / 1000 > step

# %% [markdown] slide
# Then one front-end process is not enough, and the only thing left is several of them (in vLLM, `--api-server-count`).
#
# ## Honest history
#
# - **v0 had two processes as well**, for its HTTP server: from 0.5.4 on, the OpenAI front end reached the engine over ZMQ (`--disable-frontend-multiprocessing` turned that off). But the border lay elsewhere: detokenizing, stop strings and the making of outputs stayed in the engine's loop, and whole Python objects were pickled across. v1 moved the border so that only tokens cross it. Our stage `v0`, in one process, is the design and not that late server.
# - **The GIL is one reason, not the only one.** Deciding a step and preparing its inputs are Python too, and they stay in the core. Stage `v1` hides them behind the device (lesson 08).
# - **Python without a GIL exists** (from 3.13 on, as a build of its own). When the libraries are ready for it, threads will compete for cores alone.

# %% [markdown] slide
# ## Questions
#
# 1. Why does an `async` front end not solve this by itself?
# <details><summary>Answer</summary>An event loop is one thread. It waits for many sockets at once, but what it does with the news is Python, and needs the lock.</details>
#
# 2. The GPU is replaced by one that is twice as fast. What happens to the share of the gaps?
# <details><summary>Answer</summary>It grows, for the front end's work stays and the steps shrink: with 64 users from 24 % (3.2 of 13.1 ms) to 39 % (3.2 of 8.2).</details>
#
# 3. Why does an operation of torch make room for the other thread?
# <details><summary>Answer</summary>It lets go of the lock while it computes. That is meant well: others can run. The price is that it has to get the lock back.</details>
#
# 4. Would a front end in C++ or Rust help?
# <details><summary>Answer</summary>Yes, as far as it does not hold the lock. Tokenizers are such a library already.</details>
#
# 5. P50 of the gap between two steps is small in both layouts, P99 differs. Who notices?
# <details><summary>Answer</summary>Every user who is streamed to, since all of them wait in the same gap.</details>

# %% [markdown]
# ## Exercise
#
# Up to how many users can one front-end process keep up, with the costs above? Find the largest multiple of 50 with pencil and paper, then run the cell. Then make the front end twice as fast.

# %%
my_users = None

front_end_us = 50
keeps_up = [
    n for n in range(50, 601, 50) if simulated("multiprocess", n, front_end_us).run.itl_us().p50 == 8_000 + 30 * n
]
assert my_users in (None, max(keeps_up)), f"not {my_users}: how long is a step, and how long does its text take?"

# %% [markdown]
# ### Solution
#
# <details><summary>Show</summary>A step of n users takes 8,000 + 30 n µs, their tokens 50 n µs. The second is longer from n = 400 on, where both are 20 ms. With 25 µs it never is.</details>

# %%
assert max(keeps_up) == 400
assert simulated("multiprocess", 600, front_end_us=25).run.itl_us().p50 == 8_000 + 30 * 600

# %% [markdown]
# ## In vLLM, look at
#
# - `vllm/v1/engine/async_llm.py`: `AsyncLLM`, whose output handler takes news in slices, so that the event loop gets its turn.
# - `vllm/v1/engine/core_client.py`: `InprocClient` and `AsyncMPClient`, the two classes of this lesson.
# - `vllm/v1/engine/output_processor.py`: what v1 moved out of the engine's loop.
#
# `nanoserve ladder` measures the gap with a real HTTP server and a load generator. Next: **05, processes**: what crosses the border, and who dies with whom.
