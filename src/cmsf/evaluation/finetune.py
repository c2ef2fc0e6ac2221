"""Fine-tuning: the whole network with a head on top, on the images that have a label."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cmsf.data import Split, feed
from cmsf.evaluation.features import Extractor, clean_views, in_eval_mode
from cmsf.progress import shown
from cmsf.views import RandomCrop, normalise

SCALE = (0.2, 1.0)


@dataclass(frozen=True)
class Course:
    """The paper's: 20 epochs of SGD with batch 256, lr 0.005 and a tenth of it after three quarters of the way.

    Few images make few steps, and those would teach nothing: batches are then smaller and epochs more.
    """

    epochs: int = 20
    batch: int = 256
    lr: float = 0.005
    drop: float = 0.75
    momentum: float = 0.9
    weight_decay: float = 1e-4
    least_batch: int = 16
    batches_an_epoch: int = 8
    least_steps: int = 500

    def for_images(self, count: int) -> tuple[int, int]:
        """Batch size and epochs."""
        batch = min(self.batch, count, max(self.least_batch, count // self.batches_an_epoch))
        return batch, max(self.epochs, -(-self.least_steps // (count // batch)))

    def describe(self, count: int) -> str:
        batch, epochs = self.for_images(count)
        return (
            f"SGD, {epochs} epochs of {count} images, batch {batch}, lr {self.lr}, × 0.1 after {self.drop:.0%} of "
            f"them, momentum {self.momentum}, weight decay {self.weight_decay:g}; random resized crop of {SCALE[0]:g} "
            f"to {SCALE[1]:g}, mirrored or not"
        )


HEAD = "two layers, f → 2f → classes, BatchNorm and ReLU between"


def fine_tune(
    features: Extractor,
    split: Split,
    label: Int[Tensor, " n"],
    width: int,
    classes: int,
    seed: int,
    course: Course = Course(),
) -> nn.Module:
    """A classifier: a copy of the network with a two-layer head, all of it trained on random views of these images.

    width: how many features the network has.
    """
    network = nn.Sequential(deepcopy(features.backbone), new_head(width, classes, seed)).to(features.device)
    optimiser = torch.optim.SGD(
        network.parameters(), lr=course.lr, momentum=course.momentum, weight_decay=course.weight_decay
    )
    batch, epochs = course.for_images(len(split))
    # The last incomplete batch of an epoch is dropped: BatchNorm cannot learn from one image.
    steps = len(split) // batch
    plan = (
        (epoch, index) for epoch in range(epochs) for index in split.order(seed, epoch)[: steps * batch].split(batch)
    )
    crop = RandomCrop(features.size, scale=SCALE)
    network.train()
    batches = feed(split, plan, {0: crop}, seed=seed, device=features.device, workers=features.workers)
    for views in shown(batches, f"fine-tuning on {len(split)} labels", epochs * steps):
        optimiser.param_groups[0]["lr"] = course.lr * (0.1 if views.epoch >= course.drop * epochs else 1)
        optimiser.zero_grad()
        scores = network(normalise(views.crop(crop, 0)))
        cross_entropy(scores, label[views.index].to(features.device)).backward()
        optimiser.step()
    return network.eval()


def new_head(width: int, classes: int, seed: int) -> nn.Sequential:
    """Its weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(width, 2 * width, bias=False),
            nn.BatchNorm1d(2 * width),
            nn.ReLU(inplace=True),
            nn.Linear(2 * width, classes),
        )


def class_scores(network: nn.Module, split: Split, like: Extractor) -> Float[Tensor, "n c"]:
    """Of clean views, on the CPU."""
    with in_eval_mode(network), torch.no_grad():
        batches = clean_views(split, like.size, like.device, like.workers)
        return torch.cat([network(views).float().cpu() for views in batches])
