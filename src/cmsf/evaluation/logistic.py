"""A linear classifier on few labels: logistic regression on L2-normalised features, as regularised as they need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from cmsf.evaluation.features import LAYER
from cmsf.evaluation.folds import ENOUGH_FOR_A_TENTH, stratified_folds
from cmsf.evaluation.linear import LinearClassifier, fit_path
from cmsf.evaluation.metrics import in_top_k
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import progress_bar

C_GRID = tuple(10 ** (power / 2) for power in range(9))
"""From scikit-learn's default, 1, to 10,000: each fit starts where the one before ended."""
LOGISTIC = "logistic regression, C and temperature chosen on held-out images"
_BISECTIONS = 30
_TOLERANCE = 1e-6
"""Of the gradient, which features of length 1 keep small."""


@dataclass(frozen=True)
class LogisticFit:
    """A classifier of all images, how it was chosen, and whether its like classified the held-out images correctly."""

    layer: LinearClassifier
    choice: dict[str, Any]
    correct: Bool[Tensor, " m"]
    """Fold after fold."""

    def __str__(self) -> str:
        return f"LBFGS to convergence, C {self.choice['C']:.3g}, temperature {self.choice['temperature']:.3g}"


@dataclass(frozen=True)
class _Trial:
    """Held-out predictions at one C: whether each is right, and its loss at the temperature that suits them all."""

    c: float
    temperature: float
    correct: Bool[Tensor, " m"]
    loss: Float[Tensor, " m"]

    @classmethod
    def of(cls, c: float, scores: Float[Tensor, "m p"], label: Int[Tensor, " m"]) -> _Trial:
        temperature = fit_temperature(scores, label)
        loss = cross_entropy(scores.double() / temperature, label, reduction="none")
        return cls(c, temperature, in_top_k(scores, label, 1), loss)


_UNTRIED = _Trial(C_GRID[0], 1.0, torch.empty(0, dtype=torch.bool), torch.empty(0))


def fit_logistic(features: Float[Tensor, "n f"], label: Int[Tensor, " n"], classes: int) -> LogisticFit:
    """Minimises C Σ cross-entropy + |W|² / 2 on L2-normalised features, then divides the scores by a temperature.

    Both are chosen in stratified folds; with one label a class there are none, and both are 1.
    """
    if len(label) < 2:
        raise BadInput(f"a linear classifier needs at least 2 labelled training images, and there are {len(label)}")
    present, place = label.unique(return_inverse=True)
    mean = features.mean(0)
    centred = features - mean  # the bias takes up the shift: the same minimum, in fewer steps
    held_out = [rows.nonzero()[:, 0].to(label.device) for rows in stratified_folds(label)]
    trials: list[_Trial] = []
    with progress_bar("regularisation", len(C_GRID) + 1) as update:
        paths = [_fit_path(centred, place, C_GRID, _complement(rows, len(label))) for rows in held_out]
        for c, *layers in zip(C_GRID, *paths, strict=True) if paths else ():
            scores = [layer(centred[rows]).cpu() for layer, rows in zip(layers, held_out, strict=True)]
            trials.append(_Trial.of(c, torch.cat(scores), place[torch.cat(held_out)].cpu()))
            losses = [float(trial.loss.mean()) for trial in trials]
            update(len(trials), f"held-out loss {losses[-1]:.3f}")
            if len(trials) > 2 and min(losses[-2:]) > min(losses):
                break  # two in a row are worse: weaker ones would only overfit more, and take the longest
        chosen = strongest_near_best(trials) if trials else _UNTRIED
        update(len(C_GRID), f"C = {chosen.c:.3g} on all images")
        (layer,) = _fit_path(centred, place, (chosen.c,))
    # One layer for both, and the temperature: (W (x − mean) + b) / T.
    weight = layer.weight.cpu().double() / chosen.temperature
    bias = layer.bias.cpu().double() / chosen.temperature - weight @ mean.cpu().double()
    choice = {
        "C": chosen.c,
        "temperature": chosen.temperature,
        "chosen on": _describe_folds(len(held_out), len(label)),
        "validation accuracy by C": {f"{trial.c:.3g}": 100 * float(trial.correct.double().mean()) for trial in trials},
        "validation loss by C": {f"{trial.c:.3g}": float(trial.loss.mean()) for trial in trials},
        "layer": LAYER,
    }
    whole = LinearClassifier.from_present(weight.to(features), bias.to(features), present, classes)
    return LogisticFit(whole, choice, chosen.correct)


def strongest_near_best(trials: list[_Trial]) -> _Trial:
    """Returns the trial of the least C whose loss is within one standard error of the least loss, image by image.

    A few held-out images tell apart only what differs much; where they cannot, scikit-learn's default stays.
    """
    best = min(trials, key=lambda trial: float(trial.loss.mean()))
    for trial in trials:
        excess = trial.loss - best.loss
        if excess.mean() <= excess.std(correction=0) / math.sqrt(len(excess)):
            return trial
    return best


def fit_temperature(scores: Float[Tensor, "m p"], label: Int[Tensor, " m"]) -> float:
    """Returns the T, from 0.001 to 1000, that minimises the cross-entropy of softmax(scores / T) (Guo et al. 2017).

    To the images comes one of which nothing is known, as Platt (1999) smooths his targets: where all predictions are
    right, a few images are no reason to be certain.
    """
    count, classes = scores.shape
    scores = scores.double()
    target = (one_hot(label, classes) * count + 1 / classes) / (count + 1)
    low, high = -3.0, 3.0  # powers of ten of 1 / T, in which the loss is convex
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        slope = ((scores * 10**middle).softmax(1) - target).mul_(scores).sum()
        low, high = (low, middle) if slope > 0 else (middle, high)
    return float(10 ** (-(low + high) / 2))


def _fit_path(
    features: Float[Tensor, "n f"], place: Int[Tensor, " n"], cs: Sequence[float], rows: Int[Tensor, " m"] | None = None
) -> Iterator[LinearClassifier]:
    """Yields the minimum on these rows (None: all) for each C."""
    count = len(place) if rows is None else len(rows)
    decays = [1 / (count * c) for c in cs]
    return (layer for _, layer in fit_path(features, place, int(place.max()) + 1, decays, rows, _TOLERANCE))


def _complement(index: Int[Tensor, " m"], count: int) -> Int[Tensor, " k"]:
    kept = torch.ones(count, dtype=torch.bool, device=index.device).index_fill(0, index, False)
    return kept.nonzero()[:, 0]


def _describe_folds(folds: int, count: int) -> str:
    if not folds:
        return "nothing: no class has two labels"
    held_out = "a tenth" if count >= ENOUGH_FOR_A_TENTH else f"{folds} folds"
    return f"{held_out} of the training images, stratified, by a hash"
