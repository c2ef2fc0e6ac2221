"""Stores of target embeddings: the memory bank that is searched, and the cache of one row an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from cmsf.method.constraints import SameLabel
from cmsf.method.label_sums import LabelSums
from cmsf.method.rows import Rows, find_images
from cmsf.method.search import Constraint, Neighbours, search
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.distributed import World


class MemoryBank(nn.Module):
    """A ring of the last `size` rows (M in the paper), at most one of them for any image.

    A row not yet written, or retired because its image has entered again, has index UNKNOWN and so is no
    candidate: no random vectors stand in for it, and an image cannot fill a neighbourhood with its own copies.
    """

    embedding: Tensor
    index: Tensor
    label: Tensor
    companion: Tensor | None

    def __init__(
        self,
        size: int,
        dim: int,
        companion_dim: int | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        vectors: int | None = None,
    ) -> None:
        """vectors: how many rows have their embeddings and companions in this process; None: all."""
        super().__init__()
        held = size if vectors is None else vectors
        nan = torch.nan
        self.register_buffer("embedding", torch.full((held, dim), nan, device=device, dtype=dtype))
        self.register_buffer("index", torch.full((size,), UNKNOWN, device=device))
        self.register_buffer("label", torch.full((size,), UNKNOWN, device=device))
        companion = (
            None if companion_dim is None else torch.full((held, companion_dim), nan, device=device, dtype=dtype)
        )
        self.register_buffer("companion", companion)
        # Plain numbers, not tensors: reading them must not wait for the device.
        self.next = 0
        self.written = 0
        self.label_sums: LabelSums | None = None
        """Kept from the first search that sums all rows of a label, and never saved: it follows from the rows."""

    @property
    def size(self) -> int:
        return len(self.index)

    @torch.no_grad()
    def enqueue(self, rows: Rows) -> None:
        """Writes the rows over the oldest ones; older rows of the same images are retired."""
        count = len(rows)
        if count > self.size:
            raise ValueError(
                f"a batch of {count} rows does not fit a bank of {self.size}; use a bank of {count} or more"
            )
        if self.companion is not None and rows.companion is None:
            raise ValueError(
                "this bank keeps companions and the rows have none; give a row of NaN where one is unknown"
            )
        if self.companion is None and rows.companion is not None:
            dim = rows.companion.shape[1]
            raise ValueError(f"the rows have companions and this bank keeps none; make it with companion_dim={dim}")

        slot = (torch.arange(count, device=self.index.device) + self.next) % self.size
        older, _ = find_images(self.index, rows.index.unique())
        self._retire(torch.cat([older, slot]).unique())
        self.index[slot] = rows.index
        self.label[slot] = UNKNOWN if rows.label is None else rows.label
        self._keep_vectors(slot, rows)
        self._update_label_sums(slot, 1)
        self._retire(slot[_repeated_later(rows.index)])
        self.next = (self.next + count) % self.size
        self.written = min(self.size, self.written + count)

    def rows(self) -> Rows:
        """Returns the rows written so far, valid until the next enqueue; retired ones have index UNKNOWN."""
        written = slice(self.written)
        companion = None if self.companion is None else self.companion[written]
        rows = Rows(self.embedding[written], self.index[written], self.label[written], companion)
        return rows.with_label_sums(self.label_sums)

    @torch.no_grad()
    def search(self, query: Rows, constraint: Constraint, k: int | None, include_query: bool = True) -> Neighbours:
        """Returns S_i of every query: the k nearest rows of C_i, or with k = None all of C_i."""
        self._keep_label_sums(constraint, k)
        return search(query, self.rows(), constraint, k, include_query)

    @torch.no_grad()
    def rank(self, query: Rows, position: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """Returns the rank of a row in the whole bank by similarity to its query, from 1 = the query itself."""
        rows = self.rows()
        similarity = (query.embedding @ rows.embedding.T).masked_fill_(~rows.exists, -torch.inf)
        similarity.masked_fill_(query.index[:, None] == rows.index, torch.inf)
        level = self._columns(similarity, position)
        nearer = (similarity > level).sum(1)
        tied_before = ((similarity == level) & (rows.index < self.index[position][:, None])).sum(1)
        return 1 + self._sum_over_shards(nearer + tied_before)

    def agree(self, number: int) -> int:
        """Returns the main process's number: processes that round differently must gather rows of one width."""
        return number

    def companion_share(self) -> float:
        """Returns the share of the rows in the whole bank that have a companion."""
        rows = self.rows()
        counts = torch.stack([(rows.exists & rows.has_companion).sum(), rows.exists.sum()])
        having, existing = map(int, self._sum_over_shards(counts))
        return having / max(1, existing)

    def _columns(self, similarity: Float[Tensor, "b n"], position: Int[Tensor, " b"]) -> Float[Tensor, "b 1"]:
        """Returns each query's similarity to the row at this position of the whole bank."""
        return similarity.gather(1, position[:, None])

    def _sum_over_shards(self, count: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        return count

    def _keep_label_sums(self, constraint: Constraint, k: int | None) -> None:
        if k is None and isinstance(constraint, SameLabel) and self.label_sums is None:
            rows = self.rows()
            assert rows.label is not None
            self.label_sums = LabelSums(rows.label, rows.embedding, self.size)

    def _update_label_sums(self, slot: Int[Tensor, " n"], sign: int) -> None:
        if self.label_sums is not None:
            self.label_sums.add(self.label[slot], self.embedding[slot], sign)

    def _retire(self, slot: Int[Tensor, " n"]) -> None:
        self._update_label_sums(slot, -1)
        self.index[slot] = UNKNOWN
        self.label[slot] = UNKNOWN
        self._forget_companions(slot)

    def _keep_vectors(self, slot: Int[Tensor, " n"], rows: Rows) -> None:
        self.embedding[slot] = rows.embedding.to(self.embedding.dtype)
        if self.companion is not None and rows.companion is not None:
            self.companion[slot] = rows.companion.to(self.companion.dtype)

    def _forget_companions(self, slot: Int[Tensor, " n"]) -> None:
        if self.companion is not None:
            self.companion[slot] = torch.nan

    def full_state_dict(self) -> dict[str, Any]:
        """Returns the state dict of the whole bank; of a sharded one, complete on the main process alone."""
        return self.state_dict()

    def shard_state_dict(self, full: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the part of a full state dict that this process holds."""
        return full

    def get_extra_state(self) -> dict[str, int]:
        return {"next": self.next, "written": self.written}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.next, self.written = state["next"], state["written"]
        self.label_sums = None


def _repeated_later(index: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Returns whose image comes again in the same batch, of which only the newest row is kept."""
    return (index[:, None] == index[None, :]).triu(1).any(1)


class EmbeddingCache:
    """The last target embedding of every image, in CPU memory because it is as long as the data.

    NaN stands for an image not seen yet. Each process holds its shard of the images. `changed` marks what was written
    since the last snapshot, so that a checkpoint can hold the changes alone.
    """

    def __init__(self, images: int, dim: int, dtype: torch.dtype = torch.float32, world: World = World()) -> None:
        self.images, self.world = images, world
        share = len(range(world.rank, images, world.size))
        self.embedding = torch.full((share, dim), torch.nan, dtype=dtype)
        self.changed = torch.zeros(share, dtype=torch.bool)

    def swap(self, rows: Rows) -> Float[Tensor, "n d"]:
        """Returns the stored embeddings of these images and stores the new ones; all processes pass the same rows."""
        index = rows.index.cpu()
        held = index % self.world.size == self.world.rank
        place, here = index[held] // self.world.size, held.to(rows.index.device)
        stored = torch.zeros_like(rows.embedding)
        stored[here] = self.embedding[place].to(rows.embedding)
        self.embedding[place] = rows.embedding[here].detach().to(self.embedding)
        self.changed[place] = True
        return self.world.all_reduce(stored)  # zeros from the processes that do not hold an image

    def snapshot(self) -> Tensor | None:
        """Returns a copy of all embeddings, on the main process alone, and resets `changed`."""
        self.changed.fill_(False)
        return self.world.gather_shards(self.embedding.clone())

    def changes(self) -> tuple[Tensor, Tensor]:
        """Returns indices and embeddings written since the last snapshot; on the main process, of all processes."""
        place = self.changed.nonzero()[:, 0]
        return self.world.gather_to_main(place * self.world.size + self.world.rank), self.world.gather_to_main(
            self.embedding[place]
        )

    def load_snapshot(self, embedding: Float[Tensor, "n d"]) -> None:
        """Restores a snapshot."""
        self.embedding.copy_(self.world.shard(embedding))
        self.changed.fill_(False)

    def load_changes(self, index: Int[Tensor, " m"], embedding: Float[Tensor, "m d"]) -> None:
        """Restores changes on top of a snapshot."""
        here = index % self.world.size == self.world.rank
        place = index[here] // self.world.size
        self.embedding[place], self.changed[place] = embedding[here], True
