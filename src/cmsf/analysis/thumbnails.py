"""Small pictures with names under them, for every kind of gallery."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from numpy.typing import NDArray
from torch import Tensor

from cmsf.files import atomically
from cmsf.views import cut

THUMBNAIL = 96
_FONTS = (
    "DejaVu Sans",
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans", "Microsoft YaHei"),
    *("Noto Sans Arabic", "Noto Sans Devanagari", "Arial Unicode MS"),
)
"""Tried in turn for each letter, as far as the machine has them; matplotlib brings the first along."""
PLAIN = "#57606a"
_LONGEST_NAME = 16


def thumbnail(picture: UInt8[Tensor, "c h w"]) -> NDArray[np.uint8]:
    """The central square, at most 96 pixels a side, as rows of red, green and blue."""
    height, width = picture.shape[1:]
    side = min(height, width)
    box = torch.tensor([(height - side) // 2, (width - side) // 2, side, side])
    pixels = cut(picture, box, min(THUMBNAIL, side), flipped=False)
    shown: NDArray[np.uint8] = pixels.expand(3, -1, -1).permute(1, 2, 0).numpy()
    return shown


def show_image(axes: Axes, pixels: NDArray[np.uint8], name: str = "", colour: str | None = None) -> None:
    axes.imshow(pixels, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(colour is not None)
        spine.set_color(colour or PLAIN)
        spine.set_linewidth(2.5)
    if name:
        # The name is data, not mathematics: a $ in it must not be set as a formula.
        axes.set_xlabel(shortened(name), fontsize=8, color=colour, labelpad=2, parse_math=False, family=fonts())


@cache
def fonts() -> list[str]:
    installed = set(get_font_names())
    return [font for font in _FONTS if font in installed]


def shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def save_figure(figure: Figure, out: Path) -> None:
    with atomically(out) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)  # a script without a font
        figure.savefig(temporary, format="png", dpi=110, bbox_inches="tight", facecolor="white")
