"""Crops: which box of an image a view shows, and how it is resized."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from cmsf.utils.rng import uniform

DecodedImages = UInt8[Tensor, "b c h w"] | Sequence[Tensor]
"""Decoded images: one tensor where all have one size, else a list of (c, h, w) on the CPU."""

_ATTEMPTS = 10


class RandomStream:
    """Successive random numbers of each image of a batch: a hash of (seed, epoch, image, view) and a counter."""

    def __init__(self, seed: int, epoch: int, index: Int[Tensor, " b"], view: int, counter: int = 0) -> None:
        self.key = (seed, epoch, index.cpu(), view)
        self.counter = counter

    def __call__(self, count: int) -> Float[Tensor, "b count"]:
        self.counter += 1
        return uniform(count, *self.key, self.counter)


@dataclass(frozen=True)
class RandomCrop:
    """A box of random share and shape, mirrored or not: torchvision's RandomResizedCrop and RandomHorizontalFlip."""

    size: int
    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5

    draws = 3
    """How often it draws from the stream; the colors of the same view draw after it."""

    def boxes(
        self, height: Int[Tensor, " b"], width: Int[Tensor, " b"], draw: RandomStream
    ) -> tuple[Int[Tensor, "b 4"], Bool[Tensor, " b"]]:
        """Returns boxes by torchvision's rule, the first of ten that fits, and which images are mirrored."""
        area, ratio = draw(2 * _ATTEMPTS).double().chunk(2, dim=1)
        area = (height * width)[:, None] * scale_to_range(area, *self.scale)
        ratio = torch.exp(scale_to_range(ratio, *(math.log(side) for side in self.ratio)))
        tall = (area / ratio).sqrt().round().long()
        wide = (area * ratio).sqrt().round().long()
        fits = (tall >= 1) & (wide >= 1) & (tall <= height[:, None]) & (wide <= width[:, None])
        first = fits.long().argmax(1, keepdim=True)
        tall, wide = tall.gather(1, first)[:, 0], wide.gather(1, first)[:, 0]
        corner = draw(2).double()
        top = (corner[:, 0] * (height - tall + 1)).long()
        left = (corner[:, 1] * (width - wide + 1)).long()
        fallback = _central_box(height, width, self.ratio)
        boxes = torch.where(fits.any(1, keepdim=True), torch.stack([top, left, tall, wide], dim=1), fallback)
        return boxes, draw(1)[:, 0] < self.flip


@dataclass(frozen=True)
class CenterCrop:
    """The view for evaluation: resizes the shorter side to 256/224 of the size and crops the center.

    An image with no side above the size is used whole.
    """

    size: int

    def boxes(
        self, height: Int[Tensor, " b"], width: Int[Tensor, " b"], draw: RandomStream
    ) -> tuple[Int[Tensor, "b 4"], Bool[Tensor, " b"]]:
        extent = torch.stack([height, width], dim=1)
        short = extent.amin(1, keepdim=True)
        side = torch.where(short > self.size, (short * 224 / 256).round().long(), short)
        side = torch.where(extent.amax(1, keepdim=True) <= self.size, extent, side)
        corner = ((extent - side) / 2).round().long()
        return torch.cat([corner, side], dim=1), torch.zeros(len(height), dtype=torch.bool)


Crop = RandomCrop | CenterCrop


def image_sizes(images: DecodedImages) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
    """Returns heights and widths, on the CPU like all parameters of a view."""
    shapes = torch.tensor([tuple(image.shape[-2:]) for image in images])
    return shapes[:, 0], shapes[:, 1]


def crop_and_resize(
    images: UInt8[Tensor, "b c h w"], boxes: Int[Tensor, "b 4"], size: int, flipped: Bool[Tensor, " b"]
) -> Float[Tensor, "b c s s"]:
    """Resizes each image's box (top, left, height, width) to size × size, in [0, 1], and mirrors where asked.

    Bilinear and antialiased: `torchvision.transforms.v2.functional.resized_crop`, as two matrix products, which a
    device does for the whole batch at once.
    """
    boxes = boxes.to(images.device)
    rows = resize_matrix(boxes[:, 0], boxes[:, 2], images.shape[-2], size)
    columns = resize_matrix(boxes[:, 1], boxes[:, 3], images.shape[-1], size)
    columns = torch.where(flipped.to(columns.device)[:, None, None], columns.flip(1), columns)
    return rows[:, None] @ (images.float() / 255) @ columns[:, None].mT


def resized_crop(
    image: UInt8[Tensor, "c h w"], box: Int[Tensor, " 4"], size: int, flipped: bool
) -> UInt8[Tensor, "c s s"]:
    """Resizes one image's box to size × size, rounded to whole grey levels: for images of many sizes, on the CPU."""
    top, left, height, width = box.tolist()
    inside = image[None, :, top : top + height, left : left + width]
    resized = interpolate(inside, (size, size), mode="bilinear", antialias=True)[0]
    return resized.flip(-1) if flipped else resized


def resize_matrix(
    start: Int[Tensor, " b"], length: Int[Tensor, " b"], extent: int, size: int
) -> Float[Tensor, "b size extent"]:
    """Returns the weight of each input pixel in each output pixel when [start, start + length) has `size` pixels.

    A triangle filter, widened by the scale when shrinking; pixels outside of the box weigh nothing.
    """
    precise = torch.float32 if start.device.type == "mps" else torch.float64  # MPS has no float64
    scale = length.to(precise)[:, None, None] / size
    output = torch.arange(size, device=start.device, dtype=precise)[:, None] + 0.5
    pixel = torch.arange(extent, device=start.device, dtype=precise) + 0.5 - start[:, None, None]
    weight = (1 - (pixel - output * scale).abs() / scale.clamp_min(1)).clamp_min(0)
    weight = weight * ((pixel > 0) & (pixel < length[:, None, None]))
    return (weight / weight.sum(2, keepdim=True)).float()


def scale_to_range(share: Tensor, low: float, high: float) -> Tensor:
    return low + share * (high - low)


def _central_box(height: Tensor, width: Tensor, ratio: tuple[float, float]) -> Int[Tensor, "b 4"]:
    """Returns the largest centered crop whose aspect ratio is allowed."""
    tall = torch.minimum(height, (width / ratio[0]).round().long())
    wide = torch.minimum(width, (height * ratio[1]).round().long())
    return torch.stack([(height - tall) // 2, (width - wide) // 2, tall, wide], dim=1)
