"""SimCLR: the other images of the batch are the negatives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from cmsf.method.losses.base import FIRST, SECOND, Loss, LossInput, LossOutput


@dataclass(frozen=True)
class SimCLR(Loss):
    """NT-Xent (Chen et al. 2020, eq. 1), the mean over all 2n views i with j the other view of the same image:

    L_i = −log exp(z_i·z_j/τ) / Σ_{k≠i} exp(z_i·z_k/τ)
    """

    temperature: float

    online = ((FIRST, SECOND),)

    def __call__(self, step: LossInput) -> LossOutput:
        z = torch.cat([step.online[FIRST].embedding, step.online[SECOND].embedding])
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        scores = (z @ z.T / self.temperature).masked_fill(itself, -torch.inf)
        other_view = torch.arange(len(z), device=z.device).roll(len(z) // 2)
        return LossOutput(cross_entropy(scores, other_view))
