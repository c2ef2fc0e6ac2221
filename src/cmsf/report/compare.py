"""What compares runs: tables of settings, shared plots, and accuracy against compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from matplotlib.figure import Figure as Canvas

from cmsf.analysis.figures.compute import Point, draw_runs, published_points
from cmsf.report.contents import Figure, Measure, RunReport
from cmsf.report.plots import COLOURS, GREY, Drawing, Lines, curves, styled
from cmsf.runs.cost import Spent


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


ACROSS = "Comparison"


def drawings_across(epochs: Mapping[str, Lines], spent: Mapping[str, Spent | None]) -> list[Drawing]:
    """Of what runs have logged an epoch, and of what they have cost where that can be said, by the runs' names."""
    if len(epochs) < 2:
        return []
    return [*_along_training(epochs), *_against_compute(spent)]


def _along_training(epochs: Mapping[str, Lines]) -> Iterator[Drawing]:
    judged = "20-NN of each run's test images, as cmsf evaluate does."
    figure = _over(epochs, lambda line: line.get("20-nn"), "per cent")
    if figure is not None:
        yield Drawing(ACROSS, "accuracy-of-all", "Accuracy while training", judged, figure)
    pulled = (
        "How many of the neighbours that an image is pulled to have its true class; of its nearest in M where none are "
        "chosen."
    )
    figure = _over(epochs, _purity, "purity", share=True)
    if figure is not None:
        yield Drawing(ACROSS, "purity-of-all", "Purity of neighbours", pulled, figure)


def _against_compute(spent: Mapping[str, Spent | None]) -> Iterator[Drawing]:
    """A plot for each kind of accuracy, for a page is narrow."""
    beside = published_beside([one for one in spent.values() if one is not None])
    for title, points in points_of(spent).items():
        caption = (
            "What each run has reached, by the multiply-adds through its backbone, a backward pass counted as two."
        )
        with styled():
            figure = draw_runs({title: points}, beside)
        name = f"compute-{title.lower().replace(' ', '-')}"
        yield Drawing(ACROSS, name, f"Accuracy against compute: {title}", caption, figure)


def _purity(line: Mapping[str, Any]) -> Any:
    return line.get("purity_constrained", line.get("purity_unconstrained"))


def _over(
    epochs: Mapping[str, Lines],
    value: Callable[[Mapping[str, Any]], Any],
    beside: str,
    share: bool = False,
) -> Canvas | None:
    """A line a run, as long as it has come; nothing where no run says anything."""
    by_epoch = {name: {line["epoch"] + 1: value(line) for line in lines} for name, lines in epochs.items()}
    reached = [epoch for known in by_epoch.values() for epoch, there in known.items() if there is not None]
    if not reached:
        return None
    everywhere = sorted(set(reached))
    lines = {name: [known.get(epoch) for epoch in everywhere] for name, known in by_epoch.items()}
    return curves(everywhere, lines, "epoch", beside, share)


_MEASURES = {"20-nn": "20-NN", "linear top-1": "linear", "SGD top-1": "linear by SGD"}
"""What has a panel, by what a run calls it."""


def points_of(runs: Mapping[str, Spent | None]) -> dict[str, list[Point]]:
    """A point for each run that has the accuracy, in the run's colour, by what the accuracy is called."""
    panels: dict[str, list[Point]] = {}
    for measure, title in _MEASURES.items():
        for colour, (name, spent) in zip(cycle(COLOURS), runs.items(), strict=False):
            reached = None if spent is None else spent.reached.get(measure)
            if spent is not None and reached is not None and (flops := spent.flops_after(reached.epochs)):
                panels.setdefault(title, []).append(Point(name, flops, reached.per_cent, colour=colour))
    return panels


def caution(runs: Sequence[Spent]) -> str:
    """What has to be known to compare their accuracies, if anything."""
    alike = len({spent.tested_on for spent in runs}) < 2
    return "" if alike else "These runs were tested on different images: their accuracies are not of the same."


def published_beside(runs: Sequence[Spent]) -> dict[str, list[Point]]:
    """The paper's table, where all runs are on ImageNet and so can be compared with it."""
    if not all(spent.on_imagenet for spent in runs):
        return {}
    return {title: published_points(measure, colour=GREY) for measure, title in _MEASURES.items()}
