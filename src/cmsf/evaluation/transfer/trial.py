"""One trial of the search: draw settings, fit, and report the validation measure on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from cmsf.evaluation.layer import Layer
from cmsf.evaluation.measures import Judged, hits
from cmsf.evaluation.transfer.lbfgs import Settings, fit

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


def measure(layer: Layer, problem: Problem) -> float:
    """Per cent of validation images, or its mean over their classes."""
    return Judged(hits(layer(problem.val), problem.val_label, 1), problem.val_label, problem.per_class).figure


def rungs(iterations: int) -> list[int]:
    """After which iterations a trial is looked at before its end: 1, 2, 4, 8, …"""
    return [2**power for power in range(MOST_ITERATIONS.bit_length()) if 2**power < iterations]


def run(problem: Problem, settings: Settings, report: Callable[[int, float], None]) -> float:
    """The measure after the fit; `report` has it at every rung that is reached, and may raise to end the trial."""
    looked_at = set(rungs(settings.iterations))

    def watch(iteration: int, layer: Layer) -> None:
        if iteration in looked_at:
            report(iteration, measure(layer, problem))

    return measure(fit(problem.train, problem.train_label, problem.classes, settings, watch), problem)
