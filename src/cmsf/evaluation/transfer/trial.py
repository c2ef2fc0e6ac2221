"""One trial: samples settings, fits a linear classifier by L-BFGS, reports its validation accuracy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.evaluation.linear import LinearClassifier, LogisticLoss, NonFiniteLoss
from cmsf.evaluation.metrics import Accuracy, in_top_k

MAX_ITERATIONS = 1000
_ITERATIONS = (1, MAX_ITERATIONS)
_LEARNING_RATES = (1e-6, 1.0)
_WEIGHT_DECAYS = (1e-9, 1.0)


@dataclass(frozen=True)
class Settings:
    """The settings that the protocol searches."""

    iterations: int
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class Problem:
    """Standardised features in CPU memory, and the metric to maximise: mean per class, or else top-1."""

    train: Float[Tensor, "n f"]
    train_label: Int[Tensor, " n"]
    val: Float[Tensor, "m f"]
    val_label: Int[Tensor, " m"]
    classes: int
    per_class: bool


def sample_settings(trial: Any) -> Settings:
    """Samples from the paper's ranges, all of them log-uniform; of an optuna.Trial, or what Ray passes for one."""
    return Settings(
        trial.suggest_int("iterations", *_ITERATIONS, log=True),
        trial.suggest_float("lr", *_LEARNING_RATES, log=True),
        trial.suggest_float("weight_decay", *_WEIGHT_DECAYS, log=True),
    )


def run_trial(problem: Problem, settings: Settings, report: Callable[[int, float], None]) -> float:
    """Returns the validation accuracy after the fit; `report` gets it at every rung, and may raise to end the trial."""
    reported = set(rungs(settings.iterations))

    def after_step(iteration: int, layer: LinearClassifier) -> None:
        if iteration in reported:
            report(iteration, validation_accuracy(layer, problem))

    layer = fit(problem.train, problem.train_label, problem.classes, settings, after_step)
    return validation_accuracy(layer, problem)


def rungs(iterations: int) -> list[int]:
    """Returns the iterations before the last after which a trial is compared with others: 1, 2, 4, 8, …"""
    return [2**power for power in range(MAX_ITERATIONS.bit_length()) if 2**power < iterations]


def validation_accuracy(layer: LinearClassifier, problem: Problem) -> float:
    """Returns per cent of the validation images, or its mean over their classes."""
    return Accuracy(in_top_k(layer(problem.val), problem.val_label, 1), problem.val_label, problem.per_class).percent


def fit(
    features: Float[Tensor, "n f"],
    label: Int[Tensor, " n"],
    classes: int,
    settings: Settings,
    after_step: Callable[[int, LinearClassifier], None] | None = None,
) -> LinearClassifier:
    """Minimises mean cross-entropy + weight_decay / 2 |W|² from zero, by `iterations` steps of torch's L-BFGS.

    Ends early once converged, or diverged: then with the last weights whose loss was finite.
    """
    present, place = label.unique(return_inverse=True)
    weight = features.new_zeros(len(present), features.shape[1])
    bias = features.new_zeros(len(present))
    loss = LogisticLoss(features, place, weight, bias, settings.weight_decay)
    optimizer = torch.optim.LBFGS([weight, bias], lr=settings.lr, max_iter=20, history_size=10)
    finite = weight.clone(), bias.clone()

    def layer(diverged: bool = False) -> LinearClassifier:
        return LinearClassifier.from_present(*finite, present, classes, diverged)

    for iteration in range(1, settings.iterations + 1):
        evaluations = loss.evaluations
        try:
            optimizer.step(loss)
        except NonFiniteLoss:
            return layer(diverged=True)
        # The step's last update is not followed by a loss of its own.
        if not (weight.isfinite().all() and bias.isfinite().all()):
            return layer(diverged=True)
        finite = weight.clone(), bias.clone()
        if after_step is not None:
            after_step(iteration, layer())
        # Converged: no gradient, or no descent. Torch sees these two before any update, and they alone end a step after
        # one evaluation. Its other reasons are small changes, which a tiny learning rate makes anywhere.
        if loss.evaluations == evaluations + 1:
            break
    return layer()
