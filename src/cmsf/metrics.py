"""The numbers of a run: what a line says of a step or an epoch, and how it is written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.analysis.collapse import Variety
from cmsf.analysis.neighbourhood import Neighbourhood, histogram
from cmsf.analysis.pseudo_labels import summarise_guesses
from cmsf.appended import AppendedFile
from cmsf.errors import BadInput
from cmsf.events import Events
from cmsf.files import FullDisk, check_plain
from cmsf.objectives import Outcome

TIMING_FIELDS = ("images_per_second", "pseudo_cost")
"""Fields that differ between two runs which compute the same."""
_EPOCH_LINE = b'{"kind": "epoch", '
_LONGEST_LINE = 1 << 20
_LARGEST = 1e30


def step_line(epoch: int, outcome: Outcome, seen: Neighbourhood | None, variety: Variety) -> dict[str, Any]:
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

    def add(self, outcome: Outcome) -> None:
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
    def of(cls, plain: Any) -> Self:
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


class MetricsLog:
    """Appends to metrics.jsonl; a resumed run first cuts off what came after its checkpoint.

    Lines that find no room on the disk are kept until there is some. Of TensorBoard's events, which say the same once
    more, there are then no more.
    """

    def __init__(self, path: Path, tensorboard: Path, length: int, step: int, say: Callable[[str], None]) -> None:
        self.path, self.file, self.say = path, AppendedFile(path, length), say
        if self.file.missing:
            say(f"{path} is {self.file.missing} bytes shorter than at the checkpoint; what they said is lost")
            self.file.cut_torn_line()
        self.events: Events | None = None
        with self._unless_full():
            self.events = Events(tensorboard, step + 1)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Add a line; FullDisk if there is no room for it, the first time."""
        line = {"kind": kind, "step": step} | {name: _plain(value) for name, value in values.items()}
        with self._unless_full():
            if self.events is not None:
                scalars = {
                    f"{kind}/{name}": value
                    for name, value in line.items()
                    if isinstance(value, int | float) and name not in ("step", "epoch")
                }
                self.events.write(scalars, step)
        was_behind = self.file.behind
        try:
            self.file.append((json.dumps(line, allow_nan=False) + "\n").encode())
        except FullDisk as error:
            if not was_behind:
                raise FullDisk(f"{error}; until then its lines are kept in memory") from None

    def epochs(self) -> list[dict[str, Any]]:
        """What the file says of epochs that are over, as far as it can be read."""
        found: list[dict[str, Any]] = []
        with suppress(BadInput):  # anybody may have written it
            found.extend(epoch_lines(self.path))
        return found

    def synced_length(self) -> int:
        """How long the file is, once all of it is on the disk, or FullDisk: what a checkpoint may rely on."""
        with self._unless_full():
            if self.events is not None:
                self.events.sync()
        return self.file.synced_length()

    @contextmanager
    def _unless_full(self) -> Iterator[None]:
        try:
            yield
        except FullDisk as error:
            self.say(f"{error}; there are no more events for TensorBoard until the run is resumed")
            if self.events is not None:
                self.events.close()
            self.events = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        if self.events is not None:
            self.events.close()


class SilentLog:
    """Of several processes, one writes; the others have this."""

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        return

    def epochs(self) -> list[dict[str, Any]]:
        return []

    def synced_length(self) -> int:
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return


def epoch_lines(path: Path) -> Iterator[dict[str, Any]]:
    """What a log says of each epoch. A last line that has no end is still being written, and left out."""
    check_plain(path)
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            if not line.endswith(b"\n"):
                if len(line) == _LONGEST_LINE:
                    raise BadInput(f"{path} has a line without end; it is not what cmsf train wrote")
                return
            if line.startswith(_EPOCH_LINE):  # steps are many, and not asked for
                yield _parsed(line, path)


def _parsed(line: bytes, path: Path) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise BadInput(f"{path} has a line that is no JSON object; it is not what cmsf train wrote")
    return said


def is_plain_number(value: Any) -> bool:
    """Whether what a log has in the place of a number is one that can be reckoned with; anybody may have written it."""
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST


def _losses(outcome: Outcome) -> dict[str, Tensor]:
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


def _plain(value: Any) -> Any:
    """JSON has no NaN: a number that is not there is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
