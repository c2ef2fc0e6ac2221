"""Exact search: S_i, the k rows of C_i nearest to u_i, at a cost that follows |C_i| and not |M|.

Equally near rows are taken in the order of their image index, so the order of the bank never matters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cmsf.method.label_sums import LabelSums
from cmsf.method.rows import Rows
from cmsf.method.topk import MAX_BLOCK, OwnRow, nearest_vectors, top, translate
from cmsf.utils.constants import UNKNOWN

_GATHERED = 2**10
"""How many rows of a label are gathered at a time."""


@dataclass(frozen=True)
class Neighbours:
    """S_i of every query.

    row: positions in the bank, nearest first, UNKNOWN where C_i ran out; None where S_i is all of C_i.
    count: |S_i|.
    mean: the mean of S_i's embeddings; zero where S_i is empty.
    """

    row: Int[Tensor, "b k"] | None
    count: Int[Tensor, " b"]
    mean: Float[Tensor, "b d"]

    @classmethod
    def none(cls, query: Rows, k: int | None) -> Neighbours:
        """Returns empty neighbourhoods, for a bank without rows."""
        nothing = torch.full((len(query), k or 0), UNKNOWN, device=query.index.device)
        return cls(None if k is None else nothing, nothing.new_zeros(len(query)), torch.zeros_like(query.embedding))


class Candidates(ABC):
    """C_i of every query of a batch, described without listing it row by row."""

    @abstractmethod
    def nearest(self, query: Rows, rows: Rows, k: int, own: OwnRow) -> Int[Tensor, "b k"]:
        """Returns the positions of the k nearest rows of C_i, nearest first, UNKNOWN where it has fewer."""

    @abstractmethod
    def total(self, query: Rows, rows: Rows) -> tuple[Float[Tensor, "b d"], Int[Tensor, " b"]]:
        """Returns the sum of C_i's embeddings, and |C_i|."""

    @abstractmethod
    def contains(self, query: Rows, rows: Rows, position: Int[Tensor, " b"]) -> Bool[Tensor, " b"]:
        """Returns whether the row at this position is in C_i."""

    def merge_shards(self, query: Rows, merge: MergeShards) -> Candidates:
        """Turns a shard's own C_i into the part of the global C_i that lies in this shard.

        They differ where C_i is chosen by comparing rows; a row with the query's label is a candidate in any shard.
        """
        return self


MergeShards = Callable[[Rows, Int[Tensor, "b n"]], Int[Tensor, "b n"]]
"""Of the rows listed for each query in every shard, keeps the best of all; UNKNOWN in place of the others."""


class Constraint(ABC):
    """Says which rows are related to a query; see constraints.py."""

    @abstractmethod
    def __call__(self, query: Rows, rows: Rows) -> Candidates:
        """Returns C_i, a subset of the rows, for every query."""


@torch.no_grad()
def search(query: Rows, rows: Rows, constraint: Constraint, k: int | None, include_query: bool = True) -> Neighbours:
    """Returns S_i: the k rows of C_i nearest to u_i, |S_i| = min(k, |C_i|); k = None takes all of C_i.

    With include_query, each query must be among the rows and in its own C_i; else its own row is never chosen.
    """
    own = OwnRow(rows.positions_of(query.index), include_query)
    candidates = constraint(query, rows)
    if include_query:
        check_enqueued(query, own.position != UNKNOWN)
        check_related(query, candidates.contains(query, rows, own.position))
    if not len(rows):
        return Neighbours.none(query, k)
    if k is None:
        row, total, count = None, *sum_all(query, rows, candidates, own)
    else:
        row = candidates.nearest(query, rows, k, own)
        valid = row != UNKNOWN
        total, count = masked_sum(gather(rows.embedding, row), valid), valid.sum(1)
    return Neighbours(row, count, total / count.clamp_min(1)[:, None])


def sum_all(
    query: Rows, rows: Rows, candidates: Candidates, own: OwnRow
) -> tuple[Float[Tensor, "b d"], Int[Tensor, " b"]]:
    """Returns the sum of C_i's embeddings and |C_i|, without the query's own row where that is not included."""
    total, count = candidates.total(query, rows)
    if own.included:
        return total, count
    inside = (own.position != UNKNOWN) & candidates.contains(query, rows, own.position)
    return total - torch.where(inside[:, None], rows.embedding[own.position], 0), count - inside.long()


def check_enqueued(query: Rows, enqueued: Bool[Tensor, " b"]) -> None:
    if not enqueued.all():
        raise ValueError(
            f"{_count(query, ~enqueued)} are not in the bank; "
            "enqueue them before the search, or pass include_query=False"
        )


