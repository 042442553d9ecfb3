"""Drives a workload through an engine client: submits each arrival when it is due, polls until all is done.

Measures nothing: what happened is in the records that the engine gives its observer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanoserve.lab.workload import Arrival, Progress, Workload

if TYPE_CHECKING:
    from nanoserve.client import EngineClient

MAX_WAIT_S = 1.0  # an idle engine is polled at least this often


class _Load:
    """What of a workload is still to come, and how far each request has got."""

    def __init__(self, workload: Workload) -> None:
        self.pending = list(workload.arrivals)
        self.active: dict[str, Arrival] = {}
        self.emitted = {a.id: 0 for a in workload.arrivals}
        self.groups: dict[str, list[str]] = {}
        for a in workload.arrivals:
            self.groups.setdefault(a.group, []).append(a.id)

    def reached(self, progress: Progress | None) -> bool:
        if progress is None:
            return True
        return all(self.emitted[i] >= progress.num_tokens for i in self.groups[progress.group])

    def take_due(self, elapsed_s: float) -> list[Arrival]:
        due = [a for a in self.pending if a.at_s <= elapsed_s and self.reached(a.after)]
        if due:
            taken = {a.id for a in due}
            self.pending = [a for a in self.pending if a.id not in taken]
            self.active |= {a.id: a for a in due}
        return due

    def wait_s(self, elapsed_s: float) -> float:
        """Until the next arrival that only waits for its time."""
        waits = [a.at_s - elapsed_s for a in self.pending if self.reached(a.after)]
        return min([MAX_WAIT_S, *(max(wait, 0.0) for wait in waits)])


def drive(
    client: EngineClient,
    workload: Workload,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    on_tokens: Callable[[int], None] | None = None,
) -> None:
    """Run the workload to its end. `on_tokens` hears how many tokens each poll brought.

    `clock` is the one that the engine stamps its records with. Raises RuntimeError when a request ends early.
    """
    if any(arrival.follows for arrival in workload.arrivals):
        raise ValueError(f"load {workload.name} has turns that wait for others; run it with `nanoserve simulate`.")
    load = _Load(workload)
    started_s = clock()
    while load.pending or load.active:
        now_s = clock()
        for arrival in load.take_due(now_s - started_s):
            due_s = now_s if arrival.after else started_s + arrival.at_s  # a late submit is the engine's delay
            client.submit(arrival.request(arrival_s=due_s))
        if not load.active:
            sleep(load.wait_s(now_s - started_s))
            continue
        num_tokens = 0
        for output in client.poll(load.wait_s(now_s - started_s)):
            num_tokens += len(output.new_token_ids)
            load.emitted[output.id] += len(output.new_token_ids)
            if output.finish_reason is not None:
                arrival = load.active.pop(output.id)
                if load.emitted[output.id] != arrival.max_tokens:
                    raise RuntimeError(
                        f"request {output.id} ended ({output.error or output.finish_reason}) after "
                        f"{load.emitted[output.id]} of {arrival.max_tokens} tokens."
                    )
        if on_tokens is not None:
            on_tokens(num_tokens)
