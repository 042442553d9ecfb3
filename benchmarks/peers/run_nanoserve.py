"""nanoserve in the last stage, in one process; an empty prefix cache.

Its KV cache is as large as vLLM's beside it, and was written once before, as vLLM's is.
"""

import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # where offline.py is

from loads import Ids, Load, Stamps
from offline import Engine
from serve import own_stdout, parser, serve

from nanoserve.client import InProcessClient
from nanoserve.config import STAGES

POOL_BYTES = 3 * 2**30  # run_vllm.py: VLLM_CPU_KVCACHE_SPACE


def main() -> None:
    args, answers = parser().parse_args(), own_stdout()
    config = replace(
        list(STAGES.values())[-1],
        client=InProcessClient,
        model=args.model,
        num_threads=args.threads,
        max_num_seqs=64,
        max_num_batched_tokens=args.budget,
        kv_cache_memory_bytes=POOL_BYTES,
    )
    engine = Engine(config)
    engine.write_pool()

    def generate(load: Load) -> list[Ids]:
        return stream(load)[1]

    def stream(load: Load) -> tuple[Stamps, list[Ids]]:
        _, tokens, stamps = engine.run(load)
        return stamps, [tokens[i] for i in sorted(tokens)]

    about = {"name": "nanoserve", "version": version("nanoserve"), "torch": torch.__version__}
    serve(answers, about, args.vocab_size, generate, stream)


if __name__ == "__main__":
    main()
