"""Rows: what a query batch and the memory bank have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cmsf.method.label_sums import LabelSums
from cmsf.utils.constants import UNKNOWN

_BUCKETS = 2**16
"""How many remainders of image numbers are told apart before the numbers themselves are compared."""


def find_images(index: Int[Tensor, " n"], wanted: Int[Tensor, " w"]) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"]]:
    """Returns where the wanted images (sorted, each once) stand in an index, and which of them stands there.

    A step asks this of the whole bank more than once, so most rows are ruled out by the last bits of their numbers.
    """
    if not len(wanted):
        return wanted, wanted
    possible = torch.zeros(_BUCKETS, dtype=torch.bool, device=index.device)
    possible[wanted & (_BUCKETS - 1)] = True
    row = possible.index_select(0, index & (_BUCKETS - 1)).nonzero()[:, 0]
    image = index[row]
    place = torch.searchsorted(wanted, image).clamp_max(len(wanted) - 1)
    found = (wanted[place] == image) & (image != UNKNOWN)
    return row[found], place[found]


@dataclass(frozen=True)
class Rows:
    """Target embeddings, one an image, with what is known of each image.

    embedding: unit vectors, u in the paper.
    index: which image of the data; a row with index UNKNOWN stands for no image and is nobody's candidate.
    label: the class used in training, UNKNOWN where there is none. Not the truth: that is for analysis alone.
    companion: another view of the same image, w in the paper; a row of NaN where there is none, so that a
        companion used by mistake shows.
    label_sums: the sums of all embeddings by label, set by a bank that keeps them; other rows have none.
    """

    embedding: Float[Tensor, "n d"]
    index: Int[Tensor, " n"]
    label: Int[Tensor, " n"] | None = None
    companion: Float[Tensor, "n e"] | None = None
    label_sums: LabelSums | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, chosen: Tensor | slice) -> Rows:
        label = None if self.label is None else self.label[chosen]
        companion = None if self.companion is None else self.companion[chosen]
        return Rows(self.embedding[chosen], self.index[chosen], label, companion)

    def with_label_sums(self, sums: LabelSums | None) -> Rows:
        """Sets the sums of these very rows. They are not an argument, so a changed copy of the rows has none."""
        object.__setattr__(self, "label_sums", sums)
        return self

    @property
    def exists(self) -> Bool[Tensor, " n"]:
        return self.index != UNKNOWN

    @property
    def has_companion(self) -> Bool[Tensor, " n"]:
        if self.companion is None:
            return torch.zeros_like(self.exists)
        return ~self.companion[:, 0].isnan()

    def positions_of(self, index: Int[Tensor, " q"]) -> Int[Tensor, " q"]:
        """Returns where each image stands among these rows, UNKNOWN where it does not."""
        wanted, which = index.unique(return_inverse=True)
        position = torch.full_like(wanted, UNKNOWN)
        row, place = find_images(self.index, wanted)
        position[place] = row
        return position[which]

    @property
    def repeats(self) -> bool:
        """Whether some image has more than one row."""
        index = self.index[self.exists]
        return len(index.unique()) < len(index)
