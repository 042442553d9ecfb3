"""What a field of a config stands for in vLLM's history, said as it was: prose for the ladder's page.

Knows fields, not stages. v0 had more than its defaults; where the popular story leaves that out, it is said here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

IN_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "scheduler": (
            "A step is either for prompts, taken whole, or for decodes; or else one token budget is handed out to "
            "whoever has tokens to compute, decodes first, so that a long prompt is cut and runs beside them."
        ),
        "client": "The engine core leaves the front end's process, so that no step waits for its interpreter lock.",
        "blocks": "Full blocks are known by the hash of all tokens up to their end: equal beginnings are one set.",
        "runner": "A step replays what was captured for its size instead of launching operation by operation.",
        "batch": "The arrays of a step stay, and are patched by what the plan changed.",
        "compile": "torch.compile makes larger kernels of the pieces between attention calls.",
        "async_scheduling": "The next step is decided and launched while one runs, before its tokens are known.",
    }
)

HISTORY: Mapping[str, str] = MappingProxyType(
    {
        "scheduler": (
            "vLLM v0 could cut prompts into chunks too. That was an option, off by default (from July 2024 on, on for "
            "models with contexts of more than 32K tokens: vLLM pull request 6666); stage v0 is the default. v1 always "
            "does (pull request 11061). Chunks of 256 to 512 tokens are what the SARATHI papers propose; v1's own "
            "budgets are 2,048 to 16,384 tokens a step. A freeze of 200 to 400 ms for one long prompt of a 70B model "
            "takes about eight H100 with fp8 weights, which is why the ladder is simulated for those."
        ),
        "client": (
            "vLLM v0 started with everything in one process, and its server put the API into a process of its own in "
            "August 2024 (pull request 6883); stage v0 is v0 before that. In v1 the scheduler and the runner of a "
            "single GPU share the engine core's process: ZMQ leads to the API process, and shared memory only to the "
            "workers of tensor parallelism. Hence two layouts here, CoreProcessClient and SplitRunnerClient; the "
            "stage takes the first."
        ),
        "blocks": (
            "vLLM v0 could cache prefixes too, as an option that was off by default (V0CachedBlocks is its design). "
            "With that default, 30,000 tokens of KV of Llama-3-70B in bf16 are 9.83 GB for every request that begins "
            "with them: a thousand sessions would be 9.83 TB, not tens of GB."
        ),
        "runner": (
            "vLLM v0 captured CUDA graphs as well, of decodes alone; v1 adds graphs of the pieces between attention "
            "calls, which fit steps of any mix. Stage v0 here captures none, so that this stage shows what capturing "
            "does. On a CPU a graph is the pass's calls of compiled code, recorded with their arguments and made "
            "again in one."
        ),
    }
)
