"""The method as one function, and as the loss that a recipe trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cmsf.method.bank import MemoryBank
from cmsf.method.constraints import Constraint, Unconstrained
from cmsf.method.losses.base import LossInput
from cmsf.method.losses.terms import NeighbourLoss, Term
from cmsf.method.rows import Rows
from cmsf.method.search import Neighbours, search


def constrained_mean_shift(
    prediction: Float[Tensor, "b d"],
    query: Rows,
    bank: MemoryBank | Rows,
    constraint: Constraint = Unconstrained(),
    k: int | None = 5,
    include_query: bool = True,
) -> tuple[Float[Tensor, ""], Neighbours]:
    """Pull each prediction to the mean of its related neighbours (Sec. 2):

        L = 1/n Σ_i (2 − 2 v_i · 1/|S_i| Σ_{z ∈ S_i} z),    S_i = top-k of C_i by similarity to u_i

    The paper prints the similarity as something to minimise; with unit vectors, this is the mean squared distance.

    prediction: v, unit rows, differentiable.
    query: u with index, and label or companion where the constraint needs them.
    bank: a MemoryBank, or plain Rows with one row an image; it must hold the queries, for u_i is a candidate itself.
    constraint: which rows are related; Unconstrained() is mean shift, and with k = 1 BYOL.
    k: how many neighbours; None for all of C_i.
    include_query: whether the query's own row (same index) may be in S_i.

    Returns the loss, and the neighbours chosen. A query with an empty S_i is left out of the mean.
    """
    if k is not None and k < 1:
        raise ValueError(f"k = {k} neighbours make no mean; use 1 or more, or None for all")
    with torch.no_grad():
        if isinstance(bank, Rows):
            if bank.repeats:
                raise ValueError("an image has two rows among these; keep one row an image, as MemoryBank does")
            neighbours = search(query, bank, constraint, k, include_query)
        else:
            neighbours = bank.search(query, constraint, k, include_query)
    distance = 2 - 2 * (prediction * neighbours.mean).sum(1)
    pulled = neighbours.count > 0
    return (distance * pulled).sum() / pulled.sum().clamp_min(1), neighbours


@dataclass(frozen=True)
class MeanShift(NeighbourLoss):
    """A weighted sum of constrained mean shifts; CMSF self is ½ without and ½ with the constraint.

    u enters the bank before the search, so k = 1 finds u itself: BYOL. With multi-crop, the
    predictions of all crops are averaged; the loss is linear in v, so this equals averaging the losses.
    """

    @property
    def linear_in_predictions(self) -> bool:  # type: ignore[override]
        return self.spread is None

    def term_losses(self, step: LossInput, terms: Sequence[Term]) -> list[tuple[Float[Tensor, ""], Neighbours]]:
        prediction = torch.stack([crop.prediction for crop in step.online.values()]).mean(0)
        return [
            constrained_mean_shift(prediction, step.query, step.bank, term.constraint, term.k, term.include_query)
            for term in terms
        ]
