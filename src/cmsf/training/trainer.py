"""The loop: order, schedules, logs, evaluation, checkpoints, signals. What a step does is the learner's business."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cmsf.analysis.collapse import RANK_FLOOR, CollapseWatch, Variety
from cmsf.analysis.figures.gallery import draw_neighbours
from cmsf.analysis.neighbourhood import Neighbourhood, inspect
from cmsf.analysis.pseudo_labels import count_guesses
from cmsf.data import Dataset, Unreadable
from cmsf.data.transforms import Batch
from cmsf.evaluation.features import batch_count, clean_views, in_eval_mode
from cmsf.method.learner import Diverged, Learner
from cmsf.method.losses import LossOutput
from cmsf.method.rows import Rows
from cmsf.recipes.recipe import Resolved
from cmsf.runs.checkpoint import Damaged
from cmsf.runs.classifier_folder import ClassifierFolder
from cmsf.runs.folder import RunFolder
from cmsf.runs.log import MetricsLog, SilentLog
from cmsf.training.batches import BatchSampler
from cmsf.training.checkpointer import Keeper, Saver
from cmsf.training.divergence import diagnose, write_diagnosis
from cmsf.training.metrics import EpochTotals, Pace, step_line
from cmsf.training.options import TrainingOptions
from cmsf.training.schedule import Schedule
from cmsf.training.signals import Caught, Stopped
from cmsf.training.validation import Validator
from cmsf.utils.errors import BadInput, FailedElsewhere, Interrupted
from cmsf.utils.files import FullDisk
from cmsf.utils.progress import track
from cmsf.utils.screen import Screen


class Trainer:
    """A learner on its way from its newest checkpoint, or from the start, to its recipe's end."""

    def __init__(
        self,
        recipe: Resolved,
        learner: Learner,
        data: Dataset,
        folder: RunFolder,
        screen: Screen,
        workers: int,
        precautions: TrainingOptions = TrainingOptions(),
        after_epoch: Callable[[], None] = lambda: None,
    ) -> None:
        """after_epoch: what else is done by the first process when the log has said what there is to say of one."""
        self.recipe, self.learner, self.data, self.folder, self.screen = recipe, learner, data, folder, screen
        self.workers, self.on_collapse, self.world = workers, precautions.on_collapse, learner.world
        self.after_epoch = after_epoch
        self.device = learner.bank.index.device
        self.truth = data.train.truth.to(self.device)
        self.true_label = data.as_label(data.train.truth).to(self.device)
        self.reading = BatchSampler(recipe, data, self.world)
        self.steps_per_epoch = self.reading.steps_per_epoch
        self.schedule = Schedule(recipe, self.steps_per_epoch)
        self.judge = Validator(recipe, learner.encoders, data, self.device, workers)
        self.caught = Caught()
        self.step, self.totals, self.metrics_length = 0, EpochTotals(), 0
        self.watch = CollapseWatch(0.0 if learner.objective.learns_from_labels else RANK_FLOOR)
        self.seen_last = torch.empty(0, dtype=torch.int64)  # the images of the last batch
        self.saver = Saver(folder.checkpoints, recipe, learner)
        if self.world.fail_together(lambda: self.saver.go_back(self._take_up, screen.print)):
            screen.print(f"going on from step {self.step} of {self.schedule.total}")
        elif folder.metrics_file.exists() and folder.metrics_file.stat().st_size:
            screen.print("there is no checkpoint, so it begins again at step 0")
        self.world.check_same(self.step, "a checkpoint of step")
        self.log: MetricsLog | SilentLog = SilentLog()
        if self.world.is_main:
            self.log = MetricsLog(folder.metrics_file, folder.tensorboard, self.metrics_length, self.step, screen.print)
        self.keeper = Keeper(self.saver, self.log, self.world, precautions, screen.print, self.step)
        self.since_log = self.since_epoch = Pace(self.step)

    def _take_up(self, progress: dict[str, Any]) -> None:
        """Go on from what was saved beside the learner, or Damaged."""
        try:
            totals = EpochTotals.of(progress["totals"])
            self.watch.go_on(progress["watch"])
            step, length = progress["step"], progress["metrics_length"]
            if type(length) is not int or length < 0 or not 0 < step <= self.schedule.total:
                raise ValueError(f"step {step} is none of {self.schedule.total}")
        except (ValueError, KeyError) as error:
            raise Damaged(str(error)) from None
        self.step, self.totals, self.metrics_length = step, totals, length

    def run(self) -> None:
        panel = self.screen.progress(
            self.recipe.name, self.recipe.epochs, self.schedule.total, self.step, self.log.epochs
        )
        with self.log, panel, self.caught, self.saver:
            try:
                self._go_on_or_save()
            except Diverged as error:
                message = self._diagnose(error)
                raise BadInput(message) if self.world.is_main else FailedElsewhere(message) from None
        try:
            with self.caught:
                self.world.fail_together(self._finish)
        except Interrupted as error:
            raise Stopped(error.signal_number, saved=self.keeper.kept == self.step) from None
        except FailedElsewhere:
            raise
        except FullDisk as error:
            raise FullDisk(f"{error}, and {self.keeper.resumes()}") from None

    def _go_on_or_save(self) -> None:
        """To the end; what stops it on the way there leaves a checkpoint, if there is room."""
        try:
            self._go_on()
            with self.keeper.room_or_none():
                self.keeper.wait()
            self.world.fail_together(self.log.synced_length)
            self.keeper.settle()
        except Interrupted as error:
            raise Stopped(error.signal_number, saved=self._save_and_wait()) from None
        except Diverged:  # of which there is nothing to save
            raise
        except FailedElsewhere as error:
            if not isinstance(error, FullDisk):
                self._save_and_wait()
            raise
        except FullDisk as error:
            raise FullDisk(f"{error}, and {self.keeper.resumes()}") from None
        except BadInput as error:  # such as an image that cannot be read, at the first time it is asked for
            self._save_and_wait()
            elsewhere = ", in another --out; once it is mended" if isinstance(error, Unreadable) else ""
            raise BadInput(f"{error}{elsewhere}, {self.keeper.resumes()}") from None

    def _finish(self) -> None:
        """What is left when all is learned, which the first process does."""
        if not self.world.is_main:
            return
        with self.caught.interrupting():
            self.folder.save_backbone(self.backbone)
            self.judge.save_classifier(ClassifierFolder(self.folder.path))
            self.folder.divergence_file.unlink(missing_ok=True)  # it went better this time
            picture = self.folder.neighbours_picture
            draw_neighbours(
                self.backbone, self.data, self.recipe.size, self.device, picture, self.recipe.seed, self.workers
            )

    def _go_on(self) -> None:
        done, position = divmod(self.step, self.steps_per_epoch)
        if position == 0 and self.totals.losses:  # it was stopped by what it met at the end of an epoch
            self._end_epoch(done)
        for batch, support in self.reading.batches(
            self.step, self.learner.crops, self.device, self.workers, self.screen.print
        ):
            self._learn(batch, support)
            done, position = divmod(self.step, self.steps_per_epoch)
            stopped, due, failed = self.world.all_reduce_max(
                self.caught.signal_number, self.keeper.overdue(), self.saver.failed
            )
            if stopped:  # before an evaluation, which would take its time, and is made up for
                raise Interrupted(stopped)
            if position == 0:
                self._check_finite()  # before anybody takes features of such a network
                self._end_epoch(done)
                due = due or done % self.recipe.checkpoint_every == 0 or done == self.recipe.epochs
            if failed:
                with self.keeper.room_or_none():
                    self.keeper.wait()
            if due:
                with self.keeper.room_or_none():
                    self._check_finite()
                    self.keeper.save(*self._so_far())

    def _check_finite(self) -> None:
        (broken,) = self.world.all_reduce_max(not self.learner.encoders.finite())
        if broken:
            raise Diverged("the weights are no numbers")

    def _so_far(self) -> tuple[int, dict[str, Any], bool]:
        """The step, what is saved beside the learner, and whether an epoch is over."""
        progress = {"totals": self.totals.plain(), "watch": self.watch.plain()}
        return self.step, progress, self.step % self.steps_per_epoch == 0

    def _save_and_wait(self) -> bool:
        self._check_finite()
        return self.keeper.save_and_wait(*self._so_far())

    def _diagnose(self, error: Diverged) -> str:
        self.keeper.settle()
        index = self.world.gather(self.seen_last).tolist()
        message, about = diagnose(error, self.step, self.schedule.total, self.recipe, self.learner, self.saver.newest)
        where = write_diagnosis(self.folder, about, index, self.data.train.paths) if self.world.is_main else ""
        return message + where

    @property
    def backbone(self) -> nn.Module:
        return self.learner.encoders.online.backbone

    def _learn(self, batch: Batch, support: Batch | None) -> None:
        """One step, and its line in the log where one is due."""
        epoch, position = divmod(self.step, self.steps_per_epoch)
        # Before the step that needs it, and not after the one that is done: so a resumed run does it too.
        if self.step and position in (0, self.steps_per_epoch // 2):
            if self.learner.shuffles:  # each process has statistics of its own, of which the first one's count
                self.world.broadcast(self.learner.encoders)
            self.learner.knowledge.refresh(self._embed_clean)
        lr, momentum = self.schedule.lr(self.step), self.schedule.target_momentum(self.step)
        for group in self.learner.optimiser.param_groups:
            group["lr"] = lr
        self.seen_last = batch.index
        query, outcome = self.learner.step(batch, momentum, support)
        self.totals.add(outcome)
        guess = outcome.guess or self.learner.knowledge.guess
        if guess is not None:
            self.totals.add_guesses(count_guesses(guess, self.true_label))
        self.step += 1
        if self.step % self.recipe.log_every and position < self.steps_per_epoch - 1:
            self.screen.reach(self.step)
        else:
            seen, variety = self._look(query, outcome), Variety.of(query.embedding)
            self.totals.add_seen(seen, variety)
            line = step_line(epoch, outcome, seen, variety) | {"lr": lr, "target_momentum": momentum}
            line["images_per_second"] = self.since_log.images_per_second(self.step, self.recipe.batch_size)
            with self.keeper.room_or_none():
                self.world.fail_together(lambda: self.log.write("step", self.step, line))
            self.screen.step(self.step, line)
            self.since_log = Pace(self.step)
            if epoch > 0:  # a network may start with embeddings that are all alike
                self._heed_collapse(self.watch.look(variety))

    def _heed_collapse(self, message: str | None) -> None:
        if message is not None and self.on_collapse == "stop":
            # All processes see it, and the first one says so.
            raise (BadInput if self.world.is_main else FailedElsewhere)(
                f"{message} after step {self.step} of {self.schedule.total}; train with a lower --lr or "
                "--weight-decay, in another --out; with --on-collapse warn"
            )
        if message is not None:
            self.watch.said = True
            self.screen.print(
                f"WARNING: {message}: what is learned from here on is worth little (--on-collapse stop stops)"
            )

    def _look(self, query: Rows, outcome: LossOutput) -> Neighbourhood | None:
        """Purity and ranks of the neighbours that the objective chooses, or could; None where it has no bank."""
        watched, bank, neighbours = self.learner.objective.watched, self.learner.bank, outcome.neighbours
        if watched is None:
            return None
        if neighbours is None:
            neighbours = bank.find(query, watched.constraint, watched.k, watched.include_query)
        seen = inspect(query, bank, watched.constraint, neighbours, self.truth, watched.include_query)
        return replace(seen, chosen=self.learner.objective.chooses)

    def _embed_clean(self, index: Int[Tensor, " m"]) -> Float[Tensor, "m d"]:
        """The target's embeddings of clean views, by the statistics it has gathered and without adding to them."""
        encoders, images = self.learner.encoders, self.data.train.subset(index.cpu())
        assert encoders.target is not None
        with in_eval_mode(encoders.target):
            views = clean_views(images, self.recipe.size, self.device, self.workers)

            def work() -> Float[Tensor, "m d"]:
                with self.caught.interrupting():
                    watched = track(views, "labelled images", batch_count(images))
                    return torch.cat([encoders.embed(some).embedding for some in watched])

            return self.world.fail_together(work)

    def _judge(self) -> dict[str, float]:
        """By the first process; the others wait for it."""
        if not self.world.is_main:
            return {}
        with self.caught.interrupting():
            return self.judge()

    def _end_epoch(self, done: int) -> None:
        line = self.totals.line(done - 1)
        line["lr"] = self.schedule.lr(self.step - 1)
        line["images_per_second"] = self.since_epoch.images_per_second(self.step, self.recipe.batch_size)
        if self.learner.knowledge.guess is not None:
            line["pseudo_cost"] = self.since_epoch.share(self.learner.knowledge.seconds)
        if self.judge.due(done):
            line |= self.world.fail_together(self._judge)
        with self.keeper.room_or_none():
            self.world.fail_together(lambda: self.log.write("epoch", self.step, line))
        self.screen.epoch(line)
        self.totals = EpochTotals()
        self.since_log = self.since_epoch = Pace(self.step)
        self.learner.knowledge.seconds = 0.0
        if self.world.is_main:
            self.after_epoch()
