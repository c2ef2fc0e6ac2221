"""Accuracy against compute: of runs, and of the paper's Figure 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from cmsf.analysis.figures.thumbnails import PLAIN, fonts
from cmsf.analysis.published import SELF_SUPERVISED, SEMI_SUPERVISED, SelfSupervised
from cmsf.utils.text import escape_unprintable, shorten

_OURS, _OTHERS = "#cf222e", "#0a5dc2"
_LETTERS, _LINE, _LETTER_WIDTH = 8, 10.5, 4.7
"""Font size, line height and mean letter width of labels, in points."""
_FARTHEST = 8
"""Lines that a label may be away from its point."""
_TICKS, _SHORT = 5, 10
"""The most ticks of an axis, and the ratio of its ends below which it has even steps."""
_FEW = 8
"""Names that have room in a compact panel."""
_MOST = 101
"""Per cent, with room for a point."""
_ROOMY, _COMPACT = (5.6, 4.2), (4.5, 2.9)
"""Sizes of the axes alone, in inches."""
_COMPUTE = "FLOPs of the backbone in training (a multiply-add is one)"
_LEFT, _RIGHT, _BOTTOM, _TOP = 0.7, 0.2, 0.6, 0.1
_TITLE = 0.4
Size = tuple[float, float]


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

    @property
    def radius(self) -> float:
        return math.sqrt(self.area / math.pi)


def draw_runs(panels: Mapping[str, Sequence[Point]], beside: Mapping[str, Sequence[Point]]) -> Figure:
    """Draws a panel for each kind of accuracy, a point per run; beside: published ones, grey."""
    size = _ROOMY if beside or max(map(len, panels.values())) > _FEW else _COMPACT
    figure, axes = _figure(len(panels), size, titled=bool(beside))
    for panel, (title, points) in zip(axes, panels.items(), strict=True):
        panel.set_xscale("log")
        panel.set_ylabel(f"{title}, % of test images")
        _scatter(panel, [*points, *beside.get(title, ())], size)
        ticks = _ticks(*panel.get_xlim())
        panel.set_xticks(list(ticks.values()), list(ticks), minor=False)
        panel.xaxis.set_minor_locator(NullLocator())
        if beside.get(title):
            panel.set_title("ImageNet; grey: published, by the paper's tables", fontsize=10)
    return figure


def draw_published() -> Figure:
    """Draws the paper's Figure 1, with compute by the supplement's equation: 200 epochs without labels; 10 % labels."""
    figure, (left, right) = _figure(2, _ROOMY, titled=True)
    left.set_ylabel("linear, top-1, %")
    left.set_title("self-supervised, 200 epochs", fontsize=10)
    _scatter(left, published_points("linear", epochs=200), _ROOMY, from_zero=True)
    right.set_ylabel("top-1, %")
    right.set_title(
        "10 % of the labels (*: self-supervised, then fine-tuned)\narea: number of GPUs or TPUs; hollow: not published",
        fontsize=10,
    )
    _scatter(right, list(_semi_supervised()), _ROOMY, from_zero=True)
    for axes in (left, right):
        axes.xaxis.set_major_formatter(lambda flops, _: f"{flops / 1e18:g}")
        axes.set_xlabel(f"1e18 {_COMPUTE}")
    return figure


def published_points(measure: str, epochs: int | None = None, colour: str | None = None) -> list[Point]:
    """Returns the methods of Table 1 whose passes are known; measure: linear or 20-nn.

    epochs: only methods of so many; by default all, with their epochs in the name.
    """
    points = []
    for row in SELF_SUPERVISED:
        accuracy = row.nn_20 if measure == "20-nn" else row.linear
        if row.compute is not None and accuracy is not None and epochs in (None, row.epochs):
            name = _full_name(row) if epochs is not None else f"{_full_name(row)}, {row.epochs} ep."
            point_colour = colour or (_OURS if row.ours else _OTHERS)
            points.append(Point(name, row.compute.flops, accuracy, colour=point_colour, name_colour=point_colour))
    return points


def _full_name(row: SelfSupervised) -> str:
    variants = [word for word, holds in (("sym.", row.symmetric), ("multi-crop", row.multi_crop)) if holds]
    return f"{row.name}{', ' if variants else ''}{' '.join(variants)}"


def _semi_supervised() -> Iterator[Point]:
    for row in SEMI_SUPERVISED:
        flops = row.flops * 1e18 if row.calculation is None else row.calculation.compute.flops
        number, colour = row.accelerators, _OURS if row.ours else _OTHERS
        name = f"{row.name}{'*' if row.self_supervised else ''}"
        yield Point(name, flops, row.top_1, 12 + 3 * (number or 4), colour, colour, filled=number is not None)


def _ticks(low: float, high: float) -> dict[str, float]:
    """Returns a few ticks of a logarithmic axis by their labels: even steps on a short axis, else round numbers."""
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


def _figure(panels: int, size: Size, titled: bool) -> tuple[Figure, list[Axes]]:
    """Makes axes of a known size, by which labels are placed."""
    width, height = _LEFT + size[0] + _RIGHT, _BOTTOM + size[1] + _TOP + titled * _TITLE
    figure = Figure(figsize=(panels * width, height))
    axes = []
    for number in range(panels):
        left = (number * width + _LEFT) / (panels * width)
        panel = figure.add_axes((left, _BOTTOM / height, size[0] / (panels * width), size[1] / height))
        panel.set_xlabel(_COMPUTE)
        panel.spines[["top", "right"]].set_visible(False)
        axes.append(panel)
    return figure, axes


def _scatter(axes: Axes, points: Sequence[Point], size: Size, from_zero: bool = False) -> None:
    for point in points:
        axes.scatter(
            point.flops,
            point.accuracy,
            s=point.area,
            facecolors=point.colour if point.filled else "none",
            edgecolors=point.colour,
            alpha=0.75,
            linewidths=1,
        )
    axes.margins(0.12)
    low, high = axes.get_ylim()
    axes.set_ylim(low, min(high, _MOST))
    axes.set_xlim(0 if from_zero else None)
    _write_names(axes, points, size)


def _write_names(axes: Axes, points: Sequence[Point], size: Size) -> None:
    """Writes each name as near to its point as it fits without overlap; farther ones are joined by a line."""
    longest = int((72 * size[0] / 2 - 9) / _LETTER_WIDTH)  # half a panel, so that it fits on a side of any point
    names = [shorten(escape_unprintable(point.name), longest) for point in points]
    places = _places(axes, points, size)
    taken = [(x - p.radius, x + p.radius, y - p.radius, y + p.radius) for p, (x, y) in zip(points, places, strict=True)]
    for point, name, (x, y) in zip(points, names, places, strict=True):
        across, up, box = _free_place(x, y, point.radius + 3, len(name) * _LETTER_WIDTH, taken, size)
        taken.append(box)
        axes.annotate(
            name,
            (point.flops, point.accuracy),
            (across, up),
            textcoords="offset points",
            ha="left" if across > 0 else "right",
            va="center",
            fontsize=_LETTERS,
            color=point.name_colour,
            family=fonts(),
            parse_math=False,
            arrowprops={"arrowstyle": "-", "color": PLAIN, "linewidth": 0.4} if abs(up) > _LINE else None,
        )


Box = tuple[float, float, float, float]
"""Left, right, bottom and top, in points."""


def _places(axes: Axes, points: Sequence[Point], size: Size) -> list[tuple[float, float]]:
    """Returns positions in typographic points from the lower left corner of the axes."""
    shares = axes.transLimits.transform(axes.transScale.transform([(p.flops, p.accuracy) for p in points]))
    return [(72 * size[0] * x, 72 * size[1] * y) for x, y in shares.tolist()]


def _free_place(
    x: float, y: float, gap: float, width: float, taken: Sequence[Box], size: Size
) -> tuple[float, float, Box]:
    """Returns the offset of a label from its point, right of it or left, and the label's box."""
    lines = [0, *(sign * line / 2 for line in range(1, 2 * _FARTHEST) for sign in (1, -1))]
    tried = []
    for up in (line * _LINE for line in lines):
        for across in (gap, -gap):
            left, right = (x + across, x + across + width) if across > 0 else (x + across - width, x + across)
            box = (left, right, y + up - _LINE / 2, y + up + _LINE / 2)
            inside = left >= 0 and right <= 72 * (size[0] + _RIGHT) and box[2] >= 0 and box[3] <= 72 * size[1]
            if inside and not any(_overlap(box, other) for other in taken):
                return across, up, box
            tried.append((across, up, box))
    return tried[0]


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]
