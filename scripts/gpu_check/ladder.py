"""Part `ladder`: stages v0 to v1 at the shapes of known models: decode throughput, a long prompt, a shared prefix.

Random weights in bfloat16. Both models' v0 and v1 come first, then the stages between. The stage `multiprocess` differs
from the one above it in its client alone, which `step_gap.py` measures; all cores run in this process here. Latencies
are from the records of the core itself.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from gpu_check.engines import Engine, quick, with_engine, write_shape
from nanoserve.blocks import SharedBlocks
from nanoserve.checkpoint import read_model_config
from nanoserve.config import STAGES, EngineConfig
from nanoserve.lab.metrics import GroupMetrics
from nanoserve.lab.workload import Workload, long_prompt_among_decodes, random_tokens, shared_system_prompt
from nanoserve.platforms import resolve_platform

if TYPE_CHECKING:
    from gpu_check.part import Part

WINDOWS = 5
WARM_STEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    batches: tuple[int, ...] = (1, 8, 64, 256)
    prompt_len: int = 128
    steps: int = 10  # of a window
    max_model_len: int = 32768
    max_num_seqs: int = 256
    num_streams: int = 32
    stream_tokens: int = 64
    long_prompt_len: int = 16384
    prefix_len: int = 30720
    num_sessions: int = 256
    num_private_sessions: int = 4  # each computes and keeps the whole prefix


DRY = Sizes(
    batches=(1, 4), prompt_len=8, steps=2, max_model_len=1024, max_num_seqs=8, num_streams=4, stream_tokens=12,
    long_prompt_len=200, prefix_len=160, num_sessions=6, num_private_sessions=3,
)  # fmt: skip

# (model, stage, seconds that it takes about)
ORDER = [
    ("qwen3-0.6b", "v0", 15),
    ("qwen3-0.6b", "v1", 45),
    ("llama-3.1-8b", "v0", 20),
    ("llama-3.1-8b", "v1", 50),
    ("qwen3-0.6b", "shared", 15),
    ("qwen3-0.6b", "chunked", 15),
    ("llama-3.1-8b", "shared", 20),
    ("llama-3.1-8b", "chunked", 20),
]
DRY_ORDER = [("tiny-llama", stage, 5) for stage in ("v0", "v1", "shared", "chunked")]


def run(part: Part) -> None:
    part.skip("multiprocess", "as `chunked`, in another process: see the part step_gap")
    sizes = DRY if part.dry else Sizes()
    with TemporaryDirectory() as folder:
        for model, stage, needs_s in DRY_ORDER if part.dry else ORDER:
            if not fits(write_shape(model, Path(folder))):
                part.skip(model, "its weights do not fit into the device's memory")
                continue
            config = stage_config(stage, write_shape(model, Path(folder)), sizes, dry=part.dry)
            climber = Climber(part, f"{model}, {stage}", sizes)
            part.attempt(
                f"{model}, {stage}", needs_s, lambda config=config, climber=climber: with_engine(config, climber.climb)
            )


def fits(model: str) -> bool:
    """With as much again for the cache. Weights have 16 bits."""
    return 4 * read_model_config(model).num_parameters < resolve_platform("auto").free_bytes()


def stage_config(stage: str, model: str, sizes: Sizes, *, dry: bool) -> EngineConfig:
    config = replace(
        STAGES[stage], model=model, max_model_len=sizes.max_model_len, max_num_seqs=sizes.max_num_seqs, device="auto"
    )
    if dry:
        config = replace(config, device="cpu", num_blocks=513)
    return quick(config)


class Climber:
    """One engine's measurements, in order; each is written down before the next begins."""

    def __init__(self, part: Part, name: str, sizes: Sizes) -> None:
        self._part, self._name, self._sizes = part, name, sizes

    def climb(self, engine: Engine) -> None:
        part, name = self._part, self._name
        part.keep(f"{name}: execution", str(engine.execution), (f"{name}: runs with", str(engine.execution)))
        part.attempt(f"{name}: decode", 5, lambda: self.decode(engine))
        part.attempt(f"{name}: long prompt", 6, lambda: self.long_prompt(engine))
        part.attempt(f"{name}: shared prefix", 8, lambda: self.shared_prefix(engine))

    def decode(self, engine: Engine) -> None:
        rates = {batch: decode_rate(engine, batch, self._sizes) for batch in self._sizes.batches}
        shown = ", ".join(f"{batch}: {rate:,.0f}" for batch, rate in rates.items())
        self._part.keep(f"{self._name}: decode", rates, (f"{self._name}: decode tokens/s by batch", shown))

    def long_prompt(self, engine: Engine) -> None:
        """Twice, and the second counts: the first may compile kernels for shapes that had not been there."""
        sizes = self._sizes
        for seed in (1, 2):
            load = long_prompt_among_decodes(
                random_tokens(engine.info.vocab_size),
                seed=seed,
                num_streams=sizes.num_streams,
                stream_prompt_len=32,
                stream_tokens=sizes.stream_tokens,
                num_long=1,
                long_prompt_len=sizes.long_prompt_len,
            )
            metrics = engine.run(with_ids(load, f"seed{seed}-"))
        itl, ttft = metrics.groups["stream"].itl_s, metrics.groups["long"].ttft_s
        assert itl is not None, "no stream had two tokens"
        assert ttft is not None, "the long prompt had no answer"
        result = {"itl_p50_s": itl.p50, "itl_max_s": itl.max, "ttft_long_s": ttft.p50, "num_steps": metrics.num_steps}
        what = f"{self._name}: {sizes.long_prompt_len} tokens among {sizes.num_streams} decodes"
        figure = f"ITL P50 {itl.p50 * 1e3:.1f} ms, max {itl.max * 1e3:.1f} ms; its TTFT {ttft.p50 * 1e3:.0f} ms"
        self._part.keep(f"{self._name}: long prompt", result, (what, figure))

    def shared_prefix(self, engine: Engine) -> None:
        """Blocks that are private must hold the prefix once for each session: only a few are asked for then."""
        sizes = self._sizes
        num_sessions, fit, num_warm_up = sizes.num_sessions, sessions_that_fit(engine, sizes), 2
        if not issubclass(engine.client.core.config.blocks, SharedBlocks):
            num_sessions, num_warm_up = min(sizes.num_private_sessions, fit), 1
        source = random_tokens(engine.info.vocab_size)
        for seed, number in ((3, num_warm_up), (4, num_sessions)):
            load = shared_system_prompt(
                source, seed=seed, num_requests=number, prefix_len=sizes.prefix_len, tail_len=32, output_tokens=4
            )
            metrics = engine.run(with_ids(load, f"seed{seed}-"))
        ttft = first_token(metrics.groups["session"])
        result = {
            "num_sessions": num_sessions,
            "num_sessions_that_fit_if_private": fit,
            "ttft_p50_s": ttft[0],
            "ttft_max_s": ttft[1],
            "prompt_tokens_computed": metrics.prompt_tokens_computed,
            "peak_used_blocks": metrics.peak_used_blocks,
            "num_blocks": engine.info.num_blocks,
        }
        few = "" if num_sessions == sizes.num_sessions else f" (not {sizes.num_sessions}: private, {fit} would fit)"
        figure = (
            f"TTFT P50 {ttft[0]:.2f} s, max {ttft[1]:.2f} s; {metrics.prompt_tokens_computed:,} prompt tokens "
            f"computed, {metrics.peak_used_blocks:,} of {engine.info.num_blocks:,} blocks"
        )
        what = f"{self._name}: {sizes.prefix_len} shared tokens x {num_sessions}{few}"
        self._part.keep(f"{self._name}: shared prefix", result, (what, figure))


