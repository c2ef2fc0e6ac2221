"""Calibration: whether a classifier's confidence is its accuracy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

BINS = 15


@dataclass(frozen=True)
class Bin:
    """Images whose highest probability is above `low` and not above `high`."""

    low: float
    high: float
    images: int
    confidence: float | None
    """Mean, in [0, 1]; None where the bin is empty."""
    accuracy: float | None


@dataclass(frozen=True)
class Calibration:
    error: float
    """Expected calibration error, per cent: the mean over images of |confidence − accuracy| of their bin."""
    negative_log_likelihood: float
    """In nats, mean over images."""
    bins: tuple[Bin, ...]

    def report(self) -> dict[str, Any]:
        return {
            "expected calibration error": self.error,
            "negative log-likelihood": self.negative_log_likelihood,
            "bins": [asdict(each) for each in self.bins],
        }


def calibration(scores: Float[Tensor, "n c"], truth: Int[Tensor, " n"], bins: int = BINS) -> Calibration:
    """Computes calibration from logits of one image or more, in bins of equal width (Guo et al. 2017)."""
    log_probability = scores.double().log_softmax(1)
    highest, guess = log_probability.exp().max(1)
    correct = (guess == truth).double()
    place = ((highest * bins).ceil().long() - 1).clamp(0, bins - 1)  # a bin has its upper edge, and not its lower one
    images = place.bincount(minlength=bins)
    confidence, accuracy = (place.bincount(each, minlength=bins) / images.clamp_min(1) for each in (highest, correct))
    rows = zip(images.tolist(), confidence.tolist(), accuracy.tolist(), strict=True)
    filled = tuple(
        Bin(number / bins, (number + 1) / bins, *(row if row[0] else (0, None, None)))
        for number, row in enumerate(rows)
    )
    error = 100 * float(((confidence - accuracy).abs() * images).sum() / len(truth))
    likelihood = -float(log_probability.gather(1, truth[:, None]).mean())
    return Calibration(error, likelihood, filled)


def confusion(guess: Int[Tensor, " n"], truth: Int[Tensor, " n"], classes: int) -> Int[Tensor, "c c"]:
    """Counts the images of each true class (rows) that were predicted as each class (columns)."""
    return torch.bincount(truth * classes + guess, minlength=classes**2).view(classes, classes)
