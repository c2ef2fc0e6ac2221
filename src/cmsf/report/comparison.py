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
    """Groups: the summaries, each evaluation, what the runs have cost, and which settings they do not share; nothing
    where there is one run alone."""
    if len(runs) < 2:
        return []
    summary = Group("Summary", _lines([{figure.label: figure for figure in run.summary} for run in runs]))
    metrics = dict.fromkeys(table.metric for run in runs for table in run.results)
    results = [Group(metric, _lines([_measures(run, metric) for run in runs])) for metric in metrics]
    compute = Group("Compute", _lines([{name: Figure(name, value) for name, value in run.compute} for run in runs]))
    return [group for group in (summary, *results, compute, _settings_apart(runs)) if group.lines]


def _settings_apart(runs: Sequence[RunReport]) -> Group:
    every = _lines([{one.field: Figure(one.field, one.value) for one in run.recipe} for run in runs])
    return Group("Settings that differ", tuple(line for line in every if len(set(line.cells)) > 1))


def _measures(run: RunReport, metric: str) -> dict[str, Measure]:
    return {figure.name: figure for table in run.results if table.metric == metric for figure in table.figures}


def _lines(by_run: Sequence[dict[str, Figure]] | Sequence[dict[str, Measure]]) -> tuple[Line, ...]:
    labels = dict.fromkeys(label for known in by_run for label in known)
    return tuple(Line(label, tuple(known.get(label) for known in by_run)) for label in labels)
