"""The data sets of a transfer suite, the paper's ten or those of a YAML file, and their train, val and test images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cmsf.data import DataConfig, open_source
from cmsf.data.labels import Labels, number_of_each_class, share_of_each_class
from cmsf.data.source import Source, SourceSplit
from cmsf.data.sources.torchvision import default_root, is_on_disk
from cmsf.evaluation.metrics import ACCURACY, MEAN_PER_CLASS
from cmsf.utils.errors import BadInput, did_you_mean
from cmsf.utils.files import expand_user
from cmsf.utils.numbers import is_integer
from cmsf.utils.text import short_repr
from cmsf.utils.yaml import read_yaml

MEAN = "mean"
_KEYS = ("data", "like", "train", "val", "test", "measure")
_MEASURES = {"top-1": False, ACCURACY: False, MEAN_PER_CLASS: True}
_FIFTH = 0.2
Mask = Bool[Tensor, " n"]
"""Marks images of a source, all its parts in a row."""


@dataclass(frozen=True)
class SplitRule:
    """How many images of each class go into which split; None: as the source has them.

    val alone: so many, or such a share (rounded), of the images that are not in test.
    train and val: so many of all images; the others are test images, or `test` of them.
    """

    train: int | None = None
    val: int | float | None = None
    test: int | None = None


@dataclass(frozen=True)
class TransferSet:
    """A data set to transfer to.

    per_class: whether the metric is the mean over classes, or top-1.
    counts, classes: by the paper's table; the images in train, val and test. remark: why others may be right, too.
    lists: files with the paths of the training and test images of a source without splits. unlisted: the rule without.
    """

    name: str
    source: str
    rule: SplitRule = SplitRule()
    per_class: bool = False
    counts: tuple[int, int, int] | None = None
    classes: int | None = None
    remark: str = ""
    lists: tuple[str, str] | None = None
    unlisted: SplitRule = SplitRule()

    def differences(self, counts: tuple[int, int, int], classes: int) -> list[str]:
        """Returns a note for each number of images or classes that is not the paper's."""
        notes = []
        if self.counts is not None and counts != self.counts:
            now, then = (" / ".join(map(str, numbers)) for numbers in (counts, self.counts))
            notes.append(f"{now} images in train / val / test; the paper's table has {then}{self.remark}")
        if self.classes is not None and classes != self.classes:
            notes.append(f"{classes} classes; the paper's table has {self.classes}")
        return notes


PAPER = {
    known.name: known
    for known in (
        TransferSet("food101", "torchvision:Food101", SplitRule(val=75), classes=101, counts=(68175, 7575, 25250)),
        TransferSet("cifar10", "torchvision:CIFAR10", SplitRule(val=50), classes=10, counts=(49500, 500, 10000)),
        TransferSet("cifar100", "torchvision:CIFAR100", SplitRule(val=50), classes=100, counts=(45000, 5000, 10000)),
        TransferSet(
            "sun397",
            "torchvision:SUN397",
            SplitRule(val=10),
            counts=(15880, 3970, 19850),
            classes=397,
            lists=("Training_01.txt", "Testing_01.txt"),
            unlisted=SplitRule(train=40, val=10, test=50),
        ),
        TransferSet("cars", "torchvision:StanfordCars", SplitRule(val=0.2), classes=196, counts=(6509, 1635, 8041)),
        TransferSet(
            "aircraft",
            "torchvision:FGVCAircraft",
            SplitRule(val=0.2),
            per_class=True,
            classes=100,
            counts=(5367, 1300, 3333),
        ),
        TransferSet("dtd", "torchvision:DTD", classes=47, counts=(1880, 1880, 1880)),
        TransferSet(
            "pets", "torchvision:OxfordIIITPet", SplitRule(val=20), per_class=True, classes=37, counts=(2940, 740, 3669)
        ),
        TransferSet(
            "caltech101",
            "torchvision:Caltech101",
            SplitRule(train=25, val=5),
            per_class=True,
            counts=(2550, 510, 6084),
            classes=101,
            remark=", which are those with the background category; without it they are 2525 / 505 / 5647",
        ),
        TransferSet("flowers102", "torchvision:Flowers102", per_class=True, classes=102, counts=(1020, 1020, 6149)),
    )
}
"""The supplement's table "Transfer dataset details". For Caltech-101 its caption says 30 test images a class, while its
counts have 30 in train and val, as we do."""


def paper_suite(print_line: Callable[[str], None]) -> list[TransferSet]:
    """Returns those of the ten that are on this machine: the others are some 50 GB, too much to fetch unasked."""
    present = [known for known in PAPER.values() if is_on_disk(known.source.removeprefix("torchvision:"))]
    missing = [name for name, known in PAPER.items() if known not in present]
    if present and missing:
        print_line(f"left out, not found at {default_root()}: {', '.join(missing)}")
    if not present:
        raise BadInput(
            f"none of the paper's ten data sets is at {default_root()}; cmsf data torchvision:Flowers102 fetches one, "
            "and --suite sets.yaml names others, as birds: photos/birds"
        )
    return present


def read_suite(file: Path) -> list[TransferSet]:
    """Reads a YAML file of names and sources; a name of the paper's ten brings that set's splits and measure along."""
    content, root = read_yaml(file)
    if not isinstance(content, dict) or not content:
        raise BadInput(f"{file} names no data sets; it has lines such as birds: photos/birds")
    names = [str(key.value) for key, _ in root.value]  # as written: YAML may parse them to equal values, or not to text
    for name, count in Counter(names).items():
        if count > 1 or name == MEAN:
            raise BadInput(f"{file} has {name!r} {'twice' if name != MEAN else 'for a name, which the mean has'}")
    if len(names) != len(content):
        raise BadInput(f"{file} has {len(names)} names that YAML takes for {len(content)}; put them into quotes")
    return [_read_set(file, name, entry) for name, entry in zip(names, content.values(), strict=True)]


