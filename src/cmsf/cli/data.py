"""cmsf data"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, Any

from cmsf.cli.parser import SOURCE_HELP, Parser, print_line, print_paths
from cmsf.utils.errors import BadInput
from cmsf.utils.files import expand_user, report_write_errors
from cmsf.utils.text import shorten

if TYPE_CHECKING:
    from cmsf.data import Source
    from cmsf.data.survey import Survey

_CLASSES_SHOWN = 10
_SHOWN = 3
_LONGEST = 100


def add_parser(commands: Any) -> Parser:
    parser: Parser = commands.add_parser(
        "data",
        help="what is in a pile of images",
        description="Read every image of a source once, and say what is there: counts, classes, sizes, labels, "
        "what cannot be read, what is there twice. Draws a contact sheet.",
    )
    parser.add_argument("source", metavar="SOURCE", nargs="?", help=f"{SOURCE_HELP}; without it, the embedded sample")
    parser.add_argument("--out", metavar="PNG", help="the contact sheet (default: the source's name, in this folder)")
    parser.set_defaults(command=_data)
    return parser


def _data(chosen: argparse.Namespace) -> int:
    from cmsf.analysis.figures.contact_sheet import draw_contact_sheet
    from cmsf.data import open_source
    from cmsf.data.survey import survey

    source = open_source(chosen.source)
    out = expand_user(chosen.out or f"{source.name}-contact-sheet.png")
    if not os.path.isdir(out.absolute().parent):  # which takes a path of any length
        raise BadInput(f"no such folder: {out.parent}; make it, or give another --out")
    found = survey(source)
    for line in (*_counts(source), *_sizes(found), *_faults(found), *source.notes):
        print_line(line)
    if not found.images:
        print("cmsf: none of the images can be read", file=sys.stderr)
        return 2
    with report_write_errors(out, "give another --out"):
        draw_contact_sheet(source, out)
    print_paths({"contact sheet": out})
    return 0


def _counts(source: Source) -> list[str]:
    lines = [f"{source.name}: {sum(map(len, source.splits.values())):,} images"]
    for name, part in source.ordered_splits():
        counts = Counter(one for one in part.names if one is not None)
        labelled = sum(counts.values())
        line = f"  {name:5}  {len(part):,} images, {labelled:,} labelled ({_per_cent(labelled, len(part))})"
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


def _sizes(found: Survey) -> list[str]:
    if not found.images:
        return []
    shapes = Counter((one.width, one.height) for one in found.images)
    (width, height), count = shapes.most_common(1)[0]
    if len(shapes) == 1:
        return [f"sizes: all {width} × {height}"]
    short = [min(one.width, one.height) for one in found.images]
    return [
        f"sizes: shorter side {min(short)} to {max(short)}, median {median(short):g}; {len(shapes)} different, "
        f"most often {width} × {height} ({_per_cent(count, len(found.images))})"
    ]


def _faults(found: Survey) -> list[str]:
    lines = []
    if found.broken:
        lines.append(f"broken: {_count(len(found.broken), 'image')} cannot be read (train with --skip-broken)")
        lines += _first([f"{shorten(image.path, _LONGEST)}: {image.reason}" for image in found.broken])
    else:
        lines.append("broken: none")
    groups = found.duplicates
    if not groups:
        return [*lines, "exact duplicates: none"]
    copies = sum(len(group) - 1 for group in groups)
    lines.append(
        f"exact duplicates: {_count(copies, 'image')} with the same pixels as another, in {len(groups)} groups"
    )
    lines += _first([" = ".join(shorten(image.path, _LONGEST) for image in group[:4]) for group in groups])
    if found.leaked:
        lines.append(f"  {_count(len(found.leaked), 'group')} in more than one split: test images leak into training")
    if found.conflicting:
        group = found.conflicting[0]
        names = " against ".join(sorted({one.name for one in group if one.name is not None}))
        lines.append(f"  {_count(len(found.conflicting), 'group')} of different classes (first: {names})")
    return lines


def _first(items: list[str]) -> list[str]:
    rest = [f"… and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [f"  {item}" for item in items[:_SHOWN] + rest]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _per_cent(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.3g} %"
