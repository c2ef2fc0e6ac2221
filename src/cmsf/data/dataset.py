"""What a run learns from and is judged on: images in splits, with what is known of them."""

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
from cmsf.utils.progress import track


@dataclass(frozen=True)
class Split:
    """Images by a stable index: the position in this split.

    pictures: decoded, or images that are decoded whenever they are read.
    truth: the source's own classes, for evaluation and analysis alone; UNKNOWN where there is none.
    label: what training may know. No loss sees anything else.
    """

    images: DecodedImages | Images
    paths: Sequence[str]
    truth: Int[Tensor, " n"]
    label: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: Int[Tensor, " b"], enough: int) -> DecodedImages:
        """Decoded images, on the CPU where they are of many sizes; files keep `enough` pixels a side at least."""
        pictures = self.images
        if isinstance(pictures, Images):
            with ThreadPoolExecutor() as pool:
                return list(pool.map(lambda i: pictures.decode(i, enough), index.tolist()))
        return pictures[index] if isinstance(pictures, Tensor) else [pictures[i] for i in index.tolist()]

    def subset(self, index: Int[Tensor, " b"]) -> Split:
        if torch.equal(index, torch.arange(len(self))):
            return self  # all of them, and no copy
        if isinstance(self.images, Images):
            pictures: DecodedImages | Images = self.images.subset(index)
        else:
            pictures = self.read(index, 0)
        return Split(pictures, [self.paths[i] for i in index.tolist()], self.truth[index], self.label[index])

    def order(self, seed: int, epoch: int) -> Int[Tensor, " n"]:
        """In what order an epoch goes through the images."""
        return epoch_order(self.images.blocks if isinstance(self.images, Images) else None, len(self), seed, epoch)

    def fingerprint(self) -> str | None:
        """A hash of the pixels in memory, or of what is known of images that are not; None where nothing is."""
        pictures, found = self.images, sha256()
        for i in track(range(len(self)), "looking for changes", len(self)):
            if isinstance(pictures, Images):
                mark = pictures.mark(i)
                if mark is None:
                    return None
                found.update(sha256(mark).digest())
            else:
                found.update(repr(tuple(pictures[i].shape)).encode())
                found.update(pictures[i].contiguous().numpy().data)
        return found.hexdigest()

    @property
    def with_truth(self) -> Int[Tensor, " m"]:
        """The images whose true class is known."""
        return (self.truth != UNKNOWN).nonzero()[:, 0]

    @property
    def labelled(self) -> Int[Tensor, " m"]:
        """The images whose label training may know."""
        return (self.label != UNKNOWN).nonzero()[:, 0]


@dataclass(frozen=True)
class Dataset:
    """Images to learn from, and images to test on that are never learned from (none where nothing is labelled)."""

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

    def as_label(self, truth: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """True classes by the numbers of `label`, UNKNOWN where no label is called so; for analysis and judging."""
        number = {name: place for place, name in enumerate(self.label_names)}
        called = [number.get(self.groups.get(name, name), UNKNOWN) for name in self.classes]
        return torch.tensor([*called, UNKNOWN])[truth]  # the last is for UNKNOWN, which is -1

    def unlabelled_classes(self) -> list[str]:
        """Classes of the images, under their names as labels, of which no training image is labelled.

        None where labels have names of their own, for then nobody knows what is missing.
        """
        train = self.train
        there = train.truth if self.test is None else torch.cat([train.truth, self.test.truth])
        wanted = [self.classes[number] for number in there[there != UNKNOWN].unique().tolist()]
        named = {self.label_names[number] for number in train.label[train.labelled].unique().tolist()}
        expected = dict.fromkeys(self.groups.get(name, name) for name in wanted)
        return [name for name in expected if name not in named] if named & expected.keys() else []
