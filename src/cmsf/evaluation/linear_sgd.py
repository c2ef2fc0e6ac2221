"""A linear classifier on frozen features by the paper's protocol, SGD on augmented views; and on clean ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from cmsf.data import Dataset, Split, load_batches
from cmsf.evaluation.features import FeatureExtractor, eval_mode, unit_features
from cmsf.evaluation.linear import STANDARDISED, LinearClassifier, StandardScaler, fit_path, top_k_accuracies
from cmsf.evaluation.metrics import Accuracy, Result
from cmsf.evaluation.splits import describe_splits, evaluation_splits
from cmsf.utils.progress import track

BATCH = 256
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
SCALE = (0.08, 1.0)
"""torchvision's default for a random resized crop."""
_SEED = 0


@dataclass(frozen=True)
class LinearSGDSchedule:
    """The paper's 40 epochs, lr 0.01, × 0.1 at 15 and 30: on ImageNet 200,000 steps.

    A small set makes few steps, which would end far from convergence. A higher learning rate makes up for them as far
    as it is stable, and below 10,000 images also more epochs.
    """

    images: int

    @property
    def epochs(self) -> int:
        return max(40, -(-1600 // self.steps_per_epoch))

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.images // BATCH)

    @property
    def rate(self) -> float:
        return 0.01 * min(10.0, max(1.0, 16_000 / (self.epochs * self.steps_per_epoch)))

    @property
    def drops(self) -> tuple[int, int]:
        return self.epochs * 15 // 40, self.epochs * 30 // 40

    def lr(self, epoch: int) -> float:
        return self.rate * 0.1 ** sum(epoch >= drop for drop in self.drops)

    def __str__(self) -> str:
        first, second = self.drops
        return (
            f"SGD: {self.epochs} epochs, batch {BATCH}, lr {self.rate:.3g}, × 0.1 at {first} and {second}, momentum "
            f"{MOMENTUM}, weight decay {WEIGHT_DECAY:g}"
        )


Batches = Iterator[tuple[int, Tensor, Tensor]]
"""Epoch, indices of images, and their features."""


def evaluate_linear_sgd(extractor: FeatureExtractor, data: Dataset) -> Result:
    """Evaluates a classifier by SGD on features of random crops, flipped or not; and of clean views, also converged."""
    train, test = evaluation_splits(data)
    features, classes = extractor(train), len(data.classes)
    scale, schedule = StandardScaler.fit(features), LinearSGDSchedule(len(train))
    test_features = scale(extractor(test))

    def plan() -> Iterator[tuple[int, Tensor]]:
        return ((epoch, index) for epoch in range(schedule.epochs) for index in train.order(_SEED, epoch).split(BATCH))

    augmented = ((epoch, index, scale(batch)) for epoch, index, batch in _random_views(extractor, train, plan()))
    clean = ((epoch, index, scale(features[index.to(features.device)])) for epoch, index in plan())
    accuracies: dict[str, Accuracy] = {}
    for name, batches in (("SGD", augmented), ("SGD clean", clean)):
        tracked = track(batches, f"linear layer by {name}", schedule.epochs * schedule.steps_per_epoch)
        layer = fit_by_sgd(tracked, features, train.truth, classes, schedule)
        accuracies |= top_k_accuracies(name, layer(test_features).cpu(), test.truth)
    path = fit_path(scale(features), train.truth.to(features.device), classes, (WEIGHT_DECAY,))
    ((_, converged),) = track(path, "linear layer by LBFGS", 1)
    lbfgs = top_k_accuracies("LBFGS", converged(test_features).cpu(), test.truth)["LBFGS top-1"].percent
    effect = accuracies["SGD top-1"].percent - accuracies["SGD clean top-1"].percent
    protocol = {
        "classifier": f"one linear layer from zero, cross-entropy, {schedule}",
        "augmentation": f"SGD: random resized crop of {SCALE[0]:g} to {SCALE[1]:g}, mirrored or not; SGD clean: none",
        "LBFGS to convergence at this weight decay, clean, top-1": lbfgs,
        "effect of augmentation on top-1, points": effect,
        "seed of orders and views": _SEED,
        "layer": STANDARDISED,
        **extractor.protocol(train, test),
        **describe_splits(train, test, data),
    }
    return Result(accuracies, protocol)


def fit_by_sgd(
    batches: Batches,
    template: Float[Tensor, "n f"],
    label: Int[Tensor, " n"],
    classes: int,
    schedule: LinearSGDSchedule,
) -> LinearClassifier:
    """Fits a classifier to batches of features; `template` has their width, dtype and device."""
    present, place = label.unique(return_inverse=True)
    weight = template.new_zeros(len(present), template.shape[1]).requires_grad_()
    bias = template.new_zeros(len(present)).requires_grad_()
    optimizer = torch.optim.SGD([weight, bias], lr=schedule.rate, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    for epoch, index, features in batches:
        optimizer.param_groups[0]["lr"] = schedule.lr(epoch)
        optimizer.zero_grad()
        cross_entropy(linear(features, weight, bias), place[index].to(template.device)).backward()
        optimizer.step()
    return LinearClassifier.from_present(weight.detach(), bias.detach(), present.to(template.device), classes)


def _random_views(extractor: FeatureExtractor, split: Split, plan: Iterable[tuple[int, Tensor]]) -> Batches:
    """Yields features of one random view per image and epoch."""
    preprocessing = extractor.preprocessing
    crop = preprocessing.random_crop(SCALE)
    device, workers = extractor.device, extractor.workers
    with eval_mode(extractor.backbone) as backbone:
        for batch in load_batches(split, plan, {0: crop}, seed=_SEED, device=device, workers=workers):
            yield batch.epoch, batch.index, unit_features(backbone, preprocessing.normalize(batch.crop(crop, 0)))
