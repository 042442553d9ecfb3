"""How a grade reads in a terminal: the verdict table, what was broken in plain words, the figures beside the built-ins.

Knows the grade, not how it came about. Imports rich inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nanoserve.lab.figures import Figures
from nanoserve.lab.grading import Grade, Result
from nanoserve.lab.laws import LAWS, Verdict
from nanoserve.lab.trial import STEP_US, TOKEN_US

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from nanoserve.lab.faults import Fault

COLUMNS = {  # field of Figures -> heading, format
    "itl_p50_ms": ("ITL P50 ms", "{:.1f}"),
    "itl_p99_ms": ("P99", "{:.1f}"),
    "itl_max_ms": ("max", "{:.1f}"),
    "ttft_p50_ms": ("TTFT P50 ms", "{:.1f}"),
    "ttft_max_ms": ("max", "{:.1f}"),
    "output_tokens_per_s": ("tokens/s", "{:.0f}"),
    "hit_rate": ("hits %", "{:.1%}"),
    "num_preemptions": ("preempted", "{:d}"),
    "fairness": ("fairness", "{:.2f}"),
}


def show(grade: Grade, *, traceback: bool, fault: Fault | None = None) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=130)
    if fault:
        console.print(f"Planted fault {fault.name}: {fault.description}")
    console.print(_verdict_table(grade))
    for law, meaning in LAWS.items():
        console.print(f"  {law}: {meaning}")
    _show_broken(console, grade, traceback)
    whose = "planted" if fault else "yours"
    for load, rows in grade.beside.items():
        mine = next((result.figures for result in grade.results if result.load == load), None)
        console.print()
        console.print(_figure_table(load, {f"{grade.policy.name} ({whose})": mine, **rows}))
    if grade.beside:
        console.print(
            f"Times are simulated: a step costs {STEP_US:,} us and {TOKEN_US} us a token. Fairness is 1 when all "
            "requests are slowed down alike."
        )
    console.print()
    console.print(verdict_line(grade))


def _verdict_table(grade: Grade) -> Table:
    from rich.table import Table

    base = f", a {grade.policy.base}" if grade.policy.base else ""
    table = Table(title=f"{grade.policy.name}{base}, seed {grade.seed}", title_justify="left")
    table.add_column("load")
    for law in LAWS:
        table.add_column(law)
    for result in grade.results:
        table.add_row(result.load, *(_cell(result, law) for law in LAWS))
    for load in grade.left_out:
        table.add_row(load, *("not run" for _ in LAWS))
    return table


def _cell(result: Result, law: str) -> str:
    verdict = result.verdicts.get(law)
    if verdict is None:
        return "?"
    return "ok" if verdict.holds else f"BROKEN, step {verdict.step}"


def _show_broken(console: Console, grade: Grade, traceback: bool) -> None:
    for result in grade.results:
        verdicts = [verdict for verdict in result.verdicts.values() if not verdict.holds]
        for index, verdict in enumerate(sorted(verdicts, key=lambda verdict: verdict.step)):
            console.print()
            console.print("\n".join(_words(result.load, verdict, is_first=index == 0)))
            if traceback and verdict.traceback:
                console.print(verdict.traceback.rstrip())


def _words(load: str, verdict: Verdict, *, is_first: bool) -> Iterator[str]:
    after = "" if is_first else " (later, perhaps in consequence)"
    who = f", request {verdict.request}" if verdict.request else ""
    yield f"Load {load}, step {verdict.step}{who}: law '{verdict.law}' is broken{after}."
    yield f"  expected: {verdict.expected}"
    yield f"  got:      {verdict.got}"
    if verdict.where:
        yield f"  at:       {verdict.where}"


def _figure_table(load: str, rows: dict[str, Figures | None]) -> Table:
    from rich.table import Table

    table = Table(title=f"Load {load}", title_justify="left")
    table.add_column("class")
    for heading, _ in COLUMNS.values():
        table.add_column(heading, justify="right")
    for name, figures in rows.items():
        values = [getattr(figures, key, None) for key in COLUMNS]
        cells = ["-" if v is None else fmt.format(v) for v, (_, fmt) in zip(values, COLUMNS.values(), strict=True)]
        table.add_row(name, *cells)
    return table


def verdict_line(grade: Grade) -> str:
    bad = [result for result in grade.results if result.first]
    num_left = len(grade.left_out)
    were = "load was" if num_left == 1 else "loads were"
    left_out = f" {num_left} {were} not run, as it hung on others." if num_left else ""
    if not bad:
        return f"All {len(LAWS)} laws hold on {len(grade.results)} loads.{left_out}"
    first = bad[0].first
    assert first is not None
    return f"{len(bad)} of {len(grade.results)} loads break a law; start with '{first.law}' on {bad[0].load}.{left_out}"
