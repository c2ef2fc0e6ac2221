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


class AppendedFile:
    """What finds no room is kept in memory, and written before the next record when there is some."""

    def __init__(self, path: Path, length: int | None = None) -> None:
        """length: how much of a file that is there already stays; None: all of it. missing: what it has not of that."""
        self.path = path
        self._descriptor = open_regular_file(path)
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
        with detect_full_disk(self.path, len(self._unwritten)):
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


class Events:
    """A file of scalars; TensorBoard is told to forget what older files have from `first_step` on."""

    def __init__(self, folder: Path, first_step: int) -> None:
        make_folder(folder)
        self._latest = time.time()
        name = f"events.out.tfevents.{int(self._latest):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = AppendedFile(folder / name)
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
    """Appends to metrics.jsonl; a resumed run first cuts off what came after its checkpoint.

    Lines that find no room on the disk are kept until there is some. Of TensorBoard's events, which say the same once
    more, there are then no more.
    """

    def __init__(self, path: Path, tensorboard: Path, length: int, step: int, say: Callable[[str], None]) -> None:
        self.path, self.file, self.say = path, AppendedFile(path, length), say
        if self.file.missing:
            say(f"{path} is {self.file.missing} bytes shorter than at the checkpoint; what they said is lost")
            self.file.cut_torn_line()
        self.events: Events | None = None
        with self._unless_full():
            self.events = Events(tensorboard, step + 1)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Add a line; FullDisk if there is no room for it, the first time."""
        line = {"kind": kind, "step": step} | {name: _plain(value) for name, value in values.items()}
        with self._unless_full():
            if self.events is not None:
                scalars = {
                    f"{kind}/{name}": value
                    for name, value in line.items()
                    if isinstance(value, int | float) and name not in ("step", "epoch")
                }
                self.events.write(scalars, step)
        was_behind = self.file.behind
        try:
            self.file.append((json.dumps(line, allow_nan=False) + "\n").encode())
        except FullDisk as error:
            if not was_behind:
                raise FullDisk(f"{error}; until then its lines are kept in memory") from None

    def epochs(self) -> list[dict[str, Any]]:
        """What the file says of epochs that are over, as far as it can be read."""
        found: list[dict[str, Any]] = []
        with suppress(BadInput):  # anybody may have written it
            found.extend(epoch_lines(self.path))
        return found

    def synced_length(self) -> int:
        """How long the file is, once all of it is on the disk, or FullDisk: what a checkpoint may rely on."""
        with self._unless_full():
            if self.events is not None:
                self.events.sync()
        return self.file.synced_length()

    @contextmanager
    def _unless_full(self) -> Iterator[None]:
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


class SilentLog:
    """Of several processes, one writes; the others have this."""

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        return

    def epochs(self) -> list[dict[str, Any]]:
        return []

    def synced_length(self) -> int:
        return 0

    def __enter__(self) -> SilentLog:
        return self

    def __exit__(self, *error: object) -> None:
        return


def epoch_lines(path: Path) -> Iterator[dict[str, Any]]:
    """What a log says of each epoch. A last line that has no end is still being written, and left out."""
    check_regular_file(path)
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            if not line.endswith(b"\n"):
                if len(line) == _LONGEST_LINE:
                    raise BadInput(f"{path} has a line without end; it is not what cmsf train wrote")
                return
            if line.startswith(_EPOCH_LINE):  # steps are many, and not asked for
                yield _parsed(line, path)


def _parsed(line: bytes, path: Path) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise BadInput(f"{path} has a line that is no JSON object; it is not what cmsf train wrote")
    return said


def is_plain_number(value: Any) -> bool:
    """Whether what a log has in the place of a number is one that can be reckoned with; anybody may have written it."""
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST


def _plain(value: Any) -> Any:
    """JSON has no NaN: a number that is not there is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
