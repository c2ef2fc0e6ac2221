"""Augmentations of a batch on the training device, with parameters of their own for every image.

All randomness is a hash of (seed, epoch, image, view), drawn on the CPU, where a few numbers an image cost nothing
and nobody waits for the device; the pixels are computed where they are. Cropping with resizing is a product with one
matrix a direction (separable), which equals torchvision's antialiased operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cmsf.data.transforms import color
from cmsf.data.transforms.batch import Batch, CroppedBatch, WholeBatch, crop_views
from cmsf.data.transforms.crops import DecodedImages, RandomCrop, RandomStream, scale_to_range
from cmsf.data.transforms.preprocessing import Preprocessing

_CACHED_PIXELS = 512 * 1024
_SOLARIZE_THRESHOLD = 128 / 255


@dataclass(frozen=True)
class Augmentation:
    """Makes a random view of every image; the defaults are the weak view of the paper."""

    crop: RandomCrop
    jitter: float = 0.0
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    greyscale: float = 0.0
    blur: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarise: float = 0.0
    mean: tuple[float, float, float] = color.IMAGENET_MEAN
    std: tuple[float, float, float] = color.IMAGENET_STD

    def __call__(self, batch: Batch, view: int) -> Float[Tensor, "b 3 s s"]:
        if batch.device.type != "cpu":
            return self._view(batch, view)
        # A few images at a time stay in the processor's cache from one operation to the next.
        chunk_size = max(1, _CACHED_PIXELS // self.crop.size**2)
        return torch.cat([self._view(chunk, view) for chunk in batch.split(chunk_size)])

    def _view(self, batch: Batch, view: int) -> Float[Tensor, "b 3 s s"]:
        draw = RandomStream(batch.seed, batch.epoch, batch.index, view, self.crop.draws)
        return color.normalize_pixels(self._distort(batch.crop(self.crop, view), draw), self.mean, self.std)

    def _distort(self, images: Tensor, draw: RandomStream) -> Tensor:
        images = self._jitter(images, draw)
        grey = (draw(1)[:, 0] < self.greyscale).to(images.device)
        images = torch.where(grey[:, None, None, None], color.to_grayscale(images), images)
        images = self._blur(images, draw)
        return self._solarize(images, draw)

    def _jitter(self, images: Tensor, draw: RandomStream) -> Tensor:
        """Changes brightness, contrast, saturation and hue, in an order of each image's own."""
        applied = draw(1)[:, 0] < self.jitter
        order = draw(4).argsort(1)
        amount = scale_to_range(draw(4), -1.0, 1.0)
        if not self.jitter:
            return images
        coloured = images.shape[1] == 3
        operations = [
            (0, color.adjust_brightness, 1 + amount[:, 0] * self.brightness),
            (1, color.adjust_contrast, 1 + amount[:, 1] * self.contrast),
            # A grey image has no saturation and no hue to change.
            *([(2, color.adjust_saturation, 1 + amount[:, 2] * self.saturation)] if coloured else []),
            *([(3, color.adjust_hue, amount[:, 3] * self.hue)] if coloured else []),
        ]
        images = images.clone()
        for turn in range(4):
            for number, operation, factor in operations:
                chosen = (applied & (order[:, turn] == number)).nonzero()[:, 0]
                if len(chosen):
                    strength, chosen = factor[chosen].to(images.device), chosen.to(images.device)
                    images[chosen] = operation(images[chosen], strength)
        return images

    def _blur(self, images: Tensor, draw: RandomStream) -> Tensor:
        chosen = (draw(1)[:, 0] < self.blur).nonzero()[:, 0]
        sigma = scale_to_range(draw(1)[:, 0], *self.blur_sigma)
        if len(chosen):
            sigma, chosen = sigma[chosen].to(images.device), chosen.to(images.device)
            images = images.clone()
            images[chosen] = color.gaussian_blur(images[chosen], sigma, color.blur_kernel_size(self.crop.size))
        return images

    def _solarize(self, images: Tensor, draw: RandomStream) -> Tensor:
        if not self.solarise:
            return images
        chosen = (draw(1)[:, 0] < self.solarise).to(images.device)
        threshold = torch.full((len(images),), _SOLARIZE_THRESHOLD, device=images.device)
        return torch.where(chosen[:, None, None, None], color.solarize(images, threshold), images)


def clean_view(images: DecodedImages, preprocessing: Preprocessing | int) -> Float[Tensor, "b 3 s s"]:
    """Returns the view for evaluation: resized, cropped at the center, normalized.

    preprocessing: a run's own; or a size alone, with ImageNet's colours, as runs from random weights have it.
    """
    if isinstance(preprocessing, int):
        preprocessing = Preprocessing(preprocessing)
    index, crop = torch.arange(len(images)), preprocessing.center_crop()
    if isinstance(images, Tensor):
        batch: Batch = WholeBatch(index, 0, 0, images)
    else:
        batch = CroppedBatch(index, 0, 0, crop_views(images, index, {0: crop}, 0, 0), torch.device("cpu"))
    return preprocessing.normalize(batch.crop(crop, 0))
