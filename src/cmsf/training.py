"""The loop: order, schedules, logs, evaluation, checkpoints, signals. What a step does is the learner's business."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import repeat
from types import FrameType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cmsf import checkpoint
from cmsf.analysis.gallery import draw_neighbours
from cmsf.analysis.neighbourhood import Neighbourhood, inspect
from cmsf.analysis.pseudo_labels import count_guesses
from cmsf.classifier_folder import ALONG, ClassifierFolder
from cmsf.data import Dataset, Support, feed
from cmsf.errors import BadInput
from cmsf.evaluation import Extractor, can_judge, evaluate_knn
from cmsf.evaluation.features import clean_views, in_eval_mode
from cmsf.evaluation.judged import HeldOut
from cmsf.evaluation.predicting import score_all
from cmsf.learner import Diverged, Learner
from cmsf.metrics import EpochTotals, MetricsLog, step_line
from cmsf.objectives import SUPPORT, Outcome
from cmsf.recipe import Resolved
from cmsf.rows import Rows
from cmsf.run_folder import RunFolder
from cmsf.schedule import Schedule
from cmsf.screen import Screen
from cmsf.views import Batch


class Stopped(Exception):
    """A signal ended the run after a checkpoint; the same command goes on from there."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class Training:
    """A learner on its way from its newest checkpoint, or from the start, to its recipe's end."""

    def __init__(
        self, recipe: Resolved, learner: Learner, data: Dataset, folder: RunFolder, screen: Screen, workers: int
    ) -> None:
        self.recipe, self.learner, self.data, self.folder, self.screen = recipe, learner, data, folder, screen
        self.workers = workers
        self.device = learner.bank.index.device
        self.truth = data.train.truth.to(self.device)
        self.true_label = data.as_label(data.train.truth).to(self.device)
        self.steps_per_epoch = len(data.train) // recipe.batch_size  # the last incomplete batch is dropped
        self.schedule = Schedule(recipe, self.steps_per_epoch)
        self.step, self.totals, metrics_length = 0, EpochTotals(), 0
        newest = checkpoint.newest(folder.checkpoints)
        if newest is not None:
            progress = checkpoint.load(newest, learner, self.device)
            self.step, self.totals = progress["step"], EpochTotals(**progress["totals"])
            metrics_length = progress["metrics_length"]
            screen.say(f"going on from step {self.step} of {self.schedule.total}")
        self.log = MetricsLog(folder.metrics_file, folder.tensorboard, metrics_length, self.step)
        self.since_log = self.since_epoch = _Pace(self.step)

    def run(self) -> None:
        with self.log, self.screen.progress(self.schedule.total, self.step), _caught_signals() as caught:
            try:
                self._go_on(caught)
            except Diverged as error:
                raise BadInput(self._how_to_mend(error)) from None
            except BadInput as error:  # an image that cannot be read, at the first time it is asked for
                self._save()
                raise BadInput(
                    f"{error}, in another --out; once it is mended, the same command goes on from step {self.step}"
                ) from None
        self.folder.save_backbone(self.backbone)
        self._save_classifier()
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
            due = False
            if position == 0:
                self._check_finite()  # before anybody takes features of such a network
                self._end_epoch(done)
                due = done % self.recipe.checkpoint_every == 0 or done == self.recipe.epochs
            if due or caught:
                self._save()
            if caught:
                raise Stopped(caught[0])

    def _how_to_mend(self, error: Diverged) -> str:
        kept = checkpoint.newest(self.folder.checkpoints)
        left = "there is no checkpoint yet" if kept is None else f"the checkpoint before it, {kept.name}, is kept"
        mixed = " or --precision fp32" if self.recipe.precision in ("fp16", "bf16") else ""
        return (
            f"{error} after step {self.step} of {self.schedule.total}; {left}; train with a lower --lr than "
            f"{self.recipe.lr:g}{mixed}, in another --out"
        )

    def _check_finite(self) -> None:
        if not self.learner.encoders.finite():
            raise Diverged("the weights are no numbers")

    def _save(self) -> None:
        self._check_finite()
        length, totals = self.log.synced_length(), self.totals.plain()
        progress = {"step": self.step, "metrics_length": length, "totals": totals}
        checkpoint.save(self.folder.checkpoints, self.learner, progress)

    @property
    def backbone(self) -> nn.Module:
        return self.learner.encoders.online.backbone

    def _batches(self) -> Iterator[tuple[Batch, Batch | None]]:
        """What is left to learn from: the images of every step, and labelled ones beside them where it wants some."""
        crops = self.learner.crops
        support = crops.pop(SUPPORT, None)
        read = partial(feed, self.data.train, seed=self.recipe.seed, device=self.device, workers=self.workers)
        batches = read(self._plan(), crops)
        if support is None:
            return zip(batches, repeat(None), strict=False)
        return zip(batches, read(self._support_plan(), {SUPPORT: support}), strict=True)

    def _support_plan(self) -> Iterator[tuple[int, Int[Tensor, " s"]]]:
        """The labelled images of every step from here on; the step stands for the epoch, so no view comes twice."""
        recipe = self.recipe
        support = Support(self.data.train.label, recipe.support_classes, recipe.support_images, recipe.seed)
        return ((step, support(step)) for step in range(self.step, self.schedule.total))

    def _plan(self) -> Iterator[tuple[int, Int[Tensor, " b"]]]:
        """The epoch and the images of every step from here on."""
        size, epoch, order = self.recipe.batch_size, -1, None
        for step in range(self.step, self.schedule.total):
            now, position = divmod(step, self.steps_per_epoch)
            if order is None or now != epoch:
                epoch, order = now, self.data.train.order(self.recipe.seed, now)
            yield epoch, order[position * size : (position + 1) * size]

    def _learn(self, batch: Batch, support: Batch | None) -> None:
        """One step, and its line in the log where one is due."""
        epoch, position = divmod(self.step, self.steps_per_epoch)
        # Before the step that needs it, and not after the one that is done: so a resumed run does it too.
        if self.step and position in (0, self.steps_per_epoch // 2):
            self.learner.knowledge.refresh(self._embed_clean)
        lr, momentum = self.schedule.lr(self.step), self.schedule.target_momentum(self.step)
        for group in self.learner.optimiser.param_groups:
            group["lr"] = lr
        query, outcome = self.learner.step(batch, momentum, support)
        self.totals.add(outcome)
        guess = outcome.guess or self.learner.knowledge.guess
        if guess is not None:
            self.totals.add_guesses(count_guesses(guess, self.true_label))
        self.step += 1
        if self.step % self.recipe.log_every == 0 or position == self.steps_per_epoch - 1:
            seen = self._look(query, outcome)
            self.totals.add_seen(seen, query)
            line = step_line(epoch, outcome, seen, query) | {"lr": lr, "target_momentum": momentum}
            line["images_per_second"] = self.since_log.images_per_second(self.step, self.recipe.batch_size)
            self.log.write("step", self.step, line)
            self.screen.step(self.step, line)
            self.since_log = _Pace(self.step)

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
            return torch.cat([encoders.embed(some).embedding for some in views])

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
            features = Extractor(self.backbone, self.recipe.size, self.device, self.workers)
            line |= evaluate_knn(features, self.data).accuracy | self._judge_classifier(features)
            if self.data.groups and "classifier" in line:
                line["classifier_groups"] = len(self.data.label_names)
        self.log.write("epoch", self.step, line)
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


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM wait here until the step is done; a second one ends the process at once."""
    caught: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def catch(signal_number: int, frame: FrameType | None) -> None:
        caught.append(signal_number)
        for each, handler in previous.items():
            signal.signal(each, handler)

    for each in (signal.SIGINT, signal.SIGTERM):
        try:
            previous[each] = signal.signal(each, catch)
        except ValueError:  # not in the main thread: whoever owns the process handles its signals
            break
    try:
        yield caught
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
