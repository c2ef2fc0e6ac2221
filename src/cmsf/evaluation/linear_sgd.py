"""A linear layer on frozen features: the paper's protocol, SGD on augmented views, and the same on clean ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from cmsf.data import Dataset, Split, load_batches
from cmsf.data.transforms import RandomCrop, normalize_pixels
from cmsf.evaluation.features import FeatureExtractor, eval_mode, unit_features
from cmsf.evaluation.linear import STANDARDISED, LinearClassifier, StandardScaler, fit_path, top_k_accuracies
from cmsf.evaluation.metrics import Accuracy, Result
from cmsf.evaluation.splits import evaluation_splits
from cmsf.utils.progress import track

BATCH = 256
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
SCALE = (0.08, 1.0)
"""torchvision's default for a random resized crop."""
_SEED = 0


@dataclass(frozen=True)
class LinearSGDSchedule:
    """The paper's 40 epochs, lr 0.01, × 0.1 at 15 and 30: on ImageNet 200,000 steps.

    The few steps that a small set makes would stop it far from where it is going. Longer ones make up for them, as far
    as they stay stable, and below 10,000 images also more epochs.
    """

    images: int

    @property
    def epochs(self) -> int:
        return max(40, -(-1600 // self.steps_an_epoch))

    @property
    def steps_an_epoch(self) -> int:
        return -(-self.images // BATCH)

    @property
    def rate(self) -> float:
        return 0.01 * min(10.0, max(1.0, 16_000 / (self.epochs * self.steps_an_epoch)))

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
"""Epoch, images by index, and their features."""


def evaluate_linear_sgd(features: FeatureExtractor, data: Dataset) -> Result:
    """One layer on normalised, standardised features of random crops, mirrored or not; and of the clean views alone."""
    train, test = evaluation_splits(data)
    known, asked = features(train), features(test)
    scale, course = StandardScaler.fit(known), LinearSGDSchedule(len(train))

    def plan() -> Iterator[tuple[int, Tensor]]:
        return ((epoch, index) for epoch in range(course.epochs) for index in train.order(_SEED, epoch).split(BATCH))

    augmented = ((epoch, index, scale(seen)) for epoch, index, seen in _random_views(features, train, plan()))
    clean = ((epoch, index, scale(known[index.to(known.device)])) for epoch, index in plan())
    judged: dict[str, Accuracy] = {}
    for name, batches in (("SGD", augmented), ("SGD clean", clean)):
        seen = track(batches, f"linear layer by {name}", course.epochs * course.steps_an_epoch)
        layer = fit_by_sgd(seen, known, train.truth, len(data.classes), course)
        judged |= top_k_accuracies(name, layer(scale(asked)).cpu(), test.truth)
    truth, count = train.truth.to(known.device), len(data.classes)
    ((_, converged),) = track(fit_path(scale(known), truth, count, (WEIGHT_DECAY,)), "linear layer by LBFGS", 1)
    same = top_k_accuracies("LBFGS", converged(scale(asked)).cpu(), test.truth)["LBFGS top-1"].percent
    effect = judged["SGD top-1"].percent - judged["SGD clean top-1"].percent
    protocol = {
        "classifier": f"one linear layer from zero, cross-entropy, {course}",
        "augmentation": f"SGD: random resized crop of {SCALE[0]:g} to {SCALE[1]:g}, mirrored or not; SGD clean: none",
        "LBFGS to convergence at this weight decay, clean, top-1": same,
        "effect of augmentation on top-1, points": effect,
        "seed of orders and views": _SEED,
        "layer": STANDARDISED,
        "transform": features.transform,
        "train images": len(train),
        "test images": len(test),
        "classes": len(train.truth.unique()),
        "test split": data.test_origin,
    }
    return Result(judged, protocol)


def fit_by_sgd(
    batches: Batches, like: Float[Tensor, "n f"], label: Int[Tensor, " n"], classes: int, course: LinearSGDSchedule
) -> LinearClassifier:
    """`like` gives the features' width, type and device."""
    present, place = label.unique(return_inverse=True)
    weight = like.new_zeros(len(present), like.shape[1]).requires_grad_()
    bias = like.new_zeros(len(present)).requires_grad_()
    optimiser = torch.optim.SGD([weight, bias], lr=course.rate, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    for epoch, index, features in batches:
        optimiser.param_groups[0]["lr"] = course.lr(epoch)
        optimiser.zero_grad()
        cross_entropy(linear(features, weight, bias), place[index].to(like.device)).backward()
        optimiser.step()
    return LinearClassifier.from_present(weight.detach(), bias.detach(), present.to(like.device), classes)


def _random_views(features: FeatureExtractor, split: Split, plan: Iterable[tuple[int, Tensor]]) -> Batches:
    """The network's features of one random view an image and epoch."""
    crop = RandomCrop(features.size, scale=SCALE)
    with eval_mode(features.backbone) as backbone:
        for batch in load_batches(split, plan, {0: crop}, seed=_SEED, device=features.device, workers=features.workers):
            yield batch.epoch, batch.index, unit_features(backbone, normalize_pixels(batch.crop(crop, 0)))
