"""Writes report.html: of one run or several, and of a run that is being trained."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from cmsf.report.collect import collect_run
from cmsf.report.compare import comparison_plots, comparison_warning
from cmsf.report.contents import Report, RunReport
from cmsf.report.history import collect_history
from cmsf.report.image_pool import map_plots
from cmsf.report.page import render
from cmsf.report.plots import Plot
from cmsf.runs.folder import RunFolder
from cmsf.runs.run import Run
from cmsf.utils.errors import BadInput
from cmsf.utils.files import make_folder, report_write_errors, write_text
from cmsf.utils.progress import track
from cmsf.utils.text import format_bytes

LARGEST = 10_000_000
_PAUSE = 10.0
"""Seconds between two pages of a run that is being trained: to draw one takes a second or two."""
_IMAGES = 2_400
"""On a page, of all its runs together; some 2 kB each."""


def write_report(
    runs: Sequence[Run],
    out: Path,
    device: str = "auto",
    workers: int | None = None,
    print_line: Callable[[str], None] = print,
) -> Path:
    """Writes a page of one file, and each plot as PNG and SVG in the folder beside it that is returned."""
    reports = _with_unique_names([collect_run(run, _IMAGES // len(runs), device, workers, print_line) for run in runs])
    together = comparison_plots(reports)
    folder = out.with_name(f"{out.stem}-plots")
    with report_write_errors(out, "choose another --out"):
        make_folder(folder)
        plots = [(plot, folder) for plot in together]
        for number, report in enumerate(reports, start=1):
            maps = () if report.images is None else map_plots(report.images)
            plots += [(plot, folder if len(runs) == 1 else folder / f"run-{number}") for plot in (*report.plots, *maps)]
        for plot, place in track(plots, "plots", len(plots)):
            plot.save(place)
        _write_page(out, reports, together)
    for report in reports:
        for note in report.notes:
            print_line(f"{report.name}: {note}")
    return folder


class LiveReport:
    """Writes report.html of a run that is being trained whenever it is called, but not more often than every ten
    seconds; an open page looks for a newer one."""

    def __init__(self, folder: RunFolder, warn: Callable[[str], None]) -> None:
        self.folder, self.warn, self.last_write, self.warned = folder, warn, -math.inf, False

    def __call__(self) -> None:
        if time.monotonic() - self.last_write < _PAUSE:
            return
        try:
            _write_page(self.folder.report_file, [collect_history(Run(self.folder.path))], live=True)
        except (BadInput, OSError) as error:  # a page never stops a run
            if not self.warned:
                self.warn(f"the report was not updated: {error}")
            self.warned = True
        self.last_write = time.monotonic()


def _with_unique_names(reports: Sequence[RunReport]) -> list[RunReport]:
    """Numbers several runs like their folders of plots; those of one recipe get the names of their folders as well."""
    if len(reports) == 1:
        return list(reports)
    times = Counter(report.name for report in reports)
    named = []
    for number, report in enumerate(reports, start=1):
        folder = f" · {Path(report.path).resolve().name}" if times[report.name] > 1 else ""
        named.append(replace(report, name=f"{number} {report.name}{folder}"))
    return named


def _write_page(out: Path, reports: Sequence[RunReport], together: Sequence[Plot] = (), live: bool = False) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    warning = comparison_warning([report.spent for report in reports if report.spent is not None])
    page = render(Report(tuple(reports), now, version("cmsf"), live, tuple(together), warning))
    size = len(page.encode())
    if size > LARGEST:
        raise BadInput(
            f"a report of {len(reports)} runs takes {format_bytes(size)}, above {format_bytes(LARGEST)}; give fewer"
        )
    write_text(out, page)
