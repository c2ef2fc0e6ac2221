"""One step of constrained mean shift: the paper's Section 2."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from cmsf.bank import MemoryBank
from cmsf.encoders import Encoders
from cmsf.errors import BadInput
from cmsf.knowledge import Knowledge
from cmsf.objectives import MeanShift, Outcome
from cmsf.rows import Rows
from cmsf.views import Augmentation, Batch, Crop

WEAK, STRONG, THIRD, EXTRA = 0, 1, 2, 3
"""The views by number; extra crops count on from EXTRA."""


class Diverged(BadInput):
    """The loss, or a weight, is no number any more."""


@dataclass
class Learner:
    encoders: Encoders
    bank: MemoryBank
    knowledge: Knowledge
    objective: MeanShift
    weak: Augmentation
    strong: Augmentation
    optimiser: Optimizer
    extra: Augmentation | None = None
    extra_crops: int = 0
    """Multi-crop: so many more views by `extra`, of another size, to the online encoder alone."""
    scaler: GradScaler = field(default_factory=lambda: GradScaler(enabled=False))
    """Keeps gradients of fp16 from vanishing; otherwise it does nothing."""

    @property
    def crops(self) -> dict[int, Crop]:
        """What each view of a step shows of an image, for those who cut it beforehand."""
        crops: dict[int, Crop] = {WEAK: self.weak.crop, STRONG: self.strong.crop}
        if self.knowledge.wants_another_view:
            crops[THIRD] = self.weak.crop
        if self.extra is not None:
            crops |= {EXTRA + number: self.extra.crop for number in range(self.extra_crops)}
        return crops

    def step(self, batch: Batch, target_momentum: float) -> tuple[Rows, Outcome]:
        """Learn from a batch; returns the queries as they entered the bank, and what the objective said."""
        embedding = self.encoders.embed(self.weak(batch, WEAK))  # u = f(T1 x), no gradient
        query = Rows(embedding, batch.index.to(embedding.device))
        query = self.knowledge(query, another_view=lambda: self.encoders.embed(self.weak(batch, THIRD)))
        prediction = self._predict(batch)

        # u enters before the search, so k = 1 finds u itself: BYOL.
        self.bank.enqueue(query)
        outcome = self.objective(prediction, query, self.bank)

        if not outcome.loss.isfinite():
            raise Diverged(f"the loss is {float(outcome.loss.detach())}")  # the weights are still those of before

        self.optimiser.zero_grad(set_to_none=True)
        self.scaler.scale(outcome.loss).backward()
        self.scaler.step(self.optimiser)
        self.scaler.update()
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1:
            raise Diverged("the gradients are no numbers at any scale")
        self.encoders.follow(target_momentum)
        return query, outcome

    def _predict(self, batch: Batch) -> Float[Tensor, "b d"]:
        """v = h(g(T2 x)); with extra crops their mean, for the loss, linear in v, is then the mean over crops."""
        prediction = self.encoders.predict(self.strong(batch, STRONG))
        if self.extra is None:
            return prediction
        small = torch.cat([self.extra(batch, EXTRA + number) for number in range(self.extra_crops)])
        # One pass for all crops of a size, as in SwAV.
        others = self.encoders.predict(small).unflatten(0, (self.extra_crops, -1))
        return torch.cat([prediction[None], others]).mean(0)
