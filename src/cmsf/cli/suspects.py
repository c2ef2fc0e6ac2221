"""cmsf suspects"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cmsf.cli.parser import SOURCE_HELP, Parser, add_machine_flags, parse_workers, print_line, print_paths, set_threads
from cmsf.utils.errors import BadInput
from cmsf.utils.files import expand_user, report_write_errors
from cmsf.utils.numbers import check_number, parse_number

if TYPE_CHECKING:
    from cmsf.analysis.label_issues import Suspect
    from cmsf.runs.run import Run

_WORST, _PAIRS = 5, 5
_HEADER = ("path", "index", "label", "suggested", "score", "label_share", "suggested_share")


def add_parser(commands: Any) -> Parser:
    parser: Parser = commands.add_parser(
        "suspects",
        help="training images that are likely mislabelled",
        description="Labels of training images that the images' neighbours, by the run's features, do not vote for; as "
        "a list, the likeliest to be wrong first, and a picture of the first forty. To use it, look at them, put the "
        "right class into the column label (a blank takes the label away), and make a list of all labels with "
        "cmsf labels SOURCE --corrections suspects.csv --out labels.csv, for cmsf train --labels labels.csv.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument(
        "--out",
        metavar="CSV",
        default="suspects.csv",
        help="the list; the picture is beside it (default: suspects.csv)",
    )
    parser.add_argument("--data", metavar="SOURCE", help=f"other images than the run's: {SOURCE_HELP}")
    parser.add_argument(
        "--labels", metavar="LIST", help="check the labels of this list instead of those that the run was trained with"
    )
    parser.add_argument(
        "--least",
        metavar="SCORE",
        help="the lowest score that makes a suspect, from 0 to 1; at 0.5 another class has as much of the vote as the "
        "label, at 0.9 nine times as much (default: 0.9)",
    )
    add_machine_flags(parser)
    parser.set_defaults(command=_suspects)
    return parser


def _suspects(chosen: argparse.Namespace) -> int:
    asked = None if chosen.least is None else check_number("--least", parse_number(chosen.least), 0, 1, "as 0.9")
    out = _checked(expand_user(chosen.out))

    from cmsf.analysis.figures.label_issues import draw_suspects
    from cmsf.analysis.label_issues import LEAST, against_truth
    from cmsf.runs.run import Run

    least = LEAST if asked is None else asked
    set_threads(chosen.threads)
    run = Run(chosen.run)
    with run.images_kept():
        every = run.suspects(chosen.data, chosen.labels, 0.0, chosen.device, parse_workers(chosen.workers))
        found = [one for one in every if one.score >= least]
        for line in _summary(every, found, least):
            print_line(line)
        hits = against_truth(every, least)
        if hits is not None:
            print_line(
                f"by the truth, {hits.wrong:,} labels are wrong: precision {100 * hits.precision:.1f} % (of the "
                f"suspects, so many are wrong), recall {100 * hits.recall:.1f} % (of the wrong, so many are suspects)"
            )
        picture = out.with_suffix(".png")
        with report_write_errors(out, "give another --out"):
            _write(out, found)
            if found:
                draw_suspects(run.relabelled(chosen.data, chosen.labels).train, found, picture)
    print_paths({"suspects": out} | ({"open": picture} if found else {}))
    if found:
        print_line(f"correct the column label, and make a list of it: {_next(chosen, run)}")
    return 0


def _next(chosen: argparse.Namespace, run: Run) -> str:
    """The command that makes a list of the corrections, upon the labels that were checked."""
    given = run.folder.request()
    labels = chosen.labels or (None if chosen.data else given.labels)
    words = ["cmsf", "labels", str(chosen.data or given.data)]
    words += ["--labels", str(labels)] if labels else []
    return shlex.join([*words, "--corrections", chosen.out, "--out", "labels.csv"])


def _checked(out: Path) -> Path:
    """Refuse a file that cannot be written, before anything is computed for it."""
    if out.suffix.lower() != ".csv":
        raise BadInput(f"--out {out} will not do; suspects are written as .csv")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise BadInput(f"--out {out} will not do; it takes a file in a folder that is there")
    return out


def _summary(every: Sequence[Suspect], found: Sequence[Suspect], least: float) -> list[str]:
    from cmsf.analysis.label_issues import confused

    lines = [
        f"{len(found):,} of {len(every):,} labels are suspect ({100 * len(found) / len(every):.3g} %), with a score of "
        f"{least:g} or above"
    ]
    lines += [
        f"  {one.score:.3f}  {one.path}: labelled {one.label!r}, looks like {one.suggested!r} "
        f"({100 * one.suggested_share:.0f} % of the vote against {100 * one.label_share:.0f} %)"
        for one in found[:_WORST]
    ]
    alone = sum(one.score == 0 for one in every)
    if alone:
        lines.append(f"{alone:,} cannot be judged: no other image has their label")
    pairs = confused(found)[:_PAIRS]
    if pairs:
        lines.append("most often:")
        lines += [f"  {count:7,}  {label!r} that looks like {suggested!r}" for label, suggested, count in pairs]
    return lines


def _write(out: Path, found: Sequence[Suspect]) -> None:
    from cmsf.data.sources.table import write_csv

    numbers = ("score", "label_share", "suggested_share")
    rows = [
        [f"{getattr(one, name):.6f}" if name in numbers else str(getattr(one, name)) for name in _HEADER]
        for one in found
    ]
    write_csv(out, _HEADER, rows)
