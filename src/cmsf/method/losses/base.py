"""The base class of losses: what a loss needs of a step, its inputs and its output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cmsf.method.bank import MemoryBank
from cmsf.method.constraints import Constraint, Unconstrained
from cmsf.method.rows import Rows
from cmsf.method.search import Neighbours
from cmsf.method.supervision import PseudoLabelOutput
from cmsf.models.encoders import EncoderOutput
from cmsf.utils.constants import UNKNOWN

FIRST, SECOND, THIRD, EXTRA, SUPPORT = 0, 1, 2, 3, 128
"""The views by number: T1 and T2 of every image, T1 of it once more, from EXTRA on the small crops, and T1 of the
labelled images that a loss needs beside the batch."""

ViewGroup = tuple[int, ...]
"""Views that go through an encoder as one batch, so that BatchNorm sees them as one."""


@dataclass(frozen=True)
class LossInput:
    """The inputs of a loss, as far as it has declared that it needs them.

    query: the embeddings of the first view, without gradient, with labels or companions.
    bank: what to compare with; empty where the loss keeps none.
    online, target: the output of each encoder for each view.
    support: the labelled images of SUPPORT.
    """

    query: Rows
    bank: MemoryBank
    online: dict[int, EncoderOutput] = field(default_factory=dict)
    target: dict[int, EncoderOutput] = field(default_factory=dict)
    support: Rows | None = None

    @cached_property
    def rows(self) -> Rows:
        """The rows of the bank, for losses that compare with every one of them."""
        return self.bank.rows()

    @property
    def others(self) -> Bool[Tensor, "b n"]:
        """Which rows of the bank exist and are of another image than the query."""
        return self.rows.exists & (self.rows.index != self.query.index[:, None])

    @property
    def label(self) -> Int[Tensor, " b"]:
        return _label(self.query)

    @property
    def support_label(self) -> Int[Tensor, " s"]:
        if self.support is None:
            raise ValueError("this loss needs labelled images beside the batch; give LossInput(..., support=...)")
        return _label(self.support)


@dataclass(frozen=True)
class LoggedSearch:
    """The search whose neighbours training logs: the k nearest of this constraint (None: all of it)."""

    constraint: Constraint = Unconstrained()
    k: int | None = 5
    include_query: bool = False


@dataclass(frozen=True)
class LossOutput:
    """The loss of a batch and its parts before weighting; the neighbours to log, where the loss has searched them
    itself; and pseudo-labels of images without a label."""

    loss: Float[Tensor, ""]
    parts: dict[str, Float[Tensor, ""]] = field(default_factory=dict)
    neighbours: Neighbours | None = None
    pseudo_labels: PseudoLabelOutput | None = None
    companion_share: float | None = None
    """Of the bank's rows, where companions constrain only from a share on."""

    def scalars(self) -> dict[str, float]:
        """Returns the loss and its parts as floats, by their names in the log."""
        named = {"loss": self.loss} | {f"loss_{name}": part for name, part in self.parts.items()}
        scalars = {name: float(loss.detach()) for name, loss in named.items()}
        return scalars | ({} if self.companion_share is None else {"companion_share": self.companion_share})


class Loss(ABC):
    """What a step minimises. A loss declares what it needs, and the learner provides it."""

    online: tuple[ViewGroup, ...]
    """The views that go through the online encoder, with gradient."""
    target: tuple[ViewGroup, ...] = ()
    """The views that go through the target encoder, without gradient; none: there is no target encoder."""
    heads: ClassVar[frozenset[Literal["projector", "predictor", "classifier"]]] = frozenset({"projector"})
    """The heads on the online encoder's features."""
    bank: ClassVar[Literal["none", "before", "after"]] = "none"
    """Whether the queries enter a bank before the loss, and so may be their own neighbours, or after it."""
    selects_neighbours: bool = False
    """Whether it pulls to, or contrasts with, neighbours found in the bank."""
    learns_from_labels: bool = False
    logged_search: LoggedSearch | None = None
    """None where there is no bank."""
    linear_in_predictions: bool = False
    """Whether it is linear in the mean of each image's predictions, so that its gradient is known before they are."""

    @property
    def needs_support(self) -> bool:
        """Whether it needs labelled images beside the batch."""
        return any(SUPPORT in views for views in self.online)

    @abstractmethod
    def __call__(self, step: LossInput) -> LossOutput: ...


def masked_logits(
    vector: Float[Tensor, "b d"], rows: Rows, allowed: Bool[Tensor, "b n"], temperature: float
) -> tuple[Float[Tensor, "b n"], Bool[Tensor, " b"]]:
    """Returns similarities to rows over the temperature, -inf where not allowed, and which vectors have an allowed row.

    A vector without one keeps all its logits, so that a softmax is not NaN; it is to be left out of the loss.
    """
    valid = allowed.any(1)
    scores = (vector @ rows.embedding.T) / temperature
    return scores.masked_fill(~allowed & valid[:, None], -torch.inf), valid


def masked_mean(value: Float[Tensor, " b"], mask: Bool[Tensor, " b"]) -> Float[Tensor, ""]:
    """Returns the mean of the values under the mask; zero where it is empty."""
    return torch.where(mask, value, 0).sum() / mask.sum().clamp_min(1)


def _label(rows: Rows) -> Int[Tensor, " n"]:
    if rows.label is None:
        raise ValueError(f"this objective learns from labels; give Rows(..., label=...), {UNKNOWN} for none")
    return rows.label
