"""A simulation in a terminal: every figure marked simulated, with what it rests on."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nanoserve.lab.gpus import format_bytes
from nanoserve.lab.simulate_report import MemoryReport, PolicyReport, SessionMemory, SimulateReport
from nanoserve.lab.study import Column, Study, Value

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 140  # where there is no terminal to ask
NOTE = (
    "Simulated: real scheduler and block manager on a virtual clock; a step takes what the cost model says, and "
    "nothing was measured."
)


def show(report: SimulateReport) -> None:
    console = _console()
    console.print(f"Load {report.workload}: {report.claim}")
    if report.study is None:
        console.print(", ".join(f"{name}={value}" for name, value in report.parameters.items()))
    console.print(NOTE)
    if report.memory:
        console.print(_memory_line(report.memory))
    if report.sessions:
        console.print(sessions_table(report.sessions))
    if report.study:
        show_study(report.study, console)
        return
    host = report.host
    title = f"simulated, {report.costs}, {report.num_blocks:,} blocks of {report.block_size}, seed {report.seed}"
    console.print(latency_table(report, title))
    console.print(work_table(report.policies))
    if host.step_us or host.request_us or host.front_end_us:
        console.print(
            f"Host: {host.step_us} us a step, {host.request_us:g} us a request in it, {host.front_end_us:g} us a token "
            "that goes out."
        )
    for row in report.policies:
        if row.num_refused:
            console.print(f"{row.policy}: {row.num_refused} requests could never fit and ended without a token.")


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=WIDTH)


def _table(title: str, caption: str = "") -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)


def micro(us: float | None) -> str:
    """Microseconds with the thousands apart: 1 054 000."""
    return "-" if us is None else f"{round(us):,}".replace(",", " ")


def latency_table(report: SimulateReport, title: str) -> Table:
    """ITL of all requests, TTFT of the group that the scenario is about: each, where it is small."""
    table = _table(title)
    listed = all(row.ttfts_us is not None for row in report.policies)
    ttft = [f"TTFT, each {report.ttft_group}"] if listed else [f"TTFT {report.ttft_group} P50", "P99", "max"]
    table.add_column("policy (times in us)")
    for name in ("ITL P50", "ITL P99", "ITL max", *ttft, "end"):
        table.add_column(name, justify="right")
    for row in report.policies:
        itl, first = row.itl_us, row.ttft_us
        gaps = [micro(itl and value) for value in ((itl.p50, itl.p99, itl.max) if itl else (None, None, None))]
        if listed:
            firsts = [", ".join(map(micro, row.ttfts_us or []))]
        else:
            firsts = [micro(value) for value in ((first.p50, first.p99, first.max) if first else (None, None, None))]
        table.add_row(row.policy, *gaps, *firsts, micro(row.end_us))
    return table


def work_table(policies: Sequence[PolicyReport]) -> Table:
    table = _table("simulated, what it took")
    table.add_column("policy")
    columns = (
        "steps",
        "running",
        "tokens computed",
        "out tokens/s",
        "hit rate %",
        "peak blocks",
        "preempted",
        "refused",
    )
    for name in columns:
        table.add_column(name, justify="right")
    for row in policies:
        table.add_row(
            row.policy,
            f"{row.num_steps:,}",
            f"{row.mean_running:.1f}",
            f"{row.num_tokens:,}",
            f"{row.output_tokens_per_s:,.0f}",
            f"{row.hit_rate:.1%}".removesuffix("%"),
            f"{row.peak_used_blocks:,}",
            f"{row.num_preemptions:,}",
            f"{row.num_refused:,}",
        )
    return table


def _memory_line(memory: MemoryReport) -> str:
    return (
        f"Memory of a replica, by data sheet: {memory.gpus}, {format_bytes(memory.total_bytes)}, of which "
        f"{memory.use:.0%} are used; weights {format_bytes(memory.weight_bytes)}; KV {memory.kv_bytes_per_token:,} "
        f"bytes a token; room for {memory.num_blocks:,} blocks."
    )


def sessions_table(sessions: SessionMemory) -> Table:
    table = _table(
        f"simulated, {sessions.sessions:,} sessions of {sessions.prefix_len:,} + {sessions.own_len:,} tokens, resident",
        f"Shared blocks are counted in SharedBlocks; a pool of {sessions.pool_blocks:,} blocks is by data sheet.",
    )
    for name in ("", "blocks", "their KV", "KV of the prefix alone", "sessions that fit at once"):
        table.add_column(name, justify="right" if name else "left")
    for name, blocks, prefix, fit in (
        ("a copy each", sessions.private_blocks, sessions.private_prefix_bytes, sessions.private_fit),
        ("shared", sessions.shared_blocks, sessions.shared_prefix_bytes, sessions.shared_fit),
    ):
        table.add_row(
            name, f"{blocks:,}", format_bytes(blocks * sessions.block_bytes), format_bytes(prefix), f"{fit:,}"
        )
    return table


def show_study(study: Study, console: Console) -> None:
    console.print("Assumptions:")
    for line in study.assumptions:
        console.print(f"- {line}")
    table = _table("simulated")
    for column in study.columns:
        is_text = column.unit == "text"
        table.add_column(column.label, justify="left" if is_text else "right", no_wrap=is_text)
    for row in study.rows:
        table.add_row(*(_cell(column, row[column.key]) for column in study.columns))
    console.print(table)
    for line in study.findings:
        console.print(f"- {line}")


def _cell(column: Column, value: Value) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if column.unit == "us":
        return f"{value / 1000:,.1f}"
    if column.unit == "share":
        return f"{value * 100:.1f}"
    return f"{value:,}"


@contextmanager
def working(what: str) -> Iterator[None]:
    """Says on a terminal that it takes a while."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def show_json(encoded: bytes) -> None:
    sys.stdout.write(encoded.decode())
