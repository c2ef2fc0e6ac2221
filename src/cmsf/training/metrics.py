"""The numbers of a run: what a line says of a step or an epoch, and how it is written. How fast a run goes."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.analysis.collapse import Variety
from cmsf.analysis.neighbourhood import Neighbourhood, histogram
from cmsf.analysis.pseudo_labels import summarise_guesses
from cmsf.method.losses import LossOutput


def step_line(epoch: int, outcome: LossOutput, seen: Neighbourhood | None, variety: Variety) -> dict[str, Any]:
    looked = {} if seen is None else _summary(seen)
    return {"epoch": epoch, **outcome.plain(), **looked, **asdict(variety)}


@dataclass
class EpochTotals:
    """What an epoch's line is made of; it goes into mid-epoch checkpoints, so that no part of an epoch is lost."""

    losses: dict[str, list[float | Tensor]] = field(default_factory=dict)
    unconstrained: list[float] = field(default_factory=list)
    constrained: list[float] = field(default_factory=list)
    as_far: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    effective_ranks: list[float] = field(default_factory=list)
    guesses: list[int] | Int[Tensor, " counts"] = field(default_factory=list)

    def add(self, outcome: LossOutput) -> None:
        # Kept where they are: no step waits for the device just to be counted.
        for name, loss in _losses(outcome).items():
            self.losses.setdefault(name, []).append(loss)

    def add_guesses(self, counts: Int[Tensor, " counts"]) -> None:
        self.guesses = counts if not len(self.guesses) else torch.as_tensor(self.guesses).to(counts) + counts

    def add_seen(self, seen: Neighbourhood | None, variety: Variety) -> None:
        self.spreads.append(variety.spread)
        self.effective_ranks.append(variety.effective_rank)
        if seen is not None:
            self.unconstrained += seen.unconstrained.tolist()
        if seen is not None and seen.chosen:
            self.constrained += seen.constrained.tolist()
            self.as_far += seen.as_far.tolist()
            self.ranks += seen.rank.tolist()

    def line(self, epoch: int) -> dict[str, Any]:
        """Losses over all steps; purity, ranks and variety over the queries of the steps that were looked at."""
        return {
            "epoch": epoch,
            **{name: math.fsum(map(float, values)) / len(values) for name, values in self.losses.items()},
            **self._neighbourhood(),
            "spread": math.fsum(self.spreads) / len(self.spreads),
            "effective_rank": math.fsum(self.effective_ranks) / len(self.effective_ranks),
            **(summarise_guesses(torch.as_tensor(self.guesses)) if len(self.guesses) else {}),
        }

    def _neighbourhood(self) -> dict[str, Any]:
        if not self.unconstrained:
            return {}
        ranks, everywhere = torch.tensor(self.ranks, dtype=torch.int64), _doubles(self.unconstrained)
        if not self.constrained:
            return _summary(Neighbourhood(everywhere, everywhere, ranks, everywhere, chosen=False))
        pooled = Neighbourhood(everywhere, _doubles(self.constrained), ranks, _doubles(self.as_far))
        return {**_summary(pooled), "rank_histogram": histogram(ranks)}

    @classmethod
    def of(cls, plain: Any) -> EpochTotals:
        """What `plain` gave, or ValueError."""
        if not isinstance(plain, dict) or plain.keys() != {each.name for each in fields(cls)}:
            raise ValueError("these are no totals")
        losses = plain["losses"]
        columns = [plain[name] for name in plain if name != "losses"]
        if not isinstance(losses, dict) or not all(_are_numbers(column) for column in (*losses.values(), *columns)):
            raise ValueError("these totals are no numbers")
        return cls(**plain)

    def plain(self) -> dict[str, Any]:
        losses = {name: [float(loss) for loss in kept] for name, kept in self.losses.items()}
        return asdict(self) | {"losses": losses, "guesses": torch.as_tensor(self.guesses).tolist()}


def _losses(outcome: LossOutput) -> dict[str, Tensor]:
    parts = {f"loss_{name}": part.detach() for name, part in outcome.parts.items()}
    return {"loss": outcome.loss.detach()} | parts


def _summary(seen: Neighbourhood) -> dict[str, float]:
    """Mean purities, and mean and median (of the middle two, the mean) rank of the k-th constrained neighbour.

    How pure as many of the bank's nearest are is asked by each step that is looked at for its own queries' median.
    """
    everywhere = {"purity_unconstrained": float(seen.unconstrained.nanmean())}
    if not seen.chosen:
        return everywhere
    ranks = seen.rank.double()
    return everywhere | {
        "purity_constrained": float(seen.constrained.nanmean()),
        "purity_as_far": float(seen.as_far.nanmean()),
        "rank_mean": float(ranks.mean()),
        "rank_median": _median(ranks),
    }


def _median(values: Float[Tensor, " n"]) -> float:
    if not len(values):
        return math.nan
    ordered = values.sort().values
    return float((ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2)


def _doubles(values: list[float]) -> Float[Tensor, " n"]:
    return torch.tensor(values, dtype=torch.float64)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) for value in values)


class Pace:
    """Since some step."""

    def __init__(self, step: int) -> None:
        self.first, self.start = step, time.monotonic()

    def images_per_second(self, step: int, batch_size: int) -> float:
        return round((step - self.first) * batch_size / self._seconds, 1)

    def share(self, seconds: float) -> float:
        """How much of the time that was."""
        return round(seconds / self._seconds, 4)

    @property
    def _seconds(self) -> float:
        return max(time.monotonic() - self.start, 1e-9)
