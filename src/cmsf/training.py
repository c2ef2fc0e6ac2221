"""The loop: order, schedules, logs, evaluation, checkpoints, signals. What a step does is the learner's business."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from cmsf import checkpoint
from cmsf.analysis.gallery import draw_neighbours
from cmsf.analysis.neighbourhood import Neighbourhood, histogram, inspect, spread
from cmsf.assembly import make_learner, number
from cmsf.data import Dataset
from cmsf.evaluation import can_judge, evaluate_knn
from cmsf.metrics import MetricsLog
from cmsf.objectives import Outcome
from cmsf.randomness import permutation
from cmsf.recipe import Recipe
from cmsf.rows import Rows
from cmsf.run_folder import RunFolder
from cmsf.screen import Screen


class Stopped(Exception):
    """A signal ended the run after a checkpoint; the same command goes on from there."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


@dataclass
class EpochTotals:
    """What the epoch's line in metrics.jsonl is made of; saved in mid-epoch checkpoints too."""

    losses: dict[str, list[float | Tensor]] = field(default_factory=dict)
    inspected: int = 0
    purity_unconstrained: float = 0.0
    purity_constrained: float = 0.0
    ranks: list[int] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        # Kept where they are: no step waits for the device just to be counted.
        for name, loss in _losses(outcome).items():
            self.losses.setdefault(name, []).append(loss)

    def add_neighbourhood(self, seen: Neighbourhood) -> None:
        self.inspected += 1
        self.purity_unconstrained += seen.purity_unconstrained
        self.purity_constrained += seen.purity_constrained
        self.ranks += seen.rank.tolist()

    def line(self) -> dict[str, Any]:
        ranks = torch.tensor(self.ranks, dtype=torch.int64)
        return {
            **{name: math.fsum(map(float, values)) / len(values) for name, values in self.losses.items()},
            "purity_unconstrained": self.purity_unconstrained / self.inspected,
            "purity_constrained": self.purity_constrained / self.inspected,
            **_rank_summary(ranks),
            "rank_histogram": histogram(ranks),
        }

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"losses": {name: [float(value) for value in kept] for name, kept in self.losses.items()}}


@dataclass
class Schedule:
    """Learning rate and target momentum as functions of the step alone."""

    recipe: Recipe
    steps_per_epoch: int

    def lr(self, step: int) -> float:
        warmup = self.recipe.warmup_epochs * self.steps_per_epoch
        if step < warmup:
            return self.recipe.lr * (step + 1) / warmup
        return self.recipe.lr * _cosine(step / self.total)

    def target_momentum(self, step: int) -> float:
        first, last = self.recipe.target_momentum, self.recipe.target_momentum_end
        return last + (first - last) * _cosine(step / self.total)

    @property
    def total(self) -> int:
        return self.recipe.epochs * self.steps_per_epoch


