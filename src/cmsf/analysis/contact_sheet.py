"""A contact sheet: some of every class, or of a pile, at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from matplotlib.figure import Figure

from cmsf.analysis.thumbnails import THUMBNAIL, fonts, save_figure, shortened, show_image, thumbnail
from cmsf.data import Source, Unreadable
from cmsf.data.source import Part
from cmsf.randomness import permutation

_COLUMNS, _ROWS = 10, 12
_SEED = 0x5EE7


def draw_contact_sheet(source: Source, out: Path) -> None:
    """A row of random training images for each of the first classes; without classes, rows of any."""
    part = source.train
    order = permutation(len(part), _SEED).tolist()
    rows = _by_class(source, part, order) if source.classes else _any(order)
    figure = Figure(figsize=(_COLUMNS + 1.6 * bool(source.classes), len(rows) * 1.08), layout="constrained")
    grid = figure.add_gridspec(len(rows), _COLUMNS)
    for line, (title, members) in enumerate(rows):
        place = 0
        for i in members:
            if place == _COLUMNS:
                break
            with suppress(Unreadable):  # named elsewhere; here the next one takes its place
                pixels = thumbnail(part.images.decode(i, THUMBNAIL))
                axes = figure.add_subplot(grid[line, place])
                show_image(axes, pixels)
                if place == 0 and title:
                    axes.set_ylabel(
                        title, rotation=0, ha="right", va="center", fontsize=9, parse_math=False, family=fonts()
                    )
                place += 1
    save_figure(figure, out)


def _by_class(source: Source, part: Part, order: Sequence[int]) -> list[tuple[str, list[int]]]:
    members: dict[str, list[int]] = {name: [] for name in source.classes}
    for i in order:
        name = part.names[i]
        if name is not None:
            members[name].append(i)
    present = [(name, images) for name, images in members.items() if images]
    return [(f"{shortened(name)}\n{len(images)}", images) for name, images in present[:_ROWS]]


def _any(order: Sequence[int]) -> list[tuple[str, list[int]]]:
    rows = min(_ROWS, -(-len(order) // _COLUMNS))
    return [("", list(order[line::rows])) for line in range(rows)]
