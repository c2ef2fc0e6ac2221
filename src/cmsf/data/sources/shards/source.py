"""WebDataset shards: tar files of images, read in place by random access, for data that fits no single disk.

Each shard is gone through once, to note where its images lie, and that is kept. An image is then one read from its
shard. Shards that are elsewhere are copied to a cache of bounded size, and are known by their URL and their size:
whoever puts another file of the same size in a URL's place has to remove the cache's folder.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor

from cmsf.data.decoding import SUFFIXES, open_image
from cmsf.data.images import Images
from cmsf.data.source import Source, SourceSplit, sort_classes
from cmsf.data.sources.shards.index import File, Index
from cmsf.data.sources.shards.store import Shard, Store, expanded
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import track

_OPEN_FILES = 16
_AT_ONCE = 4


def open_shards(rest: str) -> Source:
    """Shards as webdataset names them: {000..099} for many, :: between several, URLs, pipe: commands."""
    shards = expanded(rest)
    missing = [shard.url for shard in shards if shard.file is not None and not shard.file.is_file()]
    if missing:
        hint = "; many are named as {000..099}, not by *" if "*" in missing[0] else ""
        raise BadInput(f"{len(missing)} of {len(shards)} shards are not there; the first is {missing[0]}{hint}")
    store = Store.by_environment()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        indices = list(track(pool.map(store.index, shards), "indexing shards", len(shards)))
    names = _told_apart([f"{shard.name}/{name}" for shard, index in _both(shards, indices) for name in index.names])
    if not names:
        raise BadInput(f"no images in the {len(shards)} shards of wds:{rest}; cmsf reads {' '.join(SUFFIXES)}")
    places = torch.tensor(
        [
            (number, offset, size)
            for number, index in enumerate(indices)
            for offset, size in _both(index.offsets, index.sizes)
        ]
    )
    labels = [label for index in indices for label in index.labels]
    sizes = [index.bytes for index in indices]
    parts = {}
    for part, inside in _parts(shards).items():
        rows = torch.isin(places[:, 0], torch.tensor(inside)).nonzero()[:, 0]
        if len(rows):
            chosen = rows.tolist()
            images = ShardImages(shards, sizes, store, places[rows], [names[i] for i in chosen])
            parts[part] = SourceSplit(images, [labels[i] for i in chosen])
    if "train" not in parts:
        raise BadInput(f"the shards for training in wds:{rest} hold no images")
    return Source(shards[0].name.rstrip("-_.0123456789") or "shards", parts, sort_classes(labels), _notes(indices))


def runs_commands(rest: str) -> bool:
    """Whether some of the shards are what a shell command prints."""
    return any(shard.url.strip().startswith("pipe:") for shard in expanded(rest))


class ShardImages(Images):
    """Images by shard, offset and size; each process opens shards for itself, and has few open at a time."""

    def __init__(
        self,
        shards: Sequence[Shard],
        sizes: Sequence[int],
        store: Store,
        places: Int[Tensor, "n 3"],
        paths: Sequence[str],
    ) -> None:
        self.shards, self.sizes, self.store, self.places, self.paths = shards, sizes, store, places, paths
        if any(shard.file is None for shard in shards):
            self.blocks = places[:, 0].unique(return_inverse=True)[1]
        self._open_files()

    def open(self, i: int) -> Image.Image:
        number, offset, size = self.places[i].tolist()
        return open_image(io.BytesIO(self._opened(number).read(offset, size)))

    def mark(self, i: int) -> bytes | None:
        number, offset, size = self.places[i].tolist()
        shard = self.shards[number]
        try:
            written = 0 if shard.file is None else shard.file.stat().st_mtime_ns
        except OSError:  # whoever opens it says why
            return None
        return f"{shard.url} {self.sizes[number]} {written} {offset} {size}".encode()

    def _open_files(self) -> None:
        self._opened = lru_cache(_OPEN_FILES)(partial(_open_shard, self.shards, self.sizes, self.store))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_opened"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_files()


def _open_shard(shards: Sequence[Shard], sizes: Sequence[int], store: Store, number: int) -> File:
    file = store.open(shards[number])
    if file.size != sizes[number]:
        store.forget(shards[number])
        url = shards[number].url
        raise OSError(f"{url} has {file.size} bytes and had {sizes[number]} when it was indexed; start again")
    return file


def _parts(shards: Sequence[Shard]) -> dict[str, list[int]]:
    """The shards of each part by their names; unless some are left to train on, all are."""
    found: dict[str, list[int]] = {}
    for number, shard in enumerate(shards):
        found.setdefault(shard.split or "train", []).append(number)
    return found if "train" in found else {"train": list(range(len(shards)))}


def _told_apart(names: list[str]) -> list[str]:
    """Each name once: the second of a kind is name#2."""
    seen: Counter[str] = Counter()
    apart = []
    for name in names:
        seen[name] += 1
        apart.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return apart


def _notes(indices: Sequence[Index]) -> tuple[str, ...]:
    empty, spare = (sum(counts) for counts in zip(*((i.without_image, i.left_alone) for i in indices), strict=True))
    notes = (f"{empty} samples have no image and were left alone",) if empty else ()
    more = (f"{spare} further images of samples with several were left alone; the key ends at the first dot",)
    return notes + (more if spare else ())


def _both(first: Sequence[Any], second: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(first, second, strict=True)
