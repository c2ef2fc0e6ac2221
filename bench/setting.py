"""What every contestant is given alike: the views in numbers, the batches, and the form in which it runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WORKERS = 2
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
SOLARISED_FROM = 128
"""The darkest of 256 levels that solarising inverts."""


@dataclass(frozen=True)
class View:
    """A random view; names without a range are probabilities, or strengths of the jitter.

    The blur's kernel is as wide as cmsf has it at this size. lightly takes none: Pillow approximates the whole
    Gaussian, at a cost that does not depend on its width.
    """

    size: int
    blur_kernel: int
    crop_scale: tuple[float, float]
    flip: float = 0.5
    jitter: float = 0.0
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    greyscale: float = 0.0
    blur: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarise: float = 0.0


@dataclass(frozen=True)
class Setting:
    """Two views of every image, so many images a batch."""

    views: tuple[View, View]
    batch: int


BYOL_FIRST = View(32, 3, (0.08, 1.0), jitter=0.8, saturation=0.2, greyscale=0.2, blur=1.0)
BYOL_SECOND = View(32, 3, (0.08, 1.0), jitter=0.8, saturation=0.2, greyscale=0.2, blur=0.1, solarise=0.2)
SMALL = Setting((BYOL_FIRST, BYOL_SECOND), batch=256)
"""BYOL's two views as lightly's BYOLTransform has them by default; lightly's own CIFAR example leaves the blur out."""

WEAK = View(224, 23, (0.2, 1.0))
STRONG = View(224, 23, (0.2, 1.0), jitter=0.8, greyscale=0.2, blur=0.5)
PHOTOS = Setting((STRONG, WEAK), batch=64)
"""The strong and the weak view of the paper; the first one predicts."""


def resized(setting: Setting, size: int, batch: int) -> Setting:
    """The same views at another size; the kernel of the blur is a tenth of it, and odd."""
    views = tuple(replace(view, size=size, blur_kernel=max(3, size // 10 // 2 * 2 + 1)) for view in setting.views)
    return Setting((views[0], views[1]), batch)


@dataclass(frozen=True)
class Network:
    """A network to train, on images of a setting."""

    backbone: str
    stem: str = "standard"


Batches = Generator[int, None, None]
"""Endless: does a batch a turn, and says how many images it had. Closing it ends its worker processes."""


@dataclass(frozen=True)
class Contestant:
    """A way to do the work, started anew for every turn, so that nobody's workers run while another is timed.

    `threads` are torch's in the main process; None: as many as --threads says.
    """

    name: str
    start: Callable[[], Batches]
    threads: int | None = None


def endless_order(images: int, batch: int) -> Iterator[Tensor]:
    """Batches of indices in a new random order every epoch, the last incomplete batch dropped."""
    while True:
        yield from torch.randperm(images)[: images // batch * batch].split(batch)
