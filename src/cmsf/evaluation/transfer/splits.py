"""Train, val and test of a transfer data set: as they are provided, or drawn from each class by a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cmsf.data.labels import Labels, number_of_each_class, share_of_each_class
from cmsf.errors import BadInput

_A_FIFTH = 0.2


@dataclass(frozen=True)
class Rule:
    """What of each class goes where; None: as provided.

    val alone: so many, or such a share (rounded), of the images that are not for testing.
    train and val: so many of all images, and the others are for testing, or `test` of them.
    """

    train: int | None = None
    val: int | float | None = None
    test: int | None = None


@dataclass(frozen=True)
class Division:
    """Images by their place in the pool, and what a user should know of how they were divided."""

    train: Int[Tensor, " a"]
    val: Int[Tensor, " b"]
    test: Int[Tensor, " c"]
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> tuple[int, int, int]:
        return len(self.train), len(self.val), len(self.test)

    def with_notes(self, notes: Sequence[str]) -> Division:
        return replace(self, notes=(*notes, *self.notes))


def divide(name: str, provided: Mapping[str, Bool[Tensor, " n"]], labels: Labels, rule: Rule, seed: int) -> Division:
    """Divide a pool of images; `provided` says which of them the source has in train, val and test."""
    if rule.train is not None:
        return _divide_all(name, labels, rule, seed)
    notes: tuple[str, ...] = ()
    if "test" in provided:
        test = provided["test"] & labels.known
    else:
        test = share_of_each_class(labels, _A_FIFTH, seed).known
        notes = ("it has no images in test: a fifth of each class was drawn",)
    rest = labels.only(~test)
    if rule.val is None and "val" in provided:
        val = provided["val"] & rest.known
    else:
        if rule.val is None:
            notes = (*notes, "it has no images in val: a fifth of each class was drawn")
        val = _drawn(rest, _A_FIFTH if rule.val is None else rule.val, seed)
    return _checked(name, rest.known & ~val, val, test, notes)


def _divide_all(name: str, labels: Labels, rule: Rule, seed: int) -> Division:
    """The first images of each class, in an order by the seed, are for val, the next for training."""
    assert rule.train is not None
    assert isinstance(rule.val, int)
    most = int(labels.counts().max()) if len(labels) else 0
    both = rule.train + rule.val
    val = number_of_each_class(labels, rule.val, seed).known
    learned = number_of_each_class(labels, both, seed).known
    tested = number_of_each_class(labels, both + (most if rule.test is None else rule.test), seed).known
    return _checked(name, learned & ~val, val, tested & ~learned, ())


def _drawn(labels: Labels, amount: float, seed: int) -> Bool[Tensor, " n"]:
    if isinstance(amount, int):
        return number_of_each_class(labels, amount, seed).known
    return share_of_each_class(labels, amount, seed).known


def _checked(name: str, train: Tensor, val: Tensor, test: Tensor, notes: tuple[str, ...]) -> Division:
    parts = {"train": train, "val": val, "test": test}
    empty = [part for part, chosen in parts.items() if not chosen.any()]
    if empty:
        counts = ", ".join(f"{int(chosen.sum())} in {part}" for part, chosen in parts.items())
        raise BadInput(f"{name} has no labelled images left for {empty[0]} ({counts}); it needs all three")
    return Division(train.nonzero()[:, 0], val.nonzero()[:, 0], test.nonzero()[:, 0], notes)


def places(lengths: Mapping[str, int]) -> dict[str, Bool[Tensor, " n"]]:
    """Where in a pool the images of each part are, one part after the other."""
    total, start = sum(lengths.values()), 0
    found = {}
    for part, length in lengths.items():
        found[part] = torch.zeros(total, dtype=torch.bool)
        found[part][start : start + length] = True
        start += length
    return found
