"""One linear layer, fitted by L-BFGS for a given number of iterations: the transfer protocol's classifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.evaluation.layer import Layer, NotFinite, Objective

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
    watch: Callable[[int, Layer], None] | None = None,
) -> Layer:
    """Minimise mean cross-entropy + weight_decay / 2 |W|² from zero, by `iterations` steps of torch's L-BFGS.

    `watch` sees the layer after every step. Ends early once converged, or diverged: then with the last weights whose
    loss was finite.
    """
    present, place = label.unique(return_inverse=True)
    weight = features.new_zeros(len(present), features.shape[1])
    bias = features.new_zeros(len(present))
    objective = Objective(features, place, weight, bias, settings.weight_decay)
    optimiser = torch.optim.LBFGS([weight, bias], lr=settings.lr, max_iter=_INNER, history_size=_HISTORY)
    good = weight.clone(), bias.clone()

    def layer(diverged: bool = False) -> Layer:
        return Layer.of(*(good if diverged else (weight, bias)), present, classes, diverged)

    for iteration in range(1, settings.iterations + 1):
        asked = objective.asked
        try:
            optimiser.step(objective)
        except NotFinite:
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
