"""A look at the machine as the engine sees it: device, packages, threads, compiler, memory, and what was left over.

Collects facts and says which of them are problems; prints nothing. Memory is computed from the model's config, so
that no weights are loaded; what an engine does in the end depends on what is free when it starts.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanoserve import __version__, compiler
from nanoserve.api.leftovers import Leftovers, find_leftovers, remove_leftovers
from nanoserve.compilation import CompileMode
from nanoserve.compiler import BuildError
from nanoserve.config import DEFAULT_MODEL, SEAMS, EngineConfig
from nanoserve.execution import QUEUED

if TYPE_CHECKING:
    from nanoserve.checkpoint import ModelConfig
    from nanoserve.platforms import Platform

DOCTOR_VERSION = 1
EXTRAS = ("gpu", "serve")  # what a user may want; the others are for developers
SAMPLE_TOKENS = 1024  # of a request, prompt and answer, to say how many fit
_REQUIREMENT = re.compile(r"""(?P<name>[\w.-]+)[^;]*(?:;.*extra == ['"](?P<extra>[\w-]+)['"])?""")


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    version: str | None  # None: not installed
    extra: str  # "": always needed


@dataclass(frozen=True, slots=True)
class Threads:
    engine: int  # CPU threads that share a step, for the model
    usable_cores: int
    omp_num_threads: str | None  # the environment's


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    why: str
    dtype: str  # what dtype="auto" becomes for the model
    attention: str
    attention_why: str
    execution: str  # what the last stage makes of the device, where it leaves the choice


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes unless the name says otherwise."""

    model: str
    free: int  # of the device, now
    weights: int
    kv_pool: int
    kv_per_token: int
    block_size: int  # tokens
    num_blocks: int
    num_tokens: int
    max_model_len: int  # tokens
    requests_of_max_len: float
    requests_of_sample: float  # of SAMPLE_TOKENS tokens


@dataclass(slots=True, kw_only=True)
class Checkup:
    """All of it; the schema of `--json` (version 1). `memory` is null where the model or the device cannot be had."""

    version: int = DOCTOR_VERSION
    nanoserve: str = __version__
    python: str = sys.version.split()[0]
    executable: str = sys.executable
    system: str = ""
    processor: str = ""
    load_average_1m: float | None = None
    packages: list[Package]
    threads: Threads | None = None
    device: Device | None = None
    compiler: str | None = None  # path and version; None: there is none
    memory: Memory | None = None
    leftovers: Leftovers
    removed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def examine(model: str = DEFAULT_MODEL, device: str = "auto", dtype: str = "auto", *, clean: bool = False) -> Checkup:
    """Look at everything; with `clean`, remove what was left over. Never raises for what it finds."""
    checkup = Checkup(packages=find_packages(), leftovers=find_leftovers(), compiler=find_compiler())
    _look_at_leftovers(checkup, clean)
    for package in checkup.packages:
        if package.version is None and not package.extra:
            checkup.problems.append(f"package {package.name} is missing; pip install {package.name}.")
    try:
        _look_at_machine(checkup, EngineConfig(model=model, device=device, dtype=dtype))
    except (ValueError, ImportError, OSError) as error:
        checkup.problems.append(" ".join(str(error).split()))
    return checkup


def _look_at_leftovers(checkup: Checkup, clean: bool) -> None:
    passes = 3 if clean else 0  # a process that was the parent of another leaves that one as an orphan
    while passes and any(checkup.leftovers):
        removed, _ = remove_leftovers(checkup.leftovers)
        checkup.removed += removed
        checkup.leftovers = find_leftovers()
        passes -= 1
    if count := sum(1 for _ in checkup.leftovers):
        what = "could not be removed; look at them by hand" if clean else "`nanoserve doctor --clean` removes it"
        checkup.problems.append(f"engines that ended badly have left something over ({count} in the list): {what}.")


def find_packages() -> list[Package]:
    """What the package asks for, extras for users included, and which versions are there."""
    found: dict[str, Package] = {}
    for requirement in importlib.metadata.requires("nanoserve") or ():
        match = _REQUIREMENT.match(requirement)
        assert match is not None, requirement
        name, extra = match["name"], match["extra"] or ""
        if (not extra or extra in EXTRAS) and name not in found:
            found[name] = Package(name, _version(name), extra)
    return list(found.values())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, else the first of the usual names; its path, and its version or what it lacks."""
    try:
        path = compiler.find_compiler()
    except BuildError:
        return None
    if (reason := compiler.reason_not_to_compile(path)) is not None:
        return f"{path} (it does not work: {reason})"
    return f"{path} ({next(iter(compiler.version(path).splitlines()))})"


def _look_at_machine(checkup: Checkup, config: EngineConfig) -> None:
    """Everything that needs torch; ValueError where the device or the model cannot be had."""
    from nanoserve.checkpoint import read_model_config
    from nanoserve.machine import describe_machine
    from nanoserve.platforms import resolve_platform

    machine = describe_machine()
    checkup.system, checkup.processor = machine.system, machine.processor
    checkup.load_average_1m = machine.load_average_1m
    platform = resolve_platform(config.device)
    model = read_model_config(config.model)
    threads = platform.num_threads(model.num_parameters)
    checkup.threads = Threads(threads, machine.usable_cores, os.environ.get("OMP_NUM_THREADS"))
    if threads > machine.usable_cores:
        checkup.problems.append(
            f"a step would use {threads} threads on {machine.usable_cores} cores; "
            f"set OMP_NUM_THREADS={machine.usable_cores}, or less."
        )
    checkup.device, checkup.memory = _plan(config, platform, model)
    if checkup.memory.num_tokens < 2:
        checkup.problems.append(
            f"the KV pool of {checkup.memory.kv_pool} bytes holds no request; free memory, or use a smaller model."
        )


def _plan(config: EngineConfig, platform: Platform, model: ModelConfig) -> tuple[Device, Memory]:
    from nanoserve.platforms import reason_against, resolve_attention, resolve_ops
    from nanoserve.weights import resolve_dtype

    wanted = platform.default_dtype if config.dtype == "auto" else config.dtype
    dtype = resolve_dtype(wanted, platform.device, model.dtype)
    weights = model.num_parameters * dtype.itemsize
    kv_pool = platform.kv_cache_bytes(reserved_bytes=weights)
    kv_per_token = model.kv_bytes_per_token(dtype)
    num_blocks = kv_pool // (config.block_size * kv_per_token)
    num_tokens = max(num_blocks - 1, 0) * config.block_size  # one is the null block
    backend, why = resolve_attention(platform, config.attention, dtype)
    others = [
        name
        for name, cls in SEAMS["attention"].items()
        if cls is not backend
        and platform.name in cls.platforms
        and str(dtype).removeprefix("torch.") in cls.dtypes
        and not reason_against(cls)
    ]
    is_compiled = platform.default_compile is not CompileMode.NONE
    ops, ops_why = resolve_ops(platform, config.ops, dtype, is_compiled=is_compiled)
    is_queued = platform.spares_a_core(platform.num_threads(model.num_parameters))
    device = Device(
        name=_device_name(platform),
        why=_device_why(config.device, platform),
        dtype=str(dtype).removeprefix("torch."),
        attention=backend.__name__,
        attention_why=why + (f"; --attention offers {', '.join(others)} as well" if others else ", the only one here"),
        execution=f"ops {ops.__name__} ({ops_why}), compile {platform.default_compile}, "
        f"graphs {platform.default_graph_mode} ({platform.graph_kind})" + (f", {QUEUED}" if is_queued else ""),
    )
    memory = Memory(
        model=config.model,
        free=platform.free_bytes(),
        weights=weights,
        kv_pool=kv_pool,
        kv_per_token=kv_per_token,
        block_size=config.block_size,
        num_blocks=num_blocks,
        num_tokens=num_tokens,
        max_model_len=model.max_model_len,
        requests_of_max_len=num_tokens / model.max_model_len,
        requests_of_sample=num_tokens / SAMPLE_TOKENS,
    )
    return device, memory


def _device_name(platform: Platform) -> str:
    import torch

    if platform.torch_device == "cpu":
        return platform.name
    return f"{platform.name} ({torch.cuda.get_device_name()}, {torch.cuda.device_count()} of them)"


def _device_why(asked: str, platform: Platform) -> str:
    import torch

    if asked != "auto":
        return "asked for"
    if platform.torch_device != "cpu":
        return "torch can use it"
    build = torch.version.hip or torch.version.cuda
    return f"torch sees no GPU (built for {build})" if build else "this torch was built without GPU support"
