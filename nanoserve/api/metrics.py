"""Prometheus metrics of a server, under vLLM's names where they mean the same (`vllm/v1/metrics/loggers.py`).

Latencies and tokens are counted as answers get them (`AsyncLLM` calls the `Listener` methods); what the engine counts
is read from its last news when someone looks. Has a registry of its own: nothing else in the process shows up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from nanoserve.messages import SchedulerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds. vLLM's, and finer ones below them for small models.
TTFT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
LATENCY_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class ServerMetrics:
    """A `Listener` of `AsyncLLM`. `read_stats`: the engine's figures, whenever someone looks."""

    def __init__(self, model: str, read_stats: Callable[[], SchedulerStats]) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        labels = ("model_name",)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, **own).labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, labels, **own).labels(model)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token.", TTFT_BUCKETS)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Time between two outputs.", ITL_BUCKETS)
        self._latency = histogram("vllm:e2e_request_latency_seconds", "Time to the end.", LATENCY_BUCKETS)
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that got a token.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens that were generated.")
        by_reason = (*labels, "finished_reason")
        ended = Counter("vllm:request_success", "Answers by the reason of their end.", by_reason, **own)
        self._ended = {reason: ended.labels(model, reason) for reason in ("stop", "length", "abort", "error")}
        self.registry.register(_EngineCollector(model, read_stats))

    def on_first_token(self, num_prompt_tokens: int, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)
        self._prompt_tokens.inc(num_prompt_tokens)

    def on_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        self._generation_tokens.inc(num_tokens)
        if gap_s is not None:
            self._itl.observe(gap_s)

    def on_end(self, reason: str, latency_s: float) -> None:
        self._ended[reason].inc()
        self._latency.observe(latency_s)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's own figures."""

    def __init__(self, model: str, read_stats: Callable[[], SchedulerStats]) -> None:
        self._model = model
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        gauges = {
            "num_requests_running": ("Requests in the batch.", stats.num_running),
            "num_requests_waiting": ("Requests that wait for a seat or for blocks.", stats.num_waiting),
            "kv_cache_usage_perc": ("Share of the KV blocks in use, 0 to 1.", stats.kv_cache_usage),
        }
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            "num_preemptions": ("Preemptions.", stats.num_preemptions),
        }
        for kind, found in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in found.items():
                family = kind(f"vllm:{name}", text, labels=("model_name",))
                family.add_metric((self._model,), value)
                yield family
