"""SimSiam: BYOL without a target encoder."""

from __future__ import annotations

from dataclasses import dataclass

from cmsf.method.losses.base import FIRST, SECOND, Loss, LossInput, LossOutput


@dataclass(frozen=True)
class SimSiam(Loss):
    """Predict either view's embedding, held still, from the other (Chen and He 2021, eq. 1 to 4):

    L = −½ p₁·stopgrad(z₂) − ½ p₂·stopgrad(z₁)
    """

    online = ((FIRST,), (SECOND,))
    heads = frozenset({"projector", "predictor"})

    def __call__(self, step: LossInput) -> LossOutput:
        first, second = step.online[FIRST], step.online[SECOND]
        near = (first.prediction * second.embedding.detach()).sum(1)
        near = near + (second.prediction * first.embedding.detach()).sum(1)
        return LossOutput(-near.mean() / 2)
