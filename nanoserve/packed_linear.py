"""Weight matrices laid out for a CPU once, when a model is loaded: in the order in which products read them.

native/linear.cpp has the product, which is one for any number of rows, and native.py gets it compiled. `pack_linears`
is for a float32 decoder that is not compiled: torch.compile packs for itself. Takes no memory beside the weights.
Laws: tests/test_packed_linear.py; figures: benchmarks/micro.py, docs/performance.md.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from nanoserve.model import Decoder, Linear
from nanoserve.native import load, reason_not_to_load


class Product(ctypes.Structure):
    """`Product` of linear.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "size_in", "size_out", "x_row", "threads")),
    )


class PackedLinear(Linear):
    """The same matrix in panels [P, I, W]: output o stands in panel o / W, at o % W of each of the I inputs; the last
    panel is filled up with zeros. What it gives for a row does not depend on the other rows, nor on the number of
    threads, to the last bit. Raises native.BuildError without a compiler."""

    def __init__(self, linear: Linear) -> None:
        library = load("linear")
        library.width.restype = ctypes.c_int64
        self._width: int = library.width()
        num_out, num_in = linear.weight.shape
        padding = -num_out % self._width
        whole_OI = nn.functional.pad(linear.weight.detach(), (0, 0, 0, padding))
        panels_PIW = whole_OI.unflatten(0, (-1, self._width)).transpose(1, 2).contiguous()
        super().__init__(nn.Parameter(panels_PIW, requires_grad=False), linear.bias)
        bias_O = panels_PIW.new_zeros(num_out) if linear.bias is None else linear.bias.detach()
        self._padded_bias = nn.functional.pad(bias_O, (0, padding))
        self._num_out, self._num_in = num_out, num_in
        # What stays the same from one product to the next: a step has dozens, one after the other.
        self._product = Product(weight=panels_PIW.data_ptr(), bias=self._padded_bias.data_ptr())
        self._product.size_in, self._product.size_out = num_in, num_out
        self._address = ctypes.addressof(self._product)
        self._multiply = library.multiply
        self._multiply.restype, self._multiply.argtypes = None, [ctypes.c_void_p]

    def forward(self, x_TI: Tensor) -> Tensor:
        x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        rows, size_in = x_TI.shape
        assert size_in == self._num_in, f"an input of {size_in} for a matrix of {self._num_in} columns"
        y_TO = x_TI.new_empty((rows, self._num_out))
        product = self._product
        product.x, product.y = x_TI.data_ptr(), y_TO.data_ptr()
        product.rows, product.x_row, product.threads = rows, x_TI.stride(0), torch.get_num_threads()
        self._multiply(self._address)
        return y_TO

    def look_up(self, ids_T: Tensor) -> Tensor:
        return self.weight[ids_T // self._width, :, ids_T % self._width]


def pack_linears(model: Decoder) -> None:
    """Pack the matrices of a float32 decoder on a CPU that has a compiler; leave any other as it is.

    Each is let go of before the next one is packed. A tied head stays one with the embedding, whose rows are then
    looked up in its panels.
    """
    if model.device.type != "cpu" or model.dtype is not torch.float32 or reason_not_to_load("linear"):
        return
    for owner in (*model.layers, model):
        for name, linear in list(owner.named_children()):
            if type(linear) is Linear:
                setattr(owner, name, PackedLinear(linear))
    if model.config.tied_head:
        model.embed = model.head.weight
