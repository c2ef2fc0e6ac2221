"""The report's plots: the style they share, and what each one shows of a run's log."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any
from warnings import catch_warnings, filterwarnings

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cmsf.utils.files import atomic_write, make_folder
from cmsf.utils.text import escape_unprintable, shorten

INK, PAPER = "#24292f", "#ffffff"
"""Follow the page from light to dark; other colours should be visible on both."""
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#bf8700", "#8250df", "#1b7c83", "#bc4c00")
"""Visible on white and on black, and distinct in this order."""
GREY = "#6e7781"
CURVES, RELATED, HEALTH = "Curves", "What it calls related", "Health"
"""Sections of the page."""
BIN = 5
"""Ranks that are counted together."""
_LINE_STYLES = ("-", "--", ":", "-.")
"""Each for as many lines as there are colours."""
_LEGEND_INSIDE = 4
"""Names that a legend has room for inside of the axes; more stand below them, in two columns."""
_LONGEST, _HALF, _QUARTER = 40, 28, 14
"""Letters of such a name."""
_LEGEND_CLASSES = 20
_LEGEND_LINE = 0.17
"""Inches."""
_STAGES = 4
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

EpochLines = Sequence[Mapping[str, Any]]
"""The lines of a log, one an epoch."""


@contextmanager
def plot_style(**more: Any) -> Iterator[None]:
    """Applies the page's matplotlib style; a letter that no font has is a box, without a warning."""
    with mpl.rc_context(_STYLE | {key.replace("_", "."): value for key, value in more.items()}), catch_warnings():
        filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        yield


@dataclass(frozen=True)
class Plot:
    """A matplotlib figure with its title and caption.

    section: the heading it stands under, with the other plots of that heading.
    name: unique in its section; the name of its files.
    """

    section: str
    name: str
    title: str
    caption: str
    figure: Figure

    @cached_property
    def svg(self) -> str:
        """SVG from its first tag on, texts left as text, without the time and the machine."""
        with plot_style(svg_hashsalt=self.name, svg_id=self.name):
            written = io.StringIO()
            self.figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        text = written.getvalue()
        return text[text.index("<svg") :]

    def save(self, folder: Path) -> None:
        """Writes a PNG and an SVG."""
        make_folder(folder)
        with atomic_write(folder / f"{self.name}.png") as temporary, plot_style():
            self.figure.savefig(temporary, format="png", dpi=200, facecolor=PAPER)
        with atomic_write(folder / f"{self.name}.svg") as temporary:
            temporary.write_text(self.svg, encoding="utf-8")


def line_plot(
    x: Sequence[float], lines: Mapping[str, Sequence[float | None]], xlabel: str, ylabel: str, share: bool = False
) -> Figure:
    """Draws lines over epochs, without the values that are None. share: values in [0, 1], shown in per cent."""
    with plot_style():
        rows = math.ceil(len(lines) / 2) if len(lines) > _LEGEND_INSIDE else 0
        figure, axes = _axes(xlabel, ylabel, rows * _LEGEND_LINE)
        looks = ((style, colour) for style in cycle(_LINE_STYLES) for colour in COLOURS)
        for (style, colour), (name, values) in zip(looks, lines.items(), strict=False):
            points = [(at, value) for at, value in zip(x, values, strict=True) if value is not None]
            if not points:  # its colour stays its own, in all plots of the page
                continue
            marker = "o" if len(points) < 25 else ""
            label = shorten(escape_unprintable(name), _HALF if rows else _LONGEST)
            axes.plot(*zip(*points, strict=True), style, color=colour, label=label, marker=marker, markersize=3.5)
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


def rank_histogram(counts: Mapping[str, tuple[Sequence[int], int]]) -> Figure:
    """Draws histograms over one another as steps: by name, the counts of ranks 1, 2, … and what they are shares of."""
    with plot_style():
        figure, axes = _axes("rank in M", "share of the queries")
        for colour, (name, (ranks, total)) in zip(cycle(COLOURS), counts.items(), strict=False):
            shares = [sum(ranks[start : start + BIN]) / total for start in range(0, len(ranks), BIN)]
            edges = [BIN * place + 0.5 for place in range(len(shares) + 1)]
            axes.stairs(shares, edges, color=colour, label=name, linewidth=1.6)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.legend(fontsize=8)
        return figure


def scatter_plot(x: Sequence[float], y: Sequence[float], label: Sequence[int], names: Sequence[str]) -> Figure:
    """Draws points in the colours of their classes, with a legend if these are few; points without a class are grey."""
    with plot_style():
        has_legend = len(names) <= _LEGEND_CLASSES
        figure, axes = _axes("", "", math.ceil(len(names) / 4) * _LEGEND_LINE + 1 if has_legend else 1)
        colours = mpl.colormaps["tab20" if len(names) > 10 else "tab10"]
        for number in (-1, *range(len(names))):
            members = [place for place, own in enumerate(label) if own == number]
            if members:
                colour = GREY if number < 0 else colours(number % colours.N)
                name = shorten(escape_unprintable(names[number]), _QUARTER) if number >= 0 else "no class"
                points = [x[place] for place in members], [y[place] for place in members]
                axes.scatter(*points, s=6, color=colour, label=name, linewidths=0)
        axes.set_axis_off()
        if has_legend and names:
            figure.legend(loc="outside lower center", ncols=4, fontsize=8, markerscale=2)
        return figure


