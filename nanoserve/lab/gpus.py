"""What GPUs can do and how big models are: published figures, and the memory arithmetic that follows from them.

Owns two small tables, each row with its source; measures nothing. Rates are peaks of dense arithmetic (data sheets
like to quote twice that, with 2:4 sparsity), bytes are powers of 1000 as in the data sheets. What is left of the
memory for KV blocks, and how many sessions that holds, is integer arithmetic. Laws: tests/test_costs.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nanoserve.block_pool import cdiv

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"fp32": 4, "bf16": 2, "fp8": 1})
DEFAULT_MEMORY_USE = 0.9  # share of the memory that weights and KV blocks may take, vLLM's default


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Rates in operations and bytes a second; None: the GPU has no such units."""

    name: str
    flops: Mapping[str, float | None]  # by dtype of the matrix products
    bandwidth: float
    memory_bytes: int
    source: str

    def flops_of(self, dtype: str) -> float:
        """ValueError where it has no units of that kind."""
        rate = self.flops.get(dtype)
        if rate is None:
            known = ", ".join(name for name, value in self.flops.items() if value)
            raise ValueError(f"dtype={dtype!r} is not known to {self.name}; use one of {known}.")
        return rate


def _gpu(
    name: str, tera: tuple[float, float, float | None], bandwidth_gb: float, memory_gb: int, source: str
) -> tuple[str, Gpu]:
    """Of tera-operations a second in fp32, bf16 and fp8."""
    flops = {dtype: None if t is None else t * 1e12 for dtype, t in zip(("fp32", "bf16", "fp8"), tera, strict=True)}
    return name, Gpu(name, MappingProxyType(flops), bandwidth_gb * 1e9, memory_gb * 10**9, source)


