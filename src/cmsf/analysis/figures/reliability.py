"""Reliability diagram: a classifier's accuracy by its confidence."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from cmsf.analysis.figures.thumbnails import save_figure
from cmsf.evaluation.calibration import Calibration

_BAR, _LINE = "#4493f8", "#57606a"


def draw_reliability(calibration: Calibration, out: Path) -> None:
    """Draws each bin's accuracy against its mean confidence, and below, its share of the images."""
    figure = Figure(figsize=(4.6, 5.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    filled = [each for each in calibration.bins if each.accuracy is not None]
    left, width = [100 * each.low for each in filled], [100 * (each.high - each.low) for each in filled]
    accuracy = [100 * each.accuracy for each in filled if each.accuracy is not None]
    confidence = [100 * each.confidence for each in filled if each.confidence is not None]
    above.bar(left, accuracy, width, align="edge", color=_BAR, edgecolor="white", label="share that is right")
    above.plot([0, 100], [0, 100], color=_LINE, linestyle="--", linewidth=1, label="as sure as right")
    above.plot(confidence, accuracy, "o", color="#0a3069", markersize=3.5, label="mean confidence of the bin")
    above.set_ylabel("accuracy, %")
    above.set_ylim(0, 102)
    above.legend(loc="upper left", fontsize=8, frameon=False)
    images = [each.images for each in filled]
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
