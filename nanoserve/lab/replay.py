"""A recorded run, decided again: the same scheduler and block manager, fed what came to them, must decide the same.

Arrivals, aborts, cache resets and sampled tokens come from the trace, in the recorded order; nothing is computed. The
first step that comes out otherwise is a `Difference`. A trace from another layout, a simulator, or a crash dump is
replayed in the same way. Laws, and the bugs and tampering that must be found: tests/test_replay.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanoserve.config import EngineConfig
from nanoserve.lab.trace import Moment, Trace, moments
from nanoserve.lab.user_class import known_class, refusing, seam_class, told
from nanoserve.record import Input, StepRecord, TraceHeader, decided
from nanoserve.request import EngineRequest, Request, StepPlan
from nanoserve.runner import MAX_POOL_BLOCKS

if TYPE_CHECKING:
    from nanoserve.blocks import KVCacheManager
    from nanoserve.scheduler import BaseScheduler

CONFIG_FIELDS = (
    "block_size", "num_blocks", "free_order", "num_swap_blocks", "max_num_seqs", "max_num_batched_tokens",
    "long_prefill_token_threshold", "watermark", "reserve_full_prompt", "policy", "preemption_mode", "max_model_len",
)  # fmt: skip
COUNTS = ("num_free_blocks", "num_used_blocks", "num_running", "num_waiting")
ORDERED = ("num_scheduled_tokens", "left_out")  # mappings whose order is a decision: of the batch, of the queue
MAX_LINES, MAX_VALUE = 12, 160  # of a difference
ABSENT = "nothing"


@dataclass(frozen=True, slots=True)
class Change:
    """One value that came out otherwise; `key`: the request, or the place in a list."""

    field: str
    key: str
    recorded: str
    replayed: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step that the replay does not agree with."""

    step: int
    moment: str  # "decided", or "taken": when its tokens were
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        what = "is decided otherwise" if self.moment == "decided" else "ends otherwise"
        rows = [(f"{c.field}[{c.key}]" if c.key else c.field, c.recorded, c.replayed) for c in self.changes]
        width = max(len(name) for name, _, _ in rows)
        lines = [f"  {name:<{width}}  recorded {old}, replayed {new}" for name, old, new in rows[:MAX_LINES]]
        more = [f"  and {len(rows) - MAX_LINES} more"] if len(rows) > MAX_LINES else []
        return "\n".join([f"step {self.step} {what}:", *lines, *more])


def replay_config(header: TraceHeader, scheduler: str = "", blocks: str = "", where: str = "the trace") -> EngineConfig:
    """What the header says of scheduling, as a config. It can name nanoserve's own classes alone; `scheduler`,
    `blocks`: others, as for `seam_class`, by the user's own word. `where` the header stands. ValueError."""
    missing = [name for name in (*CONFIG_FIELDS, "scheduler", "blocks") if header.config.get(name) is None]
    if missing:
        raise ValueError(f"{where} does not say {', '.join(missing)}; record it again with this version.")
    given = {"scheduler": scheduler, "blocks": blocks}
    classes: dict[str, Any] = {seam: seam_class(seam, name) for seam, name in given.items() if name}
    values: dict[str, Any] = {name: header.config[name] for name in CONFIG_FIELDS}
    with refusing(f"{where}: its config cannot be had again"):
        classes |= {seam: known_class(seam, str(header.config[seam])) for seam in given if seam not in classes}
        _check_values(values)
        return EngineConfig(**values, **classes)


def _check_values(values: Mapping[str, Any]) -> None:
    """What `EngineConfig` leaves to `resolve`, which a recorded config went through, and what would not fit here."""
    for name in ("num_blocks", "num_swap_blocks"):
        if isinstance(values[name], int) and values[name] > MAX_POOL_BLOCKS:
            raise ValueError(f"{name}={values[name]} is more than a replay has memory for; at most {MAX_POOL_BLOCKS}")
    for name, kind in (("max_model_len", int), ("max_num_batched_tokens", int), ("reserve_full_prompt", bool)):
        if not isinstance(values[name], kind):
            raise ValueError(f"{name}={values[name]!r:.60} is not of type {kind.__name__}")


