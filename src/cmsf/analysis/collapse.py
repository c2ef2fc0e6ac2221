"""Collapse: embeddings that come to say the same of every image, or to differ along one line alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

SPREAD_FLOOR = 0.02
RANK_FLOOR = 1.5
"""docs/decisions/23: what no healthy run comes near. Of two classes that are told apart, one line is all there is to
say, so what learns from labels has no least rank."""
CHECKS = 5
"""So many steps that are looked at, one after another, make a collapse."""


@dataclass(frozen=True)
class EmbeddingStats:
    """How much the embeddings of some images differ, and in how many directions."""

    spread: float
    effective_rank: float

    @classmethod
    def of(cls, embedding: Float[Tensor, "n d"]) -> EmbeddingStats:
        return cls(spread(embedding), effective_rank(embedding))


def spread(embedding: Float[Tensor, "n d"]) -> float:
    """1 for embeddings all over the sphere, 0 where all are the same: the sign of a collapse."""
    return float(embedding.cpu().double().var(0, unbiased=False).sum().sqrt())


def effective_rank(embedding: Float[Tensor, "n d"]) -> float:
    """exp(entropy of σ / Σσ), σ the singular values of the centred embeddings (Roy and Vetterli 2007): from 1, a line,
    to min(n, d), a ball. 0 where all are the same."""
    centred = embedding.cpu().double()
    centred = centred - centred.mean(0)
    # Of the smaller product, whose eigenvalues are the squares: many times faster than the singular values themselves.
    product = centred @ centred.T if len(centred) < centred.shape[1] else centred.T @ centred
    if not product.isfinite().all():
        return math.nan
    singular = torch.linalg.eigvalsh(product).clamp_min(0).sqrt()
    total = singular.sum()
    return float(torch.special.entr(singular / total).sum().exp()) if total > 0 else 0.0


@dataclass
class CollapseDetector:
    """Counts the steps on which the embeddings were hardly different; it goes into checkpoints."""

    min_rank: float = RANK_FLOOR
    below: int = 0
    said: bool = False

    def update(self, variety: EmbeddingStats) -> str | None:
        """What to say when they have been below a floor for too long, until it is `said`."""
        low_spread, low_rank = variety.spread < SPREAD_FLOOR, variety.effective_rank < self.min_rank
        self.below = self.below + 1 if low_spread or low_rank else 0
        if self.below < CHECKS or self.said:
            return None
        what = f"spread {variety.spread:.4f}, healthy is above {SPREAD_FLOOR}"
        if not low_spread:
            what = f"effective rank {variety.effective_rank:.2f}, healthy is above {self.min_rank}"
        return f"the embeddings of all images have become nearly the same ({what}, {CHECKS} looks in a row)"

    def state_dict(self) -> dict[str, Any]:
        return {"below": self.below, "said": self.said}

    def load_state_dict(self, plain: Any) -> None:
        """From what `plain` gave, or ValueError."""
        if not isinstance(plain, dict) or [type(plain.get(name)) for name in ("below", "said")] != [int, bool]:
            raise ValueError("not the state of a collapse detector")
        self.below, self.said = plain["below"], plain["said"]
