"""What a step takes on the device, in whole microseconds: the only thing that a simulation makes up.

`Linear` is exact and has no hardware in it; `Roofline` follows from data sheets (gpus.py); `Table` is fitted to the
records of a real run (calibrate.py). A model is told the counts of a step, never its requests. What the host adds is
`Host`, in simulator.py. Laws: tests/test_costs.py.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from nanoserve.lab.gpus import Gpu, Memory, ModelSize

TABLE_VERSION = 2


class StepLoad(NamedTuple):
    """The counts of one step, over all of its requests.

    A request that has computed s tokens and gets n reads the KV of s + n tokens (`context`), and its tokens attend to
    s + 1, ..., s + n of them (`attention`: semantics.md calls it the sum of q x context).
    """

    num_tokens: int
    num_requests: int
    context: int = 0
    attention: int = 0


def attention_of(num_computed: int, num_tokens: int) -> int:
    """Pairs of a token and one that it attends to, of one request in one step."""
    return num_tokens * num_computed + num_tokens * (num_tokens + 1) // 2


class CostModel(Protocol):
    """Pure: the same load costs the same. `str()` of it says what it is, for titles and traces."""

    needs_context: ClassVar[bool]  # False: `context` and `attention` are not looked at, and may be 0

    def step_us(self, load: StepLoad) -> int:
        """Microseconds of a step that has at least one token."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """`base_us + token_us x tokens`: exact, with whole numbers, and easy to check by hand."""

    base_us: float
    token_us: float
    needs_context: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("base_us", "token_us"):
            value = getattr(self, name)
            if not 0 <= value < 1e12:
                raise ValueError(f"{name} of linear costs must be microseconds >= 0 and < 1e12, got {value:g}.")
        if self.base_us + self.token_us < 1:
            raise ValueError("linear costs must be at least 1 microsecond for a step of one token.")

    def step_us(self, load: StepLoad) -> int:
        return round(self.base_us + self.token_us * load.num_tokens)

    def __str__(self) -> str:
        return f"linear:{self.base_us:g},{self.token_us:g}"


REFERENCE = Linear(8000, 30)  # of the worked table in semantics.md, section 10


@dataclass(frozen=True, slots=True)
class Roofline:
    """`max(operations / rate, bytes / bandwidth)` of one replica: `memory.tp` GPUs as one that is `tp` times as fast.

    Operations: 2 x parameters x tokens, and 4 x layers x width for each pair in `attention`. Bytes: the weights once,
    KV read and KV written. Each share is what of the data sheet's peak is reached; what tensor parallelism spends on
    talking is in them. The roofline model is Williams et al. 2009; the host's overhead is `Host`'s.
    """

    memory: Memory
    flops_share: float = 0.6
    bandwidth_share: float = 0.8
    needs_context: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("flops_share", "bandwidth_share"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(f"{name} of a roofline must be in (0, 1], got {value:g}.")
        self.gpu.flops_of(self.memory.dtype)

    @property
    def model(self) -> ModelSize:
        return self.memory.model

    @property
    def gpu(self) -> Gpu:
        return self.memory.gpu

    @property
    def flops_per_s(self) -> float:
        return self.memory.tp * self.gpu.flops_of(self.memory.dtype) * self.flops_share

    @property
    def bytes_per_s(self) -> float:
        return self.memory.tp * self.gpu.bandwidth * self.bandwidth_share

    def compute_s(self, load: StepLoad) -> float:
        model = self.model
        flops = 2 * model.num_params * load.num_tokens
        flops += 4 * model.num_layers * model.attention_width * load.attention
        return flops / self.flops_per_s

    def memory_s(self, load: StepLoad) -> float:
        kv_bytes = self.memory.kv_bytes_per_token * (load.context + load.num_tokens)
        return (self.model.weight_bytes(self.memory.dtype) + kv_bytes) / self.bytes_per_s

    def step_us(self, load: StepLoad) -> int:
        return max(1, round(max(self.compute_s(load), self.memory_s(load)) * 1e6))

    @property
    def knee_tokens(self) -> float:
        """Tokens a step from which on the matrix products take longer than reading the weights."""
        weights_s = self.model.weight_bytes(self.memory.dtype) / self.bytes_per_s
        return weights_s * self.flops_per_s / (2 * self.model.num_params)

    def __str__(self) -> str:
        m = self.memory
        shares = f"{self.flops_share:.0%} of the operations, {self.bandwidth_share:.0%} of the bandwidth"
        return f"roofline of {m.model.name} on {m.tp} x {m.gpu.name}, {m.dtype}, {shares}"


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted: what a step of so many tokens takes, read off a line through the knots, plus a sum over its rows.

    The tokens' part is all that a model does token by token: the products, the norms, the host's work on them. A row
    adds `request_us`, and what attention does for it: `context_us` for each token whose KV it reads, `attention_us` for
    each pair. The file that `nanoserve calibrate` writes is this, as JSON. `gap_us`: the mean from the end of a step to
    the start of the next, which is the host's (`Host.step_us`).
    """

    needs_context: ClassVar[bool] = True

    version: int = TABLE_VERSION
    source: str = ""  # what was recorded
    knot_tokens: list[float]  # rising
    knot_us: list[float]
    request_us: float
    context_us: float
    attention_us: float
    gap_us: float = 0.0
    num_steps: int = 0  # that it was fitted to
    median_error: float = 0.0  # |fitted / measured - 1| over those steps
    p90_error: float = 0.0

    def tokens_us(self, num_tokens: int) -> float:
        """Straight from knot to knot, and straight on beyond both ends; never below 0."""
        return max(0.0, sum(share * self.knot_us[i] for i, share in shares(self.knot_tokens, num_tokens)))

    def step_us(self, load: StepLoad) -> int:
        rows_us = (
            self.request_us * load.num_requests + self.context_us * load.context + self.attention_us * load.attention
        )
        return max(1, round(self.tokens_us(load.num_tokens) + rows_us))

    def __str__(self) -> str:
        return f"table fitted to {self.num_steps:,} steps of {self.source or 'a recorded run'}"


