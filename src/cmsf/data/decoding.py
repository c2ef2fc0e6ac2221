"""Decodes image files of any kind to upright RGB."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

_KINDS = "avif bmp gif jfif jp2 jpe jpeg jpg pbm pgm png pnm ppm tga tif tiff webp"
SUFFIXES = tuple(f".{kind}" for kind in _KINDS.split())
_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TGA", "TIFF", "WEBP")
_ORIENTATION = 0x0112  # the EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)


def open_image(file: Path | BytesIO) -> Image.Image:
    """Opens an image of one of these kinds, whatever its name; for one of its others Pillow starts a program."""
    return Image.open(file, formats=_FORMATS)


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Returns height and width as the image will be seen, without decoding it."""
    width, height = image.size
    # Pillow turns a TIFF itself, and decodes a PNG to look for EXIF behind its pixels.
    turned = image.format != "TIFF" and (image.format != "PNG" or "exif" in image.info)
    return (width, height) if turned and _orientation(image) in _SIDEWAYS else (height, width)


def decode(image: Image.Image, min_side: int) -> UInt8[Tensor, "3 h w"]:
    """Returns upright pixels; a JPEG may be read at a fraction of its size that leaves `min_side` pixels a side.

    16-bit grey is brought to eight bits (65,535 to 255), and what is transparent becomes white. The pixels lie in
    memory as decoded, colour by colour within each, which is what resizing on the CPU is fastest with.
    """
    image.draft("RGB", (min_side, min_side))
    image.load()  # before EXIF is asked for, which would hide what is wrong with the pixels
    orientation = _orientation(image)
    if image.mode.startswith(("I", "F")):
        image = _eight_bits(image)
    elif "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")
    if orientation in _UPRIGHT:
        image = image.transpose(_UPRIGHT[orientation])
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def shrink(pixels: UInt8[Tensor, "3 h w"], max_side: int) -> UInt8[Tensor, "3 tall wide"]:
    """Resizes so that the shorter side has at most `max_side` pixels."""
    short = min(pixels.shape[1:])
    if short <= max_side:
        return pixels
    height, width = (max(1, round(side * max_side / short)) for side in pixels.shape[1:])
    resized = torch.nn.functional.interpolate(pixels[None], (height, width), mode="bilinear", antialias=True)[0]
    # Whatever order the resizing has left them in, pixels lie colour by colour within each.
    return resized.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # metadata that is damaged in any way does not make a photo unreadable
        return 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """Converts integers of more than 8 bits and floating point to grey: 16 bits by 257, others by their range."""
    values = np.nan_to_num(np.asarray(image).astype(np.float64), nan=0, posinf=0, neginf=0)
    if image.mode.startswith("I;16") or (image.mode == "I" and 255 < values.max() <= 65535):
        values = values / 257
    elif values.max() > 255:
        values = values * (255 / values.max())
    elif image.mode == "F" and values.max() <= 1:
        values = values * 255
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
