"""Several runs in the same plots: a colour each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from cmsf.accounting import Spent
from cmsf.analysis.compute_picture import draw_runs
from cmsf.report.against_compute import points_of, published_beside
from cmsf.report.drawing import Drawing, curves, styled
from cmsf.report.plots import Lines

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
) -> Figure | None:
    """A line a run, as long as it has come; nothing where no run says anything."""
    by_epoch = {name: {line["epoch"] + 1: value(line) for line in lines} for name, lines in epochs.items()}
    reached = [epoch for known in by_epoch.values() for epoch, there in known.items() if there is not None]
    if not reached:
        return None
    everywhere = sorted(set(reached))
    lines = {name: [known.get(epoch) for epoch in everywhere] for name, known in by_epoch.items()}
    return curves(everywhere, lines, "epoch", beside, share)
