"""Writes docs/results/errata.md: the paper's figures of compute that do not follow from one another.

The supplement's table of FLOPs prints its inputs too, and by the supplement's own equation they give every other
column; the main table's follow from the same inputs. What does not come out, rounded to as many digits, is listed.

    python scripts/write_errata.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cmsf.analysis.compute import Compute, Passes
from cmsf.analysis.published import (
    BOTH_WAYS,
    IMAGENET_IMAGES,
    ONE_NETWORK,
    PAWS_TIMES_OURS,
    SEMI_SUPERVISED,
    SYMMETRIC_TIMES,
    WITH_TARGET,
    SemiSupervised,
)

PAGE = Path(__file__).parents[1] / "docs" / "results" / "errata.md"
MINI_BATCH, PER_EPOCH, PASSES, FLOPS = "mini-batch", "iterations an epoch", "passes, 1e8", "FLOPs, 1e18"
MAIN_FLOPS, MAIN_BATCH, MAIN_EPOCHS = "main table's FLOPs", "main table's batch", "main table's epochs"
RATIO, SYMMETRY = "× FLOPs of CMSF semi", "× FLOPs, symmetric loss"
_HALF = 0.5 + 1e-9
"""Of the last digit: so far may a printed figure be from what it stands for."""


@dataclass(frozen=True)
class Printed:
    """A figure of the paper's, what the printed inputs give for it, and what one is in its last digit."""

    row: str
    figure: str
    printed: float
    computed: float
    unit: float = 1

    @property
    def follows(self) -> bool:
        return abs(self.printed - self.computed) <= _HALF * self.unit

    @property
    def why(self) -> str:
        """How it may have come about, where that can be told."""
        return _WHY.get((self.row, self.figure), "")


_BACKWARD_ONCE = "a backward pass counted once"
_ROUNDED_UP = "rounded up"
_UNLABELLED_ALONE = "the caption: labelled ones too"
_WHY = {
    ("SimCLRv2", FLOPS): _BACKWARD_ONCE,
    ("SimCLRv2", MAIN_FLOPS): _BACKWARD_ONCE,
    ("UDA", MAIN_EPOCHS): "by its 40,000 iterations",
    ("FixMatch", FLOPS): "a zero too many; main table: 7",
    ("MPL", FLOPS): _ROUNDED_UP,
    ("MPL", MAIN_FLOPS): _ROUNDED_UP,
    ("MPL", MAIN_BATCH): _UNLABELLED_ALONE,
    ("PAWS (sup=6720)", PASSES): "314 iterations an epoch, not 312",
    ("PAWS (sup=6720)", MAIN_BATCH): _UNLABELLED_ALONE,
    ("PAWS (sup=1680)", FLOPS): _ROUNDED_UP,
    ("PAWS (sup=1680)", MAIN_FLOPS): _ROUNDED_UP,
    ("PAWS (sup=1680)", MAIN_BATCH): _UNLABELLED_ALONE,
    ("PAWS (sup=400)", PASSES): "of 3.102 crops, not of 3.1",
    ("PAWS (sup=400)", MAIN_BATCH): _UNLABELLED_ALONE,
    ("PAWS (sup=6720)", RATIO): "of printed passes, 36.6 to 7.7",
    ("SimCLR, SwAV, SimSiam", SYMMETRY): "2 with a target encoder alone",
}


def printed_figures() -> list[Printed]:
    """Returns all figures of compute in the paper that follow from others of it."""
    return [*(figure for row in SEMI_SUPERVISED for figure in _of_row(row)), *_ratios()]


def errata() -> list[Printed]:
    return [figure for figure in printed_figures() if not figure.follows]


def page() -> str:
    figures, wrong = printed_figures(), errata()
    rows = [f"| {e.row} | {e.figure} | {_plain(e.printed)} | {_plain(e.computed)} | {e.why} |" for e in wrong]
    return "\n".join(
        [
            "# Errata: the paper's figures of compute",
            "",
            "Written by `python scripts/write_errata.py`.",
            "",
            f"The paper prints {len(figures)} figures of compute that follow from others of it.",
            f"{len(wrong)} of them do not come out. Computed: by the supplement's equation, from the printed inputs.",
            "`cmsf flops` prints the whole table as computed.",
            "",
            "| row | figure | printed | computed | how it may have come about |",
            "| --- | --- | ---: | ---: | --- |",
            *rows,
            "",
            "SimCLRv2 (+Self Dist), 20e18 FLOPs in the main table, has no inputs in the supplement.",
            "",
        ]
    )


def _plain(number: float) -> str:
    return f"{number:.0f}" if number == int(number) and number > 99 else f"{number:.4g}"


def _of_row(row: SemiSupervised) -> list[Printed]:
    if row.calculation is None:
        return []
    said, compute = row.calculation, row.calculation.compute
    per_epoch = IMAGENET_IMAGES // compute.unlabelled.batch
    figures = [
        Printed(row.name, MINI_BATCH, said.mini_batch, compute.mini_batch),
        Printed(row.name, PASSES, said.passes, compute.passes / 1e8, unit=0.1),
        Printed(row.name, FLOPS, said.flops, compute.flops / 1e18),
        Printed(row.name, MAIN_FLOPS, row.flops, compute.flops / 1e18),
        Printed(row.name, MAIN_BATCH, row.batch, compute.unlabelled.batch + compute.labelled.batch),
        Printed(row.name, MAIN_EPOCHS, row.epochs, compute.iterations / per_epoch),
    ]
    if said.per_epoch is not None:
        figures.append(Printed(row.name, PER_EPOCH, said.per_epoch, per_epoch))
    return figures


def _ratios() -> list[Printed]:
    """What is said of one method beside another."""
    flops = {row.name: row.calculation.compute.flops for row in SEMI_SUPERVISED if row.calculation}
    times_ours = flops["PAWS (sup=6720)"] / flops["CMSF semi, mixed"]
    two_sided = {"BYOL, MoCo v2": BOTH_WAYS, "SimCLR, SwAV, SimSiam": ONE_NETWORK}
    return [
        Printed("PAWS (sup=6720)", RATIO, PAWS_TIMES_OURS, times_ours, unit=0.1),
        *(
            Printed(methods, SYMMETRY, SYMMETRIC_TIMES, _of_image(passes) / _of_image(WITH_TARGET), unit=0.1)
            for methods, passes in two_sided.items()
        ),
    ]


def _of_image(passes: tuple[float, float]) -> float:
    return Compute(Passes(*passes, batch=1), iterations=1).flops


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
