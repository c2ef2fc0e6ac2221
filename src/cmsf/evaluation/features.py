"""Pooled features of clean views: what every evaluation looks at."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from cmsf.data import Split
from cmsf.views import clean_view

LAYER = "pooled backbone features, L2-normalised"
_BATCH = 256


@torch.no_grad()
def extract(backbone: nn.Module, split: Split, size: int, device: torch.device | str = "cpu") -> Float[Tensor, "n f"]:
    """L2-normalised features of every image, in eval mode; the network is handed back in the mode it came in.

    The batches are the same whoever asks, so a number shown in training is the number computed afterwards.
    """
    training = backbone.training
    backbone.eval()
    parts = [
        normalize(backbone(clean_view(split.batch(index, device), size)).float(), dim=1)
        for index in torch.arange(len(split)).split(_BATCH)
    ]
    backbone.train(training)
    return torch.cat(parts)


def raw_pixels(split: Split, size: int) -> Float[Tensor, "n f"]:
    """The images themselves as features: what a representation has to beat."""
    parts = [clean_view(split.batch(index), size).flatten(1) for index in torch.arange(len(split)).split(_BATCH)]
    return normalize(torch.cat(parts), dim=1)


def transform_name(size: int) -> str:
    return f"resize {round(size * 256 / 224)}, centre crop {size}; images with no side above {size} px whole"
