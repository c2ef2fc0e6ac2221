"""What an evaluation can be judged by: images of both splits whose classes are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.data import Dataset, Split
from cmsf.evaluation.metrics import Judged
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput


@dataclass(frozen=True)
class HeldOut:
    """Images to judge a classifier by, and their true classes by the numbers of the labels."""

    split: Split
    truth: Int[Tensor, " n"]

    @classmethod
    def of(cls, data: Dataset, names: Sequence[str] | None = None) -> HeldOut | None:
        """names: what the classifier's classes are called; by default as the labels are."""
        if data.test is None:
            return None
        truth = data.as_label(data.test.truth)
        if names is not None:
            places = {name: place for place, name in enumerate(names)}
            # The last is for UNKNOWN, which is -1.
            truth = torch.tensor([*(places.get(name, UNKNOWN) for name in data.label_names), UNKNOWN])[truth]
        known = (truth != UNKNOWN).nonzero()[:, 0]
        return cls(data.test.subset(known), truth[known]) if len(known) else None

    def right(self, scores: Float[Tensor, "n c"]) -> Judged:
        return Judged(scores.argmax(1) == self.truth, self.truth)


def can_judge(data: Dataset) -> bool:
    return data.test is not None and len(data.train.with_truth) > 0 and len(data.test.with_truth) > 0


def judged_splits(data: Dataset) -> tuple[Split, Split]:
    """Training and test images with known classes; one message where there are none."""
    if data.test is None or not can_judge(data):
        what = "test" if len(data.train.with_truth) else "training"
        raise BadInput(f"the {what} images of {data.name} have no labels to judge by; give labelled images with --data")
    return _judged(data.train), _judged(data.test)


def _judged(split: Split) -> Split:
    return split if len(split.with_truth) == len(split) else split.subset(split.with_truth)
