"""Fine-tuning: a head on the network, trained with all of it or alone, on the images that have a label."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from cmsf.data import Split, load_batches
from cmsf.data.transforms import RandomCrop, normalize_pixels
from cmsf.evaluation.features import FeatureExtractor
from cmsf.evaluation.linear import Standardised, fit_chosen
from cmsf.evaluation.predict import score_readable
from cmsf.models.heads import SGDSettings, mlp
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import progress_prefix, track

SCALE = (0.2, 1.0)
CONFIDENT = 0.9
"""What a network has to be sure of for its answer to become a label."""

Tune = Literal["whole", "head", "linear"]
"""What learns: the network and a two-layer head, such a head alone, or one linear layer alone."""
TUNES: tuple[Tune, ...] = get_args(Tune)


@dataclass(frozen=True, kw_only=True)
class TuningCourse(SGDSettings):
    """The paper's: 20 epochs of SGD with batch 256, lr 0.005 and a tenth of it after three quarters of the way.

    For few images batches are smaller, too.
    """

    epochs: int = 20
    lr: float = 0.005
    drop: float = 0.75
    least_batch: int = 16
    batches_an_epoch: int = 8
    min_steps: int = 500

    def asked(self, epochs: int | None = None, lr: float | None = None) -> TuningCourse:
        """With a user's numbers; epochs that are asked for are so many, however few the images."""
        course = self if lr is None else replace(self, lr=lr)
        return course if epochs is None else replace(course, epochs=epochs, min_steps=0)

    def batch_size_for(self, count: int) -> int:
        return min(super().batch_size_for(count), max(self.least_batch, count // self.batches_an_epoch))

    def describe(self, count: int) -> str:
        batch, epochs = self.batch_and_epochs(count)
        return (
            f"SGD, {epochs} epochs of {count} images, batch {batch}, lr {self.lr}, × 0.1 after {self.drop:.0%} of "
            f"them, momentum {self.momentum}, weight decay {self.weight_decay:g}; random resized crop of {SCALE[0]:g} "
            f"to {SCALE[1]:g}, mirrored or not"
        )


HEAD = "two layers, f → 2f → classes, BatchNorm and ReLU between"
LINEAR = "one linear layer on L2-normalised features, f → classes"


@dataclass(frozen=True)
class Round:
    """What a round of fine-tuning learned from."""

    number: int
    """From 1."""
    labelled: int
    pseudo: Int[Tensor, " m"]
    """The images that had no label but a confident guess, by index."""
    guess: Int[Tensor, " m"]
    course: str


def fine_tune(
    features: FeatureExtractor,
    split: Split,
    label: Int[Tensor, " n"],
    width: int,
    classes: int,
    seed: int,
    course: TuningCourse = TuningCourse(),
) -> nn.Module:
    """A classifier: a copy of the network with a two-layer head, all of it trained on random views of these images.

    width: how many features the network has.
    """
    network = new_classifier(features, width, classes, seed)
    train_classifier(network, split, label, features, seed, course)
    return network


def new_classifier(
    features: FeatureExtractor, width: int, classes: int, seed: int, tune: Tune = "whole"
) -> nn.Sequential:
    """A copy of the network, and a head that knows nothing yet."""
    return nn.Sequential(deepcopy(features.backbone).float(), new_head(width, classes, seed, tune)).to(features.device)


def fine_tune_in_rounds(
    network: nn.Sequential,
    split: Split,
    like: FeatureExtractor,
    seed: int,
    *,
    rounds: int = 1,
    tune: Tune = "whole",
    course: TuningCourse = TuningCourse(),
) -> Iterator[Round]:
    """Train a classifier on the labelled images, then again and again on these and what it is confident of.

    Each round goes on from the network of the one before, and guesses afresh; a label that is given stays as it is. The
    network is handed over after each round, to be judged by whoever knows the truth: nothing here looks at it.
    """
    unlabelled = (split.label == UNKNOWN).nonzero()[:, 0]
    pseudo = guess = torch.empty(0, dtype=torch.int64)
    epochs = 0
    for number in range(1, rounds + 1):
        with progress_prefix(f"round {number} of {rounds}"):
            if number > 1:
                if not len(unlabelled):
                    return
                readable, scores = score_readable(network, split.subset(unlabelled), like)
                place, guess = confident(scores)
                pseudo = unlabelled[readable[place]]
                if not len(pseudo):  # the same images again would be no second round
                    return
            label = split.label.clone()
            label[pseudo] = guess
            known = (label != UNKNOWN).nonzero()[:, 0]
            if tune == "linear":
                how = fit_layer(network, split.subset(known), label[known], like)
            else:
                train_classifier(
                    network, split.subset(known), label[known], like, seed, course, tune, first_epoch=epochs
                )
                epochs, how = epochs + course.batch_and_epochs(len(known))[1], course.describe(len(known))
        yield Round(number, len(split) - len(unlabelled), pseudo, guess, how)


def confident(scores: Float[Tensor, "n c"]) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"]]:
    """Which images a network is sure enough of, and what of."""
    sure, guess = scores.softmax(1).max(1)
    place = (sure >= CONFIDENT).nonzero()[:, 0]
    return place, guess[place]


def train_classifier(
    network: nn.Sequential,
    split: Split,
    label: Int[Tensor, " n"],
    like: FeatureExtractor,
    seed: int,
    course: TuningCourse = TuningCourse(),
    tune: Tune = "whole",
    first_epoch: int = 0,
) -> None:
    """One course on random views of these images, all of which have a label; the network is left in eval mode.

    first_epoch: from where epochs are counted, so that a second course has an order and views of its own.
    """
    backbone, head = network
    whole = tune == "whole"
    learning = network if whole else head
    optimiser = course.make_optimizer(learning.parameters())
    batch, epochs = course.batch_and_epochs(len(split))
    # The last incomplete batch of an epoch is dropped: BatchNorm cannot learn from one image.
    steps = len(split) // batch
    plan = (
        (epoch, index)
        for epoch in range(first_epoch, first_epoch + epochs)
        for index in split.order(seed, epoch)[: steps * batch].split(batch)
    )
    crop = RandomCrop(like.size, scale=SCALE)
    network.eval()
    learning.train()  # a frozen network stays in eval mode: its BatchNorm statistics are part of what is frozen
    batches = load_batches(split, plan, {0: crop}, seed=seed, device=like.device, workers=like.workers)
    for views in track(batches, f"fine-tuning on {len(split)} labels", epochs * steps):
        epoch = views.epoch - first_epoch
        optimiser.param_groups[0]["lr"] = course.lr * (0.1 if epoch >= course.drop * epochs else 1)
        optimiser.zero_grad()
        with torch.set_grad_enabled(whole):
            features = backbone(normalize_pixels(views.crop(crop, 0)))
        loss = cross_entropy(head(features), label[views.index].to(like.device))
        if not loss.isfinite():
            raise _diverged(epoch, epochs, course)
        loss.backward()
        optimiser.step()
    if not all(value.isfinite().all() for value in network.state_dict().values()):
        raise _diverged(epochs - 1, epochs, course)
    network.eval()


def _diverged(epoch: int, epochs: int, course: SGDSettings) -> BadInput:
    return BadInput(
        f"fine-tuning diverged: its loss is not finite in epoch {epoch + 1} of {epochs}; "
        f"use a smaller learning rate than --lr {course.lr:g}"
    )


def new_head(width: int, classes: int, seed: int = 0, tune: Tune = "whole") -> nn.Module:
    """Its weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if tune == "linear":
            return LinearHead(width, classes)
        return mlp(width, 2 * width, classes)


class LinearHead(nn.Linear):
    """A layer on L2-normalised features, as evaluations take them."""

    def forward(self, features: Float[Tensor, "b f"]) -> Float[Tensor, "b c"]:
        return super().forward(normalize(features, dim=1))


def fit_layer(network: nn.Sequential, split: Split, label: Int[Tensor, " n"], like: FeatureExtractor) -> str:
    """The layer that the linear evaluation finds, as the head of this network; returns how it was found."""
    features = like(split)
    scale = Standardised.by(features)
    head = network[1]
    assert isinstance(head, LinearHead)
    found, chosen = fit_chosen(scale(features), label.to(features.device), head.out_features)
    # One layer for both: W (x − mean) / deviation + b.
    weight = found.weight.cpu().double() / scale.deviation.cpu().double()
    bias = found.bias.cpu().double() - weight @ scale.mean.cpu().double()
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    network.eval()
    return f"LBFGS to convergence on clean views of {len(split)} images, weight decay {chosen['weight decay']:g}"
