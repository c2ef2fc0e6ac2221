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
        description="k-NN accuracy on frozen features: the paper's majority vote, k = 1 and 20, and a weighted vote.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    parser.add_argument("--data", metavar="SOURCE", help="other images than the run's own")
    parser.add_argument("--references", action="store_true", help="also raw pixels and the network before training")
    add_machine_flags(parser)
    parser.set_defaults(command=_evaluate)
    return parser


def _evaluate(chosen: argparse.Namespace) -> int:
    from cmsf.api import Run

    set_threads(chosen.threads)
    console = Console(highlight=False)
    runs = [Run(path) for path in chosen.runs]
    rows: dict[str, dict[str, float]] = {}
    with Console(stderr=True).status("evaluating"):
        if chosen.references:
            rows |= runs[0].references(chosen.data, chosen.device, workers(chosen.workers))
        for run in runs:
            label = "trained encoder" if len(runs) == 1 else str(run.path)
            rows[label] = run.evaluate("knn", chosen.data, chosen.device, workers(chosen.workers))
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
        say_paths({"protocol": run.result_file(chosen.data), "open": run.folder.neighbours_picture})
    return 0
