"""cmsf train"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from typing import Any

from cmsf.cli.parser import SOURCE, Parser, add_machine_flags, say_paths, set_threads, workers
from cmsf.recipe import Recipe, parse, placeholder
from cmsf.recipes import METHODS, SCALES, check_name


def add_parser(commands: Any) -> Parser:
    parser: Parser = commands.add_parser(
        "train",
        usage="cmsf train RECIPE [--data SOURCE] [--out RUN] [--epochs N] [any setting below]",
        help="learn from images; the same command again resumes",
        description="Learn from images. The same command again goes on where the run was stopped.",
    )
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help=f"{', '.join(METHODS)}, each alone or with -{', -'.join(SCALES)}, and before that with variants, as "
        "cmsf-sup+noise-50-small (cmsf recipes lists them); or a saved recipe.yaml",
    )
    parser.add_argument(
        "--data",
        metavar="SOURCE",
        help=f"{SOURCE}; without it, the embedded sample",
    )
    parser.add_argument(
        "--labels",
        metavar="LIST",
        help="a list of path (or index) and label that replaces the training labels; the source's own are then used "
        "for purity and evaluation alone",
    )
    parser.add_argument("--val", metavar="SOURCE", help="images to test on (default: a split of the data, or a tenth)")
    parser.add_argument("--out", metavar="RUN", help="the run folder (default: runs/ and the recipe's or file's name)")
    add_machine_flags(parser)
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")
    settings = parser.add_argument_group("settings, where not as in the recipe (cmsf recipes NAME shows it)")
    for field in fields(Recipe):
        if field.name != "name":
            switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.type == "bool" else {}
            settings.add_argument(
                f"--{field.name.replace('_', '-')}",
                metavar=placeholder(field.name),
                default=argparse.SUPPRESS,
                help=field.metadata["help"],
                **switch,
            )
    parser.set_defaults(command=_train)
    return parser


def _train(chosen: argparse.Namespace) -> int:
    settings = {f.name for f in fields(Recipe)} - {"name"}
    changes = {name: parse(name, text) for name, text in vars(chosen).items() if name in settings}
    Recipe().changed(changes)  # a value of the wrong kind is refused before torch is even loaded
    check_name(chosen.recipe)

    from cmsf.api import train
    from cmsf.training import Stopped

    set_threads(chosen.threads)
    try:
        run = train(
            chosen.recipe,
            chosen.data,
            chosen.out,
            labels=chosen.labels,
            val=chosen.val,
            device=chosen.device,
            workers=workers(chosen.workers),
            quiet=chosen.quiet,
            **changes,
        )
    except Stopped as stopped:
        print(f"cmsf: stopped by {stopped} after a checkpoint; the same command goes on from there", file=sys.stderr)
        return 128 + stopped.signal_number
    if not chosen.quiet:
        say_paths({"neighbours": run.folder.neighbours_picture, "weights": run.folder.backbone_file, "run": run.path})
    return 0