def sessions_that_fit(engine: Engine, sizes: Sizes) -> int:
    blocks_each = -(-(sizes.prefix_len + 36) // engine.info.block_size)
    return max(1, (engine.info.num_blocks - 1) // blocks_each)


def first_token(group: GroupMetrics) -> tuple[float, float]:
    assert group.ttft_s is not None, "no session had an answer"
    return group.ttft_s.p50, group.ttft_s.max


def with_ids(load: Workload, prefix: str) -> Workload:
    """Ids that no workload before had."""
    return replace(load, arrivals=[replace(arrival, id=prefix + arrival.id) for arrival in load.arrivals])


def decode_rate(engine: Engine, batch: int, sizes: Sizes) -> float:
    """Tokens a second of a batch that only decodes: the median of some windows, by the clock of the host."""
    rng = random.Random(batch)
    ids = [f"decode-{batch}-{i}" for i in range(batch)]
    num_tokens = WARM_STEPS + (WINDOWS + 1) * sizes.steps + batch  # enough while the others are prefilled
    for request_id in ids:
        prompt = [rng.randrange(1, engine.info.vocab_size) for _ in range(sizes.prompt_len)]
        engine.submit(request_id, prompt, num_tokens)
    begun: set[str] = set()
    while len(begun) < batch:
        begun.update(request_id for request_id, token_ids in engine.poll() if token_ids)
    for _ in range(WARM_STEPS):
        list(engine.poll())
    rates = []
    for _ in range(WINDOWS):
        start_s, num_new = time.perf_counter(), 0
        for _ in range(sizes.steps):
            num_new += sum(len(token_ids) for _, token_ids in engine.poll())
        rates.append(num_new / (time.perf_counter() - start_s))
    engine.abort(ids)
    return median(rates)
