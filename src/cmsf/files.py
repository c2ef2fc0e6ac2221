"""Files: written so that they are there whole or not at all, and known by their hash."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cmsf.errors import BadInput

MOST_OF_TEXT = 16 << 20
"""Bytes of a settings file, and more than any that somebody has written."""


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` to write to; it takes its place, synced to the disk, once that went well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")  # two processes may write the same
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)  # the new name too
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def folder_atomically(place: Path, last: str) -> Iterator[Path]:
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


def from_home(path: str | Path) -> Path:
    """One's home folder for ~; a ~somebody that nobody is called stays as it is, and will not be found."""
    return Path(os.path.expanduser(path))


def check_plain(path: Path) -> int:
    """The size of a file that is there and plain: a pipe would be waited for, and a device has no end."""
    try:
        state = path.stat()
    except (OSError, ValueError) as error:  # a NUL in a name is a ValueError
        raise BadInput(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(state.st_mode):
        raise BadInput(f"cannot read {path}: it is no plain file")
    return state.st_size


def read_text(path: Path, most: int = MOST_OF_TEXT) -> str:
    """A file that somebody else may have written: a plain one, of a bearable size, in UTF-8; or BadInput."""
    size = check_plain(path)
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


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_text(path: Path, text: str) -> None:
    with atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
