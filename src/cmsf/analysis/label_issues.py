"""Label issues: labels that an image's nearest neighbours contradict, by the best other class against the label.

docs/results/suspects.md has the other scores that were tried, and how k was chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.analysis.neighbor_graph import NeighborGraph
from cmsf.data import Dataset, Split
from cmsf.data.labels import Labels
from cmsf.evaluation.knn import KNNClassifier, k_nearest
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import track

KNN = KNNClassifier(100, temperature=0.07)
"""k is so large that a tiny share of the votes can be told from none; nearer neighbours weigh more."""
_PRIOR = 0.1
"""Weight of the class frequencies that are added to the votes, so that no share is 0."""
THRESHOLD = 0.9
"""The suggested class has nine times the label's share, or more: with a tenth of the labels wrong, about half of the
labels above it were (docs/results/suspects.md)."""
_NEAREST = 10
_CHUNK = 4096
"""Images whose neighbours are searched between two updates of the progress bar."""


@dataclass(frozen=True)
class LabelScores:
    """The neighbours' votes on the labels of images, one image per row.

    score: in [0, 1], higher where the label is more likely wrong; 0 where no other image has the label to vote for it.
    suggested: the other class with most votes.
    label_share, suggested_share: of the votes.
    near: the rows of the nearest neighbours, nearest first.
    """

    score: Float[Tensor, " n"]
    suggested: Int[Tensor, " n"]
    label_share: Float[Tensor, " n"]
    suggested_share: Float[Tensor, " n"]
    near: Int[Tensor, "n m"]


@dataclass(frozen=True)
class Suspect:
    """An image with its label, and the class that its neighbours suggest.

    index, near: of the image and of its nearest labelled ones, among the training images.
    truth: the true class by the names of labels, where it is known; no score depends on it.
    """

    path: str
    index: int
    label: str
    suggested: str
    score: float
    label_share: float
    suggested_share: float
    near: tuple[int, ...]
    truth: str | None = None


def find_label_issues(
    features: Callable[[Split], Tensor], data: Dataset, min_score: float = THRESHOLD, graph: NeighborGraph | None = None
) -> list[Suspect]:
    """Returns the labelled training images with `min_score` or above, highest first; equal scores in their order.

    graph: neighbours of all training images, which then are not searched again.
    """
    images = data.train.labelled
    split = data.train.subset(images)
    if not len(split):
        raise BadInput(f"the training images of {data.name} have no labels to check; give a list with --labels")
    if len(split.label.unique()) < 2:
        name = data.label_names[int(split.label[0])]
        raise BadInput(f"all {len(split)} labelled images of {data.name} are {name!r}; at least two classes are needed")
    nearest = None if graph is None else graph.among(images, data.train.label != UNKNOWN, KNN.k)
    scores = score_labels(features(split), split.label, graph=nearest)
    order = scores.score.argsort(descending=True, stable=True)
    order = order[scores.score[order] >= min_score]
    names = data.label_names
    truth = Labels(data.as_label(data.train.truth), names).to_names()
    near = images[scores.near]
    columns = (images, split.label, scores.suggested, scores.score, scores.label_share, scores.suggested_share, near)
    rows = zip(*(column[order].tolist() for column in columns), strict=True)
    return [
        Suspect(data.train.paths[i], i, names[label], names[guess], score, share, guess_share, tuple(close), truth[i])
        for i, label, guess, score, share, guess_share, close in rows
    ]


def score_labels(
    features: Float[Tensor, "n f"],
    label: Int[Tensor, " n"],
    knn: KNNClassifier = KNN,
    graph: NeighborGraph | None = None,
) -> LabelScores:
    """Scores every label by the votes of all other images; features are unit vectors, and all labels are known.

    With p_c a class's share of the weighted vote and π_c its share of the other images, q_c = p_c + π_c/10 is its
    support, and the score is q_b / (q_b + q_y): the label y against b, the best other class.
    graph: the neighbours that vote; by default they are searched.
    """
    classes = int(label.max()) + 1
    members = label.bincount(minlength=classes)
    parts: list[tuple[Tensor, ...]] = []
    done = 0
    for near, similarity in _nearest(features, knn.k) if graph is None else graph.batches():
        votes = knn.scores(label[near], similarity, classes)
        parts.append((*_score(votes, label[done : done + len(near), None], members), near[:, :_NEAREST]))
        done += len(near)
    return LabelScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _nearest(features: Float[Tensor, "n f"], k: int) -> Iterator[tuple[Tensor, Tensor]]:
    starts = range(0, len(features), _CHUNK)
    for start in track(starts, "votes", len(features), _CHUNK):
        rows = torch.arange(start, min(start + _CHUNK, len(features)))
        yield from k_nearest(features[start : start + _CHUNK], features, k, rows)


def _score(
    votes: Float[Tensor, "b c"], label: Int[Tensor, "b 1"], members: Int[Tensor, " c"]
) -> tuple[Float[Tensor, " b"], Int[Tensor, " b"], Float[Tensor, " b"], Float[Tensor, " b"]]:
    share = votes / votes.sum(1, keepdim=True)
    others = members.double().repeat(len(votes), 1).scatter_add_(1, label, -torch.ones_like(label, dtype=torch.float64))
    support = share + _PRIOR * others / others.sum(1, keepdim=True)
    best, suggested = support.scatter(1, label, -1.0).max(1)
    score = best / (best + support.gather(1, label)[:, 0])
    score = score.masked_fill(members[label[:, 0]] == 1, 0.0)
    return score, suggested, share.gather(1, label)[:, 0], share.gather(1, suggested[:, None])[:, 0]


@dataclass(frozen=True)
class DetectionCounts:
    """Numbers of images that are called suspects, of labels that are wrong by the truth, and of both."""

    called: int
    wrong: int
    both: int

    @property
    def precision(self) -> float:
        return self.both / max(1, self.called)

    @property
    def recall(self) -> float:
        return self.both / max(1, self.wrong)


def compare_with_truth(labelled: Sequence[Suspect], min_score: float) -> DetectionCounts | None:
    """Counts the images whose true class is known; None where no label differs from it."""
    known = [image for image in labelled if image.truth is not None]
    called = [image for image in known if image.score >= min_score]
    wrong, both = (sum(image.truth != image.label for image in images) for images in (known, called))
    return DetectionCounts(len(called), wrong, both) if wrong else None


def most_confused(suspects: Sequence[Suspect]) -> list[tuple[str, str, int]]:
    """Counts pairs of label and suggested class, the most frequent first."""
    counts = Counter((suspect.label, suspect.suggested) for suspect in suspects)
    return [(*pair, count) for pair, count in counts.most_common()]
