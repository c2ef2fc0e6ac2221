"""What every objective has in common: what it asks of a step, what it is given, and what it says."""

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
labelled images that an objective asks for beside the batch."""

ViewGroup = tuple[int, ...]
"""Views that go through an encoder as one batch, so that BatchNorm sees them as one."""


@dataclass(frozen=True)
class Step:
    """One step, as far as the objective has asked for it.

    query: the embeddings of the first view that was asked for, without gradient, with what is known of the images.
    bank: what to compare with; empty where the loss keeps none.
    online, target: what each encoder made of each view.
    support: the labelled images of SUPPORT.
    """

    query: Rows
    bank: MemoryBank
    online: dict[int, EncoderOutput] = field(default_factory=dict)
    target: dict[int, EncoderOutput] = field(default_factory=dict)
    support: Rows | None = None

    @cached_property
    def rows(self) -> Rows:
        """The rows of the bank, for those who compare with every one of them."""
        return self.bank.rows()

    @property
    def others(self) -> Bool[Tensor, "b n"]:
        """Which rows of the bank are there, and of another image than the query."""
        return self.rows.exists & (self.rows.index != self.query.index[:, None])

    @property
    def label(self) -> Int[Tensor, " b"]:
        return _label(self.query)

    @property
    def support_label(self) -> Int[Tensor, " s"]:
        if self.support is None:
            raise ValueError("this objective needs labelled images beside the batch; give Step(..., support=...)")
        return _label(self.support)


@dataclass(frozen=True)
class LoggedSearch:
    """The neighbours that training logs: the k nearest of this constraint (None: all of it)."""

    constraint: Constraint = Unconstrained()
    k: int | None = 5
    include_query: bool = False


@dataclass(frozen=True)
class LossOutput:
    """What an objective says of a batch: the loss and its parts before weighting; the neighbours that are watched,
    where it has chosen them itself; and what it thought of images without a label."""

    loss: Float[Tensor, ""]
    parts: dict[str, Float[Tensor, ""]] = field(default_factory=dict)
    neighbours: Neighbours | None = None
    pseudo_labels: PseudoLabelOutput | None = None

    def scalars(self) -> dict[str, float]:
        """The losses as numbers, by the names they have in a log."""
        named = {"loss": self.loss} | {f"loss_{name}": part for name, part in self.parts.items()}
        return {name: float(loss.detach()) for name, loss in named.items()}


class Loss(ABC):
    """What a step minimises. It declares what it needs, and the learner provides it."""

    online: tuple[ViewGroup, ...]
    """The views that pass the online encoder, with gradient."""
    target: tuple[ViewGroup, ...] = ()
    """The views that pass the target encoder, without; where there are none, there is no target encoder."""
    heads: ClassVar[frozenset[Literal["projector", "predictor", "classifier"]]] = frozenset({"projector"})
    """What is put on the online encoder's features."""
    bank: ClassVar[Literal["none", "before", "after"]] = "none"
    """Whether the queries enter a bank before the loss, and so may be their own neighbours, or after it."""
    selects_neighbours: bool = False
    """Whether it learns from neighbours that it chooses in the bank."""
    learns_from_labels: bool = False
    logged_search: LoggedSearch | None = None
    """None where it has no bank to find neighbours in."""

    @property
    def needs_support(self) -> bool:
        """Whether it asks for labelled images beside the batch."""
        return any(SUPPORT in views for views in self.online)

    @abstractmethod
    def __call__(self, step: Step) -> LossOutput: ...


def masked_logits(
    vector: Float[Tensor, "b d"], rows: Rows, allowed: Bool[Tensor, "b n"], temperature: float
) -> tuple[Float[Tensor, "b n"], Bool[Tensor, " b"]]:
    """Similarities to rows over the temperature, -inf where not allowed; and for which vectors any row is.

    Where none is, nothing is ruled out, so that a softmax stays a number; such a vector is to be left out of the loss.
    """
    some = allowed.any(1)
    scores = (vector @ rows.embedding.T) / temperature
    return scores.masked_fill(~allowed & some[:, None], -torch.inf), some


def masked_mean(value: Float[Tensor, " b"], which: Bool[Tensor, " b"]) -> Float[Tensor, ""]:
    """The mean over some of the batch; zero where there are none."""
    return torch.where(which, value, 0).sum() / which.sum().clamp_min(1)


def _label(rows: Rows) -> Int[Tensor, " n"]:
    if rows.label is None:
        raise ValueError(f"this objective learns from labels; give Rows(..., label=...), {UNKNOWN} for none")
    return rows.label
