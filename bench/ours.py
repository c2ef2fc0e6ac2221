"""cmsf's side: what has to change here when cmsf's interface does."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from itertools import count, cycle, islice
from pathlib import Path

import torch
from setting import WORKERS, Batches, Network, Setting, View, endless_order
from torch import Tensor, nn

from cmsf.data import Dataset, Split, load_batches
from cmsf.data.images import FileImages
from cmsf.data.transforms import Augmentation, Batch, RandomCrop, color, crop_and_resize
from cmsf.data.transforms.crops import RandomStream
from cmsf.method.build import make_learner, recipe_backbone
from cmsf.method.losses import FIRST, SECOND
from cmsf.models.backbones import feature_width
from cmsf.recipes import get_recipe
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.training.resolve import resolve
from cmsf.utils.constants import UNKNOWN

SEED = 0
PREDICTING, TARGET = NUMBERS = SECOND, FIRST
"""The numbers under which the learner knows the setting's first view, which predicts, and its second, the target."""
PREPARED = 4


def cmsf_augmentation(view: View) -> Augmentation:
    return Augmentation(
        RandomCrop(view.size, view.crop_scale, flip=view.flip),
        jitter=view.jitter,
        brightness=view.brightness,
        contrast=view.contrast,
        saturation=view.saturation,
        hue=view.hue,
        greyscale=view.greyscale,
        blur=view.blur,
        blur_sigma=view.blur_sigma,
        solarise=view.solarise,
    )


def cmsf_views(batch: Batch, setting: Setting) -> tuple[Tensor, Tensor]:
    """Both views of a batch, normalised."""
    first, second = (cmsf_augmentation(view) for view in setting.views)
    return first(batch, PREDICTING), second(batch, TARGET)


def cmsf_source(pictures: Tensor | FileImages, setting: Setting) -> Generator[Batch, None, None]:
    """Batches out of RAM, or of files that worker processes decode and crop (`--cache off`).

    Every turn is an epoch of its own, so that no view comes again.
    """
    plan = enumerate(endless_order(len(pictures), setting.batch))
    crops = {number: cmsf_augmentation(view).crop for number, view in zip(NUMBERS, setting.views, strict=True)}
    return load_batches(cmsf_split(pictures), plan, crops, seed=SEED, device="cpu", workers=WORKERS)


def cmsf_split(pictures: Tensor | FileImages) -> Split:
    unknown = torch.full((len(pictures),), UNKNOWN)
    return Split(pictures, [str(number) for number in range(len(pictures))], unknown, unknown)


def cmsf_batches(pictures: Tensor | FileImages, setting: Setting) -> Batches:
    for batch in cmsf_source(pictures, setting):
        cmsf_views(batch, setting)
        yield len(batch.index)


def cmsf_photo_batches(paths: list[Path], setting: Setting) -> Batches:
    """From files of one folder to both views."""
    return cmsf_batches(FileImages(paths[0].parent, [path.name for path in paths]), setting)


def cmsf_recipe(
    pictures: Tensor | FileImages, setting: Setting, network: Network, precision: str = "fp32"
) -> ResolvedRecipe:
    """`byol-small` as it resolves itself for these images: among other things, a row of the bank for every image."""
    data = Dataset("bench", (), (), cmsf_split(pictures), test=None, test_origin="none")
    changes = {"batch_size": setting.batch, "size": setting.views[0].size, "precision": precision}
    recipe = get_recipe("byol-small").changed(changes | {"backbone": network.backbone, "stem": network.stem})
    return resolve(recipe, data, median_side=setting.views[0].size)


def cmsf_backbone(recipe: ResolvedRecipe) -> tuple[nn.Module, int]:
    """The network of cmsf's learner, in its memory format, for the others to train; and how many features it has."""
    backbone = recipe_backbone(recipe)
    return backbone, feature_width(backbone, recipe.backbone, recipe.size)


def cmsf_steps(
    pictures: Tensor | FileImages, setting: Setting, network: Network, precision: str = "fp32", prepared: bool = False
) -> Batches:
    """The learner's steps: the first view predicts, the second is the target. Logs and evaluation are left out.

    `prepared`: from views that are there beforehand, which is the limit that the model alone sets.
    """
    recipe = cmsf_recipe(pictures, setting, network, precision)
    learner = make_learner(recipe, torch.full((len(pictures),), UNKNOWN), "cpu")
    learner.views = {number: cmsf_augmentation(view) for number, view in zip(NUMBERS, setting.views, strict=True)}
    source = cmsf_source(pictures, setting)
    if prepared:
        batches = list(islice(source, PREPARED))
        source.close()  # its workers too
        learner.views = {
            number: _Prepared([augment(batch, number) for batch in batches])
            for number, augment in learner.views.items()
        }
        source = cycle(batches)
    for batch in source:
        learner.step(batch, recipe.target_momentum)
        yield len(batch.index)


class _Prepared:
    """Stands in for an augmentation and costs nothing."""

    def __init__(self, views: list[Tensor]) -> None:
        self.views = cycle(views)

    def __call__(self, batch: Batch, view: int) -> Tensor:
        return next(self.views)


def cmsf_operations(
    pictures: Tensor, images: Tensor, boxes: Tensor, sigma: Tensor, shift: Tensor, view: View
) -> dict[str, Callable[[], Tensor]]:
    """Single operations on uint8 `pictures` or the same as floats, `images`, with parameters for each image.

    The jitter is as a run has it: it draws its amounts, and every image has an order of its own.
    """
    index = torch.arange(len(pictures))
    jitter = cmsf_augmentation(replace(view, jitter=1.0))
    turns = count()
    upright = torch.zeros(len(pictures), dtype=torch.bool)
    return {
        "crop and resize": lambda: crop_and_resize(pictures, boxes, view.size, upright),
        "blur": lambda: color.gaussian_blur(images, sigma, view.blur_kernel),
        "jitter": lambda: jitter._jitter(images, RandomStream(SEED, next(turns), index, 0)),
        "hue": lambda: color.adjust_hue(images, shift),
    }
