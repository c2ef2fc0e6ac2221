"""One step of constrained mean shift: the paper's Section 2."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor
from torch.optim import Optimizer

from cmsf.bank import MemoryBank
from cmsf.encoders import Encoders
from cmsf.knowledge import Knowledge
from cmsf.objectives import MeanShift, Outcome
from cmsf.rows import Rows
from cmsf.views import Augmentation, Pictures

WEAK, STRONG, THIRD = 0, 1, 2


@dataclass
class Learner:
    encoders: Encoders
    bank: MemoryBank
    knowledge: Knowledge
    objective: MeanShift
    weak: Augmentation
    strong: Augmentation
    optimiser: Optimizer
    seed: int

    def step(
        self, pictures: Pictures, index: Int[Tensor, " b"], epoch: int, target_momentum: float
    ) -> tuple[Rows, Outcome]:
        """Learn from a batch; returns the queries as they entered the bank, and what the objective said."""

        def weak_view(view: int) -> Tensor:
            return self.weak(pictures, index, seed=self.seed, epoch=epoch, view=view)

        strong_view = self.strong(pictures, index, seed=self.seed, epoch=epoch, view=STRONG)

        embedding = self.encoders.embed(weak_view(WEAK))  # u = f(T1 x), no gradient
        query = Rows(embedding, index.to(embedding.device))
        query = self.knowledge(query, another_view=lambda: self.encoders.embed(weak_view(THIRD)))
        prediction = self.encoders.predict(strong_view)  # v = h(g(T2 x))

        # u enters before the search, so k = 1 finds u itself: BYOL.
        self.bank.enqueue(query)
        outcome = self.objective(prediction, query, self.bank)

        self.optimiser.zero_grad(set_to_none=True)
        outcome.loss.backward()
        self.optimiser.step()
        self.encoders.follow(target_momentum)
        return query, outcome
