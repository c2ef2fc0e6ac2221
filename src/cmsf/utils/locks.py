"""Locks of files against other processes; the system frees one when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cmsf.utils.errors import BadInput
from cmsf.utils.files import open_regular_file

_LOCK_SECONDS = 10.0
"""How long the children of a killed process may still hold its lock."""


@contextmanager
def hold_lock(file: Path, busy: str) -> Iterator[None]:
    """Holds the lock of a file, which is made if need be; `busy`: what to say of another process that holds it."""
    descriptor = open_regular_file(file)
    try:
        _lock(descriptor, busy)
        with suppress(OSError):  # a full disk; the lock holds without the process id
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, busy: str) -> None:
    """Takes the lock; children of a killed process may hold it for a moment longer."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
            if not _has_ended(holder) or time.monotonic() > deadline:
                raise BadInput(f"{busy} by process {holder}; wait for it, or stop it") from None
        time.sleep(0.05)


def _has_ended(holder: str) -> bool:
    try:
        os.kill(int(holder), 0)
    except ProcessLookupError:
        return True
    except (ValueError, OverflowError, PermissionError):
        pass
    return False
