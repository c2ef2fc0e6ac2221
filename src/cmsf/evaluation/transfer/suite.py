"""The data sets of a transfer suite: the paper's ten, and whatever a YAML file names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from cmsf.data import Request
from cmsf.data.labels import Labels
from cmsf.data.torchvision_sets import default_root, is_on_disk
from cmsf.errors import BadInput, did_you_mean
from cmsf.evaluation.measures import ACCURACY, MEAN_PER_CLASS
from cmsf.evaluation.transfer.splits import Rule
from cmsf.files import from_home
from cmsf.printable import shown
from cmsf.yaml_files import read_yaml


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
            raise BadInput(f"{where} has {shown(key)!r}; " + did_you_mean(str(key), _KEYS, f"use {', '.join(_KEYS)}"))
    like = shown(settings.get("like", name))
    if "like" in settings and like not in PAPER:
        hint = did_you_mean(like, PAPER, f"use one of {', '.join(PAPER)}")
        raise BadInput(f"{where} is to be like {like!r}, which is none of the paper's; {hint}")
    if Request(settings["data"]).runs_a_command:  # the file may be somebody else's
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
            raise BadInput(f"{where} has measure {shown(settings['measure'])!r}; use top-1 or {MEAN_PER_CLASS}")
        found = replace(found, per_class=_MEASURES[str(settings["measure"])])
    return found


def _amount(where: str, key: str, value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
    share = key == "val" and isinstance(value, float) and 0 < value < 1
    if not (whole or share):
        kinds = "a number of images a class, or a share below 1" if key == "val" else "a number of images a class"
        raise BadInput(f"{where} has {key}: {shown(value)}; it takes {kinds}")
    return value


def _from(folder: Path, source: str) -> str:
    """Paths are relative to the YAML file."""
    scheme, colon, _ = source.partition(":")
    if colon and scheme.isidentifier() and len(scheme) > 1:
        return source
    return str(folder / from_home(source))


def class_names(
    wanted: TransferSet, paths: Sequence[str], names: Sequence[str | None], classes: tuple[str, ...]
) -> Labels:
    """Of every image of a source. SUN397's folders are a/abbey and a/apartment_building/outdoor: its classes are what
    is below the letter, and not the first folder."""
    below_letter = [_below_letter(path) for path in paths] if wanted.lists is not None else []
    return Labels.of(below_letter) if below_letter and all(below_letter) else Labels.of(names, classes)


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
    return from_home(folder) if folder else default_root()
