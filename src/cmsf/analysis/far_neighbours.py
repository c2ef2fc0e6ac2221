"""Far neighbours: images of high rank in M that a constraint selects by M′ or by labels (Figure "Nearest neighbor
selection", and the supplement's gallery)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from cmsf.method.constraints import Constraint
from cmsf.method.rows import Rows
from cmsf.method.search import search
from cmsf.method.topk import OwnRow, nearest_vectors, top
from cmsf.utils.constants import UNKNOWN


@dataclass(frozen=True)
class RankedImages:
    """Neighbours of each query, nearest first, and the rank of each in M; UNKNOWN where there is none.

    Ranks count from 1 = the query itself, which is never among them.
    """

    image: Int[Tensor, "q k"]
    rank: Int[Tensor, "q k"]


class FarNeighbours:
    """Ranks all rows of a bank by nearness to each query, which is one of them."""

    def __init__(self, query: Rows, rows: Rows) -> None:
        self.query, self.rows = query, rows
        self.own = OwnRow(rows.positions_of(query.index))
        similarity = (query.embedding @ rows.embedding.T).masked_fill(~rows.exists, -torch.inf)
        position = torch.arange(len(rows), device=similarity.device)
        self.order = top(self.own.apply_to(similarity, position), rows.index, len(rows))

    def in_bank(self, k: int) -> RankedImages:
        """Returns the nearest in M."""
        return self._ranked(self.order[:, 1 : k + 1])

    def in_older_bank(self, k: int) -> RankedImages:
        """Returns the nearest in M′, by companions, with the ranks of the same images in M."""
        query, rows = self.query.companion, self.rows.companion
        assert query is not None
        assert rows is not None
        allowed = self.rows.exists & self.rows.has_companion
        others = OwnRow(self.own.position, included=False)
        return self._ranked(nearest_vectors(query, rows, allowed, self.rows.index, k, others))

    def constrained(self, constraint: Constraint, k: int) -> RankedImages:
        """Returns the nearest in C."""
        row = search(self.query, self.rows, constraint, k, include_query=False).row
        assert row is not None
        return self._ranked(row)

    def one_rank_before(self, neighbours: RankedImages) -> RankedImages:
        """Returns the image of M that is one rank nearer than each of these; UNKNOWN where that is the query."""
        place = neighbours.rank - 2
        return self._ranked(self.order.gather(1, place.clamp_min(0)).masked_fill(place < 1, UNKNOWN))

    def _ranked(self, position: Int[Tensor, "q k"]) -> RankedImages:
        place = (self.order[:, None, :] == position[:, :, None]).int().argmax(2)
        exists = position != UNKNOWN
        image = torch.where(exists, self.rows.index[position], UNKNOWN)
        return RankedImages(image, torch.where(exists, place + 1, UNKNOWN))
