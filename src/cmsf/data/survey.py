"""What is in a pile of images: counts, sizes, what cannot be read, what is there twice."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cmsf.data.images import Images, Unreadable
from cmsf.data.source import Source
from cmsf.utils.progress import track

_WHOLE = 1 << 20  # no image is to be read at a fraction of its size


@dataclass(frozen=True)
class ImageRecord:
    """One image as it was seen: where it is, what it is called, and its size."""

    part: str
    path: str
    name: str | None
    height: int
    width: int


@dataclass(frozen=True)
class Survey:
    images: list[ImageRecord]
    broken: list[Unreadable]
    duplicates: list[list[ImageRecord]]
    """Images with exactly the same pixels, in groups of two or more."""

    @property
    def conflicting(self) -> list[list[ImageRecord]]:
        """Copies with different classes."""
        return [group for group in self.duplicates if len({one.name for one in group if one.name is not None}) > 1]

    @property
    def leaked(self) -> list[list[ImageRecord]]:
        """Copies in two splits: a test on them is none."""
        return [group for group in self.duplicates if len({one.part for one in group}) > 1]


def survey(source: Source) -> Survey:
    """Read every image of a source once."""
    images: list[ImageRecord] = []
    broken: list[Unreadable] = []
    by_pixels: dict[bytes, list[ImageRecord]] = defaultdict(list)
    for part_name, part in source.ordered_splits():
        with ThreadPoolExecutor() as pool:
            seen = pool.map(lambda i, pile=part.images: _look(pile, i), range(len(part)))
            for i, one in enumerate(track(seen, f"reading {part_name}", len(part))):
                if isinstance(one, Unreadable):
                    broken.append(one)
                    continue
                digest, height, width = one
                found = ImageRecord(part_name, part.images.paths[i], part.names[i], height, width)
                images.append(found)
                by_pixels[digest].append(found)
    return Survey(images, broken, [group for group in by_pixels.values() if len(group) > 1])


def _look(images: Images, i: int) -> tuple[bytes, int, int] | Unreadable:
    """A digest of the pixels as they are seen, with the size."""
    try:
        pixels = images.decode(i, _WHOLE)
    except Unreadable as error:
        return error
    height, width = pixels.shape[1:]
    digest = hashlib.blake2b(f"{height} {width} ".encode(), digest_size=16)
    digest.update(pixels.permute(1, 2, 0).contiguous().numpy().data)
    return digest.digest(), height, width
