"""Running sums of the embeddings of each label, so that the mean of a class costs no pass over the bank."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.utils.constants import UNKNOWN

_BITS = 60
"""How many bits a sum of unit vectors may take of an integer of 64."""
_BLOCK = 2**14
"""How many rows are converted at a time."""


class LabelSums:
    """The sum and the count of the embeddings of each label, kept up to date as rows come and go.

    Sums are of integers, in a unit so small that `capacity` unit vectors just fit: 2⁻⁴³ for 128,000 rows. Integers add
    up to the same in any order. So nothing drifts, however many rows come and go, and sums that are computed anew
    (after a resume, in another process) are the same to the bit.
    """

    def __init__(self, label: Int[Tensor, " n"], embedding: Float[Tensor, "n d"], capacity: int) -> None:
        self.dtype = torch.promote_types(embedding.dtype, torch.float32)
        self.scale = 2.0 ** (_BITS - capacity.bit_length())
        self.label = label.new_empty(0)  # sorted
        self.total = label.new_empty(0, embedding.shape[1])
        self.count = label.new_empty(0)
        self.not_finite = label.new_empty(0)
        """How many rows hold NaN or inf, which no integer does; they are left out of the total."""
        for start in range(0, len(label), _BLOCK):
            self.add(label[start : start + _BLOCK], embedding[start : start + _BLOCK])

    def add(self, label: Int[Tensor, " n"], embedding: Float[Tensor, "n d"], sign: int = 1) -> None:
        """Adds these rows to the sums of their labels; with sign = -1, removes them."""
        labelled = label != UNKNOWN
        label, embedding = label[labelled], embedding[labelled].to(self.dtype)
        group = self._group(label)
        finite = embedding.isfinite().all(1)
        fixed = (embedding * self.scale).round().masked_fill(~finite[:, None], 0).long()
        self.total.index_add_(0, group, fixed, alpha=sign)
        self.count.index_add_(0, group, torch.ones_like(group), alpha=sign)
        self.not_finite.index_add_(0, group, (~finite).long(), alpha=sign)

    def lookup(self, label: Int[Tensor, " b"]) -> tuple[Float[Tensor, "b d"], Int[Tensor, " b"]]:
        """Returns the sum and the count of each of these labels."""
        group = self._group(label)
        total = self.total[group].to(self.dtype) / self.scale
        return total.masked_fill(self.not_finite[group][:, None] > 0, torch.nan), self.count[group]

    def _group(self, label: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Returns the place of each label, and makes room for those that are new."""
        known = torch.cat([self.label, label]).unique()
        if len(known) > len(self.label):
            place = torch.searchsorted(known, self.label)
            for name in ("total", "count", "not_finite"):
                old = getattr(self, name)
                setattr(self, name, old.new_zeros(len(known), *old.shape[1:]).index_copy_(0, place, old))
            self.label = known
        return torch.searchsorted(self.label, label)
