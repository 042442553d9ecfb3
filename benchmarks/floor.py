"""What this machine can do at best: products in every layout there is, reading, and the floor of a step made of both.

The floor of a step is its fastest product (F.linear, oneDNN's packing, ours, and ours without Python's calls), behind
the last attention for the tokens that sample alone, and its keys and values at the rate that memory is read with; both
are measured in the run that the step is. What attention computes is not in it. Forms that are compared take turns
within a round. With one thread times are CPU time of that thread: what else runs on the machine is left out.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nanoserve.cpu_graphs import CpuGraphPool
from nanoserve.model import Decoder, Linear
from nanoserve.packed_linear import PackedLinear
from nanoserve.record import StepRecord

LEAST_S = 0.03  # that a figure of one round is measured for
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256, 512)
RECORDED = "packed, recorded"  # the layout whose calls are made as a served step makes them
READ_NUMBERS = 2**26  # float32: more than a cache holds

Forms = Mapping[str, Callable[[], object]]


def clock() -> Callable[[], float]:
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def rounds_of(forms: Forms, num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds a call, the mean of each round. A first round warms up and is left out."""
    rounds: dict[str, list[float]] = {name: [] for name in forms}
    now = clock()
    for _ in range(1 + num_rounds):
        for name, form in forms.items():
            count, start_s = 0, now()
            while (spent_s := now() - start_s) < LEAST_S or count < 2:
                form()
                count += 1
            rounds[name].append(1e3 * spent_s / count)
    return {name: times[1:] for name, times in rounds.items()}


def take_turns(forms: Forms, num_rounds: int) -> dict[str, float]:
    """The median of `rounds_of`."""
    return {name: statistics.median(times) for name, times in rounds_of(forms, num_rounds).items()}


@dataclass(frozen=True)
class Rates:
    gemm_gflops: float
    read_gb_per_s: float


def measure_rates() -> Rates:
    """The best of some tries: what the machine can do when it is let."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    numbers = torch.zeros(READ_NUMBERS)
    best, now = {"gemm": float("inf"), "read": float("inf")}, clock()
    for _ in range(12):
        for name, form in (("gemm", lambda: a @ b), ("read", numbers.sum)):
            start_s = now()
            form()
            best[name] = min(best[name], now() - start_s)
    return Rates(2 * 1024**3 / best["gemm"] / 1e9, 4 * READ_NUMBERS / best["read"] / 1e9)


class Products:
    """Some matrices of a model that is not packed, in each layout."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._sizes = [linear.weight.shape[1] for linear in linears]
        self._layouts = self.layouts(linears)

    @staticmethod
    def layouts(linears: Sequence[Linear]) -> dict[str, Sequence[Callable[[Tensor], Tensor]]]:
        """The same products in the same order, by how their matrices lie."""
        return {
            "F.linear": linears,
            "oneDNN": [onednn_product(linear) for linear in linears],
            "packed": [PackedLinear(linear) for linear in linears],
        }

    def forms(self, rows: int) -> dict[str, Callable[[], object]]:
        inputs = [torch.randn(rows, size) for size in self._sizes]
        forms: dict[str, Callable[[], None]] = {
            name: partial(run_all, linears, inputs) for name, linears in self._layouts.items()
        }
        return forms | {RECORDED: CpuGraphPool()(forms["packed"])}


def matrices(model: Decoder) -> list[Linear]:
    """Those of one pass."""
    return [module for module in model.modules() if type(module) is Linear]


def last_matrices(model: Decoder) -> list[Linear]:
    """Those behind the last attention call."""
    layer = model.layers[-1]
    return [layer.o, layer.gate_up, layer.down, model.head]


def onednn_product(linear: Linear) -> Callable[[Tensor], Tensor]:
    """The same product, of a matrix in the order that oneDNN's kernels read, chosen for 64 rows."""
    weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 64)
    return lambda x_TI: torch.ops.mkldnn._linear_pointwise(x_TI, weight, None, "none", [], "")


def run_all(linears: Sequence[Callable[[Tensor], Tensor]], inputs: list[Tensor]) -> None:
    for linear, x_TI in zip(linears, inputs, strict=True):
        linear(x_TI)


class Floor:
    """What any step of a model takes at least, in milliseconds, from what was measured here and now."""

    def __init__(self, model: Decoder, rates: Rates, num_rounds: int) -> None:
        last = last_matrices(model)
        parts = {"all tokens": [one for one in matrices(model) if one not in last], "those that sample": last}
        self.products_ms: dict[str, dict[int, dict[str, float]]] = {}
        for part, linears in parts.items():
            products = Products(linears)
            self.products_ms[part] = {rows: take_turns(products.forms(rows), num_rounds) for rows in ROWS}
        self._kv_ms = model.config.kv_bytes_per_token(torch.float32) / rates.read_gb_per_s / 1e6

    def of_rows(self, tokens: int, sampling: int) -> float:
        return sum(
            at(rows, {n: min(forms.values()) for n, forms in measured.items()})
            for rows, measured in zip((tokens, sampling), self.products_ms.values(), strict=True)
        )

    def of_steps(self, records: list[StepRecord]) -> list[float]:
        """A prompt's keys and values are read once."""
        lens: dict[str, int] = {}
        found = []
        for record in records:
            lens |= record.hit_tokens
            for request_id, count in record.num_scheduled_tokens.items():
                lens[request_id] += count
            keys = sum(lens[request_id] for request_id in record.num_scheduled_tokens)
            tokens = sum(record.num_scheduled_tokens.values())
            found.append(self.of_rows(tokens, len(record.sampled)) + keys * self._kv_ms)
        return found


def at(rows: int, measured: Mapping[int, float]) -> float:
    """Between two numbers of rows that were measured: along a line. Nothing for no rows."""
    if rows == 0:
        return 0.0
    sizes = sorted(measured)
    place = min(max(1, bisect.bisect_left(sizes, rows)), len(sizes) - 1)
    low, high = sizes[place - 1 : place + 1]
    return measured[low] + (measured[high] - measured[low]) * (rows - low) / (high - low)