def shares(knots: Sequence[float], n: float) -> list[tuple[int, float]]:
    """The two knots (one, where there is only one) on whose line n lies, and the share that each has in its value."""
    if len(knots) == 1:
        return [(0, 1.0)]
    low = min(max(bisect_right(knots, n) - 1, 0), len(knots) - 2)
    part = (n - knots[low]) / (knots[low + 1] - knots[low])
    return [(low, 1 - part), (low + 1, part)]


def read_table(path: str | Path) -> Table:
    """What `nanoserve calibrate` wrote. Raises OSError, and ValueError for anything else."""
    try:
        version = msgspec.json.decode(Path(path).read_bytes(), type=_Versioned).version
        if version != TABLE_VERSION:
            raise ValueError(
                f"{path} has format version {version}; this build reads {TABLE_VERSION}: calibrate once more."
            )
        table = msgspec.json.decode(Path(path).read_bytes(), type=Table)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is not a table of costs ({error}); write one with nanoserve calibrate.") from None
    numbers = [*table.knot_us, table.request_us, table.context_us, table.attention_us, table.gap_us]
    knots = table.knot_tokens
    ok = all(0 <= n < math.inf for n in numbers) and len(knots) == len(table.knot_us) > 0
    rising = all(0 < a < b for a, b in pairwise([0.5, *knots]))
    if not ok or not rising:
        raise ValueError(f"{path} has a cost below 0, or knots that do not rise; write it with nanoserve calibrate.")
    return table


class _Versioned(msgspec.Struct):
    """What a table of any version has."""

    version: int


def parse_costs(text: str) -> Linear | Table:
    """`linear:BASE,TOKEN` (microseconds) or `table:FILE`. Raises ValueError, and OSError for the file."""
    kind, _, rest = text.partition(":")
    if kind == "linear":
        try:
            base, token = (float(number) for number in rest.split(","))
        except ValueError:
            raise ValueError(f"{text!r} is not a pair of numbers; write linear:8000,30 (microseconds).") from None
        return Linear(base, token)
    if kind == "table" and rest:
        return read_table(rest)
    raise ValueError(
        f"costs {text!r} are not known; write linear:BASE,TOKEN or table:FILE, or give --gpu, --tp and --model."
    )
