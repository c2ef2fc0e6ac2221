"""Purity and rank of the neighbours that a query is pulled to.

True classes are looked up by image index here alone; they are not a column of Rows, so they cannot reach a loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.method.bank import MemoryBank
from cmsf.method.constraints import Constraint, Unconstrained
from cmsf.method.rows import Rows
from cmsf.method.search import Neighbours
from cmsf.utils.constants import UNKNOWN

HISTOGRAM_TO = 100
_BLOCK = 2**25
"""Elements of neighbours' embeddings in memory at once."""


@dataclass(frozen=True)
class NeighbourhoodStats:
    """The purity of each query's neighbours, and the rank of the last constrained one.

    A purity is in [0, 1], and NaN where no class is known; a query without neighbours has no rank.
    as_far: the purity of the bank's nearest up to the median of these ranks: of reaching as far without a constraint.
    chosen: whether the loss chooses neighbours at all; else only the bank's nearest have a meaning.
    """

    unconstrained: Float[Tensor, " b"]
    constrained: Float[Tensor, " b"]
    rank: Int[Tensor, " q"]
    as_far: Float[Tensor, " b"]
    chosen: bool = True


@torch.no_grad()
def neighbourhood_stats(
    query: Rows,
    bank: MemoryBank,
    constraint: Constraint,
    neighbours: Neighbours,
    truth: Int[Tensor, " n"],
    include_query: bool = True,
) -> NeighbourhoodStats:
    """Compares S_i with as many neighbours out of the whole bank (Figure "Purity", Table 1 right)."""
    row = neighbours.row
    if row is None:  # S_i is all of C_i, which was not listed
        row = _nearest(query, bank, constraint, bank.agree(max(1, int(neighbours.count.max()))), include_query)
    everywhere = _nearest(query, bank, Unconstrained(), row.shape[1], include_query)
    everywhere = everywhere.masked_fill(row == UNKNOWN, UNKNOWN)
    rank = rank_of_last(query, bank, row)
    as_far = torch.full((len(query),), torch.nan, dtype=torch.float64)
    if len(rank) and neighbours.row is not None:  # all of C may reach to the end of the bank
        as_far = _purity_to(query, bank, bank.agree(median_rank(rank)), truth)
    return NeighbourhoodStats(
        purity(query, bank.index, everywhere, truth), purity(query, bank.index, row, truth), rank, as_far
    )


def _purity_to(query: Rows, bank: MemoryBank, count: int, truth: Int[Tensor, " n"]) -> Float[Tensor, " b"]:
    """Returns the purity of the bank's `count` nearest, in chunks of queries, for `count` may be large."""
    counted = bool(torch.isin(query.index, bank.index).all())  # ranks count a query's own row, if it has one
    step = max(1, _BLOCK // (count * query.embedding.shape[1]))
    purities = []
    for start in range(0, len(query), step):
        chunk = query[start : start + step]
        purities.append(purity(chunk, bank.index, _nearest(chunk, bank, Unconstrained(), count, counted), truth))
    return torch.cat(purities)


def _nearest(query: Rows, bank: MemoryBank, constraint: Constraint, k: int, include_query: bool) -> Int[Tensor, "b k"]:
    row = bank.search(query, constraint, k, include_query).row
    assert row is not None
    return row


def median_rank(rank: Int[Tensor, " q"]) -> int:
    """Returns the paper's m; of the middle two, the lower."""
    return int(rank.median())


def purity(
    query: Rows, index: Int[Tensor, " m"], row: Int[Tensor, "b k"], truth: Int[Tensor, " n"]
) -> Float[Tensor, " b"]:
    """Returns the share of S_i with the query's true class, itself left out; NaN where no class is known.

    index: the image of every row that `row` may point to.
    """
    truth = truth.to(row.device)
    image = torch.where(row == UNKNOWN, UNKNOWN, index[row])
    others = (image != UNKNOWN) & (image != query.index[:, None])
    neighbour_class, query_class = truth[image], truth[query.index][:, None]
    counted = others & (neighbour_class != UNKNOWN) & (query_class != UNKNOWN)
    alike = counted & (neighbour_class == query_class)
    return (alike.sum(1).cpu() / counted.sum(1).cpu()).double()


def histogram(ranks: Int[Tensor, " q"]) -> list[int]:
    """Counts the neighbours of rank 1, 2, … to 100; farther ones are left out."""
    return ranks.clamp_max(HISTOGRAM_TO + 1).bincount(minlength=HISTOGRAM_TO + 2)[1:-1].tolist()


def rank_of_last(query: Rows, bank: MemoryBank, row: Int[Tensor, "b k"]) -> Int[Tensor, " q"]:
    """Returns the rank in M of each query's last neighbour, for the queries that have one."""
    count = (row != UNKNOWN).sum(1)
    has_any = count > 0
    last = row[has_any].gather(1, (count[has_any] - 1)[:, None])[:, 0]
    return bank.rank(query[has_any], last).cpu()
