"""The nearest training images of every image: what most of an analysis is read off."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.evaluation.knn import nearest_training_images


@dataclass(frozen=True)
class Graph:
    """Rows of the nearest training images of each image, nearest first, itself left out; and how similar they are."""

    row: Int[Tensor, "n k"]
    similarity: Float[Tensor, "n k"]


def graph_of(train: Float[Tensor, "n f"], others: Float[Tensor, "m f"] | None, k: int) -> Graph:
    """Of the training images among one another, and then of other images among them; equally near: the lower row."""
    parts = [*nearest_training_images(train, train, min(k, len(train) - 1), torch.arange(len(train)))]
    if others is not None and len(others):
        parts += nearest_training_images(others, train, min(k, len(train) - 1))
    return Graph(torch.cat([row for row, _ in parts]), torch.cat([similarity for _, similarity in parts]).float())
