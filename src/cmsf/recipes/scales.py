"""Scales: network, views and schedule for a size of data, where they differ from the paper's, the defaults."""

from __future__ import annotations

from cmsf.recipes.recipe import AUTO, Recipe


def imagenet() -> Recipe:
    """The paper's: ResNet-50 at 224 px, bank 128,000, batch 256, 200 epochs."""
    return Recipe(size=224, bank_size=128_000, batch_size=256)


def standard() -> Recipe:
    """One's own photos: ResNet-18, 128 px crops, bank and batch sized to the data."""
    return Recipe(backbone="resnet18", size=128)


def small() -> Recipe:
    """Images up to 64 px on a laptop: the small residual net at the images' own size.

    Chosen on images of Fashion-MNIST outside of the embedded sample (docs/log.md). What matters most: a weak view that
    shows nearly all of the image, or else most neighbours are of another class; small batches, for the run is short;
    and a strong weight decay.
    """
    return Recipe(
        backbone="small-residual",
        projection_hidden=512,
        projection_dim=128,
        weak_crop=0.7,
        strong_crop=0.2,
        blur=0.0,
        epochs=20,
        lr=0.2,
        weight_decay=1e-3,
        target_momentum=0.95,
        target_momentum_end=0.95,
        evaluate_every=5,
    )


def adapt() -> Recipe:
    """From pretrained weights, to one's own photos: the network of --init, changed slowly and no more than it helps.

    AdamW, with less of the learning rate in each layer than in the one above it; heads first; BatchNorm's statistics
    of the weights; a slow target; mild crops; and the best epoch is kept, the starting weights among them.
    """
    return Recipe(
        backbone=AUTO,
        weak_crop=0.5,
        strong_crop=0.3,
        epochs=10,
        optimiser="adamw",
        lr=3e-4,
        layer_decay=0.8,
        weight_decay=0.05,
        clip_grad=1.0,
        freeze_epochs=1,
        batch_norm="frozen",
        target_momentum=0.996,
        target_momentum_end=0.999,
        keep="best",
        evaluate_every=1,
    )


ADAPT = "adapt"
"""The scale of runs that start from weights."""
SCALES = {"small": small, "standard": standard, ADAPT: adapt, "imagenet": imagenet}
