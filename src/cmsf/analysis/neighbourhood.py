"""What a query is pulled to: how pure its neighbours are, and how far away.

True classes are looked up by image index here alone; they are no column of Rows, so they cannot reach a loss.
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
"""How many numbers of neighbours' embeddings may be there at once."""


@dataclass(frozen=True)
class NeighbourhoodStats:
    """What was seen of each query: the purity of its neighbours, and the rank of the last constrained one.

    A purity is in [0, 1], and NaN where no class is known; a query without neighbours has no rank.

    as_far: of so many of the whole bank's nearest as the median of these ranks: what it costs to reach as far without
        a constraint.
    chosen: whether the objective chooses neighbours at all; else its bank's nearest are all that there is to say.
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
    """Compare S_i with as many neighbours out of the whole bank (Figure "Purity", Table 1 right)."""
    row = neighbours.row
    if row is None:  # S_i is all of C_i, and nobody has listed it yet
        largest = max(1, int(neighbours.count.max()))
        row = bank.search(query, constraint, largest, include_query).row
    assert row is not None
    everywhere = bank.search(query, Unconstrained(), row.shape[1], include_query).row
    assert everywhere is not None
    everywhere = everywhere.masked_fill(row == UNKNOWN, UNKNOWN)
    rank = rank_of_last(query, bank, row)
    as_far = torch.full((len(query),), torch.nan, dtype=torch.float64)
    if len(rank) and neighbours.row is not None:  # all of C may reach to the end of the bank, and says nothing then
        as_far = _purity_to(query, bank, median_rank(rank), truth)
    return NeighbourhoodStats(
        purity(query, bank.index, everywhere, truth), purity(query, bank.index, row, truth), rank, as_far
    )


def _purity_to(query: Rows, bank: MemoryBank, count: int, truth: Int[Tensor, " n"]) -> Float[Tensor, " b"]:
    """Of so many of the bank's nearest; a few queries at a time, for they may be very many."""
    counted = bool(torch.isin(query.index, bank.index).all())  # ranks count a query's own row, if it has one
    step = max(1, _BLOCK // (count * query.embedding.shape[1]))
    found = []
    for start in range(0, len(query), step):
        part = query[start : start + step]
        row = bank.search(part, Unconstrained(), count, include_query=counted).row
        assert row is not None
        found.append(purity(part, bank.index, row, truth))
    return torch.cat(found)


def median_rank(rank: Int[Tensor, " q"]) -> int:
    """m in the paper; of the middle two, the nearer."""
    return int(rank.median())


def purity(
    query: Rows, index: Int[Tensor, " m"], row: Int[Tensor, "b k"], truth: Int[Tensor, " n"]
) -> Float[Tensor, " b"]:
    """The share of S_i that has the query's true class, itself left out; NaN where no class is known.

    index: of the image of every row that `row` may point to.
    """
    truth = truth.to(row.device)
    image = torch.where(row == UNKNOWN, UNKNOWN, index[row])
    others = (image != UNKNOWN) & (image != query.index[:, None])
    theirs, mine = truth[image], truth[query.index][:, None]
    counted = others & (theirs != UNKNOWN) & (mine != UNKNOWN)
    alike = counted & (theirs == mine)
    return (alike.sum(1).cpu() / counted.sum(1).cpu()).double()


def histogram(ranks: Int[Tensor, " q"]) -> list[int]:
    """How many neighbours have rank 1, 2, … to 100; farther ones are not shown."""
    return [int(count) for count in torch.bincount(ranks.clamp_max(HISTOGRAM_TO + 1), minlength=HISTOGRAM_TO + 2)[1:-1]]


def rank_of_last(query: Rows, bank: MemoryBank, row: Int[Tensor, "b k"]) -> Int[Tensor, " q"]:
    """The rank in M of each query's last neighbour, of those that have one."""
    count = (row != UNKNOWN).sum(1)
    some = count > 0
    last = row[some].gather(1, (count[some] - 1)[:, None])[:, 0]
    return bank.rank(query[some], last).cpu()
