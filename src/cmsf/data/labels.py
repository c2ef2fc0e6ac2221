"""Labels, and how they are made fewer, noisier or coarser, by a seed and each image's index."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cmsf.data.imagenet import coarse_groups
from cmsf.data.source import sort_classes
from cmsf.data.sources.table import read_mapping
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput
from cmsf.utils.files import expand_user
from cmsf.utils.rng import uniform

_CHOOSING, _CORRUPTING = 0x5AE1 << 40, 0x0153 << 40  # what these uses of the hash are for; no epoch is ever so high


@dataclass(frozen=True)
class Labels:
    """A number for each image, UNKNOWN where it has none, and what the numbers are called."""

    number: Int[Tensor, " n"]
    names: tuple[str, ...]

    @classmethod
    def from_names(cls, names: Sequence[str | None], classes: tuple[str, ...] | None = None) -> Labels:
        classes = sort_classes(names) if classes is None else classes
        number: dict[str | None, int] = {name: i for i, name in enumerate(classes)} | {None: UNKNOWN}
        return cls(torch.tensor([number[name] for name in names], dtype=torch.int64), classes)

    def __len__(self) -> int:
        return len(self.number)

    def to_names(self) -> list[str | None]:
        return [None if number == UNKNOWN else self.names[number] for number in self.number.tolist()]

    @property
    def known(self) -> Bool[Tensor, " n"]:
        return self.number != UNKNOWN

    def counts(self) -> Int[Tensor, " c"]:
        """Returns how many images each class has."""
        return self.number[self.known].bincount(minlength=len(self.names))

    def keep(self, mask: Bool[Tensor, " n"]) -> Labels:
        """Returns the labels of some images alone."""
        return replace(self, number=torch.where(mask, self.number, UNKNOWN))

    def keep_classes(self, classes: Set[str], origin: str) -> Labels:
        """Returns the labels of some classes alone, which are then all there are."""
        names = [name if name in classes else None for name in self.to_names()]
        if not any(names):
            raise BadInput(f"none of the {len(classes)} classes of {origin} is among {', '.join(self.names[:3])} …")
        return Labels.from_names(names, tuple(name for name in self.names if name in classes))


def share_of_each_class(labels: Labels, share: float, seed: int) -> Labels:
    """Keeps a share of every class, rounded, and one image at least."""
    return _sample_each_class(labels, lambda count: max(1, math.floor(share * count + 0.5)), seed)


def number_of_each_class(labels: Labels, number: int, seed: int) -> Labels:
    """Keeps `number` images of every class, or all where it has fewer."""
    return _sample_each_class(labels, lambda count: number, seed)


def add_noise(labels: Labels, rate: float, seed: int) -> Labels:
    """Replaces each label with probability `rate`, independently, by one of the other classes, all as likely."""
    present = labels.counts().nonzero()[:, 0]
    if len(present) < 2:
        raise BadInput(f"label noise needs two classes or more, and there are {len(present)}")
    chance, shift = uniform(2, seed, _CORRUPTING, torch.arange(len(labels))).double().unbind(1)
    step = 1 + (shift * (len(present) - 1)).long()  # 1 … classes − 1 further on is every other class
    place = torch.searchsorted(present, labels.number)
    replaced = labels.known & (chance < rate)
    return replace(labels, number=torch.where(replaced, present[(place + step) % len(present)], labels.number))


def coarsen(labels: Labels, group: Mapping[str, str], origin: str) -> Labels:
    """Joins classes into groups; every class that occurs must have one."""
    missing = [name for name, count in zip(labels.names, labels.counts().tolist(), strict=True)
               if count and name not in group]  # fmt: skip
    if missing:
        raise BadInput(
            f"{origin} has no group for {len(missing)} of {len(labels.names)} classes (the first is {missing[0]!r}); "
            "it needs every class by the name it has in the data"
            + ("; WordNet's are ImageNet's, for others give a CSV of class,group" if origin == "wordnet" else "")
        )
    return Labels.from_names([None if name is None else group[name] for name in labels.to_names()])


def read_groups(coarse: str) -> Mapping[str, str]:
    """Returns groups by class: `wordnet` for ImageNet's by the paper's rule, or a CSV of class,group."""
    return coarse_groups() if coarse == "wordnet" else read_mapping(expand_user(coarse))


def modify_labels(
    labels: Labels, *, coarse: str = "none", share: float = 1.0, per_class: int = 0, noise: float = 0.0, seed: int = 0
) -> Labels:
    """Makes labels coarser, then fewer, then noisier: so the rate of noise is that of the labels one trains with."""
    if coarse != "none":
        labels = coarsen(labels, read_groups(coarse), coarse)
    if share < 1:
        labels = share_of_each_class(labels, share, seed)
    if per_class:
        labels = number_of_each_class(labels, per_class, seed)
    if noise:
        labels = add_noise(labels, noise, seed)
    return labels


def _sample_each_class(labels: Labels, sample_size: Callable[[int], int], seed: int) -> Labels:
    chance = uniform(2, seed, _CHOOSING, torch.arange(len(labels))).double()
    order = (chance[:, 0] + chance[:, 1] / 2**24).argsort(stable=True)
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for number, count in enumerate(labels.counts().tolist()):
        if count:
            mask[order[labels.number[order] == number][: sample_size(count)]] = True
    return labels.keep(mask)
