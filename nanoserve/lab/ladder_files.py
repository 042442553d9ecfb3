"""What a climb leaves in its folder: ladder.json, a PNG a chart, the report, and an interactive timeline a load.

Owns the names of the files. Laws: tests/test_ladder.py, tests/test_ladder_report.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nanoserve.lab.ladder_figures import (
    draw_block_maps,
    draw_gaps,
    draw_load,
    draw_production,
    overlay_page,
    traces_of,
    words_of,
)
from nanoserve.lab.ladder_page import Picture, ladder_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nanoserve.lab.charts import Setting
    from nanoserve.lab.front_end import FrontEndLoad
    from nanoserve.lab.ladder_production import ProductionRuns
    from nanoserve.lab.ladder_report import LadderReport, Run, ServerRun, StageReport
    from nanoserve.lab.workload import Workload

REPORT = "ladder.html"


@dataclass(frozen=True)
class Drawn:
    """File name -> chart, and file name -> interactive timeline; nothing where nothing was drawn."""

    charts: dict[str, Figure] = field(default_factory=dict)
    timelines: dict[str, str] = field(default_factory=dict)

    @property
    def names_of_pages(self) -> list[str]:
        return [REPORT, *self.timelines] if self.charts else []


def draw(
    workloads: Sequence[Workload],
    runs: Mapping[str, Sequence[Run]],
    built: Mapping[str, StageReport],
    served: tuple[FrontEndLoad | None, Sequence[ServerRun]],
    production: ProductionRuns | None,
    setting: Setting,
) -> Drawn:
    """Every chart and timeline of a climb."""
    drawn = Drawn()
    for workload in workloads:
        done = runs[workload.name]
        drawn.charts.update(draw_load(workload, done, setting))
        traces = traces_of(done, built)
        drawn.charts.update(draw_block_maps(traces, replace(setting, load=workload.name)))
        drawn.timelines[f"{workload.name}-timeline.html"] = overlay_page(traces)
    front_end, lives = served
    if front_end:
        drawn.charts.update(draw_gaps(front_end, lives, setting))
    if production:
        drawn.charts.update(draw_production(production.report, production.runs))
    return drawn


def write(report: LadderReport, drawn: Drawn, out: Path) -> list[Path]:
    """All of it, ladder.json first."""
    path = out / "ladder.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    pictures = {}
    for name, figure in drawn.charts.items():
        figure.savefig(out / name)
        pictures[name] = Picture((out / name).read_bytes(), words_of(figure))
    for name, page in drawn.timelines.items():
        (out / name).write_text(page, encoding="utf-8")
    if pictures:
        (out / REPORT).write_text(ladder_html(report, pictures), encoding="utf-8")
    return [path, *(out / name for name in [*report.pages, *report.charts])]
