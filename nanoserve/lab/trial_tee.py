"""What a trial records: every step in memory, and to an observer as well, the steps that came to no end included.

Knows nothing of laws. Law: test_every_fault_can_be_found_from_its_trace (tests/test_faults_lab.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from nanoserve.lab.trial_loads import Job
from nanoserve.record import ListRecorder, Observer, StepRecord, TraceHeader

if TYPE_CHECKING:
    from nanoserve.core import EngineCore


class Tee:
    """Keeps the records, and passes them on; at the end, the steps that came to no end, with what was wrong."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._list = ListRecorder()

    @property
    def records(self) -> list[StepRecord]:
        return self._list.records

    def on_start(self, header: TraceHeader) -> None:
        if self._observer:
            self._observer.on_start(header)

    def on_step(self, record: StepRecord) -> None:
        self._list.on_step(record)
        if self._observer:
            self._observer.on_step(record)

    def finish(self, core: EngineCore | None, step: int, jobs: Iterable[Job], error: str) -> None:
        """`step`: that the trial had come to; `jobs`: all that arrived; `error`: what stopped it, if anything did."""
        if not self._observer or not core:
            return
        told = {request.id for record in self.records for request in record.arrivals}
        last = self.records[-1].step if self.records else 0
        try:
            rest = [msgspec.convert(plan, StepRecord) for plan in core.recent_steps() if plan["step"] > last]
        except Exception:  # what `schedule` returned is no plan, or none that can be told
            rest = []
        if error and (rest[-1].step if rest else last) < step:  # not even decided
            now_s = core.clock()
            rest.append(StepRecord(step=step, start_s=now_s, launched_s=now_s, end_s=now_s, budget=core.config.budget))
        if rest:
            rest[0].arrivals = [job.request() for job in jobs if job.id not in told]
            rest[-1].error = error
        for record in rest:
            self._observer.on_step(record)
        self._observer.close()

    def close(self) -> None:
        pass
