"""nanoserve: an LLM serving engine in which every step from vLLM v0 to v1 is a switch of its own.

The names below are imported when they are first used, so that `import nanoserve` is quick and only `LLM`
brings torch. Start reading at `core.py` (the step), then `scheduler.py`, then `blocks.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoserve.api.llm import LLM
    from nanoserve.config import STAGES, EngineConfig
    from nanoserve.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "STAGES", "EngineConfig", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    match name:
        case "LLM":
            home = "nanoserve.api.llm"
        case "EngineConfig" | "STAGES":
            home = "nanoserve.config"
        case "SamplingParams":
            home = "nanoserve.request"
        case _:
            raise AttributeError(f"module 'nanoserve' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # asked for once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
