"""Labels of training images that the images' neighbours, by the run's features, do not vote for; as a list, the
likeliest to be wrong first, and a picture of the first forty. To use it, look at them, put the right class into the
column label (a blank takes the label away), and make a list of all labels with cmsf labels SOURCE --corrections
suspects.csv --out labels.csv, for cmsf train --labels labels.csv."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cmsf.cli.parser import SOURCE_HELP, Parser, apply_machine_flags, print_line, print_paths
from cmsf.cli.weights import add_weights_flags, apply_weights
from cmsf.runs.requests import check_run
from cmsf.utils.files import check_out, report_write_errors
from cmsf.utils.numbers import check_number, parse_number

if TYPE_CHECKING:
    from cmsf.analysis.label_issues import Suspect
    from cmsf.runs.run import Run

HELP = "training images that are likely mislabelled"
_WORST, _PAIRS = 5, 5
_HEADER = ("path", "index", "label", "suggested", "score", "label_share", "suggested_share")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run folder")
    parser.add_options(
        {
            "--out CSV": "the list; the picture is beside it (default: suspects.csv)",
            "--data SOURCE": f"other images than the run's: {SOURCE_HELP}",
            "--labels LIST": "check the labels of this list instead of those that the run was trained with",
            "--least SCORE": "the lowest score that makes a suspect, from 0 to 1; at 0.5 another class has as much of "
            "the vote as the label, at 0.9 nine times as much (default: 0.9)",
        }
    )
    add_weights_flags(parser)
    parser.add_machine_flags()
    parser.set_defaults(out="suspects.csv")


def execute(chosen: argparse.Namespace) -> int:
    least = None if chosen.least is None else check_number("--least", parse_number(chosen.least), 0, 1, "as 0.9")
    out = check_out(chosen.out, ".csv")
    apply_weights(chosen)
    check_run(chosen.run)

    from cmsf.analysis.figures.label_issues import draw_suspects
    from cmsf.analysis.label_issues import THRESHOLD, compare_with_truth
    from cmsf.runs.run import Run

    threshold = THRESHOLD if least is None else least
    device, workers = apply_machine_flags(chosen)
    run = Run(chosen.run)
    with run.images_kept():
        labelled = run.suspects(chosen.data, chosen.labels, 0.0, device, workers)
        suspects = [suspect for suspect in labelled if suspect.score >= threshold]
        for line in _summary(labelled, suspects, threshold):
            print_line(line)
        hits = compare_with_truth(labelled, threshold)
        if hits is not None:
            print_line(
                f"by the truth, {hits.wrong:,} labels are wrong: precision {100 * hits.precision:.1f} % (share of the "
                f"suspects that are wrong), recall {100 * hits.recall:.1f} % (share of the wrong that are suspects)"
            )
        picture = out.with_suffix(".png")
        with report_write_errors(out, "give another --out"):
            _write(out, suspects)
            if suspects:
                draw_suspects(run.data(chosen.data, chosen.labels).train, suspects, picture)
    print_paths({"suspects": out} | ({"open": picture} if suspects else {}))
    if suspects:
        print_line(f"correct the column label, and make a list of it: {_next_command(chosen, run)}")
    return 0


def _next_command(chosen: argparse.Namespace, run: Run) -> str:
    """Returns the command that makes a list of the corrections of the labels that were checked."""
    data_config = run.folder.data_config()
    labels = chosen.labels or (None if chosen.data else data_config.labels)
    words = ["cmsf", "labels", str(chosen.data or data_config.data)]
    words += ["--labels", str(labels)] if labels else []
    return shlex.join([*words, "--corrections", chosen.out, "--out", "labels.csv"])


def _summary(labelled: Sequence[Suspect], suspects: Sequence[Suspect], threshold: float) -> list[str]:
    from cmsf.analysis.label_issues import most_confused

    lines = [
        f"{len(suspects):,} of {len(labelled):,} labels are suspect ({100 * len(suspects) / len(labelled):.3g} %), "
        f"with a score of {threshold:g} or above"
    ]
    lines += [
        f"  {suspect.score:.3f}  {suspect.path}: labelled {suspect.label!r}, looks like {suspect.suggested!r} "
        f"({100 * suspect.suggested_share:.0f} % of the vote against {100 * suspect.label_share:.0f} %)"
        for suspect in suspects[:_WORST]
    ]
    alone = sum(suspect.score == 0 for suspect in labelled)
    if alone:
        lines.append(f"{alone:,} cannot be scored: no other image has their label")
    pairs = most_confused(suspects)[:_PAIRS]
    if pairs:
        lines.append("most often:")
        lines += [f"  {count:7,}  {label!r} that looks like {suggested!r}" for label, suggested, count in pairs]
    return lines


def _write(out: Path, suspects: Sequence[Suspect]) -> None:
    from cmsf.data.sources.table import write_csv

    numbers = ("score", "label_share", "suggested_share")
    rows = [
        [f"{getattr(suspect, name):.6f}" if name in numbers else str(getattr(suspect, name)) for name in _HEADER]
        for suspect in suspects
    ]
    write_csv(out, _HEADER, rows)
