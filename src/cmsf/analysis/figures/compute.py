"""Accuracy against compute: of runs, and the paper's Figure 1."""

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
"""Size, distance of lines and mean width of a label's letters, in points."""
_FARTHEST = 8
"""Lines that a label may be away from its point."""
_TICKS, _SHORT = 5, 10
"""The most, and the ratio of the ends below which an axis has even steps."""
_FEW = 8
"""Names that have room in a compact panel."""
_MOST = 101
"""Per cent, with room for a point."""
_ROOMY, _COMPACT = (5.6, 4.2), (4.5, 2.9)
"""Of the axes alone, in inches, with room around them for what is written there."""
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
    """A panel for each kind of accuracy, a point a run; beside: published ones, grey."""
    size = _ROOMY if beside or max(map(len, panels.values())) > _FEW else _COMPACT
    figure, axes = _figure(len(panels), size, titled=bool(beside))
    for one, (title, points) in zip(axes, panels.items(), strict=True):
        one.set_xscale("log")
        one.set_ylabel(f"{title}, % of test images")
        _scatter(one, [*points, *beside.get(title, ())], size)
        ticks = _ticks(*one.get_xlim())
        one.set_xticks(list(ticks.values()), list(ticks), minor=False)
        one.xaxis.set_minor_locator(NullLocator())
        if beside.get(title):
            one.set_title("ImageNet; grey: published, by the paper's tables", fontsize=10)
    return figure


def draw_published() -> Figure:
    """The paper's Figure 1, its compute by the supplement's equation: 200 epochs without labels, and 10 % labels."""
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
    """Table 1: linear or 20-nn, of the methods whose passes are known; epochs: of so many alone, or of any, named."""
    found = []
    for row in SELF_SUPERVISED:
        accuracy = row.nn_20 if measure == "20-nn" else row.linear
        if row.compute is not None and accuracy is not None and epochs in (None, row.epochs):
            name = _in_full(row) if epochs is not None else f"{_in_full(row)}, {row.epochs} ep."
            own = colour or (_OURS if row.ours else _OTHERS)
            found.append(Point(name, row.compute.flops, accuracy, colour=own, name_colour=own))
    return found


def _in_full(row: SelfSupervised) -> str:
    more = [word for word, there in (("sym.", row.symmetric), ("multi-crop", row.multi_crop)) if there]
    return f"{row.name}{', ' if more else ''}{' '.join(more)}"


def _semi_supervised() -> Iterator[Point]:
    for row in SEMI_SUPERVISED:
        flops = row.flops * 1e18 if row.calculation is None else row.calculation.compute.flops
        number, colour = row.accelerators, _OURS if row.ours else _OTHERS
        name = f"{row.name}{'*' if row.self_supervised else ''}"
        yield Point(name, flops, row.top_1, 12 + 3 * (number or 4), colour, colour, filled=number is not None)


def _ticks(low: float, high: float) -> dict[str, float]:
    """A few places on a logarithmic axis by what is written there: even steps on a short one, else round numbers."""
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
    """Axes of a known size, for labels are placed by it."""
    width, height = _LEFT + size[0] + _RIGHT, _BOTTOM + size[1] + _TOP + titled * _TITLE
    figure = Figure(figsize=(panels * width, height))
    axes = []
    for number in range(panels):
        left = (number * width + _LEFT) / (panels * width)
        one = figure.add_axes((left, _BOTTOM / height, size[0] / (panels * width), size[1] / height))
        one.set_xlabel(_COMPUTE)
        one.spines[["top", "right"]].set_visible(False)
        axes.append(one)
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
    """Beside each point, as near as it gets without covering a name or a point; with a line where that is not near."""
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
    """Where the points are, in typographic points from the lower left corner of the axes."""
    shares = axes.transLimits.transform(axes.transScale.transform([(p.flops, p.accuracy) for p in points]))
    return [(72 * size[0] * x, 72 * size[1] * y) for x, y in shares.tolist()]


def _free_place(
    x: float, y: float, gap: float, width: float, taken: Sequence[Box], size: Size
) -> tuple[float, float, Box]:
    """Across and up from a point to its label, right of it or left, and the label's box."""
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


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]
