"""Thumbnails with captions on a sheet, for every kind of gallery."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import UInt8
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from torch import Tensor

from cmsf.data.transforms import resized_crop
from cmsf.utils.files import atomic_write
from cmsf.utils.text import escape_unprintable

THUMBNAIL = 96
_FONTS = (
    "DejaVu Sans",
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans", "Microsoft YaHei"),
    *("Noto Sans Arabic", "Noto Sans Devanagari", "Arial Unicode MS"),
)
"""Tried in turn for each letter, where they are installed; matplotlib brings the first along."""
PLAIN, WRONG = "#57606a", "#cf222e"
Align = Literal["left", "center", "right"]
_LONGEST_NAME = 16


class Sheet:
    """Pictures and text on one pair of axes, in inches from the upper left corner.

    Separate axes for every picture, as is usual in matplotlib, take five times as long.
    """

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width, height))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")

    def show(self, x: float, y: float, picture: UInt8[Tensor, "c h w"], colour: str | None = None) -> None:
        """Draws a thumbnail one inch wide, with a frame where a colour is given."""
        self.axes.imshow(thumbnail(picture), interpolation="nearest", extent=(x, x + 1, y + 1, y), aspect="auto")
        if colour is not None:
            self.axes.add_patch(Rectangle((x, y), 1, 1, fill=False, edgecolor=colour, linewidth=2.5, clip_on=False))

    def write(self, x: float, y: float, text: str, size: float, colour: str = "black", align: Align = "center") -> None:
        """Writes text, vertically centred; it is data, so a $ in it does not begin a formula."""
        self.axes.text(x, y, text, ha=align, va="center", fontsize=size, color=colour, parse_math=False, family=fonts())

    def save(self, out: Path) -> None:
        save_figure(self.figure, out)


def thumbnail(picture: UInt8[Tensor, "c h w"]) -> NDArray[np.uint8]:
    """Returns the central square as an RGB array, at most 96 pixels a side."""
    height, width = picture.shape[1:]
    side = min(height, width)
    box = torch.tensor([(height - side) // 2, (width - side) // 2, side, side])
    pixels = resized_crop(picture, box, min(THUMBNAIL, side), flipped=False)
    shown: NDArray[np.uint8] = pixels.expand(3, -1, -1).permute(1, 2, 0).numpy()
    return shown


@cache
def fonts() -> list[str]:
    installed = set(get_font_names())
    return [font for font in _FONTS if font in installed]


def shortened(name: str) -> str:
    """Returns a name in one short line, with unprintable characters escaped."""
    name = escape_unprintable(name[: _LONGEST_NAME + 1])
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def save_figure(figure: Figure, out: Path) -> None:
    """Saves as SVG where the name says so, else as PNG; the same figure gives the same file."""
    form = "svg" if out.suffix.lower() == ".svg" else "png"
    metadata = {"Date": None} if form == "svg" else {}
    with atomic_write(out) as temporary, warnings.catch_warnings(), rc_context({"svg.hashsalt": "cmsf"}):
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)  # a script without a font
        figure.savefig(temporary, format=form, dpi=110, bbox_inches="tight", facecolor="white", metadata=metadata)
