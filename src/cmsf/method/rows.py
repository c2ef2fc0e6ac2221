"""Rows: what a query batch and the memory bank have in common."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cmsf.utils.constants import UNKNOWN


@dataclass(frozen=True)
class Rows:
    """Target embeddings, one an image, with what is known of each image.

    embedding: unit vectors, u in the paper.
    index: which image of the data; a row with index UNKNOWN stands for no image and is nobody's candidate.
    label: the class used in training, UNKNOWN where there is none. Not the truth: that is for analysis alone.
    companion: another view of the same image, w in the paper; a row of NaN where there is none, so that a
        companion used by mistake shows.
    """

    embedding: Float[Tensor, "n d"]
    index: Int[Tensor, " n"]
    label: Int[Tensor, " n"] | None = None
    companion: Float[Tensor, "n e"] | None = None

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, chosen: Tensor | slice) -> Rows:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return Rows(**{name: column[chosen] for name, column in columns.items() if column is not None})

    @property
    def exists(self) -> Bool[Tensor, " n"]:
        return self.index != UNKNOWN

    @property
    def has_companion(self) -> Bool[Tensor, " n"]:
        if self.companion is None:
            return torch.zeros_like(self.exists)
        return ~self.companion[:, 0].isnan()

    def positions_of(self, index: Int[Tensor, " q"]) -> Int[Tensor, " q"]:
        """Where each image stands among these rows, UNKNOWN where it does not."""
        if not len(self):
            return torch.full_like(index, UNKNOWN)
        ordered, order = self._by_index
        place = torch.searchsorted(ordered, index).clamp_max(len(self) - 1)
        return torch.where((ordered[place] == index) & (index != UNKNOWN), order[place], UNKNOWN)

    @property
    def repeats(self) -> bool:
        """Whether some image has more than one row."""
        ordered, _ = self._by_index
        return bool(((ordered[1:] == ordered[:-1]) & (ordered[1:] != UNKNOWN)).any())

    @cached_property
    def _by_index(self) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        # A step looks its queries up several times; the bank is sorted once for all of them.
        ordered, order = self.index.sort()
        return ordered, order
