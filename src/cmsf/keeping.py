"""When a run saves itself, and what becomes of it where there is no room for that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cmsf.distributed import World
from cmsf.files import FullDisk
from cmsf.metrics import MetricsLog, SilentLog
from cmsf.precautions import Precautions
from cmsf.saving import Saver


class Keeper:
    """A run's checkpoints and log on the disk; all processes of a run ask theirs at the same time.

    kept: the step that the same command would go on from.
    """

    def __init__(
        self,
        saver: Saver,
        log: MetricsLog | SilentLog,
        world: World,
        precautions: Precautions,
        say: Callable[[str], None],
        step: int,
    ) -> None:
        self.saver, self.log, self.world, self.precautions, self.say = saver, log, world, precautions, say
        self.kept, self.saved_at = step, time.monotonic()

    def overdue(self) -> bool:
        """Whether the last checkpoint is so long ago that it is time for one in the middle of an epoch."""
        minutes = self.precautions.checkpoint_minutes
        return minutes > 0 and time.monotonic() - self.saved_at >= 60 * minutes

    def save(self, step: int, progress: dict[str, Any], whole: bool) -> None:
        """A checkpoint, written while training goes on; FullDisk if the one before it found no room."""
        self.saved_at = time.monotonic()
        length = self.world.agreed(self._settled_length)
        self.saver.save(step, progress | {"step": step, "metrics_length": length}, whole)

    def _settled_length(self) -> int:
        """How long the log is, once the checkpoint before this one is written."""
        self.saver.wait()
        return self.log.synced_length()

    def save_and_wait(self, step: int, progress: dict[str, Any], whole: bool) -> bool:
        """A checkpoint before the end, which comes anyway; whether there was room for it."""
        self.settle()
        try:
            self.save(step, progress, whole)
        except FullDisk as error:
            self.say(str(error))
        self.settle()
        return self.kept == step

    def settle(self) -> None:
        """Before the end, which comes anyway: what is being written is written, or it is said that it is not."""
        try:
            self.wait()
        except FullDisk as error:
            self.say(str(error))
        (self.kept,) = self.world.largest(self.saver.step)

    def wait(self) -> None:
        """Until what is being written is on the disk, or FullDisk."""
        self.world.agreed(self.saver.wait)

    @contextmanager
    def room_or_none(self) -> Iterator[None]:
        """What is written in here may find the disk full: then the run stops, or goes on without, as it was told."""
        try:
            yield
        except FullDisk as error:
            if self.precautions.on_full_disk == "stop":
                raise
            self.say(f"{error}; going on (--on-full-disk), and {self.resumes()}")

    def resumes(self) -> str:
        return f"the same command goes on from step {max(self.kept, self.saver.step)}"
