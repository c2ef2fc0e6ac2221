"""What a query is pulled to: how pure its neighbours are, and how far away.

True classes are looked up by image index here alone; they are no column of Rows, so they cannot reach a loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.constraints import Constraint, Unconstrained
from cmsf.neighbours import search
from cmsf.rows import UNKNOWN, Rows

HISTOGRAM_TO = 100


@dataclass(frozen=True)
class Neighbourhood:
    """Purities in [0, 1], NaN where no class is known; the rank of each query's last constrained neighbour."""

    purity_unconstrained: float
    purity_constrained: float
    rank: Int[Tensor, " q"]


@torch.no_grad()
def inspect(query: Rows, rows: Rows, constraint: Constraint, k: int | None, truth: Int[Tensor, " n"]) -> Neighbourhood:
    """Compare S_i within C_i with as many neighbours in the whole bank (Figure "Purity", Table 1 right)."""
    constrained = search(query, rows, constraint(query, rows), k)
    if constrained.row is None:
        largest = max(1, int(constrained.count.max()))
        constrained = search(query, rows, constraint(query, rows), largest)
    assert constrained.row is not None
    width = constrained.row.shape[1]
    everywhere = search(query, rows, Unconstrained()(query, rows), width)
    assert everywhere.row is not None
    return Neighbourhood(
        purity(query, rows, everywhere.row, truth),
        purity(query, rows, constrained.row, truth),
        _rank_of_last(query, rows, constrained.row).cpu(),
    )


def purity(query: Rows, rows: Rows, row: Int[Tensor, "b k"], truth: Int[Tensor, " n"]) -> float:
    """The share of S_i that has the query's true class, itself left out, as a mean over the queries."""
    truth = truth.to(row.device)
    image = torch.where(row == UNKNOWN, UNKNOWN, rows.index[row])
    others = (image != UNKNOWN) & (image != query.index[:, None])
    theirs, mine = truth[image], truth[query.index][:, None]
    counted = others & (theirs != UNKNOWN) & (mine != UNKNOWN)
    alike = counted & (theirs == mine)
    asked = counted.any(1)
    share = alike.sum(1) / counted.sum(1).clamp_min(1)
    return float(share[asked].cpu().double().mean()) if bool(asked.any()) else float("nan")


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


def spread(embedding: Float[Tensor, "n d"]) -> float:
    """1 for embeddings all over the sphere, 0 where all are the same: the sign of a collapse."""
    return float(embedding.cpu().double().var(0, unbiased=False).sum().sqrt())


def _rank_of_last(query: Rows, rows: Rows, row: Int[Tensor, "b k"]) -> Int[Tensor, " q"]:
    count = (row != UNKNOWN).sum(1)
    some = count > 0
    last = row[some].gather(1, (count[some] - 1)[:, None])[:, 0]
    return rank(query[some], rows, last)
