"""Views: batched augmentations on the training device, with parameters of their own for every image.

All randomness is a hash of (seed, epoch, image, view), drawn on the CPU, where a few numbers an image cost nothing
and nobody waits for the device; the pixels are computed where they are. Cropping with resizing, and blurring, are
products with one matrix a direction (separable), which equal torchvision's antialiased operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from cmsf.randomness import uniform

Pictures = UInt8[Tensor, "b c h w"] | Sequence[Tensor]
"""A batch of decoded images: one tensor where all have one size, else a list of (c, h, w)."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_DEVIATION = (0.229, 0.224, 0.225)
_GREY_WEIGHTS = (0.2989, 0.587, 0.114)
_CROP_ATTEMPTS = 10


@dataclass(frozen=True)
class Augmentation:
    """What a random view may do to an image; the defaults are the weak view of the paper."""

    size: int
    crop_scale: tuple[float, float] = (0.2, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: float = 0.0
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    greyscale: float = 0.0
    blur: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)

    def __call__(
        self, pictures: Pictures, index: Int[Tensor, " b"], *, seed: int, epoch: int, view: int
    ) -> Float[Tensor, "b 3 s s"]:
        draw = _Draws(seed, epoch, index.cpu(), view)
        boxes = self._boxes(pictures, draw)
        flipped = draw(1)[:, 0] < self.flip
        images = crop_and_resize(pictures, boxes, self.size, flipped)
        images = self._jittered(images, draw)
        grey = (draw(1)[:, 0] < self.greyscale).to(images.device)
        images = torch.where(grey[:, None, None, None], luminance(images), images)
        images = self._blurred(images, draw)
        return normalise(images)

    def _boxes(self, pictures: Pictures, draw: _Draws) -> Int[Tensor, "b 4"]:
        """Top, left, height and width of a random crop, by torchvision's rule: the first of ten that fits."""
        height, width = sizes(pictures)
        area, ratio = draw(2 * _CROP_ATTEMPTS).double().chunk(2, dim=1)
        area = (height * width)[:, None] * _between(area, *self.crop_scale)
        ratio = torch.exp(_between(ratio, *(math.log(side) for side in self.crop_ratio)))
        tall = (area / ratio).sqrt().round().long()
        wide = (area * ratio).sqrt().round().long()
        fits = (tall >= 1) & (wide >= 1) & (tall <= height[:, None]) & (wide <= width[:, None])
        first = fits.long().argmax(1, keepdim=True)
        tall, wide = tall.gather(1, first)[:, 0], wide.gather(1, first)[:, 0]
        corner = draw(2).double()
        top = (corner[:, 0] * (height - tall + 1)).long()
        left = (corner[:, 1] * (width - wide + 1)).long()
        fallback = _central_box(height, width, self.crop_ratio)
        return torch.where(fits.any(1, keepdim=True), torch.stack([top, left, tall, wide], dim=1), fallback)

    def _jittered(self, images: Tensor, draw: _Draws) -> Tensor:
        """Brightness, contrast, saturation and hue in an order of each image's own."""
        applied = draw(1)[:, 0] < self.jitter
        order = draw(4).argsort(1)
        amount = _between(draw(4), -1.0, 1.0)
        if not self.jitter:
            return images
        colour = images.shape[1] == 3
        operations = [
            (0, brightened, 1 + amount[:, 0] * self.brightness),
            (1, contrasted, 1 + amount[:, 1] * self.contrast),
            # A grey image has no saturation and no hue to change.
            *([(2, saturated, 1 + amount[:, 2] * self.saturation)] if colour else []),
            *([(3, hue_shifted, amount[:, 3] * self.hue)] if colour else []),
        ]
        images = images.clone()
        for turn in range(4):
            for number, operation, factor in operations:
                chosen = (applied & (order[:, turn] == number)).nonzero()[:, 0]
                if len(chosen):
                    amount_here, chosen = factor[chosen].to(images.device), chosen.to(images.device)
                    images[chosen] = operation(images[chosen], amount_here)
        return images

    def _blurred(self, images: Tensor, draw: _Draws) -> Tensor:
        chosen = (draw(1)[:, 0] < self.blur).nonzero()[:, 0]
        sigma = _between(draw(1)[:, 0], *self.blur_sigma)
        if len(chosen):
            sigma, chosen = sigma[chosen].to(images.device), chosen.to(images.device)
            images = images.clone()
            images[chosen] = blurred(images[chosen], sigma, blur_kernel_size(self.size))
        return images


