"""Learn from images. The same command again resumes a run that was stopped; so does --resume RUN, which needs nothing
but the run's folder."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, fields
from typing import Any, get_args

from cmsf.cli.parser import SOURCE_HELP, Parser, apply_machine_flags, print_paths
from cmsf.recipes import METHODS, SCALES, check_recipe_name
from cmsf.recipes.recipe import AMERICAN, Recipe, metavar, parse_value
from cmsf.runs.requests import check_run
from cmsf.training.options import OnCollapse, OnFullDisk, TrainingOptions
from cmsf.utils.errors import BadInput
from cmsf.utils.files import expand_user
from cmsf.utils.numbers import parse_number

USAGE = "cmsf train RECIPE [--data SOURCE] [--out RUN] [--epochs N] [any flag below]\n       cmsf train --resume RUN"
_OTHER_WORK = 0.7
"""Cores that are busy before training begins."""
HELP = "learn from images; the same command again resumes"
COMMON = {
    "images": ("data", "labels", "val", "size"),
    "network": ("backbone", "init"),
    "training": ("epochs", "batch-size", "lr", "seed"),
    "machine": ("device", "threads", "workers"),
    "run": ("out", "resume", "report", "quiet"),
}
"""The flags that --help shows, by the title they stand under. All others come with --help-all."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help=f"{', '.join(METHODS)}, each alone or with -{', -'.join(SCALES)}, and before that with variants, as "
        "cmsf-sup+noise-50-small (cmsf recipes lists them); or a saved recipe.yaml",
    )
    parser.group_flags(COMMON, "all others; settings where not as in the recipe (cmsf recipes NAME shows it)")
    parser.add_options(
        {
            "--data SOURCE": f"{SOURCE_HELP}; without it, the embedded sample",
            "--labels LIST": "a list of path (or index) and label that replaces the training labels; the source's own "
            "are then used for purity and evaluation alone",
            "--val SOURCE": "images to test on (default: a split of the data, or a tenth)",
            "--out RUN": "the run folder (default: runs/ and the recipe's or file's name)",
            "--resume RUN": "resume a run that was stopped: recipe, data, threads and bank sharding are read from its "
            "folder; give the other flags again",
        }
    )
    parser.add_machine_flags()
    defaults = TrainingOptions()
    parser.add_options(
        {
            "--checkpoint-minutes X": "the longest time without a checkpoint, in the middle of an epoch too (default: "
            f"{defaults.checkpoint_minutes}; 0: at the ends of epochs alone)",
            f"--on-full-disk {'|'.join(get_args(OnFullDisk))}": "stop where there is no room for a checkpoint or the "
            "log, the last checkpoint kept (default), or go on and try again at the next",
            f"--on-collapse {'|'.join(get_args(OnCollapse))}": "say so once when the embeddings of all images become "
            "the same (default), or stop after a checkpoint",
            "--bank-sharded": "with several processes, each holds and searches its share of the bank: the same result "
            "(in fp32 but for the order of summation), and memory and time of the search divided",
            "--report": "keep report.html in the run folder up to date, to be left open in a browser; at the end it "
            "is whole",
            "--quiet": "say nothing but errors",
        }
    )
    for field in fields(Recipe):
        if field.name != "name":
            switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.type == "bool" else {}
            names = (field.name, *(american for american, name in AMERICAN.items() if name == field.name))
            parser.add_argument(
                *(f"--{name.replace('_', '-')}" for name in names),
                metavar=metavar(field.name),
                default=argparse.SUPPRESS,
                help=field.metadata["help"],
                **switch,
            )
    parser.set_defaults(**asdict(defaults) | {"checkpoint_minutes": str(defaults.checkpoint_minutes)})


def execute(chosen: argparse.Namespace) -> int:
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

    chosen.threads = chosen.threads or _recorded_threads(chosen.resume)
    advice = _advise_threads(chosen)
    if advice:
        print(advice, file=sys.stderr)
    chosen.device, chosen.workers = apply_machine_flags(chosen)
    passed = ("labels", "val", "device", "workers", "quiet", "bank_sharded", "report")
    keywords = {name: getattr(chosen, name) for name in passed}
    keywords |= asdict(options) | changes
    try:
        if chosen.resume is not None:
            run = resume(chosen.resume, chosen.data, **keywords)
        else:
            run = train(chosen.recipe, chosen.data, chosen.out, **keywords)
    except Stopped as stopped:
        state = "after a checkpoint" if stopped.saved else "without a new checkpoint"
        print(f"cmsf: stopped by {stopped} {state}; the same command resumes from there", file=sys.stderr)
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
    check_run(chosen.resume)


def _advise_threads(chosen: argparse.Namespace) -> str:
    """Returns what to do beside other work: a thread that shares its core keeps all others waiting.

    It is advice and no default: another number of threads has other last bits, and a run must not depend on the load.
    """
    import torch

    from cmsf.data import available_cores
    from cmsf.utils.distributed import World

    given = chosen.threads is not None or "OMP_NUM_THREADS" in os.environ or not World.from_env().alone
    on_cpu = chosen.device == "cpu" or (chosen.device == "auto" and not torch.cuda.is_available())
    if given or chosen.quiet or not on_cpu or not hasattr(os, "getloadavg"):
        return ""
    cores, load = available_cores(), os.getloadavg()[0]
    free = max(1, round(cores - load))
    if load < _OTHER_WORK or free >= cores:
        return ""
    return (
        f"the load of the last minute is {load:.1f} on {cores} cores; if other work goes on, --threads {free} may be "
        "faster"
    )


def _recorded_threads(run: str | None) -> str | None:
    """Returns as many as the run had, if there are so many here: with others it would differ in the last bits."""
    if run is None:
        return None
    from cmsf.data import available_cores
    from cmsf.runs.folder import RunFolder

    threads = RunFolder(expand_user(run)).environment().get("threads")
    return str(threads) if type(threads) is int and 1 <= threads <= available_cores() else None
