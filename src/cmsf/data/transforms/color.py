"""Changes of color, light and sharpness, each with its own parameter for every image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv2d, pad

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_GREY_WEIGHTS = (0.2989, 0.587, 0.114)


def normalize_pixels(
    images: Float[Tensor, "b c h w"], mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD
) -> Float[Tensor, "b 3 h w"]:
    """Normalizes by mean and standard deviation of the channels; grey becomes three equal ones first."""
    means = torch.tensor(mean, device=images.device).view(3, 1, 1)
    deviations = torch.tensor(std, device=images.device).view(3, 1, 1)
    return ((images - means) / deviations).contiguous(memory_format=torch.channels_last)


def to_grayscale(images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 1 h w"]:
    if images.shape[1] == 1:
        return images
    weights = torch.tensor(_GREY_WEIGHTS, device=images.device).view(3, 1, 1)
    return (images * weights).sum(1, keepdim=True)


def adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, torch.zeros_like(images), factor)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, to_grayscale(images).mean((1, 2, 3), keepdim=True), factor)


def adjust_saturation(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, to_grayscale(images), factor)


def adjust_hue(images: Float[Tensor, "b 3 h w"], shift: Float[Tensor, " b"]) -> Float[Tensor, "b 3 h w"]:
    """Turns the hue by a part of the circle: with v = max and chroma = max - min, each channel is a piecewise
    linear function of the hue, so no sextants have to be told apart on the way back."""
    red, green, blue = images.unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    by_red, by_green = value == red, value == green
    across = torch.where(by_red, green - blue, torch.where(by_green, blue - red, red - green))
    sextant = torch.where(by_red, 0.0, torch.where(by_green, 2.0, 4.0))
    hue = across / torch.where(chroma == 0, 1, chroma) + sextant + 6 * shift[:, None, None]
    turned_images = torch.empty_like(images)
    for channel, offset in enumerate((5.0, 3.0, 1.0)):
        turned = hue + offset
        turned = turned - 6 * torch.floor(turned / 6)
        turned_images[:, channel] = value - chroma * torch.minimum(turned, 4 - turned).clamp_(0, 1)
    return turned_images


def solarize(images: Float[Tensor, "b c h w"], threshold: Float[Tensor, " b"]) -> Float[Tensor, "b c h w"]:
    """Inverts pixels from the threshold upwards."""
    return torch.where(images >= threshold[:, None, None, None], 1 - images, images)


def posterize(images: Float[Tensor, "b c h w"], bits: Float[Tensor, " b"]) -> Float[Tensor, "b c h w"]:
    """Rounds down to two to the power of `bits` levels."""
    levels = torch.exp2(bits)[:, None, None, None]
    return torch.minimum((images * levels).floor(), levels - 1) / levels


def adjust_sharpness(images: Float[Tensor, "b c h w"], factor: Float[Tensor, " b"]) -> Float[Tensor, "b c h w"]:
    """Moves away from the smoothed image, or towards it where the factor is below 1; the outermost pixels stay."""
    kernel = torch.ones(3, 3, device=images.device)
    kernel[1, 1] = 5
    channels = images.shape[1]
    smooth = images.clone()
    smooth[..., 1:-1, 1:-1] = conv2d(images, (kernel / kernel.sum()).expand(channels, 1, 3, 3), groups=channels)
    return _blend(images, smooth, factor)


def autocontrast(images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Stretches each channel from black to white."""
    darkest, brightest = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    # What differs by less than a grey level is flat but for rounding, which must not be stretched.
    flat = (brightest - darkest) * 255 < 0.5
    return torch.where(flat, images, (images - darkest) / torch.where(flat, 1, brightest - darkest))


def equalize(images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Spreads each channel's grey levels by how many pixels are darker: Pillow's rule, in whole numbers."""
    level = (images * 255).round().long().flatten(2)
    count = torch.zeros(*level.shape[:2], 256, dtype=torch.int32, device=level.device)
    count.scatter_add_(2, level, torch.ones_like(level, dtype=torch.int32))
    darker = count.cumsum(2) - count
    step = darker.gather(2, level.amax(2, keepdim=True)) // 255
    spread = ((darker + step // 2) // step.clamp_min(1)).clamp_max(255).gather(2, level)
    return torch.where(step > 0, spread, level).view_as(images) / 255


def blur_kernel_size(size: int) -> int:
    """Returns a tenth of the image, odd, and at least 3: SimCLR's choice (23 pixels at 224)."""
    return max(3, size // 10 + (size // 10 + 1) % 2)


def gaussian_blur(
    images: Float[Tensor, "b c h w"], sigma: Float[Tensor, " b"], kernel_size: int
) -> Float[Tensor, "b c h w"]:
    """Blurs with a sigma for each image and mirrored borders, down and then across."""
    reach = kernel_size // 2
    offset = torch.arange(-reach, reach + 1, device=sigma.device)
    kernel = torch.exp(-0.5 * (offset / sigma[:, None]) ** 2)
    kernel = kernel / kernel.sum(1, keepdim=True)
    # Every channel of every image is a group with a kernel of its own.
    groups = len(images) * images.shape[1]
    kernel = kernel.repeat_interleave(images.shape[1], dim=0)[:, None]
    mirrored = pad(images, (reach, reach, reach, reach), mode="reflect").flatten(0, 1)[None]
    down = conv2d(mirrored, kernel[..., None], groups=groups)
    return conv2d(down, kernel[:, :, None], groups=groups).view_as(images)


def _blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    factor = factor[:, None, None, None]
    return (factor * images + (1 - factor) * other).clamp(0, 1)
