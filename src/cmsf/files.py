"""Files: written so that they are there whole or not at all, and known by their hash."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_text(path: Path, text: str) -> None:
    with atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