class _Draws:
    """Successive random numbers for a batch, each image's own."""

    def __init__(self, seed: int, epoch: int, index: Tensor, view: int) -> None:
        self.key = (seed, epoch, index, view)
        self.calls = 0

    def __call__(self, count: int) -> Float[Tensor, "b count"]:
        self.calls += 1
        return uniform(count, *self.key, self.calls)


def clean_view(pictures: Pictures, size: int) -> Float[Tensor, "b 3 s s"]:
    """The view for evaluation: resize the shorter side to 256/224 of the size and crop the centre.

    An image with no side above the size is used whole.
    """
    extent = torch.stack(sizes(pictures), dim=1)
    short = extent.amin(1, keepdim=True)
    side = torch.where(short > size, (short * 224 / 256).round().long(), short)
    side = torch.where(extent.amax(1, keepdim=True) <= size, extent, side)
    corner = ((extent - side) / 2).round().long()
    boxes = torch.cat([corner, side], dim=1)
    return normalise(crop_and_resize(pictures, boxes, size))


def sizes(pictures: Pictures) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
    """Heights and widths, on the CPU like all parameters of a view."""
    shapes = torch.tensor([tuple(picture.shape[-2:]) for picture in pictures])
    return shapes[:, 0], shapes[:, 1]


def normalise(images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 3 h w"]:
    """ImageNet's mean and deviation; a grey image becomes three equal channels first."""
    mean = torch.tensor(IMAGENET_MEAN, device=images.device).view(3, 1, 1)
    deviation = torch.tensor(IMAGENET_DEVIATION, device=images.device).view(3, 1, 1)
    return ((images - mean) / deviation).contiguous(memory_format=torch.channels_last)


def crop_and_resize(
    pictures: Pictures, boxes: Int[Tensor, "b 4"], size: int, flipped: Bool[Tensor, " b"] | None = None
) -> Float[Tensor, "b c s s"]:
    """Each image's box (top, left, height, width) at size × size, in [0, 1]; mirrored where asked.

    Bilinear and antialiased: `torchvision.transforms.v2.functional.resized_crop`, as two matrix products.
    """
    if isinstance(pictures, Tensor):
        boxes = boxes.to(pictures.device)
        rows = resizing_matrix(boxes[:, 0], boxes[:, 2], pictures.shape[-2], size)
        columns = resizing_matrix(boxes[:, 1], boxes[:, 3], pictures.shape[-1], size)
        if flipped is not None:
            columns = torch.where(flipped.to(columns.device)[:, None, None], columns.flip(1), columns)
        return rows[:, None] @ (pictures.float() / 255) @ columns[:, None].mT
    every = range(len(pictures))
    one_by_one = [
        crop_and_resize(pictures[i][None], boxes[i : i + 1], size, None if flipped is None else flipped[i : i + 1])
        for i in every
    ]
    widest = max(image.shape[1] for image in one_by_one)
    return torch.cat([image.expand(-1, widest, -1, -1) for image in one_by_one])


def resizing_matrix(
    start: Int[Tensor, " b"], length: Int[Tensor, " b"], extent: int, size: int
) -> Float[Tensor, "b size extent"]:
    """What each input pixel adds to each output pixel when [start, start + length) is drawn at `size` pixels.

    A triangle filter, widened by the scale when shrinking; pixels outside of the box weigh nothing.
    """
    precise = torch.float32 if start.device.type == "mps" else torch.float64  # MPS has no float64
    scale = length.to(precise)[:, None, None] / size
    output = torch.arange(size, device=start.device, dtype=precise)[:, None] + 0.5
    pixel = torch.arange(extent, device=start.device, dtype=precise) + 0.5 - start[:, None, None]
    weight = (1 - (pixel - output * scale).abs() / scale.clamp_min(1)).clamp_min(0)
    weight = weight * ((pixel > 0) & (pixel < length[:, None, None]))
    return (weight / weight.sum(2, keepdim=True)).float()


def luminance(images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 1 h w"]:
    if images.shape[1] == 1:
        return images
    weights = torch.tensor(_GREY_WEIGHTS, device=images.device).view(3, 1, 1)
    return (images * weights).sum(1, keepdim=True)


def brightened(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, torch.zeros_like(images), factor)


def contrasted(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, luminance(images).mean((1, 2, 3), keepdim=True), factor)


def saturated(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, luminance(images), factor)


def hue_shifted(images: Float[Tensor, "b 3 h w"], shift: Float[Tensor, " b"]) -> Float[Tensor, "b 3 h w"]:
    """Turn the hue by a part of the circle: with v = max and chroma = max - min, each channel is a piecewise
    linear function of the hue, so no sextants have to be told apart on the way back."""
    value, _ = images.max(1, keepdim=True)
    least, _ = images.min(1, keepdim=True)
    chroma = value - least
    red, green, blue = images.unbind(1)
    divisor = torch.where(chroma == 0, 1, chroma)[:, 0]
    top = value[:, 0]
    hue = torch.where(
        top == red,
        (green - blue) / divisor,
        torch.where(top == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue = hue + 6 * shift[:, None, None]
    turned = (hue[:, None] + torch.tensor([5.0, 3.0, 1.0], device=images.device).view(3, 1, 1)).remainder(6)
    return value - chroma * torch.minimum(turned, 4 - turned).clamp(0, 1)


def blur_kernel_size(size: int) -> int:
    """A tenth of the image, odd, and at least 3: SimCLR's choice (23 pixels at 224)."""
    return max(3, size // 10 + (size // 10 + 1) % 2)


def blurred(images: Tensor, sigma: Float[Tensor, " b"], kernel_size: int) -> Tensor:
    """Gaussian blur with a deviation for each image and mirrored borders, as two matrix products."""
    rows = _blurring_matrix(sigma, images.shape[-2], kernel_size)
    columns = _blurring_matrix(sigma, images.shape[-1], kernel_size)
    return rows[:, None] @ images @ columns[:, None].mT


def _blurring_matrix(sigma: Tensor, extent: int, kernel_size: int) -> Float[Tensor, "b extent extent"]:
    reach = kernel_size // 2
    offset = torch.arange(-reach, reach + 1, device=sigma.device)
    kernel = torch.exp(-0.5 * (offset / sigma[:, None]) ** 2)
    kernel = kernel / kernel.sum(1, keepdim=True)
    source = torch.arange(extent, device=sigma.device)[:, None] + offset
    source = source.abs()
    source = torch.where(source >= extent, 2 * (extent - 1) - source, source)
    matrix = torch.zeros(len(sigma), extent, extent, device=sigma.device)
    return matrix.scatter_add_(2, source.expand(len(sigma), -1, -1), kernel[:, None].expand(-1, extent, -1))


def _blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    factor = factor[:, None, None, None]
    return (factor * images + (1 - factor) * other).clamp(0, 1)


def _between(share: Tensor, low: float, high: float) -> Tensor:
    return low + share * (high - low)


def _central_box(height: Tensor, width: Tensor, ratio: tuple[float, float]) -> Int[Tensor, "b 4"]:
    """The largest centred crop whose aspect ratio is allowed."""
    tall = torch.minimum(height, (width / ratio[0]).round().long())
    wide = torch.minimum(width, (height * ratio[1]).round().long())
    return torch.stack([(height - tall) // 2, (width - wide) // 2, tall, wide], dim=1)
