"""A linear layer on frozen features, fitted to convergence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import log_softmax

from cmsf.data import Dataset
from cmsf.evaluation.features import LAYER, FeatureExtractor
from cmsf.evaluation.metrics import Accuracy, Result, in_top_k
from cmsf.evaluation.splits import evaluation_splits
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import progress_bar
from cmsf.utils.rng import uniform


@dataclass(frozen=True)
class LinearClassifier:
    """W x + b; a class without training images has no weights and a bias of −∞, so that it is never chosen."""

    weight: Float[Tensor, "c f"]
    bias: Float[Tensor, " c"]
    diverged: bool = False

    def __call__(self, features: Float[Tensor, "n f"]) -> Float[Tensor, "n c"]:
        return torch.addmm(self.bias, features, self.weight.T)

    @classmethod
    def from_present(
        cls,
        weight: Float[Tensor, "p f"],
        bias: Float[Tensor, " p"],
        present: Int[Tensor, " p"],
        classes: int,
        diverged: bool = False,
    ) -> LinearClassifier:
        """Of weights of the classes that are present; a copy."""
        every = weight.new_zeros(classes, weight.shape[1]), bias.new_full((classes,), -torch.inf)
        for whole, part in zip(every, (weight, bias), strict=True):
            whole[present] = part
        return cls(*every, diverged)


class NonFiniteLoss(Exception):
    """The loss has left the numbers: nothing better will come."""


class LogisticLoss:
    """Mean cross-entropy + decay / 2 |W|², with its gradient (softmax − one-hot)ᵀ X / n + decay W written by hand:
    two matrix products and little else. Autograd takes a little longer, 4 % at 2,940 × 2,048 × 37 on a CPU."""

    def __init__(
        self,
        features: Float[Tensor, "n f"],
        label: Int[Tensor, " n"],
        weight: Float[Tensor, "c f"],
        bias: Float[Tensor, " c"],
        decay: float,
    ) -> None:
        self.evaluations = 0
        self._features, self._label, self._decay = features, label[:, None], decay
        self._weight, self._bias = weight, bias
        weight.grad, bias.grad = torch.empty_like(weight), torch.empty_like(bias)

    @torch.no_grad()
    def __call__(self) -> float:
        self.evaluations += 1
        count = len(self._label)
        log_p = log_softmax(torch.addmm(self._bias, self._features, self._weight.T), 1)
        true = log_p.gather(1, self._label)
        loss = float(self._decay / 2 * self._weight.square().sum() - true.mean())
        if loss - loss != 0:
            raise NonFiniteLoss
        wrong = log_p.exp_().scatter_add_(1, self._label, torch.full_like(true, -1)).div_(count)
        torch.addmm(self._weight, wrong.T, self._features, beta=self._decay, out=self._weight.grad)
        torch.sum(wrong, 0, out=self._bias.grad)
        return loss


WEIGHT_DECAYS = tuple(10.0**power for power in range(0, -8, -1))
"""From strong to weak: each fit starts where the one before ended."""
STANDARDISED = f"{LAYER}, then standardised by the training images' mean and deviation"
_MOST_ITERATIONS = 500
_FLAT = 1e-5
"""No entry of the gradient is larger where a fit has converged."""
_LEAST = 0.01
_ENOUGH_FOR_A_TENTH = 5000
_FOLDS = 5
_HOLDING_OUT = 0x11EA << 40  # what this use of the hash is for; no epoch is ever so high


def evaluate_linear(features: FeatureExtractor, data: Dataset) -> Result:
    """Logistic regression on normalised, standardised features of clean views; its weight decay is chosen on training
    images that are held out, then it is fitted on all of them."""
    train, test = evaluation_splits(data)
    known = features(train)
    scale = StandardScaler.fit(known)
    layer, chosen = fit_linear(scale(known), train.truth.to(known.device), len(data.classes))
    protocol = {
        "classifier": "one linear layer, cross-entropy, LBFGS to convergence, weight decay on the weights",
        **chosen,
        "layer": STANDARDISED,
        "transform": features.transform,
        "augmentation": "none",
        "train images": len(train),
        "test images": len(test),
        "classes": len(train.truth.unique()),
        "test split": data.test_origin,
    }
    scores = layer(scale(features(test))).cpu()
    return Result(top_k_accuracies("linear", scores, test.truth), protocol)


def top_k_accuracies(name: str, scores: Float[Tensor, "n c"], truth: Int[Tensor, " n"]) -> dict[str, Accuracy]:
    """Top-1, and top-5 where there are more than five classes."""
    ks = (1, 5) if scores.shape[1] > 5 else (1,)
    return {f"{name} top-{k}": Accuracy(in_top_k(scores, truth, k), truth) for k in ks}


@dataclass(frozen=True)
class StandardScaler:
    """Features with mean 0 and variance 1 in every dimension, over the images that it was made by."""

    mean: Float[Tensor, " f"]
    deviation: Float[Tensor, " f"]

    @classmethod
    def fit(cls, features: Float[Tensor, "n f"]) -> StandardScaler:
        deviation = features.std(0, correction=0)
        # What hardly moves in these images would be blown up without bounds in others.
        return cls(features.mean(0), deviation.clamp_min(max(_LEAST * float(deviation.median()), 1e-6)))

    def __call__(self, features: Float[Tensor, "n f"]) -> Float[Tensor, "n f"]:
        return (features - self.mean) / self.deviation


def fit_linear(
    features: Float[Tensor, "n f"], label: Int[Tensor, " n"], classes: int
) -> tuple[LinearClassifier, dict[str, Any]]:
    """The layer with the weight decay that does best on images held out, fitted on all; and how that was chosen."""
    if len(label) < 2:
        raise BadInput(f"a linear layer needs two labelled training images or more, and there are {len(label)}")
    folds = [aside.to(label.device) for aside in validation_folds(len(label))]
    paths = [fit_path(features[~aside], label[~aside], classes, WEIGHT_DECAYS) for aside in folds]
    tried: dict[float, float] = {}
    with progress_bar("weight decays", len(WEIGHT_DECAYS) + 1) as at:
        for fits in zip(*paths, strict=True):
            decay = fits[0][0]
            right = [
                in_top_k(layer(features[aside]).cpu(), label[aside].cpu(), 1)
                for (_, layer), aside in zip(fits, folds, strict=True)
            ]
            tried[decay] = 100 * float(torch.cat(right).double().mean())
            at(len(tried), f"held out {tried[decay]:.2f} %")
            if len(tried) > 2 and max(list(tried.values())[-2:]) < max(tried.values()):
                break  # two in a row are worse: weaker ones would only fit more closely still, and take the longest
        best = max(tried, key=lambda decay: (tried[decay], decay))
        at(len(WEIGHT_DECAYS), f"the best again, {best:g}, on all images")
        ((_, layer),) = fit_path(features, label, classes, (best,))
    aside = int(folds[0].sum())
    how = f"{aside} of {len(label)} training images" if len(folds) == 1 else f"{_FOLDS} folds of the training images"
    return layer, {
        "weight decay": best,
        "chosen on": f"{how}, by a hash",
        "validation accuracy by weight decay": {f"{decay:g}": value for decay, value in tried.items()},
    }


def validation_folds(count: int) -> list[Bool[Tensor, " n"]]:
    """Which images to choose by: a tenth, or all of them in five folds where they are few."""
    chance = uniform(1, _HOLDING_OUT, torch.arange(count))[:, 0]
    if count >= _ENOUGH_FOR_A_TENTH:
        return [chance < 0.1]
    place = chance.argsort(stable=True).argsort()  # equal parts, for a few images may all fall into one
    return [place % _FOLDS == number for number in range(min(_FOLDS, count))]


def fit_path(
    features: Float[Tensor, "n f"], label: Int[Tensor, " n"], classes: int, weight_decays: Sequence[float]
) -> Iterator[tuple[float, LinearClassifier]]:
    """Minimise mean cross-entropy + decay / 2 |W|², for each weight decay in turn, starting where the last one ended.

    To convergence by torch's L-BFGS with its line search, on whatever device the features are.
    """
    present, place = label.unique(return_inverse=True)
    weight, bias = features.new_zeros(len(present), features.shape[1]), features.new_zeros(len(present))
    for decay in weight_decays:
        optimiser = torch.optim.LBFGS(
            [weight, bias],
            max_iter=_MOST_ITERATIONS,
            max_eval=2 * _MOST_ITERATIONS,
            tolerance_grad=_FLAT,
            history_size=10,
            line_search_fn="strong_wolfe",
        )
        optimiser.step(LogisticLoss(features, place, weight, bias, decay))
        yield decay, LinearClassifier.from_present(weight, bias, present, classes)
