"""WebDataset shards: tar files of images, read in place by random access, for data that fits no single disk.

Each shard is gone through once for an index of its images, which is kept. An image is then one read from its shard.
Remote shards are copied to a cache of bounded size, and are known by their URL and their size: whoever puts another
file of the same size in a URL's place has to remove the cache's folder.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor

from cmsf.data.decoding import SUFFIXES, open_image
from cmsf.data.images import Images
from cmsf.data.source import SPLIT_ALIASES, Source, SourceSplit, all_classes
from cmsf.data.sources.tar_index import RandomAccessFile, TarIndex, scan_tar
from cmsf.utils.errors import BadInput
from cmsf.utils.files import atomic_write, expand_user, write_text
from cmsf.utils.progress import track
from cmsf.utils.text import error_message

_INDEX_FORMAT = 1
_MAX_OPEN_FILES = 16
_INDEXING_THREADS = 4
_MAX_REASON = 200


def open_shards(urls: str) -> Source:
    """Opens shards as webdataset names them: {000..099} for many, :: between several, URLs, pipe: commands."""
    shards = _expand(urls)
    missing = [shard.url for shard in shards if shard.file is not None and not shard.file.is_file()]
    if missing:
        hint = "; many are named as {000..099}, not by *" if "*" in missing[0] else ""
        raise BadInput(f"{len(missing)} of {len(shards)} shards are not there; the first is {missing[0]}{hint}")
    cache = ShardCache.from_env()
    with ThreadPoolExecutor(_INDEXING_THREADS) as pool:
        indices = list(track(pool.map(cache.index, shards), "indexing shards", len(shards)))
    names = _number_duplicates(
        [f"{shard.name}/{name}" for shard, index in zip(shards, indices, strict=True) for name in index.names]
    )
    if not names:
        raise BadInput(f"no images in the {len(shards)} shards of wds:{urls}; cmsf reads {' '.join(SUFFIXES)}")
    spans = [(n, *span) for n, index in enumerate(indices) for span in zip(index.offsets, index.sizes, strict=True)]
    places = torch.tensor(spans)
    labels = [label for index in indices for label in index.labels]
    splits = {}
    for split, members in _split_shards(shards).items():
        rows = torch.isin(places[:, 0], torch.tensor(members)).nonzero()[:, 0]
        if len(rows):
            paths = [names[i] for i in rows.tolist()]
            images = ShardImages(shards, [index.bytes for index in indices], cache, places[rows], paths)
            splits[split] = SourceSplit(images, [labels[i] for i in rows.tolist()])
    if "train" not in splits:
        raise BadInput(f"the shards for training in wds:{urls} hold no images")
    return Source(shards[0].name.rstrip("-_.0123456789") or "shards", splits, all_classes(splits), _notes(indices))


def runs_command(urls: str) -> bool:
    """Returns whether some of the shards are the output of a shell command."""
    return any(shard.url.strip().startswith("pipe:") for shard in _expand(urls))


@dataclass(frozen=True)
class Shard:
    """One tar file: its URL, and its path if it is on this machine."""

    url: str
    file: Path | None

    @property
    def name(self) -> str:
        """The file's name, by which its images are called, whatever way leads there."""
        if self.file is not None:
            return self.file.name.removesuffix(".tar")
        names = re.findall(r"([^/\s'\"=?&;|]+)\.tar\b", self.url)
        return str(names[-1]) if names else _digest(self.url)[:8]

    @property
    def split(self) -> str | None:
        """The split that its name says, or else its folder's."""
        words = [word for word in re.split("[^a-z]+", self.name.lower()) if word in SPLIT_ALIASES]
        folder = self.file.parent.name.lower() if self.file is not None else ""
        return SPLIT_ALIASES.get(words[-1] if words else folder)


class ShardImages(Images):
    """Images by shard, offset and size; each process opens shards for itself, and has few open at a time."""

    def __init__(
        self,
        shards: Sequence[Shard],
        sizes: Sequence[int],
        cache: ShardCache,
        places: Int[Tensor, "n 3"],
        paths: Sequence[str],
    ) -> None:
        self.shards, self.sizes, self.cache, self.places, self.paths = shards, sizes, cache, places, paths
        if any(shard.file is None for shard in shards):
            self.blocks = places[:, 0].unique(return_inverse=True)[1]
        self._open_shard = lru_cache(_MAX_OPEN_FILES)(partial(_open_checked, shards, sizes, cache))

    def open(self, i: int) -> Image.Image:
        number, offset, size = self.places[i].tolist()
        return open_image(io.BytesIO(self._open_shard(number).read(offset, size)))

    def fingerprint(self, i: int) -> bytes | None:
        number, offset, size = self.places[i].tolist()
        shard = self.shards[number]
        try:
            written = 0 if shard.file is None else shard.file.stat().st_mtime_ns
        except OSError:  # whoever opens it says why
            return None
        return f"{shard.url} {self.sizes[number]} {written} {offset} {size}".encode()

    def __reduce__(self) -> tuple[Any, ...]:  # without the open files
        return ShardImages, (self.shards, self.sizes, self.cache, self.places, self.paths)


def _open_checked(shards: Sequence[Shard], sizes: Sequence[int], cache: ShardCache, number: int) -> RandomAccessFile:
    shard, file = shards[number], cache.open(shards[number])
    if file.size != sizes[number]:
        cache.forget(shard)
        raise OSError(f"{shard.url} has {file.size} bytes and had {sizes[number]} when it was indexed; start again")
    return file


