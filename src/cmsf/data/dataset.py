"""The images that a run trains and is tested on, in splits, with truth and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256

import torch
from jaxtyping import Int
from torch import Tensor

from cmsf.data.images import Images, Unreadable
from cmsf.data.sampling import epoch_order
from cmsf.data.transforms import DecodedImages
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import track


@dataclass(frozen=True)
class Split:
    """Images by a stable index: the position in this split.

    images: decoded, or decoded whenever they are read.
    truth: the source's own classes, for evaluation and analysis alone; UNKNOWN where there is none.
    label: what training may know. No loss sees anything else.
    """

    images: DecodedImages | Images
    paths: Sequence[str]
    truth: Int[Tensor, " n"]
    label: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: Int[Tensor, " b"], min_side: int) -> DecodedImages:
        """Returns decoded images, on the CPU where they differ in size; files keep at least `min_side` a side."""
        images = self.images
        if isinstance(images, Images):
            with ThreadPoolExecutor() as pool:
                return list(pool.map(lambda i: images.decode(i, min_side), index.tolist()))
        return images[index] if isinstance(images, Tensor) else [images[i] for i in index.tolist()]

    def subset(self, index: Int[Tensor, " b"]) -> Split:
        if torch.equal(index, torch.arange(len(self))):
            return self  # all of them, and no copy
        images = self.images.subset(index) if isinstance(self.images, Images) else self.read(index, 0)
        return Split(images, [self.paths[i] for i in index.tolist()], self.truth[index], self.label[index])

    def order(self, seed: int, epoch: int) -> Int[Tensor, " n"]:
        """Returns the order in which an epoch goes through the images."""
        return epoch_order(self.images.blocks if isinstance(self.images, Images) else None, len(self), seed, epoch)

    def fingerprint(self) -> str | None:
        """Returns a hash of the pixels in memory, or of what is known of images that are not; None: nothing is."""
        images, digest = self.images, sha256()
        for i in track(range(len(self)), "looking for changes", len(self)):
            if isinstance(images, Images):
                fingerprint = images.fingerprint(i)
                if fingerprint is None:
                    return None
                digest.update(sha256(fingerprint).digest())
            else:
                digest.update(repr(tuple(images[i].shape)).encode())
                digest.update(images[i].contiguous().numpy().data)
        return digest.hexdigest()

    @property
    def with_truth(self) -> Int[Tensor, " m"]:
        """Indices of the images whose true class is known."""
        return (self.truth != UNKNOWN).nonzero()[:, 0]

    @property
    def labelled(self) -> Int[Tensor, " m"]:
        """Indices of the images whose label training may know."""
        return (self.label != UNKNOWN).nonzero()[:, 0]


@dataclass(frozen=True)
class Dataset:
    """Images to train on, and others to test on (none where nothing is labelled)."""

    name: str
    classes: tuple[str, ...]
    """What the numbers of `truth` are called."""
    label_names: tuple[str, ...]
    """What the numbers of `label` are called; other names than the classes where labels are given or coarse."""
    train: Split
    test: Split | None
    test_origin: str
    """Where the test images come from, in words."""
    notes: tuple[str, ...] = ()
    """What a user should know of how the source was read."""
    broken: tuple[tuple[str, Unreadable], ...] = ()
    """What was left out because it could not be read, and of which split."""
    in_memory: bool = True
    """Whether the images were decoded once and for all."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """What each class is called as a label, where labels are coarse."""

    def splits(self) -> list[tuple[str, Split]]:
        """Returns train, and test where there is one, by name."""
        return [("train", self.train), *([] if self.test is None else [("test", self.test)])]

    def as_label(self, truth: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Returns true classes by the numbers of `label`, UNKNOWN where no label is called so; never for training."""
        number = {name: i for i, name in enumerate(self.label_names)}
        numbers = [number.get(self.groups.get(name, name), UNKNOWN) for name in self.classes]
        return torch.tensor([*numbers, UNKNOWN])[truth]  # the last is for UNKNOWN, which is -1

    def unlabelled_classes(self) -> list[str]:
        """Returns classes of the images, by their names as labels, of which no training image is labelled.

        None where labels have names of their own, for then nobody knows what is missing.
        """
        train = self.train
        truth = torch.cat([split.truth for _, split in self.splits()])
        names = [self.classes[number] for number in truth[truth != UNKNOWN].unique().tolist()]
        named = {self.label_names[number] for number in train.label[train.labelled].unique().tolist()}
        expected = dict.fromkeys(self.groups.get(name, name) for name in names)
        return [name for name in expected if name not in named] if named & expected.keys() else []

    def check_every_class_labelled(self) -> None:
        """Refuses a class without labels: its images could only be taken for others."""
        missing = self.unlabelled_classes()
        if missing:
            first = f"{missing[0]!r}" if len(missing) == 1 else f"{len(missing)} classes, the first {missing[0]!r},"
            raise BadInput(
                f"no training image of {first} in {self.name} is labelled; label one of each class at least, "
                "or leave the images of such classes out"
            )

    def describe(self) -> list[str]:
        """Returns what a run prints of its images before it starts."""
        train = self.train
        known = f", {len(self.classes)} classes" if self.classes else ", no labels"
        lines = [f"{self.name}: {len(train)} training images{known}; test: {self.test_origin}", *self.notes]
        if not torch.equal(train.label, train.truth) or self.label_names != self.classes:
            names = len(train.label[train.labelled].unique())
            lines.append(f"labels to learn from: {len(train.labelled)} of {len(train)} images, {names} classes")
        if not self.in_memory:
            lines.append("images are decoded as they are read (--cache off)")
        if self.broken:
            lines.append(f"left out, for they cannot be read: {len(self.broken)} (broken.csv lists them)")
        return lines
