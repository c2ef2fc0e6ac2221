"""What is done to an image before a network sees it, and the words and numbers by which somebody else can repeat it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from cmsf.data.transforms import color
from cmsf.data.transforms.crops import CenterCrop, CleanCrop, Interpolation, RandomCrop, ResizedCenterCrop
from cmsf.recipes.recipe import ResolvedRecipe, format_channels, parse_channels

STORED_SCALE = 2
"""Decoded photos keep a shorter side of this many times the view: the rest would never be seen."""


@dataclass(frozen=True)
class Preprocessing:
    """The size of a view, how images are cropped and resized to it, and how its colours are normalised.

    The defaults are those of a run that starts from random weights.
    """

    size: int
    mean: tuple[float, float, float] = color.IMAGENET_MEAN
    std: tuple[float, float, float] = color.IMAGENET_STD
    interpolation: Interpolation = "bilinear"
    crop_pct: float = 0.875
    clean_crop: CleanCrop = "small-whole"

    @classmethod
    def from_recipe(cls, recipe: ResolvedRecipe) -> Preprocessing:
        mean, std = parse_channels("--mean", recipe.mean), parse_channels("--std", recipe.std)
        return cls(recipe.size, mean, std, recipe.interpolation, recipe.crop_pct, recipe.clean_crop)

    def center_crop(self) -> CenterCrop | ResizedCenterCrop:
        """Returns the crop of a clean view, which evaluations see."""
        kind = ResizedCenterCrop if self.clean_crop == "standard" else CenterCrop
        return kind(self.size, self.crop_pct, self.interpolation)

    def random_crop(self, scale: tuple[float, float], flip: float = 0.5) -> RandomCrop:
        return RandomCrop(self.size, scale, flip=flip, interpolation=self.interpolation)

    def normalize(self, images: Float[Tensor, "b c s s"]) -> Float[Tensor, "b 3 s s"]:
        return color.normalize_pixels(images, self.mean, self.std)

    @property
    def transform(self) -> str:
        """A clean view in full, in words."""
        mean, std = format_channels(self.mean), format_channels(self.std)
        return (
            f"{self.center_crop().describe()}; {self.interpolation}, antialiased; normalised by mean {mean}, std {std}"
        )

    @property
    def key(self) -> str:
        """What caches know a clean view by: the words of version 0.1 where it is what that version did."""
        if self == Preprocessing(self.size):
            size = self.size
            return f"resize {round(size * 256 / 224)}, centre crop {size}; images with no side above {size} px whole"
        return json.dumps(asdict(self))

    def report(self) -> dict[str, Any]:
        """Returns what a result records of a clean view, for a program to repeat it."""
        stored = STORED_SCALE * self.size
        return asdict(self) | {
            "mean": list(self.mean),  # as JSON has them
            "std": list(self.std),
            "rule": self.center_crop().describe(),
            "stored": f"a photo whose shorter side is above {stored} px is kept in memory shrunk to it, bilinearly, or "
            f"decoded at a fraction of its size that leaves {stored} px",
        }
