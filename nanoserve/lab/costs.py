"""What a step takes on the device, in whole microseconds: the only thing that a simulation makes up.

`Linear` is exact and has no hardware in it; `Roofline` follows from data sheets (gpus.py); `Table` is fitted to the
records of a real run (calibrate.py). A model is told the counts of a step, never its requests. What the host adds is
`Host`, in simulator.py. Laws: tests/test_costs.py.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from nanoserve.lab.gpus import Gpu, Memory, ModelSize

TABLE_VERSION = 1


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
    """Fitted: a sum over the counts of a step, times a factor interpolated between knots over its number of tokens.

    The file that `nanoserve calibrate` writes is this, as JSON. `gap_us`: the mean from the end of a step to the
    start of the next, which is the host's (`Host.step_us`).
    """

    needs_context: ClassVar[bool] = True

    version: int = TABLE_VERSION
    source: str = ""  # what was recorded
    base_us: float
    token_us: float
    request_us: float
    context_us: float
    attention_us: float
    knot_tokens: list[float] = []  # rising
    knot_factors: list[float] = []
    gap_us: float = 0.0
    num_steps: int = 0  # that it was fitted to
    median_error: float = 0.0  # |fitted / measured - 1| over those steps
    p90_error: float = 0.0

    def sum_us(self, load: StepLoad) -> float:
        return (
            self.base_us
            + self.token_us * load.num_tokens
            + self.request_us * load.num_requests
            + self.context_us * load.context
            + self.attention_us * load.attention
        )

    def factor(self, num_tokens: int) -> float:
        """Linear in the logarithm of the tokens between two knots, flat outside of them."""
        knots, factors = self.knot_tokens, self.knot_factors
        if not knots:
            return 1.0
        index = bisect_right(knots, num_tokens)
        if index in (0, len(knots)):
            return factors[min(index, len(knots) - 1)]
        low, high = knots[index - 1], knots[index]
        part = math.log(num_tokens / low) / math.log(high / low)
        return factors[index - 1] + part * (factors[index] - factors[index - 1])

    def step_us(self, load: StepLoad) -> int:
        return max(1, round(self.sum_us(load) * self.factor(load.num_tokens)))

    def __str__(self) -> str:
        return f"table fitted to {self.num_steps:,} steps of {self.source or 'a recorded run'}"


def read_table(path: str | Path) -> Table:
    """What `nanoserve calibrate` wrote. Raises OSError, and ValueError for anything else."""
    try:
        table = msgspec.json.decode(Path(path).read_bytes(), type=Table)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is not a table of costs ({error}); write one with nanoserve calibrate.") from None
    if table.version != TABLE_VERSION:
        raise ValueError(f"{path} has format version {table.version}; this build reads {TABLE_VERSION}.")
    numbers = [table.base_us, table.token_us, table.request_us, table.context_us, table.attention_us, table.gap_us]
    knots = table.knot_tokens
    ok = all(0 <= n < math.inf for n in numbers) and all(0 < f < math.inf for f in table.knot_factors)
    rising = all(0 < a < b for a, b in pairwise(knots)) and all(k > 0 for k in knots)
    if not ok or not rising or len(knots) != len(table.knot_factors):
        raise ValueError(
            f"{path} has a coefficient below 0, or knots that do not rise; write it with nanoserve calibrate."
        )
    return table


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
