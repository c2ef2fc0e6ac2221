"""Read every image of a source once, and say what is there: counts, classes, sizes, labels, what cannot be read, what
is there twice. Draws a contact sheet."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from cmsf.cli.parser import SOURCE_HELP, Parser, print_line, print_paths
from cmsf.utils.files import check_out, report_write_errors
from cmsf.utils.text import shorten

if TYPE_CHECKING:
    from cmsf.data import Source
    from cmsf.data.survey import Survey

HELP = "what is in a pile of images"
_CLASSES_SHOWN = 10
_SHOWN = 3
_LONGEST = 100


def add_arguments(parser: Parser) -> None:
    parser.add_argument("source", metavar="SOURCE", nargs="?", help=f"{SOURCE_HELP}; without it, the embedded sample")
    parser.add_argument("--out", metavar="PNG", help="the contact sheet (default: the source's name, in this folder)")


def execute(chosen: argparse.Namespace) -> int:
    from cmsf.analysis.figures.contact_sheet import draw_contact_sheet
    from cmsf.data import open_source
    from cmsf.data.survey import survey_source

    source = open_source(chosen.source)
    out = check_out(chosen.out or f"{source.name}-contact-sheet.png")
    survey = survey_source(source)
    for line in (*_counts(source), *_sizes(survey), *_faults(survey), *source.notes):
        print_line(line)
    if not survey.images:
        print("cmsf: none of the images can be read", file=sys.stderr)
        return 2
    with report_write_errors(out, "give another --out"):
        draw_contact_sheet(source, out)
    print_paths({"contact sheet": out})
    return 0


def _counts(source: Source) -> list[str]:
    lines = [f"{source.name}: {sum(map(len, source.splits.values())):,} images"]
    for name, split in source.ordered_splits():
        counts = Counter(name for name in split.names if name is not None)
        labelled = sum(counts.values())
        line = f"  {name:5}  {len(split):,} images, {labelled:,} labelled ({_per_cent(labelled, len(split))})"
        if counts:
            line += f", {len(counts)} classes of {min(counts.values()):,} to {max(counts.values()):,}"
        lines.append(line)
        if name != "train":  # its classes are the same, or should be
            continue
        largest = counts.most_common(_CLASSES_SHOWN)
        lines += [f"         {count:7,}  {shorten(kind, _LONGEST)}" for kind, count in largest]
        if len(counts) > len(largest):
            lines.append(f"                  … and {len(counts) - len(largest)} classes more")
    return lines


def _sizes(survey: Survey) -> list[str]:
    if not survey.images:
        return []
    shapes = Counter((image.width, image.height) for image in survey.images)
    (width, height), count = shapes.most_common(1)[0]
    if len(shapes) == 1:
        return [f"sizes: all {width} × {height}"]
    short = [min(image.width, image.height) for image in survey.images]
    return [
        f"sizes: shorter side {min(short)} to {max(short)}, median {median(short):g}; {len(shapes)} different, "
        f"most often {width} × {height} ({_per_cent(count, len(survey.images))})"
    ]


def _faults(survey: Survey) -> list[str]:
    lines = []
    if survey.broken:
        lines.append(f"broken: {_count(len(survey.broken), 'image')} cannot be read (train with --skip-broken)")
        lines += _first([f"{shorten(image.path, _LONGEST)}: {image.reason}" for image in survey.broken])
    else:
        lines.append("broken: none")
    groups = survey.duplicates
    if not groups:
        return [*lines, "exact duplicates: none"]
    copies = sum(len(group) - 1 for group in groups)
    lines.append(
        f"exact duplicates: {_count(copies, 'image')} with the same pixels as another, in {len(groups)} groups"
    )
    lines += _first([" = ".join(shorten(image.path, _LONGEST) for image in group[:4]) for group in groups])
    if survey.leaked:
        lines.append(f"  {_count(len(survey.leaked), 'group')} in more than one split: test images leak into training")
    if survey.conflicting:
        group = survey.conflicting[0]
        names = " against ".join(sorted({image.name for image in group if image.name is not None}))
        lines.append(f"  {_count(len(survey.conflicting), 'group')} of different classes (first: {names})")
    return lines


def _first(items: list[str]) -> list[str]:
    rest = [f"… and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [f"  {item}" for item in items[:_SHOWN] + rest]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _per_cent(count: int, total: int) -> str:
    return f"{100 * count / max(1, total):.3g} %"
