"""Baselines: the methods that the paper compares with, on the same images, network and loop.

Each docstring names the equation and the settings of the method's own paper, which `AT_PAPER_SCALE` has for the scale
`imagenet`; what is not among them, such as views where they are not named, is this paper's. At the other scales
everything but the method is the scale's, so that a comparison compares one thing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cmsf.recipes.methods import by_name
from cmsf.recipes.recipe import Recipe

_TWO_ALIKE: dict[str, Any] = {"first_view": "strong", "second_view": "strong"}
_STRONGER_COLOURS = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2}
_LARGE_BATCH = {"optimiser": "lars", "batch_size": 4096, "warmup_epochs": 10, "weight_decay": 1e-6}
_PROJECTOR_128 = {"projection_hidden": 2048, "projection_dim": 128}
_PROJECTOR_2048 = {"projection_hidden": 2048, "projection_dim": 2048, "prediction_hidden": 512}


def xent(scale: Recipe) -> Recipe:
    """Cross-entropy: a linear classifier of the classes, trained along with the features.

    Supplement, ablations (a), ImageNet, ResNet-50, lr 0.05, cosine, 200 epochs, strong augmentation: 77.2 top-1,
    71.5 mean transfer; with +standard-views 77.3 and 71.0. The best transfer, 74.9, has PyTorch's own schedule:
    xent+standard-views+step --lr 0.1 --epochs 90.
    """
    return replace(scale, objective="cross-entropy", bank_size=0)


def supcon(scale: Recipe) -> Recipe:
    """Supervised contrast: every image is told from the other classes of the bank (Khosla et al. 2020, eq. 2, L_out).

    Temperature 0.1, a projector of its own (2048, 128), ten of 200 epochs of warm-up. Supplement, ablations (b),
    ImageNet: 77.5 linear, 78.4 mean transfer as it is here (weak and strong views, the target among the positives, a
    bank of 128,000); their base is supcon+standard-views+without-target+bank-16k: 77.9 and 77.2. The authors' code has
    the factor τ / 0.07 before the loss, which their equation has not, nor have we.
    """
    return replace(scale, objective="supcon", temperature=0.1, warmup_epochs="auto")


def proto_nw(scale: Recipe) -> Recipe:
    """Prototypes: every image is told from the other classes' means in the bank (after Snell et al. 2017, eq. 2).

    Top-all mean shift with a contrast, temperature 0.1. Table 2, ImageNet, 200 epochs: 76.0 linear, 78.3 mean transfer.
    """
    return replace(scale, objective="prototypes", temperature=0.1)


def moco_v2(scale: Recipe) -> Recipe:
    """MoCo v2: every image's other view is told from a bank of other images (He et al. 2020, eq. 1; Chen et al. 2020).

    Temperature 0.2, two strong views, bank 65,536, target momentum 0.999, lr 0.03, projector (2048, 128), 200 epochs:
    67.5 linear, 50.9 1-NN, 54.3 20-NN (Table 1). The paper's has no BatchNorm in its projector and shuffles it in
    the network; ours has one projector for all methods.
    """
    return replace(scale, objective="info-nce", temperature=0.2, **_TWO_ALIKE)


def nnclr(scale: Recipe) -> Recipe:
    """NNCLR: SimCLR whose positive is the nearest neighbour in a bank (Dwibedi et al. 2021, eq. 3, Algorithm 1).

    Temperature 0.1, bank 98,304, projector of three layers (2048, 2048, 256) with BatchNorm after the last too (ours
    without scale and shift), predictor (4096, 256), LARS with lr 0.3 a 256 images, batch 4096, weight decay 1e-6, ten
    epochs of warm-up. Table 1: 70.7 linear after 200 epochs, 75.4 after 1000.
    """
    return replace(scale, objective="nnclr", temperature=0.1, **_TWO_ALIKE)


def simclr(scale: Recipe) -> Recipe:
    """SimCLR: every image's other view is told from the other images of the batch (Chen et al. 2020, eq. 1, NT-Xent).

    Temperature 0.1, two strong views (crops from 0.08, colours by 0.8), projector (2048, 128), LARS with lr 0.3 a 256
    images, batch 4096, weight decay 1e-6, ten epochs of warm-up. Table 1: 68.3 linear after 200 epochs, 69.3 after
    1000.
    """
    return replace(scale, objective="simclr", temperature=0.1, bank_size=0, **_TWO_ALIKE)


def byol_sym(scale: Recipe) -> Recipe:
    """BYOL as published: both views are predicted from each other (Grill et al. 2020, eq. 2 and its symmetric term).

    Projector and predictor (4096, 256), target momentum 0.996 to 1, LARS with lr 0.2 a 256 images, batch 4096,
    weight decay 1.5e-6, ten epochs of warm-up, crops from 0.08, saturation by 0.2. Their two views differ, blur 1
    against 0.1 with solarising 0.2; ours are alike, blur 0.5. Table 1: 70.6 linear after 200 epochs, 74.3 after 1000.
    `byol` is the asymmetric half, at half the passes.
    """
    return replace(scale, objective="byol", bank_size=0, **_TWO_ALIKE)


def simsiam(scale: Recipe) -> Recipe:
    """SimSiam: BYOL without a target encoder (Chen and He 2021, eq. 1 to 4).

    Projector of three layers (2048) with BatchNorm after the last, predictor with a bottleneck (512), lr 0.05, batch
    256. Their predictor's learning rate does not fall; ours does, as all others. Table 1: 70.0 linear after 200 epochs,
    70.8 after 400.
    """
    return replace(scale, objective="simsiam", bank_size=0, projection_layers=3, projection_norm=True, **_TWO_ALIKE)


def isd(scale: Recipe) -> Recipe:
    """ISD: be as similar to the other images of a bank as the target is (Tejankar et al. 2021, Sec. 3).

    Their ResNet-50: temperature 0.1, of the target 0.01, bank 128,000, target momentum 0.99, lr 0.05, weak and strong
    views, 200 epochs. Table 1: 69.8 linear, 59.2 1-NN, 62.0 20-NN. Their ResNet-18, and ours at the other scales: one
    temperature, 0.02; theirs has two strong views and momentum 0.999 (isd+strong-views --target-momentum 0.999).
    """
    return replace(scale, objective="isd", temperature=0.02)


def paws(scale: Recipe) -> Recipe:
    """PAWS: views agree on their classes by similarity to labelled images (Assran et al. 2021, eq. 1 to 4).

    For few labels. Temperature 0.1, sharpening 0.25, label smoothing 0.1, support of 960 classes × 7 images, six small
    crops, colours by 0.8, projector of three layers (2048), LARS with lr 6.4, batch 4096, weight decay 1e-6, ten epochs
    of warm-up. ImageNet with 10 % of the labels: 75.5 top-1; 70.2 with 1,680 support images and 62.9 with 400
    (paws+support-400, which the paper trained itself, for 100 epochs; its lr of 0.4 is ours, in proportion to the
    batch). Their code also sets targets below 1e-4 to zero, has BatchNorm before the predictor, and its learning rate
    ends at 0.064; ours does not.
    """
    return replace(
        scale, objective="paws", temperature=0.1, sharpening=0.25, bank_size=0, support_classes="auto", **_TWO_ALIKE
    )


def fixmatch(scale: Recipe) -> Recipe:
    """FixMatch: distorted images are to be named as plain ones, where that is certain (Sohn et al. 2020, eq. 3 and 4).

    For few labels. Threshold 0.95 and weight 1, on ImageNet 0.7 and 10; RandAugment with cutout as the strong view; 64
    labelled images beside a batch and lr 0.03, on ImageNet 1,024 beside 5,120, lr 0.4 and five epochs of warm-up, 300
    epochs: with 10 % of the labels 71.5 top-1. They evaluate a moving average of the network, we the network; their SGD
    is Nesterov's, ours is everyone's; their learning rate falls in steps, ours by a cosine.
    """
    return replace(scale, objective="fixmatch", bank_size=0, pseudo_threshold=0.95, second_view="rand-augment")


BASELINES = by_name(xent, supcon, proto_nw, moco_v2, nnclr, simclr, byol_sym, simsiam, isd, paws, fixmatch)

AT_PAPER_SCALE: dict[str, dict[str, Any]] = {
    "supcon": _PROJECTOR_128,
    "moco-v2": {
        **_PROJECTOR_128,
        "bank_size": 65_536,
        "lr": 0.03,
        "target_momentum": 0.999,
        "target_momentum_end": 0.999,
    },
    "nnclr": {
        **_LARGE_BATCH,
        "projection_layers": 3,
        "projection_norm": True,
        "projection_hidden": 2048,
        "projection_dim": 256,
        "prediction_hidden": 4096,
        "bank_size": 98_304,
        "lr": 4.8,
    },
    "simclr": {**_LARGE_BATCH, **_STRONGER_COLOURS, **_PROJECTOR_128, "strong_crop": 0.08, "lr": 4.8},
    "byol-sym": {
        **_LARGE_BATCH,
        "strong_crop": 0.08,
        "saturation": 0.2,
        "projection_hidden": 4096,
        "projection_dim": 256,
        "lr": 3.2,
        "weight_decay": 1.5e-6,
        "target_momentum": 0.996,
        "target_momentum_end": 1.0,
    },
    "simsiam": _PROJECTOR_2048,
    "isd": {"temperature": 0.1, "target_temperature": 0.01},
    "paws": {
        **_LARGE_BATCH,
        **_STRONGER_COLOURS,
        **_PROJECTOR_2048,
        "projection_layers": 3,
        "extra_crops": 6,
        "support_classes": 960,
        "support_images": 7,
        "lr": 6.4,
        "epochs": 300,
    },
    "fixmatch": {
        "batch_size": 5120,
        "support_images": 1024,
        "pseudo_threshold": 0.7,
        "unlabelled_weight": 10.0,
        "lr": 0.4,
        "warmup_epochs": 5,
        "weight_decay": 3e-4,
        "epochs": 300,
    },
}
"""Settings of each method's own paper for ImageNet, where they differ from this one's."""
