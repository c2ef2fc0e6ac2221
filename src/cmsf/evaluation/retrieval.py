"""Retrieval: whether a test image has one of its class among its nearest training images."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cmsf.data import Dataset
from cmsf.evaluation.features import LAYER, FeatureExtractor
from cmsf.evaluation.knn import k_nearest
from cmsf.evaluation.metrics import Accuracy, Result
from cmsf.evaluation.splits import evaluation_splits

DEPTHS = (1, 5, 10)


def evaluate_retrieval(extractor: FeatureExtractor, data: Dataset) -> Result:
    """Evaluates R@1, R@5 and R@10 of the test images among the training images, by cosine."""
    train, test = evaluation_splits(data)
    protocol = {
        "measure": "R@k: the share of test images with one of their class among their k nearest training images",
        "layer": LAYER,
        "transform": extractor.transform,
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
