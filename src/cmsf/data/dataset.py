"""Decoded images with their paths and true classes, in splits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from cmsf.randomness import uniform
from cmsf.rows import UNKNOWN
from cmsf.views import Pictures

_HELD_OUT_SHARE = 10
_HOLDING_OUT = 0x5917  # what this use of the hash is for


@dataclass(frozen=True)
class Split:
    """Images by a stable index: the position in this split.

    truth: the source's own classes, UNKNOWN where there is none.
    """

    pictures: Pictures
    paths: Sequence[str]
    truth: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, index: Int[Tensor, " b"], device: torch.device | str = "cpu") -> Pictures:
        if isinstance(self.pictures, Tensor):
            return self.pictures[index].to(device, non_blocking=True)
        return [self.pictures[i].to(device, non_blocking=True) for i in index.tolist()]

    def part(self, index: Int[Tensor, " b"]) -> Split:
        return Split(self.batch(index), [self.paths[i] for i in index.tolist()], self.truth[index])

    @property
    def labelled(self) -> int:
        return int((self.truth != UNKNOWN).sum())


@dataclass(frozen=True)
class Dataset:
    """Images to learn from, and images to test on that are never learned from (none where nothing is labelled)."""

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split | None
    test_origin: str
    """Where the test images come from, in words."""
    notes: tuple[str, ...] = ()
    """What a user should know of how the source was read."""


class Source(ABC):
    """Something that images come from, looked at before it is decoded."""

    name: str

    @abstractmethod
    def typical_side(self) -> int:
        """The median of the images' shorter sides."""

    @abstractmethod
    def load(self, largest_side: int, seed: int) -> Dataset:
        """Decode everything; a file whose shorter side is above `largest_side` is shrunk to it."""


def hold_out(name: str, classes: tuple[str, ...], everything: Split, seed: int) -> Dataset:
    """A tenth of the labelled images becomes the test split, by a hash; unlabelled ones have nothing to test."""
    if not everything.labelled:
        return Dataset(name, classes, everything, None, "none: the images have no labels")
    index = torch.arange(len(everything))
    chance = uniform(1, seed, _HOLDING_OUT, index)[:, 0]
    labelled = (everything.truth != UNKNOWN).nonzero()[:, 0]
    count = -(-len(labelled) // _HELD_OUT_SHARE)
    test = labelled[chance[labelled].argsort(stable=True)[:count]].sort().values
    train = index[~torch.isin(index, test)]
    origin = f"{count} of {len(labelled)} labelled images, held out by seed {seed}"
    return Dataset(name, classes, everything.part(train), everything.part(test), origin)
