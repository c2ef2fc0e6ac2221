"""Networks from an image to pooled features: any timm name, stems for small images, and a small residual net."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import timm
import torch
from jaxtyping import Float
from torch import Tensor, nn

from cmsf.utils.errors import BadInput, did_you_mean
from cmsf.utils.text import first_line

T = TypeVar("T")
Stem = Literal["standard", "small"]
SMALL_RESIDUAL = "small-residual"
_MISFITS = (ArithmeticError, AssertionError, IndexError, RuntimeError, TypeError, ValueError)
"""What other people's networks raise for images of a size they were not made for."""


def make_backbone(name: str, stem: Stem = "standard", size: int = 224) -> nn.Module:
    """Builds a network that turns (b, 3, size, size) into (b, features)."""
    if name == SMALL_RESIDUAL:
        return SmallResidualNet()
    if not timm.is_model(name):
        known = [SMALL_RESIDUAL, *timm.list_models()]
        hint = did_you_mean(name, known, f"use {SMALL_RESIDUAL} or a name of timm.list_models()")
        raise BadInput(f"unknown backbone {name!r}; {hint}")
    try:
        backbone = create(name, size, num_classes=0)
    except _MISFITS as error:
        raise BadInput(_no_fit(name, size, error)) from None
    if stem == "small":
        _use_small_stem(backbone, name)
    return backbone


def create(name: str, size: int, **options: Any) -> nn.Module:
    """Creates one of timm's networks for images of this size."""
    try:
        # A network with position embeddings has to be told the size; a convolutional one does not take it.
        network: nn.Module = timm.create_model(name, img_size=size, **options)
    except TypeError:
        network = timm.create_model(name, **options)
    return network


def patch_size(name: str) -> int:
    """Returns the side of the patches that a network cuts images into, which their size is a multiple of; else 1."""
    backbone = without_weights(lambda: make_backbone(name))
    size = getattr(getattr(backbone, "patch_embed", None), "patch_size", 1)
    return int(max(size) if isinstance(size, tuple) else size)


def without_weights(measure: Callable[[], T]) -> T:
    """Calls a function that asks networks for their shapes alone, which then have no weights if that is possible."""
    try:
        with torch.device("meta"):
            return measure()
    except BadInput:  # some networks compute numbers while they are built, which meta tensors do not have
        with torch.random.fork_rng(devices=[]):
            return measure()


@torch.no_grad()
def feature_width(backbone: nn.Module, name: str, size: int) -> int:
    """Returns the number of features for images of this size, by trying it."""
    training = backbone.training
    parameter = next(backbone.parameters(), torch.empty(0))
    try:
        shape = backbone.eval()(parameter.new_zeros(1, 3, size, size)).shape
    except _MISFITS as error:
        raise BadInput(_no_fit(name, size, error)) from None
    finally:
        backbone.train(training)
    if len(shape) != 2:
        raise BadInput(
            f"{name} gives features of shape {tuple(shape)} instead of one vector an image; use another backbone"
        )
    return int(shape[1])


def _no_fit(name: str, size: int, error: Exception) -> str:
    return f"{name} does not work with images of {size} px ({first_line(error, 100)}); use another --size or --backbone"


def _use_small_stem(backbone: nn.Module, name: str) -> None:
    """Makes the stem a 3×3 convolution without stride or pooling, for 32 or 64 px (He et al. 2016, Sec. 4.2)."""
    first, pool = getattr(backbone, "conv1", None), getattr(backbone, "maxpool", None)
    if not isinstance(first, nn.Conv2d) or pool is None:
        raise BadInput(
            f"--stem small replaces a ResNet's first layers, which {name} does not have; use --stem standard"
        )
    backbone.conv1 = nn.Conv2d(3, first.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(backbone.conv1.weight, mode="fan_out", nonlinearity="relu")
    backbone.maxpool = nn.Identity()


class SmallResidualNet(nn.Module):
    """Four residual blocks for images up to 64 px: about 13 million multiplications for 28 × 28."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)
        )
        inputs = (widths[0], *widths[:-1])
        strides = (1, *(2 for _ in widths[1:]))
        self.blocks = nn.Sequential(*(ResidualBlock(*shape) for shape in zip(inputs, widths, strides, strict=True)))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b f"]:
        features: Tensor = self.blocks(self.stem(images)).mean((2, 3))
        return features

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Returns the names of the layers from first to last, as timm's networks tell them."""
        return {"stem": r"^stem", "blocks": r"^blocks\.(\d+)"}


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        changes = stride != 1 or inputs != outputs
        self.shortcut: nn.Module = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if changes
            else nn.Identity()
        )

    def forward(self, features: Tensor) -> Tensor:
        return torch.relu(self.body(features) + self.shortcut(features))
