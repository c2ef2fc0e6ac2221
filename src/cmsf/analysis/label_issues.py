"""Labels that are likely wrong: those that an image's nearest neighbours do not vote for.

They are scored by the odds of the best other class against the label; docs/results/suspects.md has the other scores
that were tried, and how k was chosen.
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
from cmsf.evaluation.knn import Vote, k_nearest
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import track

VOTE = Vote(100, temperature=0.07)
"""So many that a label's share of nearly nothing can be told from none; the nearer, the more a vote counts."""
_PRIOR = 0.1
"""A tenth of a vote goes to the classes by how frequent they are, so that no share is nothing."""
THRESHOLD = 0.9
"""The suggested class has nine times the label's share, or more: with a tenth of the labels wrong, about half of the
images above it were (docs/results/suspects.md)."""
_NEAREST = 10
_AT_ONCE = 4096
"""Images whose neighbours are searched for between two moves of the bar."""


@dataclass(frozen=True)
class LabelScores:
    """What the neighbours of labelled images say of their labels, an image a row.

    score: in [0, 1], the higher the likelier is the label wrong; 0 where no other image has it, so that none can vote
        for it.
    suggested: of all other classes the one with most votes.
    label_share, suggested_share: of the vote.
    near: the rows of its nearest neighbours, the nearest first.
    """

    score: Float[Tensor, " n"]
    suggested: Int[Tensor, " n"]
    label_share: Float[Tensor, " n"]
    suggested_share: Float[Tensor, " n"]
    near: Int[Tensor, "n m"]


@dataclass(frozen=True)
class Suspect:
    """An image and its label, and what its neighbours would have it be."""

    path: str
    index: int
    """Among the training images."""
    label: str
    suggested: str
    score: float
    label_share: float
    suggested_share: float
    near: tuple[int, ...]
    """Its nearest neighbours among the labelled training images, by their indices."""
    truth: str | None = None
    """By the names of labels, where it is known otherwise; no score depends on it."""


def find_label_issues(
    features: Callable[[Split], Tensor], data: Dataset, least: float = THRESHOLD, graph: NeighborGraph | None = None
) -> list[Suspect]:
    """The labelled training images whose score is `least` or above, the likeliest to be wrong first.

    Equal scores are in the order of the images. With least=0, they are all there.

    graph: of all training images; what it has is not searched for again.
    """
    images = data.train.labelled
    split = data.train.subset(images)
    if len(split.label.unique()) < 2:
        raise BadInput(_too_few(data, split))
    nearest = None if graph is None else graph.among(images, data.train.label != UNKNOWN, VOTE.k)
    found = score_labels(features(split), split.label, graph=nearest)
    order = found.score.argsort(descending=True, stable=True)
    order = order[found.score[order] >= least]
    truth = Labels(data.as_label(split.truth), data.label_names).to_names()
    names = data.label_names
    label, suggested, near = split.label.tolist(), found.suggested.tolist(), images[found.near].tolist()
    score, mine, theirs = found.score.tolist(), found.label_share.tolist(), found.suggested_share.tolist()
    return [
        Suspect(
            path=split.paths[row],
            index=int(images[row]),
            label=names[label[row]],
            suggested=names[suggested[row]],
            score=score[row],
            label_share=mine[row],
            suggested_share=theirs[row],
            near=tuple(near[row]),
            truth=truth[row],
        )
        for row in order.tolist()
    ]


def score_labels(
    features: Float[Tensor, "n f"], label: Int[Tensor, " n"], ballot: Vote = VOTE, graph: NeighborGraph | None = None
) -> LabelScores:
    """By unit vectors, and labels all known. Every image is judged by all the others; one that equals it is another.

    With p_c a class's share of the weighted vote and π_c its share of the other images, q_c = p_c + π_c/10 is what
    speaks for it, and the score is q_b / (q_b + q_y): the label y against b, the best other class.

    graph: the nearest of these images, as many as vote; by default they are searched for.
    """
    classes = int(label.max()) + 1
    members = label.bincount(minlength=classes)
    parts: list[tuple[Tensor, ...]] = []
    done = 0
    for near, similarity in _nearest(features, ballot.k) if graph is None else graph.batches():
        mine = label[done : done + len(near), None]
        votes = ballot.count(label[near], similarity, classes)
        parts.append((*_judge(votes, mine, members), near[:, :_NEAREST]))
        done += len(near)
    return LabelScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _nearest(features: Float[Tensor, "n f"], k: int) -> Iterator[tuple[Tensor, Tensor]]:
    starts = range(0, len(features), _AT_ONCE)
    for start in track(starts, "votes", len(starts)):
        rows = torch.arange(start, min(start + _AT_ONCE, len(features)))
        yield from k_nearest(features[start : start + _AT_ONCE], features, k, rows)


def _judge(
    votes: Float[Tensor, "b c"], mine: Int[Tensor, "b 1"], members: Int[Tensor, " c"]
) -> tuple[Float[Tensor, " b"], Int[Tensor, " b"], Float[Tensor, " b"], Float[Tensor, " b"]]:
    share = votes / votes.sum(1, keepdim=True)
    others = members.double().repeat(len(votes), 1).scatter_add_(1, mine, -torch.ones_like(mine, dtype=torch.float64))
    support = share + _PRIOR * others / others.sum(1, keepdim=True)
    best, suggested = support.scatter(1, mine, -1.0).max(1)
    score = best / (best + support.gather(1, mine)[:, 0])
    score = score.masked_fill(members[mine[:, 0]] == 1, 0.0)
    return score, suggested, share.gather(1, mine)[:, 0], share.gather(1, suggested[:, None])[:, 0]


def _too_few(data: Dataset, split: Split) -> str:
    if not len(split):
        return f"the training images of {data.name} have no labels to check; give a list with --labels"
    name = data.label_names[int(split.label[0])]
    return f"all {len(split)} labelled images of {data.name} are {name!r}; there must be two classes to tell apart"


@dataclass(frozen=True)
class DetectionCounts:
    """How many images are called suspects, how many labels are wrong by the truth, and how many are both."""

    called: int
    wrong: int
    both: int

    @property
    def precision(self) -> float:
        return self.both / max(1, self.called)

    @property
    def recall(self) -> float:
        return self.both / max(1, self.wrong)


def compare_with_truth(every: Sequence[Suspect], least: float) -> DetectionCounts | None:
    """Of all images whose truth is known; None where no label differs from it, as where it is the labels' own."""
    known = [one for one in every if one.truth is not None]
    called = [one for one in known if one.score >= least]
    wrong, both = (sum(one.truth != one.label for one in some) for some in (known, called))
    return DetectionCounts(len(called), wrong, both) if wrong else None


def most_confused(suspects: Sequence[Suspect]) -> list[tuple[str, str, int]]:
    """Labels and what is suggested instead, with how often, the most frequent first."""
    counts = Counter((one.label, one.suggested) for one in suspects)
    return [(*pair, count) for pair, count in counts.most_common()]
