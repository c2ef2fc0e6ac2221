"""Labelled images beside a batch, for objectives that want some of them at every step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from cmsf.randomness import permutation
from cmsf.rows import UNKNOWN

_DRAWING = 0x5099 << 40  # what this use of the hash is for; no epoch is ever so high


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
        if not self.classes:
            labelled = (self.label != UNKNOWN).nonzero()[:, 0]
            return labelled[permutation(len(labelled), self.seed, _DRAWING, step)[: self.images]]
        chosen = permutation(len(self._members), self.seed, _DRAWING, step)[: self.classes].tolist()
        return torch.cat([self._some_of(number, step) for number in chosen])

    def _some_of(self, number: int, step: int) -> Int[Tensor, " images"]:
        member = self._members[number]
        return member[permutation(len(member), self.seed, _DRAWING, step, number)[: self.images]]

    @cached_property
    def _members(self) -> list[Int[Tensor, " m"]]:
        return [(self.label == number).nonzero()[:, 0] for number in self.label.unique() if number != UNKNOWN]
