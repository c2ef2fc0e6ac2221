"""RandAugment with cutout: FixMatch's strong view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from cmsf.data.transforms import color
from cmsf.data.transforms.augmentation import Augmentation
from cmsf.data.transforms.crops import RandomStream, scale_to_range

_OPERATIONS_EACH = 2
_MAX_CUTOUT = 0.5
_GREY = 0.5


@dataclass(frozen=True)
class RandAugment(Augmentation):
    """Two random operations of random magnitude, then a grey square (Sohn et al. 2020, appendix on augmentation).

    The table and the cutout are the paper's. The code of its authors differs: it skips an operation half of the time,
    blends by 0.28 to 1.72, posterises to 4 bits or fewer, fills with grey what comes from outside of the image, takes
    the nearest pixel, and cuts out 16 pixels. Here what comes from outside is black, and pixels are interpolated.
    """

    def _distort(self, images: Tensor, draw: RandomStream) -> Tensor:
        # A float32 just below 1 may not be multiplied up to the number of operations.
        drawn = (draw(_OPERATIONS_EACH).double() * len(OPERATIONS)).long()
        share = draw(_OPERATIONS_EACH)
        # A copy to write to; resizing may have rounded white to a little more than 1.
        images = images.clamp(0, 1)
        for turn in range(_OPERATIONS_EACH):
            for number, (apply, low, high) in enumerate(OPERATIONS.values()):
                chosen = (drawn[:, turn] == number).nonzero()[:, 0]
                if len(chosen):
                    magnitude = scale_to_range(share[chosen, turn], low, high).to(images.device)
                    chosen = chosen.to(images.device)
                    images[chosen] = apply(images[chosen], magnitude)
        side, row, column = draw(3).to(images.device).unbind(1)
        return cutout(images, side * _MAX_CUTOUT, row, column)


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Turns images anticlockwise about the center."""
    sine, cosine = degrees.deg2rad().sin(), degrees.deg2rad().cos()
    return _affine(images, {(0, 0): cosine, (0, 1): -sine, (1, 0): sine, (1, 1): cosine})


def cutout(
    images: Float[Tensor, "b c s s"], side: Float[Tensor, " b"], row: Float[Tensor, " b"], column: Float[Tensor, " b"]
) -> Float[Tensor, "b c s s"]:
    """Puts a grey square over the pixels whose centers are inside; side and center are shares of the image's side."""
    pixel = (torch.arange(images.shape[-1], device=images.device) + 0.5) / images.shape[-1]
    down = (pixel - row[:, None]).abs() < side[:, None] / 2
    across = (pixel - column[:, None]).abs() < side[:, None] / 2
    return images.masked_fill(down[:, None, :, None] & across[:, None, None, :], _GREY)


def _affine(images: Tensor, entries: dict[tuple[int, int], Tensor]) -> Tensor:
    """Takes each output pixel from where a matrix of each image's own sends it, in coordinates from -1 to 1.

    `entries` are those that are not the identity's, by row and column.
    """
    matrix = torch.eye(2, 3, device=images.device).repeat(len(images), 1, 1)
    for (row, column), value in entries.items():
        matrix[:, row, column] = value
    grid = affine_grid(matrix, list(images.shape), align_corners=False)
    # The weights of four pixels may add up to a little more than 1.
    return grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False).clamp(0, 1)


class Operation(NamedTuple):
    """A function of images and a magnitude each, and the range that the magnitude is drawn from."""

    apply: Callable[[Tensor, Tensor], Tensor]
    low: float = 0.0
    high: float = 0.0


OPERATIONS = {
    "autocontrast": Operation(lambda images, _: color.autocontrast(images)),
    "brightness": Operation(color.adjust_brightness, 0.05, 0.95),
    "colour": Operation(color.adjust_saturation, 0.05, 0.95),
    "contrast": Operation(color.adjust_contrast, 0.05, 0.95),
    "equalise": Operation(lambda images, _: color.equalize(images)),
    "identity": Operation(lambda images, _: images),
    # Every whole number from 4 to 8 is as likely.
    "posterise": Operation(lambda images, bits: color.posterize(images, bits.round()), 3.5, 8.5),
    "rotate": Operation(rotate, -30.0, 30.0),
    "sharpness": Operation(color.adjust_sharpness, 0.05, 0.95),
    # Rows move to the left, or columns up, by their distance from the first times the slope.
    "shear x": Operation(lambda images, slope: _affine(images, {(0, 1): slope, (0, 2): slope}), -0.3, 0.3),
    "shear y": Operation(lambda images, slope: _affine(images, {(1, 0): slope, (1, 2): slope}), -0.3, 0.3),
    "solarise": Operation(color.solarize, 0.0, 1.0),
    # To the right, or down, by a share of the side, which is 2 in these coordinates.
    "translate x": Operation(lambda images, share: _affine(images, {(0, 2): -2 * share}), -0.3, 0.3),
    "translate y": Operation(lambda images, share: _affine(images, {(1, 2): -2 * share}), -0.3, 0.3),
}
