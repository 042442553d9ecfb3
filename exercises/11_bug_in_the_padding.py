# title: A bug in the padding
# question: What do tokens do that are not there?
# minutes: 20
# seams: runner
# needs: lesson 08, exercise 9

# %% [markdown]
# # Exercise 11: What do tokens do that are not there?
#
# A captured graph has a fixed size. A step of 3 tokens that replays a graph of 8 has 5 tokens of padding, and they take part in everything: embedding, products, and writing to the KV cache. The memory that a graph reads is filled anew before each replay. A planted bug fills it the wrong way, and answers go wrong.
#
# About 20 minutes. This one runs the embedded model.

# %%
from nanoserve.input_batch import HostInputs
from nanoserve.lab.check import check, show_solution
from nanoserve.lab.check_report import timeline_lines
from nanoserve.lab.faults import run_fault
from nanoserve.lab.planted import KeepsOldSlots
from nanoserve.lab.show import show_source
from nanoserve.static_inputs import NOT_STORED, StaticInputs

# %% [markdown]
# ## The trace
#
# Graphs have 8 or 32 tokens. The first step is a prompt batch of 24.

# %%
# NBVAL_CHECK_OUTPUT
outcome = run_fault("padding-stores")
print(outcome.first)
print(*timeline_lines("request", outcome.records, 2, ["r0", "r1", "r2"]), sep="\n")
for record in outcome.records[:3]:
    print(f"step {record.step}: graph {record.graph!r}, {record.num_padding_tokens} tokens of padding")

# %% [markdown]
# The first token of each request is right, a later one is wrong: something happened to keys and values that were right before. What is in `slot_mapping_T`, behind the tokens of step 2?

# %%
show_source(StaticInputs, "__init__")

# %% [markdown]
# ## Your turn
#
# `fill_tokens(inputs, size)` fills the first `size` places of three buffers for a replay:
#
# | buffer | a token's value | padding |
# |---|---|---|
# | `self.input_ids_T` | `inputs.input_ids_T` | id 0 |
# | `self.positions_T` | `inputs.positions_T` | position 0 |
# | `self.slot_mapping_T` | `inputs.slot_mapping_T` | ? |
#
# A step has `len(inputs.input_ids_T)` tokens, at most `size`.


# %%
class MyInputs(KeepsOldSlots):
    def fill_tokens(self, inputs: HostInputs, size: int) -> None:
        raise NotImplementedError("about 8 lines: tokens first, then padding up to size, in all three buffers")


# %% [markdown]
# <details><summary>Hint 1: the question to ask</summary>The steps that go wrong are smaller than their graph. Where do the tokens that fill it up write their keys and values?</details>
#
# <details><summary>Hint 2: the invariant</summary>Padding touches nothing: its slot is -1 (<code>NOT_STORED</code>), in every step anew.</details>
#
# <details><summary>Hint 3: pseudo-code</summary><pre>
# n = number of tokens
# for each buffer, its tokens, its padding:
#     buffer[:n] = tokens
#     buffer[n:size] = padding
# </pre></details>

# %%
# NBVAL_CHECK_OUTPUT
check(11, MyInputs)

# %%
show_solution(11)

# %% [markdown]
# In vLLM, look for `PAD_SLOT_ID`, and for where `slot_mapping` is filled behind the last token.
