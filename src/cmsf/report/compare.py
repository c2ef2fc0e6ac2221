"""Compares runs: a table of what they say, shared plots, and accuracy against compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

from matplotlib.figure import Figure

from cmsf.analysis.figures.compute import Point, draw_runs, published_points
from cmsf.evaluation.metrics import Estimate
from cmsf.report.contents import RunReport, Stat
from cmsf.report.plots import COLOURS, GREY, Plot, line_plot, plot_style
from cmsf.runs.cost import RunCost

_SECTION = "Comparison"
_ACCURACIES = {"20-nn": "20-NN", "linear top-1": "linear", "SGD top-1": "linear by SGD"}
"""What is plotted against compute, by its name in `RunCost.reached`."""


Rows = dict[str, list[Stat | Estimate | None]]
"""By what a row is about, a cell for each run; None where it says nothing."""


def comparison_table(runs: Sequence[RunReport]) -> dict[str, Rows]:
    """Returns summaries, evaluations, cost, and the settings that differ, by their titles; nothing for a single run."""
    if len(runs) < 2:
        return {}
    metrics = dict.fromkeys(table.metric for run in runs for table in run.results)
    settings = _rows([{setting.field: Stat(setting.field, setting.value) for setting in run.recipe} for run in runs])
    groups = {
        "Summary": _rows([{stat.label: stat for stat in run.summary} for run in runs]),
        **{metric: _rows([_figures(run, metric) for run in runs]) for metric in metrics},
        "Compute": _rows([{name: Stat(name, value) for name, value in run.compute.items()} for run in runs]),
        "Settings that differ": {field: cells for field, cells in settings.items() if len(set(cells)) > 1},
    }
    return {title: rows for title, rows in groups.items() if rows}


def _figures(run: RunReport, metric: str) -> dict[str, Estimate]:
    tables = [table for table in run.results if table.metric == metric]
    return {name: measure for table in tables for name, measure in table.figures.items()}


def _rows(by_run: Sequence[Mapping[str, Stat | Estimate]]) -> Rows:
    labels = dict.fromkeys(label for cells in by_run for label in cells)
    return {label: [cells.get(label) for cells in by_run] for label in labels}


def comparison_plots(runs: Sequence[RunReport]) -> list[Plot]:
    """Plots what several runs have logged, and what they have cost where that is known; their names must differ."""
    return [*_over_epochs(runs), *_against_compute(runs)] if len(runs) > 1 else []


def _over_epochs(runs: Sequence[RunReport]) -> Iterator[Plot]:
    figure = _line_per_run(runs, lambda line: line.get("20-nn"), "per cent")
    if figure is not None:
        caption = "20-NN of each run's test images, as cmsf evaluate does."
        yield Plot(_SECTION, "accuracy-of-all", "Accuracy while training", caption, figure)
    figure = _line_per_run(
        runs, lambda line: line.get("purity_constrained", line.get("purity_unconstrained")), "purity", share=True
    )
    if figure is not None:
        caption = (
            "How many of the neighbours that an image is pulled to have its true class; of its nearest in M where none "
            "are chosen."
        )
        yield Plot(_SECTION, "purity-of-all", "Purity of neighbours", caption, figure)


def _line_per_run(
    runs: Sequence[RunReport], value: Callable[[Mapping[str, Any]], Any], ylabel: str, share: bool = False
) -> Figure | None:
    """Returns None where no run has a value."""
    by_epoch = {run.name: {line["epoch"] + 1: value(line) for line in run.epochs} for run in runs}
    epochs = sorted({epoch for values in by_epoch.values() for epoch, known in values.items() if known is not None})
    lines = {name: [values.get(epoch) for epoch in epochs] for name, values in by_epoch.items()}
    return line_plot(epochs, lines, "epoch", ylabel, share) if epochs else None


def _against_compute(runs: Sequence[RunReport]) -> Iterator[Plot]:
    """Yields a plot for each kind of accuracy, for a page is narrow."""
    spent = {run.name: run.spent for run in runs}
    published = published_accuracy([cost for cost in spent.values() if cost is not None])
    for title, points in accuracy_points(spent).items():
        with plot_style():
            figure = draw_runs({title: points}, published)
        name = f"compute-{title.lower().replace(' ', '-')}"
        caption = (
            "What each run has reached, by the multiply-adds through its backbone, a backward pass counted as two."
        )
        yield Plot(_SECTION, name, f"Accuracy against compute: {title}", caption, figure)


def accuracy_points(runs: Mapping[str, RunCost | None]) -> dict[str, list[Point]]:
    """Returns a point for each run that has the accuracy, in the run's colour, by what the accuracy is called."""
    panels: dict[str, list[Point]] = {}
    for accuracy, title in _ACCURACIES.items():
        for colour, (name, spent) in zip(cycle(COLOURS), runs.items(), strict=False):
            reached = None if spent is None else spent.reached.get(accuracy)
            if spent is not None and reached is not None and (flops := spent.flops_after(reached.epochs)):
                panels.setdefault(title, []).append(Point(name, flops, reached.per_cent, colour=colour))
    return panels


def published_accuracy(runs: Sequence[RunCost]) -> dict[str, list[Point]]:
    """Returns the paper's table, where all runs are on ImageNet and so can be compared with it."""
    if not all(spent.on_imagenet for spent in runs):
        return {}
    return {title: published_points(accuracy, colour=GREY) for accuracy, title in _ACCURACIES.items()}


def comparison_warning(runs: Sequence[RunCost]) -> str:
    """Returns a warning where accuracies cannot be compared, else nothing."""
    same = len({spent.tested_on for spent in runs}) < 2
    return "" if same else "These runs were tested on different images: their accuracies are not of the same."
