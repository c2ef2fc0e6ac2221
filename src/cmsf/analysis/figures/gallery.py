"""Gallery of nearest neighbours: the quickest way to see what a representation finds similar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from cmsf.analysis.figures.thumbnails import PLAIN, THUMBNAIL, WRONG, Sheet, shortened
from cmsf.data import Dataset, Split
from cmsf.data.transforms import Preprocessing
from cmsf.evaluation.features import BATCH, feature_batches, pixel_batches
from cmsf.method.topk import OwnRow, top
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.progress import track
from cmsf.utils.rng import permutation

_SHOWN = 5
_CHOOSING = 0x6A11 << 40  # what this use of the hash is for; no epoch is ever so high
_RIGHT = "#1a7f37"
_ACROSS, _DOWN = 1.08, 1.3
"""Steps between pictures, in inches."""
_TOP, _GAP = 0.35, 0.25


def draw_neighbours(
    backbone: torch.nn.Module,
    data: Dataset,
    preprocessing: Preprocessing,
    device: torch.device | str,
    out: Path,
    seed: int,
    workers: int = 0,
    rows: int = 8,
    before: torch.nn.Module | None = None,
) -> None:
    """Draws random queries and their nearest training images by raw pixels and by the network; wrong classes in red.

    before: the network with its starting weights, to take the place of raw pixels.
    The queries are test images, one of each class in turn; without any, training images, themselves left out.
    """
    split = data.test or data.train
    chosen = one_a_class_in_turn(split, seed)[:rows]
    query = split.subset(chosen)
    own = chosen if data.test is None else torch.full_like(chosen, UNKNOWN)

    def features(images: Split, network: torch.nn.Module) -> Iterator[Tensor]:
        return (batch.cpu() for batch in feature_batches(network, images, preprocessing, device, workers))

    small = replace(preprocessing, size=min(preprocessing.size, THUMBNAIL))
    pixels = partial(pixel_batches, preprocessing=small, workers=workers)
    learned = partial(features, network=backbone)
    first = ("raw pixels", pixels) if before is None else ("the starting weights", partial(features, network=before))
    near_by = {
        f"nearest by {name}": _nearest(describe, query, data.train, own, f"picture, {name}")
        for name, describe in (first, ("what was learned", learned))
    }
    block_width = _GAP + _SHOWN * _ACROSS
    sheet = Sheet(_ACROSS + len(near_by) * block_width, _TOP + len(chosen) * _DOWN)
    sheet.write(0.5, _TOP / 2, "query", size=11)
    for block, (title, row) in enumerate(near_by.items()):
        left = _ACROSS + block * block_width + _GAP
        sheet.write(left + _SHOWN * _ACROSS / 2, _TOP / 2, title, size=11)
        for line, images in enumerate(row.tolist()):
            for place, image in enumerate(images):
                if image != UNKNOWN:
                    expected, actual = int(query.truth[line]), int(data.train.truth[image])
                    colour = PLAIN if UNKNOWN in (expected, actual) else _RIGHT if expected == actual else WRONG
                    _show(sheet, left + place * _ACROSS, line, data.train, image, data.classes, colour)
    for line in range(len(chosen)):
        _show(sheet, 0, line, query, line, data.classes, PLAIN)
    sheet.save(out)


def _nearest(
    describe: Callable[[Split], Iterator[Tensor]], query: Split, train: Split, own: Tensor, title: str
) -> Int[Tensor, "q 5"]:
    """Returns the nearest training images, compared batch by batch, for all their pixels may not fit into memory."""
    queries = torch.cat(list(describe(query)))
    similarity = torch.cat([queries @ batch.T for batch in track(describe(train), title, len(train), BATCH)], dim=1)
    number = torch.arange(len(train))
    return top(OwnRow(own, included=False).apply_to(similarity, number), number, _SHOWN)


def one_a_class_in_turn(split: Split, seed: int) -> Int[Tensor, " q"]:
    """Returns all images in a random order in which the classes take turns."""
    order = permutation(len(split), seed, _CHOOSING)
    label = split.truth[order]
    turn = torch.zeros_like(order)
    for number in label.unique():
        member = label == number
        turn[member] = torch.arange(int(member.sum()))
    return order[turn.argsort(stable=True)]


def _show(sheet: Sheet, x: float, line: int, split: Split, image: int, classes: Sequence[str], colour: str) -> None:
    number, y = int(split.truth[image]), _TOP + line * _DOWN
    sheet.show(x, y, split.read(torch.tensor([image]), THUMBNAIL)[0], colour)
    if number != UNKNOWN:
        sheet.write(x + 0.5, y + 1.12, shortened(classes[number]), size=8, colour=colour)
