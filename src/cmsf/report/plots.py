"""What a run has logged, epoch by epoch, as plots: is it learning, and what does it call related."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from cmsf.report.contents import Pool
from cmsf.report.drawing import BIN, Drawing, bars, curves, scattered

Lines = Sequence[Mapping[str, Any]]
CURVES, RELATED, HEALTH, MAP = "Curves", "What it calls related", "Health", "Map"
_STAGES = 4


def drawings(epochs: Lines) -> list[Drawing]:
    """Of the lines that a run has written, one an epoch; what was never logged is not drawn."""
    if not epochs:
        return []
    return [*_learning(epochs), *_related(epochs), *_guesses(epochs), *_health(epochs)]


def binned(counts: Sequence[int], total: int) -> list[float]:
    """Shares of a total, by bins of BIN ranks."""
    return [sum(counts[start : start + BIN]) / total for start in range(0, len(counts), BIN)]


def maps(pool: Pool) -> Iterator[Drawing]:
    """The map, for a paper: on the page it is another, which can be moved and asked."""
    known = [truth if truth >= 0 else label for truth, label in zip(pool.truth, pool.label, strict=True)]
    for projection in pool.projections:
        name = f"map-{projection.name.lower()}"
        figure = scattered(projection.x, projection.y, known, pool.classes)
        yield Drawing(MAP, name, f"Map of the images, by {projection.name}", "", figure)


def _learning(epochs: Lines) -> Iterator[Drawing]:
    parts = {name.removeprefix("loss_"): name for name in epochs[-1] if name.startswith("loss_")}
    lines = _lines(epochs, {"loss": "loss"} | (parts if len(parts) > 1 else {}))
    if lines:
        yield Drawing(CURVES, "loss", "Loss", "Mean over the steps of an epoch.", _over(epochs, lines, "loss"))
    judged = {"1-NN": "1-nn", "20-NN": "20-nn", "20-NN, weighted": "20-nn weighted", "its own classifier": "classifier"}
    lines = _lines(epochs, judged)
    if lines:
        caption = "Test images classified by the features of the training images, as cmsf evaluate does."
        yield Drawing(CURVES, "accuracy", "Accuracy while training", caption, _over(epochs, lines, "per cent"))


def _related(epochs: Lines) -> Iterator[Drawing]:
    purities = {
        "the nearest in M": "purity_unconstrained",
        "the nearest in C": "purity_constrained",
        "as far out in M": "purity_as_far",
    }
    lines = _lines(epochs, purities)
    if lines:
        caption = (
            "How many of them have the query's true class. As far out: of as many of M's nearest as the median rank of "
            "the last neighbour in C."
        )
        figure = _over(epochs, lines, "purity", share=True)
        yield Drawing(RELATED, "purity", "Purity of neighbours", caption, figure)
    lines = _lines(epochs, {"median": "rank_median", "mean": "rank_mean"})
    if lines:
        caption = "Rank in M of the last neighbour in C, counted from 1, the query itself."
        yield Drawing(RELATED, "rank", "How far out the constraint reaches", caption, _over(epochs, lines, "rank in M"))
    stages = {}
    for line in _stages(epochs):
        near = sum(line["rank_histogram"])
        stages[f"epoch {line['epoch'] + 1}: {near:,} queries"] = binned(line["rank_histogram"], near)
    if stages:
        caption = (
            "Of the queries whose last neighbour in C is among M's first hundred, as many as the legend says, the "
            "share in each bin of five ranks. Epochs in which C was M are left out."
        )
        figure = bars(stages, "rank in M", "share of the queries")
        yield Drawing(RELATED, "rank-histogram", "Ranks by stage of training", caption, figure)


def _guesses(epochs: Lines) -> Iterator[Drawing]:
    named = {
        "right, of all": "pseudo_accuracy",
        "right, of the confident": "pseudo_accuracy_confident",
        "confident": "pseudo_share",
    }
    lines = _lines(epochs, named)
    if lines:
        caption = "Of the images without a label: how many the classifier is confident of, and how often it is right."
        figure = _over(epochs, lines, "share", share=True)
        yield Drawing(RELATED, "pseudo-labels", "Pseudo-labels", caption, figure)


def _health(epochs: Lines) -> Iterator[Drawing]:
    lines = _lines(epochs, {"spread": "spread"})
    if lines:
        caption = "1 for embeddings all over the sphere, 0 where all are the same: a collapse."
        yield Drawing(HEALTH, "spread", "Spread of the embeddings", caption, _over(epochs, lines, "spread"))
    lines = _lines(epochs, {"effective rank": "effective_rank"})
    if lines:
        caption = "In how many directions the embeddings of a batch differ."
        yield Drawing(HEALTH, "effective-rank", "Effective rank", caption, _over(epochs, lines, "directions"))
    lines = _lines(epochs, {"images a second": "images_per_second"})
    if lines:
        caption = "Images that were learned from a second, with all that an epoch does besides."
        yield Drawing(HEALTH, "pace", "Pace", caption, _over(epochs, lines, "images / s"))


def _lines(epochs: Lines, names: Mapping[str, str]) -> dict[str, list[float | None]]:
    """The columns that there is anything of, by what they are called."""
    columns = {shown: [line.get(name) for line in epochs] for shown, name in names.items()}
    return {shown: values for shown, values in columns.items() if any(value is not None for value in values)}


def _over(epochs: Lines, lines: Mapping[str, Sequence[float | None]], beside: str, share: bool = False) -> Figure:
    return curves([line["epoch"] + 1 for line in epochs], lines, "epoch", beside, share)


def _stages(epochs: Lines) -> list[Mapping[str, Any]]:
    """The first epoch in which a constraint had a say, the last, and some in between.

    Where it has none yet, C is M, and the last neighbour has the same rank for all.
    """
    counted = [line for line in epochs if sum(map(bool, line.get("rank_histogram") or ())) > 1]
    if len(counted) <= _STAGES:
        return counted
    return [counted[round(place * (len(counted) - 1) / (_STAGES - 1))] for place in range(_STAGES)]
