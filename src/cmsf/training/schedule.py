"""Learning rate and target momentum: functions of the step alone, so a resumed run needs no state for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cmsf.recipes.recipe import ResolvedRecipe


@dataclass(frozen=True)
class Schedule:
    recipe: ResolvedRecipe
    steps_per_epoch: int

    @property
    def total(self) -> int:
        return self.recipe.epochs * self.steps_per_epoch

    def lr(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero, or a tenth of the rate after each third."""
        warmup = self.recipe.warmup_epochs * self.steps_per_epoch
        if step < warmup:
            return self.recipe.lr * (step + 1) / warmup
        done, rest = step - warmup, self.total - warmup
        return self.recipe.lr * (
            _cosine(done / rest) if self.recipe.lr_schedule == "cosine" else 0.1 ** (3 * done // rest)
        )

    def target_momentum(self, step: int) -> float:
        """A cosine from `target_momentum` to `target_momentum_end`."""
        first, last = self.recipe.target_momentum, self.recipe.target_momentum_end
        return last + (first - last) * _cosine(step / self.total)


def _cosine(progress: float) -> float:
    """1 at the start, 0 at the end."""
    return 0.5 * (1 + math.cos(math.pi * progress))
