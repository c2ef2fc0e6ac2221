"""The recipes, or one of them in full."""

from __future__ import annotations

import argparse

from cmsf.cli.parser import Parser
from cmsf.recipes import BASELINES, OURS, SCALES, VARIANTS, explain, get_recipe, has_scale
from cmsf.utils.text import escape_unprintable

HELP = "the recipes, or one in full"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="a METHOD, METHOD-SCALE or METHOD+VARIANT-SCALE")


def execute(chosen: argparse.Namespace) -> int:
    if chosen.name is None:
        firsts = {method: explain(method).splitlines()[0] for method in (*OURS, *BASELINES)}
        _print("Constrained mean shift and its special cases:", {method: firsts[method] for method in OURS})
        _print("\nBaselines, in the same loop:", {method: firsts[method] for method in BASELINES})
        scales = {scale: (make.__doc__ or "").splitlines()[0] for scale, make in SCALES.items()}
        picks = "a bare METHOD picks adapt with --init, else small or standard by the size of the images"
        _print(f"\nScales, as METHOD-SCALE; {picks}:", scales)
        variants = {name: variant.about for name, variant in VARIANTS.items()}
        _print("\nVariants, as METHOD+VARIANT or METHOD+VARIANT-SCALE, one or several:", variants)
        return 0
    if not has_scale(chosen.name):
        print(explain(chosen.name))
        print("\nIn full: " + ", ".join(f"cmsf recipes {chosen.name}-{scale}" for scale in SCALES))
        return 0
    recipe = get_recipe(chosen.name)
    for line in (*(f"# {line}".rstrip() for line in explain(chosen.name).splitlines()), *recipe.to_yaml().splitlines()):
        print(escape_unprintable(line))
    return 0


def _print(title: str, lines: dict[str, str]) -> None:
    print(title)
    for name, about in lines.items():
        print(f"  {name:16} {about}")