def check_related(query: Rows, related: Bool[Tensor, " b"]) -> None:
    if not related.all():
        raise ValueError(
            f"{_count(query, ~related)} are not related to their own rows in the bank; "
            "enqueue the labels and companions that you search with"
        )


def _count(query: Rows, which: Bool[Tensor, " b"]) -> str:
    return f"{int(which.sum())} of {len(query)} queries (the first is image {int(query.index[which][0])})"


@dataclass(frozen=True)
class EveryRow(Candidates):
    """C_i = M, or those of its rows that have a companion."""

    with_companion: bool = False

    def nearest(self, query: Rows, rows: Rows, k: int, own: OwnRow) -> Int[Tensor, "b k"]:
        return nearest_vectors(query.embedding, rows.embedding, self._inside(rows), rows.index, k, own)

    def total(self, query: Rows, rows: Rows) -> tuple[Float[Tensor, "b d"], Int[Tensor, " b"]]:
        inside = self._inside(rows)
        total = torch.where(inside[:, None], rows.embedding, 0).sum(0)
        return total.expand(len(query), -1), inside.sum().expand(len(query))

    def contains(self, query: Rows, rows: Rows, position: Int[Tensor, " b"]) -> Bool[Tensor, " b"]:
        return self._inside(rows)[position]

    def _inside(self, rows: Rows) -> Bool[Tensor, " n"]:
        return rows.exists & rows.has_companion if self.with_companion else rows.exists


@dataclass(frozen=True)
class RowsOfLabel(Candidates):
    """C_i = the rows with the label of query i. Each label's rows are looked at by its own queries alone."""

    def nearest(self, query: Rows, rows: Rows, k: int, own: OwnRow) -> Int[Tensor, "b k"]:
        asked, held = _labels(query, rows)
        label, group = asked.unique(return_inverse=True)
        # The rows of all labels are found in one pass. A label's rows are its columns, in the order of their images.
        group_of_row = torch.searchsorted(label, held).clamp_max(len(label) - 1)
        member = (rows.exists & (label[group_of_row] == held)).nonzero()[:, 0]
        member = member[rows.index[member].argsort()]
        member = member[group_of_row[member].argsort(stable=True)]
        size = group_of_row[member].bincount(minlength=len(label))
        first = size.cumsum(0) - size
        column = torch.full_like(held, UNKNOWN)
        column[member] = torch.arange(len(member), device=member.device) - first[group_of_row[member]]
        is_candidate = (own.position != UNKNOWN) & (held[own.position] == asked)
        own_column = torch.where(is_candidate, column[own.position], UNKNOWN)

        queries = group.argsort(stable=True).split(group.bincount().tolist())
        members = member.split(size.tolist())
        found = torch.full((len(query), k), UNKNOWN, device=asked.device)
        gathered = rows.embedding.new_empty(_GATHERED, rows.embedding.shape[1])
        for block in _similar_blocks(queries, members):
            chosen = torch.cat([some for some, _ in block])
            similarity = query.embedding.new_empty(len(chosen), len(block[0][1]))
            for (some, columns), out in zip(block, similarity.split([len(some) for some, _ in block]), strict=True):
                _similarity(query.embedding[some], rows.embedding, columns, gathered, out)
            OwnRow(own_column[chosen], own.included).force(similarity)
            place = top(similarity, torch.arange(similarity.shape[1], device=member.device), k)
            row = member[(first[group[chosen]][:, None] + place).clamp(0, len(member) - 1)] if len(member) else place
            found[chosen] = torch.where(place == UNKNOWN, UNKNOWN, row)
        return found

    def total(self, query: Rows, rows: Rows) -> tuple[Float[Tensor, "b d"], Int[Tensor, " b"]]:
        asked, held = _labels(query, rows)
        if rows.label_sums is not None:
            return rows.label_sums.lookup(asked)
        member = (rows.exists & torch.isin(held, asked)).nonzero()[:, 0]
        return LabelSums(held[member], rows.embedding[member], len(rows)).lookup(asked)

    def contains(self, query: Rows, rows: Rows, position: Int[Tensor, " b"]) -> Bool[Tensor, " b"]:
        asked, held = _labels(query, rows)
        return rows.exists[position] & (held[position] == asked)


