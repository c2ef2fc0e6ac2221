"""The command line. torch is imported only by the commands that compute, so that help and mistakes answer at once."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cmsf import __version__
from cmsf.errors import BadInput, did_you_mean
from cmsf.recipe import Recipe, parse, placeholder
from cmsf.recipes import METHODS, NAMES, SCALES, check_name, explain, named


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except BadInput as error:
        print(f"cmsf: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cmsf: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


class _Parser(argparse.ArgumentParser):
    """Mistakes are BadInput like any other, with the nearest name where there is one."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, **keywords)

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; see {self.prog} --help")

    def options(self) -> list[str]:
        return list(self._option_string_actions)


def _run(arguments: list[str]) -> int:
    parser = _Parser(prog="cmsf", description="Representation learning by constrained mean shift.")
    parser.add_argument("--version", action="version", version=f"cmsf {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    subparsers = {
        "train": _train_parser(commands),
        "evaluate": _evaluate_parser(commands),
        "recipes": _recipes_parser(commands),
    }
    if not arguments:
        parser.print_help()
        return 0
    if not arguments[0].startswith("-") and arguments[0] not in subparsers:
        hint = did_you_mean(arguments[0], subparsers, f"use one of {', '.join(subparsers)}")
        raise BadInput(f"no command is called {arguments[0]!r}; {hint}")
    chosen, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = subparsers.get(arguments[0], parser)
        flag = unknown[0].split("=")[0]
        raise BadInput(f"{known.prog} has no {flag}; {did_you_mean(flag, known.options(), f'see {known.prog} --help')}")
    command: Callable[[argparse.Namespace], int] = chosen.command
    return command(chosen)


def _train_parser(commands: Any) -> _Parser:
    parser: _Parser = commands.add_parser(
        "train",
        usage="cmsf train RECIPE [--data SOURCE] [--out RUN] [--epochs N] [any setting below]",
        help="learn from images; the same command again resumes",
        description="Learn from images. The same command again goes on where the run was stopped.",
    )
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help=f"{', '.join(METHODS)}, each alone or with -{', -'.join(SCALES)}; or a saved recipe.yaml",
    )
    parser.add_argument(
        "--data",
        metavar="SOURCE",
        help="a folder of images (class folders or flat) or an .npz; without it, the embedded sample",
    )
    parser.add_argument("--out", metavar="RUN", help="the run folder (default: runs/ and the recipe's name)")
    _add_machine_flags(parser)
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")
    settings = parser.add_argument_group("settings, where not as in the recipe (cmsf recipes NAME shows it)")
    for field in fields(Recipe):
        if field.name != "name":
            settings.add_argument(
                f"--{field.name.replace('_', '-')}",
                metavar=placeholder(field.name),
                default=argparse.SUPPRESS,
                help=field.metadata["help"],
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

    _set_threads(chosen.threads)
    try:
        run = train(chosen.recipe, chosen.data, chosen.out, device=chosen.device, quiet=chosen.quiet, **changes)
    except Stopped as stopped:
        print(f"cmsf: stopped by {stopped} after a checkpoint; the same command goes on from there", file=sys.stderr)
        return 128 + stopped.signal_number
    if not chosen.quiet:
        _say_paths({"neighbours": run.folder.neighbours_picture, "weights": run.folder.backbone_file, "run": run.path})
    return 0


def _evaluate_parser(commands: Any) -> _Parser:
    parser: _Parser = commands.add_parser(
        "evaluate",
        help="how good the features of runs are",
        description="k-NN accuracy on frozen features: the paper's majority vote, k = 1 and 20, and a weighted vote.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    parser.add_argument("--data", metavar="SOURCE", help="other images than the run's own")
    parser.add_argument("--references", action="store_true", help="also raw pixels and the network before training")
    _add_machine_flags(parser)
    parser.set_defaults(command=_evaluate)
    return parser


def _evaluate(chosen: argparse.Namespace) -> int:
    from cmsf.api import Run

    _set_threads(chosen.threads)
    console = Console(highlight=False)
    runs = [Run(path) for path in chosen.runs]
    rows: dict[str, dict[str, float]] = {}
    with Console(stderr=True).status("evaluating"):
        if chosen.references:
            rows |= runs[0].references(chosen.data, chosen.device)
        for run in runs:
            label = "trained encoder" if len(runs) == 1 else str(run.path)
            rows[label] = run.evaluate("knn", chosen.data, chosen.device)
    columns = list(next(iter(rows.values())))
    judged = {run.test_images(chosen.data) for run in runs}
    counted = f"{judged.pop()} test images" if len(judged) == 1 else "the test images"
    table = Table(title=f"accuracy on {counted}, %", title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column.replace("-nn", "-NN"), justify="right")
    for name, accuracy in rows.items():
        table.add_row(escape(name), *(f"{accuracy[column]:.2f}" for column in columns))
    console.print(table)
    for run in runs:
        _say_paths({"protocol": run.result_file(chosen.data), "open": run.folder.neighbours_picture})
    return 0


def _recipes_parser(commands: Any) -> _Parser:
    parser: _Parser = commands.add_parser(
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


def _add_machine_flags(parser: _Parser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps")
    parser.add_argument("--threads", metavar="N", help="CPU threads (default: all cores this process may use)")


def _set_threads(text: str | None) -> None:
    import torch

    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if text is not None and (not text.isdecimal() or not 1 <= int(text) <= 1024):
        raise BadInput(f"--threads {text} will not do; it takes a whole number to 1024, here at best {available}")
    torch.set_num_threads(int(text) if text else available)


def _say_paths(paths: dict[str, Any]) -> None:
    width = max(map(len, paths))
    for name, path in paths.items():
        print(f"{name:{width}}  {path}")
