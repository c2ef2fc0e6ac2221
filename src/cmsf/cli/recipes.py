"""cmsf recipes"""

from __future__ import annotations

import argparse
from typing import Any

from cmsf.cli.parser import Parser
from cmsf.recipes import METHODS, NAMES, SCALES, explain, named


def add_parser(commands: Any) -> Parser:
    parser: Parser = commands.add_parser(
        "recipes", help="the recipes, or one in full", description="The recipes, or one of them in full."
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="a METHOD or METHOD-SCALE")
    parser.set_defaults(command=_recipes)
    return parser


def _recipes(chosen: argparse.Namespace) -> int:
    if chosen.name is None:
        width = max(map(len, METHODS))
        for method in METHODS:
            print(f"{method:{width}}  {explain(method).splitlines()[0]}")
        print("\nScales, as METHOD-SCALE; a bare METHOD picks small or standard by the size of the images:")
        for scale, make in SCALES.items():
            print(f"{scale:{width}}  {(make.__doc__ or '').splitlines()[0]}")
        return 0
    if chosen.name in METHODS:
        print(explain(chosen.name))
        print(
            "\nIn full: "
            + ", ".join(f"cmsf recipes {name}" for name in NAMES if name.rpartition("-")[0] == chosen.name)
        )
        return 0
    recipe = named(chosen.name)
    print("\n".join(f"# {line}".rstrip() for line in explain(chosen.name).splitlines()))
    print(recipe.to_yaml(), end="")
    return 0
