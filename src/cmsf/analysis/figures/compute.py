"""Accuracy against compute: of runs, and the paper's Figure 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from cmsf.analysis.figures.thumbnails import PLAIN, fonts
from cmsf.analysis.published import SELF_SUPERVISED, SEMI_SUPERVISED, SelfSupervised
from cmsf.utils.text import escape_unprintable, shorten

_OURS, _OTHERS = "#cf222e", "#0a5dc2"
_LINE, _LETTER_WIDTH, _BEYOND = 10.5, 4.7, 10
"""Distance of lines, mean width of a name's letters, and how far a name may leave the axes, in points."""
_FARTHEST = 15
"""Half lines that a name may be away from its point."""
_TICKS, _SHORT = 5, 10
"""The most, and the ratio of the ends below which an axis has even steps."""
_FEW = 8
"""Names that have room in a compact panel."""
_MAX_PERCENT = 101
"""With room for a point."""
_ROOMY, _COMPACT = (6.5, 5.3), (5.4, 3.6)
"""Of a panel, in inches."""
_COMPUTE = "FLOPs of the backbone in training (a multiply-add is one)"


@dataclass(frozen=True)
class Point:
    name: str
    flops: float
    accuracy: float
    area: float = 34
    """In square points."""
    colour: str = _OTHERS
    name_colour: str | None = None
    """By default that of all text."""
    filled: bool = True


def draw_runs(panels: Mapping[str, Sequence[Point]], beside: Mapping[str, Sequence[Point]]) -> Figure:
    """Draws a panel for each kind of accuracy, a point a run; beside: published ones, grey."""
    size = _ROOMY if beside or max(map(len, panels.values())) > _FEW else _COMPACT
    drawn = [[*points, *beside.get(title, ())] for title, points in panels.items()]
    figure, all_axes = _scatter(drawn, size, "log")
    for axes, title in zip(all_axes, panels, strict=True):
        ticks = _ticks(*axes.get_xlim())
        axes.set_xticks(list(ticks.values()), list(ticks), minor=False)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(_COMPUTE)
        axes.set_ylabel(f"{title}, % of test images")
        if beside.get(title):
            axes.set_title("ImageNet; grey: published, by the paper's tables", fontsize=10)
    return _with_names(figure, drawn)


def draw_published() -> Figure:
    """Draws the paper's Figure 1, its compute by the supplement's equation: 200 epochs without labels, 10 % labels."""
    drawn = [published_points("linear", epochs=200), list(_semi_supervised())]
    figure, (left, right) = _scatter(drawn, _ROOMY, "linear")
    left.set_ylabel("linear, top-1, %")
    left.set_title("self-supervised, 200 epochs", fontsize=10)
    right.set_ylabel("top-1, %")
    right.set_title(
        "10 % of the labels (*: self-supervised, then fine-tuned)\narea: number of GPUs or TPUs; hollow: not published",
        fontsize=10,
    )
    for axes in (left, right):
        axes.set_xlim(0)
        axes.xaxis.set_major_formatter(lambda flops, _: f"{flops / 1e18:g}")
        axes.set_xlabel(f"1e18 {_COMPUTE}")
    return _with_names(figure, drawn)


def published_points(measure: str, epochs: int | None = None, colour: str | None = None) -> list[Point]:
    """Returns Table 1, linear or 20-nn, where the passes are known; epochs: of so many alone; None: of any, named."""
    points = []
    for row in SELF_SUPERVISED:
        accuracy = row.nn_20 if measure == "20-nn" else row.linear
        if row.compute is not None and accuracy is not None and epochs in (None, row.epochs):
            name = _in_full(row) if epochs is not None else f"{_in_full(row)}, {row.epochs} ep."
            own = colour or (_OURS if row.name.startswith("CMSF") else _OTHERS)
            points.append(Point(name, row.compute.flops, accuracy, colour=own, name_colour=own))
    return points


def _in_full(row: SelfSupervised) -> str:
    more = [word for word, mark in (("sym.", "s"), ("multi-crop", "m")) if mark in row.marks]
    return f"{row.name}{', ' if more else ''}{' '.join(more)}"


