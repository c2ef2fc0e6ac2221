"""Terms that keep the predictions of a batch apart, which a pull alone does not."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

_SQUARED = 2.0
"""The factor t of the uniformity's exponent, as published."""
_NEAREST = 1e-3


def uniformity(v: Float[Tensor, "b d"]) -> Float[Tensor, ""]:
    """How evenly unit vectors cover the sphere (Wang and Isola 2020, eq. 5), less when they do:

    log 1/(n(n−1)) Σ_{i≠j} exp(−2 ‖v_i − v_j‖²)
    """
    itself = torch.eye(len(v), dtype=torch.bool, device=v.device)
    squared = (2 - 2 * v @ v.T).masked_fill(itself, torch.inf)
    return (-_SQUARED * squared).flatten().logsumexp(0) - math.log(len(v) * (len(v) - 1))


def koleo(v: Float[Tensor, "b d"]) -> Float[Tensor, ""]:
    """Kozachenko and Leonenko's entropy with its sign changed (Sablayrolles et al. 2019, eq. 5):

    −1/n Σ_i log min_{j≠i} ‖v_i − v_j‖

    Vectors nearer than a thousandth count as that near: the gradient of the logarithm has no bound.
    """
    with torch.no_grad():
        itself = torch.eye(len(v), dtype=torch.bool, device=v.device)
        nearest = (v @ v.T).masked_fill(itself, -torch.inf).argmax(1)
    return -0.5 * (v - v[nearest]).square().sum(1).clamp_min(_NEAREST**2).log().mean()


SPREADS: dict[str, Callable[[Float[Tensor, "b d"]], Float[Tensor, ""]]] = {"uniformity": uniformity, "koleo": koleo}
