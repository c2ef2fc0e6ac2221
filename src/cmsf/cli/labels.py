"""Labels of a source's training images, as they are or fewer, noisier, coarser; written as a list for cmsf train
--labels, or (where the images are files) --data. Coarsening comes first, then choosing, then noise."""

from __future__ import annotations

import argparse
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from cmsf.cli.parser import Parser, largest_classes, print_line, print_paths
from cmsf.recipes.recipe import Recipe, parse_value
from cmsf.utils.errors import BadInput, first_few
from cmsf.utils.files import check_out, expand_user, read_text, report_write_errors

if TYPE_CHECKING:
    from cmsf.data import Source
    from cmsf.data.labels import Labels

HELP = "make and inspect label lists: shares, noise, coarse"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("source", metavar="SOURCE", nargs="?", help="as for cmsf train --data")
    parser.add_options(
        {
            "--labels LIST": "start from this list instead of the source's own labels",
            "--corrections LIST": "labels for some of the images instead of those they have, as cmsf suspects lists "
            "them; a blank one takes an image's label away",
            "--classes imagenet-100|FILE": "images of these classes alone; a file has one name a line",
            "--coarse wordnet|FILE": "join classes into groups; a file is a CSV class,group",
            "--share X": "keep the labels of this share of each class, e.g. 0.01",
            "--per-class N": "keep the labels of so many images of each class; 0: of all",
            "--subset simclr-1|simclr-10|FILE": "keep the labels of these files; a file has one name a line",
            "--noise X": "replace each label by another class with this probability",
            "--seed N": "decides what is chosen and replaced (default: 0)",
            "--out CSV": "where to write the list; without it, it is only looked at",
        }
    )
    parser.set_defaults(seed="0")


def execute(chosen: argparse.Namespace) -> int:
    flags = {"label_share": "share", "labels_per_class": "per_class", "label_noise": "noise", "seed": "seed"}
    texts = {name: getattr(chosen, flag) for name, flag in flags.items() if getattr(chosen, flag) is not None}
    try:
        numbers = Recipe().changed({name: parse_value(name, text) for name, text in texts.items()})
    except BadInput as error:  # said of the recipe's settings, which have longer names
        words = str(error)
        for name, flag in flags.items():
            words = words.replace(f"--{name.replace('_', '-')}", f"--{flag.replace('_', '-')}")
        raise BadInput(words) from None
    out = None if chosen.out is None else check_out(chosen.out, ".csv")

    from cmsf.data import open_source
    from cmsf.data.imagenet import imagenet_100
    from cmsf.data.labels import Labels, modify_labels
    from cmsf.data.sources.table import read_label_list, read_label_rows, write_csv
    from cmsf.utils.progress import track

    source = open_source(chosen.source)
    paths = source.train.images.paths
    labels = Labels.from_names(source.train.names, source.classes)
    if chosen.labels is not None:
        labels = Labels.from_names(read_label_list(source, expand_user(chosen.labels))["train"])
    if chosen.corrections is not None:
        corrections = read_label_rows(source, expand_user(chosen.corrections))["train"]
        labels, before = _correct_labels(labels, corrections), labels
        changes = sum(old != new for old, new in zip(before.to_names(), labels.to_names(), strict=True))
        print_line(f"{changes:,} labels corrected, of {len(corrections):,} listed in {chosen.corrections}")
        new = sorted({name for name in corrections.values() if name is not None} - {*before.names})
        if new:
            print_line(f"classes that were not there before: {first_few([repr(name) for name in new])}")
    if not labels.known.any():
        raise BadInput(f"{source.name} has no labels to make a list from; give one with --labels")
    if chosen.classes is not None:
        classes = imagenet_100() if chosen.classes == "imagenet-100" else _lines(chosen.classes)
        labels = labels.keep_classes(classes, chosen.classes)
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
        labelled = labels.known.nonzero()[:, 0].tolist()
        called = labels.to_names()
        with report_write_errors(out, "give another --out"):
            rows = ((_relative_to_list(source, paths[i], out), called[i]) for i in labelled)
            write_csv(out, ("path", "label"), track(rows, f"writing {out.name}", len(labelled)))
        print_paths({"list": out})
    return 0


def _summary(source: Source, labels: Labels) -> list[str]:
    counts = labels.counts()
    known, present = int(labels.known.sum()), counts[counts > 0]
    lines = [
        f"{source.name}: {known:,} of {len(labels):,} training images labelled ({100 * known / len(labels):.3g} %), "
        f"{len(present)} classes of {int(present.min()):,} to {int(present.max()):,}"
    ]
    by_name = dict(zip(labels.names, counts.tolist(), strict=True))
    return [*lines, *largest_classes({name: count for name, count in by_name.items() if count})]


def _difference(description: str, before: Labels, after: Labels) -> str:
    known_in_both = before.known & after.known
    known, differ = int(known_in_both.sum()), int((before.number != after.number)[known_in_both].sum())
    return f"{differ:,} of {known:,} labels {description} ({100 * differ / max(1, known):.2f} %)"


def _correct_labels(labels: Labels, corrections: dict[int, str | None]) -> Labels:
    """Returns the labels with some replaced; a correction may name a new class."""
    from cmsf.data.labels import Labels

    names = labels.to_names()
    for image, name in corrections.items():
        names[image] = name
    return Labels.from_names(names, labels.names if {*names} <= {*labels.names, None} else None)


def _subset(labels: Labels, paths: Any, choice: str) -> Labels:
    """Returns the labels of listed files alone, by path or by the bare file name."""
    import torch

    from cmsf.data.imagenet import simclr_files

    shipped = {"simclr-1": 1, "simclr-10": 10}
    files = simclr_files(shipped[choice]) if choice in shipped else _lines(choice)
    names = [path if path in files else PurePosixPath(path).name for path in paths]
    is_listed = torch.tensor([name in files for name in names])
    if not is_listed.any():
        raise BadInput(f"none of the {len(files)} files of {choice} is among the {len(paths)} images, as {paths[0]}")
    missing = files.difference(names)
    if missing:
        print_line(f"{len(missing):,} of the {len(files):,} files of {choice} are not there, as {min(missing)}")
    return labels.keep(is_listed)


def _lines(file: str) -> frozenset[str]:
    return frozenset(filter(None, map(str.strip, read_text(expand_user(file)).splitlines())))


def _relative_to_list(source: Source, path: str, out: Path) -> str:
    """Returns a path relative to the list, so that the list serves as --labels and as --data alike."""
    from cmsf.data.images import FileImages

    images = source.train.images
    if not isinstance(images, FileImages):
        return path
    return PurePosixPath(os.path.relpath(images.root.resolve() / path, out.resolve().parent)).as_posix()
