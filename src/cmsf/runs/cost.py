"""The compute that a recipe will cost and a run has cost, by the paper's equation (`analysis.compute`).

Passes are those that the loss declares, through the backbone alone; what a pass costs is counted in the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from cmsf.analysis.compute import Compute, Passes, share_of_pass
from cmsf.analysis.published import IMAGENET_CLASSES, IMAGENET_IMAGES, IMAGENET_TEST_IMAGES
from cmsf.evaluation.knn import KNN_CLASSIFIERS
from cmsf.method.build import embeds_clean_views, embeds_third_view, make_loss
from cmsf.method.losses import EXTRA, SUPPORT
from cmsf.models.backbones import Stem, feature_width, make_backbone
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.runs.folder import RunFolder
from cmsf.runs.log import epoch_lines, kept_line
from cmsf.utils.errors import BadInput
from cmsf.utils.files import expand_user, file_version, read_json
from cmsf.utils.numbers import is_integer, is_measurement

_RESULTS = {"linear": "linear top-1", "linear-sgd": "SGD top-1"}
"""Evaluations whose figure is kept beside what training cost, and what it is called."""
_NEARLY = 0.01
"""A few images of ImageNet may be missing."""


@dataclass(frozen=True)
class Reached:
    """An accuracy, and after how many epochs it was measured."""

    per_cent: float
    epochs: int


@dataclass(frozen=True)
class ImageCounts:
    """The images of a run.

    images, labelled: those it is trained on, and how many of them have a label.
    tested_on: the same for runs that are tested on images of the same names and classes.
    """

    images: int
    labelled: int
    classes: int
    test_images: int
    tested_on: str

    @property
    def on_imagenet(self) -> bool:
        """Whether the run can be compared with what is published."""
        return (
            self.classes == IMAGENET_CLASSES
            and math.isclose(self.images, IMAGENET_IMAGES, rel_tol=_NEARLY)
            and math.isclose(self.test_images, IMAGENET_TEST_IMAGES, rel_tol=_NEARLY)
        )


@dataclass(frozen=True)
class RunCost(ImageCounts):
    """The compute of a run so far, in whole epochs, and the accuracy it reached.

    clean_views: what the offline cache of pseudo-labels adds; None without one.
    seconds: of training, without evaluations and pauses; None where the log does not say it of every epoch.
    reached: by name: k-NN in the log, of the epoch that was kept or the last one, and evaluations in results/.
    """

    recipe: ResolvedRecipe
    epochs: int
    compute: Compute
    clean_views: Compute | None
    seconds: float | None
    reached: dict[str, Reached]

    def flops_after(self, epochs: int) -> float:
        return self.compute.flops * epochs / self.epochs if self.epochs else 0.0


def compute_of(recipe: ResolvedRecipe, images: int, epochs: int | None = None) -> Compute:
    """Returns the compute of training on so many images; epochs: by default the recipe's."""
    batch, labelled = _passes(recipe)
    iterations = images // recipe.batch_size * (recipe.epochs if epochs is None else epochs)
    return Compute(batch, iterations, labelled, multiply_adds(recipe.backbone, recipe.stem, recipe.size))


def clean_views_of(recipe: ResolvedRecipe, images: int, labelled: int, epochs: int | None = None) -> Compute | None:
    """Returns the compute of the offline cache of pseudo-labels, or None: it embeds all labelled images, in the middle
    of every epoch and at the start of all but the first."""
    if not embeds_clean_views(recipe, make_loss(recipe)):
        return None
    epochs = recipe.epochs if epochs is None else epochs
    middles = epochs if images // recipe.batch_size > 1 else 0
    times = middles + max(0, epochs - 1)
    return Compute(Passes(1, 0, labelled), times, per_pass=multiply_adds(recipe.backbone, recipe.stem, recipe.size))


