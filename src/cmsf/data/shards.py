"""WebDataset shards: tar files of images, read in place by random access, for data that fits no single disk.

Each shard is gone through once, to note where its images lie, and that is kept. An image is then one read from its
shard. Shards that are elsewhere are copied to a cache of bounded size, and are known by their URL and their size:
whoever puts another file of the same size in a URL's place has to remove the cache's folder.
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
from dataclasses import asdict, dataclass, field
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

from cmsf.data.decoding import SUFFIXES
from cmsf.data.images import Images
from cmsf.data.source import SPLITS, Part, Source, ordered
from cmsf.errors import BadInput
from cmsf.files import atomically, write_text
from cmsf.progress import shown

_NAMES_BEFORE_NUMBERS = ("class_name", "label", "cls", "class")
_OPEN_FILES = 16
_AT_ONCE = 4
_BLOCK = 512  # what tar files are made of
_GZIP = b"\x1f\x8b"
_INDEX_FORMAT = 1


def open_shards(rest: str) -> Source:
    """Shards as webdataset names them: {000..099} for many, :: between several, URLs, pipe: commands."""
    shards = _expanded(rest)
    missing = [shard.url for shard in shards if shard.file is not None and not shard.file.is_file()]
    if missing:
        hint = "; many are named as {000..099}, not by *" if "*" in missing[0] else ""
        raise BadInput(f"{len(missing)} of {len(shards)} shards are not there; the first is {missing[0]}{hint}")
    store = _Store.by_environment()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        indices = list(shown(pool.map(store.index, shards), "indexing shards", len(shards)))
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
            parts[part] = Part(images, [labels[i] for i in chosen])
    if "train" not in parts:
        raise BadInput(f"the shards for training in wds:{rest} hold no images")
    return Source(shards[0].name.rstrip("-_.0123456789") or "shards", parts, ordered(labels), _notes(indices))


def runs_commands(rest: str) -> bool:
    """Whether some of the shards are what a shell command prints."""
    return any(shard.url.strip().startswith("pipe:") for shard in _expanded(rest))


class ShardImages(Images):
    """Images by shard, offset and size; each process opens shards for itself, and has few open at a time."""

    def __init__(
        self,
        shards: Sequence[Shard],
        sizes: Sequence[int],
        store: _Store,
        places: Int[Tensor, "n 3"],
        paths: Sequence[str],
    ) -> None:
        self.shards, self.sizes, self.store, self.places, self.paths = shards, sizes, store, places, paths
        if any(shard.file is None for shard in shards):
            self.blocks = places[:, 0].unique(return_inverse=True)[1]
        self._open_files()

    def open(self, i: int) -> Image.Image:
        number, offset, size = self.places[i].tolist()
        return Image.open(io.BytesIO(self._opened(number).read(offset, size)))

    def _open_files(self) -> None:
        self._opened = lru_cache(_OPEN_FILES)(partial(_open_shard, self.shards, self.sizes, self.store))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_opened"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_files()


@dataclass(frozen=True)
class Shard:
    """One tar file: where it is, and its path if that is on this machine."""

    url: str
    file: Path | None

    @property
    def name(self) -> str:
        """What its images are called by: the file's name, whatever way leads there."""
        if self.file is not None:
            return self.file.name.removesuffix(".tar")
        found = re.findall(r"([^/\s'\"=?&;|]+)\.tar\b", self.url)
        return str(found[-1]) if found else _hash(self.url)[:8]

    @property
    def split(self) -> str | None:
        words = [word for word in re.split("[^a-z]+", self.name.lower()) if word in SPLITS]
        folder = self.file.parent.name if self.file is not None else ""
        return SPLITS[words[-1]] if words else SPLITS.get(folder)


@dataclass
class _Index:
    """Where the images of a shard lie in it, in the order of the file."""

    bytes: int
    """The whole shard, to know it by."""
    names: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    without_image: int = 0
    left_alone: int = 0
    """Images of samples that have several."""


