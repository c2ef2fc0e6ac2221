"""Opens the data sets of a suite, and splits their images into train, val and test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cmsf.data import open_source
from cmsf.data.labels import Labels, number_of_each_class, share_of_each_class
from cmsf.data.source import Source, SourceSplit
from cmsf.data.sources.torchvision import default_root
from cmsf.evaluation.transfer.suite import SplitRule, TransferSet
from cmsf.utils.errors import BadInput
from cmsf.utils.files import expand_user

_FIFTH = 0.2
Mask = Bool[Tensor, " n"]
"""Marks images of a source, all its parts in a row."""


@dataclass(frozen=True)
class DataSplits:
    """The images of each split by their place among all, and what a user should know of how they were split."""

    train: Int[Tensor, " a"]
    val: Int[Tensor, " b"]
    test: Int[Tensor, " c"]
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> tuple[int, int, int]:
        return len(self.train), len(self.val), len(self.test)


@dataclass(frozen=True)
class PreparedSet:
    """A data set, opened and split; no image has been decoded yet."""

    dataset: TransferSet
    parts: dict[str, SourceSplit]
    labels: Labels
    splits: DataSplits

    @property
    def notes(self) -> list[str]:
        return [*self.splits.notes, *self.dataset.differences(self.splits.counts, len(self.labels.names))]

    def fingerprint(self) -> str:
        """A hash of images' paths, labels and splits, the same on every machine."""
        digest = sha256("\n".join(path for part in self.parts.values() for path in part.images.paths).encode())
        for numbers in (self.labels.number, self.splits.train, self.splits.val):
            digest.update(numbers.numpy().tobytes())
        digest.update(f"{self.labels.names} {self.dataset.per_class}".encode())
        return digest.hexdigest()


def open_set(dataset: TransferSet, seed: int) -> PreparedSet:
    try:
        return prepare(dataset, open_source(dataset.source), seed)
    except BadInput as error:
        raise BadInput(f"data set {dataset.name}: {error}") from None


def prepare(dataset: TransferSet, source: Source, seed: int) -> PreparedSet:
    """Splits the source's images by the data set's lists where it has them, else by its rule."""
    parts = dict(source.ordered_splits())
    paths = [path for part in parts.values() for path in part.images.paths]
    labels = _read_labels(dataset, paths, [name for part in parts.values() for name in part.names], source.classes)
    provided, rule, notes = part_masks({name: len(part) for name, part in parts.items()}), dataset.rule, source.notes
    if dataset.lists is not None and "test" not in parts:
        listed = _read_lists(dataset.source, dataset.lists, paths)
        if listed is None:
            rule = dataset.unlisted
            notes = (*notes, f"{' and '.join(dataset.lists)} not found: the splits were drawn")
        else:
            provided, labels = listed, labels.keep(listed["train"] | listed["test"])
    splits = split_images(dataset.name, provided, labels, rule, seed)
    return PreparedSet(dataset, parts, labels, replace(splits, notes=(*notes, *splits.notes)))


def part_masks(lengths: Mapping[str, int]) -> dict[str, Mask]:
    """Marks the images of each part."""
    part = torch.arange(len(lengths)).repeat_interleave(torch.tensor(list(lengths.values())))
    return {name: part == number for number, name in enumerate(lengths)}


def _read_labels(
    dataset: TransferSet, paths: Sequence[str], names: Sequence[str | None], classes: tuple[str, ...]
) -> Labels:
    """Labels every image. SUN397's folders are a/abbey and a/apartment_building/outdoor: its classes are what is below
    the letter, and not the first folder."""
    below_letter = [_below_letter(path) for path in paths] if dataset.lists is not None else []
    return Labels.from_names(below_letter) if below_letter and all(below_letter) else Labels.from_names(names, classes)


def _below_letter(path: str) -> str | None:
    *folders, _ = path.split("/")
    letter = next((place for place, name in enumerate(folders) if len(name) == 1), None)
    return None if letter is None else "/".join(folders[letter + 1 :])


def _read_lists(source: str, lists: tuple[str, str], paths: Sequence[str]) -> dict[str, Mask] | None:
    """Marks the training and test images by the lists beside them; None where there are no lists."""
    root = Path(source)
    if source.startswith("torchvision:"):
        _, _, given = source.partition("@")
        root = expand_user(given) if given else default_root()
    folders = [root, root.parent, *(root / name for name in ("SUN397", "sun397", "Partitions"))]
    for folder in folders:
        if all((folder / name).is_file() for name in lists):
            return {part: _listed(folder / name, paths) for part, name in zip(("train", "test"), lists, strict=True)}
    return None


def _listed(file: Path, paths: Sequence[str]) -> Mask:
    """Marks the paths that end like a line of the file, which begins with a slash."""
    lines = {line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()}
    depths = {line.count("/") for line in lines}
    return torch.tensor([any("/" + "/".join(path.split("/")[-depth:]) in lines for depth in depths) for path in paths])


def split_images(name: str, provided: Mapping[str, Mask], labels: Labels, rule: SplitRule, seed: int) -> DataSplits:
    """Splits labelled images by a rule; `provided` marks those that the source has in train, val and test."""
    notes: list[str] = []
    if rule.train is not None:
        train, val, test = _draw_all(labels, rule, seed)
    else:
        if "test" in provided:
            test = provided["test"] & labels.known
        else:
            test = share_of_each_class(labels, _FIFTH, seed).known
            notes.append("it has no images in test: a fifth of each class was drawn")
        rest = labels.keep(~test)
        if rule.val is None and "val" in provided:
            val = provided["val"] & rest.known
        elif isinstance(rule.val, int):
            val = number_of_each_class(rest, rule.val, seed).known
        else:
            val = share_of_each_class(rest, _FIFTH if rule.val is None else rule.val, seed).known
            if rule.val is None:
                notes.append("it has no images in val: a fifth of each class was drawn")
        train = rest.known & ~val
    masks = {"train": train, "val": val, "test": test}
    empty = [split for split, mask in masks.items() if not mask.any()]
    if empty:
        counts = ", ".join(f"{int(mask.sum())} in {split}" for split, mask in masks.items())
        raise BadInput(f"{name} has no labelled images left for {empty[0]} ({counts}); it needs all three")
    return DataSplits(train.nonzero()[:, 0], val.nonzero()[:, 0], test.nonzero()[:, 0], tuple(notes))


def _draw_all(labels: Labels, rule: SplitRule, seed: int) -> tuple[Mask, Mask, Mask]:
    """Draws all splits: of each class, in an order by the seed, first val, then train, then test."""
    assert rule.train is not None
    assert isinstance(rule.val, int)
    most = int(labels.counts().max()) if len(labels) else 0
    in_val, in_both = rule.val, rule.val + rule.train
    in_all = in_both + (most if rule.test is None else rule.test)
    val, both, every = (number_of_each_class(labels, count, seed).known for count in (in_val, in_both, in_all))
    return both & ~val, val, every & ~both