@cache
def multiply_adds(backbone: str, stem: Stem, size: int) -> int:
    """Counts the multiply-adds of a forward pass of one image: convolutions, products of matrices and attention.

    ResNet-50 at 224 px has 4.09e9, and not the paper's 3.9e9: see `analysis.compute.PAPERS_PASS`.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # shapes alone: no weights and no arithmetic
        network = make_backbone(backbone, stem, size).requires_grad_(False)
        with FlopCounterMode(display=False) as counter:  # which counts a multiplication and an addition as two
            feature_width(network, backbone, size)
    return int(counter.get_total_flops()) // 2


def run_cost(run: str | Path | RunFolder) -> RunCost:
    """Returns the cost of a run, from the files of its folder."""
    folder = run if isinstance(run, RunFolder) else RunFolder(expand_user(run))
    recipe = folder.recipe()
    if not folder.metrics_file.exists():
        raise BadInput(f"{folder.path} has no metrics.jsonl, so nothing was trained there; give a run of cmsf train")
    counts = _count_images(folder.path.resolve(), *file_version(folder.data_file))
    steps, epochs = counts.images // recipe.batch_size, 0
    seconds: list[float] = []
    reached: dict[str, Reached] = {}
    for line in epoch_lines(folder.metrics_file):
        step = line.get("step")
        if not is_integer(step) or not steps or step % steps or not epochs < step // steps <= recipe.epochs:
            raise BadInput(f"{folder.metrics_file} has epochs that are not those of its recipe and images")
        epochs = step // steps
        rate = line.get("images_per_second")
        seconds.append(steps * recipe.batch_size / rate if is_measurement(rate) and rate > 0 else math.inf)
        reached |= _reached(line, KNN_CLASSIFIERS, epochs)
    reached |= _reached(kept_line(folder.metrics_file, recipe.epochs), KNN_CLASSIFIERS, epochs)
    complete = len(seconds) == epochs and math.isfinite(sum(seconds))
    return RunCost(
        **vars(counts),
        recipe=recipe,
        epochs=epochs,
        compute=compute_of(recipe, counts.images, epochs),
        clean_views=clean_views_of(recipe, counts.images, counts.labelled, epochs),
        seconds=math.fsum(seconds) if complete else None,
        reached=reached | _evaluated(folder, epochs),
    )


@lru_cache(maxsize=32)
def _count_images(path: Path, *_version: int) -> ImageCounts:
    """Counts once for a version of the file: a report that is written after every epoch asks again."""
    listing = RunFolder(path).listing()
    labels = listing.column("label", "train")
    tested = zip(listing.column("path", "test"), listing.column("truth", "test"), strict=True)
    test = sorted(f"{path!a} {truth!a}" for path, truth in tested)
    return ImageCounts(
        images=len(labels),
        labelled=sum(label is not None for label in labels),
        classes=len(set(listing.column("truth", "train")) - {None}),
        test_images=len(test),
        tested_on=sha256("\n".join(test).encode()).hexdigest(),
    )


def _passes(recipe: ResolvedRecipe) -> tuple[Passes, Passes]:
    """Returns the passes of an image of the batch, and of a labelled one beside it.

    What goes through the online encoder goes back too: FixMatch's weak views as well, which the paper counts forward
    alone, for they share a batch, and so BatchNorm's statistics, with those that it learns from.
    """
    loss_fn, small = make_loss(recipe), share_of_pass(recipe.extra_size, recipe.size)
    online = [view for together in loss_fn.online for view in together]
    target = [view for together in loss_fn.target for view in together]

    def of_batch(views: list[int]) -> float:
        return sum(small if view >= EXTRA else 1 for view in views if view != SUPPORT)

    learned, asides = of_batch(online), online.count(SUPPORT)
    batch = Passes(learned + of_batch(target) + embeds_third_view(recipe), learned, recipe.batch_size)
    beside = max(1, recipe.support_classes) * recipe.support_images
    return batch, Passes(asides, asides, beside) if asides else Passes()


def _evaluated(folder: RunFolder, epochs: int) -> dict[str, Reached]:
    """Returns figures of evaluations on the run's own images, as far as there are any; they are of all its epochs."""
    reached: dict[str, Reached] = {}
    for metric, name in _RESULTS.items():
        file = folder.results / f"{metric}.json"
        result = read_json(file) if file.exists() else None
        figures = result.get("figures") if isinstance(result, dict) else None
        if isinstance(figures, dict):
            reached |= _reached(figures, [name], epochs)
    return reached


def _reached(values: dict[str, Any], names: Iterable[str], epochs: int) -> dict[str, Reached]:
    figures = {name: values.get(name) for name in names}
    return {
        name: Reached(float(figure), epochs)
        for name, figure in figures.items()
        if is_measurement(figure) and figure >= 0
    }
