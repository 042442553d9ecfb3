"""Weight matrices laid out for a CPU once, when a model is loaded, instead of in every product.

A large one is handed to oneDNN, in the order in which its kernels read it; a small one, where such a call costs more
than it saves, lies by columns from then on. `pack_linears` is for a float32 decoder that is not compiled: torch.compile
packs for itself. Takes no memory beside the weights. Laws: tests/test_packed_linear.py; figures: benchmarks/micro.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoserve.model import Decoder, Linear

LARGE = 2**19  # numbers in a matrix; a product with a smaller one is over before oneDNN has looked up its kernel
PACKED_ROWS = 64  # that a layout is chosen for; the same one serves any number of rows


class PackedLinear(Linear):
    """In oneDNN's own order, opaque to everything but its products. What it gives for a row does not depend on the
    other rows, to the last bit."""

    def __init__(self, linear: Linear) -> None:
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_ROWS)
        super().__init__(nn.Parameter(packed, requires_grad=False), linear.bias)

    def forward(self, x_TI: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_TI, self.weight, self.bias, "none", [], "")


def pack_linears(model: Decoder) -> None:
    """Lay out the matrices of a float32 decoder on a CPU; leave any other as it is.

    Each is let go of before the next one is packed. A tied head stays one with the embedding, whose rows must be there
    to be looked up: it is laid out by columns, whatever its size, and a lookup gathers its row from all of them.
    """
    if model.device.type != "cpu" or model.dtype is not torch.float32:
        return
    for owner in (*model.layers, model):
        for name, linear in list(owner.named_children()):
            if type(linear) is not Linear:
                continue
            if linear.weight is not model.embed and is_worth_packing(linear):
                setattr(owner, name, PackedLinear(linear))
            else:
                lay_by_columns(linear)


def is_worth_packing(linear: Linear) -> bool:
    return linear.weight.numel() >= LARGE and torch.backends.mkldnn.is_available()


def lay_by_columns(linear: Linear) -> None:
    """The same [O, I] matrix with each column in one piece: a product with a few rows reads it from end to end."""
    linear.weight.data = linear.weight.t().contiguous().t()
