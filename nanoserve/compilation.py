"""torch.compile for the decoder: which parts are compiled, what is needed for it, and where the results are kept.

`layers`: the three pieces of a forward pass, one compiled function for all layers. `model`: the whole pass as one
graph, with attention as an operator that the compiler does not look into. The number of tokens stays open in both;
one token alone is a case of its own, as the compiler wants it. vLLM compiles the whole model and cuts it at attention
(`vllm/compilation/backends.py`), which is `layers` in effect. Laws: tests/test_compilation.py.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import itertools
import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve import folders
from nanoserve.compiler import COMPILERS, one_line, reason_not_to_compile

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve.model import Attend, Decoder

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class CompileMode(enum.StrEnum):
    NONE = "none"
    LAYERS = "layers"
    MODEL = "model"


def compile_model(model: Decoder, mode: CompileMode) -> None:
    """From the next call on, `model` runs compiled code; the first call for a kind of input pays for compiling.

    Raises ValueError on a CPU without a C++ compiler that works. Models of one config, dtype and mode share their code.
    What any other in this process had compiled is compiled again when it runs: the compiler keeps its results by
    function, for a few kinds of input only.
    """
    if mode is CompileMode.NONE:
        return
    import torch
    import torch._inductor.config as inductor

    if model.device.type == "cpu":
        compiler = require_cpp_compiler(mode)
        inductor.cpp.cxx = (None, compiler)  # by itself it looks for $CXX and g++ only
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more are processes that outlive their use
    folder = cache_folder(model, mode)
    _keep_results_in(folder)
    _keep_only_code_of(folder)
    compiled = functools.partial(torch.compile, dynamic=True, fullgraph=True)  # any number of tokens, and all of it
    first, cross, last = model.pieces
    model.pieces = model.pieces._replace(first=compiled(first), cross=compiled(cross), last=compiled(last))
    if mode is CompileMode.MODEL:
        model.compile(dynamic=True, fullgraph=True)


def require_cpp_compiler(mode: CompileMode) -> str:
    """The compiler that torch's CPU backend is to use. ValueError unless there is one that works."""
    given = os.environ.get("CXX")
    if given and not shutil.which(given):
        found = f"CXX={given!r} is not a program on PATH"
    elif given or any(map(shutil.which, COMPILERS)):
        compiler = given or next(filter(shutil.which, COMPILERS))
        reason = reason_not_to_compile(compiler)
        if reason is None:
            return compiler
        found = reason
    else:
        found = f"none of {', '.join(COMPILERS)} is on PATH"
    raise _refusal(mode, f"needs a C++ compiler, and {found}")


def _refusal(mode: CompileMode, why: str) -> ValueError:
    return ValueError(
        f"compile={str(mode)!r} on a CPU {why}; install one that works (Debian: apt install g++), set CXX to the name "
        "of one program, or use compile='none'."
    )


@contextmanager
def failed_compiler_refused(mode: CompileMode) -> Iterator[None]:
    """ValueError for a C++ compiler that does not take the code that torch makes for it: it may know two lines and lack
    a header, or a flag. And for results of an earlier start that cannot be used: a build that was killed, or a disk
    that was full, leaves half a file, which torch neither checks nor replaces."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import CppCompileError

    try:
        yield
    except (CppCompileError, BackendCompilerFailed) as error:
        inner = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
        kept = _discard_results()
        if isinstance(inner, CppCompileError):
            lines = inner.output.splitlines()
            said = next((line for line in lines if "error" in line), lines[-1] if lines else "it does not say why")
            why = f"needs a C++ compiler, and {inner.cmd[0]} failed ({said.strip():.200}); {kept}"
            raise _refusal(mode, why) from None
        raise ValueError(
            f"compile={str(mode)!r} failed ({one_line(inner):.200}); {kept}, or use compile='none'."
        ) from error


def _discard_results() -> str:
    """What is to be done about damaged ones, in words."""
    folder = Path(os.environ[CACHE_VARIABLE])
    if folder.parent != folders.cache_folder() / "compiled":
        return f"if what is kept in {folder} is damaged, remove it and start again"
    shutil.rmtree(folder, ignore_errors=True)
    return "what was kept of earlier starts is removed, in case that it was damaged: start again"


def cache_folder(model: Decoder, mode: CompileMode) -> Path:
    """Where compiled code is kept from one start to the next: by what it was made of."""
    import torch

    import nanoserve.model
    import nanoserve.ops

    parts = (
        torch.__version__,
        model.config,
        model.dtype,
        model.device.type,
        mode,
        inspect.getsource(nanoserve.model),
        inspect.getsource(nanoserve.ops),
    )
    key = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]
    return folders.cache_folder() / "compiled" / key


def _keep_results_in(folder: Path) -> None:
    """Unless the user has named a folder. (The compiler notes its default in the environment, as if it were given.)"""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    given = os.environ.get(CACHE_VARIABLE)
    if given is None or given == default_cache_dir() or Path(given).parent == folder.parent:
        os.environ[CACHE_VARIABLE] = str(folder)
    try:
        Path(os.environ[CACHE_VARIABLE]).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"compiled code cannot be kept in {os.environ[CACHE_VARIABLE]} ({error.strerror}); set {CACHE_VARIABLE} or "
            "XDG_CACHE_HOME to a folder that can be written, or use compile='none'."
        ) from None


@functools.lru_cache(maxsize=1)  # called with the folder of the call before, it does nothing
def _keep_only_code_of(folder: Path) -> None:
    import torch._dynamo

    torch._dynamo.reset()


class AttentionOperator:
    """`attend` as one of torch's own operators, so that a trace of the model goes through it without looking inside.

    An operator takes tensors and numbers only: which callable is meant goes by a number, in a tensor on the host, since
    a plain one would become part of the code. That the KV cache is changed is not told to the compiler, which need not
    know: nothing else in the trace reads it, and each call needs the result of the one before.
    """

    def __init__(self, attend: Attend) -> None:
        import torch

        _define_operator()
        number = next(_numbers)
        self._number = torch.tensor(number)
        _targets[number] = attend
        weakref.finalize(self, _targets.pop, number)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, /) -> Tensor:
        import torch

        return torch.ops.nanoserve.attend(q_THD, k_TKD, v_TKD, layer, self._number)


_numbers = itertools.count()
_targets: dict[int, Attend] = {}


@functools.cache
def _define_operator() -> object:
    import torch

    library = torch.library.Library("nanoserve", "DEF")
    library.define("attend(Tensor q, Tensor k, Tensor v, int layer, Tensor number) -> Tensor")
    library.impl("attend", _attend, "CompositeExplicitAutograd")
    torch.library.register_fake("nanoserve::attend", _fake_attend, lib=library)
    return library


def _attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, number: Tensor) -> Tensor:
    return _targets[int(number)](layer, q_THD, k_TKD, v_TKD)


def _fake_attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, number: Tensor) -> Tensor:
    return q_THD.new_empty(q_THD.shape)
