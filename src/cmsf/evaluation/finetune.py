"""Fine-tuning: a head on the network, trained with all of it or alone, on the labelled images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from cmsf.data import Split, load_batches
from cmsf.evaluation.features import FeatureExtractor
from cmsf.evaluation.logistic import fit_logistic
from cmsf.evaluation.predict import predict_readable
from cmsf.models.heads import SGDSettings, mlp
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import progress_prefix, track

CROP_SCALE = (0.2, 1.0)
CONFIDENCE_THRESHOLD = 0.9
"""The probability from which a prediction becomes a pseudo-label."""

FineTuneMode = Literal["whole", "head", "linear"]
"""What is trained: the network and a two-layer head, such a head alone, or one linear layer alone."""
FINE_TUNE_MODES: tuple[FineTuneMode, ...] = get_args(FineTuneMode)
HEAD = "two layers, f → 2f → classes, BatchNorm and ReLU between"
LINEAR = "one linear layer on L2-normalised features, f → classes"


@dataclass(frozen=True, kw_only=True)
class FineTuneSettings(SGDSettings):
    """The paper's: 20 epochs of SGD with batch 256 (fewer for few images), lr 0.005, × 0.1 after three quarters."""

    epochs: int = 20
    lr: float = 0.005
    drop: float = 0.75
    min_batch: int = 16
    batches_an_epoch: int = 8
    min_steps: int = 500

    def with_overrides(self, epochs: int | None = None, lr: float | None = None) -> FineTuneSettings:
        """Replaces epochs, which then hold however few the images, and learning rate."""
        settings = self if lr is None else replace(self, lr=lr)
        return settings if epochs is None else replace(settings, epochs=epochs, min_steps=0)

    def batch_size_for(self, count: int) -> int:
        return min(super().batch_size_for(count), max(self.min_batch, count // self.batches_an_epoch))

    def describe(self, count: int) -> str:
        batch, epochs = self.batch_and_epochs(count)
        smallest, largest = CROP_SCALE
        return (
            f"SGD, {epochs} epochs of {count} images, batch {batch}, lr {self.lr}, × 0.1 after {self.drop:.0%} of "
            f"them, momentum {self.momentum}, weight decay {self.weight_decay:g}; random resized crop of {smallest:g} "
            f"to {largest:g}, mirrored or not"
        )


@dataclass(frozen=True)
class Round:
    """The training images of a round of fine-tuning: how many are labelled, and the pseudo-labelled ones by index."""

    number: int
    labelled: int
    pseudo: Int[Tensor, " m"]
    guess: Int[Tensor, " m"]
    schedule: str


def fine_tune(
    extractor: FeatureExtractor,
    split: Split,
    label: Int[Tensor, " n"],
    width: int,
    classes: int,
    seed: int,
    settings: FineTuneSettings = FineTuneSettings(),
) -> nn.Module:
    """Returns a copy of the network, whose features are `width` wide, with a head; both trained on these images."""
    network = make_classifier(extractor, width, classes, seed)
    train_classifier(network, split, label, extractor, seed, settings)
    return network


def make_classifier(
    extractor: FeatureExtractor, width: int, classes: int, seed: int, mode: FineTuneMode = "whole"
) -> nn.Sequential:
    """Returns a copy of the network with an untrained head."""
    backbone = deepcopy(extractor.backbone).float()
    return nn.Sequential(backbone, make_head(width, classes, seed, mode)).to(extractor.device)


def fine_tune_in_rounds(
    network: nn.Sequential,
    split: Split,
    extractor: FeatureExtractor,
    seed: int,
    *,
    rounds: int = 1,
    mode: FineTuneMode = "whole",
    settings: FineTuneSettings = FineTuneSettings(),
) -> Iterator[Round]:
    """Trains a classifier on the labelled images, then again on these and its own confident predictions.

    Each round starts from the network of the one before and predicts afresh; a given label stays as it is. Yields after
    each round, so that the caller may evaluate the network: no truth is read here.
    """
    unlabelled = (split.label == UNKNOWN).nonzero()[:, 0]
    pseudo = guess = torch.empty(0, dtype=torch.int64)
    epochs = 0
    for number in range(1, rounds + 1):
        with progress_prefix(f"round {number} of {rounds}"):
            if number > 1:
                if not len(unlabelled):
                    return
                readable, scores = predict_readable(network, split.subset(unlabelled), extractor)
                place, guess = confident_labels(scores)
                pseudo = unlabelled[readable[place]]
                if not len(pseudo):  # the same images again would be no second round
                    return
            label = split.label.clone()
            label[pseudo] = guess
            known = (label != UNKNOWN).nonzero()[:, 0]
            labelled, label = split.subset(known), label[known]
            if mode == "linear":
                schedule = fit_linear_head(network, labelled, label, extractor)
            else:
                train_classifier(network, labelled, label, extractor, seed, settings, mode, first_epoch=epochs)
                epochs, schedule = epochs + settings.batch_and_epochs(len(known))[1], settings.describe(len(known))
        yield Round(number, len(split) - len(unlabelled), pseudo, guess, schedule)


def confident_labels(scores: Float[Tensor, "n c"]) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"]]:
    """Returns the rows whose highest probability reaches the threshold, and their classes."""
    confidence, guess = scores.softmax(1).max(1)
    place = (confidence >= CONFIDENCE_THRESHOLD).nonzero()[:, 0]
    return place, guess[place]


def train_classifier(
    network: nn.Sequential,
    split: Split,
    label: Int[Tensor, " n"],
    extractor: FeatureExtractor,
    seed: int,
    settings: FineTuneSettings = FineTuneSettings(),
    mode: FineTuneMode = "whole",
    first_epoch: int = 0,
) -> None:
    """Trains on random views of these images, all of which have a label, and leaves the network in eval mode.

    first_epoch: where epochs are counted from, so that every round has an order and views of its own.
    """
    backbone, head = network
    train_heads(backbone, [head], split, label, extractor, seed, settings, mode=mode, first_epoch=first_epoch)


def train_heads(
    backbone: nn.Module,
    heads: Sequence[nn.Module],
    split: Split,
    label: Int[Tensor, " n"],
    extractor: FeatureExtractor,
    seed: int,
    settings: FineTuneSettings = FineTuneSettings(),
    *,
    taught: Sequence[Bool[Tensor, " n"]] | None = None,
    mode: FineTuneMode = "head",
    first_epoch: int = 0,
) -> None:
    """Trains heads side by side on the same features of random views, so that many cost the passes of one.

    taught: the images that each head learns from; None: all of them.
    mode: with `whole` there is one head, and the backbone learns too.
    """
    whole = mode == "whole"
    network = nn.ModuleList([backbone, *heads])
    optimizers = [settings.make_optimizer((network if whole else head).parameters()) for head in heads]
    batch, epochs = settings.batch_and_epochs(len(split))
    # The last incomplete batch of an epoch is dropped: BatchNorm cannot learn from one image.
    steps = len(split) // batch
    plan = (
        (epoch, index)
        for epoch in range(first_epoch, first_epoch + epochs)
        for index in split.order(seed, epoch)[: steps * batch].split(batch)
    )
    crop = extractor.preprocessing.random_crop(CROP_SCALE)
    network.train()
    backbone.train(whole)  # a frozen one stays in eval mode: its BatchNorm statistics are part of what is frozen
    batches = load_batches(split, plan, {0: crop}, seed=seed, device=extractor.device, workers=extractor.workers)
    for views in track(batches, f"fine-tuning on {len(split)} labels", epochs * steps):
        epoch = views.epoch - first_epoch
        with torch.set_grad_enabled(whole):
            features = backbone(extractor.preprocessing.normalize(views.crop(crop, 0)))
        for number, (head, optimizer) in enumerate(zip(heads, optimizers, strict=True)):
            keep = slice(None) if taught is None else taught[number][views.index].nonzero()[:, 0]
            known = views.index[keep]
            if len(known) < 2:  # nor from the only one of a batch
                continue
            optimizer.param_groups[0]["lr"] = settings.lr * (0.1 if epoch >= settings.drop * epochs else 1)
            optimizer.zero_grad()
            loss = cross_entropy(head(features[keep]), label[known].to(extractor.device))
            if not loss.isfinite():
                raise _diverged(epoch, epochs, settings)
            loss.backward()
            optimizer.step()
    if not all(value.isfinite().all() for value in network.state_dict().values()):
        raise _diverged(epochs - 1, epochs, settings)
    network.eval()


def _diverged(epoch: int, epochs: int, settings: SGDSettings) -> BadInput:
    return BadInput(
        f"fine-tuning diverged: its loss is NaN or inf in epoch {epoch + 1} of {epochs}; "
        f"use a smaller learning rate than --lr {settings.lr:g}"
    )


def make_head(width: int, classes: int, seed: int = 0, mode: FineTuneMode = "whole") -> nn.Module:
    """Returns a head whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LinearHead(width, classes) if mode == "linear" else mlp(width, 2 * width, classes)


class LinearHead(nn.Linear):
    """A layer on L2-normalised features, as evaluations take them."""

    def forward(self, features: Float[Tensor, "b f"]) -> Float[Tensor, "b c"]:
        return super().forward(normalize(features, dim=1))


def fit_linear_head(network: nn.Sequential, split: Split, label: Int[Tensor, " n"], extractor: FeatureExtractor) -> str:
    """Fits the head as the evaluation of few labels does; returns how, in words."""
    features = extractor(split)
    head = network[1]
    assert isinstance(head, LinearHead)
    fit = fit_logistic(features, label.to(features.device), head.out_features)
    with torch.no_grad():
        head.weight.copy_(fit.layer.weight)
        head.bias.copy_(fit.layer.bias)
    network.eval()
    return f"{fit}, on clean views of {len(split)} images"
