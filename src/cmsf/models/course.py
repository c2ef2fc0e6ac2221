"""A course of SGD through few examples: batch, epochs and steps for as many as there are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import SGD


@dataclass(frozen=True, kw_only=True)
class SGDSettings:
    """Few examples make few steps, which would teach nothing: they are gone through more often, for `least_steps`.

    The last incomplete batch of an epoch is dropped.
    """

    epochs: int
    lr: float
    batch: int = 256
    momentum: float = 0.9
    weight_decay: float = 1e-4
    least_steps: int

    def for_examples(self, count: int) -> tuple[int, int]:
        """Batch size and epochs."""
        batch = self.batch_for(count)
        return batch, max(self.epochs, -(-self.least_steps // (count // batch)))

    def batch_for(self, count: int) -> int:
        return min(self.batch, count)

    def optimiser(self, parameters: Iterable[nn.Parameter]) -> SGD:
        return SGD(parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
