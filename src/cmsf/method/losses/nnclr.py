"""NNCLR: the positive is a neighbour, the negatives are the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from cmsf.method.constraints import Unconstrained
from cmsf.method.losses.base import FIRST, SECOND, LoggedSearch, Loss, LossInput, LossOutput, masked_mean
from cmsf.method.rows import Rows


@dataclass(frozen=True)
class NNCLR(Loss):
    """SimCLR whose positive is the nearest embedding in a bank (Dwibedi et al. 2021, eq. 3 and Algorithm 1):

        L_i = −log exp(NN(z_i)·p_i⁺/τ) / Σ_k exp(NN(z_i)·p_k⁺/τ)

    with p⁺ the predictions of the other views, as the mean of both directions. There is no target encoder. The first
    view's z enters the bank after the loss, so it is no neighbour of itself; nor is the image's older row, which a bank
    as long as the data would still hold. An image that finds no neighbour, as in the first step, is left out.
    """

    temperature: float

    online = ((FIRST, SECOND),)
    heads = frozenset({"projector", "predictor"})
    selects_neighbours = True
    bank: ClassVar[Literal["after"]] = "after"
    logged_search = LoggedSearch(k=1)

    def __call__(self, step: LossInput) -> LossOutput:
        first, second = step.online[FIRST], step.online[SECOND]
        there = self._contrast(step, first.embedding, second.prediction)
        back = self._contrast(step, second.embedding, first.prediction)
        return LossOutput((there + back) / 2)

    def _contrast(
        self, step: LossInput, z: Float[Tensor, "b d"], prediction: Float[Tensor, "b d"]
    ) -> Float[Tensor, ""]:
        query = Rows(z.detach(), step.query.index)
        nearest = step.bank.search(query, Unconstrained(), k=1, include_query=False)
        scores = nearest.mean @ prediction.T / self.temperature
        itself = torch.arange(len(z), device=z.device)
        return masked_mean(cross_entropy(scores, itself, reduction="none"), nearest.count > 0)
