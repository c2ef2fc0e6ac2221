"""The data sets of a transfer suite: the paper's ten, or those of a YAML file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cmsf.data import DataRequest
from cmsf.data.sources.torchvision import default_root, is_on_disk
from cmsf.evaluation.metrics import ACCURACY, MEAN_PER_CLASS
from cmsf.utils.errors import BadInput, did_you_mean
from cmsf.utils.files import expand_user
from cmsf.utils.numbers import is_integer
from cmsf.utils.text import short_repr
from cmsf.utils.yaml import read_yaml


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
    """A data set to transfer to."""

    name: str
    source: str
    rule: SplitRule = SplitRule()
    per_class: bool = False
    """Whether the metric is the mean over classes, or top-1."""
    counts: tuple[int, int, int] | None = None
    """Images in train, val and test by the paper's table."""
    classes: int | None = None
    """Classes by the paper's table."""
    remark: str = ""
    """Why other counts may be right, too."""
    lists: tuple[str, str] | None = None
    """Files that list the paths of the training and test images of a source without splits."""
    unlisted: SplitRule = SplitRule()
    """The rule where those files are missing."""

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

MEAN = "mean"
_KEYS = ("data", "like", "train", "val", "test", "measure")
_MEASURES = {"top-1": False, ACCURACY: False, MEAN_PER_CLASS: True}


def paper_suite(say: Callable[[str], None]) -> list[TransferSet]:
    """Returns those of the ten that are on this machine: the others are some 50 GB, too much to fetch unasked."""
    present = [known for known in PAPER.values() if is_on_disk(known.source.removeprefix("torchvision:"))]
    missing = [name for name, known in PAPER.items() if known not in present]
    if present and missing:
        say(f"left out, not found at {default_root()}: {', '.join(missing)}")
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
    where = f"{name} in {file}"
    settings = {"data": entry} if isinstance(entry, str) else entry
    if not isinstance(settings, dict) or not isinstance(settings.get("data"), str) or not settings["data"]:
        raise BadInput(f"{where} needs a source of images, as {name}: photos/{name} or {name}: {{data: photos/{name}}}")
    for key in settings:
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS, f"use {', '.join(_KEYS)}")
            raise BadInput(f"{where} has {short_repr(key)!r}; {hint}")
    paper_name = short_repr(settings.get("like", name))
    if "like" in settings and paper_name not in PAPER:
        hint = did_you_mean(paper_name, PAPER, f"use one of {', '.join(PAPER)}")
        raise BadInput(f"{where} has like {paper_name!r}, which is not one of the paper's; {hint}")
    if DataRequest(settings["data"]).runs_command:  # the file may be somebody else's
        raise BadInput(f"{where} is a shell command, {settings['data']}; give the shards by their paths or URLs")
    source = _resolve(file.parent, settings["data"])
    dataset = replace(PAPER.get(paper_name, TransferSet(name, "")), name=name, source=source)
    amounts = {key: _check_amount(where, key, settings[key]) for key in ("train", "val", "test") if key in settings}
    if "train" in amounts and not isinstance(amounts.get("val"), int):
        raise BadInput(f"{where} has train: {amounts['train']} images a class, and needs val as such a number too")
    if "test" in amounts and "train" not in amounts:
        raise BadInput(f"{where} has test: {amounts['test']} images a class, and needs train and val too")
    if amounts:
        dataset = replace(dataset, rule=SplitRule(**amounts), counts=None, classes=None, lists=None)
    if "measure" in settings:
        if str(settings["measure"]) not in _MEASURES:
            raise BadInput(f"{where} has measure {short_repr(settings['measure'])!r}; use top-1 or {MEAN_PER_CLASS}")
        dataset = replace(dataset, per_class=_MEASURES[str(settings["measure"])])
    return dataset


def _check_amount(where: str, key: str, value: Any) -> Any:
    whole = is_integer(value) and value > 0
    share = key == "val" and isinstance(value, float) and 0 < value < 1
    if not (whole or share):
        kinds = "a number of images a class, or a share below 1" if key == "val" else "a number of images a class"
        raise BadInput(f"{where} has {key}: {short_repr(value)}; expected {kinds}")
    return value


def _resolve(folder: Path, source: str) -> str:
    """Paths are relative to the YAML file."""
    scheme, colon, _ = source.partition(":")
    if colon and scheme.isidentifier() and len(scheme) > 1:
        return source
    return str(folder / expand_user(source))
