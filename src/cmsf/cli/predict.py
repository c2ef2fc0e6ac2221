"""For every image of a source its likeliest classes, five at most, each with its probability; for one that cannot be
read, why. The file also serves as a list for --labels."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cmsf.cli.parser import SOURCE_HELP, Parser, apply_machine_flags, largest_classes, print_line, print_paths
from cmsf.runs.requests import check_run

if TYPE_CHECKING:
    from cmsf.evaluation.predict import Prediction

HELP = "what a classifier sees on images"


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "classifier", metavar="CLASSIFIER", help="a folder that cmsf finetune wrote, or a run of xent or fixmatch"
    )
    parser.add_argument("--data", metavar="SOURCE", required=True, help=SOURCE_HELP)
    parser.add_argument(
        "--out", metavar="FILE", default="predictions.csv", help="a .csv or .parquet (default: predictions.csv)"
    )
    parser.add_machine_flags()


def execute(chosen: argparse.Namespace) -> int:
    check_run(chosen.classifier)

    from cmsf.runs.classifier import Classifier

    device, workers = apply_machine_flags(chosen)
    classifier = Classifier(chosen.classifier)
    predictions = classifier.predict(chosen.data, chosen.out, device, workers)
    for line in _summary(predictions):
        print_line(line)
    print_paths({"predictions": chosen.out})
    return 0


def _summary(predictions: Sequence[Prediction]) -> list[str]:
    sure = [prediction.confidence for prediction in predictions if prediction.confidence is not None]
    broken = [prediction for prediction in predictions if prediction.error is not None]
    lines = [f"{len(predictions):,} images" + (f", mean confidence {sum(sure) / len(sure):.3f}" if sure else "")]
    counts = Counter(prediction.label for prediction in predictions if prediction.label is not None)
    lines += largest_classes(counts)
    if broken:
        lines.append(f"{len(broken):,} cannot be read (the first is {broken[0].path}: {broken[0].error})")
    return lines
