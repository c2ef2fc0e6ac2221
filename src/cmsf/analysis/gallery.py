"""Pictures of neighbours: the quickest way to see what a representation calls alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from cmsf.data import Dataset, Split
from cmsf.evaluation.features import extract, raw_pixels
from cmsf.files import atomically
from cmsf.neighbours import Own, top
from cmsf.randomness import permutation
from cmsf.rows import UNKNOWN
from cmsf.views import crop_and_resize, sizes

_THUMBNAIL = 96
_SHOWN = 5
_PART = 1024
_LONGEST_NAME = 16
_RIGHT, _WRONG, _PLAIN = "#1a7f37", "#cf222e", "#57606a"


def draw_neighbours(
    backbone: torch.nn.Module, data: Dataset, size: int, device: torch.device | str, out: Path, seed: int, rows: int = 8
) -> None:
    """Random queries, their nearest training images by raw pixels and by the network; a wrong class in red.

    The queries are test images where there are any, one a class in turn; else training images, themselves left out.
    """
    split = data.test or data.train
    chosen = _one_a_class_in_turn(split, seed)[:rows]
    query = split.part(chosen)
    own = chosen if data.test is None else torch.full_like(chosen, UNKNOWN)

    def pixels(part: Split) -> Tensor:
        return raw_pixels(part, min(size, _THUMBNAIL))

    def features(part: Split) -> Tensor:
        return extract(backbone, part, size, device).cpu()

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
        _show(figure.add_subplot(grid[line, 0]), query, line, data.classes, _PLAIN)
        for block, row in enumerate(near_by.values()):
            for place, image in enumerate(row[line].tolist()):
                if image == UNKNOWN:
                    continue
                axes = figure.add_subplot(grid[line, 2 + block * (_SHOWN + 1) + place])
                mine, theirs = int(query.truth[line]), int(data.train.truth[image])
                colour = _PLAIN if UNKNOWN in (mine, theirs) else _RIGHT if mine == theirs else _WRONG
                _show(axes, data.train, image, data.classes, colour)
    for block, title in enumerate(near_by):
        middle = (1 + block * (_SHOWN + 0.15) + _SHOWN / 2 + 0.15) / (columns + 0.3)
        figure.text(middle, 1.0, title, ha="center", va="bottom", fontsize=11)
    figure.text(0.5 / (columns + 0.3), 1.0, "query", ha="center", va="bottom", fontsize=11)
    with atomically(out) as temporary:
        figure.savefig(temporary, format="png", dpi=110, bbox_inches="tight", facecolor="white")


def _nearest(describe: Callable[[Split], Tensor], query: Split, train: Split, own: Tensor) -> Int[Tensor, "q 5"]:
    """The nearest training images; they are described part by part, for all their pixels may not fit at once."""
    asked = describe(query)
    parts = torch.arange(len(train)).split(_PART)
    similarity = torch.cat([asked @ describe(train.part(index)).T for index in parts], dim=1)
    number = torch.arange(len(train))
    return top(Own(own, included=False).settle(similarity, number), number, _SHOWN)


def _one_a_class_in_turn(split: Split, seed: int) -> Int[Tensor, " q"]:
    """All images in a random order in which the classes take turns."""
    order = permutation(len(split), seed, 0x6A11)
    label = split.truth[order]
    turn = torch.zeros_like(order)
    for number in label.unique():
        member = label == number
        turn[member] = torch.arange(int(member.sum()))
    return order[turn.argsort(stable=True)]


def _thumbnail(split: Split, image: int) -> NDArray[np.float32]:
    picture = split.batch(torch.tensor([image]))
    height, width = sizes(picture)
    side = torch.minimum(height, width)
    box = torch.stack([(height - side) // 2, (width - side) // 2, side, side], dim=1)
    pixels = crop_and_resize(picture, box, min(_THUMBNAIL, int(side)))[0]
    shown: NDArray[np.float32] = pixels.expand(3, -1, -1).permute(1, 2, 0).clamp(0, 1).numpy()
    return shown


def _show(axes: Axes, split: Split, image: int, classes: Sequence[str], colour: str) -> None:
    axes.imshow(_thumbnail(split, image), interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(colour)
        spine.set_linewidth(2.5)
    number = int(split.truth[image])
    if number != UNKNOWN:
        # The name is data, not mathematics: a $ in it must not be set as a formula.
        name = classes[number]
        shown = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
        axes.set_xlabel(shown, fontsize=8, color=colour, labelpad=2, parse_math=False)
