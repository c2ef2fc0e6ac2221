"""The report's plots: how they are drawn, and what of a run's log each one shows."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cmsf.report.contents import INK, PAPER, Plot, Pool
from cmsf.utils.files import atomic_write, make_folder
from cmsf.utils.text import escape_unprintable, shorten

BIN = 5
"""Ranks that are counted together."""
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#bf8700", "#8250df", "#1b7c83", "#bc4c00")
"""Seen on white and on black, and told apart in this order."""
GREY = "#6e7781"
_STYLES = ("-", "--", ":", "-.")
"""Of as many lines as there are colours, each."""
_INSIDE = 4
"""Names that a legend has room for inside of the axes; more stand below them, two in a line."""
_LONGEST, _HALF, _QUARTER = 40, 28, 14
"""Letters of such a name."""
_NAMED = 20
"""Kinds of points that have a legend."""
_LEGEND_LINE = 0.17
"""Inches."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "text.parse_math": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


@contextmanager
def styled(**more: Any) -> Iterator[None]:
    """What is drawn inside looks like the rest of the page; a letter that no font has is a box, and no warning."""
    with mpl.rc_context(_STYLE | {key.replace("_", "."): value for key, value in more.items()}), catch_warnings():
        filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        yield


@dataclass(frozen=True)
class Drawing:
    """A plot, before it is anywhere."""

    section: str
    name: str
    title: str
    caption: str
    figure: Figure

    def on_page(self, run: int) -> Plot:
        """For a page; run: its number there, for no two plots of a page may share names."""
        return Plot(self.section, self.name, self.title, self.caption, _svg(self.figure, f"{self.name}-{run}"))

    def save(self, folder: Path) -> None:
        """A PNG and an SVG."""
        make_folder(folder)
        with atomic_write(folder / f"{self.name}.png") as temporary, styled():
            self.figure.savefig(temporary, format="png", dpi=200, facecolor=PAPER)
        with atomic_write(folder / f"{self.name}.svg") as temporary:
            temporary.write_text(_svg(self.figure, self.name), encoding="utf-8")


