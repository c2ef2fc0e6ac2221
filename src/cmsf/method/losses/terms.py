"""What the losses that pull to constrained neighbours have in common: their terms, and when a constraint holds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cmsf.method.bank import MemoryBank
from cmsf.method.constraints import Constraint, NearCompanion, SameLabel, Unconstrained
from cmsf.method.losses.base import EXTRA, FIRST, SECOND, LoggedSearch, Loss, LossInput, LossOutput, ViewGroup
from cmsf.method.search import Neighbours


@dataclass(frozen=True)
class Term:
    """One weighted term of the loss."""

    name: str
    constraint: Constraint
    k: int | None
    weight: float = 1.0
    include_query: bool = True

    def relaxed(self) -> Term:
        return replace(self, constraint=Unconstrained())


@dataclass(frozen=True)
class Spread:
    """A term that keeps predictions apart, and its weight."""

    of: Callable[[Float[Tensor, "b d"]], Float[Tensor, ""]]
    weight: float


@dataclass(frozen=True)
class NeighbourLoss(Loss):
    """A weighted sum of terms, each pulling to neighbours that its own constraint allows.

    u enters the bank before the search, so k = 1 finds u itself.

    companion_coverage: the share of the bank's rows that must have a companion before companions constrain. The first
        rows that have one are those that entered last, no fair sample of the bank. Until then C_i is the whole bank.
    spread: keeps the predictions apart; None: nothing does.
    """

    terms: tuple[Term, ...]
    extra_crops: int = 0
    companion_coverage: float = 0.0
    spread: Spread | None = None

    target = ((FIRST,),)
    heads = frozenset({"projector", "predictor"})
    selects_neighbours = True
    bank: ClassVar[Literal["before"]] = "before"

    @property
    def online(self) -> tuple[ViewGroup, ...]:  # type: ignore[override]
        small = tuple(range(EXTRA, EXTRA + self.extra_crops))
        return ((SECOND,), small) if small else ((SECOND,),)

    @property
    def learns_from_labels(self) -> bool:  # type: ignore[override]
        return any(isinstance(term.constraint, SameLabel) for term in self.terms)

    @property
    def logged_search(self) -> LoggedSearch:  # type: ignore[override]
        """The neighbours of the last term, which is the constrained one where there are two."""
        last = self.terms[-1]
        return LoggedSearch(last.constraint, last.k, last.include_query)

    @abstractmethod
    def term_losses(self, step: LossInput, terms: Sequence[Term]) -> list[tuple[Float[Tensor, ""], Neighbours]]:
        """Returns the loss of each term before weighting, and the neighbours chosen."""

    def __call__(self, step: LossInput) -> LossOutput:
        share = self._companion_share(step.bank)
        relaxes = share is not None and share < self.companion_coverage
        terms = [term.relaxed() if relaxes and _by_companion(term) else term for term in self.terms]
        found = self.term_losses(step, terms)
        parts = {term.name: loss for term, (loss, _) in zip(terms, found, strict=True)}
        neighbours = found[-1][1]
        loss = torch.stack([term.weight * parts[term.name] for term in self.terms]).sum()
        if self.spread is not None:
            crops = [self.spread.of(crop.prediction) for crop in step.online.values()]
            parts["spread"] = torch.stack(crops).mean()
            loss = loss + self.spread.weight * parts["spread"]
        return LossOutput(loss, parts, neighbours, companion_share=share)

    def _companion_share(self, bank: MemoryBank) -> float | None:
        """Returns the share of the bank's rows that have a companion; None where nothing depends on it."""
        depends = self.companion_coverage > 0 and any(map(_by_companion, self.terms))
        return bank.companion_share() if depends else None


def _by_companion(term: Term) -> bool:
    return isinstance(term.constraint, NearCompanion)