class Training:
    """A resolved recipe on its way from its newest checkpoint, or from the start, to its end."""

    def __init__(self, recipe: Recipe, data: Dataset, folder: RunFolder, device: torch.device, screen: Screen) -> None:
        self.recipe, self.data, self.folder, self.device, self.screen = recipe, data, folder, device, screen
        self.learner = make_learner(recipe, data.train.truth, device)
        self.truth = data.train.truth.to(device)
        self.batch_size = number(recipe.batch_size)
        self.steps_per_epoch = len(data.train) // self.batch_size  # the last incomplete batch is dropped
        self.schedule = Schedule(recipe, self.steps_per_epoch)
        self.step, self.totals, metrics_length = 0, EpochTotals(), 0
        newest = checkpoint.newest(folder.checkpoints)
        if newest is not None:
            progress = checkpoint.load(newest, self.learner, device)
            self.step, self.totals = progress["step"], EpochTotals(**progress["totals"])
            metrics_length = progress["metrics_length"]
            screen.say(f"going on from step {self.step} of {self.schedule.total}")
        self.log = MetricsLog(folder.metrics_file, folder.tensorboard, metrics_length, self.step)
        self.order = permutation(len(data.train), recipe.seed, self.step // self.steps_per_epoch)
        self.clock, self.clock_step = time.monotonic(), self.step

    def run(self) -> None:
        with self.log, self.screen.progress(self.schedule.total, self.step), _caught_signals() as caught:
            while self.step < self.schedule.total:
                self._learn()
                done, position = divmod(self.step, self.steps_per_epoch)
                due = False
                if position == 0:
                    self._end_epoch(done)
                    due = done % self.recipe.checkpoint_every == 0 or done == self.recipe.epochs
                if due or caught:
                    progress = {"step": self.step, "metrics_length": self.log.length(), "totals": self.totals.plain()}
                    checkpoint.save(self.folder.checkpoints, self.learner, progress)
                if caught:
                    raise Stopped(caught[0])
        size = number(self.recipe.size)
        picture = self.folder.neighbours_picture
        draw_neighbours(self.backbone, self.data, size, self.device, picture, self.recipe.seed)
        self.folder.save_backbone(self.backbone)  # last: with it the run is complete

    @property
    def backbone(self) -> nn.Module:
        return self.learner.encoders.online.backbone

    def _learn(self) -> None:
        """One step, and its line in the log where one is due."""
        epoch, position = divmod(self.step, self.steps_per_epoch)
        if position == 0:
            self.order = permutation(len(self.data.train), self.recipe.seed, epoch)
        index = self.order[position * self.batch_size : (position + 1) * self.batch_size]
        lr, momentum = self.schedule.lr(self.step), self.schedule.target_momentum(self.step)
        for group in self.learner.optimiser.param_groups:
            group["lr"] = lr
        pictures = self.data.train.batch(index, self.device)
        query, outcome = self.learner.step(pictures, index, epoch, momentum)
        self.totals.add(outcome)
        self.step += 1
        if self.step % self.recipe.log_every == 0 or position == self.steps_per_epoch - 1:
            term = self.learner.objective.terms[-1]
            seen = inspect(query, self.learner.bank.rows(), term.constraint, term.k, self.truth)
            self.totals.add_neighbourhood(seen)
            line = _step_line(epoch, outcome, seen, query) | {"lr": lr, "target_momentum": momentum}
            speed = (self.step - self.clock_step) * self.batch_size / max(time.monotonic() - self.clock, 1e-9)
            self.log.write("step", self.step, line | {"images_per_second": round(speed, 1)})
            self.screen.step(self.step, epoch, line, speed)
            self.clock, self.clock_step = time.monotonic(), self.step

    def _end_epoch(self, done: int) -> None:
        line = {"epoch": done - 1, **self.totals.line()}
        every = self.recipe.evaluate_every
        if can_judge(self.data) and (done == self.recipe.epochs or (every and done % every == 0)):
            line |= evaluate_knn(self.backbone, self.data, number(self.recipe.size), self.device).accuracy
        self.log.write("epoch", self.step, line)
        self.screen.epoch(done - 1, line)
        self.totals = EpochTotals()
        self.clock, self.clock_step = time.monotonic(), self.step


def _step_line(epoch: int, outcome: Outcome, seen: Neighbourhood, query: Rows) -> dict[str, Any]:
    return {
        "epoch": epoch,
        **{name: float(loss) for name, loss in _losses(outcome).items()},
        "purity_unconstrained": seen.purity_unconstrained,
        "purity_constrained": seen.purity_constrained,
        **_rank_summary(seen.rank),
        "spread": spread(query.embedding),
    }


def _losses(outcome: Outcome) -> dict[str, Tensor]:
    parts = {f"loss_{name}": part.detach() for name, part in outcome.parts.items()}
    return {"loss": outcome.loss.detach()} | parts


def _rank_summary(ranks: Tensor) -> dict[str, float]:
    """Mean and median (the mean of the middle two) rank of the k-th constrained neighbour in the bank."""
    if not len(ranks):
        return {"rank_mean": math.nan, "rank_median": math.nan}
    return {"rank_mean": float(ranks.double().mean()), "rank_median": float(ranks.double().quantile(0.5))}


def _cosine(share: float) -> float:
    """1 at the start, 0 at the end."""
    return 0.5 * (1 + math.cos(math.pi * share))


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM wait here until the step is done; a second one ends the process at once."""
    caught: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def catch(signal_number: int, frame: FrameType | None) -> None:
        caught.append(signal_number)
        for number_, handler in previous.items():
            signal.signal(number_, handler)

    for number_ in (signal.SIGINT, signal.SIGTERM):
        try:
            previous[number_] = signal.signal(number_, catch)
        except ValueError:  # not in the main thread: whoever owns the process handles its signals
            break
    try:
        yield caught
    finally:
        for number_, handler in previous.items():
            signal.signal(number_, handler)
