"""InfoNCE with a bank of negatives: MoCo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn.functional import cross_entropy

from cmsf.method.losses.base import FIRST, SECOND, LoggedSearch, Loss, LossInput, LossOutput


@dataclass(frozen=True)
class InfoNCE(Loss):
    """Tell the image's other view from other images (He et al. 2020, eq. 1):

        L = −log exp(q·k₊/τ) / Σ_{i=0..K} exp(q·k_i/τ)

    q is the online projection of T2 x; k₊, the target's of T1 x, is one of the K + 1 keys, and the rest are the bank,
    which k₊ enters afterwards. Their queue is a small part of the data; a bank as long as the data still holds the
    image's key of the epoch before, which is no negative and is left out.
    """

    temperature: float

    online = ((SECOND,),)
    target = ((FIRST,),)
    bank: ClassVar[Literal["after"]] = "after"
    logged_search = LoggedSearch()

    def __call__(self, step: LossInput) -> LossOutput:
        q, key = step.online[SECOND].embedding, step.query.embedding
        positive = (q * key).sum(1, keepdim=True) / self.temperature
        negative = (q @ step.rows.embedding.T / self.temperature).masked_fill(~step.others, -torch.inf)
        first = torch.zeros(len(q), dtype=torch.long, device=q.device)
        return LossOutput(cross_entropy(torch.cat([positive, negative], dim=1), first))
