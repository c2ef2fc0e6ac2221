"""Files: written so that they are there whole or not at all, and known by their hash; and disks that are full."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cmsf.utils.errors import BadInput
from cmsf.utils.progress import track
from cmsf.utils.text import format_bytes

MAX_TEXT_BYTES = 16 << 20
"""Bytes of a settings file, and more than any that somebody has written."""
_PART = 16 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No room on the disk, none in the user's quota, none in a file as this process may write it (ulimit -f)."""


class FullDisk(BadInput):
    """There is no room for what was to be written; what was there before is still there."""


def _is_full(error: OSError) -> bool:
    return error.errno in _FULL


def _full_disk(error: OSError, path: Path, needed: int | None = None) -> FullDisk:
    """What is full, in one line; needed: how many bytes were to be written."""
    wanted = "" if needed is None else f"{format_bytes(needed)} needed, "
    limit = "raise ulimit -f" if error.errno == errno.EFBIG else "make room"
    return FullDisk(f"cannot write {path}: {os.strerror(error.errno or 0)} ({wanted}{_free(path)} free); {limit}")


def _free(path: Path) -> str:
    try:
        above = next(place for place in (path, *path.absolute().parents) if place.exists())
        return format_bytes(shutil.disk_usage(above).free)
    except (OSError, StopIteration):
        return "an unknown amount"


@contextmanager
def detect_full_disk(path: Path, needed: int | None = None) -> Iterator[None]:
    """What is written in here may find the disk full, and then it is FullDisk."""
    try:
        yield
    except OSError as error:
        if _is_full(error):
            raise _full_disk(error, path, needed) from None
        raise


@contextmanager
def report_write_errors(path: Path, remedy: str = "") -> Iterator[None]:
    """Turns an OSError in its block into a BadInput: cannot write `path`, the reason, the remedy."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(f"cannot write {path}: {reason}" + (f"; {remedy}" if remedy else "")) from None


@contextmanager
def atomic_write(path: Path, needed: int | None = None) -> Iterator[Path]:
    """A temporary file beside `path` to write to; it takes its place, synced to the disk, once that went well.

    Where there is no room, FullDisk; needed: how many bytes it will be, to say so.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")  # two processes may write the same
    try:
        with detect_full_disk(path, needed):
            temporary.unlink(missing_ok=True)  # a link that lies in wait would lead elsewhere
            yield temporary
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)  # the new name too
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(place: Path, last: str) -> Iterator[Path]:
    """A draft folder beside `place` to fill; it takes its place once that went well.

    An empty folder that is there already, perhaps somebody's working directory, stays the same folder: then files move
    into it, and the one called `last` comes last.
    """
    place = place.resolve()
    draft = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        draft.mkdir(parents=True)
        yield draft
        if place.exists():
            if any(place.iterdir()):  # somebody was faster
                raise FileExistsError(errno.EEXIST, "it is not empty any more", str(place))
            for file in sorted(draft.iterdir(), key=lambda file: file.name == last):
                file.replace(place / file.name)
        else:
            draft.replace(place)
            _sync(place.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_not_symlink(path: Path) -> None:
    """Refuse to write through a link that whoever made the folder has laid: it may lead anywhere."""
    if path.is_symlink():
        raise BadInput(f"{path} is a link, and nothing is written through one; put what it leads to in its place")


def make_folder(path: Path) -> None:
    """Make a folder that may be there already, but not elsewhere."""
    check_not_symlink(path)
    with detect_full_disk(path):
        path.mkdir(exist_ok=True)


def open_regular_file(path: Path) -> int:
    """The descriptor of a plain file to read and write, made where there is none; never of one elsewhere."""
    check_not_symlink(path)
    with report_write_errors(path), detect_full_disk(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadInput(f"cannot write {path}: it is no plain file; remove it")
    return descriptor


def expand_user(path: str | Path) -> Path:
    """One's home folder for ~; a ~somebody that nobody is called stays as it is, and will not be found."""
    return Path(os.path.expanduser(path))


def check_regular_file(path: Path) -> int:
    """The size of a file that is there and plain: a pipe would be waited for, and a device has no end."""
    try:
        state = path.stat()
    except (OSError, ValueError) as error:  # a NUL in a name is a ValueError
        raise BadInput(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(state.st_mode):
        raise BadInput(f"cannot read {path}: it is no plain file")
    return state.st_size


def read_text(path: Path, most: int = MAX_TEXT_BYTES) -> str:
    """A file that somebody else may have written: a plain one, of a bearable size, in UTF-8; or BadInput."""
    size = check_regular_file(path)
    if size > most:
        raise BadInput(f"cannot read {path}: it has {size:,} bytes, and {most:,} are the most")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"cannot read {path}: byte {error.start} is no UTF-8") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None


def read_json(path: Path) -> Any:
    """What a JSON file says, or BadInput."""
    try:
        return json.loads(read_text(path))
    except BadInput:
        raise
    except (ValueError, RecursionError) as error:
        raise BadInput(f"cannot read {path}: {error}") from None


def file_sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        parts = -(-os.fstat(file.fileno()).st_size // _PART)
        for part in track(iter(lambda: file.read(_PART), b""), f"hashing {path.name}", parts):
            found.update(part)
    return found.hexdigest()


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


class HashedFile(io.RawIOBase):
    """A new file that knows the hash of what was written to it.

    For writers in C++, which end the process if a write fails while they clean up: a failure is remembered, what comes
    after it is dropped, and `finish` raises it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb", buffering=0)
        self._hash = hashlib.sha256()
        self._error: OSError | None = None
        self.size = 0

    def write(self, data: Any) -> int:
        left = whole = memoryview(data).cast("B")
        if self._error is None:
            try:
                while len(left):
                    left = left[self._file.write(left) :]
            except OSError as error:
                self._error = error
            else:
                self._hash.update(whole)
                self.size += len(whole)
        return len(whole)

    def finish(self) -> str:
        """The hash of all that was written, or what failed."""
        self._file.close()
        if self._error is not None:
            raise self._error
        return self._hash.hexdigest()
