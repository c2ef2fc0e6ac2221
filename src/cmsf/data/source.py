"""A source of images: splits, and for each image a class name or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from cmsf.data.images import Images
from cmsf.utils.errors import BadInput
from cmsf.utils.text import escape_unprintable, is_encodable

SPLIT_ALIASES = {
    "train": "train",
    "trainval": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}
"""What people call their splits, in lower case."""
_DIGITS = 19
"""A name of so many digits is a name."""


@dataclass(frozen=True)
class SourceSplit:
    """One split as the source has it."""

    images: Images
    names: Sequence[str | None]
    """The class of each image, None where it has none."""

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class Source:
    """Images by split: `train` is always there, `val` and `test` may be."""

    name: str
    splits: dict[str, SourceSplit]
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        paths = (path for split in self.splits.values() for path in split.images.paths)
        odd = next((name for name in (*self.classes, *paths) if not is_encodable(name)), None)
        if odd is not None:
            raise BadInput(f"{self.name} has the name {escape_unprintable(odd)!r}, which is not UTF-8; rename it")

    def ordered_splits(self) -> list[tuple[str, SourceSplit]]:
        """Returns the splits in the order train, val, test."""
        return [(name, self.splits[name]) for name in ("train", "val", "test") if name in self.splits]

    @property
    def train(self) -> SourceSplit:
        return self.splits["train"]

    @property
    def is_labelled(self) -> bool:
        return any(name is not None for split in self.splits.values() for name in split.names)

    def with_labels(self, labels: Mapping[str, Sequence[str | None]]) -> Source:
        """Returns the source with other class names, by split."""
        splits = {name: replace(split, names=labels.get(name, split.names)) for name, split in self.splits.items()}
        return replace(self, splits=splits, classes=all_classes(splits))

    def median_side(self) -> int:
        """Returns the median of the images' shorter sides."""
        sizes = self.train.images.sample_sizes()
        if not sizes:
            self.train.images.size(0)  # says why
        return int(median(min(size) for size in sizes))


def all_classes(splits: Mapping[str, SourceSplit], known: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the classes that occur: those of `known` in its order, then the others sorted."""
    present = {name for split in splits.values() for name in split.names}
    return tuple(name for name in dict.fromkeys((*known, *sort_classes(present))) if name in present)


def sort_classes(names: Iterable[str | None]) -> tuple[str, ...]:
    """Returns the different class names; numbers by their value, else by the alphabet."""
    classes = {name for name in names if name is not None}
    numeric = all(name.isdecimal() and len(name) < _DIGITS for name in classes)
    return tuple(sorted(classes, key=lambda name: (int(name), name) if numeric else (0, name)))


def disambiguate(names: Sequence[str]) -> tuple[str, ...]:
    """Returns class names by number, told apart where two classes are called the same (ImageNet has two cranes)."""
    counts = Counter(names)
    return tuple(name if counts[name] == 1 else f"{name} ({number})" for number, name in enumerate(names))
