"""The data sets of a transfer suite, the paper's ten or those of a YAML file, and how each is split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cmsf.data import DataRequest
from cmsf.data.labels import Labels, number_of_each_class, share_of_each_class
from cmsf.data.sources.torchvision import default_root, is_on_disk
from cmsf.evaluation.metrics import ACCURACY, MEAN_PER_CLASS
from cmsf.utils.errors import BadInput, did_you_mean
from cmsf.utils.files import expand_user
from cmsf.utils.numbers import is_integer
from cmsf.utils.text import short_repr
from cmsf.utils.yaml import read_yaml

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
    rest = labels.keep(~test)
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


@dataclass(frozen=True)
class TransferSet:
    """A data set to transfer to."""

    name: str
    source: str
    rule: Rule = Rule()
    per_class: bool = False
    """Whether it is measured by the mean over classes, or by top-1."""
    counts: tuple[int, int, int] | None = None
    """Images in train, val and test by the paper's table."""
    classes: int | None = None
    """Likewise."""
    remark: str = ""
    """Why other counts may be right, too."""
    lists: tuple[str, str] | None = None
    """Files of paths, for training and for testing, beside images that come without splits."""
    unlisted: Rule = Rule()
    """The rule where those are missing."""

    def differences(self, counts: tuple[int, int, int], classes: int) -> list[str]:
        """What to say where images or classes are not as many as the paper's."""
        found = []
        if self.counts is not None and counts != self.counts:
            now, then = (" / ".join(map(str, numbers)) for numbers in (counts, self.counts))
            found.append(f"{now} images in train / val / test; the paper's table has {then}{self.remark}")
        if self.classes is not None and classes != self.classes:
            found.append(f"{classes} classes; the paper's table has {self.classes}")
        return found


PAPER = {
    known.name: known
    for known in (
        TransferSet("food101", "torchvision:Food101", Rule(val=75), classes=101, counts=(68175, 7575, 25250)),
        TransferSet("cifar10", "torchvision:CIFAR10", Rule(val=50), classes=10, counts=(49500, 500, 10000)),
        TransferSet("cifar100", "torchvision:CIFAR100", Rule(val=50), classes=100, counts=(45000, 5000, 10000)),
        TransferSet(
            "sun397",
            "torchvision:SUN397",
            Rule(val=10),
            counts=(15880, 3970, 19850),
            classes=397,
            lists=("Training_01.txt", "Testing_01.txt"),
            unlisted=Rule(train=40, val=10, test=50),
        ),
        TransferSet("cars", "torchvision:StanfordCars", Rule(val=0.2), classes=196, counts=(6509, 1635, 8041)),
        TransferSet(
            "aircraft",
            "torchvision:FGVCAircraft",
            Rule(val=0.2),
            per_class=True,
            classes=100,
            counts=(5367, 1300, 3333),
        ),
        TransferSet("dtd", "torchvision:DTD", classes=47, counts=(1880, 1880, 1880)),
        TransferSet(
            "pets", "torchvision:OxfordIIITPet", Rule(val=20), per_class=True, classes=37, counts=(2940, 740, 3669)
        ),
        TransferSet(
            "caltech101",
            "torchvision:Caltech101",
            Rule(train=25, val=5),
            per_class=True,
            counts=(2550, 510, 6084),
            classes=101,
            remark=", which are those with the background category; without it they are 2525 / 505 / 5647",
        ),
        TransferSet("flowers102", "torchvision:Flowers102", per_class=True, classes=102, counts=(1020, 1020, 6149)),
    )
}
"""The supplement's table "Transfer dataset details". For Caltech-101 its caption says 30 test images a class, and its
counts have 30 to train and validate on, as we do."""

MEAN = "mean"
_KEYS = ("data", "like", "train", "val", "test", "measure")
_MEASURES = {"top-1": False, ACCURACY: False, MEAN_PER_CLASS: True}


def paper_suite(say: Callable[[str], None]) -> list[TransferSet]:
    """Those of the ten that are on this machine: the others are some 50 GB, which nobody wants by surprise."""
    found = [known for known in PAPER.values() if is_on_disk(known.source.removeprefix("torchvision:"))]
    missing = [name for name, known in PAPER.items() if known not in found]
    if found and missing:
        say(f"left out, for they are not at {default_root()}: {', '.join(missing)}")
    if not found:
        raise BadInput(
            f"none of the paper's ten data sets is at {default_root()}; cmsf data torchvision:Flowers102 fetches one, "
            "and --suite sets.yaml names others, as birds: photos/birds"
        )
    return found


