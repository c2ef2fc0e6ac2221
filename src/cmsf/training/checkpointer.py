"""Saves checkpoints beside training and restores the latest one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cmsf.data import Dataset
from cmsf.method.build import make_learner
from cmsf.method.learner import Learner
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.runs import checkpoint
from cmsf.runs.checkpoint import BEST, CACHE, CHANGED, PROGRESS, STATE, Checkpoint, CheckpointFile, CorruptCheckpoint
from cmsf.runs.folder import RunFolder
from cmsf.training.best_weights import BestWeights, split_labels
from cmsf.training.options import TrainingOptions
from cmsf.utils.errors import BadInput, first_few
from cmsf.utils.files import FullDisk


class Checkpointer:
    """Saves and restores a learner. With several processes all call it together, and the main one writes.

    latest: the newest usable checkpoint on the disk, known to the main process.
    saved_step: the step from which the same command would resume, agreed on by all processes.
    """

    def __init__(
        self,
        folder: Path,
        recipe: ResolvedRecipe,
        learner: Learner,
        warn: Callable[[str], None],
        options: TrainingOptions = TrainingOptions(),
        best: BestWeights | None = None,
    ) -> None:
        """best: saved too, where an epoch is kept that need not be the last."""
        self.folder, self.recipe, self.learner, self.world = folder, recipe, learner, learner.world
        self.best = best
        self.warn, self.options = warn, options
        self.latest: Checkpoint | None = None
        self.saved_step, self._saved_at = 0, time.monotonic()
        self._full_cache: CheckpointFile | None = None  # the cache on the disk that changes count from
        self._best: CheckpointFile | None = None  # the best network on the disk
        self._best_epoch = -1  # of the network that was saved last
        self._corrupt: list[Path] = []
        self._writer = ThreadPoolExecutor(1, "saving")
        self._writing: Future[Checkpoint] | None = None

    def load_latest(self, load_progress: Callable[[dict[str, Any]], None] = lambda progress: None) -> bool:
        """Restores the learner from the newest usable checkpoint, and names those that are not; False if none exists.

        load_progress: takes the trainer's saved progress, or raises CorruptCheckpoint.
        """
        errors: list[str] = []
        for path in reversed(checkpoint.manifests(self.folder)):
            try:
                candidate = Checkpoint.read(path)
                self._check_recipe(candidate)
                contents = candidate.load()
                progress = checkpoint.load_state(self.learner, contents)
                if progress.get("step") != candidate.step:
                    raise CorruptCheckpoint("its parts are of another step")
                load_progress(progress)
                self._load_best(contents.get(BEST))
            except CorruptCheckpoint as error:
                errors.append(f"{path.name}: {str(error)[:80]}")
                self._corrupt.append(path)
                self.warn(f"checkpoint {path.name} cannot be used: {error}")
                continue
            self._remember(candidate)
            self._best_epoch = -1 if self.best is None else self.best.epoch
            self.saved_step = candidate.step
            return True
        if errors:
            others = f"; likewise {len(errors) - 1} before it" if len(errors) > 1 else ""
            raise BadInput(
                f"no checkpoint in {self.folder} can be used ({errors[0]}{others}); restore its files, or "
                "remove that folder to begin again"
            )
        return False

    def _load_best(self, saved: Any) -> None:
        if self.best is None:
            return
        try:
            self.best.load_state_dict(saved, self.recipe.epochs)
        except ValueError as error:
            raise CorruptCheckpoint(str(error)) from None

    def _remember(self, newest: Checkpoint) -> None:
        """Takes note of what the newest checkpoint has on the disk."""
        self.latest, self._full_cache, self._best = newest, newest.parts.get(CACHE), newest.parts.get(BEST)

    def _check_recipe(self, candidate: Checkpoint) -> None:
        if differences := self.recipe.differences(candidate.recipe):
            raise BadInput(
                f"checkpoint {candidate.path.name} has another recipe than its run ({first_few(differences, 3)}); "
                "restore the recipe.yaml or the checkpoints that belong together"
            )

    def is_due(self) -> bool:
        """Whether --checkpoint-minutes have passed since the last save."""
        minutes = self.options.checkpoint_minutes
        return minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes

    def save(self, step: int, progress: Callable[[], dict[str, Any]], *, full_cache: bool) -> None:
        """Copies the state now and writes it in a thread; first waits for the previous write, and raises its error.

        progress: gives what is saved beside the learner, once the previous write is done.
        full_cache: the whole embedding cache, which is as long as the data, and not only its changed rows.
        """
        self._saved_at = time.monotonic()
        self.wait()
        extra = progress()
        cache = self.learner.supervision.companion_cache
        # The main process knows what is on the disk: whether this step is, and a full cache that changes count from.
        on_disk = self.latest is not None and self.latest.step == step
        needed = 0 if on_disk else 2 if full_cache or self._full_cache is None else 1
        (needed,) = self.world.all_reduce_max(needed if self.world.is_main else 0)
        if not needed:
            return
        contents: dict[str, Any] = {STATE: checkpoint.state_dict(self.learner) | {PROGRESS: extra}}
        older = {}
        if cache is not None and needed == 2:
            contents[CACHE] = {"embedding": cache.snapshot()}
            self._full_cache = None  # until this one is on the disk
        elif cache is not None:
            contents[CHANGED] = dict(zip(("index", "embedding"), cache.changes(), strict=True))
            older = {} if self._full_cache is None else {CACHE: self._full_cache}
        if self.best is not None and self._best is not None and self.best.epoch == self._best_epoch:
            older[BEST] = self._best
        elif self.best is not None:
            contents[BEST] = self.best.state_dict()
            self._best, self._best_epoch = None, self.best.epoch  # None until it is on the disk
        if self.world.is_main:
            self._writing = self._writer.submit(checkpoint.save, self.folder, step, self.recipe, contents, older)

    @property
    def failed(self) -> bool:
        """Whether a write has failed meanwhile; `wait` raises its error."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def wait(self) -> None:
        """Waits until the pending checkpoint is on the disk, or raises its error in all processes."""
        self.world.raise_on_all_ranks(self._wait)

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._remember(writing.result())
            while self._corrupt:  # there is a newer one now
                self._corrupt.pop().unlink(missing_ok=True)

    def finish(self) -> None:
        """Waits for the pending checkpoint before an exit that happens anyway: a full disk is only reported."""
        try:
            self.wait()
        except FullDisk as error:
            self.warn(str(error))
        (self.saved_step,) = self.world.all_reduce_max(self._latest_step)

    @contextmanager
    def full_disk_policy(self) -> Iterator[None]:
        """Lets FullDisk pass, or reports it and continues, as --on-full-disk says."""
        try:
            yield
        except FullDisk as error:
            if self.options.on_full_disk == "stop":
                raise
            self.warn(f"{error}; training continues (--on-full-disk), and {self.resume_hint()}")

    def resume_hint(self) -> str:
        return f"the same command resumes from step {max(self.saved_step, self._latest_step)}"

    @property
    def _latest_step(self) -> int:
        return 0 if self.latest is None else self.latest.step

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.shutdown(wait=True)


def load_learner(
    folder: RunFolder, recipe: ResolvedRecipe, data: Dataset, device: torch.device, warn: Callable[[str], None]
) -> Learner:
    """Builds the learner of a run and restores its latest checkpoint."""
    training_images, _ = split_labels(recipe, data)
    learner = make_learner(recipe, training_images.train.label, device)
    if not Checkpointer(folder.checkpoints, recipe, learner, warn).load_latest():
        raise BadInput(f"{folder.checkpoints} has no checkpoint of this version")
    return learner
