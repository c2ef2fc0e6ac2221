"""A linear layer on frozen features: the paper's protocol, SGD on augmented views, and the same on clean ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, normalize

from cmsf.data import Dataset, Split, feed
from cmsf.evaluation.features import Extractor, in_eval_mode
from cmsf.evaluation.judged import judged_splits
from cmsf.evaluation.linear import STANDARDISED, Layer, Standardised, fit_path, judge_scores
from cmsf.evaluation.measures import Judged, Result
from cmsf.progress import shown
from cmsf.views import RandomCrop, normalise

EPOCHS, BATCH = 40, 256
LR, DROPS = 0.01, (15, 30)
_ENOUGH_STEPS, _MOST_TIMES = 16_000, 10
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
SCALE = (0.08, 1.0)
"""torchvision's default for a random resized crop."""
_SEED = 0

Batches = Iterator[tuple[int, Tensor, Tensor]]
"""Epoch, images by index, and their features."""


def evaluate_linear_sgd(features: Extractor, data: Dataset) -> Result:
    """One layer on normalised, standardised features of random crops, mirrored or not; and of the clean views alone."""
    train, test = judged_splits(data)
    known, asked = features(train), features(test)
    scale = Standardised.by(known)

    plan = [(epoch, index) for epoch in range(EPOCHS) for index in train.order(_SEED, epoch).split(BATCH)]
    augmented = ((epoch, index, scale(seen)) for epoch, index, seen in _random_views(features, train, plan))
    clean = ((epoch, index, scale(known[index.to(known.device)])) for epoch, index in plan)
    lr = learning_rate(len(plan))
    judged: dict[str, Judged] = {}
    for name, batches in (("SGD", augmented), ("SGD clean", clean)):
        layer = fit_by_sgd(shown(batches, f"linear layer by {name}", len(plan)), known, train.truth, lr)
        judged |= judge_scores(name, layer(scale(asked).cpu(), len(data.classes)), test.truth)
    ((_, converged),) = fit_path(scale(known).cpu(), train.truth, (WEIGHT_DECAY,))
    same = judge_scores("LBFGS", converged(scale(asked).cpu(), len(data.classes)), test.truth)["LBFGS top-1"].figure
    effect = judged["SGD top-1"].figure - judged["SGD clean top-1"].figure
    protocol = {
        "classifier": f"one linear layer from zero, cross-entropy, SGD: {EPOCHS} epochs, batch {BATCH}, lr {lr:.3g}, "
        f"× 0.1 at {DROPS[0]} and {DROPS[1]}, momentum {MOMENTUM}, weight decay {WEIGHT_DECAY:g}",
        "augmentation": f"SGD: random resized crop of {SCALE[0]:g} to {SCALE[1]:g}, mirrored or not; SGD clean: none",
        "LBFGS to convergence at this weight decay, clean, top-1": same,
        "effect of augmentation on top-1, points": effect,
        "layer": STANDARDISED,
        "transform": features.transform,
        "train images": len(train),
        "test images": len(test),
        "classes": len(train.truth.unique()),
        "test split": data.test_origin,
    }
    return Result(judged, protocol)


def learning_rate(steps: int) -> float:
    """The paper's 0.01 is for the 200,000 steps that 40 epochs of ImageNet are. So few steps as a small set makes would
    stop it far from where it is going: longer ones make up for them, as far as they stay stable."""
    return LR * min(_MOST_TIMES, max(1.0, _ENOUGH_STEPS / steps))


def fit_by_sgd(batches: Batches, like: Float[Tensor, "n f"], label: Int[Tensor, " n"], lr: float) -> Layer:
    """The paper's schedule from this learning rate on; `like` gives the features' width, type and device."""
    classes, place = label.unique(return_inverse=True)
    weight = like.new_zeros(len(classes), like.shape[1]).requires_grad_()
    bias = like.new_zeros(len(classes)).requires_grad_()
    optimiser = torch.optim.SGD([weight, bias], lr=lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    for epoch, index, features in batches:
        optimiser.param_groups[0]["lr"] = lr * 0.1 ** sum(epoch >= drop for drop in DROPS)
        optimiser.zero_grad()
        cross_entropy(linear(features, weight, bias), place[index].to(like.device)).backward()
        optimiser.step()
    return Layer(weight.detach().cpu().double(), bias.detach().cpu().double(), classes)


def _random_views(features: Extractor, split: Split, plan: Sequence[tuple[int, Tensor]]) -> Batches:
    """The network's features of one random view an image and epoch."""
    crop = RandomCrop(features.size, scale=SCALE)
    with in_eval_mode(features.backbone) as backbone:
        for batch in feed(split, plan, {0: crop}, seed=_SEED, device=features.device, workers=features.workers):
            with torch.no_grad():
                seen = normalize(backbone(normalise(batch.crop(crop, 0))).float(), dim=1)
            yield batch.epoch, batch.index, seen
