"""A survey of a source: sizes, images that cannot be read, duplicates."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cmsf.data.images import Images, Unreadable
from cmsf.data.source import Source
from cmsf.utils.progress import track

_FULL_SIZE = 1 << 20  # no image is to be read at a fraction of its size


@dataclass(frozen=True)
class ImageRecord:
    """One image: its split, path, class and size."""

    split: str
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
        """Duplicates with different classes."""
        return [
            group for group in self.duplicates if len({image.name for image in group if image.name is not None}) > 1
        ]

    @property
    def leaked(self) -> list[list[ImageRecord]]:
        """Duplicates in two splits: test images leak into training."""
        return [group for group in self.duplicates if len({image.split for image in group}) > 1]


def survey_source(source: Source) -> Survey:
    """Reads every image of a source once."""
    images: list[ImageRecord] = []
    broken: list[Unreadable] = []
    by_pixels: dict[bytes, list[ImageRecord]] = defaultdict(list)
    for name, split in source.ordered_splits():
        with ThreadPoolExecutor() as pool:
            results = pool.map(lambda i, images=split.images: _read(images, i), range(len(split)))
            for i, result in enumerate(track(results, f"reading {name}", len(split))):
                if isinstance(result, Unreadable):
                    broken.append(result)
                    continue
                digest, height, width = result
                image = ImageRecord(name, split.images.paths[i], split.names[i], height, width)
                images.append(image)
                by_pixels[digest].append(image)
    return Survey(images, broken, [group for group in by_pixels.values() if len(group) > 1])


def _read(images: Images, i: int) -> tuple[bytes, int, int] | Unreadable:
    """Returns a digest of the pixels as they are seen, height and width."""
    try:
        pixels = images.decode(i, _FULL_SIZE)
    except Unreadable as error:
        return error
    height, width = pixels.shape[1:]
    digest = hashlib.blake2b(f"{height} {width} ".encode(), digest_size=16)
    digest.update(pixels.permute(1, 2, 0).contiguous().numpy().data)
    return digest.digest(), height, width
