"""cmsf labels"""

from __future__ import annotations

import argparse
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from cmsf.cli.parser import Parser, parse_out, print_line, print_paths
from cmsf.recipes.recipe import Recipe, parse_value
from cmsf.utils.errors import BadInput, first_few
from cmsf.utils.files import expand_user, read_text, report_write_errors

if TYPE_CHECKING:
    from cmsf.data import Source
    from cmsf.data.labels import Labels

_CLASSES_SHOWN = 10


def add_parser(commands: Any) -> Parser:
    parser: Parser = commands.add_parser(
        "labels",
        help="make and inspect label lists: shares, noise, coarse",
        description="Labels of a source's training images, as they are or fewer, noisier, coarser; written as a list "
        "for cmsf train --labels, or (where the images are files) --data. Coarsening comes first, then choosing, then "
        "noise.",
    )
    parser.add_argument("source", metavar="SOURCE", nargs="?", help="as for cmsf train --data")
    parser.add_argument("--labels", metavar="LIST", help="start from this list instead of the source's own labels")
    parser.add_argument(
        "--corrections",
        metavar="LIST",
        help="labels for some of the images instead of those they have, as cmsf suspects lists them; a blank one takes "
        "an image's label away",
    )
    parser.add_argument(
        "--classes", metavar="imagenet-100|FILE", help="images of these classes alone; a file has one name a line"
    )
    parser.add_argument(
        "--coarse", metavar="wordnet|FILE", help="join classes into groups; a file is a CSV class,group"
    )
    parser.add_argument("--share", metavar="X", help="keep the labels of this share of each class, e.g. 0.01")
    parser.add_argument("--per-class", metavar="N", help="keep the labels of so many images of each class; 0: of all")
    parser.add_argument(
        "--subset", metavar="simclr-1|simclr-10|FILE", help="keep the labels of these files; a file has one name a line"
    )
    parser.add_argument("--noise", metavar="X", help="replace each label by another class with this probability")
    parser.add_argument("--seed", metavar="N", default="0", help="decides what is chosen and replaced (default: 0)")
    parser.add_argument("--out", metavar="CSV", help="where to write the list; without it, it is only looked at")
    parser.set_defaults(command=_labels)
    return parser


def _labels(chosen: argparse.Namespace) -> int:
    flags = {"label_share": "share", "labels_per_class": "per_class", "label_noise": "noise", "seed": "seed"}
    asked = {name: getattr(chosen, flag) for name, flag in flags.items() if getattr(chosen, flag) is not None}
    try:
        numbers = Recipe().changed({name: parse_value(name, text) for name, text in asked.items()})
    except BadInput as error:  # said of the recipe's settings, which have longer names
        words = str(error)
        for name, flag in flags.items():
            words = words.replace(f"--{name.replace('_', '-')}", f"--{flag.replace('_', '-')}")
        raise BadInput(words) from None
    out = None if chosen.out is None else parse_out(chosen.out, ".csv")

    from cmsf.data import open_source
    from cmsf.data.labels import Labels, modify_labels
    from cmsf.data.sources.table import read_label_list, read_label_rows, write_csv

    source = open_source(chosen.source)
    paths = source.train.images.paths
    labels = Labels.from_names(source.train.names, source.classes)
    if chosen.labels is not None:
        labels = Labels.from_names(read_label_list(source, expand_user(chosen.labels))["train"])
    if chosen.corrections is not None:
        given = read_label_rows(source, expand_user(chosen.corrections))["train"]
        labels, before = _corrected(labels, given), labels
        changes = sum(old != new for old, new in zip(before.to_names(), labels.to_names(), strict=True))
        print_line(f"{changes:,} labels corrected, of {len(given):,} listed in {chosen.corrections}")
        new = sorted({name for name in given.values() if name is not None} - {*before.names})
        if new:
            print_line(f"classes that were not there before: {first_few([repr(name) for name in new])}")
    if not labels.known.any():
        raise BadInput(f"{source.name} has no labels to make a list from; give one with --labels")
    if chosen.classes is not None:
        labels = labels.keep_classes(_classes(chosen.classes), chosen.classes)
    if chosen.coarse is not None:
        labels = modify_labels(labels, coarse=chosen.coarse)
    if chosen.subset is not None:
        labels = _subset(labels, paths, chosen.subset)
    labels = modify_labels(labels, share=numbers.label_share, per_class=numbers.labels_per_class, seed=numbers.seed)
    before = labels
    labels = modify_labels(labels, noise=numbers.label_noise, seed=numbers.seed)
    if not labels.known.any():
        raise BadInput(f"no label of {source.name} is left; ask for fewer things at a time")
    for line in _summary(source, labels):
        print_line(line)
    if numbers.label_noise:
        print(_difference("replaced by the noise", before, labels))
    own = Labels.from_names(source.train.names, source.classes)
    if chosen.labels is not None and set(labels.names) <= set(own.names):
        print(_difference("other than the source's own", own, Labels.from_names(labels.to_names(), own.names)))
    if out is not None:
        kept = labels.known.nonzero()[:, 0].tolist()
        called = labels.to_names()
        with report_write_errors(out, "give another --out"):
            write_csv(out, ("path", "label"), [(_as_listed(source, paths[i], out), called[i]) for i in kept])
        print_paths({"list": out})
    return 0


