"""What every source of images comes down to: named parts of images, each with a class name or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from cmsf.data.images import Images, Unreadable
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import track
from cmsf.utils.text import escape_unprintable, is_encodable

SPLIT_ALIASES = {
    "train": "train",
    "trainval": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}
"""What people call the parts of their data."""
_LOOKED_AT = 200
_DIGITS = 19
"""A name of so many digits is a name."""


@dataclass(frozen=True)
class SourceSplit:
    """One split as the source has it."""

    images: Images
    names: Sequence[str | None]
    """Each image's class, None where there is none."""

    def __len__(self) -> int:
        return len(self.images)

    def sample_sizes(self) -> list[tuple[int, int]]:
        """Heights and widths of some hundred images all over the part; unreadable ones are met when all are read."""
        found = []
        some = range(0, len(self), max(1, len(self) // _LOOKED_AT))
        for i in track(some, "looking at sizes", len(some)):
            with suppress(Unreadable):
                found.append(self.images.size(i))
        return found


@dataclass(frozen=True)
class Source:
    """Images to learn from in the part `train`; the parts `val` and `test` may be there too."""

    name: str
    splits: dict[str, SourceSplit]
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        paths = (path for part in self.splits.values() for path in part.images.paths)
        odd = next((name for name in (*self.classes, *paths) if not is_encodable(name)), None)
        if odd is not None:
            raise BadInput(f"{self.name} has the name {escape_unprintable(odd)!r}, which is no UTF-8; rename it")

    def ordered_splits(self) -> list[tuple[str, SourceSplit]]:
        """What there is of train, val and test, in that order."""
        return [(name, self.splits[name]) for name in ("train", "val", "test") if name in self.splits]

    @property
    def train(self) -> SourceSplit:
        return self.splits["train"]

    def median_side(self) -> int:
        """The median of the images' shorter sides."""
        sizes = self.train.sample_sizes()
        if not sizes:
            self.train.images.size(0)  # says why
        return int(median(min(size) for size in sizes))


def sort_classes(names: Iterable[str | None]) -> tuple[str, ...]:
    """The different class names; numbers by their value, else by the alphabet."""
    found = {name for name in names if name is not None}
    numeric = all(name.isdecimal() and len(name) < _DIGITS for name in found)
    return tuple(sorted(found, key=lambda name: (int(name), name) if numeric else (0, name)))


def disambiguate(names: Sequence[str]) -> tuple[str, ...]:
    """Class names by number, told apart where two classes are called the same (ImageNet has two cranes)."""
    counts = Counter(names)
    return tuple(name if counts[name] == 1 else f"{name} ({number})" for number, name in enumerate(names))
