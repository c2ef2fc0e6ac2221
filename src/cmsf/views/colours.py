"""What light and lens do to an image: colours, blur, solarising, each with its own parameter for every image."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_DEVIATION = (0.229, 0.224, 0.225)
_GREY_WEIGHTS = (0.2989, 0.587, 0.114)
_SOLARISED_ABOVE = 128 / 255


def normalise(images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 3 h w"]:
    """ImageNet's mean and deviation; a grey image becomes three equal channels first."""
    mean = torch.tensor(IMAGENET_MEAN, device=images.device).view(3, 1, 1)
    deviation = torch.tensor(IMAGENET_DEVIATION, device=images.device).view(3, 1, 1)
    return ((images - mean) / deviation).contiguous(memory_format=torch.channels_last)


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


def solarised(images: Tensor) -> Tensor:
    """Bright pixels turned to their negative."""
    return torch.where(images >= _SOLARISED_ABOVE, 1 - images, images)


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
