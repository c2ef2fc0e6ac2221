"""Alignment and uniformity on the unit sphere (Wang and Isola 2020, with α = 2 and t = 2)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

_BLOCK = 1024


def alignment(first: Float[Tensor, "n d"], second: Float[Tensor, "n d"]) -> float:
    """Returns the mean squared distance between two views of the same images: 0 where all views agree."""
    return float((first.cpu().double() - second.cpu().double()).square().sum(1).mean())


def uniformity(embedding: Float[Tensor, "n d"]) -> float:
    """Returns log of the mean of exp(-2 |x - y|²) over pairs of images: 0 for one point, -4 for a sphere in many
    dimensions."""
    count = len(embedding)
    if count < 2:
        return math.nan
    embedding = embedding.cpu().double()
    total = 0.0
    for start in range(0, count, _BLOCK):
        part = embedding[start : start + _BLOCK]
        # Without the pairs of an image and itself, which are exp(0) each.
        total += float(torch.exp(-2 * torch.cdist(part, embedding).square()).sum()) - len(part)
    return math.log(max(total, math.ulp(0.0)) / (count * (count - 1)))
