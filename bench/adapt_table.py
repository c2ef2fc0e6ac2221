"""Writes the tables of bench/adapt.py and bench/adapt_settings.py as Markdown.

python bench/adapt_table.py docs/results/adapt docs/results/adapt-settings > docs/results/adapt.md
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from adapt import LITE0, MOBILENET, PARTS, RESNET, SEEDS, SETS, START, WAYS, Cell, cells
from adapt_settings import CHANGES
from cells import mean_and_range, read

KNN, LINEAR = "20-nn", "linear top-1"
NAMES = {LITE0: "EfficientNet-Lite0", MOBILENET: "MobileNetV2", RESNET: "ResNet-50, imgsim"}
TITLES = {
    "self": "Without labels",
    "few": "A few labels a class",
    "noise": "Wrong labels",
    "coarse": "Coarse labels, judged by fine ones",
}
Found = dict[str, Any]


def tables(out: Path, settings: Path) -> str:
    lines = [
        "# Training from pretrained weights",
        "",
        "Written by `bench/adapt_table.py` from the cells of `bench/adapt.py`, whose docstring says what is compared.",
        "Per cent; a mean over seeds with their range, and how many seeds there are, where some are missing.",
    ]
    found = {cell: read(out, cell.name) for cell in cells()}
    parts = {"self": self_table, "few": few_table, "noise": noise_table, "coarse": coarse_table}
    for part in PARTS:
        rows = list(parts[part]({cell: it for cell, it in found.items() if cell.part == part and it is not None}))
        lines += ["", f"## {TITLES[part]}", "", *(rows if len(rows) > 2 else ["Not run yet."])]
    done = sum(it is not None for it in found.values())
    lines += ["", f"{done} of {len(found)} cells are there.", "", "## The settings of the scale", ""]
    return "\n".join([*lines, *settings_table(settings)])


def self_table(found: dict[Cell, Found]) -> Iterator[str]:
    yield "| network | images | method | 20-NN at the start | after | linear at the start | after | kept epochs |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |"
    for (network, data, method), group in grouped(found, "network", "data", "method"):
        kept = ", ".join(str(kept_epoch(it)) for it in group)
        yield row(NAMES[network], data, method, *before_and_after(group, KNN), *before_and_after(group, LINEAR), kept)


def few_table(found: dict[Cell, Found]) -> Iterator[str]:
    yield "| network | images | labels a class | from | linear layer | whole network |"
    yield "| --- | --- | ---: | --- | ---: | ---: |"
    order = {data: place for place, data in enumerate(SETS)}
    groups = sorted(
        grouped(found, "network", "data", "labels", "method"), key=lambda one: (one[0][0], order[one[0][1]], one[0][2])
    )
    for (network, data, labels, method), group in groups:
        figures = (over_seeds(it["classifier"][way] for it in group) for way in WAYS)
        yield row(NAMES[network], data, labels, name_of(method), *figures)


def noise_table(found: dict[Cell, Found]) -> Iterator[str]:
    yield "| images | wrong | method | 20-NN, true labels | linear, true labels | linear layer on the wrong labels |"
    yield "| --- | ---: | --- | ---: | ---: | ---: |"
    for (data, noise, method), group in sorted(grouped(found, "data", "noise", "method"), key=lambda one: one[0][:2]):
        which = START if method == START else "after"
        true = (over_seeds(it[which][name] for it in group) for name in (KNN, LINEAR))
        yield row(data, f"{noise:.0%}", name_of(method), *true, over_seeds(it["classifier"]["linear"] for it in group))


def coarse_table(found: dict[Cell, Found]) -> Iterator[str]:
    yield "| method | 20-NN at the start | after | linear at the start | after |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for (method,), group in grouped(found, "method"):
        yield row(method, *before_and_after(group, KNN), *before_and_after(group, LINEAR))


def settings_table(folder: Path) -> Iterator[str]:
    yield "EfficientNet-Lite0 on clothing-128 at 96 px, the set that chooses; one seed; 20-NN by epoch, 0 the start."
    yield "372 test images tell four points apart at best."
    yield ""
    yield "| change | method | 20-NN by epoch | linear |"
    yield "| --- | --- | --- | ---: |"
    for change in CHANGES:
        for method in ("cmsf-self", "cmsf-sup"):
            if (found := read(folder, f"{method}-{change}")) is not None:
                course = ", ".join(f"{line[KNN]:.1f}" for line in found["by epoch"] if KNN in line)
                yield row(change.replace("-", " "), method, course, f"{found['after'][LINEAR]:.1f}")


def grouped(found: dict[Cell, Found], *fields: str) -> Iterator[tuple[tuple[Any, ...], list[Found]]]:
    """Yields cells that differ in their seed alone, with what they have in common."""
    groups: dict[tuple[Any, ...], list[Found]] = defaultdict(list)
    for cell, it in found.items():
        groups[tuple(getattr(cell, name) for name in fields)].append(it)
    yield from groups.items()


def before_and_after(group: list[Found], name: str) -> tuple[str, str]:
    return f"{group[0][START][name]:.2f}", over_seeds(it["after"][name] for it in group)


def over_seeds(values: Iterable[float]) -> str:
    return mean_and_range(values, len(SEEDS))


def kept_epoch(found: Found) -> int:
    return next(int(line["epoch"]) for line in found["by epoch"] if line["kind"] == "kept")


def name_of(method: str) -> str:
    return "the start" if method == START else method


def row(*words: object) -> str:
    return f"| {' | '.join(str(word) for word in words)} |"


if __name__ == "__main__":
    print(tables(Path(sys.argv[1]), Path(sys.argv[2])))
