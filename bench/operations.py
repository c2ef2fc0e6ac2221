"""What single operations cost on a batch of 256 × 3 × 32 × 32, for those that work on batches of tensors.

kornia and cmsf have parameters of each image's own. torchvision's functions have one parameter for all they are given:
with the whole batch at once that is less than what is asked for, and image by image in a loop it is the same.
Parameters are drawn beforehand, but for cmsf's jitter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import kornia.augmentation as kornia
import torch
from ours import cmsf_operations
from setting import SMALL, Batches, Contestant
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

Operation = Callable[[], Tensor]
OPERATIONS = ("crop and resize", "blur", "jitter", "hue")
VIEW = SMALL.views[0]


def operation_contestants(pictures: Tensor) -> dict[str, list[Contestant]]:
    """For every operation, all ways to do it to one batch of these images."""
    pictures = pictures[: SMALL.batch]
    images = pictures.float() / 255
    boxes = torch.tensor([_box(image) for image in images])
    sigma = torch.empty(len(images)).uniform_(*VIEW.blur_sigma)
    factors = 1 + torch.empty(len(images), 3).uniform_(-1, 1) * torch.tensor(
        [VIEW.brightness, VIEW.contrast, VIEW.saturation]
    )
    shift = torch.empty(len(images)).uniform_(-VIEW.hue, VIEW.hue)
    parameters = list(zip(boxes.tolist(), sigma.tolist(), factors.tolist(), shift.tolist(), strict=True))

    def alone(operation: str) -> Operation:
        def loop() -> Tensor:
            pairs = zip(images, parameters, strict=True)
            return torch.stack([_torchvision(operation, image, *own) for image, own in pairs])

        return loop

    ways: dict[str, dict[str, Operation]] = {
        "cmsf": cmsf_operations(pictures, images, boxes, sigma, shift, VIEW),
        **_kornia(images),
        "torchvision, image by image": {name: alone(name) for name in OPERATIONS},
        "torchvision, one parameter for all": {
            name: partial(_torchvision, name, images, *parameters[0]) for name in OPERATIONS
        },
    }
    return {
        name: [Contestant(who, _repeated(done[name])) for who, done in ways.items() if name in done]
        for name in OPERATIONS
    }


def _repeated(operation: Operation) -> Callable[[], Batches]:
    def turns() -> Batches:
        while True:
            yield len(operation())

    return turns


def _box(image: Tensor) -> list[int]:
    box = v2.RandomResizedCrop(VIEW.size, VIEW.crop_scale).make_params([image])
    return [box["top"], box["left"], box["height"], box["width"]]


def _torchvision(
    operation: str, images: Tensor, box: list[int], sigma: float, factors: list[float], shift: float
) -> Tensor:
    if operation == "crop and resize":
        return functional.resized_crop(images, *box, [VIEW.size, VIEW.size], antialias=True)
    if operation == "blur":
        return functional.gaussian_blur(images, [VIEW.blur_kernel] * 2, [sigma, sigma])
    if operation == "jitter":
        brightness, contrast, saturation = factors
        images = functional.adjust_contrast(functional.adjust_brightness(images, brightness), contrast)
        images = functional.adjust_saturation(images, saturation)
    return functional.adjust_hue(images, shift)


def _kornia(images: Tensor) -> dict[str, dict[str, Operation]]:
    """kornia has two ways to crop; all else is the same."""
    side, kernel = (VIEW.size, VIEW.size), (VIEW.blur_kernel, VIEW.blur_kernel)

    def crop(mode: str) -> kornia.RandomResizedCrop:
        return kornia.RandomResizedCrop(side, VIEW.crop_scale, align_corners=False, cropping_mode=mode)

    jitter = kornia.ColorJitter(VIEW.brightness, VIEW.contrast, VIEW.saturation, VIEW.hue, p=1.0)
    return {
        "kornia, slice": {"crop and resize": _drawn_once(crop("slice"), images)},
        "kornia, resample": {"crop and resize": _drawn_once(crop("resample"), images)},
        "kornia": {
            "blur": _drawn_once(kornia.RandomGaussianBlur(kernel, VIEW.blur_sigma, p=1.0), images),
            "jitter": _drawn_once(jitter, images),
            "hue": _drawn_once(kornia.ColorJitter(hue=VIEW.hue, p=1.0), images),
        },
    }


def _drawn_once(augmentation: Any, images: Tensor) -> Operation:
    parameters = augmentation.forward_parameters(images.shape)
    return lambda: augmentation(images, params=parameters)
