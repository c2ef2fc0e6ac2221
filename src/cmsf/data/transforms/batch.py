"""The images of a step: whole, to be cropped on the device, or cropped beforehand by worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from cmsf.data.transforms.crops import Crop, DecodedImages, RandomStream, crop_and_resize, image_sizes, resized_crop


@dataclass(frozen=True)
class _IndexedImages:
    """Images by index; with seed and epoch, the key that decides their views."""

    index: Int[Tensor, " b"]
    seed: int
    epoch: int


@dataclass(frozen=True)
class WholeBatch(_IndexedImages):
    """Images of one size, whole, on the training device."""

    images: UInt8[Tensor, "b c h w"]

    def crop(self, crop: Crop, view: int) -> Float[Tensor, "b c s s"]:
        """Returns what each image shows in this view, in [0, 1], on the training device."""
        draw = RandomStream(self.seed, self.epoch, self.index, view)
        boxes, flipped = crop.boxes(*image_sizes(self.images), draw)
        resized = crop.resized(*self.images.shape[-2:])
        return crop_and_resize(self.images, boxes, crop.size, flipped, crop.interpolation, resized)

    def split(self, size: int) -> Iterator[WholeBatch]:
        """Yields the same images, `size` at a time."""
        for index, images in zip(self.index.split(size), self.images.split(size), strict=True):
            yield replace(self, index=index, images=images)

    @property
    def device(self) -> torch.device:
        return self.images.device


@dataclass(frozen=True)
class CroppedBatch(_IndexedImages):
    """What each view shows of images of any size, cropped on the CPU."""

    crops: dict[int, UInt8[Tensor, "b 3 s s"]]
    device: torch.device

    def crop(self, crop: Crop, view: int) -> Float[Tensor, "b c s s"]:
        return to_device(self.crops[view], self.device).float() / 255

    def split(self, size: int) -> Iterator[CroppedBatch]:
        for rows in torch.arange(len(self.index)).split(size):
            chunk = slice(int(rows[0]), int(rows[-1]) + 1)
            yield replace(self, index=self.index[chunk], crops={view: crop[chunk] for view, crop in self.crops.items()})


Batch = WholeBatch | CroppedBatch


def to_device(images: Tensor, device: torch.device) -> Tensor:
    """Copies without waiting where that is safe: from pinned memory to CUDA."""
    return images.to(device, non_blocking=device.type == "cuda" and images.is_pinned())


def crop_views(
    images: DecodedImages, index: Int[Tensor, " b"], crops: Mapping[int, Crop], seed: int, epoch: int
) -> dict[int, UInt8[Tensor, "b 3 s s"]]:
    """Crops images of any size for each view, as a CroppedBatch takes them; grey becomes three equal channels."""
    height, width = image_sizes(images)
    views: dict[int, Tensor] = {}
    for view, crop in crops.items():
        boxes, flipped = crop.boxes(height, width, RandomStream(seed, epoch, index, view))
        rows = zip(images, boxes, flipped.tolist(), strict=True)
        views[view] = torch.stack(
            [
                resized_crop(image, box, crop.size, flip, crop.interpolation, crop.resized(*image.shape[-2:])).expand(
                    3, -1, -1
                )
                for image, box, flip in rows
            ]
        )
    return views
