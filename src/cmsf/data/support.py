"""Labelled images beside a batch, for objectives that want some of them at every step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from cmsf.randomness import permutation
from cmsf.rows import UNKNOWN

# What these uses of the hash are for; no epoch is ever so high.
_DRAWING, _CHOOSING = 0x5099 << 40, 0x509A << 40


@dataclass(frozen=True)
class Support:
    """Labelled images drawn anew for every step, none twice in one: a hash of seed and step, so nothing is remembered.

    classes: so many classes a step, and `images` of each; 0: `images` in all, whatever their class.
    """

    label: Int[Tensor, " n"]
    classes: int
    images: int
    seed: int

    def __call__(self, step: int) -> Int[Tensor, " s"]:
        shuffled = self._labelled[permutation(len(self._labelled), self.seed, _DRAWING, step)]
        if not self.classes:
            return shuffled[: self.images]
        by_class = shuffled[self.label[shuffled].argsort(stable=True)]
        start = self._starts[permutation(len(self._starts), self.seed, _CHOOSING, step)[: self.classes]]
        return by_class[start[:, None] + torch.arange(self.images)].flatten()

    @cached_property
    def _labelled(self) -> Int[Tensor, " m"]:
        return (self.label != UNKNOWN).nonzero()[:, 0]

    @cached_property
    def _starts(self) -> Int[Tensor, " c"]:
        """Where each class begins when the labelled images are in the order of their classes."""
        _, count = self.label[self._labelled].unique(return_counts=True)
        start: Tensor = count.cumsum(0) - count
        return start
