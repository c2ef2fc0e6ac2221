"""A linear layer on frozen features: the fast protocol, fitted to convergence."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits
from torch import Tensor

from cmsf.data import Dataset
from cmsf.evaluation.features import LAYER, Extractor
from cmsf.evaluation.judged import judged_splits
from cmsf.evaluation.measures import Judged, Result, hits
from cmsf.progress import shown
from cmsf.randomness import uniform

WEIGHT_DECAYS = tuple(10.0**power for power in range(0, -8, -1))
"""From strong to weak: each fit starts where the one before ended."""
STANDARDISED = f"{LAYER}, then standardised by the training images' mean and deviation"
_MOST_ITERATIONS = 500
_WORTH_THREADS = 10**9
_ENOUGH_FOR_A_TENTH = 5000
_FOLDS = 5
_HOLDING_OUT = 0x11EA << 40  # what this use of the hash is for; no epoch is ever so high


def evaluate_linear(features: Extractor, data: Dataset) -> Result:
    """Logistic regression on normalised, standardised features of clean views; its weight decay is chosen on training
    images that are held out, then it is fitted on all of them."""
    train, test = judged_splits(data)
    known = features(train).cpu()
    scale = Standardised.by(known)
    layer, chosen = fit_chosen(scale(known), train.truth)
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
    scores = layer(scale(features(test).cpu()), len(data.classes))
    return Result(judge_scores("linear", scores, test.truth), protocol)


def judge_scores(name: str, scores: Float[Tensor, "n c"], truth: Int[Tensor, " n"]) -> dict[str, Judged]:
    """Top-1, and top-5 where there are more than five classes."""
    ks = (1, 5) if scores.shape[1] > 5 else (1,)
    return {f"{name} top-{k}": Judged(hits(scores, truth, k), truth) for k in ks}


@dataclass(frozen=True)
class Standardised:
    """Features with mean 0 and variance 1 in every dimension, over the images that it was made by."""

    mean: Float[Tensor, " f"]
    deviation: Float[Tensor, " f"]

    @classmethod
    def by(cls, features: Float[Tensor, "n f"]) -> Standardised:
        return cls(features.mean(0), features.std(0, correction=0).clamp_min(1e-6))

    def __call__(self, features: Float[Tensor, "n f"]) -> Float[Tensor, "n f"]:
        return (features - self.mean) / self.deviation


@dataclass(frozen=True)
class Layer:
    """Scores of all classes; one that was not trained on is never chosen."""

    weight: Float[Tensor, "c f"]
    bias: Float[Tensor, " c"]
    classes: Int[Tensor, " c"]

    def __call__(self, features: Float[Tensor, "n f"], count: int) -> Float[Tensor, "n count"]:
        scores = torch.full((len(features), count), -torch.inf, dtype=torch.float64)
        scores[:, self.classes] = features.double() @ self.weight.T + self.bias
        return scores


def fit_chosen(features: Float[Tensor, "n f"], label: Int[Tensor, " n"]) -> tuple[Layer, dict[str, Any]]:
    """The layer with the weight decay that does best on images held out, fitted on all; and how that was chosen."""
    folds = held_out(len(label))
    paths = [fit_path(features[~aside], label[~aside], WEIGHT_DECAYS) for aside in folds]
    tried: dict[float, float] = {}
    for fits in shown(zip(*paths, strict=True), "weight decays", len(WEIGHT_DECAYS)):
        decay = fits[0][0]
        count = int(label.max()) + 1
        right = [
            hits(layer(features[aside], count), label[aside], 1)
            for (_, layer), aside in zip(fits, folds, strict=True)
        ]  # fmt: skip
        tried[decay] = 100 * float(torch.cat(right).double().mean())
        if tried[decay] < max(tried.values()):
            break  # weaker ones would only fit more closely still, and take the longest
    best = max(tried, key=lambda decay: (tried[decay], decay))
    ((_, layer),) = fit_path(features, label, (best,))
    aside = int(folds[0].sum())
    how = f"{aside} of {len(label)} training images" if len(folds) == 1 else f"{_FOLDS} folds of the training images"
    return layer, {
        "weight decay": best,
        "chosen on": f"{how}, by a hash",
        "validation accuracy by weight decay": {f"{decay:g}": value for decay, value in tried.items()},
    }


def held_out(count: int) -> list[Bool[Tensor, " n"]]:
    """Which images to choose by: a tenth, or all of them in five folds where they are few."""
    chance = uniform(1, _HOLDING_OUT, torch.arange(count))[:, 0]
    if count >= _ENOUGH_FOR_A_TENTH:
        return [chance < 0.1]
    place = chance.argsort(stable=True).argsort()  # equal parts, for a few images may all fall into one
    return [place % _FOLDS == number for number in range(min(_FOLDS, count))]


def fit_path(
    features: Float[Tensor, "n f"], label: Int[Tensor, " n"], weight_decays: Sequence[float]
) -> Iterator[tuple[float, Layer]]:
    """Minimise mean cross-entropy + decay / 2 |W|², for each weight decay in turn, starting where the last one ended.

    scikit-learn's, in double precision.
    """
    found = label.unique()
    if len(found) < 2:  # nothing to tell apart
        for decay in weight_decays:
            yield (
                decay,
                Layer(features.new_zeros(len(found), features.shape[1]).double(), torch.zeros(len(found)), found),
            )
        return
    pairs = len(found) == 2
    # Threads that wait for one another cost more than a small product: five times as much at 10,000 × 128 × 10.
    threads = 1 if features.numel() * len(found) < _WORTH_THREADS else None
    model = LogisticRegression(warm_start=True, max_iter=_MOST_ITERATIONS, tol=1e-4)
    for decay in weight_decays:
        # Of two classes it fits the difference, whose penalty is half of that of two opposite halves.
        model.C = 1 / (len(label) * (decay / 2 if pairs else decay))
        with warnings.catch_warnings(), threadpool_limits(threads):
            warnings.simplefilter("ignore", ConvergenceWarning)  # the most iterations are plenty to compare by
            model.fit(features.double().numpy(), label.numpy())
        weight, bias = torch.from_numpy(model.coef_.copy()), torch.from_numpy(model.intercept_.copy())
        if pairs:
            weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
        yield decay, Layer(weight, bias, torch.from_numpy(model.classes_))
