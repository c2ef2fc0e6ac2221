"""What a query is pulled to: how pure its neighbours are, and how far away.

True classes are looked up by image index here alone; they are no column of Rows, so they cannot reach a loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.constraints import Constraint, Unconstrained
from cmsf.neighbours import Neighbours, search
from cmsf.rows import UNKNOWN, Rows

HISTOGRAM_TO = 100


@dataclass(frozen=True)
class Neighbourhood:
    """What was seen of each query: the purity of its neighbours, and the rank of the last constrained one.

    A purity is in [0, 1], and NaN where no class is known; a query without neighbours has no rank.

    chosen: whether the objective chooses neighbours at all; else its bank's nearest are all that there is to say.
    """

    unconstrained: Float[Tensor, " b"]
    constrained: Float[Tensor, " b"]
    rank: Int[Tensor, " q"]
    chosen: bool = True


@torch.no_grad()
def inspect(
    query: Rows,
    rows: Rows,
    constraint: Constraint,
    neighbours: Neighbours,
    truth: Int[Tensor, " n"],
    include_query: bool = True,
) -> Neighbourhood:
    """Compare S_i with as many neighbours out of the whole bank (Figure "Purity", Table 1 right)."""
    row = neighbours.row
    if row is None:  # S_i is all of C_i, and nobody has listed it yet
        largest = max(1, int(neighbours.count.max()))
        row = search(query, rows, constraint(query, rows), largest, include_query).row
    assert row is not None
    everywhere = search(query, rows, Unconstrained()(query, rows), row.shape[1], include_query).row
    assert everywhere is not None
    everywhere = everywhere.masked_fill(row == UNKNOWN, UNKNOWN)
    return Neighbourhood(
        purity(query, rows, everywhere, truth), purity(query, rows, row, truth), _rank_of_last(query, rows, row)
    )


def purity(query: Rows, rows: Rows, row: Int[Tensor, "b k"], truth: Int[Tensor, " n"]) -> Float[Tensor, " b"]:
    """The share of S_i that has the query's true class, itself left out; NaN where no class is known."""
    truth = truth.to(row.device)
    image = torch.where(row == UNKNOWN, UNKNOWN, rows.index[row])
    others = (image != UNKNOWN) & (image != query.index[:, None])
    theirs, mine = truth[image], truth[query.index][:, None]
    counted = others & (theirs != UNKNOWN) & (mine != UNKNOWN)
    alike = counted & (theirs == mine)
    return (alike.sum(1).cpu() / counted.sum(1).cpu()).double()


def rank(query: Rows, rows: Rows, position: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """The place of a row in the whole bank by nearness to its query, counted from 1 = the query itself."""
    similarity = (query.embedding @ rows.embedding.T).masked_fill_(~rows.exists, -torch.inf)
    own = query.index[:, None] == rows.index
    similarity.masked_fill_(own, torch.inf)
    level = similarity.gather(1, position[:, None])
    nearer = (similarity > level).sum(1)
    tied_before = ((similarity == level) & (rows.index < rows.index[position][:, None])).sum(1)
    return 1 + nearer + tied_before


def histogram(ranks: Int[Tensor, " q"]) -> list[int]:
    """How many neighbours have rank 1, 2, … to 100; farther ones are not shown."""
    return [int(count) for count in torch.bincount(ranks.clamp_max(HISTOGRAM_TO + 1), minlength=HISTOGRAM_TO + 2)[1:-1]]


def _rank_of_last(query: Rows, rows: Rows, row: Int[Tensor, "b k"]) -> Int[Tensor, " q"]:
    count = (row != UNKNOWN).sum(1)
    some = count > 0
    last = row[some].gather(1, (count[some] - 1)[:, None])[:, 0]
    return rank(query[some], rows, last).cpu()
