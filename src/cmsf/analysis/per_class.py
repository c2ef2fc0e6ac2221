"""Accuracy and purity of each class by its images' neighbours, and the classes that are confused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.analysis.neighbor_graph import NeighborGraph
from cmsf.evaluation.calibration import confusion
from cmsf.evaluation.knn import VOTES, k_nearest
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput

VOTE = "20-nn"
_NEAREST = 5
_TAKEN_FOR = 3
_PAIRS = 10


@dataclass(frozen=True)
class Mistaken:
    """A class that images of another class were predicted as, and how many."""

    name: str
    images: int
    share: float
    """Of the judged images of their true class."""


@dataclass(frozen=True)
class ClassRow:
    """One class of the table; shares are None where none of its images was judged."""

    name: str
    train: int
    test: int
    judged: int
    """Number of its images that were classified: test images, or where there are none, training images."""
    accuracy: float | None
    """Share of them that the vote of the 20 nearest classified correctly."""
    purity: float | None
    """Mean share of the class among their five nearest."""
    taken_for: tuple[Mistaken, ...]
    """The most frequent wrong predictions, first the most frequent."""


@dataclass(frozen=True)
class Pair:
    """Two classes, and the number of images of either that were predicted as the other."""

    first: str
    second: str
    images: int
    share: float
    """Of the judged images of both."""


@dataclass(frozen=True)
class ClassReport:
    rows: tuple[ClassRow, ...]
    """In the order of the classes, without those that have no image."""
    pairs: tuple[Pair, ...]
    """Those with most confused images first."""
    left_out: bool
    """Whether training images were judged (leave-one-out), since there are no test images."""
    counts: Int[Tensor, "c c"] = field(compare=False)
    """Confusion matrix of the judged images: a row per true class, a column per predicted class."""


def class_report(
    names: Sequence[str],
    train: Float[Tensor, "n f"],
    train_class: Int[Tensor, " n"],
    test: Float[Tensor, "q f"] | None = None,
    test_class: Int[Tensor, " q"] | None = None,
    graph: NeighborGraph | None = None,
) -> ClassReport:
    """Makes the table from unit vectors of images; images of class UNKNOWN are left out.

    The vote is that of `cmsf evaluate`: the majority of the 20 nearest training images.

    graph: neighbours of all training images, then all test images, which then are not searched again.
    """
    known = train_class != UNKNOWN
    train, train_class = train[known.to(train.device)], train_class[known]
    own = None
    if test is None or test_class is None or not bool((test_class != UNKNOWN).any()):
        query, truth, images, own = train, train_class, known.nonzero()[:, 0], torch.arange(len(train))
    else:
        judged = test_class != UNKNOWN
        query, truth, images = test[judged.to(test.device)], test_class[judged], len(known) + judged.nonzero()[:, 0]
    left_out = own is not None
    if len(train) < 1 + left_out:
        raise BadInput(f"there are {len(train)} training images with a class, too few to have neighbours")
    neighbours = None if graph is None else graph.among(images, known, VOTES[VOTE].k)
    nearest = k_nearest(query, train, VOTES[VOTE].k, own) if neighbours is None else neighbours.batches()
    guess, purity = _by_neighbours(nearest, truth, train_class, len(names))
    counts = confusion(guess, truth, len(names))
    in_train = train_class.bincount(minlength=len(names))
    in_test = torch.zeros_like(in_train) if left_out else truth.bincount(minlength=len(names))
    rows = [
        _row(number, names, counts, purity[truth == number], int(in_train[number]), int(in_test[number]))
        for number in ((in_train + in_test) > 0).nonzero()[:, 0].tolist()
    ]
    return ClassReport(tuple(rows), _pairs(counts, names), left_out, counts)


def _by_neighbours(
    nearest: Iterable[tuple[Tensor, Tensor]], truth: Int[Tensor, " q"], label: Int[Tensor, " n"], classes: int
) -> tuple[Int[Tensor, " q"], Float[Tensor, " q"]]:
    """Returns the class that each image's neighbours vote for, and the share of its own class among the nearest."""
    vote, guess, purity, done = VOTES[VOTE], [], [], 0
    for near, similarity in nearest:
        theirs, mine = label[near], truth[done : done + len(near)]
        guess.append(vote.count(theirs, similarity, classes).argmax(1))
        purity.append((theirs[:, :_NEAREST] == mine[:, None]).double().mean(1))
        done += len(near)
    return torch.cat(guess), torch.cat(purity)


def _row(
    number: int, names: Sequence[str], counts: Int[Tensor, "c c"], purity: Float[Tensor, " m"], train: int, test: int
) -> ClassRow:
    judged, correct = len(purity), int(counts[number, number])
    wrong = counts[number].clone()
    wrong[number] = 0
    order = wrong.argsort(descending=True, stable=True)[:_TAKEN_FOR].tolist()
    taken_for = tuple(Mistaken(names[c], int(wrong[c]), int(wrong[c]) / judged) for c in order if wrong[c])
    accuracy, pure = (correct / judged, float(purity.mean())) if judged else (None, None)
    return ClassRow(names[number], train, test, judged, accuracy, pure, taken_for)


def _pairs(counts: Int[Tensor, "c c"], names: Sequence[str]) -> tuple[Pair, ...]:
    """Returns the most confused pairs of classes."""
    either, judged = (counts + counts.T).triu(1), counts.sum(1)
    confused = either.nonzero()
    order = either[confused[:, 0], confused[:, 1]].argsort(descending=True, stable=True)[:_PAIRS]
    return tuple(
        Pair(names[a], names[b], int(either[a, b]), int(either[a, b]) / int(judged[a] + judged[b]))
        for a, b in confused[order].tolist()
    )
