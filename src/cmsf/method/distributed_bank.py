"""Banks of several processes: each searches for its share of the queries, or in its shard of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cmsf.method.bank import MemoryBank
from cmsf.method.rows import Rows
from cmsf.method.search import Constraint, Neighbours, check_enqueued, check_related, masked_sum, sum_all
from cmsf.method.topk import OwnRow, top, translate
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.distributed import World

_VECTORS = ("embedding", "companion")


class DistributedBank(MemoryBank):
    """What banks of several processes have in common."""

    world: World

    def agree(self, number: int) -> int:
        return int(self.world.from_main(torch.tensor(number)))


class ReplicatedBank(DistributedBank):
    """Every process holds all rows and searches for its share of the queries."""

    def __init__(self, world: World, size: int, dim: int, companion_dim: int | None = None, **options: Any) -> None:
        super().__init__(size, dim, companion_dim, **options)
        self.world = world

    @torch.no_grad()
    def search(self, query: Rows, constraint: Constraint, k: int | None, include_query: bool = True) -> Neighbours:
        """Returns S_i of every query; all processes pass the same queries."""
        mine = super().search(query[self.world.chunk(len(query))], constraint, k, include_query)
        row = None if mine.row is None else self.world.gather(mine.row)
        return Neighbours(row, self.world.gather(mine.count), self.world.gather(mine.mean))


class ShardedBank(DistributedBank):
    """Every process holds a shard of the embeddings and companions, and searches it for all queries.

    The results are merged, so they are those of one bank, while memory and time are divided. Slots are dealt out one by
    one, so that all shards fill at once. Indices and labels, which are small, every process has of all rows; positions
    are those in the whole bank.
    """

    def __init__(self, world: World, size: int, dim: int, companion_dim: int | None = None, **options: Any) -> None:
        super().__init__(size, dim, companion_dim, vectors=len(range(world.rank, size, world.size)), **options)
        self.world = world

    def rows(self) -> Rows:
        """Returns the rows of this shard that are written."""
        index, label = (self.world.shard(column[: self.written]) for column in (self.index, self.label))
        companion = None if self.companion is None else self.companion[: len(index)]
        return Rows(self.embedding[: len(index)], index, label, companion).with_label_sums(self.label_sums)

    @torch.no_grad()
    def search(self, query: Rows, constraint: Constraint, k: int | None, include_query: bool = True) -> Neighbours:
        """Returns S_i of every query; all processes pass the same queries."""
        if not self.written:
            return Neighbours.none(query, k)
        self._keep_label_sums(constraint, k)
        rows = self.rows()
        own = OwnRow(rows.positions_of(query.index), include_query)
        candidates = constraint(query, rows).merge_shards(query, self._merge_companions)
        if include_query:
            held = own.position != UNKNOWN
            check_enqueued(query, self.world.all_reduce(held.long()) > 0)
            check_related(query, ~held | candidates.contains(query, rows, own.position))
        if k is None:
            row, total, count = None, *sum_all(query, rows, candidates, own)
        else:
            near = candidates.nearest(query, rows, k, own)
            row = self._merge(query.embedding, rows.embedding, rows.index, near, own)
            here = self._here(row)
            total, count = masked_sum(rows.embedding[self._place(row)], here), here.sum(1)
        total, count = self.world.all_reduce(total), self.world.all_reduce(count)
        return Neighbours(row, count, total / count.clamp_min(1)[:, None])

    def _columns(self, similarity: Float[Tensor, "b n"], position: Int[Tensor, " b"]) -> Float[Tensor, "b 1"]:
        level = super()._columns(similarity, self._place(position))
        return self.world.all_reduce(torch.where(self._here(position)[:, None], level, 0))

    def _sum_over_shards(self, count: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        return self.world.all_reduce(count)

    def full_state_dict(self) -> dict[str, Any]:
        vectors = {name: getattr(self, name) for name in _VECTORS}
        collected = {name: self.world.gather_shards(held.cpu()) for name, held in vectors.items() if held is not None}
        return self.state_dict() | collected

    def shard_state_dict(self, full: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: self.world.shard(x) if name in _VECTORS else x for name, x in full.items()}

    def _merge_companions(self, query: Rows, position: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
        """Keeps those of this shard's nearest companions that are among the nearest of all shards."""
        rows = self.rows()
        assert query.companion is not None
        assert rows.companion is not None
        own = OwnRow(rows.positions_of(query.index))
        best = self._merge(query.companion, rows.companion, rows.index, position, own)
        return torch.where(self._here(best), self._place(best), UNKNOWN)

    def _merge(
        self,
        vector: Float[Tensor, "b d"],
        held: Float[Tensor, "n d"],
        index: Int[Tensor, " n"],
        near: Int[Tensor, "b k"],
        own: OwnRow,
    ) -> Int[Tensor, "b k"]:
        """Merges the nearest rows of all shards to as many as each has found, as positions in the whole bank."""
        valid = near != UNKNOWN
        similarity = (held[near] @ vector[:, :, None])[:, :, 0]
        similarity = own.apply_to(similarity, near).masked_fill(~valid, -torch.inf)
        position = torch.where(valid, near * self.world.size + self.world.rank, UNKNOWN)
        similarity, image, position = (self.world.gather(column.T).T for column in (similarity, index[near], position))
        return translate(top(similarity, image, near.shape[1]), position)

    def _here(self, position: Int[Tensor, "*b"]) -> Bool[Tensor, "*b"]:
        return (position != UNKNOWN) & (position % self.world.size == self.world.rank)

    def _place(self, position: Int[Tensor, "*b"]) -> Int[Tensor, "*b"]:
        """Returns where a row is in this shard; 0 for rows of other shards, to be masked by the caller."""
        return torch.where(self._here(position), position // self.world.size, 0)

    def _keep_vectors(self, slot: Int[Tensor, " n"], rows: Rows) -> None:
        here = self._here(slot)
        super()._keep_vectors(self._place(slot[here]), rows[here])

    def _update_label_sums(self, slot: Int[Tensor, " n"], sign: int) -> None:
        if self.label_sums is not None:
            here = slot[self._here(slot)]
            self.label_sums.add(self.label[here], self.embedding[self._place(here)], sign)

    def _forget_companions(self, slot: Int[Tensor, " n"]) -> None:
        super()._forget_companions(self._place(slot[self._here(slot)]))
