"""Weight matrices laid out for a CPU once, when a model is loaded: in the order in which products read them.

native/linear.cpp has the product, which is one for any number of rows, and native.py gets it compiled. `pack_linears`
is for a float32 decoder that is not compiled: torch.compile packs for itself. Takes no memory beside the weights, and
a quarter of it with int8: products then compute in float32 with weights that are rounded to 255 steps an output.
Laws: tests/test_packed_linear.py; figures: benchmarks/micro.py, docs/performance.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from typing import ClassVar

import torch
from torch import Tensor, nn

from nanoserve.cpu_ops import look_up
from nanoserve.model import Decoder, Linear
from nanoserve.native import load, reason_not_to_load
from nanoserve.native_calls import INTEGER, POINTER, Function, members

LARGE_PAGE = 2**21
LARGEST_INT8 = 127
LEAST_SCALE = 1e-20  # a bias is divided by it


class Product(ctypes.Structure):
    """`Product` of linear.cpp."""

    _fields_ = (*members(POINTER, "x weight bias scale y"), *members(INTEGER, "rows size_in size_out x_row threads"))


class LookUp(ctypes.Structure):
    """`LookUp` of linear.cpp."""

    _fields_ = (*members(POINTER, "weight scale ids y"), *members(INTEGER, "rows size_in"))


class PackedLinear(Linear):
    """The same matrix in panels [P, I, W]: output o stands in panel o / W, at o % W of each of the I inputs; the last
    panel is filled up with zeros. What it gives for a row does not depend on the other rows, nor on the number of
    threads, to the last bit. Raises native.BuildError without a compiler."""

    product: ClassVar[str] = "multiply"

    def __init__(self, linear: Linear) -> None:
        library = load("linear")
        library.width.restype = ctypes.c_int64
        self._width: int = library.width()
        numbers_OI, scale_O = self.numbers(linear.weight.detach())
        self._num_out, self._num_in = numbers_OI.shape
        self._padding = -self._num_out % self._width
        panels_PIW = self._panels(numbers_OI)
        super().__init__(nn.Parameter(panels_PIW, requires_grad=False), linear.bias)
        bias_O = torch.zeros(self._num_out) if linear.bias is None else linear.bias.detach()
        self._bias = self._padded(bias_O if scale_O is None else bias_O / scale_O)
        # What stays the same from one product to the next: a step has dozens, one after the other.
        self._product = Product(weight=panels_PIW.data_ptr(), bias=self._bias.data_ptr())
        self._product.size_in, self._product.size_out = self._num_in, self._num_out
        if scale_O is not None:
            self.scale = nn.Parameter(self._padded(scale_O), requires_grad=False)
            self._product.scale = self.scale.data_ptr()
        self._multiply = Function("linear", self.product)

    @staticmethod
    def numbers(weight_OI: Tensor) -> tuple[Tensor, Tensor | None]:
        """What is kept of a matrix, and what each output's numbers are multiples of (None: they are themselves)."""
        return weight_OI, None

    def _panels(self, numbers_OI: Tensor) -> Tensor:
        whole_OI = nn.functional.pad(numbers_OI, (0, 0, 0, self._padding))
        panels_PIW = whole_OI.unflatten(0, (-1, self._width)).transpose(1, 2)
        return _on_large_pages(panels_PIW.shape, panels_PIW.dtype).copy_(panels_PIW)

    def _padded(self, of_output_O: Tensor) -> Tensor:
        return nn.functional.pad(of_output_O, (0, self._padding))

    def forward(self, x_TI: Tensor) -> Tensor:
        x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        rows, size_in = x_TI.shape
        assert x_TI.element_size() == 4, f"numbers of {x_TI.dtype}, not of float32"
        assert size_in == self._num_in, f"an input of {size_in} for a matrix of {self._num_in} columns"
        y_TO = x_TI.new_empty((rows, self._num_out))
        product = self._product
        product.x, product.y = x_TI.data_ptr(), y_TO.data_ptr()
        product.rows, product.x_row, product.threads = rows, x_TI.stride(0), torch.get_num_threads()
        self._multiply(product)
        return y_TO

    def look_up(self, ids_T: Tensor) -> Tensor:
        """Of ids that are in the vocabulary: nobody looks here. A front end refuses a prompt with any other."""
        out_TE = self.weight.new_empty((len(ids_T), self._num_in))
        look_up(self.weight, ids_T, out_TE, self._width)
        return out_TE


class Int8Linear(PackedLinear):
    """Weights alone are int8, each output's with a scale of its own; inputs, sums and results are float32."""

    product: ClassVar[str] = "multiply_int8"

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear)
        self._look_up = Function("linear", "look_up_int8")

    @staticmethod
    def numbers(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        scale_O = (weight_OI.abs().amax(dim=1) / LARGEST_INT8).clamp_(min=LEAST_SCALE)
        return (weight_OI / scale_O[:, None]).round_().to(torch.int8), scale_O

    def look_up(self, ids_T: Tensor) -> Tensor:
        ids_T = ids_T.contiguous()
        out_TE = self.scale.new_empty((len(ids_T), self._num_in))
        pointers = (x.data_ptr() for x in (self.weight, self.scale, ids_T, out_TE))
        self._look_up(LookUp(*pointers, *out_TE.shape))
        return out_TE


def pack_linears(model: Decoder, quantization: str | None = None) -> None:
    """Pack the matrices of a float32 decoder on a CPU that has a compiler; leave any other as it is.

    Each is let go of before the next one is packed. A tied head stays one with the embedding, whose rows are then
    looked up in its panels. `quantization`: EngineConfig's, of which check_quantization() says whether it can be.
    """
    if model.device.type != "cpu" or model.dtype is not torch.float32 or reason_not_to_load("linear"):
        assert quantization is None, "check_quantization() first"
        return
    form = PackedLinear if quantization is None else Int8Linear
    for owner in (*model.layers, model):
        for name, linear in list(owner.named_children()):
            if type(linear) is Linear:
                setattr(owner, name, form(linear))
    if model.config.tied_head:
        model.embed = model.head.weight


def check_quantization(quantization: str | None, device: str, dtype: torch.dtype | None, *, is_compiled: bool) -> None:
    """Before a model is loaded, in the words of the config. Raises ValueError for what `pack_linears` cannot do."""
    if quantization is None:
        return
    asked = f"quantization={quantization!r}"
    if device != "cpu":
        raise ValueError(f"{asked} is for a CPU, this engine runs on device={device!r}; leave it out, or use cpu.")
    if dtype is not torch.float32:
        raise ValueError(f"{asked} computes in float32, not in {dtype}; leave it out, or use dtype='float32'.")
    if is_compiled:
        raise ValueError(f"{asked} has products of its own, which torch.compile does not know; use compile='none'.")
    if reason := reason_not_to_load("linear"):
        raise ValueError(f"{asked} needs a C++ compiler ({reason}); install one, or leave it out.")


def _on_large_pages(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Uninitialised. With pages of 4 KiB, finding them takes up to a tenth of a pass with few rows."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
