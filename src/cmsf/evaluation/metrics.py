"""Metrics of classifiers: accuracy and its mean per class, with 95 % intervals; calibration; confusion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from cmsf.utils.progress import track

ACCURACY, MEAN_PER_CLASS = "accuracy", "mean per class"
BINS = 15
_RESAMPLES = 1000
INTERVAL = (
    f"95 % over test images: accuracy by Wilson's score interval, mean per class by a percentile bootstrap of "
    f"{_RESAMPLES} resamples"
)
_DRAWS_AT_ONCE = 1_000_000
_SEED = 0


@dataclass(frozen=True)
class Estimate:
    """Per cent, and its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Accuracy:
    """Which test images were classified correctly, and their true classes."""

    correct: Bool[Tensor, " n"]
    truth: Int[Tensor, " n"]
    per_class: bool = False
    """Whether the mean over classes is quoted, as is usual for some data sets, and not the accuracy."""

    @classmethod
    def top_k(cls, scores: Float[Tensor, "n c"], truth: Int[Tensor, " n"], k: int = 1) -> Accuracy:
        return cls(in_top_k(scores, truth, k), truth)

    @property
    def percent(self) -> float:
        """The figure to quote."""
        if self.per_class:
            return class_mean(self.correct, self.truth)
        return 100 * int(self.correct.sum()) / len(self.correct)

    def report(self) -> dict[str, Any]:
        return {
            "quoted": MEAN_PER_CLASS if self.per_class else ACCURACY,
            ACCURACY: asdict(accuracy_estimate(self.correct)),
            MEAN_PER_CLASS: asdict(class_mean_estimate(self.correct, self.truth)),
        }


@dataclass(frozen=True)
class MeanAccuracy:
    """The mean of the figures of several data sets."""

    parts: Sequence[Accuracy]

    @property
    def percent(self) -> float:
        return sum(part.percent for part in self.parts) / len(self.parts)

    def report(self) -> dict[str, Any]:
        """Adds the distances to the lower ends in quadrature, and those to the upper ends: the sets share no images."""
        reports = [part.report() for part in self.parts]
        quoted = [report[report["quoted"]] for report in reports]
        below = math.hypot(*(part["value"] - part["low"] for part in quoted)) / len(quoted)
        above = math.hypot(*(part["high"] - part["value"] for part in quoted)) / len(quoted)
        name = f"mean of {len(quoted)} sets"
        return {"quoted": name, name: asdict(Estimate(self.percent, self.percent - below, self.percent + above))}


@dataclass(frozen=True)
class Result:
    """The measures of an evaluation by name, and the protocol that is needed to repeat it."""

    measures: Mapping[str, Accuracy | MeanAccuracy]
    protocol: dict[str, Any]

    @property
    def accuracy(self) -> dict[str, float]:
        """Per cent."""
        return {name: measure.percent for name, measure in self.measures.items()}

    def report(self) -> dict[str, Any]:
        """Returns what is written to a results file: figures, measures with intervals, protocol."""
        measures = {name: measure.report() for name, measure in self.measures.items()}
        return {"figures": self.accuracy, "measures": measures, "protocol": self.protocol | {"interval": INTERVAL}}


def in_top_k(scores: Float[Tensor, "n c"], truth: Int[Tensor, " n"], k: int) -> Bool[Tensor, " n"]:
    """Returns whether the true class is among the k highest scores. Ties go to the lower class; NaN is never right."""
    own = scores.gather(1, truth[:, None])
    earlier = torch.arange(scores.shape[1]) < truth[:, None]
    return (((scores > own) | ((scores == own) & earlier)).sum(1) < k) & ~own[:, 0].isnan()


def accuracy_estimate(correct: Bool[Tensor, " n"]) -> Estimate:
    """Returns the share of correct predictions, with Wilson's score interval (1927).

    The interval of p = x / n holds every rate q with |p - q| ≤ z √(q (1 - q) / n). Unlike the bootstrap's, it has a
    width where all or none are correct.
    """
    count = len(correct)
    share = int(correct.sum()) / count
    z = NormalDist().inv_cdf(0.975)
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    # Bounded, for rounding may take an end that is 0 or 1 beyond it.
    return Estimate(100 * share, 100 * max(0.0, centre - half), 100 * min(1.0, centre + half))


