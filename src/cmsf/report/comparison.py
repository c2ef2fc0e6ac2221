"""Several runs beside one another: what sums them up and what they reach, a column each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cmsf.report.contents import Figure, Measure, RunReport


@dataclass(frozen=True)
class Line:
    """What a line is about, and what each run says of it; None where it says nothing."""

    label: str
    cells: tuple[Figure | Measure | None, ...]


@dataclass(frozen=True)
class Group:
    title: str
    lines: tuple[Line, ...]


def compared(runs: Sequence[RunReport]) -> list[Group]:
    """A group for the summaries and one for each evaluation; nothing where there is one run alone."""
    if len(runs) < 2:
        return []
    summary = Group("Summary", _lines([{figure.label: figure for figure in run.summary} for run in runs]))
    metrics = dict.fromkeys(table.metric for run in runs for table in run.results)
    results = [Group(metric, _lines([_measures(run, metric) for run in runs])) for metric in metrics]
    return [group for group in (summary, *results) if group.lines]


def _measures(run: RunReport, metric: str) -> dict[str, Measure]:
    return {figure.name: figure for table in run.results if table.metric == metric for figure in table.figures}


def _lines(by_run: Sequence[dict[str, Figure]] | Sequence[dict[str, Measure]]) -> tuple[Line, ...]:
    labels = dict.fromkeys(label for known in by_run for label in known)
    return tuple(Line(label, tuple(known.get(label) for known in by_run)) for label in labels)