def curves(
    x: Sequence[float], lines: Mapping[str, Sequence[float | None]], below: str, beside: str, share: bool = False
) -> Figure:
    """Lines over epochs; a value that is not there is left out. share: of one, shown in per cent."""
    with styled():
        rows = math.ceil(len(lines) / 2) if len(lines) > _INSIDE else 0
        figure, axes = _axes(below, beside, rows * _LEGEND_LINE)
        looks = ((style, colour) for style in cycle(_STYLES) for colour in COLOURS)
        for (style, colour), (name, values) in zip(looks, lines.items(), strict=False):
            there = [(at, value) for at, value in zip(x, values, strict=True) if value is not None]
            if not there:  # its colour stays its own, in all plots of the page
                continue
            marker = "o" if len(there) < 25 else ""
            label = shorten(escape_unprintable(name), _HALF if rows else _LONGEST)
            axes.plot(*zip(*there, strict=True), style, color=colour, label=label, marker=marker, markersize=3.5)
        if share:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.set_xlim(0.5, max(x) + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if rows:
            figure.legend(loc="outside lower center", ncols=2, fontsize=8)
        elif len(lines) > 1:
            axes.legend(fontsize=8)
        return figure


def bars(heights: Mapping[str, Sequence[float]], below: str, beside: str) -> Figure:
    """Histograms of the same bins of BIN from 1 on, drawn as steps over one another."""
    with styled():
        figure, axes = _axes(below, beside)
        for colour, (name, values) in zip(cycle(COLOURS), heights.items(), strict=False):
            edges = [BIN * place + 0.5 for place in range(len(values) + 1)]
            axes.stairs(values, edges, color=colour, label=name, linewidth=1.6)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.legend(fontsize=8)
        return figure


def scattered(x: Sequence[float], y: Sequence[float], kind: Sequence[int], names: Sequence[str]) -> Figure:
    """Points in the colours of their kinds, which are named where they are few; those of no kind are grey."""
    with styled():
        named = len(names) <= _NAMED
        figure, axes = _axes("", "", more=math.ceil(len(names) / 4) * _LEGEND_LINE + 1 if named else 1)
        colours = mpl.colormaps["tab20" if len(names) > 10 else "tab10"]
        for number in (-1, *range(len(names))):
            mine = [place for place, one in enumerate(kind) if one == number]
            if mine:
                colour = GREY if number < 0 else colours(number % colours.N)
                label = shorten(escape_unprintable(names[number]), _QUARTER) if number >= 0 else "no class"
                points = [x[place] for place in mine], [y[place] for place in mine]
                axes.scatter(*points, s=6, color=colour, label=label, linewidths=0)
        axes.set_axis_off()
        if named and names:
            figure.legend(loc="outside lower center", ncols=4, fontsize=8, markerscale=2)
        return figure


def _axes(below: str, beside: str, more: float = 0.0) -> tuple[Figure, Axes]:
    """more: inches for what stands below."""
    figure = Figure(figsize=(5.2, 3.1 + more), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.set_xlabel(below)
    axes.set_ylabel(beside)
    return figure, axes


def _svg(figure: Figure, salt: str) -> str:
    """From its first tag on, with names that depend on the salt, and nothing of the time or the machine."""
    with styled(svg_hashsalt=salt, svg_id=salt):
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = written.getvalue()
    return text[text.index("<svg") :]


Lines = Sequence[Mapping[str, Any]]
CURVES, RELATED, HEALTH, MAP = "Curves", "What it calls related", "Health", "Map"
_STAGES = 4


def drawings(epochs: Lines) -> list[Drawing]:
    """Of the lines that a run has written, one an epoch; what was never logged is not drawn."""
    if not epochs:
        return []
    return [*_learning(epochs), *_related(epochs), *_guesses(epochs), *_health(epochs)]


def binned(counts: Sequence[int], total: int) -> list[float]:
    """Shares of a total, by bins of BIN ranks."""
    return [sum(counts[start : start + BIN]) / total for start in range(0, len(counts), BIN)]


def maps(pool: Pool) -> Iterator[Drawing]:
    """The map, for a paper: on the page it is another, which can be moved and asked."""
    known = [truth if truth >= 0 else label for truth, label in zip(pool.truth, pool.label, strict=True)]
    for projection in pool.projections:
        name = f"map-{projection.name.lower()}"
        figure = scattered(projection.x, projection.y, known, pool.classes)
        yield Drawing(MAP, name, f"Map of the images, by {projection.name}", "", figure)


def _learning(epochs: Lines) -> Iterator[Drawing]:
    parts = {name.removeprefix("loss_"): name for name in epochs[-1] if name.startswith("loss_")}
    lines = _lines(epochs, {"loss": "loss"} | (parts if len(parts) > 1 else {}))
    if lines:
        yield Drawing(CURVES, "loss", "Loss", "Mean over the steps of an epoch.", _over(epochs, lines, "loss"))
    judged = {"1-NN": "1-nn", "20-NN": "20-nn", "20-NN, weighted": "20-nn weighted", "its own classifier": "classifier"}
    lines = _lines(epochs, judged)
    if lines:
        caption = "Test images classified by the features of the training images, as cmsf evaluate does."
        yield Drawing(CURVES, "accuracy", "Accuracy while training", caption, _over(epochs, lines, "per cent"))


def _related(epochs: Lines) -> Iterator[Drawing]:
    purities = {
        "the nearest in M": "purity_unconstrained",
        "the nearest in C": "purity_constrained",
        "as far out in M": "purity_as_far",
    }
    lines = _lines(epochs, purities)
    if lines:
        caption = (
            "How many of them have the query's true class. As far out: of as many of M's nearest as the median rank of "
            "the last neighbour in C."
        )
        figure = _over(epochs, lines, "purity", share=True)
        yield Drawing(RELATED, "purity", "Purity of neighbours", caption, figure)
    lines = _lines(epochs, {"median": "rank_median", "mean": "rank_mean"})
    if lines:
        caption = "Rank in M of the last neighbour in C, counted from 1, the query itself."
        yield Drawing(RELATED, "rank", "How far out the constraint reaches", caption, _over(epochs, lines, "rank in M"))
    stages = {}
    for line in _stages(epochs):
        near = sum(line["rank_histogram"])
        stages[f"epoch {line['epoch'] + 1}: {near:,} queries"] = binned(line["rank_histogram"], near)
    if stages:
        caption = (
            "Of the queries whose last neighbour in C is among M's first hundred, as many as the legend says, the "
            "share in each bin of five ranks. Epochs in which C was M are left out."
        )
        figure = bars(stages, "rank in M", "share of the queries")
        yield Drawing(RELATED, "rank-histogram", "Ranks by stage of training", caption, figure)


def _guesses(epochs: Lines) -> Iterator[Drawing]:
    named = {
        "right, of all": "pseudo_accuracy_all",
        "right, of the confident": "pseudo_accuracy_confident",
        "confident": "pseudo_share",
    }
    lines = _lines(epochs, named)
    if lines:
        caption = "Of the images without a label: how many the classifier is confident of, and how often it is right."
        figure = _over(epochs, lines, "share", share=True)
        yield Drawing(RELATED, "pseudo-labels", "Pseudo-labels", caption, figure)


def _health(epochs: Lines) -> Iterator[Drawing]:
    lines = _lines(epochs, {"spread": "spread"})
    if lines:
        caption = "1 for embeddings all over the sphere, 0 where all are the same: a collapse."
        yield Drawing(HEALTH, "spread", "Spread of the embeddings", caption, _over(epochs, lines, "spread"))
    lines = _lines(epochs, {"effective rank": "effective_rank"})
    if lines:
        caption = "In how many directions the embeddings of a batch differ."
        yield Drawing(HEALTH, "effective-rank", "Effective rank", caption, _over(epochs, lines, "directions"))
    lines = _lines(epochs, {"images a second": "images_per_second"})
    if lines:
        caption = "Images that were learned from a second, with all that an epoch does besides."
        yield Drawing(HEALTH, "pace", "Pace", caption, _over(epochs, lines, "images / s"))


def _lines(epochs: Lines, names: Mapping[str, str]) -> dict[str, list[float | None]]:
    """The columns that there is anything of, by what they are called."""
    columns = {shown: [line.get(name) for line in epochs] for shown, name in names.items()}
    return {shown: values for shown, values in columns.items() if any(value is not None for value in values)}


def _over(epochs: Lines, lines: Mapping[str, Sequence[float | None]], beside: str, share: bool = False) -> Figure:
    return curves([line["epoch"] + 1 for line in epochs], lines, "epoch", beside, share)


def _stages(epochs: Lines) -> list[Mapping[str, Any]]:
    """The first epoch in which a constraint had a say, the last, and some in between.

    Where it has none yet, C is M, and the last neighbour has the same rank for all.
    """
    counted = [line for line in epochs if sum(map(bool, line.get("rank_histogram") or ())) > 1]
    if len(counted) <= _STAGES:
        return counted
    return [counted[round(place * (len(counted) - 1) / (_STAGES - 1))] for place in range(_STAGES)]
