"""TensorBoard's events, written at once: nothing waits in a queue for a process that may be killed."""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar

from cmsf.appended import AppendedFile
from cmsf.files import own_folder

_numbers = itertools.count()


class Events:
    """A file of scalars; TensorBoard is told to forget what older files have from `first_step` on."""

    def __init__(self, folder: Path, first_step: int) -> None:
        own_folder(folder)
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
