"""Graphs of a CPU: the calls of compiled code that a pass makes, recorded with their arguments, made again in one call.

What Python and torch do around each call, to make a tensor and find its address, is done once: what a CUDA graph is on
a GPU. A pass can be recorded if nothing else computes in it: operations of torch would not happen in the replay, so
that one which is not known here ends the recording, and the pass is run again as it is, a stand-in. What a pass reads
on the host (lists, numpy) stays as it was, as in a CUDA graph. Knows no model. Laws: tests/test_cpu_graphs.py.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanoserve.cpu_ops import look_up
from nanoserve.native import reason_not_to_load
from nanoserve.native_calls import INTEGER, POINTER, Call, Function, RecordedCall, members, recorded_calls

aten = torch.ops.aten


class Calls(ctypes.Structure):
    """`Calls` of graph.cpp."""

    _fields_ = (*members(POINTER, "first"), *members(INTEGER, "count"))


class Move(ctypes.Structure):
    """`Move` of graph.cpp."""

    _fields_ = (*members(POINTER, "source target"), *members(INTEGER, "rows size from_row to_row"))


class Take(ctypes.Structure):
    """`Take` of graph.cpp."""

    _fields_ = (*members(POINTER, "source source_places target_places target"), *members(INTEGER, "count"))


class NotRecordable(Exception):
    """Says why, naming what computes in a pass without being compiled code of ours."""


class CpuGraphPool:
    """Records passes; all share their memory, and run one after the other. `kind` tells what its replays are."""

    def __init__(self, *, is_compiled: bool = False) -> None:
        self._memory = Memory()
        self._is_compiled = is_compiled
        self._num_recorded = 0
        self._refused = ""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """What does the work of `run`: on the memory that it would work on now, whatever that holds then. Whoever has
        static memory and weights keeps them as long. Nothing is computed before the first replay."""
        try:
            if self._is_compiled:
                raise NotRecordable("torch.compile's code cannot be recorded")
            recording = Recording(run, self._memory)
        except NotRecordable as reason:
            self._refused = str(reason)
            return run
        self._num_recorded += 1
        return recording

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    @property
    def kind(self) -> str:
        if not self._refused:
            return "recorded calls"
        stand_in = f"the same calls again, as {self._refused}"
        return f"recorded calls; some {stand_in}" if self._num_recorded else stand_in


class Replay:
    """Calls made again, all in one."""

    def __init__(self, calls: Sequence[RecordedCall]) -> None:
        self.calls = calls  # kept: what follows has their addresses
        self._calls = (Call * len(calls))(*(Call(f.address, ctypes.addressof(a)) for f, a in calls))
        self.function = Function("graph", "replay")
        self.arguments = Calls(ctypes.addressof(self._calls), len(calls))

    def __call__(self) -> None:
        self.function(self.arguments)


class Recording(Replay):
    """Raises NotRecordable."""

    def __init__(self, run: Callable[[], None], memory: Memory) -> None:
        if reason := reason_not_to_load("graph"):
            raise NotRecordable(f"nothing can be recorded without a compiler ({reason})")
        with recorded_calls() as calls, OnlyRecordable(memory):
            run()
        super().__init__(calls)
        self.memory = memory  # kept, like the calls


class Memory:
    """Tensors for recordings, which keep their addresses: a buffer is used again once nobody has the tensor that it
    was lent for, within a recording and by the next. Mirrors the pool of `torch.cuda.graph`."""

    def __init__(self) -> None:
        self.buffers: list[np.ndarray] = []
        self._free: list[np.ndarray] = []

    def like(self, tensor: Tensor) -> Tensor:
        """Uninitialised, of that shape and dtype, row after row."""
        size = tensor.numel() * tensor.element_size()
        if not size:
            return tensor
        fitting = [place for place, buffer in enumerate(self._free) if len(buffer) >= size]
        if fitting:
            buffer = self._free.pop(min(fitting, key=lambda place: len(self._free[place])))
        else:
            buffer = torch.empty(size, dtype=torch.uint8).numpy()
            self.buffers.append(buffer)
        piece = buffer[:size]
        weakref.finalize(piece, self._take_back, buffer)  # the tensor and its views have `piece`, and nobody else
        return torch.frombuffer(piece, dtype=tensor.dtype).view(tensor.shape)

    def _take_back(self, buffer: np.ndarray) -> None:
        self._free.append(buffer)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.buffers))


class OnlyRecordable(TorchDispatchMode):
    """Within: torch makes tensors in `memory`, looks at them in other ways, and moves them, which is recorded; any
    other operation raises NotRecordable."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to tell it so, torch would import its compiler: a second at every start

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        match func:
            case aten.new_empty.default | aten.empty.memory_format:
                return self._memory.like(func(*args, **(kwargs or {})))
            case aten.new_zeros.default:
                return _clear(self._memory.like(func(*args, **(kwargs or {}))))
            case aten.copy_.default if _copy(*args):
                return args[0]
            case aten.embedding.default if _can_be_looked_up(*args):
                out_TE = self._memory.like(args[0].new_empty(len(args[1]), args[0].shape[1]))
                look_up(args[0], args[1], out_TE)
                return out_TE
        raise NotRecordable(f"torch's {func.overloadpacket.__name__} cannot be recorded")


def _can_be_looked_up(table: Tensor, ids: Tensor, *_: Any) -> bool:
    if not (table.is_contiguous() and ids.is_contiguous()):
        return False
    return table.dtype is torch.float32 and ids.dtype is torch.int64 and ids.ndim == 1


def _clear(tensor: Tensor) -> Tensor:
    size = tensor.numel() * tensor.element_size()
    _move()(Move(None, tensor.data_ptr(), 1, size, 0, 0))
    return tensor


def _copy(target: Tensor, source: Tensor, *_: Any) -> bool:
    """Whether it was a copy of equal rows, each in one piece."""
    shape, item = target.shape, target.element_size()
    if source.shape != shape or source.dtype != target.dtype or not len(shape) or not target.numel():
        return False
    if not (target[0].is_contiguous() and source[0].is_contiguous()):
        return False
    strides = source.stride(0) * item, target.stride(0) * item
    _move()(Move(source.data_ptr(), target.data_ptr(), shape[0], target[0].numel() * item, *strides))
    return True


@cache
def _move() -> Function:
    return Function("graph", "move")
