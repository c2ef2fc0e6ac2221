"""A table of classes: how well each is told from the others by its images' neighbours, and what it is taken for."""

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
    """A class that images of another were taken for, and how many."""

    name: str
    images: int
    share: float
    """Of the judged images of the class that they are of."""


@dataclass(frozen=True)
class ClassRow:
    """What is known of one class; shares are None where none of its images was judged."""

    name: str
    train: int
    test: int
    judged: int
    """How many of its images were classified: those of the test split, or where there is none, of training."""
    accuracy: float | None
    """The share of them that the vote of the 20 nearest got right."""
    purity: float | None
    """The share of the class among their five nearest, a mean over them."""
    taken_for: tuple[Mistaken, ...]
    """The classes that most of the others were taken for, the most frequent first."""


@dataclass(frozen=True)
class Pair:
    """Two classes, and how many images of either were taken for the other."""

    first: str
    second: str
    images: int
    share: float
    """Of the judged images of both."""


@dataclass(frozen=True)
class ClassReport:
    rows: tuple[ClassRow, ...]
    """In the order of the classes, without those that have no image at all."""
    pairs: tuple[Pair, ...]
    """The most confused ones first, by images."""
    left_out: bool
    """Whether training images were judged, each by all others, since there are no test images."""
    counts: Int[Tensor, "c c"] = field(compare=False)
    """Of the judged images of every class, a row each, how many were taken for each class, a column each."""


def class_report(
    names: Sequence[str],
    train: Float[Tensor, "n f"],
    train_class: Int[Tensor, " n"],
    test: Float[Tensor, "q f"] | None = None,
    test_class: Int[Tensor, " q"] | None = None,
    graph: NeighborGraph | None = None,
) -> ClassReport:
    """The table of some classes, by unit vectors of their images; an image of the class UNKNOWN is passed over.

    The vote is that of `cmsf evaluate`: each of the 20 nearest training images counts alike.

    graph: of all training images, then all test images; what it has is not searched for again.
    """
    known = train_class != UNKNOWN
    train, train_class = train[known.to(train.device)], train_class[known]
    in_test = torch.zeros(len(names), dtype=torch.int64)
    query, truth, images, own = train, train_class, known.nonzero()[:, 0], torch.arange(len(train))
    left_out = test is None or test_class is None or not bool((test_class != UNKNOWN).any())
    if not left_out:
        assert test is not None
        assert test_class is not None
        judged = test_class != UNKNOWN
        query, truth, images = test[judged.to(test.device)], test_class[judged], len(known) + judged.nonzero()[:, 0]
        in_test = truth.bincount(minlength=len(names))
    if len(train) < 1 + left_out:
        raise BadInput(f"there are {len(train)} training images with a class, too few to have neighbours")
    found = None if graph is None else graph.among(images, known, VOTES[VOTE].k)
    nearest = k_nearest(query, train, VOTES[VOTE].k, own if left_out else None) if found is None else found.batches()
    guess, purity = _by_neighbours(nearest, truth, train_class, len(names))
    counts = confusion(guess, truth, len(names))
    in_train = train_class.bincount(minlength=len(names))
    rows = [
        _row(number, names, counts, purity[truth == number], int(in_train[number]), int(in_test[number]))
        for number in ((in_train + in_test) > 0).nonzero()[:, 0].tolist()
    ]
    return ClassReport(tuple(rows), _pairs(counts, names), left_out, counts)


def _by_neighbours(
    nearest: Iterable[tuple[Tensor, Tensor]], truth: Int[Tensor, " q"], label: Int[Tensor, " n"], classes: int
) -> tuple[Int[Tensor, " q"], Float[Tensor, " q"]]:
    """The class that the neighbours of each vote for, and the share of its own class among the nearest."""
    ballot, guess, purity, done = VOTES[VOTE], [], [], 0
    for near, similarity in nearest:
        theirs, mine = label[near], truth[done : done + len(near)]
        guess.append(ballot.count(theirs, similarity, classes).argmax(1))
        purity.append((theirs[:, :_NEAREST] == mine[:, None]).double().mean(1))
        done += len(near)
    return torch.cat(guess), torch.cat(purity)


def _row(
    number: int, names: Sequence[str], counts: Int[Tensor, "c c"], purity: Float[Tensor, " m"], train: int, test: int
) -> ClassRow:
    """counts: a row a true class, a column a guessed one."""
    judged, right = len(purity), int(counts[number, number])
    wrong = counts[number].clone()
    wrong[number] = 0
    order = wrong.argsort(descending=True, stable=True)[:_TAKEN_FOR].tolist()
    taken_for = tuple(Mistaken(names[one], int(wrong[one]), int(wrong[one]) / judged) for one in order if wrong[one])
    accuracy, pure = (right / judged, float(purity.mean())) if judged else (None, None)
    return ClassRow(names[number], train, test, judged, accuracy, pure, taken_for)


def _pairs(counts: Int[Tensor, "c c"], names: Sequence[str]) -> tuple[Pair, ...]:
    """Of classes that were confused at all, which are few of all the pairs."""
    either, judged = (counts + counts.T).triu(1), counts.sum(1)
    confused = either.nonzero()
    order = either[confused[:, 0], confused[:, 1]].argsort(descending=True, stable=True)[:_PAIRS]
    return tuple(
        Pair(names[a], names[b], int(either[a, b]), int(either[a, b]) / int(judged[a] + judged[b]))
        for a, b in confused[order].tolist()
    )
