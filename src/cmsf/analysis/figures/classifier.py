"""Figures of a classifier: the confusion matrix, and the reliability diagram."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Int
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from cmsf.analysis.figures.thumbnails import fonts, save_figure, shortened
from cmsf.evaluation.metrics import Calibration

_NUMBERED, _FEW, _NAMED = 20, 60, 250
"""Up to how many classes cells have numbers, names are large, and there are names at all."""
_LARGEST = 24.0
_LIGHT, _DARK = "#fefefe", "#1f2328"
"""Not white and the report's text colour, which are swapped on a dark page, while the cells are not."""
_BAR, _LINE = "#4493f8", "#57606a"


def draw_confusion(counts: Int[Tensor, "c c"], names: Sequence[str], out: Path) -> None:
    """Saves the confusion matrix of test images."""
    figure = confusion_figure(counts, names)
    figure.suptitle(f"{int(counts.sum()):,} test images, % of each true class", fontsize=10)
    save_figure(figure, out)


def confusion_figure(counts: Int[Tensor, "c c"], names: Sequence[str]) -> Figure:
    """Draws a row per true class and a column per predicted class; darkness is the share of the row, per cent."""
    classes = len(names)
    cell, letters = (0.5, 9) if classes <= _NUMBERED else (0.24, 8) if classes <= _FEW else (0.11, 6)
    side = min(_LARGEST, max(2.8, cell * classes))
    share = 100 * counts.double() / counts.sum(1, keepdim=True).clamp_min(1)
    figure = Figure(figsize=(side + 1.6, side + 1.2), layout="constrained")
    axes = figure.add_subplot()
    # By the root of the share, so that a twentieth of a class can be seen.
    image = axes.imshow(share.numpy(), cmap="Blues", norm=PowerNorm(0.5, 0, 100), interpolation="nearest")
    if classes <= _NAMED:
        shown = [shortened(name) for name in names]
        style: dict[str, Any] = {"fontsize": letters, "family": fonts(), "parse_math": False}
        axes.set_xticks(range(classes), shown, rotation=90 if classes > 2 else 0, **style)
        axes.set_yticks(range(classes), shown, **style)
    axes.tick_params(length=0, pad=2)
    if classes <= _NUMBERED:
        for row, line in enumerate(share.tolist()):
            for column, value in enumerate(line):
                if counts[row, column]:
                    colour = _LIGHT if value > 35 else _DARK
                    axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=colour)
    else:
        figure.colorbar(image, ax=axes, shrink=min(1.0, 4 / side), aspect=24, pad=0.02, ticks=[0, 1, 5, 20, 50, 100])
    axes.set_xlabel("predicted", fontsize=11)
    axes.set_ylabel("true", fontsize=11)
    axes.grid(visible=False)
    return figure


def draw_reliability(calibration: Calibration, out: Path) -> None:
    """Draws each bin's accuracy against its mean confidence, and below, its share of the images."""
    figure = Figure(figsize=(4.6, 5.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    filled = [bin_ for bin_ in calibration.bins if bin_.accuracy is not None]
    left, width = [100 * bin_.low for bin_ in filled], [100 * (bin_.high - bin_.low) for bin_ in filled]
    accuracy = [100 * (bin_.accuracy or 0) for bin_ in filled]
    confidence = [100 * (bin_.confidence or 0) for bin_ in filled]
    above.bar(left, accuracy, width, align="edge", color=_BAR, edgecolor="white", label="share that is right")
    above.plot([0, 100], [0, 100], color=_LINE, linestyle="--", linewidth=1, label="as sure as right")
    above.plot(confidence, accuracy, "o", color="#0a3069", markersize=3.5, label="mean confidence of the bin")
    above.set_ylabel("accuracy, %")
    above.set_ylim(0, 102)
    above.legend(loc="upper left", fontsize=8, frameon=False)
    images = [bin_.images for bin_ in filled]
    above.set_title(
        f"{sum(images):,} test images, expected calibration error {calibration.error:.1f} %,\n"
        f"negative log-likelihood {calibration.negative_log_likelihood:.3f}",
        fontsize=10,
    )
    share = [100 * count / sum(images) for count in images]
    below.bar(left, share, width, align="edge", color=_LINE, edgecolor="white")
    below.set_ylabel("images, %")
    below.set_xlabel("confidence, %")
    below.set_xlim(0, 100)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, out)
