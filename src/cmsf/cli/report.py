"""Write one self-contained page of a run, or of several side by side with their accuracy against compute: summary,
curves, purity and ranks, neighbours to click through, a map of the images, classes, suspect labels, evaluations,
compute, recipe and environment. Each plot is also written as PNG and SVG, in a folder beside the page."""

from __future__ import annotations

import argparse

from cmsf.cli.parser import Parser, apply_machine_flags, print_paths
from cmsf.cli.weights import add_weights_flags, apply_weights
from cmsf.runs.requests import check_run
from cmsf.utils.errors import BadInput
from cmsf.utils.files import check_out

HELP = "one HTML page that shows what a run has learned"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="*", help="folders that cmsf train wrote")
    parser.add_argument("--out", metavar="HTML", help="the page (default: report.html in the first run's folder)")
    parser.add_options({"--data SOURCE": "with --init: its images"})
    add_weights_flags(parser)
    parser.add_machine_flags()


def execute(chosen: argparse.Namespace) -> int:
    if chosen.data is not None and chosen.init is None:
        raise BadInput(f"a run has its own images; leave --data {chosen.data} out, or add --init")
    apply_weights(chosen)
    for path in chosen.runs:
        check_run(path)
    device, workers = apply_machine_flags(chosen)
    from cmsf.report.write import write_report
    from cmsf.runs.run import Run
    from cmsf.utils.screen import Screen

    runs = list({run.path.resolve(): run for run in map(Run, chosen.runs)}.values())
    out = check_out(chosen.out or runs[0].folder.report_file, ".html", ".htm")
    plots = write_report(runs, out, device, workers, Screen().print)
    print_paths({"report": out, "plots": plots})
    return 0
