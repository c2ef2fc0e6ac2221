"""One step of constrained mean shift, the paper's Section 2, or of another objective in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from cmsf.bank import MemoryBank
from cmsf.encoders import Encoded, Encoders
from cmsf.errors import BadInput
from cmsf.knowledge import Knowledge
from cmsf.objectives import SUPPORT, THIRD, Objective, Outcome, Step, Together
from cmsf.rows import Rows
from cmsf.views import Augmentation, Batch, Crop


class Diverged(BadInput):
    """The loss, or a weight, is no number any more; losses: what the last loss was made of."""

    def __init__(self, message: str, losses: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.losses = dict(losses or {})


@dataclass
class Learner:
    encoders: Encoders
    bank: MemoryBank
    knowledge: Knowledge
    objective: Objective
    views: dict[int, Augmentation]
    """How each view is made: T1 and T2 in the paper, and what else is asked for."""
    optimiser: Optimizer
    scaler: GradScaler = field(default_factory=lambda: GradScaler(enabled=False))
    """Keeps gradients of fp16 from vanishing; otherwise it does nothing."""

    @property
    def crops(self) -> dict[int, Crop]:
        """What each view of a step shows of an image, for those who cut it beforehand."""
        wanted = {view for together in (*self.objective.target, *self.objective.online) for view in together}
        if self.knowledge.wants_another_view:
            wanted.add(THIRD)
        return {view: self.views[view].crop for view in sorted(wanted)}

    def step(self, batch: Batch, target_momentum: float, support: Batch | None = None) -> tuple[Rows, Outcome]:
        """Learn from a batch, and from labelled images beside it where the objective asks for them.

        Returns the queries as they entered the bank, and what the objective said.
        """
        images = dict.fromkeys(self.views, batch) | ({} if support is None else {SUPPORT: support})
        target = self._pass(self.encoders.embed, self.objective.target, images)  # u = f(T1 x), no gradient
        online = self._pass(self.encoders.encode, self.objective.online, images)  # v = h(g(T2 x))
        first = next(view for view in (*target, *online) if view != SUPPORT)
        query = self._known((online | target)[first], batch)

        if self.objective.bank == "before":  # so that u itself is a candidate
            self.bank.enqueue(query)
        labelled = None if support is None else self._known(online[SUPPORT], support)
        outcome = self.objective(Step(query, self.bank.rows(), online, target, labelled))
        self._descend(outcome)
        if self.objective.bank == "after":
            self.bank.enqueue(query)
        self.encoders.follow(target_momentum)
        return query, outcome

    def _pass(
        self, encode: Callable[[Tensor], Encoded], passes: tuple[Together, ...], images: dict[int, Batch]
    ) -> dict[int, Encoded]:
        """What an encoder makes of each view, one pass for those that go together."""
        encoded: dict[int, Encoded] = {}
        for together in passes:
            views = [self.views[view](images[view], view) for view in together]
            whole = encode(views[0] if len(views) == 1 else torch.cat(views))
            encoded |= zip(together, whole.split([len(view) for view in views]), strict=True)
        return encoded

    def _known(self, encoded: Encoded, batch: Batch) -> Rows:
        """Rows of these images with what is known of them."""
        embedding = encoded.embedding.detach()
        rows = Rows(embedding, batch.index.to(embedding.device))
        return self.knowledge(rows, lambda: self.encoders.embed(self.views[THIRD](batch, THIRD)).embedding)

    def _descend(self, outcome: Outcome) -> None:
        loss = outcome.loss
        if not loss.isfinite():  # the weights are still those of before
            raise Diverged(f"the loss is {float(loss.detach())}", outcome.plain())
        self.optimiser.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimiser)
        self.scaler.update()
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1:
            raise Diverged("the gradients are no numbers at any scale", outcome.plain())