GPUS: Mapping[str, Gpu] = MappingProxyType(
    dict(
        (
            _gpu("a100", (19.5, 312.0, None), 2039, 80, "NVIDIA A100 data sheet, 80 GB SXM"),
            _gpu("h100", (67.0, 989.0, 1979.0), 3350, 80, "NVIDIA H100 data sheet, SXM; halves of the sparse figures"),
            _gpu("h200", (67.0, 989.0, 1979.0), 4800, 141, "NVIDIA H200 data sheet, SXM; halves of the sparse figures"),
            _gpu(
                "b200", (75.0, 2250.0, 4500.0), 8000, 180, "NVIDIA HGX B200 data sheet, an eighth of the board, dense"
            ),
            _gpu("mi300x", (163.4, 1307.4, 2614.9), 5300, 192, "AMD Instinct MI300X data sheet"),
            _gpu("l4", (30.3, 121.0, 242.0), 300, 24, "NVIDIA L4 data sheet; halves of the sparse figures"),
            _gpu("rtx4090", (82.6, 165.2, 330.3), 1008, 24, "NVIDIA Ada architecture paper, sums in fp32"),
        )
    )
)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A dense decoder: what its arithmetic and its memory depend on. `num_params` as its publisher rounds it."""

    name: str
    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    is_tied: bool  # the output head is the embedding
    source: str

    @property
    def attention_width(self) -> int:
        """Query heads x head size: the `d` of the attention's operations."""
        return self.num_heads * self.head_dim

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_of(dtype)

    def weight_bytes(self, dtype: str) -> float:
        return self.num_params * bytes_of(dtype)

    def count_params(self) -> int:
        """Weights of the matrices that this shape has; norms and biases are too few to count."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)


_LLAMA, _QWEN = "Meta's model card and config.json", "Qwen3 technical report and config.json"
MODELS: Mapping[str, ModelSize] = MappingProxyType(
    {
        m.name: m
        for m in (
            ModelSize("llama-3-8b", 8.03e9, 32, 32, 8, 128, 4096, 14336, 128256, False, _LLAMA),
            ModelSize("llama-3-70b", 70.6e9, 80, 64, 8, 128, 8192, 28672, 128256, False, _LLAMA),
            ModelSize("llama-3-405b", 406e9, 126, 128, 8, 128, 16384, 53248, 128256, False, f"{_LLAMA} (Llama 3.1)"),
            ModelSize("qwen3-0.6b", 0.6e9, 28, 16, 8, 128, 1024, 3072, 151936, True, _QWEN),
            ModelSize("qwen3-1.7b", 1.7e9, 28, 16, 8, 128, 2048, 6144, 151936, True, _QWEN),
            ModelSize("qwen3-4b", 4.0e9, 36, 32, 8, 128, 2560, 9728, 151936, True, _QWEN),
            ModelSize("qwen3-8b", 8.2e9, 36, 32, 8, 128, 4096, 12288, 151936, False, _QWEN),
            ModelSize("qwen3-14b", 14.8e9, 40, 40, 8, 128, 5120, 17408, 151936, False, _QWEN),
            ModelSize("qwen3-32b", 32.8e9, 64, 64, 8, 128, 5120, 25600, 151936, False, _QWEN),
            ModelSize("nanostory", 1.247e6, 5, 4, 2, 32, 128, 384, 2048, True, "its config.json, embedded here"),
        )
    }
)


def get_gpu(name: str) -> Gpu:
    """By name, whatever the case; ValueError with the known ones otherwise."""
    key = name.lower().replace("-", "").replace(" ", "")
    if key not in GPUS:
        raise ValueError(f"gpu {name!r} is not known; use one of {', '.join(GPUS)}.")
    return GPUS[key]


def get_model(name: str) -> ModelSize:
    """By name, whatever the case; ValueError with the known ones otherwise."""
    if name.lower() not in MODELS:
        raise ValueError(f"model {name!r} has no figures here; use one of {', '.join(MODELS)}.")
    return MODELS[name.lower()]


def bytes_of(dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype={dtype!r} is not known; use one of {', '.join(DTYPE_BYTES)}.")
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One replica's memory: `tp` GPUs that hold one copy of the weights, and KV blocks in what is left of `use`.

    With fp8 weights the KV cache stays in bf16 unless `kv_dtype` says otherwise, as in vLLM. Activations, graphs and
    what the tensor-parallel ranks keep twice have to fit in the share that `use` leaves out.
    """

    model: ModelSize
    gpu: Gpu
    tp: int = 1
    dtype: str = "bf16"
    kv_dtype: str | None = None
    block_size: int = 16
    use: float = DEFAULT_MEMORY_USE

    def __post_init__(self) -> None:
        if not 1 <= self.tp <= 1024:
            raise ValueError(f"tp must be an integer >= 1 and <= 1024, got {self.tp}.")
        if not 0 < self.use <= 1:
            raise ValueError(f"memory use must be in (0, 1], got {self.use:g}.")
        if self.block_size < 1:
            raise ValueError(f"block_size must be an integer >= 1, got {self.block_size}.")

    @property
    def total_bytes(self) -> int:
        return self.tp * self.gpu.memory_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        default = "bf16" if self.dtype == "fp8" else self.dtype
        return self.model.kv_bytes_per_token(self.kv_dtype or default)

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.kv_bytes_per_token

    @property
    def num_blocks(self) -> int:
        """KV blocks that fit beside the weights. ValueError when the weights alone do not leave room for two."""
        left = self.use * self.total_bytes - self.model.weight_bytes(self.dtype)
        if left < 2 * self.block_bytes:
            need = self.model.weight_bytes(self.dtype) / 1e9
            raise ValueError(
                f"{self.model.name} in {self.dtype} needs {need:,.1f} GB for its weights, and {self.tp} x "
                f"{self.gpu.name} at {self.use:.0%} use have {self.use * self.total_bytes / 1e9:,.1f} GB; raise tp, "
                "use fp8, or take a larger GPU."
            )
        return int(left // self.block_bytes)

    def sessions(self, prefix_len: int, own_len: int, num_blocks: int | None = None) -> tuple[int, int]:
        """Sessions that fit at once, each of a common prefix and tokens of its own: (a copy each, one copy shared).
        One block of the pool is the null block."""
        usable = (self.num_blocks if num_blocks is None else num_blocks) - 1
        private, own = session_blocks(prefix_len, own_len, self.block_size)
        return usable // private, max(0, usable - prefix_len // self.block_size) // own


def session_blocks(prefix_len: int, own_len: int, block_size: int) -> tuple[int, int]:
    """Blocks of a session with a copy of everything, and of one that finds the full blocks of the prefix."""
    total = cdiv(prefix_len + own_len, block_size)
    return total, total - prefix_len // block_size


def format_bytes(count: float) -> str:
    """Three digits and a unit of 1000s, as data sheets write it: 9.83 GB, 46.5 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.{0 if count >= 99.95 or unit == 'B' else 1 if count >= 9.995 else 2}f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
