"""A linear layer on frozen features: the fast protocol, fitted to convergence."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from cmsf.data import Dataset
from cmsf.evaluation.features import LAYER, extract, transform_name
from cmsf.evaluation.judged import judged_splits
from cmsf.evaluation.measures import Result, hits
from cmsf.randomness import uniform

WEIGHT_DECAYS = tuple(10.0**power for power in range(0, -8, -1))
"""From strong to weak: each fit starts where the one before ended."""
_MOST_ITERATIONS = 500
_WORTH_THREADS = 10**9
_HELD_OUT = 0.1
_HOLDING_OUT = 0x11EA << 40  # what this use of the hash is for; no epoch is ever so high


def evaluate_linear(
    backbone: nn.Module, data: Dataset, size: int, device: torch.device | str, workers: int = 0
) -> Result:
    """Logistic regression on normalised, standardised features of clean views; its weight decay is chosen on a tenth
    of the training images, then it is fitted on all of them."""
    train, test = judged_splits(data)
    known, asked = (extract(backbone, split, size, device, workers).cpu() for split in (train, test))
    mean, deviation = known.mean(0), known.std(0, correction=0).clamp_min(1e-6)
    known, asked = (known - mean) / deviation, (asked - mean) / deviation

    aside = uniform(1, _HOLDING_OUT, torch.arange(len(train)))[:, 0] < _HELD_OUT
    count = len(data.classes)
    tried: dict[float, float] = {}
    for decay, layer in fit_path(known[~aside], train.truth[~aside], WEIGHT_DECAYS):
        tried[decay] = float(hits(layer(known[aside], count), train.truth[aside], 1).double().mean())
        if tried[decay] < max(tried.values()):
            break  # weaker ones would only fit more closely still, and take the longest
    best = max(tried, key=lambda decay: (tried[decay], decay))
    ((_, layer),) = fit_path(known, train.truth, (best,))
    protocol = {
        "classifier": "one linear layer, cross-entropy, LBFGS to convergence, weight decay on the weights",
        "weight decay": best,
        "chosen on": f"{int(aside.sum())} of {len(train)} training images, by a hash",
        "validation accuracy by weight decay": {f"{decay:g}": 100 * value for decay, value in tried.items()},
        "layer": f"{LAYER}, then standardised by the training images' mean and deviation",
        "transform": transform_name(size),
        "augmentation": "none",
        "train images": len(train),
        "test images": len(test),
        "classes": len(train.truth.unique()),
        "test split": data.test_origin,
    }
    scores = layer(asked, count)
    ks = (1, 5) if count > 5 else (1,)
    return Result({f"linear top-{k}": hits(scores, test.truth, k) for k in ks}, test.truth, protocol)


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


def fit_path(
    features: Float[Tensor, "n f"], label: Int[Tensor, " n"], weight_decays: Sequence[float]
) -> Iterator[tuple[float, Layer]]:
    """Minimise mean cross-entropy + decay / 2 |W|², for each weight decay in turn, starting where the last one ended.

    scikit-learn's, in double precision.
    """
    classes = len(label.unique())
    pairs = classes == 2
    # Threads that wait for one another cost more than a small product: five times as much at 10,000 × 128 × 10.
    threads = 1 if features.numel() * classes < _WORTH_THREADS else None
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
