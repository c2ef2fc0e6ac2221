"""One trial of the search: sample settings, fit a linear classifier by L-BFGS, report the validation metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.evaluation.linear import LinearClassifier, LogisticLoss, NonFiniteLoss
from cmsf.evaluation.metrics import Accuracy, in_top_k

_INNER = 20
"""Updates in one iteration, torch's default."""
_HISTORY = 10


@dataclass(frozen=True)
class Settings:
    """What the protocol searches for."""

    iterations: int
    lr: float
    weight_decay: float


def fit(
    features: Float[Tensor, "n f"],
    label: Int[Tensor, " n"],
    classes: int,
    settings: Settings,
    watch: Callable[[int, LinearClassifier], None] | None = None,
) -> LinearClassifier:
    """Minimise mean cross-entropy + weight_decay / 2 |W|² from zero, by `iterations` steps of torch's L-BFGS.

    `watch` sees the layer after every step. Ends early once converged, or diverged: then with the last weights whose
    loss was finite.
    """
    present, place = label.unique(return_inverse=True)
    weight = features.new_zeros(len(present), features.shape[1])
    bias = features.new_zeros(len(present))
    objective = LogisticLoss(features, place, weight, bias, settings.weight_decay)
    optimiser = torch.optim.LBFGS([weight, bias], lr=settings.lr, max_iter=_INNER, history_size=_HISTORY)
    good = weight.clone(), bias.clone()

    def layer(diverged: bool = False) -> LinearClassifier:
        return LinearClassifier.from_present(*(good if diverged else (weight, bias)), present, classes, diverged)

    for iteration in range(1, settings.iterations + 1):
        asked = objective.asked
        try:
            optimiser.step(objective)
        except NonFiniteLoss:
            return layer(diverged=True)
        # The step's last update is not followed by a loss of its own.
        if not (weight.isfinite().all() and bias.isfinite().all()):
            return layer(diverged=True)
        good = weight.clone(), bias.clone()
        if watch is not None:
            watch(iteration, layer())
        # Torch has five reasons to end a step before its 20 updates. Three speak of the last change, of the weights or
        # of the loss, and a tiny learning rate makes those small wherever it is: no sign of convergence. The other two
        # (no gradient, or a direction that promises nothing) do not depend on the rate, and are seen before any
        # update. They alone leave a step with one look at the loss; the next would look at the same and do the same.
        if objective.asked == asked + 1:
            break
    return layer()


MOST_ITERATIONS = 1000
_ITERATIONS = (1, MOST_ITERATIONS)
_LEARNING_RATES = (1e-6, 1.0)
_WEIGHT_DECAYS = (1e-9, 1.0)


@dataclass(frozen=True)
class Problem:
    """Standardised features in CPU memory, and what to call good: mean per class, or else top-1."""

    train: Float[Tensor, "n f"]
    train_label: Int[Tensor, " n"]
    val: Float[Tensor, "m f"]
    val_label: Int[Tensor, " m"]
    classes: int
    per_class: bool


@runtime_checkable
class Draws(Protocol):
    """The part of Optuna's trial that draws."""

    def suggest_int(self, name: str, low: int, high: int, *, log: bool) -> int: ...

    def suggest_float(self, name: str, low: float, high: float, *, log: bool) -> float: ...


def draw(trial: Draws) -> Settings:
    """The paper's ranges, all of them log-uniform."""
    return Settings(
        trial.suggest_int("iterations", *_ITERATIONS, log=True),
        trial.suggest_float("lr", *_LEARNING_RATES, log=True),
        trial.suggest_float("weight_decay", *_WEIGHT_DECAYS, log=True),
    )


def measure(layer: LinearClassifier, problem: Problem) -> float:
    """Per cent of validation images, or its mean over their classes."""
    return Accuracy(in_top_k(layer(problem.val), problem.val_label, 1), problem.val_label, problem.per_class).percent


def rungs(iterations: int) -> list[int]:
    """After which iterations a trial is looked at before its end: 1, 2, 4, 8, …"""
    return [2**power for power in range(MOST_ITERATIONS.bit_length()) if 2**power < iterations]


def run(problem: Problem, settings: Settings, report: Callable[[int, float], None]) -> float:
    """The measure after the fit; `report` has it at every rung that is reached, and may raise to end the trial."""
    looked_at = set(rungs(settings.iterations))

    def watch(iteration: int, layer: LinearClassifier) -> None:
        if iteration in looked_at:
            report(iteration, measure(layer, problem))

    return measure(fit(problem.train, problem.train_label, problem.classes, settings, watch), problem)
