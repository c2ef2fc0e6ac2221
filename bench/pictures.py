"""Images to measure on: CIFAR-10 from a file, or made-up ones that look enough like photos to a decoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

CIFAR_IMAGES = 50_000
PHOTO_HEIGHT, PHOTO_WIDTH = 375, 500


def small_pictures(cifar: Path | None) -> Tensor:
    """uint8 (n, 3, 32, 32): the training images of an .npz with `x_train` (n, 32, 32, 3), or as many made-up ones."""
    if cifar is None:
        chunk = 1_000
        return torch.cat([smooth_noise(chunk, 32, 32, seed) for seed in range(CIFAR_IMAGES // chunk)])
    with np.load(cifar, allow_pickle=False) as arrays:
        return torch.from_numpy(arrays["x_train"]).permute(0, 3, 1, 2).contiguous()


def write_photos(folder: Path, count: int) -> list[Path]:
    """JPEGs of 500 × 375 at quality 90, some 65 kB each, as photos of that size have."""
    paths = [folder / f"{number:04d}.jpg" for number in range(count)]
    for seed, path in enumerate(paths):
        pixels = smooth_noise(1, PHOTO_HEIGHT, PHOTO_WIDTH, seed)[0].permute(1, 2, 0)
        Image.fromarray(pixels.numpy()).save(path, quality=90)
    return paths


def smooth_noise(count: int, height: int, width: int, seed: int) -> Tensor:
    """uint8 (count, 3, height, width): noise at every octave, the coarser the stronger.

    How much stronger was chosen for the size of the JPEGs, which decides what decoding costs.
    """
    generator = torch.Generator().manual_seed(seed)
    images = torch.zeros(count, 3, height, width)
    for octave in range(min(height, width).bit_length()):
        grid = (-(-height // 2**octave), -(-width // 2**octave))
        # Brightness varies more than colour does.
        grey, colour = (torch.randn(count, channels, *grid, generator=generator) for channels in (1, 3))
        images += 2 ** (0.4 * octave) * interpolate(grey + 0.5 * colour, (height, width), mode="bilinear")
    images -= images.mean((1, 2, 3), keepdim=True)
    images *= 60 / images.std((1, 2, 3), keepdim=True)
    return (images + 120).clamp(0, 255).to(torch.uint8)
