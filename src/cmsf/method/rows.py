"""Rows: what a query batch and the memory bank have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cmsf.method.label_sums import LabelSums
from cmsf.utils.constants import UNKNOWN


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
        if len(wanted):
            # The few images are sorted, not the many rows: a step asks this of the whole bank more than once.
            place = torch.searchsorted(wanted, self.index).clamp_max(len(wanted) - 1)
            row = (self.exists & (wanted[place] == self.index)).nonzero()[:, 0]
            position[place[row]] = row
        return position[which]

    @property
    def repeats(self) -> bool:
        """Whether some image has more than one row."""
        index = self.index[self.exists]
        return len(index.unique()) < len(index)
