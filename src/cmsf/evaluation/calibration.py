"""Calibration: whether a classifier is right as often as it is sure."""

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
    """Their mean, a share; None where there are none."""
    accuracy: float | None


@dataclass(frozen=True)
class Calibration:
    error: float
    """Expected calibration error: per cent by which confidence and accuracy differ, mean over images."""
    negative_log_likelihood: float
    """In nats, mean over images."""
    bins: tuple[Bin, ...]

    def report(self) -> dict[str, Any]:
        return {
            "expected calibration error": self.error,
            "negative log-likelihood": self.negative_log_likelihood,
            "bins": [asdict(one) for one in self.bins],
        }


def calibration(scores: Float[Tensor, "n c"], truth: Int[Tensor, " n"], bins: int = BINS) -> Calibration:
    """Of at least one image, by its scores before the softmax; in bins of equal width (Guo et al. 2017)."""
    log_probability = scores.double().log_softmax(1)
    sure, guess = log_probability.exp().max(1)
    right = (guess == truth).double()
    place = ((sure * bins).ceil().long() - 1).clamp(0, bins - 1)  # a bin has its upper edge, and not its lower one
    images = place.bincount(minlength=bins)
    confidence, accuracy = (place.bincount(what, minlength=bins) / images.clamp_min(1) for what in (sure, right))
    found = [
        Bin(number / bins, (number + 1) / bins, *((count, sure, right) if count else (0, None, None)))
        for number, (count, sure, right) in enumerate(
            zip(images.tolist(), confidence.tolist(), accuracy.tolist(), strict=True)
        )
    ]
    error = 100 * float(((confidence - accuracy).abs() * images).sum() / len(truth))
    likelihood = -float(log_probability.gather(1, truth[:, None]).mean())
    return Calibration(error, likelihood, tuple(found))


def confusion(guess: Int[Tensor, " n"], truth: Int[Tensor, " n"], classes: int) -> Int[Tensor, "c c"]:
    """How many images of each true class (rows) were given to each class (columns)."""
    return torch.bincount(truth * classes + guess, minlength=classes**2).view(classes, classes)
