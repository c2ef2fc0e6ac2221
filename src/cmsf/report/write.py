"""report.html: of one run or several, and, while a run is trained, of what is known so far."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from cmsf.report.collect import Gathered, Machine, gather, gather_history
from cmsf.report.compare import caution, drawings_across
from cmsf.report.contents import Report
from cmsf.report.page import render
from cmsf.report.plots import Drawing
from cmsf.runs.folder import RunFolder
from cmsf.runs.run import Run
from cmsf.utils.errors import BadInput
from cmsf.utils.files import make_folder, report_write_errors, write_text
from cmsf.utils.text import format_bytes

LARGEST = 10_000_000
_PAUSE = 10.0
"""Seconds between two pages of a run that is being trained: to draw one takes a second or two."""
_IMAGES = 2_400
"""On a page, of all its runs together; some 2 kB each."""


def write_report(runs: Sequence[Run], out: Path, machine: Machine) -> Path:
    """A page of one file, and each plot as PNG and SVG in the folder beside it that is returned."""
    most = _IMAGES // len(runs)
    gathered = _told_apart([gather(run, machine, most, number) for number, run in enumerate(runs)])
    across = drawings_across(
        {one.report.name: one.epochs for one in gathered},
        {one.report.name: one.spent for one in gathered},
    )
    plots = out.with_name(f"{out.stem}-plots")
    with report_write_errors(out, "choose another --out"):
        make_folder(plots)
        for number, one in enumerate(gathered, start=1):
            for drawing in one.drawings:
                drawing.save(plots if len(runs) == 1 else plots / f"run-{number}")
        for drawing in across:
            drawing.save(plots)
        _write(out, gathered, across)
    for one in gathered:
        for note in one.report.notes:
            machine.say(f"{one.report.name}: {note}")
    return plots


class LiveReport:
    """report.html of a run that is being trained, as often as it is called but for short epochs; an open page looks for
    a newer one."""

    def __init__(self, folder: RunFolder, say: Callable[[str], None]) -> None:
        self.folder, self.say, self.written, self.told = folder, say, -math.inf, False

    def __call__(self) -> None:
        if time.monotonic() - self.written < _PAUSE:
            return
        try:
            _write(self.folder.report_file, [gather_history(Run(self.folder.path))], live=True)
        except (BadInput, OSError) as error:  # a page never stops a run
            if not self.told:
                self.say(f"there is no report for now: {error}")
            self.told = True
        self.written = time.monotonic()


def _told_apart(gathered: Sequence[Gathered]) -> list[Gathered]:
    """Several runs have their numbers, which are those of their folders of plots; of those that share a recipe, the
    names of their folders help as well."""
    if len(gathered) == 1:
        return list(gathered)
    alike = Counter(one.report.name for one in gathered)
    named = []
    for number, one in enumerate(gathered, start=1):
        folder = f" · {Path(one.report.path).resolve().name}" if alike[one.report.name] > 1 else ""
        named.append(replace(one, report=replace(one.report, name=f"{number} {one.report.name}{folder}")))
    return named


def _write(out: Path, gathered: Sequence[Gathered], across: Sequence[Drawing] = (), live: bool = False) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    together = tuple(drawing.on_page(len(gathered)) for drawing in across)
    note = caution([one.spent for one in gathered if one.spent is not None])
    page = render(Report(tuple(one.report for one in gathered), now, version("cmsf"), live, together, note))
    size = len(page.encode())
    if size > LARGEST:
        raise BadInput(
            f"a report of {len(gathered)} runs takes {format_bytes(size)}, above {format_bytes(LARGEST)}; give fewer"
        )
    write_text(out, page)