def _axes(xlabel: str, ylabel: str, legend_height: float = 0.0) -> tuple[Figure, Axes]:
    """Returns a figure and its axes; legend_height: inches below the axes."""
    figure = Figure(figsize=(5.2, 3.1 + legend_height), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return figure, axes


@dataclass(frozen=True)
class _Curves:
    """A plot of some fields of the log over epochs; keys: by their names in the legend."""

    section: str
    name: str
    title: str
    ylabel: str
    caption: str
    keys: Mapping[str, str]
    share: bool = False


_ACCURACY_AND_NEIGHBOURS = (
    _Curves(
        CURVES,
        "accuracy",
        "Accuracy while training",
        "per cent",
        "Test images classified by the features of the training images, as cmsf evaluate does.",
        {"1-NN": "1-nn", "20-NN": "20-nn", "20-NN, weighted": "20-nn weighted", "its own classifier": "classifier"},
    ),
    _Curves(
        CURVES,
        "judged",
        "What the best epoch is chosen by",
        "per cent",
        "Training images classified by others of them, or the neighbours that two views of an image share.",
        {"held-out labels": "held_out", "agreement of views": "view_agreement"},
    ),
    _Curves(
        RELATED,
        "purity",
        "Purity of neighbours",
        "purity",
        "How many of them have the query's true class. As far out: of as many of M's nearest as the median rank of the "
        "last neighbour in C.",
        {
            "the nearest in M": "purity_unconstrained",
            "the nearest in C": "purity_constrained",
            "as far out in M": "purity_as_far",
        },
        share=True,
    ),
    _Curves(
        RELATED,
        "rank",
        "How far out the constraint reaches",
        "rank in M",
        "Rank in M of the last neighbour in C, counted from 1, the query itself.",
        {"median": "rank_median", "mean": "rank_mean"},
    ),
)
_PSEUDO_LABELS_AND_HEALTH = (
    _Curves(
        RELATED,
        "pseudo-labels",
        "Pseudo-labels",
        "share",
        "Of the images without a label: how many the classifier is confident of, and how often it is right.",
        {
            "right, of all": "pseudo_accuracy_all",
            "right, of the confident": "pseudo_accuracy_confident",
            "confident": "pseudo_share",
        },
        share=True,
    ),
    _Curves(
        HEALTH,
        "spread",
        "Spread of the embeddings",
        "spread",
        "1 for embeddings all over the sphere, 0 where all are the same: a collapse.",
        {"spread": "spread"},
    ),
    _Curves(
        HEALTH,
        "effective-rank",
        "Effective rank",
        "directions",
        "In how many directions the embeddings of a batch differ.",
        {"effective rank": "effective_rank"},
    ),
    _Curves(
        HEALTH,
        "throughput",
        "Throughput",
        "images / s",
        "Training images a second, with all that an epoch does besides.",
        {"images a second": "images_per_second"},
    ),
)


def training_plots(epochs: EpochLines, start: Mapping[str, Any] = MappingProxyType({})) -> list[Plot]:
    """Plots the log of a run; what was never logged is not drawn. start: the figures of the starting weights."""
    if not epochs:
        return []
    parts = {name.removeprefix("loss_"): name for name in epochs[-1] if name.startswith("loss_")}
    keys = {"loss": "loss"} | (parts if len(parts) > 1 else {})
    loss = _Curves(CURVES, "loss", "Loss", "loss", "Mean over the steps of an epoch.", keys)
    return [
        *_plot_curves(epochs, (loss, *_ACCURACY_AND_NEIGHBOURS), start),
        *_plot_rank_histograms(epochs),
        *_plot_curves(epochs, _PSEUDO_LABELS_AND_HEALTH, start),
    ]


def _plot_curves(epochs: EpochLines, plots: Sequence[_Curves], start: Mapping[str, Any]) -> Iterator[Plot]:
    for plot in plots:
        measured = [(line["epoch"] + 1, line) for line in epochs]
        if any(key in start for key in plot.keys.values()):
            measured.insert(0, (0, start))
        columns = {name: [line.get(key) for _, line in measured] for name, key in plot.keys.items()}
        lines = {name: values for name, values in columns.items() if any(value is not None for value in values)}
        if lines:
            figure = line_plot([epoch for epoch, _ in measured], lines, "epoch", plot.ylabel, plot.share)
            yield Plot(plot.section, plot.name, plot.title, plot.caption, figure)


def _plot_rank_histograms(epochs: EpochLines) -> Iterator[Plot]:
    """Plots the first epoch in which a constraint had an effect, the last, and some in between.

    Where it has none yet, C is M, and the last neighbour has the same rank for all.
    """
    lines = [line for line in epochs if sum(map(bool, line.get("rank_histogram") or ())) > 1]
    if len(lines) > _STAGES:
        lines = [lines[round(place * (len(lines) - 1) / (_STAGES - 1))] for place in range(_STAGES)]
    stages = {}
    for line in lines:
        counts = line["rank_histogram"]
        stages[f"epoch {line['epoch'] + 1}: {sum(counts):,} queries"] = (counts, sum(counts))
    if stages:
        caption = (
            "Of the queries whose last neighbour in C is among M's first hundred, as many as the legend says, the "
            "share in each bin of five ranks. Epochs in which C was M are left out."
        )
        yield Plot(RELATED, "rank-histogram", "Ranks by stage of training", caption, rank_histogram(stages))
