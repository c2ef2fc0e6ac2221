"""Accuracy and purity of each class by its images' neighbours, and the classes that are confused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.analysis.neighbor_graph import NeighborGraph
from cmsf.evaluation.knn import KNN_CLASSIFIERS, k_nearest
from cmsf.evaluation.metrics import confusion
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput

_KNN = KNN_CLASSIFIERS["20-nn"]
_NEAREST = 5
_TAKEN_FOR = 3
_PAIRS = 10


@dataclass(frozen=True)
class Mistaken:
    """A class that images of another were predicted as; share: of the evaluated images of their true class."""

    name: str
    images: int
    share: float


@dataclass(frozen=True)
class ClassRow:
    """One class of the table; accuracy and purity are None where none of its images was evaluated.

    evaluated: the number of its images that were classified: test images, or where there are none, training images.
    purity: the mean share of the class among their five nearest.
    taken_for: the most frequent wrong predictions, in descending order.
    """

    name: str
    train: int
    test: int
    evaluated: int
    accuracy: float | None
    purity: float | None
    taken_for: tuple[Mistaken, ...]


@dataclass(frozen=True)
class Pair:
    """Two classes, and the images of either that were predicted as the other; share: of the evaluated ones of both."""

    first: str
    second: str
    images: int
    share: float


@dataclass(frozen=True)
class ClassReport:
    """The classes that have images, in their order; pairs of them, the most confused first; the confusion matrix.

    left_out: whether training images were evaluated (leave-one-out), since there are no test images.
    """

    rows: tuple[ClassRow, ...]
    pairs: tuple[Pair, ...]
    left_out: bool
    counts: Int[Tensor, "c c"] = field(compare=False)


def class_report(
    names: Sequence[str],
    train: Float[Tensor, "n f"],
    train_class: Int[Tensor, " n"],
    test: Float[Tensor, "q f"] | None = None,
    test_class: Int[Tensor, " q"] | None = None,
    graph: NeighborGraph | None = None,
) -> ClassReport:
    """Evaluates the 20-nn classifier of `cmsf evaluate` by class, on unit vectors; leaves out images of class UNKNOWN.

    graph: neighbours of all training images, then all test images, which then are not searched again.
    """
    known = train_class != UNKNOWN
    train, train_class = train[known.to(train.device)], train_class[known]
    own = None
    if test is None or test_class is None or not bool((test_class != UNKNOWN).any()):
        query, truth, images, own = train, train_class, known.nonzero()[:, 0], torch.arange(len(train))
    else:
        has_class = test_class != UNKNOWN
        query, truth, images = (
            test[has_class.to(test.device)],
            test_class[has_class],
            len(known) + has_class.nonzero()[:, 0],
        )
    left_out = own is not None
    if len(train) < 1 + left_out:
        raise BadInput(f"there are {len(train)} training images with a class, too few to have neighbours")
    neighbours = None if graph is None else graph.among(images, known, _KNN.k)
    nearest = k_nearest(query, train, _KNN.k, own) if neighbours is None else neighbours.batches()
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
    guess, purity, done = [], [], 0
    for near, similarity in nearest:
        neighbour_class, query_class = label[near], truth[done : done + len(near)]
        guess.append(_KNN.scores(neighbour_class, similarity, classes).argmax(1))
        purity.append((neighbour_class[:, :_NEAREST] == query_class[:, None]).double().mean(1))
        done += len(near)
    return torch.cat(guess), torch.cat(purity)


def _row(
    number: int, names: Sequence[str], counts: Int[Tensor, "c c"], purity: Float[Tensor, " m"], train: int, test: int
) -> ClassRow:
    evaluated, correct = len(purity), int(counts[number, number])
    wrong = counts[number].clone()
    wrong[number] = 0
    order = wrong.argsort(descending=True, stable=True)[:_TAKEN_FOR].tolist()
    taken_for = tuple(Mistaken(names[c], int(wrong[c]), int(wrong[c]) / evaluated) for c in order if wrong[c])
    accuracy, pure = (correct / evaluated, float(purity.mean())) if evaluated else (None, None)
    return ClassRow(names[number], train, test, evaluated, accuracy, pure, taken_for)


def _pairs(counts: Int[Tensor, "c c"], names: Sequence[str]) -> tuple[Pair, ...]:
    either, evaluated = (counts + counts.T).triu(1), counts.sum(1)
    confused = either.nonzero()
    order = either[confused[:, 0], confused[:, 1]].argsort(descending=True, stable=True)[:_PAIRS]
    return tuple(
        Pair(names[a], names[b], int(either[a, b]), int(either[a, b]) / int(evaluated[a] + evaluated[b]))
        for a, b in confused[order].tolist()
    )