def _semi_supervised() -> Iterator[Point]:
    for row in SEMI_SUPERVISED:
        flops = row.flops * 1e18 if row.calculation is None else row.calculation.compute.flops
        number, colour = row.accelerators, _OURS if row.name.startswith("CMSF") else _OTHERS
        name = f"{row.name}{'*' if 's' in row.marks else ''}"
        yield Point(name, flops, row.top_1, 12 + 3 * (number or 4), colour, colour, filled=number is not None)


def _ticks(low: float, high: float) -> dict[str, float]:
    """Returns a few places on a logarithmic axis by their text: even steps on a short axis, else round numbers."""
    if high < _SHORT * low:
        places = [float(place) for place in MaxNLocator(_TICKS - 1).tick_values(low, high) if low <= place <= high]
        power = math.floor(math.log10(high))
        scaled = [place / 10**power for place in places]
        exact = (scaled[1] - scaled[0]) / 1000
        # Steps are of 1, 2, 2.5 or 5: the first digit of a step does not tell how many it takes.
        digits = next(n for n in range(17) if all(abs(round(first, n) - first) < exact for first in scaled))
        return {f"{first:.{digits}f}e{power}": place for first, place in zip(scaled, places, strict=True)}
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for leading in ((1, 2, 5), (1, 3), (1,)):
        fine = {f"{first}e{power}": first * 10.0**power for power in powers for first in leading}
        inside = {text: place for text, place in fine.items() if low <= place <= high}
        if len(inside) <= _TICKS:
            break
    return dict(list(inside.items())[:: math.ceil(len(inside) / _TICKS)])


def _scatter(panels: Sequence[Sequence[Point]], size: tuple[float, float], xscale: str) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(len(panels) * size[0], size[1]))
    all_axes: list[Axes] = figure.subplots(1, len(panels), squeeze=False)[0].tolist()
    for axes, points in zip(all_axes, panels, strict=True):
        axes.set_xscale(xscale)
        for point in points:
            face = point.colour if point.filled else "none"
            drawn = axes.scatter(point.flops, point.accuracy, point.area, alpha=0.75, linewidths=1)
            drawn.set(facecolors=face, edgecolors=point.colour)
        axes.margins(0.12)
        low, high = axes.get_ylim()
        axes.set_ylim(low, min(high, _MAX_PERCENT))
        axes.spines[["top", "right"]].set_visible(False)
    return figure, all_axes


def _with_names(figure: Figure, panels: Sequence[Sequence[Point]]) -> Figure:
    """Writes the points' names, once everything around the axes is written and their place is known."""
    FigureCanvasAgg(figure)  # which knows how large a text is
    figure.tight_layout()
    for axes, points in zip(figure.axes, panels, strict=True):
        _write_names(axes, points, scale=figure.dpi / 72)
    return figure


def _write_names(axes: Axes, points: Sequence[Point], scale: float) -> None:
    """Writes each name as near to its point as it covers none, with a line where that is far; scale: pixels a point."""
    frame = Bbox.from_extents(axes.bbox.x0, axes.bbox.y0, axes.bbox.x1 + _BEYOND * scale, axes.bbox.y1)
    longest = int(axes.bbox.width / scale / 2 / _LETTER_WIDTH) - 2  # half a panel: it fits on a side of any point
    centers = axes.transData.transform([(point.flops, point.accuracy) for point in points])
    radii = [scale * math.sqrt(point.area / math.pi) for point in points]
    taken = [Bbox([center - radius, center + radius]) for center, radius in zip(centers, radii, strict=True)]
    heights = sorted((line / 2 * _LINE for line in range(-_FARTHEST, _FARTHEST + 1)), key=lambda up: (abs(up), -up))
    for point, center, radius in zip(points, centers, radii, strict=True):
        name = axes.annotate(
            shorten(escape_unprintable(point.name), longest),
            (point.flops, point.accuracy),
            (0, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=point.name_colour,
            family=fonts(),
            parse_math=False,
        )
        for up, side in [*product(heights, (1, -1)), (0, 1)]:  # where all are taken, right of the point
            offset = (side * (radius / scale + 3), up)
            name.set(position=offset, ha="left" if side > 0 else "right")
            box = name.get_window_extent()
            if frame.contains(*box.min) and frame.contains(*box.max) and not box.count_overlaps(taken):
                break
        taken.append(box)
        if abs(up) > _LINE:
            ends = axes.transData.inverted().transform([center, center + scale * np.array(offset)])
            axes.plot(*ends.T, color=PLAIN, linewidth=0.4, scalex=False, scaley=False)
