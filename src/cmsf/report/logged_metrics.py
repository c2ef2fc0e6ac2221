"""What the log of a run says of its weights: at the start, after each epoch, and of those that were kept.

Somebody else may have written the log: what cannot be drawn is left out, whatever line it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cmsf.analysis.neighbourhood import HISTOGRAM_TO
from cmsf.report.plots import EpochLines
from cmsf.runs.log import epoch_lines, kept_line, start_line
from cmsf.runs.run import Run
from cmsf.training.best_weights import HELD_OUT
from cmsf.training.validation import AGREEMENT, KNN
from cmsf.utils.errors import BadInput
from cmsf.utils.numbers import is_measurement
from cmsf.utils.text import escape_unprintable

FIGURES = {KNN: "20-NN", HELD_OUT: "held-out labels", AGREEMENT: "agreement of views"}
"""What weights are measured by, in per cent, and what it is called; the main figure first."""


@dataclass(frozen=True)
class LoggedMetrics:
    """The lines of a log; start and kept are empty where there is none: a run of an earlier version has no start, and
    only one that kept its best epoch says which."""

    start: Mapping[str, Any] = field(default_factory=dict)
    epochs: EpochLines = ()
    kept: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, run: Run) -> LoggedMetrics:
        file, epochs = run.folder.metrics_file, run.recipe.epochs
        if not file.exists():
            return cls()
        lines = list(epoch_lines(file))
        if not all(type(line.get("epoch")) is int and 0 <= line["epoch"] < epochs for line in lines):
            raise BadInput(f"{file} has epochs that are not those of its recipe")
        start, kept = _valid_fields(start_line(file)), _valid_fields(kept_line(file, epochs))
        return cls(start, [_valid_fields(line) for line in lines], kept)

    def measured(self, key: str) -> list[tuple[int, Mapping[str, Any]]]:
        """Returns the lines that have a figure, each after how many epochs it is; the start is after none."""
        lines = [(0, self.start), *((line["epoch"] + 1, line) for line in self.epochs)]
        return [(epochs, line) for epochs, line in lines if key in line]

    def now(self, key: str) -> tuple[int, Mapping[str, Any]] | None:
        """Returns the line of the weights that the run has, the kept ones or those measured last, and their epochs;
        None where it does not have the figure."""
        if self.kept:
            return (self.kept["epoch"], self.kept) if key in self.kept else None
        measured = self.measured(key)
        return measured[-1] if measured else None


def _valid_fields(line: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that can be drawn."""
    counts = line.pop("rank_histogram", None)
    valid: dict[str, Any] = {escape_unprintable(name): value for name, value in line.items() if is_measurement(value)}
    if isinstance(counts, list) and all(type(count) is int and 0 <= count < 2**53 for count in counts):
        valid["rank_histogram"] = counts[:HISTOGRAM_TO]
    return valid