@dataclass(frozen=True)
class ShardCache:
    """The cache folder, shared by all processes: indices of shards, and copies of remote ones."""

    folder: Path
    limit: int
    """Bytes that copies may take; those that were opened longest ago go first."""

    @classmethod
    def from_env(cls) -> ShardCache:
        size = os.environ.get("CMSF_SHARD_CACHE_GB") or "50"
        try:
            limit = int(float(size) * 1e9)
        except (ValueError, OverflowError):
            raise BadInput(f"CMSF_SHARD_CACHE_GB is {size!r}; give a number of gigabytes") from None
        return cls(expand_user(os.environ.get("CMSF_CACHE") or "~/.cache/cmsf") / "shards", limit)

    def index(self, shard: Shard) -> TarIndex:
        """Returns the index of a shard, the kept one if there is one."""
        key = shard.url
        if shard.file is not None:
            state = shard.file.stat()
            key = f"{shard.file} {state.st_size} {state.st_mtime_ns}"
        place = self.folder / _digest(key)
        try:
            with suppress(OSError):
                place.mkdir(parents=True, exist_ok=True)
            if shard.file is not None and not os.access(place, os.W_OK):
                return self._scan(shard)  # nowhere to keep it
            with _locked(place / "index.lock"):
                return _read_index(place / "index.json") or self._scan(shard, place / "index.json")
        except OSError as error:
            raise BadInput(f"cannot read shard {shard.url}: {error_message(error, _MAX_REASON)}") from None

    def open(self, shard: Shard) -> RandomAccessFile:
        """Opens a shard, a remote one as a copy, which is made where there is none."""
        if shard.file is not None:
            return RandomAccessFile(shard.file)
        copy = self._copy(shard)
        for _ in range(10):
            with suppress(FileNotFoundError):
                file = RandomAccessFile(copy)  # once it is open it may be removed
                with suppress(OSError):
                    os.utime(copy)
                return file
            self._download(shard.url, copy)
        raise OSError(f"{self.folder} is too busy: copies go before they are read; raise CMSF_SHARD_CACHE_GB")

    def forget(self, shard: Shard) -> None:
        """Removes the index of a remote shard; that of a local one does not outlive a change."""
        self._copy(shard).with_name("index.json").unlink(missing_ok=True)

    def _copy(self, shard: Shard) -> Path:
        return self.folder / _digest(shard.url) / "shard.tar"

    def _scan(self, shard: Shard, keep: Path | None = None) -> TarIndex:
        try:
            index = scan_tar(self.open(shard))
        except tarfile.TarError as error:
            if shard.file is None:
                self._copy(shard).unlink(missing_ok=True)
            raise OSError(str(error)) from None
        if keep is not None:
            write_text(keep, json.dumps({"format": _INDEX_FORMAT, "index": asdict(index)}, ensure_ascii=False))
        return index

    def _download(self, url: str, copy: Path) -> None:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with _locked(copy.with_suffix(".lock")):
            if copy.exists():  # another process was faster
                return
            try:
                with atomic_write(copy) as temporary, temporary.open("wb") as target, _open_url(url) as source:
                    shutil.copyfileobj(source, target, 1 << 20)
            except OSError as error:
                raise BadInput(f"cannot read shard {url}: {error_message(error, _MAX_REASON)}") from None
        self._evict(copy)

    def _evict(self, newest: Path) -> None:
        copies = []
        for copy in self.folder.glob("*/shard.tar"):
            with suppress(FileNotFoundError):
                state = copy.stat()
                copies.append((state.st_mtime_ns, state.st_size, copy))
        total = sum(size for _, size, _ in copies)
        for _, size, copy in sorted(copies):
            if total > self.limit and copy != newest:
                copy.unlink(missing_ok=True)
                total -= size


def _read_index(file: Path) -> TarIndex | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return TarIndex(**content["index"]) if content["format"] == _INDEX_FORMAT else None
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def _expand(urls: str) -> list[Shard]:
    try:
        expanded = import_module("webdataset.shardlists").expand_urls(urls)
    except ImportError:
        raise BadInput("wds: needs the extra: pip install 'cmsf[wds]'") from None
    except (AssertionError, ValueError) as error:
        raise BadInput(f"cannot parse wds:{urls}: {error_message(error, _MAX_REASON)}") from None
    return [Shard(url, _local(url)) for url in expanded if url]


def _local(url: str) -> Path | None:
    parsed = urlparse(url)
    if parsed.scheme == "file":
        return Path(url2pathname(parsed.path)).absolute()
    path = expand_user(url)
    return path.absolute() if not parsed.scheme or os.path.exists(path) else None


def _open_url(url: str) -> Any:
    """Opens webdataset's stream of a URL; closing it raises what went wrong with the command behind it."""
    try:
        return import_module("webdataset.gopen").gopen(url, "rb")
    except (ValueError, AssertionError) as error:
        raise OSError(str(error)) from None


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Lets one thread of one process in at a time."""
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:20]


def _split_shards(shards: Sequence[Shard]) -> dict[str, list[int]]:
    """Returns the shards of each split by their names; where none is left to train on, all are."""
    members: dict[str, list[int]] = {}
    for number, shard in enumerate(shards):
        members.setdefault(shard.split or "train", []).append(number)
    return members if "train" in members else {"train": list(range(len(shards)))}


def _number_duplicates(names: Sequence[str]) -> list[str]:
    """Returns each name once: the second of a kind is name#2."""
    count: Counter[str] = Counter()
    unique = []
    for name in names:
        count[name] += 1
        unique.append(name if count[name] == 1 else f"{name}#{count[name]}")
    return unique


def _notes(indices: Sequence[TarIndex]) -> tuple[str, ...]:
    empty, spare = sum(index.without_image for index in indices), sum(index.left_alone for index in indices)
    notes = (f"{empty} samples have no image and were left alone",) if empty else ()
    more = (f"{spare} further images of samples with several were left alone; the key ends at the first dot",)
    return notes + (more if spare else ())
