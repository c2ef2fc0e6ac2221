"""Statistics of embeddings, and collapse: they become the same for every image, or differ along one line only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

SPREAD_FLOOR = 0.02
RANK_FLOOR = 1.5
"""No healthy run comes near these (docs/decisions/23). One line is enough to separate two classes, so training with
labels has no minimal rank."""
CHECKS = 5
"""Consecutive checks below a floor that make a collapse."""
_BLOCK = 1024


@dataclass(frozen=True)
class EmbeddingStats:
    """How much embeddings differ, and in how many directions."""

    spread: float
    effective_rank: float

    @classmethod
    def of(cls, embedding: Float[Tensor, "n d"]) -> EmbeddingStats:
        return cls(spread(embedding), effective_rank(embedding))


def spread(embedding: Float[Tensor, "n d"]) -> float:
    """Returns the root of the total variance: 1 for embeddings all over the sphere, 0 where all are the same."""
    return float(embedding.cpu().double().var(0, unbiased=False).sum().sqrt())


def effective_rank(embedding: Float[Tensor, "n d"]) -> float:
    """Returns exp(entropy of σ / Σσ), σ the singular values of the centred embeddings (Roy and Vetterli 2007).

    From 1, a line, to min(n, d), a ball; 0 where all are the same.
    """
    centred = embedding.cpu().double()
    centred = centred - centred.mean(0)
    # The eigenvalues of the smaller product are their squares: many times faster than the singular values themselves.
    product = centred @ centred.T if len(centred) < centred.shape[1] else centred.T @ centred
    if not product.isfinite().all():
        return math.nan
    singular = torch.linalg.eigvalsh(product).clamp_min(0).sqrt()
    total = singular.sum()
    return float(torch.special.entr(singular / total).sum().exp()) if total > 0 else 0.0


def alignment(first: Float[Tensor, "n d"], second: Float[Tensor, "n d"]) -> float:
    """Returns the mean squared distance between two views of the same images (Wang and Isola 2020, α = 2)."""
    return float((first.cpu().double() - second.cpu().double()).square().sum(1).mean())


def uniformity(embedding: Float[Tensor, "n d"]) -> float:
    """Returns log of the mean of exp(-2 |x - y|²) over pairs (Wang and Isola 2020): 0 for a point, -4 for a sphere."""
    count = len(embedding)
    if count < 2:
        return math.nan
    embedding = embedding.cpu().double()
    total = 0.0
    for start in range(0, count, _BLOCK):
        block = embedding[start : start + _BLOCK]
        # Without the pairs of an image and itself, which are exp(0) each.
        total += float(torch.exp(-2 * torch.cdist(block, embedding).square()).sum()) - len(block)
    return math.log(max(total, math.ulp(0.0)) / (count * (count - 1)))


@dataclass
class CollapseDetector:
    """Counts consecutive checks below a floor; its state goes into checkpoints."""

    min_rank: float = RANK_FLOOR
    below: int = 0
    said: bool = False

    def update(self, stats: EmbeddingStats) -> str | None:
        """Returns a message when too many checks in a row were below a floor, until it was `said`."""
        low_spread, low_rank = stats.spread < SPREAD_FLOOR, stats.effective_rank < self.min_rank
        self.below = self.below + 1 if low_spread or low_rank else 0
        if self.below < CHECKS or self.said:
            return None
        value = f"spread {stats.spread:.4f}, healthy is above {SPREAD_FLOOR}"
        if not low_spread:
            value = f"effective rank {stats.effective_rank:.2f}, healthy is above {self.min_rank}"
        return f"the embeddings of all images have become nearly the same ({value}, {CHECKS} checks in a row)"

    def state_dict(self) -> dict[str, Any]:
        return {"below": self.below, "said": self.said}

    def load_state_dict(self, state: Any) -> None:
        """Raises ValueError where this is not such a state."""
        if not isinstance(state, dict) or [type(state.get(name)) for name in ("below", "said")] != [int, bool]:
            raise ValueError("not the state of a collapse detector")
        self.below, self.said = state["below"], state["said"]
