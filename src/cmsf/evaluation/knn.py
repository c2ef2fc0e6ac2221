"""k-nearest-neighbour classification: exact, chunked, with both votes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding

from cmsf.data import Dataset, Split
from cmsf.evaluation.features import LAYER, FeatureExtractor, raw_pixels, transform_name
from cmsf.evaluation.metrics import Accuracy, Result
from cmsf.evaluation.splits import evaluation_splits
from cmsf.method.search import OwnRow, nearest_vectors
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.progress import track

_CHUNK = 256
"""Queries whose neighbours' vectors are copied at once: so few that their memory is used again and again."""


@dataclass(frozen=True)
class Vote:
    """How the k nearest vote: each alike, or weighted with exp(similarity / temperature)."""

    k: int
    temperature: float | None = None

    def count(
        self, theirs: Int[Tensor, "q n"], similarity: Float[Tensor, "q n"], classes: int
    ) -> Float[Tensor, "q {classes}"]:
        """The votes that each class gets from the k first of some neighbours, by their classes and similarities."""
        weight = torch.exp(similarity / self.temperature) if self.temperature else torch.ones_like(similarity)
        votes = torch.zeros(len(theirs), classes, dtype=torch.float64)
        return votes.scatter_add_(1, theirs[:, : self.k], weight[:, : self.k])


VOTES = {"1-nn": Vote(1), "20-nn": Vote(20), "20-nn weighted": Vote(20, temperature=0.07)}
"""The paper's two majority votes, and the weighted one that others report."""


def evaluate_knn(features: FeatureExtractor, data: Dataset) -> Result:
    """Classify the test images by their neighbours among the training images."""
    train, test = evaluation_splits(data)
    return _judge((features(train), features(test)), train, test, LAYER, features.size, data.test_origin)


def evaluate_pixels(data: Dataset, size: int, workers: int = 0) -> Result:
    """The same by raw pixels, at most 64 a side: larger ones would be slower and no better to compare."""
    train, test = evaluation_splits(data)
    size = min(size, 64)
    features = (raw_pixels(train, size, workers), raw_pixels(test, size, workers))
    return _judge(features, train, test, "pixels, L2-normalised", size, data.test_origin)


def classify(
    query: Float[Tensor, "q f"], train: Float[Tensor, "n f"], label: Int[Tensor, " n"], ballots: Mapping[str, Vote]
) -> dict[str, Int[Tensor, " q"]]:
    """The class that most of the k nearest belong to, by each ballot; on the CPU like the labels.

    Equally near: the lower row. Equal votes: the lower class.
    """
    largest = max(ballot.k for ballot in ballots.values())
    classes = int(label.max()) + 1
    chosen: dict[str, list[Tensor]] = {name: [] for name in ballots}
    for near, similarity in k_nearest(query, train, largest):
        theirs = label[near]
        for name, ballot in ballots.items():
            chosen[name].append(ballot.count(theirs, similarity, classes).argmax(1))
    return {name: torch.cat(parts) for name, parts in chosen.items()}


def k_nearest(
    query: Float[Tensor, "q f"], train: Float[Tensor, "n f"], k: int, own: Int[Tensor, " q"] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The k nearest rows of some queries at a time, and how similar they are; equally near: the lower row.

    own: each query's own row, where it has one, which it may not choose; another row that equals it, it may.
    On the CPU: the few that are left are counted in double precision, which not every device has.
    """
    everywhere = torch.ones(len(train), dtype=torch.bool, device=train.device)
    number = torch.arange(len(train), device=train.device)
    left_out = torch.full((len(query),), UNKNOWN, device=train.device) if own is None else own.to(train.device)
    there = len(train) - (own is not None)

    def watched(blocks: range) -> Iterator[int]:
        return track(blocks, "neighbours", len(blocks))

    nearest = nearest_vectors(
        query, train, everywhere, number, min(k, there), OwnRow(left_out, included=False), watched
    )
    for part, near in zip(query.split(_CHUNK), nearest.split(_CHUNK), strict=True):
        # As train[near], which would take twice as long: a row is copied whole.
        vector = embedding(near, train)
        yield near.cpu(), (vector @ part[:, :, None])[:, :, 0].cpu().double()


def _judge(features: tuple[Tensor, Tensor], train: Split, test: Split, layer: str, size: int, origin: str) -> Result:
    known, query = features
    guesses = classify(query, known, train.truth, VOTES)
    judged = {name: Accuracy(guess == test.truth, test.truth) for name, guess in guesses.items()}
    described = {
        "votes": {
            name: {
                "k": min(ballot.k, len(train)),
                "vote": "exp(cosine / temperature)" if ballot.temperature else "majority",
                "temperature": ballot.temperature,
            }
            for name, ballot in VOTES.items()
        },
        "layer": layer,
        "transform": transform_name(size),
        "train images": len(train),
        "test images": len(test),
        "classes": len(train.truth.unique()),
        "test split": origin,
    }
    return Result(judged, described)
