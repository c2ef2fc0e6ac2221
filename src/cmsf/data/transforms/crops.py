"""Crops: which box of an image a view shows, and how it is resized."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from cmsf.utils.rng import uniform

DecodedImages = UInt8[Tensor, "b c h w"] | Sequence[Tensor]
"""Decoded images: one tensor where all have one size, else a list of (c, h, w) on the CPU."""

Interpolation = Literal["bilinear", "bicubic"]
CleanCrop = Literal["standard", "small-whole"]
_ATTEMPTS = 10
_BICUBIC_A = -0.5
"""The slope of the cubic kernel at 1: Pillow's, and torch's where it antialiases."""


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
    interpolation: Interpolation = "bilinear"

    draws = 3
    """How often it draws from the stream; the colors of the same view draw after it."""

    def resized(self, height: int, width: int) -> tuple[int, int]:
        return self.size, self.size

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
    """The clean view that leaves small images whole: crops the center to a share of the shorter side, then resizes.

    An image whose shorter side is at most the size loses nothing of it, and one with no side above the size is used
    whole.
    """

    size: int
    crop_pct: float = 0.875
    interpolation: Interpolation = "bilinear"

    def boxes(
        self, height: Int[Tensor, " b"], width: Int[Tensor, " b"], draw: RandomStream
    ) -> tuple[Int[Tensor, "b 4"], Bool[Tensor, " b"]]:
        extent = torch.stack([height, width], dim=1)
        short = extent.amin(1, keepdim=True)
        side = torch.where(short > self.size, (short.double() * self.crop_pct).round().long(), short)
        side = torch.where(extent.amax(1, keepdim=True) <= self.size, extent, side)
        corner = ((extent - side) / 2).round().long()
        return torch.cat([corner, side], dim=1), torch.zeros(len(height), dtype=torch.bool)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        return self.size, self.size

    def describe(self) -> str:
        size = self.size
        return (
            f"an image whose shorter side is above {size} px: its central square with {self.crop_pct:g} of that side, "
            f"resized to {size} × {size}; else one whose longer side is above {size} px: its central square with the "
            f"whole shorter side, resized to {size} × {size}; else all of it, resized to {size} × {size} (sides and "
            "corners rounded to whole pixels, halves to even)"
        )


@dataclass(frozen=True)
class ResizedCenterCrop:
    """The clean view of torchvision and timm: resizes the shorter side to size / crop_pct, then crops the center."""

    size: int
    crop_pct: float = 0.875
    interpolation: Interpolation = "bilinear"

    def boxes(
        self, height: Int[Tensor, " b"], width: Int[Tensor, " b"], draw: RandomStream
    ) -> tuple[Int[Tensor, "b 4"], Bool[Tensor, " b"]]:
        corner = torch.zeros_like(height)
        return torch.stack([corner, corner, height, width], dim=1), torch.zeros(len(height), dtype=torch.bool)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        short, long = self._short_side, int(self._short_side * max(height, width) / min(height, width))
        return (short, long) if height <= width else (long, short)

    def describe(self) -> str:
        return f"shorter side resized to {self._short_side} px, centre crop of {self.size} × {self.size}"

    @property
    def _short_side(self) -> int:
        return math.floor(self.size / self.crop_pct)


_STRIP = 32
"""How often the size of a view the longer side must have, once resized, for an image to be a strip."""
Crop = RandomCrop | CenterCrop | ResizedCenterCrop
"""A box of each image, by `boxes`; the view is the center of that box resized to `resized`."""


def image_sizes(images: DecodedImages) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
    """Returns heights and widths, on the CPU like all parameters of a view."""
    shapes = torch.tensor([tuple(image.shape[-2:]) for image in images])
    return shapes[:, 0], shapes[:, 1]


def crop_and_resize(
    images: UInt8[Tensor, "b c h w"],
    boxes: Int[Tensor, "b 4"],
    size: int,
    flipped: Bool[Tensor, " b"],
    interpolation: Interpolation = "bilinear",
    resized: tuple[int, int] | None = None,
) -> Float[Tensor, "b c s s"]:
    """Resizes each image's box (top, left, height, width) to size × size, in [0, 1], and mirrors where asked.

    Antialiased: `torchvision.transforms.v2.functional.resized_crop`, as two matrix products, which a device does for
    the whole batch at once. resized: height and width that boxes are resized to instead, to show their center.
    """
    boxes = boxes.to(images.device)
    tall, wide = resized or (size, size)
    rows = resize_matrix(boxes[:, 0], boxes[:, 2], images.shape[-2], size, interpolation, tall)
    columns = resize_matrix(boxes[:, 1], boxes[:, 3], images.shape[-1], size, interpolation, wide)
    columns = torch.where(flipped.to(columns.device)[:, None, None], columns.flip(1), columns)
    views = rows[:, None] @ (images.float() / 255) @ columns[:, None].mT
    return views.clamp_(0, 1) if interpolation == "bicubic" else views  # which overshoots at edges


def resized_crop(
    image: UInt8[Tensor, "c h w"],
    box: Int[Tensor, " 4"],
    size: int,
    flipped: bool,
    interpolation: Interpolation = "bilinear",
    resized: tuple[int, int] | None = None,
) -> UInt8[Tensor, "c s s"]:
    """Does the same to one image, rounded to whole grey levels: for images of many sizes, on the CPU.

    Of a strip, an image much longer than wide, the center alone is computed: the whole would fill the memory.
    """
    if resized is not None and max(resized) > _STRIP * size:
        view = crop_and_resize(image[None], box[None], size, torch.tensor([flipped]), interpolation, resized)[0]
        return (255 * view).round_().to(torch.uint8)
    top, left, height, width = box.tolist()
    inside = image[None, :, top : top + height, left : left + width]
    tall, wide = resized or (size, size)
    whole = interpolate(inside, (tall, wide), mode=interpolation, antialias=True)[0]
    top, left = _central_start(tall, size), _central_start(wide, size)
    view = whole[:, top : top + size, left : left + size]
    return view.flip(-1) if flipped else view


def resize_matrix(
    start: Int[Tensor, " b"],
    length: Int[Tensor, " b"],
    extent: int,
    size: int,
    interpolation: Interpolation = "bilinear",
    resized: int | None = None,
) -> Float[Tensor, "b size extent"]:
    """Returns the weight of each input pixel in each output pixel when [start, start + length) has `resized` pixels.

    The central `size` of them, or all, as many, where it is None. A triangle or cubic filter, widened by the scale when
    shrinking; pixels outside of the box weigh nothing.
    """
    precise = torch.float32 if start.device.type == "mps" else torch.float64  # MPS has no float64
    resized = resized or size
    scale = length.to(precise)[:, None, None] / resized
    output = torch.arange(size, device=start.device, dtype=precise)[:, None] + (_central_start(resized, size) + 0.5)
    pixel = torch.arange(extent, device=start.device, dtype=precise) + 0.5 - start[:, None, None]
    distance = (pixel - output * scale).abs() / scale.clamp_min(1)
    weight = _cubic(distance) if interpolation == "bicubic" else (1 - distance).clamp_min(0)
    weight = weight * ((pixel > 0) & (pixel < length[:, None, None]))
    return (weight / weight.sum(2, keepdim=True)).float()


def _cubic(x: Tensor) -> Tensor:
    """Returns Keys's kernel (1981) at distances of 0 and more; from 2 on it is 0."""
    a = _BICUBIC_A
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    return torch.where(x < 1, near, torch.where(x < 2, far, 0))


def _central_start(extent: int, size: int) -> int:
    """Returns where the central `size` pixels begin, rounded as torchvision does."""
    return round((extent - size) / 2)


def scale_to_range(share: Tensor, low: float, high: float) -> Tensor:
    return low + share * (high - low)


def _central_box(height: Tensor, width: Tensor, ratio: tuple[float, float]) -> Int[Tensor, "b 4"]:
    """Returns the largest centered crop whose aspect ratio is allowed."""
    tall = torch.minimum(height, (width / ratio[0]).round().long())
    wide = torch.minimum(width, (height * ratio[1]).round().long())
    return torch.stack([(height - tall) // 2, (width - wide) // 2, tall, wide], dim=1)
