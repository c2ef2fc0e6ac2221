"""An index of the images in a tar file, made by one pass over its headers."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cmsf.data.decoding import SUFFIXES

_LABEL_KEYS = ("class_name", "label", "cls", "class")
_BLOCK = 512  # of a tar file
_GZIP = b"\x1f\x8b"
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_MAX_HEADER, _MAX_LABEL = 1 << 14, 1 << 20


class RandomAccessFile:
    """A file that any number of threads read from, closed when the last of them has let it go."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.descriptor).st_size

    def read(self, offset: int, size: int) -> bytes:
        """Returns `size` bytes; checks the bounds first, before memory is taken for them."""
        within = offset >= 0 and size >= 0 and offset + size <= self.size
        content = os.pread(self.descriptor, size, offset) if within else b""
        if not within or len(content) < size:
            raise OSError("its shard ends before the image does")
        return content

    def __del__(self) -> None:
        with suppress(AttributeError):  # it was not opened
            os.close(self.descriptor)


@dataclass
class TarIndex:
    """Where the images of a shard lie in it, in the order of the file; kept on the disk as JSON."""

    bytes: int
    """The size of the shard, to know it by."""
    names: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    without_image: int = 0
    left_alone: int = 0
    """Further images of samples that have several."""

    def add(self, sample: dict[str, tarfile.TarInfo], file: RandomAccessFile) -> None:
        """Adds a sample, its members by extension: the first image, and the label from the .cls or .json."""
        images = [ending for ending in sample if f".{ending}" in SUFFIXES]
        images += [ending for ending in sample if ending not in images and ending.endswith(SUFFIXES)]
        if not images:
            self.without_image += bool(sample)
            return
        self.left_alone += len(images) - 1
        member = sample[images[0]]
        self.names.append(member.name)
        self.offsets.append(member.offset_data)
        self.sizes.append(member.size)
        self.labels.append(_label(sample, file))


def scan_tar(file: RandomAccessFile) -> TarIndex:
    """Indexes a tar file. Members in a row with one key, the path up to its first dot, are a sample."""
    if os.pread(file.descriptor, 2, 0) == _GZIP:
        raise tarfile.ReadError("it is compressed, and nothing in it can be read in place; use pipe:gunzip -c FILE")
    index = TarIndex(file.size)
    key, sample = "", dict[str, tarfile.TarInfo]()
    with (
        open(os.dup(file.descriptor), "rb") as stream,
        _damaged_headers(),
        tarfile.open(fileobj=stream, mode="r:", tarinfo=_Member) as archive,
    ):
        for member in _members(archive):
            folder, slash, name = member.name.rpartition("/")
            stem, dot, ending = name.partition(".")
            if not member.isreg() or not stem or not dot:
                continue
            if folder + slash + stem != key or ending.lower() in sample:
                index.add(sample, file)
                key, sample = folder + slash + stem, {}
            sample[ending.lower()] = member
        index.add(sample, file)
        end = archive.offset
    # tarfile takes a file that breaks off at a header for one that ends there.
    if os.pread(file.descriptor, _BLOCK, end) != bytes(_BLOCK):
        raise tarfile.ReadError(f"it breaks off after {end} bytes; copy it again")
    return index


class _Member(tarfile.TarInfo):
    """A member with a bound on its extended header: tarfile's time grows with the square of its length."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.size < 0 or (self.type in _EXTENDED and self.size > _MAX_HEADER):
            raise tarfile.ReadError(f"a header has an impossible size of {self.size:,} bytes")
        member: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return member


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yields the members, each after the one before: negative sizes would lead round in circles."""
    offset = -1
    for member in archive:
        if member.size < 0 or archive.offset <= offset:
            raise tarfile.ReadError(f"it leads back from byte {offset} to {archive.offset}")
        offset = archive.offset
        # Bytes that are not UTF-8 have come as halves of letters, which nobody could write down.
        member.name = member.name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        yield member


@contextmanager
def _damaged_headers() -> Iterator[None]:
    """Raises a ReadError for what tarfile raises where the numbers in a header are wrong."""
    try:
        yield
    except (ValueError, ArithmeticError, RecursionError, MemoryError, LookupError) as error:
        raise tarfile.ReadError(f"a header is damaged ({type(error).__name__})") from None


def _label(sample: dict[str, tarfile.TarInfo], file: RandomAccessFile) -> str | None:
    """Returns the class by name or number, from the .cls or else from the .json."""
    member = sample.get("cls", sample.get("json"))
    if member is None:
        return None
    text = file.read(member.offset_data, min(member.size, _MAX_LABEL)).decode("utf-8", "replace")
    value = text.strip() if "cls" in sample else _json_label(text)
    return None if value in (None, "", "-1", -1) else str(value).encode("utf-8", "replace").decode()


def _json_label(text: str) -> str | int | None:
    """Returns the first name among the usual keys, or else the first whole number."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    values = [content[key] for key in _LABEL_KEYS if key in content]
    names = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return names[0] if names else numbers[0] if numbers else None
