"""cmsf predict"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cmsf.cli.parser import SOURCE_HELP, Parser, add_machine_flags, parse_workers, print_line, print_paths, set_threads

if TYPE_CHECKING:
    from cmsf.evaluation.predict import Prediction

_CLASSES_SHOWN = 10


def add_parser(commands: Any) -> Parser:
    parser: Parser = commands.add_parser(
        "predict",
        help="what a classifier sees on images",
        description="For every image of a source its likeliest classes, five at most, each with its probability; for "
        "one that cannot be read, why. The file also serves as a list for --labels.",
    )
    parser.add_argument(
        "classifier", metavar="CLASSIFIER", help="a folder that cmsf finetune wrote, or a run of xent or fixmatch"
    )
    parser.add_argument("--data", metavar="SOURCE", required=True, help=SOURCE_HELP)
    parser.add_argument(
        "--out", metavar="FILE", default="predictions.csv", help="a .csv or .parquet (default: predictions.csv)"
    )
    add_machine_flags(parser)
    parser.set_defaults(command=_predict)
    return parser


def _predict(chosen: argparse.Namespace) -> int:
    from cmsf.runs.classifier import Classifier

    set_threads(chosen.threads)
    classifier = Classifier(chosen.classifier)
    found = classifier.predict(chosen.data, chosen.out, chosen.device, parse_workers(chosen.workers))
    for line in _summary(found):
        print_line(line)
    print_paths({"predictions": chosen.out})
    return 0


def _summary(found: Sequence[Prediction]) -> list[str]:
    sure = [one.confidence for one in found if one.confidence is not None]
    broken = [one for one in found if one.error is not None]
    lines = [f"{len(found):,} images" + (f", mean confidence {sum(sure) / len(sure):.3f}" if sure else "")]
    counts = Counter(one.label for one in found if one.label is not None)
    largest = counts.most_common(_CLASSES_SHOWN)
    lines += [f"  {count:7,}  {name}" for name, count in largest]
    if len(counts) > len(largest):
        lines.append(f"           … and {len(counts) - len(largest)} classes more")
    if broken:
        lines.append(f"{len(broken):,} cannot be read (the first is {broken[0].path}: {broken[0].error})")
    return lines
