"""Atomic writes, full disks, hashes, and safe reading of files that somebody else may have written."""

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
"""The largest settings file that is read."""
_CHUNK = 16 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk, the user's quota, or the size limit of this process (ulimit -f) is reached."""


class FullDisk(BadInput):
    """There is no room for a file; what was there before is unchanged."""


def _free(path: Path) -> str:
    try:
        above = next(place for place in (path, *path.absolute().parents) if place.exists())
        return format_bytes(shutil.disk_usage(above).free)
    except (OSError, StopIteration):
        return "an unknown amount"


@contextmanager
def detect_full_disk(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turns an OSError of a full disk in its block into FullDisk; needed: how many bytes were to be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        amount = "" if needed is None else f"{format_bytes(needed)} needed, "
        remedy = "raise ulimit -f" if error.errno == errno.EFBIG else "make room"
        reason = f"{os.strerror(error.errno)} ({amount}{_free(path)} free)"
        raise FullDisk(f"cannot write {path}: {reason}; {remedy}") from None


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
    """Yields a temporary file beside `path`, which is synced and replaces it if the block succeeds.

    Raises FullDisk where there is no room; needed: how many bytes the file takes, for the message.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")  # two processes may write the same
    try:
        with detect_full_disk(path, needed):
            temporary.unlink(missing_ok=True)  # a symlink placed there would lead elsewhere
            yield temporary
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)  # the new name too
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(place: Path, last: str) -> Iterator[Path]:
    """Yields a draft folder beside `place`, which becomes `place` if the block succeeds.

    An empty folder that exists, perhaps somebody's working directory, stays the same folder: files are moved into it,
    the one called `last` at the end.
    """
    place = place.resolve()
    draft = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        draft.mkdir(parents=True)
        yield draft
        if place.exists():
            if any(place.iterdir()):  # another process was faster
                raise FileExistsError(errno.EEXIST, "no longer empty", str(place))
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
    """Refuses a symlink to write through: whoever made the folder decides where it leads."""
    if path.is_symlink():
        raise BadInput(f"{path} is a symlink, and nothing is written through one; replace it by what it points to")


def make_folder(path: Path) -> None:
    """Makes a folder unless it exists; a symlink is refused."""
    check_not_symlink(path)
    with detect_full_disk(path):
        path.mkdir(exist_ok=True)


def open_regular_file(path: Path) -> int:
    """Opens a regular file to read and write, or creates it, and returns its descriptor; symlinks are refused."""
    check_not_symlink(path)
    with report_write_errors(path), detect_full_disk(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadInput(f"cannot write {path}: not a regular file; remove it")
    return descriptor


def expand_user(path: str | Path) -> Path:
    """Expands ~ and ~user; an unknown user stays as it is, and the path will not be found."""
    return Path(os.path.expanduser(path))


def check_out(path: str | Path, *suffixes: str) -> Path:
    """Returns the file to write, or raises BadInput before anything is computed for it; suffixes: by default any."""
    out = expand_user(path)
    if suffixes and out.suffix.lower() not in suffixes:
        raise BadInput(f"invalid value --out {out}; expected a {' or '.join(suffixes)} file")
    if os.path.isdir(out) or not os.path.isdir(out.absolute().parent):  # which take a path of any length
        raise BadInput(f"invalid value --out {out}; expected a file in an existing folder")
    return out


def check_regular_file(path: Path) -> int:
    """Returns the size of a regular file; others are refused: a pipe may block, and a device has no end."""
    try:
        state = path.stat()
    except (OSError, ValueError) as error:  # a NUL in a name is a ValueError
        raise BadInput(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(state.st_mode):
        raise BadInput(f"cannot read {path}: not a regular file")
    return state.st_size


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Reads a regular UTF-8 file; BadInput for any other, or a larger one."""
    size = check_regular_file(path)
    if size > max_bytes:
        raise BadInput(f"cannot read {path}: it has {size:,} bytes; the limit is {max_bytes:,}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"cannot read {path}: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None


def read_json(path: Path) -> Any:
    """Reads a JSON file, or raises BadInput."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"cannot read {path}: {error}") from None


def file_version(path: Path) -> tuple[int, ...]:
    """Returns numbers that change when a file is replaced or written to; none where there is no file."""
    state = path.stat() if path.exists() else None
    return () if state is None else (state.st_mtime_ns, state.st_size, state.st_ino)


def write_json(path: Path, value: Any, indent: int = 2, ensure_ascii: bool = True) -> None:
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=ensure_ascii) + "\n")


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        chunks = -(-os.fstat(file.fileno()).st_size // _CHUNK)
        for chunk in track(iter(lambda: file.read(_CHUNK), b""), f"hashing {path.name}", chunks):
            digest.update(chunk)
    return digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


class HashedFile(io.RawIOBase):
    """A new file that hashes what is written to it.

    For writers in C++, which abort the process if a write fails during their cleanup: the first failure is kept, later
    writes are dropped, and `finish` raises it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb", buffering=0)
        self._hash = hashlib.sha256()
        self._error: OSError | None = None
        self.size = 0

    def write(self, data: Any) -> int:
        remaining = everything = memoryview(data).cast("B")
        if self._error is None:
            try:
                while len(remaining):
                    remaining = remaining[self._file.write(remaining) :]
            except OSError as error:
                self._error = error
            else:
                self._hash.update(everything)
                self.size += len(everything)
        return len(everything)

    def finish(self) -> str:
        """Closes the file and returns its SHA-256, or raises the first failure."""
        self._file.close()
        if self._error is not None:
            raise self._error
        return self._hash.hexdigest()
