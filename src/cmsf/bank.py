"""Where target embeddings are kept: the ring that is searched, and the cache of one row an image."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from cmsf.rows import UNKNOWN, Rows


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
    ) -> None:
        super().__init__()
        nan = torch.nan
        self.register_buffer("embedding", torch.full((size, dim), nan, device=device, dtype=dtype))
        self.register_buffer("index", torch.full((size,), UNKNOWN, device=device))
        self.register_buffer("label", torch.full((size,), UNKNOWN, device=device))
        companion = (
            None if companion_dim is None else torch.full((size, companion_dim), nan, device=device, dtype=dtype)
        )
        self.register_buffer("companion", companion)
        # Plain numbers, not tensors: reading them must not wait for the device.
        self.next = 0
        self.written = 0

    @property
    def size(self) -> int:
        return len(self.index)

    @torch.no_grad()
    def enqueue(self, rows: Rows) -> None:
        """Write the rows over the oldest ones; older rows of the same images retire."""
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

        self._retire(torch.isin(self.index, rows.index).nonzero()[:, 0])
        slot = (torch.arange(count, device=self.index.device) + self.next) % self.size
        self.embedding[slot] = rows.embedding.to(self.embedding.dtype)
        self.index[slot] = rows.index
        self.label[slot] = UNKNOWN if rows.label is None else rows.label
        if self.companion is not None and rows.companion is not None:
            self.companion[slot] = rows.companion.to(self.companion.dtype)
        self._retire(slot[_again_later(rows.index)])
        self.next = (self.next + count) % self.size
        self.written = min(self.size, self.written + count)

    def rows(self) -> Rows:
        """The rows written so far, as they are until the next enqueue; retired ones have index UNKNOWN."""
        everything = Rows(self.embedding, self.index, self.label, self.companion)
        return everything if self.written == self.size else everything[: self.written]

    def _retire(self, slot: Int[Tensor, " n"]) -> None:
        self.index[slot] = UNKNOWN
        self.label[slot] = UNKNOWN
        if self.companion is not None:
            self.companion[slot] = torch.nan

    def get_extra_state(self) -> dict[str, int]:
        return {"next": self.next, "written": self.written}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.next, self.written = state["next"], state["written"]


def _again_later(index: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Whose image comes again in the same batch: within a batch too, only the newest row of an image lives."""
    return (index[:, None] == index[None, :]).triu(1).any(1)


class EmbeddingCache:
    """The last target embedding of every image, in CPU memory because it is as long as the data.

    NaN stands for an image not seen yet. `changed` marks what was written since somebody unmarked it, so that a
    checkpoint need not hold all of it.
    """

    def __init__(self, images: int, dim: int, dtype: torch.dtype = torch.float32) -> None:
        self.embedding = torch.full((images, dim), torch.nan, dtype=dtype)
        self.changed = torch.zeros(images, dtype=torch.bool)

    def exchange(self, rows: Rows) -> Float[Tensor, "n d"]:
        """Hand out what was remembered of these images, then remember what they are now."""
        index = rows.index.cpu()
        remembered = self.embedding[index].to(rows.embedding)
        self.embedding[index] = rows.embedding.detach().to(self.embedding)
        self.changed[index] = True
        return remembered

    def state_dict(self) -> dict[str, Tensor]:
        return {"embedding": self.embedding}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.embedding.copy_(state["embedding"])
