"""Supervised contrast with a bank: SupCon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from cmsf.method.losses.base import FIRST, SECOND, LoggedSearch, Loss, LossInput, LossOutput, masked_logits, masked_mean
from cmsf.utils.constants import UNKNOWN


@dataclass(frozen=True)
class SupCon(Loss):
    """Tell one's own class from the others (Khosla et al. 2020, L_out of eq. 2):

        L_i = −1/|P_i| Σ_{p ∈ P_i} log exp(z_i·u_p/τ) / Σ_{a ∈ A_i} exp(z_i·u_a/τ)

    A_i is the bank, P_i its rows with the label of image i, and z_i the online projection of T2 x_i.

    include_target: whether u_i, the target's embedding of T1 x_i, is in A_i and P_i. A row without a label is in A_i
    alone; an image without a label, or with no row to be like, is left out of the mean.
    """

    temperature: float
    include_target: bool

    online = ((SECOND,),)
    target = ((FIRST,),)
    bank: ClassVar[Literal["before"]] = "before"
    learns_from_labels = True
    logged_search = LoggedSearch()

    def __call__(self, step: LossInput) -> LossOutput:
        assert step.rows.label is not None
        among = step.rows.exists.expand(len(step.query), -1) if self.include_target else step.others
        alike = among & (step.rows.label == step.label[:, None]) & (step.label != UNKNOWN)[:, None]
        scores, _ = masked_logits(step.online[SECOND].embedding, step.rows, among, self.temperature)
        chance = torch.where(alike, scores.log_softmax(1), 0).sum(1)
        count = alike.sum(1)
        return LossOutput(masked_mean(-chance / count.clamp_min(1), count > 0))
