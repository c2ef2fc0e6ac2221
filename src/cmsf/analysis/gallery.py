"""Pictures of neighbours: the quickest way to see what a representation calls alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from cmsf.analysis.thumbnails import PLAIN, THUMBNAIL, save_figure, show_image, thumbnail
from cmsf.data import Dataset, Split
from cmsf.evaluation.features import feature_batches, pixel_batches
from cmsf.neighbours import Own, top
from cmsf.randomness import permutation
from cmsf.rows import UNKNOWN

_SHOWN = 5
_CHOOSING = 0x6A11 << 40  # what this use of the hash is for; no epoch is ever so high
_RIGHT, _WRONG = "#1a7f37", "#cf222e"


def draw_neighbours(
    backbone: torch.nn.Module,
    data: Dataset,
    size: int,
    device: torch.device | str,
    out: Path,
    seed: int,
    workers: int = 0,
    rows: int = 8,
) -> None:
    """Random queries, their nearest training images by raw pixels and by the network; a wrong class in red.

    The queries are test images where there are any, one a class in turn; else training images, themselves left out.
    """
    split = data.test or data.train
    chosen = _one_a_class_in_turn(split, seed)[:rows]
    query = split.part(chosen)
    own = chosen if data.test is None else torch.full_like(chosen, UNKNOWN)

    def pixels(part: Split) -> Iterator[Tensor]:
        return pixel_batches(part, min(size, THUMBNAIL), workers)

    def features(part: Split) -> Iterator[Tensor]:
        return (batch.cpu() for batch in feature_batches(backbone, part, size, device, workers))

    near_by = {
        "nearest by raw pixels": _nearest(pixels, query, data.train, own),
        "nearest by what was learned": _nearest(features, query, data.train, own),
    }

    columns = 1 + len(near_by) * _SHOWN
    figure = Figure(figsize=(columns * 1.05 + 0.4, len(chosen) * 1.25 + 0.5), layout="constrained")
    grid = figure.add_gridspec(
        len(chosen), columns + len(near_by), width_ratios=[1, *([0.15, *[1] * _SHOWN] * len(near_by))]
    )
    for line in range(len(chosen)):
        _show(figure.add_subplot(grid[line, 0]), query, line, data.classes, PLAIN)
        for block, row in enumerate(near_by.values()):
            for place, image in enumerate(row[line].tolist()):
                if image == UNKNOWN:
                    continue
                axes = figure.add_subplot(grid[line, 2 + block * (_SHOWN + 1) + place])
                mine, theirs = int(query.truth[line]), int(data.train.truth[image])
                colour = PLAIN if UNKNOWN in (mine, theirs) else _RIGHT if mine == theirs else _WRONG
                _show(axes, data.train, image, data.classes, colour)
    for block, title in enumerate(near_by):
        middle = (1 + block * (_SHOWN + 0.15) + _SHOWN / 2 + 0.15) / (columns + 0.3)
        figure.text(middle, 1.0, title, ha="center", va="bottom", fontsize=11)
    figure.text(0.5 / (columns + 0.3), 1.0, "query", ha="center", va="bottom", fontsize=11)
    save_figure(figure, out)


def _nearest(
    describe: Callable[[Split], Iterator[Tensor]], query: Split, train: Split, own: Tensor
) -> Int[Tensor, "q 5"]:
    """The nearest training images; they are compared batch by batch, for all their pixels may not fit at once."""
    asked = torch.cat(list(describe(query)))
    similarity = torch.cat([asked @ batch.T for batch in describe(train)], dim=1)
    number = torch.arange(len(train))
    return top(Own(own, included=False).settle(similarity, number), number, _SHOWN)


def _one_a_class_in_turn(split: Split, seed: int) -> Int[Tensor, " q"]:
    """All images in a random order in which the classes take turns."""
    order = permutation(len(split), seed, _CHOOSING)
    label = split.truth[order]
    turn = torch.zeros_like(order)
    for number in label.unique():
        member = label == number
        turn[member] = torch.arange(int(member.sum()))
    return order[turn.argsort(stable=True)]


def _show(axes: Axes, split: Split, image: int, classes: Sequence[str], colour: str) -> None:
    number = int(split.truth[image])
    picture = split.read(torch.tensor([image]), THUMBNAIL)[0]
    show_image(axes, thumbnail(picture), "" if number == UNKNOWN else classes[number], colour)
