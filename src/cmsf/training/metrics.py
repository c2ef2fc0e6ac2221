"""The lines of metrics.jsonl: of a step, of an epoch; and throughput."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.analysis.collapse import EmbeddingStats
from cmsf.analysis.neighbourhood import NeighbourhoodStats, histogram
from cmsf.analysis.pseudo_labels import summarise_guesses
from cmsf.method.losses import LossOutput
from cmsf.utils.numbers import is_integer


def step_line(
    epoch: int, output: LossOutput, inspected: NeighbourhoodStats | None, variety: EmbeddingStats
) -> dict[str, Any]:
    neighbourhood = {} if inspected is None else _summary(inspected)
    return {"epoch": epoch, **output.scalars(), **neighbourhood, **asdict(variety)}


@dataclass
class EpochTotals:
    """Accumulates the line of an epoch; it goes into mid-epoch checkpoints, so that no part of an epoch is lost."""

    losses: dict[str, list[float | Tensor]] = field(default_factory=dict)
    unconstrained: list[float] = field(default_factory=list)
    constrained: list[float] = field(default_factory=list)
    as_far: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    effective_ranks: list[float] = field(default_factory=list)
    guesses: list[int] | Int[Tensor, " counts"] = field(default_factory=list)

    def add(self, output: LossOutput) -> None:
        # Kept on the device: no step waits for it just to be counted.
        parts = {f"loss_{name}": part for name, part in output.parts.items()}
        for name, loss in {"loss": output.loss, **parts}.items():
            self.losses.setdefault(name, []).append(loss.detach())

    def add_guesses(self, counts: Int[Tensor, " counts"]) -> None:
        self.guesses = counts if not len(self.guesses) else torch.as_tensor(self.guesses).to(counts) + counts

    def add_inspected(self, neighbourhood: NeighbourhoodStats | None, variety: EmbeddingStats) -> None:
        self.spreads.append(variety.spread)
        self.effective_ranks.append(variety.effective_rank)
        if neighbourhood is None:
            return
        self.unconstrained += neighbourhood.unconstrained.tolist()
        if neighbourhood.chosen:
            self.constrained += neighbourhood.constrained.tolist()
            self.as_far += neighbourhood.as_far.tolist()
            self.ranks += neighbourhood.rank.tolist()

    def line(self, epoch: int) -> dict[str, Any]:
        """Returns means: losses over all steps; purity, ranks and variety over the queries of the logged steps."""
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
            return _summary(NeighbourhoodStats(everywhere, everywhere, ranks, everywhere, chosen=False))
        pooled = NeighbourhoodStats(everywhere, _doubles(self.constrained), ranks, _doubles(self.as_far))
        return {**_summary(pooled), "rank_histogram": histogram(ranks)}

    @classmethod
    def from_state(cls, state: Any) -> EpochTotals:
        """Restores what `state_dict` returned, or raises ValueError."""
        if not isinstance(state, dict) or state.keys() != {field.name for field in fields(cls)}:
            raise ValueError("its totals have other entries")
        losses = state["losses"]
        columns = [state[name] for name in state if name != "losses"]
        if not isinstance(losses, dict) or not all(map(_is_list_of_numbers, (*losses.values(), *columns))):
            raise ValueError("its totals are not numbers")
        return cls(**state)

    def state_dict(self) -> dict[str, Any]:
        losses = {name: [float(loss) for loss in values] for name, values in self.losses.items()}
        return asdict(self) | {"losses": losses, "guesses": torch.as_tensor(self.guesses).tolist()}


def _summary(neighbourhood: NeighbourhoodStats) -> dict[str, float]:
    """Returns mean purities, and the mean and median rank of the k-th constrained neighbour."""
    unconstrained = {"purity_unconstrained": float(neighbourhood.unconstrained.nanmean())}
    if not neighbourhood.chosen:
        return unconstrained
    ranks = neighbourhood.rank.double()
    return unconstrained | {
        "purity_constrained": float(neighbourhood.constrained.nanmean()),
        "purity_as_far": float(neighbourhood.as_far.nanmean()),
        "rank_mean": float(ranks.mean()),
        "rank_median": float(np.median(ranks.numpy(force=True))) if len(ranks) else math.nan,
    }


def _doubles(values: list[float]) -> Float[Tensor, " n"]:
    return torch.tensor(values, dtype=torch.float64)


def _is_list_of_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(is_integer(value) or isinstance(value, float) for value in values)


class Throughput:
    """Measures the speed since a step."""

    def __init__(self, step: int) -> None:
        self.first, self.start = step, time.monotonic()

    def images_per_second(self, step: int, batch_size: int) -> float:
        return round((step - self.first) * batch_size / self._seconds, 1)

    def share(self, seconds: float) -> float:
        """Returns the share of the time since then."""
        return round(seconds / self._seconds, 4)

    @property
    def _seconds(self) -> float:
        return max(time.monotonic() - self.start, 1e-9)
