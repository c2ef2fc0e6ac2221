"""Whether two views of the images have the same neighbours: a measure of features that needs no labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.analysis.collapse import RANK_FLOOR, SPREAD_FLOOR, EmbeddingStats
from cmsf.data import Split, load_batches
from cmsf.data.transforms import Augmentation
from cmsf.evaluation.features import BATCH, FeatureExtractor, eval_mode, unit_features
from cmsf.utils.progress import track

NEIGHBOURS, FEWEST = 20, 50
_IMAGES = 1000
_CROP = (0.4, 1.0)
_VIEWS = (0xA6E1, 0xA6E2)
"""Views that training has none of."""


@dataclass(frozen=True)
class ViewAgreement:
    """The share of its nearest images that an image's two random crops have in common, over a sample of images."""

    images: Split
    seed: int

    @classmethod
    def of(cls, split: Split, seed: int) -> ViewAgreement:
        """Takes a thousand images at most, evenly spaced."""
        count = min(_IMAGES, len(split))
        return cls(split.subset(torch.linspace(0, len(split) - 1, count).long()), seed)

    def __call__(self, extractor: FeatureExtractor) -> Float[Tensor, " n"]:
        """Returns the share of each image; 0 for features that have collapsed, whose neighbours are all alike."""
        views = self._features(extractor)
        stats = EmbeddingStats.of(views[0])
        if stats.spread < SPREAD_FLOOR or stats.effective_rank < RANK_FLOOR:
            return torch.zeros(len(self.images), dtype=torch.float64)
        first, second = map(neighbours, views)
        shared = (first[:, :, None] == second[:, None, :]).any(2)
        return shared.double().mean(1).cpu()

    def _features(self, extractor: FeatureExtractor) -> list[Float[Tensor, "n f"]]:
        crop, network = extractor.preprocessing.random_crop(_CROP), extractor.backbone
        augment = Augmentation(crop, mean=extractor.preprocessing.mean, std=extractor.preprocessing.std)
        plan = [(0, index) for index in torch.arange(len(self.images)).split(BATCH)]
        batches = load_batches(
            self.images,
            plan,
            dict.fromkeys(_VIEWS, crop),
            seed=self.seed,
            device=extractor.device,
            workers=extractor.workers,
        )
        found: list[list[Tensor]] = [[], []]
        with eval_mode(network):
            for batch in track(batches, "agreement of views", len(plan)):
                for features, view in zip(found, _VIEWS, strict=True):
                    features.append(unit_features(network, augment(batch, view)))
        return [torch.cat(features) for features in found]


def neighbours(features: Float[Tensor, "n f"]) -> Int[Tensor, "n k"]:
    """Returns the nearest others of each image."""
    similarity = features @ features.T
    similarity.fill_diagonal_(-torch.inf)
    return similarity.topk(min(NEIGHBOURS, len(features) - 1), dim=1).indices