def change_estimate(before: Shaped[Tensor, " n"], after: Shaped[Tensor, " n"]) -> Estimate:
    """Returns by how many points the accuracy on the same images has changed, with its 95 % interval.

    The interval is Agresti and Min's (2005) for paired shares: half an image is added to each of the four cells
    (right or wrong, before and after), and the difference is taken to be normal. Measures of an image from 0 to 1 are
    taken likewise.
    """
    change = after.double() - before.double()
    total, mean = len(change) + 2, float(change.sum()) / (len(change) + 2)
    variance = (float((change**2).sum()) + 1) / total - mean**2
    half = NormalDist().inv_cdf(0.975) * math.sqrt(variance / total)
    return Estimate(100 * float(change.mean()), 100 * (mean - half), 100 * (mean + half))


def class_mean(correct: Bool[Tensor, " n"], truth: Int[Tensor, " n"]) -> float:
    """Returns, in per cent, the mean over classes of the accuracy within each."""
    _, place = truth.unique(return_inverse=True)
    return 100 * float((torch.bincount(place, correct.double()) / torch.bincount(place)).mean())


def class_mean_estimate(correct: Bool[Tensor, " n"], truth: Int[Tensor, " n"]) -> Estimate:
    """Returns the mean accuracy per class, with a percentile bootstrap over images.

    Some resamples at a time, each reduced to two counts a class: memory follows the images, not images × classes.
    """
    images = len(truth)
    present, place = truth.unique(return_inverse=True)
    cell = 2 * place + correct  # wrong and correct of a class, side by side
    cells = 2 * len(present)
    generator = torch.Generator().manual_seed(_SEED)
    means = []
    at_once = max(1, _DRAWS_AT_ONCE // images)
    for block in track(torch.arange(_RESAMPLES).split(at_once), "intervals", _RESAMPLES, at_once):
        drawn = cell[torch.randint(images, (len(block), images), generator=generator)]
        drawn += cells * torch.arange(len(block))[:, None]
        counts = drawn.flatten().bincount(minlength=len(block) * cells).view(len(block), -1, 2).double()
        total = counts.sum(2)
        # A class that was not drawn does not enter the mean.
        means.append((counts[:, :, 1] / total.clamp_min(1)).sum(1) / (total > 0).sum(1))
    low, high = torch.cat(means).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(class_mean(correct, truth), 100 * low, 100 * high)


@dataclass(frozen=True)
class Bin:
    """Images whose highest probability is above `low` and not above `high`; mean confidence is None without any."""

    low: float
    high: float
    images: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Calibration:
    """Expected calibration error in per cent, the mean over images of |confidence − accuracy| of their bin; and mean
    negative log-likelihood in nats."""

    error: float
    negative_log_likelihood: float
    bins: tuple[Bin, ...]

    def report(self) -> dict[str, Any]:
        return {
            "expected calibration error": self.error,
            "negative log-likelihood": self.negative_log_likelihood,
            "bins": [asdict(bin_) for bin_ in self.bins],
        }


def calibration(scores: Float[Tensor, "n c"], truth: Int[Tensor, " n"], bins: int = BINS) -> Calibration:
    """Computes calibration from logits of one image or more, in bins of equal width (Guo et al. 2017)."""
    log_probability = scores.double().log_softmax(1)
    highest, guess = log_probability.exp().max(1)
    correct = (guess == truth).double()
    place = ((highest * bins).ceil().long() - 1).clamp(0, bins - 1)  # a bin has its upper edge, and not its lower one
    images = place.bincount(minlength=bins)
    confidence, accuracy = (
        place.bincount(values, minlength=bins) / images.clamp_min(1) for values in (highest, correct)
    )
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