def _read_set(file: Path, name: str, entry: Any) -> TransferSet:
    place = f"{name} in {file}"
    settings = {"data": entry} if isinstance(entry, str) else entry
    if not isinstance(settings, dict) or not isinstance(settings.get("data"), str) or not settings["data"]:
        raise BadInput(f"{place} needs a source of images, as {name}: photos/{name} or {name}: {{data: photos/{name}}}")
    for key in settings:
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS, f"use {', '.join(_KEYS)}")
            raise BadInput(f"{place} has {short_repr(key)!r}; {hint}")
    paper_name = short_repr(settings.get("like", name))
    if "like" in settings and paper_name not in PAPER:
        hint = did_you_mean(paper_name, PAPER, f"use one of {', '.join(PAPER)}")
        raise BadInput(f"{place} has like {paper_name!r}, which is not one of the paper's; {hint}")
    if DataConfig(settings["data"]).runs_command:  # the file may be somebody else's
        raise BadInput(f"{place} is a shell command, {settings['data']}; give the shards by their paths or URLs")
    source = _resolve(file.parent, settings["data"])
    dataset = replace(PAPER.get(paper_name, TransferSet(name, "")), name=name, source=source)
    amounts = {key: _check_amount(place, key, settings[key]) for key in ("train", "val", "test") if key in settings}
    if "train" in amounts and not isinstance(amounts.get("val"), int):
        raise BadInput(f"{place} has train: {amounts['train']} images a class, and needs val as such a number too")
    if "test" in amounts and "train" not in amounts:
        raise BadInput(f"{place} has test: {amounts['test']} images a class, and needs train and val too")
    if amounts:
        dataset = replace(dataset, rule=SplitRule(**amounts), counts=None, classes=None, lists=None)
    if "measure" in settings:
        if str(settings["measure"]) not in _MEASURES:
            raise BadInput(f"{place} has measure {short_repr(settings['measure'])!r}; use top-1 or {MEAN_PER_CLASS}")
        dataset = replace(dataset, per_class=_MEASURES[str(settings["measure"])])
    return dataset


def _check_amount(place: str, key: str, value: Any) -> Any:
    count = is_integer(value) and value > 0
    share = key == "val" and isinstance(value, float) and 0 < value < 1
    if not (count or share):
        kinds = "a number of images a class, or a share below 1" if key == "val" else "a number of images a class"
        raise BadInput(f"{place} has {key}: {short_repr(value)}; expected {kinds}")
    return value


def _resolve(folder: Path, source: str) -> str:
    """Returns the source with its path relative to the YAML file's folder."""
    scheme, colon, _ = source.partition(":")
    if colon and scheme.isidentifier() and len(scheme) > 1:
        return source
    return str(folder / expand_user(source))


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
        """Returns a hash of images' paths, labels and splits, the same on every machine."""
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
    labels = Labels.from_names([name for part in parts.values() for name in part.names], source.classes)
    if dataset.lists is not None and paths and all(below_letter := [_below_letter(path) for path in paths]):
        labels = Labels.from_names(below_letter)
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


def _below_letter(path: str) -> str | None:
    """Returns the class of SUN397's a/abbey/x.jpg or a/apartment_building/outdoor/x.jpg, not the first folder."""
    *folders, _ = path.split("/")
    letter = next((place for place, name in enumerate(folders) if len(name) == 1), None)
    return None if letter is None else "/".join(folders[letter + 1 :])


def _read_lists(source: str, lists: tuple[str, str], paths: Sequence[str]) -> dict[str, Mask] | None:
    """Marks the training and test images by the lists beside them; None where there are no lists."""
    root = Path(source)
    if source.startswith("torchvision:"):
        _, _, root_name = source.partition("@")
        root = expand_user(root_name) if root_name else default_root()
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
        remaining = labels.keep(~test)
        if rule.val is None and "val" in provided:
            val = provided["val"] & remaining.known
        elif isinstance(rule.val, int):
            val = number_of_each_class(remaining, rule.val, seed).known
        else:
            val = share_of_each_class(remaining, _FIFTH if rule.val is None else rule.val, seed).known
            if rule.val is None:
                notes.append("it has no images in val: a fifth of each class was drawn")
        train = remaining.known & ~val
    splits = {split: mask.nonzero()[:, 0] for split, mask in (("train", train), ("val", val), ("test", test))}
    for empty in (split for split, index in splits.items() if not len(index)):
        counts = ", ".join(f"{len(index)} in {split}" for split, index in splits.items())
        raise BadInput(f"{name} has no labelled images left for {empty} ({counts}); it needs all three")
    return DataSplits(**splits, notes=tuple(notes))


def _draw_all(labels: Labels, rule: SplitRule, seed: int) -> tuple[Mask, Mask, Mask]:
    """Draws all splits: of each class, in an order by the seed, first val, then train, then test."""
    assert rule.train is not None
    assert isinstance(rule.val, int)
    in_both = rule.val + rule.train
    in_all = in_both + (len(labels) if rule.test is None else rule.test)
    val, both, every = (number_of_each_class(labels, count, seed).known for count in (rule.val, in_both, in_all))
    return both & ~val, val, every & ~both
