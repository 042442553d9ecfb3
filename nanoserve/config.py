"""One frozen `EngineConfig`: numbers, and the classes that make up the engine; and `STAGES`, v0 to v1.

A switch is a class: `replace(STAGES["v0"], scheduler=UnifiedScheduler)`. Each stage is one `replace` of the one
above it. `None` means "filled in by `resolve` when the engine is built, from the classes and the machine".
Imports no torch. Every refusal names the value, the limit and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nanoserve.attention import TorchAttention
from nanoserve.blocks import PrivateBlocks, SharedBlocks, V0CachedBlocks
from nanoserve.client import CoreProcessClient, InProcessClient, SplitRunnerClient
from nanoserve.compilation import CompileMode
from nanoserve.cpu_attention import CpuAttention
from nanoserve.cpu_ops import CpuOps
from nanoserve.graph_runner import GraphRunner
from nanoserve.graphs import GraphMode, given_sizes
from nanoserve.input_batch import RebuiltBatch
from nanoserve.ops import TorchOps, TritonOps
from nanoserve.persistent_batch import PersistentBatch
from nanoserve.runner import EagerRunner
from nanoserve.scheduler import ChunkedNoMixScheduler, PhaseSplitScheduler, UnifiedScheduler
from nanoserve.triton_attention import TritonAttention

if TYPE_CHECKING:
    from nanoserve.attention import AttentionBackend
    from nanoserve.blocks import KVCacheManager
    from nanoserve.client import EngineClient
    from nanoserve.input_batch import InputBatch
    from nanoserve.ops import Ops
    from nanoserve.runner import Runner
    from nanoserve.scheduler import BaseScheduler

DEFAULT_MODEL = "nanostory"
MAX_COUNT, MAX_BLOCKS = 2**63 - 1, 2**40
MAX_TIMEOUT_S = 1_000_000
START_TIMEOUT_S, EXECUTE_TIMEOUT_S = 600.0, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an engine is built from. The bare defaults are stage `v0`; names are vLLM's where they mean the same.

    Sizes are in tokens unless the name says bytes or blocks.
    """

    model: str = DEFAULT_MODEL  # the embedded model, a folder, or a hub id

    # the seams
    scheduler: type[BaseScheduler] = PhaseSplitScheduler
    client: type[EngineClient] = InProcessClient
    blocks: type[KVCacheManager] = PrivateBlocks
    runner: type[Runner] = EagerRunner
    batch: type[InputBatch] = RebuiltBatch
    attention: type[AttentionBackend] | None = None  # None: the device's default
    ops: type[Ops] | None = None  # None: fused by hand on a GPU, unless compiled
    compile: str | None = "none"  # "layers", "model"; None: the device's default
    graph_mode: str | None = None  # of a runner that captures graphs; None: the device's default
    graph_sizes: tuple[int, ...] | None = None  # tokens; None: graphs.default_sizes

    # the model
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None  # "int8": of the weight matrices, on a CPU
    load_format: str = "auto"  # "dummy": random weights from the config alone
    num_threads: int | None = None  # CPU threads of a step; None: by the size of the model
    max_model_len: int | str | None = None  # None: the model's; "auto": shrunk to what the KV pool holds
    seed: int = 0

    # the KV pool
    block_size: int = 16
    num_blocks: int | None = None  # None: from kv_cache_memory_bytes; one of them is the null block
    kv_cache_memory_bytes: int | None = None  # None: from the device
    free_order: str = "uncached_first"  # "append": early v1
    num_swap_blocks: int = 0  # host blocks for preemption_mode="swap"

    # the scheduler
    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0  # 0: off
    watermark: float | None = None  # share of the pool that admission keeps free
    reserve_full_prompt: bool = True  # admit a request only when its whole prompt fits
    policy: str = "fcfs"
    preemption_mode: str = "recompute"
    async_scheduling: bool = False  # decide and launch a step while the one before it runs
    check_invariants: bool = False  # after every step; for tests and learners

    # processes (seconds)
    start_timeout_s: float = START_TIMEOUT_S  # for a child to load its model
    execute_timeout_s: float = EXECUTE_TIMEOUT_S  # for a runner process to answer a step
    shutdown_timeout_s: float = 0.0  # for open requests to finish after SIGTERM; 0 aborts them

    def __post_init__(self) -> None:
        _one_of("load_format", self.load_format, ("auto", "dummy"))
        _one_of("free_order", self.free_order, ("uncached_first", "append"))
        _one_of("policy", self.policy, ("fcfs", "priority"))
        if self.compile is not None:
            _one_of("compile", self.compile, tuple(CompileMode))
        if self.quantization is not None:
            _one_of("quantization", self.quantization, ("int8",))
        self._check_graphs()
        _one_of("preemption_mode", self.preemption_mode, ("recompute", "swap"))
        _at_least("seed", self.seed, -(2**63))
        _at_least("block_size", self.block_size, 1, high=2**16)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("num_swap_blocks", self.num_swap_blocks, 0, high=MAX_BLOCKS)
        _at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        for name, low, high in (
            ("num_threads", 1, 1024),
            ("num_blocks", 2, MAX_BLOCKS),
            ("kv_cache_memory_bytes", 1, MAX_COUNT),
            ("max_num_batched_tokens", 1, MAX_COUNT),
        ):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), low, high)
        if self.max_model_len not in (None, "auto"):
            _at_least("max_model_len", self.max_model_len, 2)
        if not isinstance(self.async_scheduling, bool):
            raise ValueError(f"async_scheduling must be True or False, got {_show(self.async_scheduling)}.")
        for name in ("start_timeout_s", "execute_timeout_s", "shutdown_timeout_s"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= MAX_TIMEOUT_S or (value == 0 and name != "shutdown_timeout_s"):
                low = ">= 0" if name == "shutdown_timeout_s" else "> 0"
                raise ValueError(f"{name} must be seconds {low} and at most {MAX_TIMEOUT_S:,}, got {value!r}.")
        self._check_answers()
        is_share = isinstance(self.watermark, int | float) and 0 <= self.watermark < 1
        if self.watermark is not None and (isinstance(self.watermark, bool) or not is_share):
            raise ValueError(
                f"watermark must be in [0, 1), got {_show(self.watermark)}; 0.01 keeps one block in a hundred."
            )
        self.scheduler.check_config(self)
        if self.num_swap_blocks and self.preemption_mode != "swap":
            raise ValueError(
                f"num_swap_blocks={self.num_swap_blocks} means nothing with preemption_mode={self.preemption_mode!r}; "
                "leave it out, or use preemption_mode='swap'."
            )
        if self.preemption_mode == "swap":
            if not self.blocks.can_swap:
                raise ValueError(
                    f"preemption_mode='swap' needs a manager that can swap, {self.blocks.__name__} shares blocks; "
                    "use PrivateBlocks (--blocks private) or preemption_mode='recompute'."
                )
            if self.num_swap_blocks < 1:
                raise ValueError("preemption_mode='swap' needs num_swap_blocks >= 1, got 0; give it host blocks.")

    def _check_answers(self) -> None:
        """A limit on how long an answer may take needs a process that answers."""
        if self.start_timeout_s != START_TIMEOUT_S and not self.client.starts_core:
            raise ValueError(
                f"start_timeout_s={self.start_timeout_s:g} means nothing to {self.client.__name__}, which starts no "
                "process; leave it out, or use CoreProcessClient (--client core_process)."
            )
        if self.execute_timeout_s != EXECUTE_TIMEOUT_S and not self.client.starts_runner:
            raise ValueError(
                f"execute_timeout_s={self.execute_timeout_s:g} means nothing to {self.client.__name__}, whose runner "
                "has no process of its own; leave it out, or use SplitRunnerClient (--client split_runner)."
            )

    def _check_graphs(self) -> None:
        if self.graph_mode is not None:
            _one_of("graph_mode", self.graph_mode, tuple(GraphMode))
        if not isinstance(self.graph_sizes, tuple | None):
            raise ValueError(f"graph_sizes must be a tuple of sizes in tokens, got {_show(self.graph_sizes)}.")
        for size in self.graph_sizes or ():
            _at_least("graph_sizes", size, 1)
        if self.graph_sizes and self.graph_mode == GraphMode.NONE:
            raise ValueError(
                f"graph_sizes={_show(self.graph_sizes)} means nothing with graph_mode='none'; leave it out."
            )
        for name in ("graph_mode", "graph_sizes"):
            if getattr(self, name) is not None and not self.runner.captures_graphs:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} means nothing to {self.runner.__name__}, which captures nothing; "
                    "leave it out, or use GraphRunner (--runner graph)."
                )
        if self.graph_sizes == ():
            raise ValueError("graph_sizes=() names no size; leave it out for the default ones.")

    def resolve(self, *, model_len: int, pool_blocks: int, device: str) -> EngineConfig:
        """The same config with every None filled in, checked against the model and the KV pool.

        `model_len`: longest sequence of the model; `pool_blocks`: blocks that the memory share holds (used when
        `num_blocks` is None); `device`: "cpu" or a GPU type. Raises ValueError.
        """
        num_blocks = self.num_blocks or pool_blocks
        watermark = self.scheduler.default_watermark if self.watermark is None else self.watermark
        usable = (num_blocks - 1 - int(watermark * num_blocks)) * self.block_size
        wanted = model_len if self.max_model_len in (None, "auto") else self.max_model_len
        assert isinstance(wanted, int)
        if wanted > model_len:
            raise ValueError(f"max_model_len={wanted} is longer than the model's {model_len}; use at most {model_len}.")
        if usable < 2:  # a prompt token and an output token
            raise ValueError(
                f"the KV pool of {num_blocks} blocks of {self.block_size} (one is the null block, watermark="
                f"{watermark}) is too small for one request; raise num_blocks or kv_cache_memory_bytes."
            )
        if wanted > usable and self.max_model_len != "auto":
            raise ValueError(
                f"the KV pool of {num_blocks} blocks of {self.block_size} holds {usable} tokens for a request, "
                f"fewer than max_model_len={wanted}; set max_model_len={usable} (or 'auto'), or give the pool "
                f"more blocks (num_blocks or kv_cache_memory_bytes)."
            )
        max_model_len = min(wanted, usable)
        budget = self.max_num_batched_tokens or self.scheduler.default_budget(max_model_len, device)
        resolved = replace(
            self,
            num_blocks=num_blocks,
            watermark=watermark,
            max_model_len=max_model_len,
            max_num_batched_tokens=budget,
            device=device,
        )
        resolved._check_resolved()
        return resolved

    def _check_resolved(self) -> None:
        budget, model_len = self.budget, self.model_len
        if budget < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={budget} is smaller than max_num_seqs={self.max_num_seqs}: a step holds one "
                f"token of every running request; raise it to {self.max_num_seqs} or lower max_num_seqs."
            )
        if self.long_prefill_token_threshold > model_len:
            raise ValueError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} is larger than "
                f"max_model_len={model_len}; lower it (0 switches it off)."
            )
        self.scheduler.check_resolved(self)
        if self.graph_sizes is not None:
            given_sizes(self.graph_sizes, budget)

    @property
    def budget(self) -> int:
        """`max_num_batched_tokens` of a resolved config."""
        assert self.max_num_batched_tokens is not None, "resolve() first"
        return self.max_num_batched_tokens

    @property
    def model_len(self) -> int:
        """`max_model_len` of a resolved config."""
        assert isinstance(self.max_model_len, int), "resolve() first"
        return self.max_model_len

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission keeps free, of a resolved config."""
        assert self.watermark is not None, "resolve() first"
        assert self.num_blocks is not None, "resolve() first"
        return int(self.watermark * self.num_blocks)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(known)}.")


def _at_least(name: str, value: Any, low: int, high: int = MAX_COUNT) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer >= {low} and <= {high}, got {_show(value)}.")


def _show(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**80:  # Python refuses to print thousands of digits
        return "an integer of more than 80 digits"
    return f"{value!r:.80}"


def _stages() -> Mapping[str, EngineConfig]:
    v0 = EngineConfig()
    chunked = replace(v0, scheduler=UnifiedScheduler)
    multiprocess = replace(chunked, client=CoreProcessClient)
    shared = replace(multiprocess, blocks=SharedBlocks)
    v1 = replace(shared, runner=GraphRunner, batch=PersistentBatch, compile=None, async_scheduling=True)
    return MappingProxyType({"v0": v0, "chunked": chunked, "multiprocess": multiprocess, "shared": shared, "v1": v1})


STAGES: Mapping[str, EngineConfig] = _stages()

# The names a command line uses for the classes; one flag a seam, each overriding one field of the stage.
SEAMS: Mapping[str, Mapping[str, type]] = MappingProxyType(
    {
        "scheduler": {
            "phase_split": PhaseSplitScheduler,
            "chunked_no_mix": ChunkedNoMixScheduler,
            "unified": UnifiedScheduler,
        },
        "client": {
            "inproc": InProcessClient,
            "core_process": CoreProcessClient,
            "split_runner": SplitRunnerClient,
        },
        "blocks": {"private": PrivateBlocks, "v0_cached": V0CachedBlocks, "shared": SharedBlocks},
        "runner": {"eager": EagerRunner, "graph": GraphRunner},
        "attention": {"torch": TorchAttention, "cpu": CpuAttention, "triton": TritonAttention},
        "ops": {"torch": TorchOps, "cpu": CpuOps, "triton": TritonOps},
        "batch": {"rebuilt": RebuiltBatch, "persistent": PersistentBatch},
    }
)


def get_stage(name: str) -> EngineConfig:
    """The stage of that name; ValueError with the known ones otherwise."""
    if not isinstance(name, str) or name not in STAGES:
        raise ValueError(f"stage {name!r} is not known; use one of {', '.join(STAGES)}.")
    return STAGES[name]