class Replay:
    """One pass over a trace. After `run`, or when `decisions` has ended, `difference` is the first one, if any."""

    def __init__(self, trace: Trace, scheduler: str = "", blocks: str = "") -> None:
        """ValueError when the trace lacks its config or its beginning, or names a class that is not known here."""
        self.config = replay_config(trace.header, scheduler, blocks, trace.line(-1))
        if trace.records and trace.records[0].step != 1:
            raise ValueError(
                f"the trace begins with step {trace.records[0].step}: what came before is not in it (a crash dump goes "
                "back a few steps only); record the whole run with --record."
            )
        self.trace = trace
        self.num_steps = 0  # that were decided again and agree
        self.difference: Difference | None = None
        config = self.config
        assert config.num_blocks is not None, "replay_config insists"
        with refusing(f"{config.blocks.__name__} and {config.scheduler.__name__} cannot be made"):
            self.blocks: KVCacheManager = config.blocks(
                config.num_blocks,
                config.block_size,
                watermark_blocks=config.watermark_blocks,
                free_order=config.free_order,
                num_swap_blocks=config.num_swap_blocks,
            )
            self.blocks.record_events = True  # type: ignore[attr-defined]  # for the evictions
            self.scheduler: BaseScheduler = config.scheduler(config, self.blocks)
        self._plans: dict[int, StepPlan] = {}
        self._arrivals: deque[EngineRequest] = deque()

    def run(self) -> Difference | None:
        for _ in self.decisions():
            pass
        return self.difference

    def decisions(self) -> Iterator[StepRecord]:
        """Every step, as soon as it is decided again: the blocks are then as they were while it ran. Ends with the
        trace, at the first difference, or where a crash ended the run."""
        for moment in moments(self.trace.records):
            try:
                changes = self._decide(moment) if moment.is_decision else self._take(moment.record)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit too: a scheduler of a user's must not end the command
                if _has_no_plan(moment.record):
                    return  # it failed in the same place when it was recorded
                changes = [Change("error", "", ABSENT, _show(told(error)))]
            if changes:
                when = "decided" if moment.is_decision else "taken"
                self.difference = Difference(moment.record.step, when, tuple(changes))
                return
            if moment.is_decision:
                self.num_steps += 1
                yield moment.record

    def _decide(self, moment: Moment) -> list[Change]:
        record = moment.record
        self._arrivals = deque(record.arrivals)
        num_later = sum(i.kind == "add" for i in record.meanwhile)
        self._feed(record.before or [Input("add", r.id) for r in record.arrivals[: len(self._arrivals) - num_later]])
        plan = self.scheduler.schedule()
        self._plans[record.step] = plan
        requests = self.scheduler.requests
        replayed = decided(plan) | {
            "budget": self.config.budget,
            "resumed": [new.id for new in plan.new if requests[new.id].num_preemptions],
            "evicted": [i for e in self.blocks.take_events() if e.kind == "removed" for i in e.block_ids],
        }
        if self.trace.header.crash:
            del replayed["evicted"]
        if _has_no_plan(record):
            return [Change("error", "", _show(record.error), ABSENT)]
        return compare(record, replayed)

    def _take(self, record: StepRecord) -> list[Change]:
        self._feed(record.meanwhile)
        news = self.scheduler.update(self._plans.pop(record.step), record.sampled)
        ends = {output.id: output.finish_reason for output in news if output.finish_reason}
        replayed: dict[str, Any] = {
            "sampled": {output.id: output.new_token_ids for output in news if output.new_token_ids},
            "finished": dict.fromkeys(record.aborts, "abort") | ends,
        }
        if not self.trace.header.crash:
            free = self.blocks.num_free_blocks
            waiting = len(self.scheduler.waiting) + len(self.scheduler.swapped)
            counts = (free, self.blocks.num_blocks - 1 - free, len(self.scheduler.running), waiting)
            replayed |= dict(zip(COUNTS, counts, strict=True))
        return compare(record, replayed)

    def _feed(self, inputs: Sequence[Input]) -> None:
        """What came to the scheduler. An input that cannot be is an error: it was not recorded like this."""
        for kind, request_id in ((i.kind, i.id) for i in inputs):
            if kind == "add":
                request = self._arrivals.popleft()
                assert request.id == request_id, f"{request_id} was added, {request.id} arrived"
                self.scheduler.add(Request.from_engine_request(request, self.config.model_len))
            elif kind == "abort":
                assert self.scheduler.abort([request_id]), f"{request_id} was aborted, and is not alive"
            else:
                assert kind == "reset", f"input {kind!r} is not known"
                self.scheduler.reset_prefix_cache(request_id == "force")


def _has_no_plan(record: StepRecord) -> bool:
    """Of a crash dump: the scheduler itself failed."""
    return bool(record.error) and not (record.num_scheduled_tokens or record.left_out or record.preempted)


def compare(record: StepRecord, replayed: Mapping[str, Any]) -> list[Change]:
    """The values in which a record differs from those, field by field."""
    changes: list[Change] = []
    for name, new in replayed.items():
        old = getattr(record, name)
        if old != new:
            changes += _differences(name, old, new)
        elif name in ORDERED and list(old) != list(new):
            changes.append(Change(name, "order", _show(", ".join(old)), _show(", ".join(new))))
    return changes


def _differences(name: str, old: Any, new: Any) -> list[Change]:
    if not isinstance(old, dict):
        return [Change(name, "", _show(old), _show(new))]
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [Change(name, _show(key), _show(old.get(key, ABSENT)), _show(new.get(key, ABSENT))) for key in keys]


def _show(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= MAX_VALUE else f"{text[:60]}...{text[-(MAX_VALUE - 63) :]}"
