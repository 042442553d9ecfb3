"""How a runner executes, and what getting ready for it took: told to whoever asks, decided by nobody here.

Plain data that crosses process boundaries: the log line when an engine starts, `nanoserve doctor` and the ladder show
it. Imports no torch.
"""

from __future__ import annotations

import msgspec

QUEUED = "greedy decodes run by a thread of their own"


class Execution(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Filled in by the runner while it is built."""

    attention: str = ""  # the backend, and why this one
    ops: str = ""  # those, and why
    batch: str = ""
    quantization: str = ""  # of the weight matrices
    compile: str = "none"
    compile_s: float = 0.0
    graph_mode: str = "none"
    graph_sizes: list[int] = []  # tokens
    graph_kind: str = ""  # what replays them
    stream: str = ""  # what runs while the host goes on, on a CPU
    capture_s: float = 0.0
    graph_bytes: int = 0  # of graphs and their static memory
    weight_bytes: int = 0
    activation_bytes: int = 0  # at their peak; 0: not measured
    kv_cache_bytes: int = 0
    num_threads: int = 0

    def __str__(self) -> str:
        parts = [f"attention {self.attention}", f"ops {self.ops}", f"batch {self.batch}", f"compile {self.compile}"]
        if self.quantization:
            parts.insert(0, f"weights {self.quantization}")
        if self.compile != "none":
            parts[-1] += f" ({self.compile_s:.1f} s)"
        if self.graph_sizes:
            largest, count = self.graph_sizes[-1], len(self.graph_sizes)
            graphs = f"graphs {self.graph_mode} ({self.graph_kind}, {count} sizes up to {largest} tokens"
            parts.append(f"{graphs}, {self.capture_s:.2f} s, {self.graph_bytes / 2**20:.1f} MiB)")
        else:
            parts.append("no graphs")
        if self.stream:
            parts.append(self.stream)
        return ", ".join(parts)

    @property
    def memory(self) -> str:
        """What was counted before the KV pool got its share, and that share."""
        counted = {"weights": self.weight_bytes, "activations": self.activation_bytes, "graphs": self.graph_bytes}
        sizes = [f"{name} {size / 2**20:,.1f} MiB" for name, size in counted.items() if size]
        return ", ".join([*sizes, f"KV pool {self.kv_cache_bytes / 2**20:,.1f} MiB"])
