"""Where the images of a tar file lie in it: one pass over its headers."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cmsf.data.decoding import SUFFIXES
from cmsf.utils.numbers import is_integer

_NAMES_BEFORE_NUMBERS = ("class_name", "label", "cls", "class")
_BLOCK = 512  # what tar files are made of
_GZIP = b"\x1f\x8b"
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_LONGEST_HEADER, _LONGEST_LABEL = 1 << 14, 1 << 20


class File:
    """A file that any number of threads read from, closed when the last of them has let it go."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.descriptor).st_size

    def read(self, offset: int, size: int) -> bytes:
        if offset < 0 or size < 0 or offset + size > self.size:  # before memory is taken for it
            raise OSError("its shard ends before the image does")
        content = os.pread(self.descriptor, size, offset)
        if len(content) < size:
            raise OSError("its shard ends before the image does")
        return content

    def __del__(self) -> None:
        with suppress(AttributeError):  # it was not opened
            os.close(self.descriptor)


@dataclass
class Index:
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


def scanned(file: File) -> Index:
    """One pass over the headers. Members in a row with one key, the path up to its first dot, are a sample."""
    if os.pread(file.descriptor, 2, 0) == _GZIP:
        raise tarfile.ReadError("it is compressed, and nothing in it can be read in place; use pipe:gunzip -c FILE")
    index = Index(file.size)
    key, sample = "", dict[str, tarfile.TarInfo]()
    with (
        open(os.dup(file.descriptor), "rb") as stream,
        _believed(),
        tarfile.open(fileobj=stream, mode="r:", tarinfo=_Member) as archive,
    ):
        for member in _forward(archive):
            folder, slash, name = member.name.rpartition("/")
            stem, dot, ending = name.partition(".")
            if not member.isreg() or not stem or not dot:
                continue
            if folder + slash + stem != key or ending.lower() in sample:
                _add(index, key, sample, file)
                key, sample = folder + slash + stem, {}
            sample[ending.lower()] = member
        _add(index, key, sample, file)
        end = archive.offset
    # tarfile takes a file that breaks off at a header for one that ends there.
    if os.pread(file.descriptor, _BLOCK, end) != bytes(_BLOCK):
        raise tarfile.ReadError(f"it breaks off after {end} bytes; copy it again")
    return index


class _Member(tarfile.TarInfo):
    """A member whose extended header is not too long to be gone through; tarfile's time grows with its square."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.size < 0 or (self.type in _EXTENDED and self.size > _LONGEST_HEADER):
            raise tarfile.ReadError(f"a header of {self.size:,} bytes is not to be believed")
        found: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return found


def _forward(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members, each after the one before: sizes below zero would lead round in circles."""
    place = -1
    for member in archive:
        if member.size < 0 or archive.offset <= place:
            raise tarfile.ReadError(f"it leads back from byte {place} to {archive.offset}")
        place = archive.offset
        # Bytes that are no UTF-8 have come as halves of letters, which nobody could write down.
        member.name = member.name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        yield member


@contextmanager
def _believed() -> Iterator[None]:
    """tarfile takes the numbers in headers for what they say, and stumbles where they are none."""
    try:
        yield
    except (ValueError, ArithmeticError, RecursionError, MemoryError, LookupError) as error:
        raise tarfile.ReadError(f"a header is damaged ({type(error).__name__})") from None


def _add(index: Index, key: str, sample: dict[str, tarfile.TarInfo], file: File) -> None:
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


def _label(sample: dict[str, tarfile.TarInfo], file: File) -> str | None:
    """The class by name or number, from the .cls or else from the .json."""
    if "cls" in sample:
        value: object = _text(sample["cls"], file).strip()
    elif "json" in sample:
        value = _listed(_text(sample["json"], file))
    else:
        return None
    return None if value in (None, "", "-1", -1) else str(value).encode("utf-8", "replace").decode()


def _listed(text: str) -> str | int | None:
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(listed, dict):
        return None
    values = [listed[key] for key in _NAMES_BEFORE_NUMBERS if key in listed]
    names = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if is_integer(value)]
    return names[0] if names else numbers[0] if numbers else None


def _text(member: tarfile.TarInfo, file: File) -> str:
    return file.read(member.offset_data, min(member.size, _LONGEST_LABEL)).decode("utf-8", "replace")
