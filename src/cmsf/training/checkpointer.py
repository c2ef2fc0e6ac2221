"""Saves checkpoints beside training and restores the newest one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from cmsf.data import Dataset
from cmsf.method.build import make_learner
from cmsf.method.learner import Learner
from cmsf.recipes.recipe import Resolved
from cmsf.runs import checkpoint
from cmsf.runs.checkpoint import (
    CACHE,
    CHANGED,
    PROGRESS,
    STATE,
    Checkpoint,
    Damaged,
    copy_cache,
    copy_changes,
    copy_state,
    put_back,
)
from cmsf.runs.folder import RunFolder
from cmsf.runs.log import MetricsLog, SilentLog
from cmsf.training.options import TrainingOptions
from cmsf.utils.distributed import World
from cmsf.utils.errors import BadInput, first_few
from cmsf.utils.files import FullDisk


class Saver:
    """The checkpoints of a run. Of several processes all copy, for each may hold a share, and the first one writes."""

    def __init__(self, folder: Path, recipe: Resolved, learner: Learner) -> None:
        self.folder, self.recipe, self.learner = folder, recipe, learner
        self.newest: Checkpoint | None = None
        self._whole: checkpoint.Part | None = None  # the cache on the disk that `changed` counts from
        self._damaged: list[Path] = []
        self._thread = ThreadPoolExecutor(1, "saving")
        self._writing: Future[Checkpoint] | None = None

    @property
    def step(self) -> int:
        """Where the same command would go on."""
        return 0 if self.newest is None else self.newest.step

    def go_back(self, take_up: Callable[[dict[str, Any]], None], say: Callable[[str], None]) -> bool:
        """Fill the learner from the newest checkpoint that is whole, naming those that are not.

        take_up: takes the progress that was saved with it, or finds it Damaged. Returns whether there is a checkpoint.
        """
        damaged: list[str] = []
        for path in reversed(checkpoint.manifests(self.folder)):
            try:
                found = Checkpoint.read(path)
                self._check_recipe(found)
                progress = put_back(self.learner, found.contents())
                if progress.get("step") != found.step:
                    raise Damaged("its parts are of another step")
                take_up(progress)
            except Damaged as error:
                damaged.append(f"{path.name}: {str(error)[:80]}")
                self._damaged.append(path)
                say(f"checkpoint {path.name} cannot be used: {error}")
                continue
            self.newest, self._whole = found, found.parts.get(CACHE)
            return True
        if damaged:
            others = f"; likewise {len(damaged) - 1} before it" if len(damaged) > 1 else ""
            raise BadInput(
                f"no checkpoint in {self.folder} can be used ({damaged[0]}{others}); put back what was there, or "
                "remove that folder to begin again"
            )
        return False

    def _check_recipe(self, found: Checkpoint) -> None:
        differences = self.recipe.differences(found.recipe)
        if differences:
            raise BadInput(
                f"checkpoint {found.path.name} is of another recipe than its run ({first_few(differences, 3)}); put "
                "back the recipe.yaml or the checkpoints that belong together"
            )

    def save(self, step: int, progress: dict[str, Any], whole: bool) -> None:
        """Copy everything now and write it while training goes on; waits for the one before, and raises its error.

        whole: all of a cache that is as long as the data, and not just what has changed.
        """
        self.wait()
        cache, world = self.learner.knowledge.apart, self.learner.world
        # The first process knows what is on the disk: whether this step is, and a whole cache that changes count from.
        wanted = 2 if whole or self._whole is None else 1
        wanted = 0 if self.newest is not None and self.newest.step == step else wanted
        (wanted,) = world.all_reduce_max(wanted if world.is_main else 0)
        if not wanted:
            return  # its files are there, and to go on from them is the same
        contents: dict[str, Any] = {STATE: copy_state(self.learner) | {PROGRESS: progress}}
        older = {}
        if cache is not None and wanted == 2:
            contents[CACHE] = copy_cache(cache)
            self._whole = None  # until this one is on the disk
        elif cache is not None:
            contents[CHANGED] = copy_changes(cache)
            older = {} if self._whole is None else {CACHE: self._whole}
        if world.is_main:
            self._writing = self._thread.submit(checkpoint.write, self.folder, step, self.recipe, contents, older)

    @property
    def failed(self) -> bool:
        """Whether a write has failed meanwhile; `wait` says how."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def wait(self) -> None:
        """Until what is being written is on the disk, or its error."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self.newest = writing.result()
            self._whole = self.newest.parts.get(CACHE)
            while self._damaged:  # there is a newer one now, and nobody needs to be told of them again
                self._damaged.pop().unlink(missing_ok=True)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)


class Keeper:
    """A run's checkpoints and log on the disk; all processes of a run ask theirs at the same time.

    kept: the step that the same command would go on from.
    """

    def __init__(
        self,
        saver: Saver,
        log: MetricsLog | SilentLog,
        world: World,
        precautions: TrainingOptions,
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
        length = self.world.fail_together(self._settled_length)
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
        (self.kept,) = self.world.all_reduce_max(self.saver.step)

    def wait(self) -> None:
        """Until what is being written is on the disk, or FullDisk."""
        self.world.fail_together(self.saver.wait)

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


def last_learner(
    folder: RunFolder, recipe: Resolved, data: Dataset, device: torch.device, say: Callable[[str], None]
) -> Learner:
    """As it was when the run was saved last."""
    learner = make_learner(recipe, data.train.label, device)
    if not Saver(folder.checkpoints, recipe, learner).go_back(lambda progress: None, say):
        raise BadInput(f"{folder.checkpoints} has no checkpoint of this version")
    return learner
