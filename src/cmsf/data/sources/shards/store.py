"""Shards by name, and the cache folder: what is in shards, and copies of those from elsewhere."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from cmsf.data.source import SPLIT_ALIASES
from cmsf.data.sources.shards.index import File, Index, scanned
from cmsf.utils.errors import BadInput
from cmsf.utils.files import atomic_write, expand_user, write_text
from cmsf.utils.text import first_line

_INDEX_FORMAT = 1


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
        return str(found[-1]) if found else digest(self.url)[:8]

    @property
    def split(self) -> str | None:
        words = [word for word in re.split("[^a-z]+", self.name.lower()) if word in SPLIT_ALIASES]
        folder = self.file.parent.name if self.file is not None else ""
        return SPLIT_ALIASES[words[-1]] if words else SPLIT_ALIASES.get(folder)


@dataclass(frozen=True)
class Store:
    """The cache folder, shared by all processes: what is in shards, and copies of those from elsewhere."""

    folder: Path
    limit: int
    """Bytes that copies may take; those that were opened longest ago go first."""

    @classmethod
    def by_environment(cls) -> Store:
        size = os.environ.get("CMSF_SHARD_CACHE_GB") or "50"
        try:
            limit = int(float(size) * 1e9)
        except (ValueError, OverflowError):
            raise BadInput(f"CMSF_SHARD_CACHE_GB is {size!r}; give a number of gigabytes") from None
        return cls(expand_user(os.environ.get("CMSF_CACHE") or "~/.cache/cmsf") / "shards", limit)

    def index(self, shard: Shard) -> Index:
        """What is in a shard, from the last time if it was looked into before."""
        key = shard.url
        if shard.file is not None:
            state = shard.file.stat()
            key = f"{shard.file} {state.st_size} {state.st_mtime_ns}"
        place = self.folder / digest(key)
        try:
            with suppress(OSError):
                place.mkdir(parents=True, exist_ok=True)
            if shard.file is not None and not os.access(place, os.W_OK):
                return self._scan(shard)  # nowhere to keep it
            with _alone(place / "index.lock"):
                return self._kept(place / "index.json") or self._scan(shard, place / "index.json")
        except OSError as error:
            raise BadInput(f"cannot read shard {shard.url}: {first_line(error, 200)}") from None

    def open(self, shard: Shard) -> File:
        if shard.file is not None:
            return File(shard.file)
        copy = self.folder / digest(shard.url) / "shard.tar"
        for _ in range(10):
            with suppress(FileNotFoundError):
                file = File(copy)  # once it is open it may be removed
                with suppress(OSError):
                    os.utime(copy)
                return file
            self._fetch(shard.url, copy)
        raise OSError(f"{self.folder} is too busy: copies go before they are read; raise CMSF_SHARD_CACHE_GB")

    def forget(self, shard: Shard) -> None:
        """What was noted of a shard from elsewhere; of one on this machine nothing outlives a change."""
        (self.folder / digest(shard.url) / "index.json").unlink(missing_ok=True)

    def _kept(self, file: Path) -> Index | None:
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            return Index(**kept["index"]) if kept["format"] == _INDEX_FORMAT else None
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def _scan(self, shard: Shard, keep: Path | None = None) -> Index:
        try:
            index = scanned(self.open(shard))
        except tarfile.TarError as error:
            if shard.file is None:
                (self.folder / digest(shard.url) / "shard.tar").unlink(missing_ok=True)
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
                with atomic_write(copy) as temporary, temporary.open("wb") as target, _gopen(url) as source:
                    shutil.copyfileobj(source, target, 1 << 20)
            except OSError as error:
                raise BadInput(f"cannot read shard {url}: {first_line(error, 200)}") from None
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


def expanded(rest: str) -> list[Shard]:
    try:
        urls = import_module("webdataset.shardlists").expand_urls(rest)
    except ImportError:
        raise BadInput("wds: needs the extra: pip install 'cmsf[wds]'") from None
    except (AssertionError, ValueError) as error:
        raise BadInput(f"cannot make sense of wds:{rest}: {first_line(error, 200)}") from None
    return [Shard(url, _local(url)) for url in urls if url]


def _local(url: str) -> Path | None:
    parsed = urlparse(url)
    if parsed.scheme == "file":
        return Path(url2pathname(parsed.path)).absolute()
    path = expand_user(url)
    return path.absolute() if not parsed.scheme or os.path.exists(path) else None


def _gopen(url: str) -> Any:
    """webdataset's stream of a URL; closing it raises what went wrong with the command behind it."""
    try:
        return import_module("webdataset.gopen").gopen(url, "rb")
    except (ValueError, AssertionError) as error:
        raise OSError(str(error)) from None


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One thread of one process at a time."""
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:20]
