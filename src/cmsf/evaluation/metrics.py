"""How right predictions are: the share that is, and its mean per class, each with an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ACCURACY, MEAN_PER_CLASS = "accuracy", "mean per class"
_RESAMPLES = 1000
INTERVAL = f"95 %, percentile bootstrap over test images, {_RESAMPLES} resamples"
_AT_ONCE = 10_000_000
_SEED = 0


@dataclass(frozen=True)
class Measure:
    """Per cent, and its 95 % bootstrap interval over test images."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Judged:
    """Which of some test images a classifier got right, and their classes."""

    right: Bool[Tensor, " n"]
    truth: Int[Tensor, " n"]
    per_class: bool = False
    """Whether the figure to quote is the mean over classes, as some data sets have it."""

    @property
    def figure(self) -> float:
        """Per cent."""
        return class_mean(self.right, self.truth) if self.per_class else 100 * int(self.right.sum()) / len(self.right)

    def report(self) -> dict[str, Any]:
        return {
            "quoted": MEAN_PER_CLASS if self.per_class else ACCURACY,
            ACCURACY: asdict(share(self.right)),
            MEAN_PER_CLASS: asdict(mean_per_class(self.right, self.truth)),
        }


@dataclass(frozen=True)
class MeanOf:
    """The mean of several sets' figures."""

    parts: Sequence[Judged]

    @property
    def figure(self) -> float:
        return sum(part.figure for part in self.parts) / len(self.parts)

    def report(self) -> dict[str, Any]:
        """Its interval: half of each set's, in quadrature, for the sets have no images in common."""
        reports = [part.report() for part in self.parts]
        quoted = [report[report["quoted"]] for report in reports]
        half = math.hypot(*((one["high"] - one["low"]) / 2 for one in quoted)) / len(quoted)
        name = f"mean of {len(quoted)} sets"
        return {"quoted": name, name: asdict(Measure(self.figure, self.figure - half, self.figure + half))}


@dataclass(frozen=True)
class Result:
    """What an evaluation found, by name, and all that is needed to repeat it."""

    judged: Mapping[str, Judged | MeanOf]
    protocol: dict[str, Any]

    @property
    def accuracy(self) -> dict[str, float]:
        """Per cent."""
        return {name: judged.figure for name, judged in self.judged.items()}

    def with_protocol(self, more: dict[str, Any]) -> Result:
        return replace(self, protocol=self.protocol | more)

    def report(self) -> dict[str, Any]:
        """For a results file: the figures to quote, accuracy and mean per class with an interval, and the protocol."""
        measures = {name: judged.report() for name, judged in self.judged.items()}
        return {"figures": self.accuracy, "measures": measures, "protocol": self.protocol | {"interval": INTERVAL}}


def hits(scores: Float[Tensor, "n c"], truth: Int[Tensor, " n"], k: int) -> Bool[Tensor, " n"]:
    """Whether the true class is among the k highest scores; equal scores go to the lower class, and NaN to nobody."""
    mine = scores.gather(1, truth[:, None])
    earlier = torch.arange(scores.shape[1]) < truth[:, None]
    return (((scores > mine) | ((scores == mine) & earlier)).sum(1) < k) & ~mine[:, 0].isnan()


def class_mean(right: Bool[Tensor, " n"], truth: Int[Tensor, " n"]) -> float:
    """Per cent: the mean over classes of the share that is right within each."""
    _, place = truth.unique(return_inverse=True)
    return 100 * float((torch.bincount(place, right.double()) / torch.bincount(place)).mean())


def share(right: Bool[Tensor, " n"]) -> Measure:
    """The share of right predictions."""
    return _measure(right.double()[None], torch.ones(1, len(right), dtype=torch.float64))


def mean_per_class(right: Bool[Tensor, " n"], truth: Int[Tensor, " n"]) -> Measure:
    """The class mean with its interval."""
    member = torch.stack([truth == number for number in truth.unique()]).double()
    return _measure(right.double() * member, member)


def _measure(right: Float[Tensor, "g n"], member: Float[Tensor, "g n"]) -> Measure:
    """The mean over groups of right / member, for the images as they are and drawn anew with replacement."""
    images = right.shape[1]
    value = float((right.sum(1) / member.sum(1)).mean())
    generator = torch.Generator().manual_seed(_SEED)
    means = []
    for some in torch.arange(_RESAMPLES).split(max(1, _AT_ONCE // images)):
        drawn = torch.randint(images, (len(some), images), generator=generator)
        times = torch.zeros(len(some), images, dtype=torch.float64)
        times.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
        there = times @ member.T
        # A class that was not drawn says nothing of itself.
        means.append(((times @ right.T) / there.clamp_min(1)).sum(1) / (there > 0).sum(1))
    low, high = torch.cat(means).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Measure(100 * value, 100 * low, 100 * high)
