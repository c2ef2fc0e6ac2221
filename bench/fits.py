"""The contestants of the linear fit, and the loss that each ends at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jobs import Job
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from cmsf.evaluation.linear import fit_path

DECAY = 1e-2
MOST_ITERATIONS = 500
TOLERANCE = 1e-4
"""The greatest entry of the gradient at which all of them stop: scikit-learn's default."""
TELLING = 64
"""Directions in which the classes differ."""

Fitted = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """Standardised features of decaying variance, as a backbone's are, of classes that overlap."""

    features: Tensor
    label: Tensor
    classes: int

    def loss(self, fitted: Fitted) -> float:
        """Mean cross-entropy + decay / 2 |W|², in double precision."""
        weight, bias = (value.double() for value in fitted)
        error = cross_entropy(self.features.double() @ weight.T + bias, self.label)
        return float(error + DECAY / 2 * weight.square().sum())


def make_problem(images: int, features: int, classes: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(classes, (images,), generator=generator)
    centre = 0.5 * torch.randn(classes, features, generator=generator) * (torch.arange(features) < TELLING)
    spread = torch.arange(1, features + 1) ** -0.5
    apart = (centre[label] + torch.randn(images, features, generator=generator)) * spread
    mixed = normalize(apart @ torch.linalg.qr(torch.randn(features, features, generator=generator)).Q)
    return Problem((mixed - mixed.mean(0)) / mixed.std(0, correction=0), label, classes)


def fit_jobs(problem: Problem) -> list[Job]:
    def cmsf() -> Fitted:
        ((_, layer),) = fit_path(problem.features, problem.label, problem.classes, (DECAY,))
        return layer.weight, layer.bias

    def scikit_learn(dtype: torch.dtype) -> Fitted:
        model = LogisticRegression(C=1 / (len(problem.label) * DECAY), max_iter=MOST_ITERATIONS, tol=TOLERANCE)
        model.fit(problem.features.to(dtype).numpy(), problem.label.numpy())
        return torch.from_numpy(model.coef_), torch.from_numpy(model.intercept_)

    return [
        Job("cmsf", cmsf),
        Job("scikit-learn, float32", lambda: scikit_learn(torch.float32)),
        Job("scikit-learn, float64", lambda: scikit_learn(torch.float64)),
    ]
