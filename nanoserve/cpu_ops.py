"""The element-wise operations of a CPU: one call of compiled C++ each, in float32.

What `TorchOps` does with a kernel for every step of the arithmetic, and a tensor between any two, is one pass over the
numbers here. native/ops.cpp has the arithmetic and native.py gets it compiled. Imports torch inside functions. Laws:
tests/test_cpu_ops.py.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from nanoserve.native_calls import FLOAT, INTEGER, POINTER, Function, members

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Norm(ctypes.Structure):
    """`Norm` of ops.cpp; so are the others below."""

    _fields_ = (
        *members(POINTER, "x residual weight out stream"),
        *members(INTEGER, "rows size x_row residual_row threads"),
        ("eps", FLOAT),
    )


class Angles(ctypes.Structure):
    _fields_ = (
        *members(POINTER, "positions frequencies cos sin"),
        *members(INTEGER, "tokens count"),
        ("factor", FLOAT),
    )


class Heads(ctypes.Structure):
    _fields_ = (*members(POINTER, "x weight out"), *members(INTEGER, "count token head"))


class Rotation(ctypes.Structure):
    _fields_ = (
        *members(Heads, "q k"),
        *members(POINTER, "cos sin"),
        *members(INTEGER, "tokens dim threads"),
        ("eps", FLOAT),
    )


class Gated(ctypes.Structure):
    _fields_ = (*members(POINTER, "x out"), *members(INTEGER, "rows size x_row threads"))


class LookUp(ctypes.Structure):
    _fields_ = (*members(POINTER, "table ids out"), *members(INTEGER, "tokens size width threads"))


class ArgMax(ctypes.Structure):
    _fields_ = (*members(POINTER, "x out"), *members(INTEGER, "rows size"))


class CpuOps:
    """Raises native.BuildError without a compiler. A row's result does not depend on the other rows, nor on the number
    of threads, to the last bit."""

    platforms: ClassVar[tuple[str, ...]] = ("cpu",)
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)

    def __init__(self) -> None:
        import torch

        names = "rms_norm", "angles", "rotate", "silu_and_mul"
        self._rms_norm, self._angles, self._rotate, self._silu = (Function("ops", name) for name in names)
        self._num_threads = torch.get_num_threads

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        _check(x)
        x = x.contiguous()
        out, size = x.new_empty(x.shape), x.shape[-1]
        pointers = x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None
        self._rms_norm(Norm(*pointers, x.numel() // size, size, size, 0, self._num_threads(), eps))
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        _check(x)
        x, residual = _rows_apart(x), _rows_apart(residual)
        out, stream = x.new_empty(x.shape), x.new_empty(x.shape)
        pointers = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), stream.data_ptr()
        self._rms_norm(Norm(*pointers, *x.shape, x.stride(0), residual.stride(0), self._num_threads(), eps))
        return out, stream

    def angles(
        self, positions_T: Tensor, frequencies_D: Tensor, factor: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        positions_T, frequencies_D = positions_T.contiguous(), frequencies_D.contiguous()
        _check(frequencies_D)
        size = len(positions_T), len(frequencies_D)
        cos_TD, sin_TD = frequencies_D.new_empty(size), frequencies_D.new_empty(size)
        pointers = (x.data_ptr() for x in (positions_T, frequencies_D, cos_TD, sin_TD))
        self._angles(Angles(*pointers, *size, factor))
        return cos_TD, sin_TD

    def rotate(self, q_THD: Tensor, k_TKD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm_and_rotate(q_THD, k_TKD, None, None, 0.0, cos_TD, sin_TD)

    def norm_and_rotate(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos_TD: Tensor,
        sin_TD: Tensor,
    ) -> tuple[Tensor, Tensor]:
        _check(q_THD)
        cos_TD, sin_TD = cos_TD.contiguous(), sin_TD.contiguous()
        (q, q_out), (k, k_out) = _heads(q_THD, q_weight), _heads(k_TKD, k_weight)
        tokens, _, dim = q_THD.shape
        self._rotate(Rotation(q, k, cos_TD.data_ptr(), sin_TD.data_ptr(), tokens, dim, self._num_threads(), eps))
        return q_out, k_out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        _check(gate_up)
        gate_up = _rows_apart(gate_up)
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, size))
        self._silu(Gated(gate_up.data_ptr(), out.data_ptr(), rows, size, gate_up.stride(0), self._num_threads()))
        return out


def look_up(table: Tensor, ids_T: Tensor, out_TE: Tensor, width: int = 1) -> None:
    """Rows of a float32 table, by ids that are in range; of a table in panels [P, E, width] as packed_linear.py has."""
    import torch

    _check(table)
    ids_T = ids_T.contiguous()
    pointers = table.data_ptr(), ids_T.data_ptr(), out_TE.data_ptr()
    _look_up()(LookUp(*pointers, *out_TE.shape, width, torch.get_num_threads()))


def argmax(x_SV: Tensor, out_S: Tensor) -> None:
    """`x_SV.argmax(dim=-1)`: the lowest place among equals, and that of a NaN where there is one."""
    _check(x_SV)
    assert x_SV.is_contiguous(), "rows apart"
    _argmax()(ArgMax(x_SV.data_ptr(), out_S.data_ptr(), *x_SV.shape))


@cache
def _look_up() -> Function:
    return Function("ops", "look_up")


@cache
def _argmax() -> Function:
    return Function("ops", "argmax")


def _check(x: Tensor) -> None:
    assert x.element_size() == 4, f"numbers of {x.dtype}, not of float32"


def _rows_apart(x: Tensor) -> Tensor:
    """Rows may lie anywhere, the numbers of each side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


def _heads(x_TND: Tensor, weight: Tensor | None) -> tuple[Heads, Tensor]:
    """The argument, and the tensor that it has the results written to."""
    x_TND = x_TND if x_TND.stride(2) == 1 else x_TND.contiguous()
    out_TND = x_TND.new_empty(x_TND.shape)
    where = None if weight is None else weight.data_ptr()
    count, (token, head, _) = x_TND.shape[1], x_TND.stride()
    return Heads(x_TND.data_ptr(), where, out_TND.data_ptr(), count, token, head), out_TND
