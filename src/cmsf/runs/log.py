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
from types import TracebackType
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar

from cmsf.utils.errors import BadInput
from cmsf.utils.files import FullDisk, check_regular_file, detect_full_disk, make_folder, open_regular_file


class AppendOnlyFile:
    """A file that whole records are appended to; what finds no room is kept and written before the next record."""

    def __init__(self, path: Path, length: int | None = None) -> None:
        """length: how much of an existing file to keep; None: all. missing: by how much it is shorter than that."""
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


TIMING_FIELDS = ("images_per_second", "pseudo_cost")
"""Fields that differ between two runs which compute the same."""
_EPOCH_LINE = b'{"kind": "epoch", '
_LONGEST_LINE = 1 << 20
_LARGEST = 1e30
_numbers = itertools.count()


class EventWriter:
    """Writes scalars for TensorBoard, which drops what older files have from `first_step` on."""

    def __init__(self, folder: Path, first_step: int) -> None:
        make_folder(folder)
        self._latest = time.time()
        name = f"events.out.tfevents.{int(self._latest):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = AppendOnlyFile(folder / name)
        self._append(Event(wall_time=self._latest, file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._append(Event(wall_time=self._latest, step=first_step, session_log=start))

    def write(self, values: dict[str, float], step: int) -> None:
        now = time.time()
        self._append(*(Event(wall_time=now, step=step, summary=scalar(name, value)) for name, value in values.items()))

    def _append(self, *events: Event) -> None:
        records = io.BytesIO()
        for event in events:
            RecordWriter(records).write(event.SerializeToString())
        self._file.append(records.getvalue())

    def sync(self) -> None:
        self._file.synced_length()

    def close(self) -> None:
        self._file.close()


class MetricsLog:
    """Appends to metrics.jsonl and TensorBoard's events; a resumed run first cuts off what came after its checkpoint.

    On a full disk lines wait in memory, and events, which say the same once more, end.
    """

    def __init__(self, path: Path, tensorboard: Path, length: int, step: int, say: Callable[[str], None]) -> None:
        self.path, self.file, self.say = path, AppendOnlyFile(path, length), say
        if self.file.missing:
            say(f"{path} is {self.file.missing} bytes shorter than at the checkpoint; these lines are lost")
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

    def epochs(self) -> list[dict[str, Any]]:
        """Returns the lines of epochs that are over, as far as they can be read."""
        lines: list[dict[str, Any]] = []
        with suppress(BadInput):  # anybody may have written it
            lines.extend(epoch_lines(self.path))
        return lines

    def synced_length(self) -> int:
        """Syncs the file and returns its length, which a checkpoint records; or raises FullDisk."""
        with self._events_optional():
            if self.events is not None:
                self.events.sync()
        return self.file.synced_length()

    @contextmanager
    def _events_optional(self) -> Iterator[None]:
        try:
            yield
        except FullDisk as error:
            self.say(f"{error}; there are no more events for TensorBoard until the run is resumed")
            if self.events is not None:
                self.events.close()
            self.events = None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        if self.events is not None:
            self.events.close()


class NullLog:
    """The log of all processes but the main one: it writes nothing."""

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        return

    def epochs(self) -> list[dict[str, Any]]:
        return []

    def synced_length(self) -> int:
        return 0

    def __enter__(self) -> NullLog:
        return self

    def __exit__(self, *error: object) -> None:
        return


def epoch_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the epoch lines of a log. A last line without end is still being written, and left out."""
    check_regular_file(path)
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            if not line.endswith(b"\n"):
                if len(line) == _LONGEST_LINE:
                    raise BadInput(f"{path} has a line without end; it is not what cmsf train wrote")
                return
            if line.startswith(_EPOCH_LINE):  # step lines are many; they are not parsed
                yield _parse(line, path)


def _parse(line: bytes, path: Path) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise BadInput(f"{path} has a line that is not a JSON object; it is not what cmsf train wrote")
    return values


def is_plain_number(value: Any) -> bool:
    """Whether a value of a log is a number that can be plotted; anybody may have written it."""
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST


def _plain(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
