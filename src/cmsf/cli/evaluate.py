"""cmsf evaluate"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cmsf.cli.parser import Parser, add_machine_flags, say_paths, set_threads, workers


def add_parser(commands: Any) -> Parser:
    parser: Parser = commands.add_parser(
        "evaluate",
        help="how good the features of runs are",
        description="Accuracy on frozen features. knn: the paper's majority vote, k = 1 and 20, and a weighted vote. "
        "linear: a linear layer, fitted to convergence on clean views. retrieval: R@1, 5 and 10.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    parser.add_argument(
        "--with",
        dest="metrics",
        metavar="METRIC",
        nargs="+",
        default=["knn"],
        help="knn, linear, retrieval (default: knn)",
    )
    parser.add_argument("--data", metavar="SOURCE", help="other images than the run's own")
    parser.add_argument("--references", action="store_true", help="also raw pixels and the network before training")
    add_machine_flags(parser)
    parser.set_defaults(command=_evaluate)
    return parser


def _evaluate(chosen: argparse.Namespace) -> int:
    from cmsf.api import Run, evaluation

    for metric in chosen.metrics:
        evaluation(metric)  # a mistake is refused before anything is computed
    set_threads(chosen.threads)
    console = Console(highlight=False)
    runs = [Run(path) for path in chosen.runs]
    rows: dict[str, dict[str, Any]] = {}
    machine = (chosen.data, chosen.device, workers(chosen.workers))
    with Console(stderr=True).status("evaluating"):
        for metric in chosen.metrics:
            for name in runs[0].references(metric, *machine) if chosen.references else ():
                rows.setdefault(name, {}).update(runs[0].result(metric, chosen.data, name)["measures"])
            for run in runs:
                label = "trained encoder" if len(runs) == 1 else str(run.path)
                run.evaluate(metric, *machine)
                rows.setdefault(label, {}).update(run.result(metric, chosen.data)["measures"])
    columns = list(dict.fromkeys(column for measures in rows.values() for column in measures))
    judged = {run.result(chosen.metrics[0], chosen.data)["protocol"]["test images"] for run in runs}
    counted = f"{judged.pop()} test images" if len(judged) == 1 else "the test images"
    table = Table(title=f"accuracy on {counted}, %, ± half of its 95 % interval", title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column.replace("-nn", "-NN"), justify="right")
    for name, measures in rows.items():
        table.add_row(escape(name), *(_cell(measures.get(column)) for column in columns))
    console.print(table)
    for run in runs:
        files = {f"{metric} protocol": run.result_file(metric, chosen.data) for metric in chosen.metrics}
        say_paths(files | {"open": run.folder.neighbours_picture})
    return 0


def _cell(measures: dict[str, dict[str, float]] | None) -> str:
    if measures is None:
        return "–"
    share = measures["accuracy"]
    return f"{share['value']:.2f} ± {(share['high'] - share['low']) / 2:.1f}"
