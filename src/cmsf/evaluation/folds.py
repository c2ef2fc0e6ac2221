"""Which labelled images are held out: to choose a setting, or what to train."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cmsf.utils.rng import uniform

FOLDS = 5
ENOUGH_FOR_A_TENTH = 5000
_HOLD_OUT = 0x11EA << 40  # what this use of the hash is for; no epoch is ever so high


def validation_folds(count: int) -> list[Bool[Tensor, " n"]]:
    """Marks the images to hold out: a tenth by a hash, or all of them in five folds where they are few."""
    chance = _chance(count)
    if count >= ENOUGH_FOR_A_TENTH:
        return [chance < 0.1]
    place = chance.argsort(stable=True).argsort()  # of equal sizes, for a few images may all fall into one fold
    return [place % FOLDS == number for number in range(min(FOLDS, count))]


def stratified_folds(label: Int[Tensor, " n"]) -> list[Bool[Tensor, " n"]]:
    """Marks the images to hold out, from each class its share: all in five folds, or a tenth where they are many.

    A class keeps an image to learn from in every fold, so the only one of a class is never held out. No folds where no
    class has two.
    """
    label = label.cpu()
    order = _chance(len(label)).argsort(stable=True)
    order = order[label[order].argsort(stable=True)]
    order = order[label.bincount()[label[order]] > 1]
    folds, used = (10, 1) if len(label) >= ENOUGH_FOR_A_TENTH else (FOLDS, FOLDS)
    # The images of a class are neighbours in this order, so its first ones fall into different folds.
    held_out = [order[number::folds] for number in range(min(used, len(order)))]
    return [torch.zeros(len(label), dtype=torch.bool).index_fill(0, index, True) for index in held_out]


def _chance(count: int) -> Tensor:
    return uniform(1, _HOLD_OUT, torch.arange(count))[:, 0]