def read_suite(file: Path) -> list[TransferSet]:
    """A YAML of names and sources; a name of the paper's ten brings that set's splits and measure along."""
    content, root = read_yaml(file)
    if not isinstance(content, dict) or not content:
        raise BadInput(f"{file} names no data sets; it has lines such as birds: photos/birds")
    names = [str(key.value) for key, _ in root.value]  # what YAML makes of them may be equal, or no text
    for name, count in Counter(names).items():
        if count > 1 or name == MEAN:
            raise BadInput(f"{file} has {name!r} {'twice' if name != MEAN else 'for a name, which the mean has'}")
    if len(names) != len(content):
        raise BadInput(f"{file} has {len(names)} names that YAML takes for {len(content)}; put them into quotes")
    return [_read_set(file, name, entry) for name, entry in zip(names, content.values(), strict=True)]


def _read_set(file: Path, name: str, entry: Any) -> TransferSet:
    where = f"{name} in {file}"
    settings = {"data": entry} if isinstance(entry, str) else entry
    if not isinstance(settings, dict) or not isinstance(settings.get("data"), str) or not settings["data"]:
        raise BadInput(f"{where} needs a source of images, as {name}: photos/{name} or {name}: {{data: photos/{name}}}")
    for key in settings:
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS, f"use {', '.join(_KEYS)}")
            raise BadInput(f"{where} has {short_repr(key)!r}; {hint}")
    like = short_repr(settings.get("like", name))
    if "like" in settings and like not in PAPER:
        hint = did_you_mean(like, PAPER, f"use one of {', '.join(PAPER)}")
        raise BadInput(f"{where} has like {like!r}, which is not one of the paper's; {hint}")
    if DataRequest(settings["data"]).runs_command:  # the file may be somebody else's
        raise BadInput(f"{where} is a shell command, {settings['data']}; give the shards by their paths or URLs")
    found = replace(PAPER.get(like, TransferSet(name, "")), name=name, source=_from(file.parent, settings["data"]))
    amounts = {key: _amount(where, key, settings[key]) for key in ("train", "val", "test") if key in settings}
    if "train" in amounts and not isinstance(amounts.get("val"), int):
        raise BadInput(f"{where} has train: {amounts['train']} images a class, and needs val as such a number too")
    if "test" in amounts and "train" not in amounts:
        raise BadInput(f"{where} has test: {amounts['test']} images a class, and needs train and val too")
    if amounts:
        found = replace(found, rule=Rule(**amounts), counts=None, classes=None, lists=None)
    if "measure" in settings:
        if str(settings["measure"]) not in _MEASURES:
            raise BadInput(f"{where} has measure {short_repr(settings['measure'])!r}; use top-1 or {MEAN_PER_CLASS}")
        found = replace(found, per_class=_MEASURES[str(settings["measure"])])
    return found


def _amount(where: str, key: str, value: Any) -> Any:
    whole = is_integer(value) and value > 0
    share = key == "val" and isinstance(value, float) and 0 < value < 1
    if not (whole or share):
        kinds = "a number of images a class, or a share below 1" if key == "val" else "a number of images a class"
        raise BadInput(f"{where} has {key}: {short_repr(value)}; it takes {kinds}")
    return value


def _from(folder: Path, source: str) -> str:
    """Paths are relative to the YAML file."""
    scheme, colon, _ = source.partition(":")
    if colon and scheme.isidentifier() and len(scheme) > 1:
        return source
    return str(folder / expand_user(source))


def class_names(
    wanted: TransferSet, paths: Sequence[str], names: Sequence[str | None], classes: tuple[str, ...]
) -> Labels:
    """Of every image of a source. SUN397's folders are a/abbey and a/apartment_building/outdoor: its classes are what
    is below the letter, and not the first folder."""
    below_letter = [_below_letter(path) for path in paths] if wanted.lists is not None else []
    return Labels.from_names(below_letter) if below_letter and all(below_letter) else Labels.from_names(names, classes)


def _below_letter(path: str) -> str | None:
    *folders, _ = path.split("/")
    letter = next((place for place, name in enumerate(folders) if len(name) == 1), None)
    return None if letter is None else "/".join(folders[letter + 1 :])


def listed_parts(wanted: TransferSet, paths: Sequence[str]) -> dict[str, Bool[Tensor, " n"]] | None:
    """Train and test by the lists that lie beside the images, where there are any."""
    assert wanted.lists is not None
    root = _root(wanted.source)
    folders = [root, root.parent, *(root / name for name in ("SUN397", "sun397", "Partitions"))]
    folder = next((one for one in folders if all((one / name).is_file() for name in wanted.lists)), None)
    if folder is None:
        return None
    found = {}
    for part, name in zip(("train", "test"), wanted.lists, strict=True):
        listed = {line.strip() for line in (folder / name).read_text(encoding="utf-8").splitlines() if line.strip()}
        depths = {line.count("/") for line in listed}
        found[part] = torch.tensor([any(_ending(path, depth) in listed for depth in depths) for path in paths])
    return found


def _ending(path: str, depth: int) -> str:
    return "/" + "/".join(path.split("/")[-depth:])


def _root(source: str) -> Path:
    if not source.startswith("torchvision:"):
        return Path(source)
    _, _, folder = source.partition("@")
    return expand_user(folder) if folder else default_root()
