# title: The message loop of a core process
# question: What does an engine core say, and to what?
# minutes: 35
# seams: client
# needs: lesson 05

# %% [markdown]
# # Exercise 12: What does an engine core say, and to what?
#
# v1 puts the core, scheduler and runner, into a process of its own. What is left of a function call is messages: a type byte and a payload, both ways. You write the core's side of the protocol. `check` starts your server in a process of its own and talks to it over real sockets; some of what it says is nonsense.
#
# About 35 minutes.

# %%
from typing import Any

import msgspec

from nanoserve import messages
from nanoserve.lab.check import check, show_solution
from nanoserve.lab.show import show_source
from nanoserve.messages import CoreOutputs, UtilityCall, UtilityResult
from nanoserve.worker import CoreServer, logger

# %% [markdown]
# ## The rules
#
# Three threads: the **input thread** runs `_receive`, the main thread `_loop`, and an output thread sends what is in `self._outbox`. Between input and main there is `self._inbox`, a queue of `(kind, item)`.
#
# **`_receive`** (input thread, for ever): `kind, payload = self._input.recv_multipart()`; `messages.decode(kind, payload)`.
#
# 1. A payload that cannot be decoded raises `msgspec.DecodeError`: log it, drop it, go on. One bad message must not end a thread that nobody would miss until the next request.
# 2. A kind that is not known decodes to `None`: log it, ignore it.
# 3. An `ABORT` goes to `self.core.abort(ids)` **at once**, not behind what is queued: the step that runs will honour it. It goes to the inbox as well.
# 4. Everything else goes to the inbox.
#
# **`_handle(kind, item)`** (main thread): an `ADD` is `self._add(item)`; an `ABORT` goes to the core *again*, for a request that was still in the inbox at the first time; a `UTILITY` is `self._call(item)`, whose result is put on the outbox: `CoreOutputs([], self.core.stats, [result])`.
#
# **`_call(call)`** runs `self.core.call(call.method, call.args)` and returns a `UtilityResult(call.call_id, value=...)`, or `error="TypeOfError: text"` for any `Exception` that it raised, whatever its type: a caller's mistake must not end the core. (What is no `Exception`, such as `KeyboardInterrupt`, is no caller's mistake, and may.) While `self._deadline` is set, the core is shutting down, and says so in an error instead: the text has the words "shutting down".

# %%
show_source(CoreServer, "_loop", "_drain_inbox")

# %% [markdown]
# ## Your turn


# %%
class MyCore(CoreServer):
    def _receive(self) -> None:
        raise NotImplementedError("about 12 lines: decode, drop what cannot be read, abort at once, queue the rest")

    def _handle(self, kind: bytes, item: Any) -> None:
        raise NotImplementedError("about 7 lines: add, abort again, or call")

    def _call(self, call: UtilityCall) -> UtilityResult:
        raise NotImplementedError("about 6 lines: a value or an error, under the number of the call")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>For each message: in which thread is it dealt with, and what happens to that thread if it raises?</details>
#
# <details><summary>Hint 2: the invariant</summary>No message from outside ends a thread, and every call is answered under its own number.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# receive: for ever:
#     kind, payload from the socket
#     item = decode; DecodeError: log, continue; None: log, continue
#     an abort: to the core at once
#     (kind, item) to the inbox
# handle: add: _add; abort: to the core; utility: result of _call to the outbox
# call: shutting down: an error; try the core: a value; any Exception: an error
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(12, MyCore)

# %%
show_solution(12)

# %% [markdown]
# In vLLM, look at `vllm/v1/engine/core.py`, `EngineCoreProc`: `process_input_sockets`, `_handle_client_request`, `process_output_sockets`.
