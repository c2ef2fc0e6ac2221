"""How right predictions are: the share that is, and its mean per class, each with an interval."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

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
class Result:
    """What an evaluation found, by name: which test images it got right, and all that is needed to repeat it."""

    right: dict[str, Bool[Tensor, " n"]]
    truth: Int[Tensor, " n"]
    protocol: dict[str, Any]

    @property
    def accuracy(self) -> dict[str, float]:
        """Per cent."""
        return {name: 100 * int(right.sum()) / len(right) for name, right in self.right.items()}

    def report(self) -> dict[str, Any]:
        """For a results file: accuracy and its mean per class, each with an interval, and the protocol."""
        measures = {
            name: {"accuracy": asdict(share(right)), "mean per class": asdict(mean_per_class(right, self.truth))}
            for name, right in self.right.items()
        }
        return {"accuracy": self.accuracy, "measures": measures, "protocol": self.protocol | {"interval": INTERVAL}}


def hits(scores: Float[Tensor, "n c"], truth: Int[Tensor, " n"], k: int) -> Bool[Tensor, " n"]:
    """Whether the true class is among the k highest scores; equal scores go to the lower class."""
    mine = scores.gather(1, truth[:, None])
    earlier = torch.arange(scores.shape[1]) < truth[:, None]
    return ((scores > mine) | ((scores == mine) & earlier)).sum(1) < k


def share(right: Bool[Tensor, " n"]) -> Measure:
    """The share of right predictions."""
    return _measure(right.double()[None], torch.ones(1, len(right), dtype=torch.float64))


def mean_per_class(right: Bool[Tensor, " n"], truth: Int[Tensor, " n"]) -> Measure:
    """The mean over classes of the share that is right within each."""
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
