"""Accuracy against compute, of runs: the paper's Figure 1 with points of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

from cmsf.accounting import Spent
from cmsf.analysis.compute_picture import Point, published_points
from cmsf.report.drawing import COLOURS, GREY

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
