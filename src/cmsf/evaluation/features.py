"""Pooled features of clean views: what every evaluation looks at."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from cmsf.data import Split, feed
from cmsf.views import CentreCrop, normalise

LAYER = "pooled backbone features, L2-normalised"
_BATCH = 256


def extract(
    backbone: nn.Module, split: Split, size: int, device: torch.device | str = "cpu", workers: int = 0
) -> Float[Tensor, "n f"]:
    """L2-normalised features of every image, in eval mode; the network is handed back in the mode it came in.

    The batches are the same whoever asks, so a number shown in training is the number computed afterwards.
    """
    return torch.cat(list(feature_batches(backbone, split, size, device, workers)))


def feature_batches(
    backbone: nn.Module, split: Split, size: int, device: torch.device | str = "cpu", workers: int = 0
) -> Iterator[Tensor]:
    """The same, batch by batch."""
    training = backbone.training
    backbone.eval()
    try:
        for views in _clean_views(split, size, device, workers):
            with torch.no_grad():
                yield normalize(backbone(views).float(), dim=1)
    finally:
        backbone.train(training)


def raw_pixels(split: Split, size: int, workers: int = 0) -> Float[Tensor, "n f"]:
    """The images themselves as features: what a representation has to beat."""
    return torch.cat(list(pixel_batches(split, size, workers)))


def pixel_batches(split: Split, size: int, workers: int = 0) -> Iterator[Tensor]:
    """The same, batch by batch."""
    for views in _clean_views(split, size, "cpu", workers):
        yield normalize(views.flatten(1), dim=1)


def transform_name(size: int) -> str:
    return f"resize {round(size * 256 / 224)}, centre crop {size}; images with no side above {size} px whole"


def _clean_views(split: Split, size: int, device: torch.device | str, workers: int) -> Iterator[Tensor]:
    crop = CentreCrop(size)
    plan = ((0, index) for index in torch.arange(len(split)).split(_BATCH))
    for batch in feed(split, plan, {0: crop}, seed=0, device=device, workers=workers):
        yield normalise(batch.crop(crop, 0))
