"""The numbers of a run: what a line says of a step or an epoch, and how it is written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from cmsf.analysis.neighbourhood import Neighbourhood, histogram, spread
from cmsf.analysis.pseudo_labels import summarise_guesses
from cmsf.objectives import Outcome
from cmsf.rows import Rows

TIMING_FIELDS = ("images_per_second", "pseudo_cost")
"""Fields that differ between two runs which compute the same."""


def step_line(epoch: int, outcome: Outcome, seen: Neighbourhood | None, query: Rows) -> dict[str, Any]:
    losses = {name: float(loss) for name, loss in _losses(outcome).items()}
    looked = {} if seen is None else _summary(seen)
    return {"epoch": epoch, **losses, **looked, "spread": spread(query.embedding)}


@dataclass
class EpochTotals:
    """What an epoch's line is made of; it goes into mid-epoch checkpoints, so that no part of an epoch is lost."""

    losses: dict[str, list[float | Tensor]] = field(default_factory=dict)
    unconstrained: list[float] = field(default_factory=list)
    constrained: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    guesses: list[int] | Int[Tensor, " counts"] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        # Kept where they are: no step waits for the device just to be counted.
        for name, loss in _losses(outcome).items():
            self.losses.setdefault(name, []).append(loss)

    def add_guesses(self, counts: Int[Tensor, " counts"]) -> None:
        self.guesses = counts if not len(self.guesses) else torch.as_tensor(self.guesses).to(counts) + counts

    def add_seen(self, seen: Neighbourhood | None, query: Rows) -> None:
        self.spreads.append(spread(query.embedding))
        if seen is not None:
            self.unconstrained += seen.unconstrained.tolist()
        if seen is not None and seen.chosen:
            self.constrained += seen.constrained.tolist()
            self.ranks += seen.rank.tolist()

    def line(self, epoch: int) -> dict[str, Any]:
        """Losses over all steps; purity, ranks and spread over the queries of the steps that were looked at."""
        return {
            "epoch": epoch,
            **{name: math.fsum(map(float, values)) / len(values) for name, values in self.losses.items()},
            **self._neighbourhood(),
            "spread": math.fsum(self.spreads) / len(self.spreads),
            **(summarise_guesses(torch.as_tensor(self.guesses)) if len(self.guesses) else {}),
        }

    def _neighbourhood(self) -> dict[str, Any]:
        if not self.unconstrained:
            return {}
        ranks, everywhere = torch.tensor(self.ranks, dtype=torch.int64), _doubles(self.unconstrained)
        if not self.constrained:
            return _summary(Neighbourhood(everywhere, everywhere, ranks, chosen=False))
        pooled = Neighbourhood(everywhere, _doubles(self.constrained), ranks)
        return {**_summary(pooled), "rank_histogram": histogram(ranks)}

    def plain(self) -> dict[str, Any]:
        losses = {name: [float(loss) for loss in kept] for name, kept in self.losses.items()}
        return asdict(self) | {"losses": losses, "guesses": torch.as_tensor(self.guesses).tolist()}


class MetricsLog:
    """Appends to metrics.jsonl; a resumed run first cuts off what came after its checkpoint."""

    def __init__(self, path: Path, tensorboard: Path, length: int, step: int) -> None:
        self.file = path.open("ab")
        self.file.truncate(min(length, self.file.tell()))
        self.file.seek(0, os.SEEK_END)
        self.events = SummaryWriter(str(tensorboard), purge_step=step + 1)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        line = {"kind": kind, "step": step} | {name: _plain(value) for name, value in values.items()}
        self.file.write((json.dumps(line, allow_nan=False) + "\n").encode())
        self.file.flush()
        for name, value in line.items():
            if isinstance(value, int | float) and name not in ("step", "epoch"):
                self.events.add_scalar(f"{kind}/{name}", value, step)

    def synced_length(self) -> int:
        """How long the file is, once all of it is on the disk: what a checkpoint may rely on."""
        os.fsync(self.file.fileno())
        return self.file.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        self.events.close()


def _losses(outcome: Outcome) -> dict[str, Tensor]:
    parts = {f"loss_{name}": part.detach() for name, part in outcome.parts.items()}
    return {"loss": outcome.loss.detach()} | parts


def _summary(seen: Neighbourhood) -> dict[str, float]:
    """Mean purities, and mean and median (of the middle two, the mean) rank of the k-th constrained neighbour."""
    everywhere = {"purity_unconstrained": float(seen.unconstrained.nanmean())}
    if not seen.chosen:
        return everywhere
    ranks = seen.rank.double()
    return everywhere | {
        "purity_constrained": float(seen.constrained.nanmean()),
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


def _plain(value: Any) -> Any:
    """JSON has no NaN: a number that is not there is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