class _File:
    """A file that any number of threads read from, closed when the last of them has let it go."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.descriptor).st_size

    def read(self, offset: int, size: int) -> bytes:
        content = os.pread(self.descriptor, size, offset)
        if len(content) < size:
            raise OSError("its shard ends before the image does")
        return content

    def __del__(self) -> None:
        with suppress(AttributeError):  # it was not opened
            os.close(self.descriptor)


@dataclass(frozen=True)
class _Store:
    """The cache folder, shared by all processes: what is in shards, and copies of those from elsewhere."""

    folder: Path
    limit: int
    """Bytes that copies may take; those that were opened longest ago go first."""

    @classmethod
    def by_environment(cls) -> _Store:
        size = os.environ.get("CMSF_SHARD_CACHE_GB") or "50"
        try:
            limit = int(float(size) * 1e9)
        except (ValueError, OverflowError):
            raise BadInput(f"CMSF_SHARD_CACHE_GB is {size!r}; give a number of gigabytes") from None
        return cls(Path(os.environ.get("CMSF_CACHE") or "~/.cache/cmsf").expanduser() / "shards", limit)

    def index(self, shard: Shard) -> _Index:
        """What is in a shard, from the last time if it was looked into before."""
        key = shard.url
        if shard.file is not None:
            state = shard.file.stat()
            key = f"{shard.file} {state.st_size} {state.st_mtime_ns}"
        place = self.folder / _hash(key)
        try:
            with suppress(OSError):
                place.mkdir(parents=True, exist_ok=True)
            if shard.file is not None and not os.access(place, os.W_OK):
                return self._scan(shard)  # nowhere to keep it
            with _alone(place / "index.lock"):
                return self._kept(place / "index.json") or self._scan(shard, place / "index.json")
        except OSError as error:
            raise BadInput(f"cannot read shard {shard.url}: {_line(error)}") from None

    def open(self, shard: Shard) -> _File:
        if shard.file is not None:
            return _File(shard.file)
        copy = self.folder / _hash(shard.url) / "shard.tar"
        for _ in range(10):
            with suppress(FileNotFoundError):
                file = _File(copy)  # once it is open it may be removed
                with suppress(OSError):
                    os.utime(copy)
                return file
            self._fetch(shard.url, copy)
        raise OSError(f"{self.folder} is too busy: copies go before they are read; raise CMSF_SHARD_CACHE_GB")

    def forget(self, shard: Shard) -> None:
        """What was noted of a shard from elsewhere; of one on this machine nothing outlives a change."""
        (self.folder / _hash(shard.url) / "index.json").unlink(missing_ok=True)

    def _kept(self, file: Path) -> _Index | None:
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            return _Index(**kept["index"]) if kept["format"] == _INDEX_FORMAT else None
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def _scan(self, shard: Shard, keep: Path | None = None) -> _Index:
        try:
            index = _scanned(self.open(shard))
        except tarfile.TarError as error:
            if shard.file is None:
                (self.folder / _hash(shard.url) / "shard.tar").unlink(missing_ok=True)
            raise OSError(str(error)) from None
        if keep is not None:
            write_text(keep, json.dumps({"format": _INDEX_FORMAT, "index": asdict(index)}, ensure_ascii=False))
        return index

    def _fetch(self, url: str, copy: Path) -> None:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with _alone(copy.with_suffix(".lock")):
            if copy.exists():  # another process was faster
                return
            try:
                with atomically(copy) as temporary, temporary.open("wb") as target, _gopen(url) as source:
                    shutil.copyfileobj(source, target, 1 << 20)
            except OSError as error:
                raise BadInput(f"cannot read shard {url}: {_line(error)}") from None
        self._make_room(copy)

    def _make_room(self, newest: Path) -> None:
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


def _expanded(rest: str) -> list[Shard]:
    try:
        urls = import_module("webdataset.shardlists").expand_urls(rest)
    except ImportError:
        raise BadInput("wds: needs the extra: pip install 'cmsf[wds]'") from None
    except (AssertionError, ValueError) as error:
        raise BadInput(f"cannot make sense of wds:{rest}: {_line(error)}") from None
    return [Shard(url, _local(url)) for url in urls if url]


def _local(url: str) -> Path | None:
    parsed = urlparse(url)
    if parsed.scheme == "file":
        return Path(url2pathname(parsed.path)).absolute()
    path = Path(url).expanduser()
    return path.absolute() if not parsed.scheme or os.path.exists(path) else None


def _gopen(url: str) -> Any:
    """webdataset's stream of a URL; closing it raises what went wrong with the command behind it."""
    try:
        return import_module("webdataset.gopen").gopen(url, "rb")
    except ValueError as error:
        raise OSError(str(error)) from None


