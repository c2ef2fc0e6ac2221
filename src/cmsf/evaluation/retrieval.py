"""Retrieval: whether the nearest training images of a test image hold one of its class."""

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


def evaluate_retrieval(features: FeatureExtractor, data: Dataset) -> Result:
    """R@1, R@5 and R@10 of the test images among the training images, by cosine."""
    train, test = evaluation_splits(data)
    protocol = {
        "measure": "R@k: the share of test images with one of their class among their k nearest training images",
        "layer": LAYER,
        "transform": features.transform,
        "train images": len(train),
        "test images": len(test),
        "test split": data.test_origin,
    }
    found = recalled(features(test), features(train), train.truth, test.truth)
    return Result({name: Accuracy(right, test.truth) for name, right in found.items()}, protocol)


def recalled(
    query: Float[Tensor, "q f"], train: Float[Tensor, "n f"], label: Int[Tensor, " n"], truth: Int[Tensor, " q"]
) -> dict[str, Bool[Tensor, " q"]]:
    """For each depth, which queries have one of their class that near; equally near: the lower row."""
    near = torch.cat([part for part, _ in k_nearest(query, train, max(DEPTHS))])
    same = label[near] == truth[:, None]
    return {f"R@{k}": same[:, :k].any(1) for k in DEPTHS}
