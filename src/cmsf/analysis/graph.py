"""The nearest training images of every image: what most of an analysis is read off."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.neighbours import Own, nearest_vectors
from cmsf.progress import shown
from cmsf.rows import UNKNOWN

_AT_A_TIME = 2048


@dataclass(frozen=True)
class Graph:
    """Rows of the nearest training images of each image, nearest first, itself left out; and how similar they are."""

    row: Int[Tensor, "n k"]
    similarity: Float[Tensor, "n k"]


def nearest_others(train: Float[Tensor, "n f"], k: int) -> Graph:
    """Of every training image among the others; equally near: the lower row."""
    return _graph(train, train, torch.arange(len(train), device=train.device), min(k, len(train) - 1))


def nearest_of(query: Float[Tensor, "q f"], train: Float[Tensor, "n f"], k: int) -> Graph:
    """Of other images among the training images."""
    return _graph(query, train, torch.full((len(query),), UNKNOWN, device=train.device), min(k, len(train)))


@torch.no_grad()
def _graph(query: Float[Tensor, "q f"], train: Float[Tensor, "n f"], own: Int[Tensor, " q"], k: int) -> Graph:
    everywhere = torch.ones(len(train), dtype=torch.bool, device=train.device)
    number = torch.arange(len(train), device=train.device)
    rows, similarities = [torch.empty(0, k, dtype=torch.int64)], [torch.empty(0, k)]
    parts = list(zip(query.split(_AT_A_TIME), own.split(_AT_A_TIME), strict=True))
    for part, mine in shown(parts, "neighbours", len(parts)):
        row = nearest_vectors(part, train, everywhere, number, k, Own(mine, included=False))
        rows.append(row.cpu())
        similarities.append((train[row] @ part[:, :, None])[:, :, 0].cpu())
    return Graph(torch.cat(rows), torch.cat(similarities))
