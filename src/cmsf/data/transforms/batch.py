"""The images of a step, from which its views are cut: here as they are asked for, or beforehand by other processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from cmsf.data.transforms.crops import Crop, DecodedImages, RandomStream, crop_and_resize, image_sizes, resized_crop


@dataclass(frozen=True)
class Batch(ABC):
    """Images by index; with seed and epoch, the key that decides their views."""

    index: Int[Tensor, " b"]
    seed: int
    epoch: int

    @abstractmethod
    def crop(self, how: Crop, view: int) -> Float[Tensor, "b c s s"]:
        """Every image's part in this view, in [0, 1], on the training device."""

    @abstractmethod
    def split(self, size: int) -> Iterator[Batch]:
        """The same images, so many at a time."""

    @property
    @abstractmethod
    def on_cpu(self) -> bool: ...


@dataclass(frozen=True)
class WholeBatch(Batch):
    """Images of one size, whole, on the training device."""

    images: UInt8[Tensor, "b c h w"]

    def crop(self, how: Crop, view: int) -> Float[Tensor, "b c s s"]:
        draw = RandomStream(self.seed, self.epoch, self.index, view)
        boxes, flipped = how.boxes(*image_sizes(self.images), draw)
        return crop_and_resize(self.images, boxes, how.size, flipped)

    def split(self, size: int) -> Iterator[Batch]:
        for index, pictures in zip(self.index.split(size), self.images.split(size), strict=True):
            yield replace(self, index=index, images=pictures)

    @property
    def on_cpu(self) -> bool:
        return self.images.device.type == "cpu"


@dataclass(frozen=True)
class CroppedBatch(Batch):
    """The parts that each view shows of images of any size, cut on the CPU."""

    crops: dict[int, UInt8[Tensor, "b 3 s s"]]
    device: torch.device

    def crop(self, how: Crop, view: int) -> Float[Tensor, "b c s s"]:
        return to_device(self.crops[view], self.device).float() / 255

    def split(self, size: int) -> Iterator[Batch]:
        for rows in torch.arange(len(self.index)).split(size):
            some = slice(int(rows[0]), int(rows[-1]) + 1)
            yield replace(self, index=self.index[some], crops={view: crop[some] for view, crop in self.crops.items()})

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"


def to_device(pictures: Tensor, device: torch.device) -> Tensor:
    """Without waiting where that is safe: from pinned memory to CUDA."""
    return pictures.to(device, non_blocking=device.type == "cuda" and pictures.is_pinned())


def crop_views(
    pictures: DecodedImages, index: Int[Tensor, " b"], crops: Mapping[int, Crop], seed: int, epoch: int
) -> dict[int, UInt8[Tensor, "b 3 s s"]]:
    """What each view shows of images of any size, as a CutBatch takes it; grey images become three equal channels."""
    height, width = image_sizes(pictures)
    parts: dict[int, Tensor] = {}
    for view, how in crops.items():
        boxes, flipped = how.boxes(height, width, RandomStream(seed, epoch, index, view))
        every = zip(pictures, boxes, flipped.tolist(), strict=True)
        parts[view] = torch.stack(
            [resized_crop(picture, box, how.size, turn).expand(3, -1, -1) for picture, box, turn in every]
        )
    return parts
