"""A file that grows by whole records: never by half of one, and by none twice."""

from __future__ import annotations

import os
from pathlib import Path

from cmsf.files import own_file, room_for


class AppendedFile:
    """What finds no room is kept in memory, and written before the next record when there is some."""

    def __init__(self, path: Path, length: int | None = None) -> None:
        """length: how much of a file that is there already stays; None: all of it. missing: what it has not of that."""
        self.path = path
        self._descriptor = own_file(path)
        there = os.fstat(self._descriptor).st_size
        self.missing = 0 if length is None else max(0, length - there)
        self._length = there if length is None else min(length, there)
        os.ftruncate(self._descriptor, self._length)
        self._unwritten = b""

    def cut_torn_line(self) -> None:
        """Of a file of lines that somebody has shortened, keep the whole ones."""
        self._length = os.pread(self._descriptor, self._length, 0).rfind(b"\n") + 1
        os.ftruncate(self._descriptor, self._length)

    @property
    def behind(self) -> bool:
        """Whether some of it is not on the disk for want of room."""
        return bool(self._unwritten)

    def append(self, record: bytes) -> None:
        self._unwritten += record
        self.catch_up()

    def catch_up(self) -> None:
        """Write what is kept, or FullDisk."""
        with room_for(self.path, len(self._unwritten)):
            try:
                done = 0
                while done < len(self._unwritten):
                    done += os.pwrite(self._descriptor, self._unwritten[done:], self._length + done)
            except OSError:
                os.ftruncate(self._descriptor, self._length)  # what of a record went in comes out again
                raise
        self._length += len(self._unwritten)
        self._unwritten = b""

    def synced_length(self) -> int:
        """How long the file is, once all of it is on the disk."""
        self.catch_up()
        with room_for(self.path):
            os.fsync(self._descriptor)
        return self._length

    def close(self) -> None:
        os.close(self._descriptor)
