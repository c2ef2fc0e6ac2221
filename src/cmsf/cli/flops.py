"""cmsf flops"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cmsf.analysis.compute import PAPERS_PASS, Passes
from cmsf.analysis.published import IMAGENET_IMAGES, SEMI_SUPERVISED
from cmsf.analysis.slips import FLOPS, MAIN_BATCH, MAIN_EPOCHS, PASSES, slips
from cmsf.cli.parser import Parser, say_paths, whole
from cmsf.errors import BadInput
from cmsf.files import from_home
from cmsf.printable import clipped, one_line, printable
from cmsf.recipe import AUTO, Recipe
from cmsf.recipes import check_name, named

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cmsf.accounting import Spent
    from cmsf.recipe import Resolved

_WIDTH, _GAP = 100, "  "
_MOST_IMAGES = 10**12
_PICTURES = (".png", ".svg")
_MEASURES = {"20-nn": "20-NN", "linear top-1": "linear", "SGD top-1": "linear by SGD"}
"""What a picture has a panel for."""


def add_parser(commands: Any) -> Parser:
    parser: Parser = commands.add_parser(
        "flops",
        usage="cmsf flops [RECIPE | RUN ...] [--images N] [--out FILE]\n       cmsf flops --published --out FILE",
        help="what training costs: the paper's table, recipes, runs",
        description="What training costs, by the paper's equation: FLOPs = (forward passes + 2 × backward passes) × "
        "those of a forward pass, through the backbone alone, a multiply-add counted as one, and a crop of K px beside "
        "views of S px as (K / S)² of a pass. Without arguments, the paper's table from its own inputs, and what of it "
        "does not follow from them. With recipes or runs, a row of each: for a run so far as it has come, with the "
        "time its training took and its last 20-NN accuracy. What a pass costs is counted in the network.",
    )
    parser.add_argument("items", nargs="*", metavar="RECIPE | RUN", help="METHOD-SCALE, a recipe.yaml, or a run folder")
    parser.add_argument(
        "--images",
        metavar="N",
        help="training images of a recipe (default: ImageNet's for -imagenet, the embedded sample's for -small)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="a .png or .svg of the runs' accuracy (20-NN, and linear where it was evaluated) against their compute; "
        "runs on ImageNet have the published results beside them",
    )
    parser.add_argument(
        "--published", action="store_true", help="draw the paper's Figure 1 into --out, from its tables alone"
    )
    parser.set_defaults(command=_flops)
    return parser


def _flops(chosen: argparse.Namespace) -> int:
    images = whole("--images", chosen.images, 2, _MOST_IMAGES, "those that a recipe learns from")
    out = None if chosen.out is None else _picture(chosen.out)
    runs, recipes = _told_apart(chosen.items)
    if chosen.published and (out is None or chosen.items):
        raise BadInput("--published draws the paper's figure; give --out FILE with it, and no recipes or runs")
    if images is not None and not recipes:
        raise BadInput("--images is for recipes, and none is given; leave it out")
    if out is not None and not chosen.published and not runs:
        raise BadInput("--out draws runs, and none is given; give some, or --published for the paper's figure")
    if chosen.published and out is not None:
        from cmsf.analysis.compute_picture import draw_published

        return _save(draw_published(), out)
    if not chosen.items:
        print("\n".join(_papers_table()))
        return 0
    rows = _rows(chosen.items, recipes, images)
    figure = None if out is None else _drawn([row for row in rows if row.spent is not None])
    print("\n".join(_table(rows)))
    return 0 if figure is None or out is None else _save(figure, out)


# What is asked for


def _picture(text: str) -> Path:
    out = from_home(text)
    if out.suffix.lower() not in _PICTURES:
        raise BadInput(f"--out {text} will not do; a picture is a {' or a '.join(_PICTURES)} file")
    if not out.parent.is_dir():
        raise BadInput(f"--out {text} will not do: there is no folder {out.parent}")
    return out


def _save(figure: Figure, out: Path) -> int:
    from cmsf.analysis.thumbnails import save_figure

    try:
        save_figure(figure, out)
    except OSError as error:
        raise BadInput(f"cannot write {out}: {error.strerror}; give another --out") from None
    say_paths({"picture": out})
    return 0


def _told_apart(items: Sequence[str]) -> tuple[list[str], dict[str, Recipe]]:
    """Runs, and recipes by what they were called; a mistake is refused before anything is counted."""
    runs: list[str] = []
    recipes: dict[str, Recipe] = {}
    for item in items:
        path = from_home(item)
        if path.is_dir():
            if not (path / "recipe.yaml").exists():
                raise BadInput(f"{item} is no run: it has no recipe.yaml; give a folder that cmsf train wrote")
            runs.append(item)
        elif "/" in item and not item.endswith((".yaml", ".yml")):
            raise BadInput(f"there is no run {item}; give a folder that cmsf train wrote, or a recipe")
        else:
            check_name(item)
            recipes[item] = named(item)
    return runs, recipes


# The paper's table


def _papers_table() -> list[str]:
    found = slips()
    marks = {(slip.row, slip.figure) for slip in found}

    def cell(text: str, row: str, figure: str) -> str:
        return f"{text}{'*' if (row, figure) in marks else ' '}"

    head = [
        ["", "", "", "", "", "", "", "mini-", "steps/", "", "passes ", "FLOPs ", "top-1"],
        ["", "fwd", "bwd", "batch ", "fwd", "bwd", "batch", "batch", "epoch", "epochs ", "1e8 ", "1e18 ", "%"],
    ]
    lines = []
    for row in SEMI_SUPERVISED:
        if row.calculation is None:
            continue
        said, compute = row.calculation, row.calculation.compute
        lines.append(
            [
                row.name,
                *_three(compute.unlabelled)[:2],
                cell(str(compute.unlabelled.batch), row.name, MAIN_BATCH),
                *_three(compute.labelled),
                f"{compute.mini_batch:.0f}",
                "" if said.per_epoch is None else str(said.per_epoch),
                cell(str(row.epochs), row.name, MAIN_EPOCHS),
                cell(f"{compute.passes / 1e8:.2f}", row.name, PASSES),
                cell(f"{compute.flops / 1e18:.2f}", row.name, FLOPS),
                f"{row.top_1}",
            ]
        )
    named = [[slip.row, slip.figure, _plain(slip.printed), _plain(slip.computed), slip.why] for slip in found]
    return [
        f"ResNet-50 on ImageNet ({IMAGENET_IMAGES:,} images), 10 % of the labels: the paper's inputs, and what its own",
        f"equation makes of them: FLOPs = (forward + 2 × backward passes) × {_power(PAPERS_PASS, 1)}, backbone alone,",
        "a multiply-add counted as one.",
        "",
        *_with_groups(_aligned([*head, *lines]), ("unlabelled", "labelled")),
        "",
        "* The paper prints another figure, there or in its main table:",
        "",
        *_aligned([["", "", "printed", "computed", ""], *named], texts=(0, 1, 4)),
        "",
        "SimCLRv2 (+Self Dist), 20e18 in the main table, has no inputs in the supplement.",
    ]


def _with_groups(lines: list[str], names: Sequence[str]) -> list[str]:
    """Names above the columns that begin with fwd."""
    first, second, *rest = lines
    start = 0
    for name in names:
        start = second.index("fwd", start)
        first = f"{first[:start]}{name}{first[start + len(name) :]}"
        start += len(name)
    return [first, second, *rest]


def _three(passes: Passes) -> list[str]:
    return [f"{passes.forward:g}", f"{passes.backward:g}", str(passes.batch)] if passes.batch else ["", "", ""]


# Recipes and runs


class Row:
    """One recipe, or one run."""

    def __init__(self, name: str, recipe: Resolved, images: int, spent: Spent | None = None) -> None:
        from cmsf.accounting import clean_views_of, compute_of

        self.name, self.recipe, self.spent = name, recipe, spent
        if spent is not None:
            self.compute, self.clean_views = spent.compute, spent.clean_views
        else:
            self.compute = compute_of(recipe, images)
            self.clean_views = clean_views_of(recipe, images, round(images * recipe.label_share))

    @property
    def network(self) -> str:
        stem = ", small stem," if self.recipe.stem == "small" else ""
        each = _power(self.compute.per_pass)
        return f"{self.recipe.backbone}{stem} at {self.recipe.size} px: {each} multiply-adds a forward pass"

    def cells(self) -> list[str]:
        spent, compute, epochs = self.spent, self.compute, str(self.recipe.epochs)
        beside = f"+{compute.labelled.batch}" if compute.labelled.batch else ""
        seconds = None if spent is None else spent.seconds
        accuracy = None if spent is None else spent.accuracy.get("20-nn")
        return [
            printable(self.name),
            epochs if spent is None or spent.epochs == self.recipe.epochs else f"{spent.epochs} of {epochs}",
            f"{round(compute.unlabelled.forward, 2):g}",
            f"{round(compute.unlabelled.backward, 2):g}",
            f"{compute.unlabelled.batch}{beside}",
            str(compute.iterations),
            _power(compute.passes),
            _power(compute.flops),
            "" if seconds is None else _duration(seconds),
            "" if accuracy is None else f"{accuracy:.1f}",
        ]

    def note(self) -> str | None:
        """What the offline cache of pseudo-labels adds."""
        more = self.clean_views
        if more is None:
            return None
        adds = f"{self.name}: the offline cache of pseudo-labels adds {more.iterations} forward passes of"
        if self.spent is None and (self.recipe.label_share == 1 or self.recipe.labels_per_class):
            return f"{adds} every labelled image"  # and how many there are is not in a recipe
        share = 100 * more.flops / self.compute.flops if self.compute.flops else 0
        return f"{adds} {more.unlabelled.batch} labelled images: {_power(more.flops)} FLOPs, {share:.2g} % more"


def _rows(items: Sequence[str], recipes: dict[str, Recipe], images: int | None) -> list[Row]:
    from cmsf.accounting import spent
    from cmsf.progress import shown
    from cmsf.resolving import expected

    rows = []
    for item in shown(items, "counting", len(items)):
        if item in recipes:
            count, side = _expected_images(item, recipes[item], images)
            rows.append(Row(item, expected(recipes[item], count, side), count))
        else:
            found = spent(item)
            rows.append(Row(item, found.recipe, found.images, found))
    return rows


def _expected_images(name: str, recipe: Recipe, images: int | None) -> tuple[int, int]:
    """How many images, and of which size, where none are there: those that the scale is for."""
    from cmsf.data import open_source

    if name.endswith("-small"):
        sample = open_source(None)
        return images or len(sample.train), sample.typical_side()
    if images is None and not name.endswith("-imagenet"):
        raise BadInput(f"what {name} costs depends on how many images there are; give --images N")
    if recipe.size == AUTO:
        raise BadInput(f"{name} leaves its size to the images; put a number into it, as size: 32")
    return images or IMAGENET_IMAGES, recipe.size


def _table(rows: Sequence[Row]) -> list[str]:
    head = ["", "epochs", "fwd", "bwd", "batch", "steps", "passes", "FLOPs", "time", "20-NN"]
    cells = [head, *(row.cells() for row in rows)]
    there = [column for column in range(len(head)) if not column or any(line[column] for line in cells[1:])]
    runs = any(row.spent is not None for row in rows)
    return [
        *_aligned([[line[column] for column in there] for line in cells]),
        "",
        *(one_line(network) for network in dict.fromkeys(row.network for row in rows)),
        *(one_line(note) for row in rows if (note := row.note())),
        "fwd, bwd: passes of an image through the backbone, all that is counted; backward costs twice forward.",
        "A multiply-add is one FLOP, as in the paper; its "
        f"{_power(PAPERS_PASS, 1)} are of ResNet-50 with strides in 1×1 convolutions.",
        *(["time: of training, by the log's images per second; without evaluations and pauses."] if runs else []),
    ]


def _drawn(rows: Sequence[Row]) -> Figure:
    from cmsf.analysis.compute_picture import Point, draw_runs, published_points
    from cmsf.analysis.thumbnails import PLAIN

    panels: dict[str, list[Point]] = {}
    for measure, title in _MEASURES.items():
        for row in rows:
            if row.spent is not None and row.compute.flops and measure in row.spent.accuracy:
                point = Point(row.name, row.compute.flops, row.spent.accuracy[measure])
                panels.setdefault(title, []).append(point)
    if not panels:
        raise BadInput("no run has an accuracy to draw; give runs whose images have labels to judge by")
    beside = {}
    if all(row.spent is not None and row.spent.on_imagenet for row in rows):
        beside = {title: published_points(measure, colour=PLAIN) for measure, title in _MEASURES.items()}
    return draw_runs(panels, beside)


# Words and numbers


def _aligned(lines: Sequence[Sequence[str]], texts: Sequence[int] = (0,)) -> list[str]:
    """Columns side by side, those of text to the left; a long first column gives way to the others."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[0] = min(widths[0], max(12, _WIDTH - sum(widths[1:]) - len(_GAP) * len(widths[1:])))
    shown = []
    for line in lines:
        first, *rest = line
        cells = [clipped(first, widths[0]), *rest]
        padded = [
            cell.ljust(width) if place in texts else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        shown.append(_GAP.join(padded).rstrip())
    return shown


def _plain(number: float) -> str:
    return f"{number:.0f}" if number == int(number) and number > 99 else f"{number:.4g}"


def _power(number: float, digits: int = 2) -> str:
    """7.69e8."""
    figure, power = f"{number:.{digits}e}".split("e")
    return f"{figure}e{int(power)}"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
