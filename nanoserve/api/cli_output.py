"""How `nanoserve generate` prints: answers in their order, each as soon as those before it are done."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

import msgspec

if TYPE_CHECKING:
    from nanoserve.api.outputs import RequestOutput


class InOrder:
    """Sorts news of many slots into the slots' order: what comes before its turn waits."""

    def __init__(self) -> None:
        self._turn = 0
        self._waiting: dict[int, list[tuple[str, bool]]] = {}

    def push(self, slot: int, text: str, ended: bool) -> Iterator[tuple[int, str]]:
        """Take news of one slot; yields (slot, text) of all that may be printed now."""
        self._waiting.setdefault(slot, []).append((text, ended))
        while self._turn in self._waiting:
            news = self._waiting.pop(self._turn)
            yield from ((self._turn, text) for text, _ in news)
            if not any(ended for _, ended in news):
                return
            self._turn += 1


def print_text(stream: Iterable[RequestOutput], echoed: Sequence[str], n: int, out: TextIO) -> None:
    """Print deltas as they come; a header before each answer where there is more than one.

    `stream` holds deltas of requests numbered from 0; `echoed[i]` is printed before the text of request i.
    """
    order, last = InOrder(), -1
    several = len(echoed) * n > 1
    for output in stream:
        for answer in output.outputs:
            slot = int(output.request_id) * n + answer.index
            for printed, text in order.push(slot, answer.text, answer.finished()):
                if printed != last:
                    out.write(("\n\n" if last >= 0 else "") + (_header(printed, n, len(echoed)) if several else ""))
                    out.write(echoed[printed // n])
                    last = printed
                out.write(text)
        out.flush()
    out.write("\n")
    out.flush()


def _header(slot: int, n: int, num_prompts: int) -> str:
    answer = f", answer {slot % n + 1} of {n}" if n > 1 else ""
    return f"--- prompt {slot // n + 1} of {num_prompts}{answer} ---\n"


def print_json(stream: Iterable[RequestOutput], out: TextIO) -> None:
    """One line a request, in the order of the requests: a `RequestOutput` with the names of its fields."""
    order = InOrder()
    for output in stream:
        if output.finished:
            line = msgspec.json.encode(output).decode() + "\n"
            out.writelines(text for _, text in order.push(int(output.request_id), line, True))
            out.flush()


class Tally:
    """Counts what passes through a stream, for one line of statistics."""

    def __init__(self, load_s: float) -> None:
        self._load_s = load_s
        self._start_s = time.monotonic()
        self._requests = self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._ttfts_s: list[float] = []

    def watch(self, stream: Iterable[RequestOutput]) -> Iterator[RequestOutput]:
        """The same stream. Counts each token once, so it takes deltas or final outputs, not cumulative ones."""
        for output in stream:
            self._output_tokens += sum(len(answer.token_ids) for answer in output.outputs)
            if output.finished:
                self._count_request(output)
            yield output

    def _count_request(self, output: RequestOutput) -> None:
        self._requests += 1
        self._prompt_tokens += len(output.prompt_token_ids)
        self._cached_tokens += output.num_cached_tokens
        if output.metrics is not None and output.metrics.ttft_s is not None:
            self._ttfts_s.append(output.metrics.ttft_s)

    def __str__(self) -> str:
        run_s = time.monotonic() - self._start_s
        ttft = f"; TTFT median {statistics.median(self._ttfts_s) * 1e3:.0f} ms" if self._ttfts_s else ""
        return (
            f"{self._requests} request{'s' if self._requests != 1 else ''}, "
            f"{self._prompt_tokens} prompt tokens ({self._cached_tokens} cached), "
            f"{self._output_tokens} generated in {run_s:.2f} s ({self._output_tokens / run_s:.0f} tokens/s)"
            f"{ttft}; ready after {self._load_s:.2f} s"
        )
