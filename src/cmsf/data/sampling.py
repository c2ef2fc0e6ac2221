"""Sampling: the seeded order of an epoch, and labelled images beside a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from cmsf.utils.constants import UNKNOWN
from cmsf.utils.rng import permutation

_BLOCKS_AT_A_TIME = 8
_DRAWING, _CHOOSING = 0x5099 << 40, 0x509A << 40  # what these uses of the hash are for; no epoch is ever so high


def epoch_order(blocks: Int[Tensor, " n"] | None, count: int, seed: int, epoch: int) -> Int[Tensor, " n"]:
    """Shuffles all images; where they lie in blocks, within a few blocks at a time, and the blocks too.

    It depends on the seed and the epoch alone, so a run can be taken up at any step.
    """
    order = permutation(count, seed, epoch)
    if blocks is None:
        return order
    turn = permutation(int(blocks.max()) + 1, seed, epoch, _BLOCKS_AT_A_TIME)
    window = torch.empty_like(turn)
    window[turn] = torch.arange(len(turn)) // _BLOCKS_AT_A_TIME
    return order[window[blocks[order]].argsort(stable=True)]


@dataclass(frozen=True)
class SupportSampler:
    """Draws labelled images anew for every step, none twice in one, by a hash of seed and step: it has no state.

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
