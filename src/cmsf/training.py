"""The loop: order, schedules, logs, evaluation, checkpoints, signals. What a step does is the learner's business."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cmsf.analysis.collapse import RANK_FLOOR, CollapseWatch, Variety
from cmsf.analysis.divergence import describe_numbers, say_number
from cmsf.analysis.gallery import draw_neighbours
from cmsf.analysis.neighbourhood import Neighbourhood, inspect
from cmsf.analysis.pseudo_labels import count_guesses
from cmsf.classifier_folder import ALONG, ClassifierFolder
from cmsf.data import Dataset, Support, Unreadable, feed
from cmsf.errors import BadInput, Elsewhere
from cmsf.evaluation import Extractor, can_judge, evaluate_knn
from cmsf.evaluation.features import clean_views, in_eval_mode
from cmsf.evaluation.judged import HeldOut
from cmsf.evaluation.predicting import score_all
from cmsf.files import FullDisk
from cmsf.learner import Diverged, Learner
from cmsf.metrics import EpochTotals, MetricsLog, SilentLog, step_line
from cmsf.objectives import SUPPORT, Outcome
from cmsf.precautions import Precautions
from cmsf.recipe import Resolved
from cmsf.rows import Rows
from cmsf.run_folder import RunFolder
from cmsf.saving import Saver
from cmsf.schedule import Schedule
from cmsf.screen import Screen
from cmsf.signals import Stopped, caught_signals
from cmsf.views import Batch

__all__ = ["Stopped", "Training"]

T = TypeVar("T")


class Training:
    """A learner on its way from its newest checkpoint, or from the start, to its recipe's end."""

    def __init__(
        self,
        recipe: Resolved,
        learner: Learner,
        data: Dataset,
        folder: RunFolder,
        screen: Screen,
        workers: int,
        precautions: Precautions = Precautions(),
    ) -> None:
        self.recipe, self.learner, self.data, self.folder, self.screen = recipe, learner, data, folder, screen
        self.workers, self.precautions, self.world = workers, precautions, learner.world
        self.device = learner.bank.index.device
        self.truth = data.train.truth.to(self.device)
        self.true_label = data.as_label(data.train.truth).to(self.device)
        self.steps_per_epoch = len(data.train) // recipe.batch_size  # the last incomplete batch is dropped
        self.schedule = Schedule(recipe, self.steps_per_epoch)
        self.step, self.totals, metrics_length = 0, EpochTotals(), 0
        self.watch = CollapseWatch(0.0 if learner.objective.learns_from_labels else RANK_FLOOR)
        self.seen_last = torch.empty(0, dtype=torch.int64)  # the images of the last batch
        self.saver = Saver(folder.checkpoints, recipe, learner)
        progress = self.world.agreed(lambda: self.saver.go_back(screen.say))
        if progress is not None:
            metrics_length = self._go_on_from(progress)
            screen.say(f"going on from step {self.step} of {self.schedule.total}")
        self.world.check_same(self.step, "a checkpoint of step")
        self.kept = self.step  # where the same command would go on
        self.log: MetricsLog | SilentLog = SilentLog()
        if self.world.leads:
            self.log = MetricsLog(folder.metrics_file, folder.tensorboard, metrics_length, self.step, screen.say)
        self.since_log = self.since_epoch = _Pace(self.step)
        self.saved_at = time.monotonic()

    def _go_on_from(self, progress: dict[str, Any]) -> int:
        """Take up what was saved beside the learner; returns how long the log was."""
        try:
            self.totals = EpochTotals.of(progress["totals"])
            self.watch.go_on(progress["watch"])
            step, length = progress["step"], progress["metrics_length"]
            if type(length) is not int or length < 0 or not 0 < step <= self.schedule.total:
                raise ValueError(f"step {step} is none of {self.schedule.total}")
        except (ValueError, KeyError) as error:
            newest = self.saver.newest
            name = "a checkpoint" if newest is None else newest.path
            raise BadInput(f"{name} is damaged ({error}); remove it to go on from the one before") from None
        self.step = step
        return length

    def run(self) -> None:
        with self.log, self.screen.progress(self.schedule.total, self.step), caught_signals() as caught, self.saver:
            try:
                self._go_on(caught)
                with self._room_or_none():
                    self.world.agreed(self.saver.wait)
                self.world.agreed(self.log.synced_length)
            except Elsewhere as error:
                if not isinstance(error, FullDisk):
                    self._save_and_wait()
                raise
            except Diverged as error:
                message = self._how_to_mend(error)
                raise BadInput(message) if self.world.leads else Elsewhere(message) from None
            except FullDisk as error:
                raise FullDisk(f"{error}, and {self._resumes()}") from None
            except BadInput as error:  # such as an image that cannot be read, at the first time it is asked for
                self._save_and_wait()
                elsewhere = ", in another --out; once it is mended" if isinstance(error, Unreadable) else ""
                raise BadInput(f"{error}{elsewhere}, {self._resumes()}") from None
        try:
            self.world.agreed(self._finish)
        except Elsewhere:
            raise
        except FullDisk as error:
            raise FullDisk(f"{error}, and {self._resumes()}") from None

    def _finish(self) -> None:
        """What is left when all is learned, which the first process does."""
        if not self.world.leads:
            return
        self.folder.save_backbone(self.backbone)
        self._save_classifier()
        self.folder.divergence_file.unlink(missing_ok=True)  # it went better this time
        picture = self.folder.neighbours_picture
        draw_neighbours(
            self.backbone, self.data, self.recipe.size, self.device, picture, self.recipe.seed, self.workers
        )

    def _go_on(self, caught: list[int]) -> None:
        done, position = divmod(self.step, self.steps_per_epoch)
        if position == 0 and self.totals.losses:  # it was stopped by what it met at the end of an epoch
            self._end_epoch(done)
        for batch, support in self._batches():
            self._learn(batch, support)
            done, position = divmod(self.step, self.steps_per_epoch)
            signal_number = caught[0] if caught else 0
            stopped, due, failed = self.world.largest(signal_number, self._minutes_are_over(), self.saver.failed)
            if stopped:  # before an evaluation, which would take its time, and is made up for
                raise Stopped(stopped, saved=self._save_and_wait())
            if position == 0:
                self._check_finite()  # before anybody takes features of such a network
                self._end_epoch(done)
                due = due or done % self.recipe.checkpoint_every == 0 or done == self.recipe.epochs
            if failed:
                with self._room_or_none():
                    self.world.agreed(self.saver.wait)
            if due:
                with self._room_or_none():
                    self._save()

    def _minutes_are_over(self) -> bool:
        """Whether the last checkpoint is so long ago that it is time for one in the middle of an epoch."""
        minutes = self.precautions.checkpoint_minutes
        return minutes > 0 and time.monotonic() - self.saved_at >= 60 * minutes

    def _check_finite(self) -> None:
        (broken,) = self.world.largest(not self.learner.encoders.finite())
        if broken:
            raise Diverged("the weights are no numbers")

    def _save(self) -> None:
        """A checkpoint, written while training goes on; FullDisk if the one before it found no room."""
        self._check_finite()
        self.saved_at = time.monotonic()
        length = self.world.agreed(self._settled_length)
        progress = {
            "step": self.step,
            "metrics_length": length,
            "totals": self.totals.plain(),
            "watch": self.watch.plain(),
        }
        self.saver.save(self.step, progress, whole=self.step % self.steps_per_epoch == 0)

    def _settled_length(self) -> int:
        """How long the log is, once the checkpoint before this one is written."""
        self.saver.wait()
        return self.log.synced_length()

    def _save_and_wait(self) -> bool:
        """A checkpoint before the end, which comes anyway; whether there was room for it."""
        self._settle()
        try:
            self._save()
        except FullDisk as error:
            self.screen.say(str(error))
        self._settle()
        return self.kept == self.step

    def _settle(self) -> None:
        """Before the end, which comes anyway: what is being written is written, or it is said that it is not."""
        try:
            self.world.agreed(self.saver.wait)
        except FullDisk as error:
            self.screen.say(str(error))
        (self.kept,) = self.world.largest(self.saver.step)

    @contextmanager
    def _room_or_none(self) -> Iterator[None]:
        """What is written in here may find the disk full: then the run stops, or goes on without, as it was told."""
        try:
            yield
        except FullDisk as error:
            if self.precautions.on_full_disk == "stop":
                raise
            self.screen.say(f"{error}; going on (--on-full-disk), and {self._resumes()}")

    def _resumes(self) -> str:
        return f"the same command goes on from step {max(self.kept, self.saver.step)}"

    def _how_to_mend(self, error: Diverged) -> str:
        self._settle()
        kept = self.saver.newest
        left = "there is no checkpoint yet" if kept is None else f"the checkpoint before it, {kept.path.name}, is kept"
        mixed = " or --precision fp32" if self.recipe.precision in ("fp16", "bf16") else ""
        remedy = f"train with a lower --lr than {self.recipe.lr:g}{mixed}, in another --out"
        about = self._describe_divergence(error, remedy)
        try:
            if self.world.leads:
                self.folder.save_divergence(about)
            more = f"; {self.folder.divergence_file} says more"
        except FullDisk:
            more = ""
        return f"{error} after step {self.step} of {self.schedule.total}; {left}; {remedy}{more}"

    def _describe_divergence(self, error: Diverged, remedy: str) -> dict[str, Any]:
        """Where it was, what it had just seen, and which of its numbers are none."""
        index = self.world.gather(self.seen_last).tolist()
        return {
            "what": str(error),
            "after step": self.step,
            "of steps": self.schedule.total,
            "epoch": self.step // self.steps_per_epoch,
            "losses": {name: say_number(loss) for name, loss in error.losses.items()},
            "lr": self.learner.optimiser.param_groups[0]["lr"],
            "precision": self.recipe.precision,
            "loss scale": self.learner.scaler.get_scale() if self.learner.scaler.is_enabled() else None,
            **describe_numbers(self.learner.encoders.state_dict()),
            "batch": {"index": index, "path": [self.data.train.paths[i] for i in index]},
            "what to do": remedy,
        }

    @property
    def backbone(self) -> nn.Module:
        return self.learner.encoders.online.backbone

    def _batches(self) -> Iterator[tuple[Batch, Batch | None]]:
        """What is left to learn from: the images of every step, and labelled ones beside them where it wants some."""
        crops = self.learner.crops
        support = crops.pop(SUPPORT, None)
        machine = partial(feed, device=self.device, workers=self.workers, say=self.screen.say)
        read = partial(machine, self.data.train, seed=self.recipe.seed)
        batches = read(self._plan(), crops)
        if support is None:
            return self._in_step(zip(batches, repeat(None), strict=False))
        return self._in_step(zip(batches, read(self._support_plan(), {SUPPORT: support}), strict=True))

    def _in_step(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; what one process cannot read stops all of them at the same step."""
        while self.step < self.schedule.total:
            yield self.world.agreed(lambda: next(batches))

    def _support_plan(self) -> Iterator[tuple[int, Int[Tensor, " s"]]]:
        """The labelled images of every step from here on; the step stands for the epoch, so no view comes twice."""
        recipe = self.recipe
        support = Support(self.data.train.label, recipe.support_classes, recipe.support_images, recipe.seed)
        least = len(support(0))
        if least < self.world.size:
            raise BadInput(
                f"{least} labelled images beside a batch are less than {self.world.size} processes; use fewer"
            )
        chosen = ((step, support(step)) for step in range(self.step, self.schedule.total))
        return ((step, index[self.world.part(len(index))]) for step, index in chosen)

    def _plan(self) -> Iterator[tuple[int, Int[Tensor, " b"]]]:
        """The epoch and the images of every step from here on, as far as they are this process's share."""
        size, epoch, order = self.recipe.batch_size, -1, None
        for step in range(self.step, self.schedule.total):
            now, position = divmod(step, self.steps_per_epoch)
            if order is None or now != epoch:
                epoch, order = now, self.data.train.order(self.recipe.seed, now)
            yield epoch, order[position * size : (position + 1) * size][self.world.part(size)]

    def _learn(self, batch: Batch, support: Batch | None) -> None:
        """One step, and its line in the log where one is due."""
        epoch, position = divmod(self.step, self.steps_per_epoch)
        # Before the step that needs it, and not after the one that is done: so a resumed run does it too.
        if self.step and position in (0, self.steps_per_epoch // 2):
            if self.learner.shuffles:  # each process has statistics of its own, of which the first one's count
                self.world.follow_first(self.learner.encoders)
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
        if self.step % self.recipe.log_every == 0 or position == self.steps_per_epoch - 1:
            seen, variety = self._look(query, outcome), Variety.of(query.embedding)
            self.totals.add_seen(seen, variety)
            line = step_line(epoch, outcome, seen, variety) | {"lr": lr, "target_momentum": momentum}
            line["images_per_second"] = self.since_log.images_per_second(self.step, self.recipe.batch_size)
            with self._room_or_none():
                self.world.agreed(lambda: self.log.write("step", self.step, line))
            self.screen.step(self.step, line)
            self.since_log = _Pace(self.step)
            if epoch > 0:  # a network may start with embeddings that are all alike
                self._heed_collapse(self.watch.look(variety))

    def _heed_collapse(self, message: str | None) -> None:
        if message is not None and self.precautions.on_collapse == "stop":
            raise BadInput(
                f"{message} after step {self.step} of {self.schedule.total}; train with a lower --lr or "
                "--weight-decay, in another --out; with --on-collapse warn"
            )
        if message is not None:
            self.watch.said = True
            self.screen.say(
                f"WARNING: {message}: what is learned from here on is worth little (--on-collapse stop stops)"
            )

    def _look(self, query: Rows, outcome: Outcome) -> Neighbourhood | None:
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
        encoders, images = self.learner.encoders, self.data.train.part(index.cpu())
        assert encoders.target is not None
        with in_eval_mode(encoders.target):
            views = clean_views(images, self.recipe.size, self.device, self.workers)
            return self.world.agreed(lambda: torch.cat([encoders.embed(some).embedding for some in views]))

    def _judge(self) -> dict[str, float]:
        """k-NN, and the classifier that is trained along, by the first process; the others wait for it."""
        if not self.world.leads:
            return {}
        features = Extractor(self.backbone, self.recipe.size, self.device, self.workers)
        figures = evaluate_knn(features, self.data).accuracy | self._judge_classifier(features)
        groups = {"classifier_groups": len(self.data.label_names)} if self.data.groups else {}
        return figures | (groups if "classifier" in figures else {})

    def _judge_classifier(self, like: Extractor) -> dict[str, float]:
        """How often the classifier that is trained along is right on test images; nothing where there is none."""
        head, held_out = self.learner.encoders.classifier, HeldOut.of(self.data)
        if head is None or held_out is None:
            return {}
        network = nn.Sequential(self.backbone, head)
        return {"classifier": held_out.right(score_all(network, held_out.split, like)).figure}

    def _save_classifier(self) -> None:
        head = self.learner.encoders.classifier
        if head is not None:
            folder = ClassifierFolder(self.folder.path)
            folder.save_head(head)
            about = {"classes": list(self.data.label_names), "tune": ALONG, "features": head.in_features}
            folder.save_about(about | {"head": "one linear layer, f → classes", "size": self.recipe.size})

    def _end_epoch(self, done: int) -> None:
        line = self.totals.line(done - 1)
        line["lr"] = self.schedule.lr(self.step - 1)
        line["images_per_second"] = self.since_epoch.images_per_second(self.step, self.recipe.batch_size)
        if self.learner.knowledge.guess is not None:
            line["pseudo_cost"] = self.since_epoch.share(self.learner.knowledge.seconds)
        every = self.recipe.evaluate_every
        if can_judge(self.data) and (done == self.recipe.epochs or (every and done % every == 0)):
            line |= self.world.agreed(self._judge)
        with self._room_or_none():
            self.world.agreed(lambda: self.log.write("epoch", self.step, line))
        self.screen.epoch(line)
        self.totals = EpochTotals()
        self.since_log = self.since_epoch = _Pace(self.step)
        self.learner.knowledge.seconds = 0.0


class _Pace:
    """How fast it goes since some step."""

    def __init__(self, step: int) -> None:
        self.first, self.start = step, time.monotonic()

    def images_per_second(self, step: int, batch_size: int) -> float:
        return round((step - self.first) * batch_size / self._seconds, 1)

    def share(self, seconds: float) -> float:
        """How much of the time that was."""
        return round(seconds / self._seconds, 4)

    @property
    def _seconds(self) -> float:
        return max(time.monotonic() - self.start, 1e-9)
