"""cmsf train"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, fields
from typing import Any, get_args

from cmsf.cli.parser import SOURCE_HELP, Parser, add_machine_flags, parse_workers, print_paths, set_threads
from cmsf.recipes import METHODS, SCALES, check_recipe_name
from cmsf.recipes.recipe import AMERICAN, Recipe, metavar, parse_value
from cmsf.training.options import OnCollapse, OnFullDisk, TrainingOptions
from cmsf.utils.errors import BadInput
from cmsf.utils.files import expand_user
from cmsf.utils.numbers import parse_number


def add_parser(commands: Any) -> Parser:
    parser: Parser = commands.add_parser(
        "train",
        usage="cmsf train RECIPE [--data SOURCE] [--out RUN] [--epochs N] [any setting below]\n"
        "       cmsf train --resume RUN",
        help="learn from images; the same command again resumes",
        description="Learn from images. The same command again resumes a run that was stopped; so does "
        "--resume RUN, which needs nothing but the run's folder.",
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help=f"{', '.join(METHODS)}, each alone or with -{', -'.join(SCALES)}, and before that with variants, as "
        "cmsf-sup+noise-50-small (cmsf recipes lists them); or a saved recipe.yaml",
    )
    parser.add_argument(
        "--data",
        metavar="SOURCE",
        help=f"{SOURCE_HELP}; without it, the embedded sample",
    )
    parser.add_argument(
        "--labels",
        metavar="LIST",
        help="a list of path (or index) and label that replaces the training labels; the source's own are then used "
        "for purity and evaluation alone",
    )
    parser.add_argument("--val", metavar="SOURCE", help="images to test on (default: a split of the data, or a tenth)")
    parser.add_argument("--out", metavar="RUN", help="the run folder (default: runs/ and the recipe's or file's name)")
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="resume a run that was stopped: recipe, data, threads and bank sharding are read from its folder; give "
        "the other flags below again",
    )
    add_machine_flags(parser)
    parser.add_argument(
        "--checkpoint-minutes",
        metavar="X",
        default=str(TrainingOptions.checkpoint_minutes),
        help=f"the longest time without a checkpoint, in the middle of an epoch too (default: "
        f"{TrainingOptions.checkpoint_minutes}; 0: at the ends of epochs alone)",
    )
    parser.add_argument(
        "--on-full-disk",
        metavar="|".join(get_args(OnFullDisk)),
        default=TrainingOptions.on_full_disk,
        help="stop where there is no room for a checkpoint or the log, the last checkpoint kept (default), or go on "
        "and try again at the next",
    )
    parser.add_argument(
        "--on-collapse",
        metavar="|".join(get_args(OnCollapse)),
        default=TrainingOptions.on_collapse,
        help="say so once when the embeddings of all images become the same (default), or stop after a checkpoint",
    )
    parser.add_argument(
        "--bank-sharded",
        action="store_true",
        help="with several processes, each holds and searches its share of the bank: the same result (in fp32 but for "
        "the order of summation), and memory and time of the search divided",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="keep report.html in the run folder up to date, to be left open in a browser; at the end it is whole",
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")
    settings = parser.add_argument_group("settings, where not as in the recipe (cmsf recipes NAME shows it)")
    for field in fields(Recipe):
        if field.name != "name":
            switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.type == "bool" else {}
            names = (field.name, *(american for american, name in AMERICAN.items() if name == field.name))
            settings.add_argument(
                *(f"--{name.replace('_', '-')}" for name in names),
                metavar=metavar(field.name),
                default=argparse.SUPPRESS,
                help=field.metadata["help"],
                **switch,
            )
    parser.set_defaults(command=_train)
    return parser


def _train(chosen: argparse.Namespace) -> int:
    settings = {f.name for f in fields(Recipe)} - {"name"}
    changes = {name: parse_value(name, text) for name, text in vars(chosen).items() if name in settings}
    Recipe().changed(changes)  # a value of the wrong kind is refused before torch is even loaded
    minutes: Any = parse_number(chosen.checkpoint_minutes)
    options = TrainingOptions(minutes, chosen.on_full_disk, chosen.on_collapse)
    if chosen.resume is not None:
        _check_resumed(chosen)
    elif chosen.recipe is None:
        raise BadInput("cmsf train needs a RECIPE, or --resume RUN; cmsf recipes lists them, see cmsf train --help")
    else:
        check_recipe_name(chosen.recipe)

    from cmsf.api import resume, train
    from cmsf.training.signals import Stopped
    from cmsf.utils.distributed import ProcessLost, World

    set_threads(chosen.threads or _recorded_threads(chosen.resume))
    given = {
        "labels": chosen.labels,
        "val": chosen.val,
        "device": chosen.device,
        "workers": parse_workers(chosen.workers),
    }
    given |= {
        "quiet": chosen.quiet,
        "bank_sharded": chosen.bank_sharded,
        "report": chosen.report,
        **asdict(options),
        **changes,
    }
    try:
        if chosen.resume is not None:
            run = resume(chosen.resume, chosen.data, **given)
        else:
            run = train(chosen.recipe, chosen.data, chosen.out, **given)
    except Stopped as stopped:
        how = "after a checkpoint" if stopped.saved else "without a new checkpoint"
        print(f"cmsf: stopped by {stopped} {how}; the same command resumes from there", file=sys.stderr)
        return 128 + stopped.signal_number
    except ProcessLost as lost:
        print(f"cmsf: {lost}; the same command resumes from the last checkpoint", file=sys.stderr)
        return 1
    if not chosen.quiet and World.from_env().is_main:
        paths = {"neighbours": run.folder.neighbours_picture, "weights": run.folder.backbone_file, "run": run.path}
        print_paths(({"report": run.folder.report_file} if chosen.report else {}) | paths)
    return 0


def _check_resumed(chosen: argparse.Namespace) -> None:
    if chosen.recipe is not None:
        raise BadInput(f"--resume uses the recipe of {chosen.resume}; leave out {chosen.recipe}")
    if chosen.out is not None and expand_user(chosen.out).absolute() != expand_user(chosen.resume).absolute():
        raise BadInput(f"--resume continues {chosen.resume}; leave out --out {chosen.out}")


def _recorded_threads(run: str | None) -> str | None:
    """As many as the run had, if there are so many here: with others it would not be the same to the last bit."""
    if run is None:
        return None
    from cmsf.data import available_cores
    from cmsf.runs.folder import RunFolder

    folder = RunFolder(expand_user(run))
    folder.recipe()  # raises if it is not a run
    threads = folder.environment().get("threads")
    return str(threads) if type(threads) is int and 1 <= threads <= available_cores() else None
