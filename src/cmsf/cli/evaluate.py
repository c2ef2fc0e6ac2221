"""Accuracy on frozen features. knn: the paper's majority vote, k = 1 and 20, and a weighted vote. linear: a linear
layer, fitted to convergence on clean views. linear-sgd: the paper's, 40 epochs of SGD on random views, and the same on
clean ones. few-labels: a linear layer and the whole network fine-tuned, with 1 % and 10 % of the labels. transfer: a
linear layer on other data sets, its settings searched for. retrieval: R@1, 5 and 10. classifier: the one that a run of
xent or fixmatch, or a fine-tuned one, has."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cmsf.cli.comparison import Comparison
from cmsf.cli.parser import Parser, apply_machine_flags, parse_int, print_paths
from cmsf.cli.weights import add_weights_flags, apply_weights
from cmsf.runs.requests import METRICS, check_metric, check_run
from cmsf.utils.errors import BadInput
from cmsf.utils.files import expand_user
from cmsf.utils.text import one_line

HELP = "how good the features of runs are"
_MOST_TRIALS = 10**6


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="*", help="run folders")
    parser.add_argument(
        "--with",
        dest="metrics",
        metavar="METRIC",
        nargs="+",
        default=["knn"],
        help=f"{', '.join(METRICS)} (default: knn)",
    )
    parser.add_argument("--data", metavar="SOURCE", help="other images than the run's own")
    parser.add_argument("--references", action="store_true", help="also raw pixels and the network before training")
    parser.add_argument(
        "--few", metavar="LIST", nargs="+", help="few-labels: lists of path and label instead of seeded shares"
    )
    parser.add_options(
        {
            "--suite FILE": "transfer: a YAML of data sets, a line each, as birds: photos/birds (default: those of the "
            "paper's ten that torchvision's folder has)",
            "--trials N": "transfer: settings to try a data set (default: 200)",
            "--storage URL": "transfer: Optuna's storage, which several machines may share (default: a journal in the "
            "run folder)",
            "--ray": "transfer: search with Ray Tune (extra [ray])",
        }
    )
    parser.add_argument("--format", choices=("table", "markdown", "latex"), default="table", help="of what is printed")
    add_weights_flags(parser)
    parser.add_machine_flags()


def execute(chosen: argparse.Namespace) -> int:
    # `--with knn linear RUN` reads as well as `RUN --with knn linear`, and leaves the run among the metrics.
    metrics = [name for name in chosen.metrics if name in METRICS or not expand_user(name).is_dir()]
    chosen.runs += [name for name in chosen.metrics if name not in metrics]
    for metric in metrics:
        check_metric(
            metric, chosen.data if chosen.init is None else None
        )  # a mistake is refused before anything is computed
    for metric, flags in (("few-labels", ("few",)), ("transfer", ("suite", "storage", "ray", "trials"))):
        misplaced = [flag for flag in flags if getattr(chosen, flag)]
        if misplaced and metric not in metrics:
            raise BadInput(f"--{misplaced[0]} is for {metric}, which is not asked for; add it: --with {metric}")
    trials = parse_int("--trials", chosen.trials, 1, _MOST_TRIALS, "the paper has 200")
    apply_weights(chosen)
    for path in chosen.runs:
        check_run(path)

    from cmsf.evaluation.transfer import TRIALS
    from cmsf.runs.run import Run

    options: dict[str, dict[str, Any]] = {
        "few-labels": {"lists": chosen.few or ()},
        "transfer": {
            "suite": chosen.suite,
            "trials": trials or TRIALS,
            "storage": chosen.storage,
            "ray": chosen.ray,
        },
    }
    runs = [Run(path) for path in chosen.runs]
    machine = (chosen.data, *apply_machine_flags(chosen))
    comparison, test_splits = Comparison(), set()
    failed: dict[str, BadInput] = {}
    for number, run in enumerate(runs):
        alone = "trained encoder" if run.recipe.epochs else "starting weights"
        label = alone if len(runs) == 1 and chosen.format == "table" else str(run.path)
        try:
            with run.images_kept():
                for metric in metrics:
                    extra = options.get(metric, {})
                    if chosen.references and number == 0:
                        for name, record in run.reference_evaluations(metric, *machine, **extra).items():
                            comparison.add(name, record["measures"])
                    record = run.evaluation(metric, *machine, **extra)
                    comparison.add(label, record["measures"])
                    test_splits.add(record["protocol"].get("test split"))
        except BadInput as error:  # of one run; the others are still to be compared
            failed[label] = error
            comparison.add(label, {})
    if len(failed) == len(runs) and not any(comparison.rows.values()):
        raise next(iter(failed.values()))
    comparison.caption(test_splits.pop() if len(test_splits) == 1 and None not in test_splits else "the test images")
    comparison.show(chosen.format)
    for run in runs if chosen.format == "table" and not failed else ():
        files = {
            f"{metric} protocol": run.result_file(metric, chosen.data, **options.get(metric, {})) for metric in metrics
        }
        print_paths(files | ({"open": run.folder.neighbours_picture} if "knn" in metrics else {}))
    if len(failed) > 1:
        for label, failure in failed.items():
            print(one_line(f"{label}: {failure}"), file=sys.stderr)
        raise BadInput(f"{len(failed)} of {len(runs)} runs could not be evaluated; see above")
    for label, failure in failed.items():
        raise BadInput(f"{label}: {failure}" if len(runs) > 1 else str(failure))
    return 0
