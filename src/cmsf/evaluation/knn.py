"""k-nearest-neighbour classification and retrieval: exact, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import embedding

from cmsf.data import Dataset, Split
from cmsf.data.transforms import Preprocessing
from cmsf.evaluation.features import LAYER, FeatureExtractor, raw_pixels, view_protocol
from cmsf.evaluation.metrics import Accuracy, Result
from cmsf.evaluation.splits import describe_splits, evaluation_splits
from cmsf.method.topk import OwnRow, nearest_vectors
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.progress import track

DEPTHS = (1, 5, 10)
_CHUNK = 256
"""Queries whose neighbours' vectors are copied at once: so few that their memory is reused."""


@dataclass(frozen=True)
class KNNClassifier:
    """Classifies by a vote of the k nearest: with equal weights, or with exp(similarity / temperature)."""

    k: int
    temperature: float | None = None

    def scores(
        self, label: Int[Tensor, "q n"], similarity: Float[Tensor, "q n"], classes: int
    ) -> Float[Tensor, "q {classes}"]:
        """Returns the votes for each class, given the neighbours' labels and similarities, nearest first."""
        weight = torch.exp(similarity / self.temperature) if self.temperature else torch.ones_like(similarity)
        votes = torch.zeros(len(label), classes, dtype=torch.float64)
        return votes.scatter_add_(1, label[:, : self.k], weight[:, : self.k])


KNN_CLASSIFIERS = {
    "1-nn": KNNClassifier(1),
    "20-nn": KNNClassifier(20),
    "20-nn weighted": KNNClassifier(20, temperature=0.07),
}
"""The paper's two majority votes, and the weighted one that others report."""


def evaluate_knn(extractor: FeatureExtractor, data: Dataset) -> Result:
    """Classifies the test images by their neighbours among the training images."""
    return _evaluate(extractor, data, LAYER, extractor.preprocessing)


def evaluate_pixels(data: Dataset, preprocessing: Preprocessing, workers: int = 0) -> Result:
    """Does the same by raw pixels, at most 64 a side: larger ones would be slower and no better to compare."""
    small = replace(preprocessing, size=min(preprocessing.size, 64))
    return _evaluate(lambda split: raw_pixels(split, small, workers), data, "pixels, L2-normalised", small)


def _evaluate(features: Callable[[Split], Tensor], data: Dataset, layer: str, preprocessing: Preprocessing) -> Result:
    train, test = evaluation_splits(data)
    train_features = features(train)
    predictions = classify(features(test), train_features, train.truth, KNN_CLASSIFIERS)
    votes = {
        name: {
            "k": min(knn.k, len(train)),
            "vote": "exp(cosine / temperature)" if knn.temperature else "majority",
            "temperature": knn.temperature,
        }
        for name, knn in KNN_CLASSIFIERS.items()
    }
    accuracies = {name: Accuracy(predicted == test.truth, test.truth) for name, predicted in predictions.items()}
    views = view_protocol(preprocessing, train, test)
    return Result(accuracies, {"votes": votes, "layer": layer, **views, **describe_splits(train, test, data)})


def classify(
    query: Float[Tensor, "q f"],
    train: Float[Tensor, "n f"],
    label: Int[Tensor, " n"],
    classifiers: Mapping[str, KNNClassifier],
) -> dict[str, Int[Tensor, " q"]]:
    """Returns each classifier's predictions, on the CPU like the labels.

    Equally near: the lower row. Equal votes: the lower class.
    """
    classes = int(label.max()) + 1
    predicted: dict[str, list[Tensor]] = {name: [] for name in classifiers}
    for near, similarity in k_nearest(query, train, max(knn.k for knn in classifiers.values())):
        for name, knn in classifiers.items():
            predicted[name].append(knn.scores(label[near], similarity, classes).argmax(1))
    return {name: torch.cat(parts) for name, parts in predicted.items()}


def evaluate_retrieval(extractor: FeatureExtractor, data: Dataset) -> Result:
    """Evaluates R@1, R@5 and R@10 of the test images among the training images, by cosine."""
    train, test = evaluation_splits(data)
    protocol = {
        "measure": "R@k: the share of test images with one of their class among their k nearest training images",
        "layer": LAYER,
        **extractor.protocol(train, test),
        "train images": len(train),
        "test images": len(test),
        "test split": data.test_origin,
    }
    hits = recall_at_k(extractor(test), extractor(train), train.truth, test.truth)
    return Result({name: Accuracy(hit, test.truth) for name, hit in hits.items()}, protocol)


def recall_at_k(
    query: Float[Tensor, "q f"], train: Float[Tensor, "n f"], label: Int[Tensor, " n"], truth: Int[Tensor, " q"]
) -> dict[str, Bool[Tensor, " q"]]:
    """Marks, for each k, the queries with one of their class among their k nearest; equally near: the lower row."""
    near = torch.cat([row for row, _ in k_nearest(query, train, max(DEPTHS))])
    same = label[near] == truth[:, None]
    return {f"R@{k}": same[:, :k].any(1) for k in DEPTHS}


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
    k, others = min(k, len(train) - (own is not None)), OwnRow(left_out, included=False)
    starts = range(0, len(query), _CHUNK)
    for start in track(starts, "neighbours", len(query), _CHUNK):
        part = slice(start, start + _CHUNK)
        near = nearest_vectors(query[part], train, every_row, number, k, others[part])
        # As train[near], which would take twice as long: a row is copied whole.
        vector = embedding(near, train)
        yield near.cpu(), (vector @ query[part][:, :, None])[:, :, 0].cpu().double()
