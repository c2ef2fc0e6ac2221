"""The images that an evaluation uses: those of both splits whose true classes are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.data import Dataset, Split
from cmsf.evaluation.metrics import Accuracy
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput


@dataclass(frozen=True)
class EvaluationSet:
    """Test images for a classifier, and their true classes by the classifier's numbers."""

    split: Split
    truth: Int[Tensor, " n"]

    @classmethod
    def of(cls, data: Dataset, names: Sequence[str] | None = None) -> EvaluationSet | None:
        """Returns the test images whose class has a name among `names` (by default of the labels); None without any."""
        if data.test is None:
            return None
        truth = data.as_label(data.test.truth)
        if names is not None:
            places = {name: place for place, name in enumerate(names)}
            # The last is for UNKNOWN, which is -1.
            truth = torch.tensor([*(places.get(name, UNKNOWN) for name in data.label_names), UNKNOWN])[truth]
        known = (truth != UNKNOWN).nonzero()[:, 0]
        return cls(data.test.subset(known), truth[known]) if len(known) else None

    def accuracy(self, scores: Float[Tensor, "n c"]) -> Accuracy:
        return Accuracy(scores.argmax(1) == self.truth, self.truth)


def can_evaluate(data: Dataset) -> bool:
    """Returns whether both splits have images with known classes."""
    return data.test is not None and len(data.train.with_truth) > 0 and len(data.test.with_truth) > 0


def evaluation_splits(data: Dataset) -> tuple[Split, Split]:
    """Returns the training and test images with known classes, or raises BadInput where there are none."""
    if data.test is None or not can_evaluate(data):
        split = "test" if len(data.train.with_truth) else "training"
        raise BadInput(
            f"the {split} images of {data.name} have no labels to evaluate with; give labelled images with --data"
        )
    return data.train.subset(data.train.with_truth), data.test.subset(data.test.with_truth)


def describe_votes(data: Dataset) -> str:
    """Says how many true labels k-NN votes with, where training has other labels; nothing where it has the same."""
    train = data.train
    if not can_evaluate(data) or (torch.equal(train.label, train.truth) and data.label_names == data.classes):
        return ""
    right = int((train.label == data.as_label(train.truth))[train.labelled].sum())
    groups = f", joined into {len(data.label_names)} groups" if data.groups else ""
    others = len(train.labelled) - right
    return (
        f"k-NN in the log votes with the true labels of all {len(train.with_truth):,} training images, of which "
        f"training has {right:,}{groups}" + (f", and {others:,} labels that differ" if others else "")
    )


def describe_splits(train: Split, test: Split, data: Dataset) -> dict[str, Any]:
    """Returns the part of a protocol that says which images were used."""
    return {
        "train images": len(train),
        "test images": len(test),
        "classes": len(train.truth.unique()),
        "test split": data.test_origin,
    }
