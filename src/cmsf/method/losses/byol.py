"""BYOL as it was published, both views through both encoders."""

from __future__ import annotations

from dataclasses import dataclass

from cmsf.method.losses.base import FIRST, SECOND, Loss, LossInput, LossOutput


@dataclass(frozen=True)
class SymmetricBYOL(Loss):
    """Predict the target's embedding of either view from the other (Grill et al. 2020, eq. 2 and its symmetric term):

        L = ‖v₂ − u₁‖² + ‖v₁ − u₂‖²,    ‖v − u‖² = 2 − 2 v·u for unit vectors

    The asymmetric half is mean shift with k = 1 and needs no class of its own.
    """

    online = ((FIRST,), (SECOND,))
    target = ((FIRST,), (SECOND,))
    heads = frozenset({"projector", "predictor"})

    def __call__(self, step: LossInput) -> LossOutput:
        first, second = (step.online[view].prediction for view in (FIRST, SECOND))
        near = (second * step.target[FIRST].embedding).sum(1) + (first * step.target[SECOND].embedding).sum(1)
        return LossOutput((4 - 2 * near).mean())
