"""The training loop: batches, schedules, log, validation, checkpoints, signals. A step itself is the learner's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cmsf.analysis.collapse import RANK_FLOOR, CollapseDetector, EmbeddingStats
from cmsf.analysis.figures.gallery import draw_neighbours
from cmsf.analysis.neighbourhood import NeighbourhoodStats, neighbourhood_stats
from cmsf.analysis.pseudo_labels import count_guesses
from cmsf.data import Dataset, Unreadable
from cmsf.data.transforms import Batch, Preprocessing
from cmsf.evaluation.features import BATCH, clean_views, eval_mode
from cmsf.evaluation.splits import describe_votes
from cmsf.method.build import initial_backbone, pretrained_weights
from cmsf.method.learner import Diverged, Learner
from cmsf.method.losses import LossOutput
from cmsf.method.rows import Rows
from cmsf.method.supervision import TRUSTED_FROM
from cmsf.models.expected_input import input_metadata
from cmsf.models.weights import save_weights
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.runs.checkpoint import CorruptCheckpoint
from cmsf.runs.folder import RunFolder
from cmsf.runs.log import KEPT, START, MetricsLog, readable_epoch_lines
from cmsf.training.batches import TrainingBatches
from cmsf.training.best_weights import BestWeights, Judge
from cmsf.training.checkpointer import Checkpointer
from cmsf.training.divergence import diagnose, write_diagnosis
from cmsf.training.metrics import EpochTotals, Throughput, step_line
from cmsf.training.options import TrainingOptions
from cmsf.training.schedule import Schedule
from cmsf.training.signals import SignalHandler, Stopped
from cmsf.training.validation import KNN, Validator, changed_figure, describe_change
from cmsf.utils.errors import BadInput, FailedElsewhere, Interrupted
from cmsf.utils.files import FullDisk
from cmsf.utils.numbers import is_integer
from cmsf.utils.progress import track
from cmsf.utils.screen import Screen


class Trainer:
    """Trains a learner from its latest checkpoint, or from the start, to the last epoch of its recipe."""

    def __init__(
        self,
        recipe: ResolvedRecipe,
        learner: Learner,
        data: Dataset,
        folder: RunFolder,
        screen: Screen,
        workers: int,
        options: TrainingOptions = TrainingOptions(),
        after_epoch: Callable[[], None] = lambda: None,
        judge: Judge | None = None,
    ) -> None:
        """after_epoch: called by the main process once an epoch is logged; judge: what the best epoch is chosen by,
        None: the last one is kept."""
        self.recipe, self.learner, self.data, self.folder, self.screen = recipe, learner, data, folder, screen
        self.workers, self.options, self.world, self.after_epoch = workers, options, learner.world, after_epoch
        self.device = learner.bank.index.device
        self.truth = data.train.truth.to(self.device)
        self.true_label = data.as_label(data.train.truth).to(self.device)
        self.sampler = TrainingBatches(recipe, data, self.world)
        self.steps_per_epoch = self.sampler.steps_per_epoch
        self.schedule = Schedule(recipe, self.steps_per_epoch)
        self.preprocessing = Preprocessing.from_recipe(recipe)
        self.validator = Validator(recipe, learner.encoders, data, self.device, workers, judged=judge is not None)
        features, head = self.validator.features, learner.encoders.classifier
        self.best = None if judge is None else BestWeights(judge, features, head)
        for note in (describe_votes(data), "" if judge is None else judge.note):
            if note:
                screen.print(note)
        self.signals = SignalHandler()
        self.step, self.totals, self.metrics_length = 0, EpochTotals(), 0
        self.collapse = CollapseDetector(0.0 if learner.loss_fn.learns_from_labels else RANK_FLOOR)
        self.kept: dict[str, Any] = {}  # the validation of the epoch whose weights the run would end with now
        self.last_index = torch.empty(0, dtype=torch.int64)  # the images of the last batch
        self.checkpointer = Checkpointer(folder.checkpoints, recipe, learner, screen.print, options, self.best)
        if self.world.raise_on_all_ranks(lambda: self.checkpointer.load_latest(self._load_progress)):
            screen.print(f"resuming from step {self.step} of {self.schedule.total}")
        elif folder.metrics_file.exists() and folder.metrics_file.stat().st_size:
            screen.print("there is no checkpoint, so training begins again at step 0")
        self.world.check_same(self.step, "a checkpoint of step")
        if self.world.is_main:  # the others have none
            self.log = MetricsLog(folder.metrics_file, folder.tensorboard, self.metrics_length, self.step, screen.print)
        self.since_log = self.since_epoch = Throughput(self.step)

    def _load_progress(self, progress: dict[str, Any]) -> None:
        """Restores what `_progress` gave beside the learner, or raises CorruptCheckpoint."""
        try:
            totals = EpochTotals.from_state(progress["totals"])
            self.collapse.load_state_dict(progress["watch"])
            self.kept = _check_figures(progress.get("kept", {}))  # a checkpoint of an earlier version has none
            step, length = progress["step"], progress["metrics_length"]
            if not is_integer(length) or length < 0 or not 0 < step <= self.schedule.total:
                raise ValueError(f"step {step} is not one of {self.schedule.total}")
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpoint(str(error)) from None
        self.step, self.totals, self.metrics_length = step, totals, length
        if self.folder.start_file.exists():  # a run of an earlier version has none
            try:
                self.validator.load_start(self.folder.start_file)
            except BadInput as error:  # no reason to refuse a checkpoint
                self.screen.print(f"{error}; what has changed since the start is not told")

    def fit(self) -> None:
        """Trains to the end and writes the backbone, or raises what stopped it after saving a checkpoint."""
        panel = self.screen.training_panel(
            self.recipe.name,
            self.recipe.epochs,
            self.schedule.total,
            self.step,
            partial(readable_epoch_lines, self.folder.metrics_file),
        )
        with self.log if self.world.is_main else nullcontext(), panel, self.signals, self.checkpointer:
            try:
                self._train_or_save()
            except Diverged as error:
                message = self._diagnose(error)
                raise BadInput(message) if self.world.is_main else FailedElsewhere(message) from None
        try:
            with self.signals:
                self.world.run_on_main(self._save_results, None)
        except Interrupted as error:
            raise Stopped(error.signal_number, saved=self.checkpointer.saved_step == self.step) from None
        except FailedElsewhere:
            raise
        except FullDisk as error:
            raise FullDisk(f"{error}, and {self.checkpointer.resume_hint()}") from None

    def _train_or_save(self) -> None:
        """Trains to the end; whatever stops it before leaves a checkpoint, if there is room."""
        try:
            self._train()
            with self.checkpointer.full_disk_policy():
                self.checkpointer.wait()
                self._log_kept()
            self._sync_log()
            self.checkpointer.finish()
        except Interrupted as error:
            raise Stopped(error.signal_number, saved=self._save_last_checkpoint()) from None
        except Diverged:  # its weights are not worth saving
            raise
        except FailedElsewhere as error:
            if not isinstance(error, FullDisk):
                self._save_last_checkpoint()
            raise
        except FullDisk as error:
            raise FullDisk(f"{error}, and {self.checkpointer.resume_hint()}") from None
        except BadInput as error:  # such as an image that cannot be read
            self._save_last_checkpoint()
            elsewhere = " and another --out; once it is repaired" if isinstance(error, Unreadable) else ""
            raise BadInput(f"{error}{elsewhere}, {self.checkpointer.resume_hint()}") from None

    def _train(self) -> None:
        if self.step == 0:
            self._measure_start()
        epochs, position = divmod(self.step, self.steps_per_epoch)
        if position == 0 and self.totals.losses:  # it was stopped during the validation of this epoch
            self._end_epoch(epochs)
        for batch, support in self.sampler.batches(
            self.step, self.learner.view_crops, self.device, self.workers, self.screen.print
        ):
            self._train_step(batch, support)
            epochs, position = divmod(self.step, self.steps_per_epoch)
            stopped, save, failed = self.world.all_reduce_max(
                self.signals.signal_number, self.checkpointer.is_due(), self.checkpointer.failed
            )
            if stopped:  # before a validation, which takes long and is made up for by the resumed run
                raise Interrupted(stopped)
            if position == 0:
                self._check_finite()  # before the network is validated
                self._end_epoch(epochs)
                save = save or epochs % self.recipe.checkpoint_every == 0 or epochs == self.recipe.epochs
            if failed:
                with self.checkpointer.full_disk_policy():
                    self.checkpointer.wait()
            if save:
                with self.checkpointer.full_disk_policy():
                    self._check_finite()
                    self._save_checkpoint()

    def _log_kept(self) -> None:
        """Logs which epoch the run ends with, and says what has become of the starting weights."""
        if self.best is not None:
            self.world.run_on_main(lambda: self.log.write(KEPT, self.step, self.kept), None)
            self.screen.print(self.best.describe(self.recipe.epochs))
        if changed_figure(self.kept) is not None:
            self.screen.print(describe_change(self.kept))
        elif self.best is not None and not self.best.epoch and KNN in self.kept:
            self.screen.print(f"20-NN {self.kept[KNN]:.2f} %, as at the start")

    def _measure_start(self) -> None:
        """Validates the weights that training starts from, and logs them as epoch 0."""

        def measure() -> dict[str, float]:
            with self.signals.interruptible(), self.validator.features.remembering():
                figures = self.validator.validate_start()
                with self.checkpointer.full_disk_policy():
                    self.validator.save_start(self.folder.start_file)
                return figures | self._judge(0)

        figures: dict[str, float] = self.world.run_on_main(measure, {})
        line: dict[str, Any] = {"epoch": 0} | figures
        with self.checkpointer.full_disk_policy():
            self.world.run_on_main(lambda: self.log.write(START, 0, line), None)
        self.kept = line
        self.screen.start(line)
        self.since_log = self.since_epoch = Throughput(self.step)

    def _judge(self, epochs: int) -> dict[str, float]:
        """Returns the score by which the best epoch is kept; empty where the last one is."""
        return {} if self.best is None else self.best.update(epochs)

    def _train_step(self, batch: Batch, support: Batch | None) -> None:
        epoch, position = divmod(self.step, self.steps_per_epoch)
        self.learner.encoders.freeze_backbone(epoch < self.recipe.freeze_epochs)
        # Before the step that needs it, and not after the one that is done: so a resumed run does it too.
        if self.step and position in (0, self.steps_per_epoch // 2):
            if self.learner.shuffle_batchnorm:  # BatchNorm statistics differ between processes; the main one's count
                self.world.broadcast(self.learner.encoders)
            self.learner.supervision.refresh(self._embed_clean)
        lr, momentum = self.schedule.lr(self.step), self.schedule.target_momentum(self.step)
        for group in self.learner.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self.last_index = batch.index
        query, output = self.learner.step(batch, momentum, support)
        self.totals.add(output)
        guess = output.pseudo_labels or self.learner.supervision.pseudo_labels
        if guess is not None:
            self.totals.add_guesses(count_guesses(guess, self.true_label))
        self.step += 1
        if self.step % self.recipe.log_every and position < self.steps_per_epoch - 1:
            self.screen.advance(self.step)
        else:
            self._log_step(epoch, query, output, {"lr": lr, "target_momentum": momentum})

    def _log_step(self, epoch: int, query: Rows, output: LossOutput, schedules: dict[str, float]) -> None:
        neighbourhood, variety = self._inspect(query, output), EmbeddingStats.of(query.embedding)
        self.totals.add_inspected(neighbourhood, variety)
        line = step_line(epoch, output, neighbourhood, variety) | schedules
        line["images_per_second"] = self.since_log.images_per_second(self.step, self.recipe.batch_size)
        with self.checkpointer.full_disk_policy():
            self.world.run_on_main(lambda: self.log.write("step", self.step, line), None)
        self.screen.step(self.step, line)
        self.since_log = Throughput(self.step)
        if epoch > 0:  # a network may start with embeddings that are all alike
            self._check_collapse(variety)

    def _end_epoch(self, epochs: int) -> None:
        """Validates, if that is due, and logs the epoch; epochs: how many are over."""
        line = self.totals.line(epochs - 1)
        line["lr"] = self.schedule.lr(self.step - 1)
        line["images_per_second"] = self.since_epoch.images_per_second(self.step, self.recipe.batch_size)
        trust = self.learner.supervision.trust()
        if trust is not None:
            line["pseudo_trust"] = trust
        if self.learner.supervision.pseudo_labels is not None:
            line["pseudo_cost"] = self.since_epoch.share(self.learner.supervision.seconds)
        if self.validator.is_due(epochs):
            accuracies: dict[str, float] = self.world.run_on_main(lambda: self._validate(epochs), {})
            line |= accuracies
            if self.best is None or self.best.epoch == epochs:
                self.kept = {"epoch": epochs} | accuracies
        with self.checkpointer.full_disk_policy():
            self.world.run_on_main(lambda: self.log.write("epoch", self.step, line), None)
        self.screen.epoch(line)
        changed = changed_figure(line)
        if changed is not None and line[f"{changed}_change_high"] < 0:
            self.screen.print(f"WARNING: epoch {epochs}: {describe_change(line)}")
        if epochs == self.recipe.epochs and trust is not None and trust < TRUSTED_FROM:
            self._warn_of_pseudo_labels(trust)
        self.totals = EpochTotals()
        self.since_log = self.since_epoch = Throughput(self.step)
        self.learner.supervision.seconds = 0.0
        if self.world.is_main:
            self.after_epoch()

    def _warn_of_pseudo_labels(self, trust: float) -> None:
        init = ", or starting weights with --init," if self.recipe.init == "none" else ""
        self.screen.print(
            f"WARNING: pseudo-labels are right in about {trust:.0f} % of cases by leave-one-out on the "
            f"{len(self.data.train.labelled)} labels given; more labels{init} would help"
        )

    def _validate(self, epochs: int) -> dict[str, float]:
        with self.signals.interruptible(), self.validator.features.remembering():
            return self.validator.validate() | self._judge(epochs)

    def _inspect(self, query: Rows, output: LossOutput) -> NeighbourhoodStats | None:
        """Returns purity and ranks of the neighbours that the loss chooses, or could; None where it has no bank."""
        watched, bank, neighbours = self.learner.loss_fn.logged_search, self.learner.bank, output.neighbours
        if watched is None:
            return None
        if neighbours is None:
            neighbours = bank.search(query, watched.constraint, watched.k, watched.include_query)
        neighbourhood = neighbourhood_stats(
            query, bank, watched.constraint, neighbours, self.truth, watched.include_query
        )
        return replace(neighbourhood, chosen=self.learner.loss_fn.selects_neighbours)

    def _embed_clean(self, index: Int[Tensor, " m"]) -> Float[Tensor, "m d"]:
        """Returns the target's embeddings of clean views, by its running BatchNorm statistics."""
        encoders, images = self.learner.encoders, self.data.train.subset(index.cpu())
        assert encoders.target is not None
        with eval_mode(encoders.target):
            views = clean_views(images, self.preprocessing, self.device, self.workers)

            def embed() -> Float[Tensor, "m d"]:
                with self.signals.interruptible():
                    batches = track(views, "labelled images", len(images), BATCH)
                    return torch.cat([encoders.embed(batch).embedding for batch in batches])

            return self.world.raise_on_all_ranks(embed)

    def _check_finite(self) -> None:
        (broken,) = self.world.all_reduce_max(not self.learner.encoders.is_finite())
        if broken:
            raise Diverged("the weights are NaN or inf")

    def _check_collapse(self, variety: EmbeddingStats) -> None:
        message = self.collapse.update(variety)
        if message is None:
            return
        if self.options.on_collapse == "stop":
            # All processes see it, and the main one reports it.
            raise (BadInput if self.world.is_main else FailedElsewhere)(
                f"{message} after step {self.step} of {self.schedule.total}; train with a lower --lr or "
                "--weight-decay, in another --out; with --on-collapse warn"
            )
        self.collapse.said = True
        self.screen.print(f"WARNING: {message}: further training is worth little (--on-collapse stop stops)")

    def _diagnose(self, error: Diverged) -> str:
        self.checkpointer.finish()
        index = self.world.gather(self.last_index).tolist()
        message, about = diagnose(
            error, self.step, self.schedule.total, self.recipe, self.learner, self.checkpointer.latest
        )
        if not self.world.is_main:
            return message
        return message + self._save_best() + write_diagnosis(self.folder, about, index, self.data.train.paths)

    def _save_best(self) -> str:
        """Writes the best epoch of a run that has diverged; returns where, or "" where there is none, or no room."""
        if self.best is None or not self.best.epoch:
            return ""
        self.best.restore()
        try:
            save_weights(self.learner.encoders.online.backbone, self.folder.best_file, input_metadata(self.recipe))
        except BadInput:  # the diagnosis matters more
            return ""
        return f"; epoch {self.best.epoch}, the best so far, is in {self.folder.best_file}"

    def _save_checkpoint(self) -> None:
        self.checkpointer.save(self.step, self._progress, full_cache=self.step % self.steps_per_epoch == 0)

    def _progress(self) -> dict[str, Any]:
        """Returns what a checkpoint holds beside the learner; the log is on the disk up to this length."""
        return {
            "totals": self.totals.state_dict(),
            "watch": self.collapse.state_dict(),
            "kept": self.kept,
            "step": self.step,
            "metrics_length": self._sync_log(),
        }

    def _sync_log(self) -> int:
        return self.world.run_on_main(lambda: self.log.synced_length(), 0)

    def _save_last_checkpoint(self) -> bool:
        """Saves before an exit that happens anyway; returns whether there was something to save, and room."""
        if not self.step:
            return False
        self._check_finite()
        self.checkpointer.finish()
        try:
            self._save_checkpoint()
        except FullDisk as error:
            self.screen.print(str(error))
        self.checkpointer.finish()
        return self.checkpointer.saved_step == self.step

    def _save_results(self) -> None:
        """Writes the backbone, its classifier and the picture of neighbours."""
        with self.signals.interruptible():
            backbone = self.learner.encoders.online.backbone
            if self.best is not None:
                self.best.restore()
            save_weights(backbone, self.folder.backbone_file, input_metadata(self.recipe))
            self.validator.save_classifier(self.folder)
            for file in (self.folder.divergence_file, self.folder.best_file):  # of an attempt before this one
                file.unlink(missing_ok=True)
            picture = self.folder.neighbours_picture
            seed = self.recipe.seed
            draw_neighbours(
                backbone,
                self.data,
                self.preprocessing,
                self.device,
                picture,
                seed,
                self.workers,
                before=self._starting_backbone(),
            )

    def _starting_backbone(self) -> nn.Module | None:
        """Returns the network with the weights of --init, to compare with; None without, or where they are gone."""
        if self.recipe.init == "none" or not self.recipe.epochs:
            return None
        try:
            return initial_backbone(self.recipe, pretrained_weights(self.recipe)).to(self.device)
        except BadInput:
            return None


def _check_figures(kept: Any) -> dict[str, Any]:
    """Returns the figures of the kept epoch as a checkpoint has them; raises ValueError if they are none."""
    if not isinstance(kept, dict) or not all(type(value) in (int, float) for value in kept.values()):
        raise ValueError("the figures of its kept epoch are none")
    return kept
