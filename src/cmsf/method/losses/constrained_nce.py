"""Constrained neighbours with a contrast: what NNCLR is to SimCLR, with the constraint of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from cmsf.method.constraints import NearCompanion
from cmsf.method.losses.base import SECOND, LossInput, masked_mean
from cmsf.method.losses.terms import NeighbourLoss, Term
from cmsf.method.search import Neighbours
from cmsf.utils.constants import UNKNOWN


@dataclass(frozen=True)
class ConstrainedNCE(NeighbourLoss):
    """Mean shift's pull with a contrast. With z̄_i the mean of S_i, and N_i the images of the batch unrelated to i,

        L_i = −log exp(v_i·z̄_i/τ) / (exp(v_i·z̄_i/τ) + Σ_{j ∈ N_i} exp(v_i·u_j/τ))

    N_i is the same in all terms: it holds neither image i, nor any that a term pulls i to or could (C_i by companion or
    label). Where a term relaxes to C_i = M, related are those of S_i alone.
    """

    temperature: float = 0.1

    def term_losses(self, step: LossInput, terms: Sequence[Term]) -> list[tuple[Float[Tensor, ""], Neighbours]]:
        found = [step.bank.search(step.query, term.constraint, term.k, term.include_query) for term in terms]
        related = step.query.index[:, None] == step.query.index
        for term, neighbours in zip(terms, found, strict=True):
            related |= _related(step, term, neighbours)
        return [(self._contrast(step, neighbours, related), neighbours) for neighbours in found]

    def _contrast(self, step: LossInput, neighbours: Neighbours, related: Bool[Tensor, "b b"]) -> Float[Tensor, ""]:
        v = step.online[SECOND].prediction
        positive = (v * neighbours.mean).sum(1, keepdim=True)
        negative = (v @ step.query.embedding.T).masked_fill(related, -torch.inf)
        scores = torch.cat([positive, negative], dim=1) / self.temperature
        first = torch.zeros(len(v), dtype=torch.long, device=v.device)
        return masked_mean(cross_entropy(scores, first, reduction="none"), neighbours.count > 0)


def _related(step: LossInput, term: Term, neighbours: Neighbours) -> Bool[Tensor, "b b"]:
    """Returns which images of the batch are in S_i, or in C_i where that is less than the bank."""
    image, label, k = step.query.index, step.query.label, term.k
    related = torch.zeros(len(image), len(image), dtype=torch.bool, device=image.device)
    if label is not None:
        related |= (label[:, None] == label) & (label != UNKNOWN)
    if isinstance(term.constraint, NearCompanion) and k is not None and (term.constraint.k or k) > k:
        whole = step.bank.search(step.query, term.constraint, term.constraint.k, term.include_query)
        known = step.query.has_companion  # of the others the whole bank is C_i
        related |= _among(step, whole.row) & known[:, None]
    if neighbours.row is None:  # S_i is the whole class, and of an image without a label the whole bank
        assert label is not None
        return related | (label == UNKNOWN)[:, None]
    return related | _among(step, neighbours.row)


def _among(step: LossInput, row: Int[Tensor, "b k"] | None) -> Bool[Tensor, "b b"]:
    """Returns which images of the batch are in these rows of the bank."""
    assert row is not None
    chosen = torch.where(row == UNKNOWN, UNKNOWN, step.bank.index[row])
    return (chosen[:, :, None] == step.query.index).any(1)
