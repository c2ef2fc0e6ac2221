"""k-nearest-neighbour classification: exact, in chunks, by a majority vote and a weighted one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding

from cmsf.data import Dataset, Split
from cmsf.evaluation.features import LAYER, FeatureExtractor, raw_pixels, transform_name
from cmsf.evaluation.metrics import Accuracy, Result
from cmsf.evaluation.splits import describe_splits, evaluation_splits
from cmsf.method.search import OwnRow, nearest_vectors
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.progress import track

_CHUNK = 256
"""Queries whose neighbours' vectors are copied at once: so few that their memory is reused."""


@dataclass(frozen=True)
class Vote:
    """A vote of the k nearest: with equal weights, or with exp(similarity / temperature)."""

    k: int
    temperature: float | None = None

    def count(
        self, theirs: Int[Tensor, "q n"], similarity: Float[Tensor, "q n"], classes: int
    ) -> Float[Tensor, "q {classes}"]:
        """Counts the votes for each class of the first k neighbours, given their classes and similarities."""
        weight = torch.exp(similarity / self.temperature) if self.temperature else torch.ones_like(similarity)
        votes = torch.zeros(len(theirs), classes, dtype=torch.float64)
        return votes.scatter_add_(1, theirs[:, : self.k], weight[:, : self.k])


VOTES = {"1-nn": Vote(1), "20-nn": Vote(20), "20-nn weighted": Vote(20, temperature=0.07)}
"""The paper's two majority votes, and the weighted one that others report."""


def evaluate_knn(extractor: FeatureExtractor, data: Dataset) -> Result:
    """Classifies the test images by their neighbours among the training images."""
    train, test = evaluation_splits(data)
    protocol = {"layer": LAYER, "transform": extractor.transform, **describe_splits(train, test, data)}
    return _evaluate(extractor(train), extractor(test), train, test, protocol)


def evaluate_pixels(data: Dataset, size: int, workers: int = 0) -> Result:
    """Does the same by raw pixels, at most 64 a side: larger ones would be slower and no better to compare."""
    train, test = evaluation_splits(data)
    size = min(size, 64)
    layer = {"layer": "pixels, L2-normalised", "transform": transform_name(size)}
    features, query = raw_pixels(train, size, workers), raw_pixels(test, size, workers)
    return _evaluate(features, query, train, test, layer | describe_splits(train, test, data))


def _evaluate(features: Tensor, query: Tensor, train: Split, test: Split, protocol: dict[str, Any]) -> Result:
    guesses = classify(query, features, train.truth, VOTES)
    votes = {
        name: {
            "k": min(vote.k, len(train)),
            "vote": "exp(cosine / temperature)" if vote.temperature else "majority",
            "temperature": vote.temperature,
        }
        for name, vote in VOTES.items()
    }
    accuracies = {name: Accuracy(guess == test.truth, test.truth) for name, guess in guesses.items()}
    return Result(accuracies, {"votes": votes, **protocol})


def classify(
    query: Float[Tensor, "q f"], train: Float[Tensor, "n f"], label: Int[Tensor, " n"], votes: Mapping[str, Vote]
) -> dict[str, Int[Tensor, " q"]]:
    """Returns the class with most votes of the k nearest, for each vote; on the CPU like the labels.

    Equally near: the lower row. Equal votes: the lower class.
    """
    largest = max(vote.k for vote in votes.values())
    classes = int(label.max()) + 1
    chosen: dict[str, list[Tensor]] = {name: [] for name in votes}
    for near, similarity in k_nearest(query, train, largest):
        theirs = label[near]
        for name, vote in votes.items():
            chosen[name].append(vote.count(theirs, similarity, classes).argmax(1))
    return {name: torch.cat(parts) for name, parts in chosen.items()}


def k_nearest(
    query: Float[Tensor, "q f"], train: Float[Tensor, "n f"], k: int, own: Int[Tensor, " q"] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the k nearest rows of a chunk of queries, and their similarities; equally near: the lower row.

    They are on the CPU: votes are counted in double precision, which not every device has.

    own: each query's own row, where it has one, which is left out; an equal row is not.
    """
    every_row = torch.ones(len(train), dtype=torch.bool, device=train.device)
    number = torch.arange(len(train), device=train.device)
    left_out = torch.full((len(query),), UNKNOWN, device=train.device) if own is None else own.to(train.device)

    k = min(k, len(train) - (own is not None))

    def tracked(blocks: range) -> Iterator[int]:
        return track(blocks, "neighbours", len(blocks))

    nearest = nearest_vectors(query, train, every_row, number, k, OwnRow(left_out, included=False), tracked)
    for part, near in zip(query.split(_CHUNK), nearest.split(_CHUNK), strict=True):
        # As train[near], which would take twice as long: a row is copied whole.
        vector = embedding(near, train)
        yield near.cpu(), (vector @ part[:, :, None])[:, :, 0].cpu().double()
