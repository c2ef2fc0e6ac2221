"""PAWS: classes by similarity to labelled images, the same for all views."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot

from cmsf.method.losses.base import EXTRA, FIRST, SECOND, SUPPORT, Loss, LossInput, LossOutput, ViewGroup


@dataclass(frozen=True)
class PAWS(Loss):
    """Predict view assignments with support samples (Assran et al. 2021, eq. 1 to 4): with support (z_s, y_s),

        p = Σ_s softmax(z·z_s/τ)_s y_s,    ρ(p)_k ∝ p_k^(1/T),
        L = 1/2n Σ_i (H(ρ(p_i⁺), p_i) + H(ρ(p_i), p_i⁺)) − H(p̄),    p̄ = the mean of all ρ(p)

    The classes are those of the support; their labels are smoothed. The targets ρ(p) are held still, and made of
    projections where the p that learn are made of predictions, as in the authors' code. A small crop's target is the
    mean of the two large views'.
    """

    temperature: float
    sharpening: float
    smoothing: float = 0.1
    extra_crops: int = 0

    heads = frozenset({"projector", "predictor"})
    learns_from_labels = True

    @property
    def online(self) -> tuple[ViewGroup, ...]:  # type: ignore[override]
        large: ViewGroup = (SUPPORT, FIRST, SECOND)
        return (large, self._small) if self.extra_crops else (large,)

    @property
    def _small(self) -> ViewGroup:
        return tuple(range(EXTRA, EXTRA + self.extra_crops))

    def __call__(self, step: LossInput) -> LossOutput:
        classes, member = step.support_label.unique(return_inverse=True)
        share = self.smoothing / len(classes)
        assignment = one_hot(member, len(classes)).to(step.query.embedding) * (1 - self.smoothing) + share

        views = (FIRST, SECOND, *self._small)
        support = step.online[SUPPORT]
        chances = {v: self._classes(step.online[v].prediction, support.prediction, assignment) for v in views}
        with torch.no_grad():
            sharp = {
                v: self._sharpened(self._classes(step.online[v].embedding, support.embedding, assignment))
                for v in (FIRST, SECOND)
            }
        aims = {FIRST: sharp[SECOND], SECOND: sharp[FIRST]}
        mean_aim = (sharp[FIRST] + sharp[SECOND]) / 2
        agreement = torch.cat([-(aims.get(v, mean_aim) * chances[v].log()).sum(1) for v in views]).mean()
        mean = torch.cat([self._sharpened(chances[v]) for v in views]).mean(0)
        entropy = -torch.xlogy(mean, mean).sum()
        return LossOutput(agreement - entropy, {"agreement": agreement, "entropy": entropy})

    def _classes(
        self, z: Float[Tensor, "b d"], support: Float[Tensor, "s d"], assignment: Float[Tensor, "s c"]
    ) -> Float[Tensor, "b c"]:
        return (z @ support.T / self.temperature).softmax(1) @ assignment

    def _sharpened(self, chance: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        powered = chance ** (1 / self.sharpening)
        return powered / powered.sum(1, keepdim=True)