def _open_shard(shards: Sequence[Shard], sizes: Sequence[int], store: _Store, number: int) -> _File:
    file = store.open(shards[number])
    if file.size != sizes[number]:
        store.forget(shards[number])
        url = shards[number].url
        raise OSError(f"{url} has {file.size} bytes and had {sizes[number]} when it was indexed; start again")
    return file


def _scanned(file: _File) -> _Index:
    """One pass over the headers. Members in a row with one key, the path up to its first dot, are a sample."""
    if os.pread(file.descriptor, 2, 0) == _GZIP:
        raise tarfile.ReadError("it is compressed, and nothing in it can be read in place; use pipe:gunzip -c FILE")
    index = _Index(file.size)
    key, sample = "", dict[str, tarfile.TarInfo]()
    with (
        open(os.dup(file.descriptor), "rb") as stream,
        tarfile.open(fileobj=stream, mode="r:") as archive,
    ):
        for member in archive:
            found = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]*)", member.name, re.DOTALL)
            if not member.isreg() or found is None:
                continue
            if found[1] != key or found[2].lower() in sample:
                _add(index, key, sample, file)
                key, sample = found[1], {}
            sample[found[2].lower()] = member
        _add(index, key, sample, file)
        end = archive.offset
    # tarfile takes a file that breaks off at a header for one that ends there.
    if os.pread(file.descriptor, _BLOCK, end) != bytes(_BLOCK):
        raise tarfile.ReadError(f"it breaks off after {end} bytes; copy it again")
    return index


def _add(index: _Index, key: str, sample: dict[str, tarfile.TarInfo], file: _File) -> None:
    if not sample:
        return
    images = [ending for ending in sample if f".{ending}" in SUFFIXES]
    images += [ending for ending in sample if ending not in images and ending.endswith(tuple(SUFFIXES))]
    if not images:
        index.without_image += 1
        return
    index.left_alone += len(images) - 1
    member = sample[images[0]]
    index.names.append(member.name)
    index.offsets.append(member.offset_data)
    index.sizes.append(member.size)
    index.labels.append(_label(sample, file))


def _label(sample: dict[str, tarfile.TarInfo], file: _File) -> str | None:
    """The class by name or number, from the .cls or else from the .json."""
    if "cls" in sample:
        value: object = _text(sample["cls"], file).strip()
    elif "json" in sample:
        value = _listed(_text(sample["json"], file))
    else:
        return None
    return None if value in (None, "", "-1", -1) else str(value)


def _listed(text: str) -> str | int | None:
    try:
        listed = json.loads(text)
    except ValueError:
        return None
    if not isinstance(listed, dict):
        return None
    values = [listed[key] for key in _NAMES_BEFORE_NUMBERS if key in listed]
    names = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return names[0] if names else numbers[0] if numbers else None


def _text(member: tarfile.TarInfo, file: _File) -> str:
    return file.read(member.offset_data, member.size).decode("utf-8", "replace")


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


def _notes(indices: Sequence[_Index]) -> tuple[str, ...]:
    empty, spare = (sum(counts) for counts in zip(*((i.without_image, i.left_alone) for i in indices), strict=True))
    notes = (f"{empty} samples have no image and were left alone",) if empty else ()
    more = (f"{spare} further images of samples with several were left alone; the key ends at the first dot",)
    return notes + (more if spare else ())


def _both(first: Sequence[Any], second: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(first, second, strict=True)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One thread of one process at a time."""
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:20]


def _line(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:200]
