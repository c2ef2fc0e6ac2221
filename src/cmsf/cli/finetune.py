"""Train the network of a run and a head on the labelled images. The result is a run folder with a classifier in it, for
cmsf predict, and for all that takes a run."""

from __future__ import annotations

import argparse
import signal
import sys

from cmsf.cli.parser import SOURCE_HELP, Parser, apply_machine_flags, parse_int, print_paths
from cmsf.cli.weights import add_weights_flags, apply_weights
from cmsf.recipes.recipe import Recipe, parse_value
from cmsf.runs.requests import check_run

HELP = "make a classifier of a run with labelled images"
_MOST_ROUNDS = 100
_NUMBERS = ("epochs", "lr", "seed")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run folder")
    parser.add_options(
        {
            "--labels LIST": "a list of path (or index) and label, instead of the labels that the run's images have",
            "--data SOURCE": f"other images than the run's: {SOURCE_HELP}",
            "--out CLASSIFIER": "the folder to make (default: the run's, and -classifier)",
            "--rounds N": "with 2, a second round learns from unlabelled images too, those that the first was "
            "confident of (0.9 and above); more likewise (default: 1)",
        }
    )
    parser.add_argument(
        "--tune",
        choices=("auto", "whole", "head", "linear"),
        default="auto",
        help="what learns: the whole network and a two-layer head, that head alone, or a linear layer alone, fitted to "
        "convergence; auto (the default) is the best in cross-validation on the labels",
    )
    parser.add_options(
        {
            "--random-weights": "start from random weights instead of the run's, to compare",
            "--epochs N": "of each round of whole and head, exactly (default: 20, and more where images are few)",
            "--lr X": "learning rate of whole and head (default: 0.005)",
            "--seed N": "decides head, order and views (default: the run's)",
        }
    )
    add_weights_flags(parser)
    parser.add_machine_flags()
    parser.add_options({"--quiet": "say nothing but errors"})


def execute(chosen: argparse.Namespace) -> int:
    numbers = {name: parse_value(name, getattr(chosen, name)) for name in _NUMBERS if getattr(chosen, name) is not None}
    Recipe().changed(numbers)  # a value of the wrong kind is refused before torch is even loaded
    rounds = parse_int("--rounds", chosen.rounds, 1, _MOST_ROUNDS, "the paper's are 1 and 2")
    apply_weights(chosen)
    check_run(chosen.run)

    from cmsf.api import finetune

    device, workers = apply_machine_flags(chosen)
    passed = {name: getattr(chosen, name) for name in ("labels", "data", "out", "tune", "random_weights", "quiet")}
    try:
        classifier = finetune(chosen.run, rounds=rounds or 1, device=device, workers=workers, **passed, **numbers)
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
