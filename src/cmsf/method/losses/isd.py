"""ISD: be as similar to other images as the target is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from cmsf.method.losses.base import FIRST, SECOND, LoggedSearch, Loss, LossInput, LossOutput, masked_logits, masked_mean


@dataclass(frozen=True)
class ISD(Loss):
    """Iterative similarity distillation (Tejankar et al. 2021): with anchors a_j from a bank,

        L = KL(t ‖ s),    t_j ∝ exp(u·a_j/τ_t),    s_j ∝ exp(v·a_j/τ)

    u is the target's embedding of T1 x and v the online prediction of T2 x. u enters the bank afterwards, and the
    image's older row is no anchor: the target's whole weight would be on it. Their equation has one temperature, their
    ResNet-50 a lower one for the target.
    """

    temperature: float
    target_temperature: float

    online = ((SECOND,),)
    target = ((FIRST,),)
    heads = frozenset({"projector", "predictor"})
    bank: ClassVar[Literal["after"]] = "after"
    logged_search = LoggedSearch()

    def __call__(self, step: LossInput) -> LossOutput:
        prediction = step.online[SECOND].prediction
        student, some = masked_logits(prediction, step.rows, step.others, self.temperature)
        teacher, _ = masked_logits(step.query.embedding, step.rows, step.others, self.target_temperature)
        student, teacher = student.log_softmax(1), teacher.log_softmax(1)
        # Where a row is ruled out both are -inf, and nothing is to be told apart.
        difference = torch.where(teacher == -torch.inf, 0, teacher - student)
        return LossOutput(masked_mean((teacher.exp() * difference).sum(1), some))
