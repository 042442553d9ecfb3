"""The element-wise operations between a decoder's matrix products, and who computes them.

The model is given one `Ops`: torch's own operations, one kernel each and the exact arithmetic of transformers, or
fused ones, which read and write each number once: Triton's here, a CPU's in cpu_ops.py. torch.compile fuses the first
on its own. Owns no weight and knows no cache. Imports no torch. Laws: tests/test_kernels.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Ops(Protocol):
    """Pure: every result is a new tensor, and no argument changes. Results have the arguments' dtype."""

    platforms: ClassVar[tuple[str, ...]]  # that they run on
    dtypes: ClassVar[tuple[str, ...]]  # of the model

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last axis: x / sqrt(mean(x^2) + eps) in float32, rounded, times weight.

        x is [T, E], or the heads [T, H, D] of one projection, which may be a view with strides.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual): what the next product reads, and the stream that goes on."""
        ...

    def angles(
        self, positions_T: Tensor, frequencies_D: Tensor, factor: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, times `factor`, of each position times each frequency in radians: float32, then rounded."""
        ...

    def rotate(self, q_THD: Tensor, k_TKD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
        """q and k with each head's pair (i, i + D/2) turned by its angle. cos and sin hold one column for a pair."""
        ...

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
        """`rotate`, after `rms_norm` over each head of those that have a weight."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, where gate is the first half of the last axis and up the second: [T, I] from [T, 2I]."""
        ...


class OneByOne:
    """A pair of operations as each of them alone, and what is done once for all layers as torch does it."""

    def angles(
        self, positions_T: Tensor, frequencies_D: Tensor, factor: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        angles_TD = positions_T[:, None].float() * frequencies_D
        return (angles_TD.cos() * factor).to(dtype), (angles_TD.sin() * factor).to(dtype)

    def norm_and_rotate(
        self: Ops,
        q_THD: Tensor,
        k_TKD: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos_TD: Tensor,
        sin_TD: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if q_weight is not None:
            q_THD = self.rms_norm(q_THD, q_weight, eps)
        if k_weight is not None:
            k_TKD = self.rms_norm(k_TKD, k_weight, eps)
        return self.rotate(q_THD, k_TKD, cos_TD, sin_TD)


class TorchOps(OneByOne):
    """Rounds after every operation, as a model written in torch does. Runs on every device."""

    platforms: ClassVar[tuple[str, ...]] = ("cpu", "cuda", "rocm")
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        import torch.nn.functional as F

        return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def rotate(self, q_THD: Tensor, k_TKD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        cos_T1D, sin_T1D = cos_TD[:, None], sin_TD[:, None]

        def turned(x_TND: Tensor) -> Tensor:
            first, second = x_TND.chunk(2, dim=-1)
            return torch.cat((first * cos_T1D - second * sin_T1D, second * cos_T1D + first * sin_T1D), dim=-1)

        return turned(q_THD), turned(k_TKD)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        import torch.nn.functional as F

        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class TritonOps(OneByOne):
    """One kernel each, float32 inside: the arithmetic of `TorchOps`, rounded less often."""

    platforms: ClassVar[tuple[str, ...]] = ("cuda", "rocm")
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16")

    def __init__(self) -> None:
        from nanoserve import kernels

        self._kernels = kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._kernels.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._kernels.add_rms_norm(x, residual, weight, eps)

    def rotate(self, q_THD: Tensor, k_TKD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernels.rotary(q_THD, k_TKD, cos_TD, sin_TD)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._kernels.silu_and_mul(gate_up)
