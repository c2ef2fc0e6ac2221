"""What training costs, by the paper's equation: FLOPs = (forward passes + 2 × backward passes) × those of a forward
pass, through the backbone alone, a multiply-add counted as one, and a crop of K px beside views of S px as (K / S)² of
a pass. Without arguments, the paper's table from its own inputs; what of it does not follow from them is in
docs/results/errata.md. With recipes or runs, a row of each: for a run so far as it has come, with the time its training
took and its last 20-NN accuracy. What a pass costs is counted in the network."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from os.path import isdir
from pathlib import Path
from typing import TYPE_CHECKING

from cmsf.analysis.published import IMAGENET_IMAGES
from cmsf.cli.compute_tables import Row, papers_table, table_of
from cmsf.cli.parser import Parser, parse_int, print_line, print_paths
from cmsf.recipes import check_recipe_name, get_recipe
from cmsf.recipes.recipe import AUTO, Recipe
from cmsf.runs.requests import check_run
from cmsf.utils.errors import BadInput
from cmsf.utils.files import check_out, expand_user, report_write_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

USAGE = "cmsf flops [RECIPE | RUN ...] [--images N] [--out FILE]\n       cmsf flops --published --out FILE"
HELP = "what training costs: the paper's table, recipes, runs"
_MOST_IMAGES = 10**12


def add_arguments(parser: Parser) -> None:
    parser.add_argument("items", nargs="*", metavar="RECIPE | RUN", help="METHOD-SCALE, a recipe.yaml, or a run folder")
    parser.add_options(
        {
            "--images N": "training images of a recipe (default: ImageNet's for -imagenet, the embedded sample's for "
            "-small)",
            "--out FILE": "a .png or .svg of the runs' accuracy (20-NN, and linear where it was evaluated) against "
            "their compute; runs on ImageNet have the published results beside them",
            "--published": "draw the paper's Figure 1 into --out, from its tables alone",
        }
    )


def execute(chosen: argparse.Namespace) -> int:
    images = parse_int("--images", chosen.images, 2, _MOST_IMAGES, "those that a recipe learns from")
    out = None if chosen.out is None else check_out(chosen.out, ".png", ".svg")
    runs, recipes = _separate_items(chosen.items)
    if chosen.published and (out is None or chosen.items):
        raise BadInput("--published draws the paper's figure; give --out FILE with it, and no recipes or runs")
    if images is not None and not recipes:
        raise BadInput("--images is for recipes, and none is given; leave it out")
    if out is not None and not chosen.published and not runs:
        raise BadInput("--out draws runs, and none is given; give some, or --published for the paper's figure")
    if chosen.published and out is not None:
        from cmsf.analysis.figures.compute import draw_published

        return _save(draw_published(), out)
    if not chosen.items:
        print("\n".join(papers_table()))
        return 0
    rows = _rows(chosen.items, recipes, images)
    figure = None if out is None else _draw(rows)
    print("\n".join(table_of(rows)))
    return 0 if figure is None or out is None else _save(figure, out)


def _save(figure: Figure, out: Path) -> int:
    from cmsf.analysis.figures.thumbnails import save_figure

    with report_write_errors(out, "give another --out"):
        save_figure(figure, out)
    print_paths({"picture": out})
    return 0


def _separate_items(items: Sequence[str]) -> tuple[list[str], dict[str, Recipe]]:
    """Returns runs, and recipes by name; a mistake is refused before anything is counted."""
    runs: list[str] = []
    recipes: dict[str, Recipe] = {}
    for item in items:
        if isdir(expand_user(item)):
            check_run(item)
            runs.append(item)
        elif "/" in item and not item.endswith((".yaml", ".yml")):
            raise BadInput(f"no such run: {item}; give a folder that cmsf train wrote, or a recipe")
        else:
            check_recipe_name(item)
            recipes[item] = get_recipe(item)
    return runs, recipes


def _rows(items: Sequence[str], recipes: dict[str, Recipe], images: int | None) -> list[Row]:
    from cmsf.runs.cost import run_cost
    from cmsf.training.resolve import expected
    from cmsf.utils.progress import track

    rows = []
    for item in track(items, "counting", len(items)):
        if item in recipes:
            count, side = _expected_images(item, recipes[item], images)
            rows.append(Row(item, expected(recipes[item], count, side), count))
        else:
            cost = run_cost(item)
            rows.append(Row(item, cost.recipe, cost.images, cost))
    return rows


def _expected_images(name: str, recipe: Recipe, images: int | None) -> tuple[int, int]:
    """Returns the number and size of the images that the scale of a recipe is for."""
    from cmsf.data import open_source

    if name.endswith("-small"):
        sample = open_source(None)
        return images or len(sample.train), sample.median_side()
    if images is None and not name.endswith("-imagenet"):
        raise BadInput(f"what {name} costs depends on how many images there are; give --images N")
    if recipe.size == AUTO:
        raise BadInput(f"{name} leaves its size to the images; put a number into it, as size: 32")
    return images or IMAGENET_IMAGES, recipe.size


def _draw(rows: Sequence[Row]) -> Figure:
    from cmsf.analysis.figures.compute import draw_runs
    from cmsf.report.compare import accuracy_points, comparison_warning, published_accuracy

    runs = {row.name: row.spent for row in rows if row.spent is not None}
    panels = accuracy_points(runs)
    if not panels:
        raise BadInput("no run has an accuracy to draw; give runs whose images have labels to evaluate with")
    if warning := comparison_warning(list(runs.values())):
        print_line(warning)
    for name in sorted(runs.keys() - {point.name for points in panels.values() for point in points}):
        print_line(f"{name} has no accuracy, and so is not in the picture")
    return draw_runs(panels, published_accuracy(list(runs.values())))
