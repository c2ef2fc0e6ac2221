"""The log of a run: metrics.jsonl and TensorBoard's events, appended by whole records and readable at any time."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar

from cmsf.utils.errors import BadInput
from cmsf.utils.files import FullDisk, check_regular_file, detect_full_disk, make_folder, open_regular_file
from cmsf.utils.numbers import is_integer

START, KEPT = "start", "kept"
"""Kinds of lines beside those of steps and epochs: the weights before the first step, and those of the epoch that is
kept."""
TIMING_FIELDS = ("images_per_second", "pseudo_cost")
"""Fields that differ between two runs which compute the same."""
_LONGEST_LINE = 1 << 20
_event_file_numbers = itertools.count()


class AppendOnlyFile:
    """A file that whole records are appended to; what finds no room is kept and written before the next record."""

    def __init__(self, path: Path, length: int | None = None) -> None:
        """Opens the file; length: how much of it to keep, None: all. missing: by how much it is shorter than that."""
        self.path = path
        self._descriptor = open_regular_file(path)
        size = os.fstat(self._descriptor).st_size
        self.missing = 0 if length is None else max(0, length - size)
        self._length = size if length is None else min(length, size)
        os.ftruncate(self._descriptor, self._length)
        self._unwritten = b""

    def drop_partial_line(self) -> None:
        """Removes the last line if it has no end."""
        self._length = os.pread(self._descriptor, self._length, 0).rfind(b"\n") + 1
        os.ftruncate(self._descriptor, self._length)

    @property
    def has_unwritten(self) -> bool:
        """Whether records wait in memory for room on the disk."""
        return bool(self._unwritten)

    def append(self, record: bytes) -> None:
        self._unwritten += record
        self.flush()

    def flush(self) -> None:
        """Writes the waiting records, or raises FullDisk."""
        with detect_full_disk(self.path, len(self._unwritten)):
            try:
                done = 0
                while done < len(self._unwritten):
                    done += os.pwrite(self._descriptor, self._unwritten[done:], self._length + done)
            except OSError:
                os.ftruncate(self._descriptor, self._length)  # no partial record stays
                raise
        self._length += len(self._unwritten)
        self._unwritten = b""

    def synced_length(self) -> int:
        """Syncs the file to the disk and returns its length."""
        self.flush()
        with detect_full_disk(self.path):
            os.fsync(self._descriptor)
        return self._length

    def close(self) -> None:
        os.close(self._descriptor)


class EventWriter:
    """Writes scalars for TensorBoard, which drops what older files have from `first_step` on."""

    def __init__(self, folder: Path, first_step: int) -> None:
        make_folder(folder)
        now, number = time.time(), next(_event_file_numbers)
        self.file = AppendOnlyFile(
            folder / f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{number}"
        )
        self._append(Event(wall_time=now, file_version="brain.Event:2"))
        self._append(Event(wall_time=now, step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, values: dict[str, float], step: int) -> None:
        now = time.time()
        self._append(*(Event(wall_time=now, step=step, summary=scalar(name, value)) for name, value in values.items()))

    def _append(self, *events: Event) -> None:
        records = io.BytesIO()
        for event in events:
            RecordWriter(records).write(event.SerializeToString())
        self.file.append(records.getvalue())


class MetricsLog:
    """Appends to metrics.jsonl and TensorBoard's events; a resumed run first cuts off what came after its checkpoint.

    On a full disk lines wait in memory, and events, which say the same once more, end.
    """

    def __init__(self, path: Path, tensorboard: Path, length: int, step: int, warn: Callable[[str], None]) -> None:
        self.file, self.warn = AppendOnlyFile(path, length), warn
        if self.file.missing:
            warn(f"{path} is {self.file.missing} bytes shorter than at the checkpoint; these lines are lost")
            self.file.drop_partial_line()
        self.events: EventWriter | None = None
        with self._events_optional():
            self.events = EventWriter(tensorboard, step + 1)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Adds a line; raises FullDisk the first time there is no room."""
        line = {"kind": kind, "step": step} | {name: _plain(value) for name, value in values.items()}
        with self._events_optional():
            if self.events is not None:
                scalars = {
                    f"{kind}/{name}": value
                    for name, value in line.items()
                    if isinstance(value, int | float) and name not in ("step", "epoch")
                }
                self.events.write(scalars, step)
        waiting = self.file.has_unwritten
        try:
            self.file.append((json.dumps(line, allow_nan=False) + "\n").encode())
        except FullDisk as error:
            if not waiting:
                raise FullDisk(f"{error}; until then its lines are kept in memory") from None

    def synced_length(self) -> int:
        """Syncs the file and returns its length, which a checkpoint records; or raises FullDisk."""
        with self._events_optional():
            if self.events is not None:
                self.events.file.synced_length()
        return self.file.synced_length()

    @contextmanager
    def _events_optional(self) -> Iterator[None]:
        try:
            yield
        except FullDisk as error:
            self.warn(f"{error}; there are no more events for TensorBoard until the run is resumed")
            self._close_events()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()
        self._close_events()

    def _close_events(self) -> None:
        if self.events is not None:
            self.events.file.close()
            self.events = None


def readable_epoch_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the epoch lines of a log up to the first that cannot be read: anybody may have written it."""
    with suppress(BadInput):
        yield from epoch_lines(path)


def epoch_lines(path: Path, kind: str = "epoch") -> Iterator[dict[str, Any]]:
    """Yields the epoch lines of a log, or those of another kind. A last line without end is still being written, and
    left out."""
    check_regular_file(path)
    start = f'{{"kind": "{kind}", '.encode()
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            if not line.endswith(b"\n"):
                if len(line) == _LONGEST_LINE:
                    raise BadInput(f"{path} has a line without end; it is not what cmsf train wrote")
                return
            if line.startswith(start):  # step lines are many; they are not parsed
                try:
                    values = json.loads(line)
                except (ValueError, RecursionError):
                    values = None
                if not isinstance(values, dict):
                    raise BadInput(f"{path} has a line that is not a JSON object; it is not what cmsf train wrote")
                yield values


def start_line(path: Path) -> dict[str, Any]:
    """Returns the figures of the starting weights; empty in the log of an earlier version."""
    return next(epoch_lines(path, START), {})


def kept_line(path: Path, epochs: int) -> dict[str, Any]:
    """Returns the figures of the epoch whose weights the run has ended with; empty where that was not chosen, or not
    yet. epochs: of the recipe."""
    kept: dict[str, Any] = {}
    for kept in epoch_lines(path, KEPT):
        if not is_integer(kept.get("epoch")) or not 0 <= kept["epoch"] <= epochs:
            raise BadInput(f"{path} keeps an epoch that is not one of its recipe")
    return kept


def _plain(value: Any) -> Any:
    """Replaces NaN and inf by None, for JSON has neither."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
