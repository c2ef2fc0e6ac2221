"""The nearest training images of every image, searched once for the whole analysis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cmsf.evaluation.knn import k_nearest
from cmsf.utils.progress import track

_BATCH = 4096


@dataclass(frozen=True)
class NeighborGraph:
    """Rows of each image's nearest training images, nearest first, itself left out; and their similarities."""

    row: Int[Tensor, "n k"]
    similarity: Float[Tensor, "n k"]

    def among(self, images: Int[Tensor, " q"], allowed: Bool[Tensor, " t"], k: int) -> NeighborGraph | None:
        """Returns the k nearest of some images among the allowed training images, by their numbers among these.

        None where the graph does not reach so far. The images are all of training, and allowed, or all of the others.
        """
        row, similarity = self.row[images].long(), self.similarity[images]
        inside = allowed[row]
        k = min(k, int(allowed.sum()) - bool((images < len(allowed)).all()))
        if bool((inside.sum(1) < k).any()):
            return None
        nearest = inside.int().argsort(dim=1, descending=True, stable=True)[:, :k]
        number = allowed.cumsum(0) - 1
        return NeighborGraph(number[row.gather(1, nearest)], similarity.gather(1, nearest))

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields rows and similarities in chunks of images, like `k_nearest`."""
        chunks = zip(self.row.split(_BATCH), self.similarity.split(_BATCH), strict=True)
        for row, similarity in track(chunks, "votes", len(self.row), _BATCH):
            yield row.long(), similarity.double()


def build_graph(train: Float[Tensor, "n f"], others: Float[Tensor, "m f"] | None, k: int) -> NeighborGraph:
    """Searches the nearest training images of all training images, then of the others; equally near: the lower row."""
    k = min(k, len(train) - 1)
    parts = k_nearest(train, train, k, torch.arange(len(train)))
    if others is not None and len(others):
        parts = chain(parts, k_nearest(others, train, k))
    count = len(train) + (0 if others is None else len(others))
    # Filled as they come, in half the bits: at ImageNet's size the graph is a tenth of the features.
    row, similarity = torch.empty(count, k, dtype=torch.int32), torch.empty(count, k)
    done = 0
    for near, near_similarity in parts:
        part = slice(done, done + len(near))
        row[part], similarity[part] = near, near_similarity
        done = part.stop
    return NeighborGraph(row, similarity)