@dataclass(frozen=True)
class ShortList(Candidates):
    """C_i = the rows listed for query i, UNKNOWN filling up."""

    position: Int[Tensor, "b n"]

    def nearest(self, query: Rows, rows: Rows, k: int, own: OwnRow) -> Int[Tensor, "b k"]:
        found = []
        step = max(1, MAX_BLOCK // max(1, self.position.shape[1] * rows.embedding.shape[1]))
        for start in range(0, len(query), step):
            part = slice(start, start + step)
            position = self.position[part]
            similarity = (gather(rows.embedding, position) @ query.embedding[part][:, :, None])[:, :, 0]
            similarity = own[part].apply_to(similarity, position).masked_fill(position == UNKNOWN, -torch.inf)
            found.append(translate(top(similarity, rows.index[position], k), position))
        return torch.cat(found)

    def total(self, query: Rows, rows: Rows) -> tuple[Float[Tensor, "b d"], Int[Tensor, " b"]]:
        valid = self.position != UNKNOWN
        return masked_sum(gather(rows.embedding, self.position), valid), valid.sum(1)

    def contains(self, query: Rows, rows: Rows, position: Int[Tensor, " b"]) -> Bool[Tensor, " b"]:
        return (self.position == position[:, None]).any(1)

    def merge_shards(self, query: Rows, merge: MergeShards) -> Candidates:
        return ShortList(merge(query, self.position))


@dataclass(frozen=True)
class Relaxed(Candidates):
    """C_i as constrained where something is known of query i, and M where nothing is.

    `constrained` describes the known queries alone, in their order.
    """

    known: Bool[Tensor, " b"]
    constrained: Candidates

    def nearest(self, query: Rows, rows: Rows, k: int, own: OwnRow) -> Int[Tensor, "b k"]:
        found = torch.full((len(query), k), UNKNOWN, device=query.index.device)
        for chosen, candidates in self._parts():
            found[chosen] = candidates.nearest(query[chosen], rows, k, own[chosen])
        return found

    def total(self, query: Rows, rows: Rows) -> tuple[Float[Tensor, "b d"], Int[Tensor, " b"]]:
        total = rows.embedding.new_empty(len(query), rows.embedding.shape[1])
        count = torch.empty_like(query.index)
        for chosen, candidates in self._parts():
            total[chosen], count[chosen] = candidates.total(query[chosen], rows)
        return total, count

    def contains(self, query: Rows, rows: Rows, position: Int[Tensor, " b"]) -> Bool[Tensor, " b"]:
        inside = torch.empty_like(self.known)
        for chosen, candidates in self._parts():
            inside[chosen] = candidates.contains(query[chosen], rows, position[chosen])
        return inside

    def merge_shards(self, query: Rows, merge: MergeShards) -> Candidates:
        return Relaxed(self.known, self.constrained.merge_shards(query[self.known], merge))

    def _parts(self) -> list[tuple[Tensor, Candidates]]:
        parts = [(self.known, self.constrained), (~self.known, EveryRow())]
        return [(chosen.nonzero()[:, 0], candidates) for chosen, candidates in parts if chosen.any()]


def _similar_blocks(queries: Sequence[Tensor], members: Sequence[Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yields blocks of labels, each with its queries and rows, that have about as many rows and fit into memory."""
    block: list[tuple[Tensor, Tensor]] = []
    height = 0
    for label in sorted(range(len(members)), key=lambda label: -len(members[label])):
        width = len(members[label])
        for some in queries[label].split(max(1, MAX_BLOCK // max(1, width))):
            widest = len(block[0][1]) if block else width
            if block and (2 * width < widest or (height + len(some)) * widest > MAX_BLOCK):
                yield block
                block, height = [], 0
            block.append((some, members[label]))
            height += len(some)
    yield block


def _similarity(
    vector: Float[Tensor, "b d"],
    among: Float[Tensor, "n d"],
    chosen: Int[Tensor, " m"],
    memory: Float[Tensor, "g d"],
    out: Float[Tensor, "b w"],
) -> None:
    """Writes the dot products with the chosen vectors into the first columns of out, and -inf into the others.

    memory: room for the vectors that are gathered at a time, few enough to stay in the processor's cache.
    """
    for first in range(0, len(chosen), len(memory)):
        some = chosen[first : first + len(memory)]
        block = torch.index_select(among, 0, some, out=memory[: len(some)])
        torch.mm(vector, block.T, out=out[:, first : first + len(some)])
    out[:, len(chosen) :] = -torch.inf


def _labels(query: Rows, rows: Rows) -> tuple[Int[Tensor, " b"], Int[Tensor, " n"]]:
    # SameLabel has seen to both.
    assert query.label is not None
    assert rows.label is not None
    return query.label, rows.label


def gather(embedding: Float[Tensor, "n d"], row: Int[Tensor, "b k"]) -> Float[Tensor, "b k d"]:
    """Returns the embeddings at these positions, any one where the position is UNKNOWN; rows are copied whole."""
    rows: Tensor = embedding.index_select(0, row.clamp_min(0).flatten()).unflatten(0, row.shape)
    return rows


def masked_sum(embedding: Float[Tensor, "b k d"], valid: Bool[Tensor, "b k"]) -> Float[Tensor, "b d"]:
    """Sums the valid embeddings; the others may be NaN, which no product with zero removes."""
    return torch.where(valid[:, :, None], embedding, 0).sum(1)
