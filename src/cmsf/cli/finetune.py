"""cmsf finetune"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

from cmsf.cli.parser import SOURCE_HELP, Parser, add_machine_flags, parse_int, parse_workers, print_paths, set_threads
from cmsf.recipes.recipe import Recipe, parse_value

_MOST_ROUNDS = 100
_NUMBERS = ("epochs", "lr", "seed")


def add_parser(commands: Any) -> Parser:
    parser: Parser = commands.add_parser(
        "finetune",
        help="make a classifier of a run with labelled images",
        description="Train the network of a run and a head on the labelled images. The result is a run folder with a "
        "classifier in it, for cmsf predict, and for all that takes a run.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument(
        "--labels",
        metavar="LIST",
        help="a list of path (or index) and label, instead of the labels that the run's images have",
    )
    parser.add_argument("--data", metavar="SOURCE", help=f"other images than the run's: {SOURCE_HELP}")
    parser.add_argument("--out", metavar="CLASSIFIER", help="the folder to make (default: the run's, and -classifier)")
    parser.add_argument(
        "--rounds",
        metavar="N",
        help="with 2, a second round learns from unlabelled images too, those that the first was confident of "
        "(0.9 and above); more likewise (default: 1)",
    )
    parser.add_argument(
        "--tune",
        choices=("whole", "head", "linear"),
        default="whole",
        help="what learns: the whole network and a two-layer head (the default), that head alone, or a linear layer "
        "alone, fitted to convergence",
    )
    parser.add_argument(
        "--random-weights", action="store_true", help="start from random weights instead of the run's, to compare"
    )
    parser.add_argument(
        "--epochs", metavar="N", help="of each round, exactly (default: 20, and more where images are few)"
    )
    parser.add_argument("--lr", metavar="X", help="learning rate (default: 0.005)")
    parser.add_argument("--seed", metavar="N", help="decides head, order and views (default: the run's)")
    add_machine_flags(parser)
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")
    parser.set_defaults(command=_finetune)
    return parser


def _finetune(chosen: argparse.Namespace) -> int:
    numbers = {name: parse_value(name, getattr(chosen, name)) for name in _NUMBERS if getattr(chosen, name) is not None}
    Recipe().changed(numbers)  # a value of the wrong kind is refused before torch is even loaded
    rounds = parse_int("--rounds", chosen.rounds, 1, _MOST_ROUNDS, "the paper's are 1 and 2")

    from cmsf.api import finetune

    set_threads(chosen.threads)
    try:
        classifier = finetune(
            chosen.run,
            chosen.labels,
            chosen.data,
            chosen.out,
            rounds=rounds or 1,
            tune=chosen.tune,
            random_weights=chosen.random_weights,
            device=chosen.device,
            workers=parse_workers(chosen.workers),
            quiet=chosen.quiet,
            **numbers,
        )
    except KeyboardInterrupt:
        print("cmsf: interrupted; nothing was written, and the same command starts again", file=sys.stderr)
        return 128 + signal.SIGINT
    if not chosen.quiet:
        folder = classifier.folder
        pictures = {"confusion": folder.confusion_picture, "calibration": folder.calibration_picture}
        files = {name: file for name, file in pictures.items() if file.exists()}
        if (result := classifier.test_result) is not None:
            measure, error = result["measures"]["classifier"]["accuracy"], result["calibration"]
            print(
                f"test accuracy {measure['value']:.2f} % ({measure['low']:.2f} to {measure['high']:.2f}), "
                f"calibration error {error['expected calibration error']:.1f} %"
            )
        print_paths(files | {"classifier": classifier.path})
    return 0
