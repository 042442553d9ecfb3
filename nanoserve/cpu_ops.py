"""The element-wise operations of a CPU: one call of compiled C++ each, in float32.

What `TorchOps` does with a kernel for every step of the arithmetic, and a tensor between any two, is one pass over the
numbers here. native/ops.cpp has the arithmetic and native.py gets it compiled. Imports torch inside functions. Laws:
tests/test_cpu_ops.py.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


class Heads(ctypes.Structure):
    """`Heads` of ops.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("count", "token", "head")),
    )


class CpuOps:
    """Raises native.BuildError without a compiler. A row's result does not depend on the other rows, nor on the number
    of threads, to the last bit."""

    platforms: ClassVar[tuple[str, ...]] = ("cpu",)
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)

    def __init__(self) -> None:
        import torch

        from nanoserve.native import load

        library = load("ops")
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._rms_norm, self._rotate, self._silu = library.rms_norm, library.rotate, library.silu_and_mul
        self._rms_norm.argtypes = [pointer] * 5 + [integer] * 4 + [ctypes.c_float, integer]
        self._rotate.argtypes = [ctypes.POINTER(Heads)] * 2 + [pointer] * 2 + [integer] * 2 + [ctypes.c_float, integer]
        self._silu.argtypes = [pointer] * 2 + [integer] * 4
        self._rms_norm.restype = self._rotate.restype = self._silu.restype = None
        self._num_threads = torch.get_num_threads

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        _check(x)
        x = x.contiguous()
        out, size = x.new_empty(x.shape), x.shape[-1]
        rows = x.numel() // size
        pointers = x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None
        self._rms_norm(*pointers, rows, size, size, 0, eps, self._num_threads())
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        _check(x)
        x, residual = _rows_apart(x), _rows_apart(residual)
        out, stream = x.new_empty(x.shape), x.new_empty(x.shape)
        pointers = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), stream.data_ptr()
        self._rms_norm(*pointers, *x.shape, x.stride(0), residual.stride(0), eps, self._num_threads())
        return out, stream

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
        self._rotate(q, k, cos_TD.data_ptr(), sin_TD.data_ptr(), tokens, dim, eps, self._num_threads())
        return q_out, k_out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        _check(gate_up)
        gate_up = _rows_apart(gate_up)
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, size))
        self._silu(gate_up.data_ptr(), out.data_ptr(), rows, size, gate_up.stride(0), self._num_threads())
        return out


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
