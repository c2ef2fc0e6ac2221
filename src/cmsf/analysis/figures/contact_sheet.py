"""Contact sheet: sample images of every class, or of an unlabelled source."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cmsf.analysis.figures.thumbnails import THUMBNAIL, Sheet, shortened
from cmsf.data import Source, Unreadable
from cmsf.data.source import SourceSplit
from cmsf.utils.progress import track
from cmsf.utils.rng import permutation

_COLUMNS, _ROWS = 10, 12
_STEP, _FOR_NAMES = 1.05, 1.5
"""Steps between pictures and width of the margin, in inches."""
_SEED = 0x5EE7


def draw_contact_sheet(source: Source, out: Path) -> None:
    """Draws a row of random training images for each of the first classes; without classes, rows of any images."""
    split = source.train
    order = permutation(len(split), _SEED).tolist()
    rows = _by_class(source, split, order) if source.classes else _unlabelled(order)
    left = _FOR_NAMES * bool(source.classes)
    sheet = Sheet(left + _COLUMNS * _STEP, len(rows) * _STEP)
    for line, (title, members) in enumerate(track(rows, "contact sheet", len(rows))):
        sheet.write(left - 0.1, line * _STEP + 0.5, title, size=9, align="right")
        place = 0
        for i in members:
            if place == _COLUMNS:
                break
            with suppress(Unreadable):  # reported elsewhere; here the next image takes its place
                sheet.show(left + place * _STEP, line * _STEP, split.images.decode(i, THUMBNAIL))
                place += 1
    sheet.save(out)


def _by_class(source: Source, split: SourceSplit, order: Sequence[int]) -> list[tuple[str, list[int]]]:
    members: dict[str, list[int]] = {name: [] for name in source.classes}
    for i in order:
        if (name := split.names[i]) is not None:
            members[name].append(i)
    present = [(name, images) for name, images in members.items() if images]
    return [(f"{shortened(name)}\n{len(images)}", images) for name, images in present[:_ROWS]]


def _unlabelled(order: Sequence[int]) -> list[tuple[str, list[int]]]:
    rows = min(_ROWS, -(-len(order) // _COLUMNS))
    return [("", list(order[line::rows])) for line in range(rows)]
