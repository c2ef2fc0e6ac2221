"""What training costs, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from cmsf.analysis.compute import PAPERS_PASS, Passes
from cmsf.analysis.published import IMAGENET_IMAGES, SEMI_SUPERVISED
from cmsf.utils.text import escape_unprintable, one_line, shorten

if TYPE_CHECKING:  # not above: the paper's table should not wait for torch
    from cmsf.recipes.recipe import ResolvedRecipe
    from cmsf.runs.cost import RunCost

_WIDTH, _GAP = 100, "  "


def papers_table() -> list[str]:
    head = [
        ["", "", "", "", "", "", "", "mini-", "steps/", "", "passes", "FLOPs", "top-1"],
        ["", "fwd", "bwd", "batch", "fwd", "bwd", "batch", "batch", "epoch", "epochs", "1e8", "1e18", "%"],
    ]
    lines = []
    for row in SEMI_SUPERVISED:
        if row.calculation is None:
            continue
        calculation, compute = row.calculation, row.calculation.compute
        passes = [*_three(compute.unlabelled), *_three(compute.labelled), f"{compute.mini_batch:.0f}"]
        epochs = ["" if calculation.per_epoch is None else str(calculation.per_epoch), str(row.epochs)]
        totals = [f"{compute.passes / 1e8:.2f}", f"{compute.flops / 1e18:.2f}", f"{row.top_1}"]
        lines.append([row.name, *passes, *epochs, *totals])
    return [
        f"ResNet-50 on ImageNet ({IMAGENET_IMAGES:,} images), 10 % of the labels: the paper's inputs, and what its own",
        f"equation makes of them: FLOPs = (forward + 2 × backward passes) × {_power(PAPERS_PASS, 1)}, backbone alone,",
        "a multiply-add counted as one.",
        "",
        *_with_groups(_aligned([*head, *lines]), ("unlabelled", "labelled")),
        "",
        "Where the paper prints another figure, and why: docs/results/errata.md.",
    ]


def _with_groups(lines: list[str], names: Sequence[str]) -> list[str]:
    """Writes names above the columns that begin with fwd."""
    first, second, *rest = lines
    start = 0
    for name in names:
        start = second.index("fwd", start)
        first = f"{first[:start]}{name}{first[start + len(name) :]}"
        start += len(name)
    return [first, second, *rest]


def _three(passes: Passes) -> list[str]:
    return [f"{passes.forward:g}", f"{passes.backward:g}", str(passes.batch)] if passes.batch else ["", "", ""]


class Row:
    """One recipe, or one run."""

    def __init__(self, name: str, recipe: ResolvedRecipe, images: int, spent: RunCost | None = None) -> None:
        from cmsf.runs.cost import clean_views_of, compute_of

        self.name, self.recipe, self.spent = name, recipe, spent
        if spent is not None:
            self.compute, self.clean_views = spent.compute, spent.clean_views
        else:
            self.compute = compute_of(recipe, images)
            self.clean_views = clean_views_of(recipe, images, round(images * recipe.label_share))

    @property
    def network(self) -> str:
        stem = ", small stem," if self.recipe.stem == "small" else ""
        per_pass = _power(self.compute.per_pass)
        return f"{self.recipe.backbone}{stem} at {self.recipe.size} px: {per_pass} multiply-adds a forward pass"

    def cells(self) -> list[str]:
        spent, compute, epochs = self.spent, self.compute, str(self.recipe.epochs)
        beside = f"+{compute.labelled.batch}" if compute.labelled.batch else ""
        seconds = None if spent is None else spent.seconds
        reached = None if spent is None else spent.reached.get("20-nn")
        return [
            escape_unprintable(self.name),
            epochs if spent is None or spent.epochs == self.recipe.epochs else f"{spent.epochs} of {epochs}",
            f"{round(compute.unlabelled.forward, 2):g}",
            f"{round(compute.unlabelled.backward, 2):g}",
            f"{compute.unlabelled.batch}{beside}",
            str(compute.iterations),
            _power(compute.passes),
            _power(compute.flops),
            "" if seconds is None else _duration(seconds),
            "" if reached is None else f"{reached.per_cent:.2f}",
        ]

    def judged_before(self) -> str | None:
        """Returns a note where the last 20-NN was measured before the end."""
        reached = None if self.spent is None else self.spent.reached.get("20-nn")
        if self.spent is None or reached is None or reached.epochs == self.spent.epochs:
            return None
        then = _power(self.spent.flops_after(reached.epochs))
        return f"{self.name}: its 20-NN is of epoch {reached.epochs}, after {then} FLOPs"

    def note(self) -> str | None:
        """Returns what the offline cache of pseudo-labels adds."""
        more = self.clean_views
        if more is None:
            return None
        adds = f"{self.name}: the offline cache of pseudo-labels adds {more.iterations} forward passes of"
        if self.spent is None and (self.recipe.label_share == 1 or self.recipe.labels_per_class):
            return f"{adds} every labelled image"  # and how many there are is not in a recipe
        share = 100 * more.flops / self.compute.flops if self.compute.flops else 0
        return f"{adds} {more.unlabelled.batch} labelled images: {_power(more.flops)} FLOPs, {share:.2g} % more"


def table_of(rows: Sequence[Row]) -> list[str]:
    head = ["", "epochs", "fwd", "bwd", "batch", "steps", "passes", "FLOPs", "time", "20-NN"]
    cells = [head, *(row.cells() for row in rows)]
    filled = [column for column in range(len(head)) if not column or any(line[column] for line in cells[1:])]
    runs = any(row.spent is not None for row in rows)
    notes = [
        *dict.fromkeys(row.network for row in rows),
        *(note for row in rows for note in (row.note(), row.judged_before()) if note),
        "fwd, bwd: passes of an image through the backbone, all that is counted; backward costs twice forward.",
        "A multiply-add is one FLOP, as in the paper; its "
        f"{_power(PAPERS_PASS, 1)} are of ResNet-50 with strides in 1×1 convolutions.",
        *(["time: of training, by the log's images per second; without evaluations and pauses."] if runs else []),
    ]
    return [
        *_aligned([[line[column] for column in filled] for line in cells]),
        "",
        *(line for note in notes for line in wrap(one_line(note), _WIDTH, subsequent_indent=_GAP)),
    ]


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Aligns columns, the first to the left; where it is long, it gives way to the others."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[0] = min(widths[0], max(12, _WIDTH - sum(widths[1:]) - len(_GAP) * len(widths[1:])))
    return [
        _GAP.join([shorten(first, widths[0]).ljust(widths[0]), *map(str.rjust, figures, widths[1:])]).rstrip()
        for first, *figures in lines
    ]


def _power(number: float, digits: int = 2) -> str:
    """Formats a number as 7.69e8."""
    figure, power = f"{number:.{digits}e}".split("e")
    return f"{figure}e{int(power)}"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