def _summary(source: Source, labels: Labels) -> list[str]:
    counts = labels.counts()
    known, present = int(labels.known.sum()), counts[counts > 0]
    lines = [
        f"{source.name}: {known:,} of {len(labels):,} training images labelled ({100 * known / len(labels):.3g} %), "
        f"{len(present)} classes of {int(present.min()):,} to {int(present.max()):,}"
    ]
    largest = counts.argsort(descending=True, stable=True)[: min(_CLASSES_SHOWN, len(present))].tolist()
    lines += [f"  {int(counts[number]):7,}  {labels.names[number]}" for number in largest]
    if len(present) > _CLASSES_SHOWN:
        lines.append(f"           … and {len(present) - _CLASSES_SHOWN} classes more")
    return lines


def _difference(what: str, before: Labels, after: Labels) -> str:
    both = before.known & after.known
    known, differ = int(both.sum()), int((before.number != after.number)[both].sum())
    return f"{differ:,} of {known:,} labels {what} ({100 * differ / max(1, known):.2f} %)"


def _corrected(labels: Labels, given: dict[int, str | None]) -> Labels:
    """The labels with some replaced; a class that nobody has had before is a class like any other."""
    from cmsf.data.labels import Labels

    names = labels.to_names()
    for image, name in given.items():
        names[image] = name
    return Labels.from_names(names, labels.names if {*names} <= {*labels.names, None} else None)


def _classes(asked: str) -> frozenset[str]:
    from cmsf.data.imagenet import imagenet_100

    return imagenet_100() if asked == "imagenet-100" else _lines(asked)


def _subset(labels: Labels, paths: Any, asked: str) -> Labels:
    """The labels of listed files alone, by path or by the bare file name."""
    import torch

    from cmsf.data.imagenet import simclr_files

    shipped = {"simclr-1": 1, "simclr-10": 10}
    wanted = simclr_files(shipped[asked]) if asked in shipped else _lines(asked)
    found = [path if path in wanted else PurePosixPath(path).name for path in paths]
    kept = torch.tensor([name in wanted for name in found])
    if not kept.any():
        raise BadInput(f"none of the {len(wanted)} files of {asked} is among the {len(paths)} images, as {paths[0]}")
    missing = wanted.difference(found)
    if missing:
        print_line(f"{len(missing):,} of the {len(wanted):,} files of {asked} are not there, as {min(missing)}")
    return labels.keep(kept)


def _lines(file: str) -> frozenset[str]:
    return frozenset(filter(None, map(str.strip, read_text(expand_user(file)).splitlines())))


def _as_listed(source: Source, path: str, out: Path) -> str:
    """A file's path relative to the list, so that the list serves as --labels and as --data alike."""
    from cmsf.data.images import FileImages

    images = source.train.images
    if not isinstance(images, FileImages):
        return path
    return PurePosixPath(os.path.relpath(images.root.resolve() / path, out.resolve().parent)).as_posix()
