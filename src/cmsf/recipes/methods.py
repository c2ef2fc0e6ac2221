"""The paper's own methods, each at any scale; one derives from another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cmsf.recipes.recipe import Recipe


def msf(scale: Recipe) -> Recipe:
    """Mean shift: every image is pulled to its five nearest neighbours, itself among them (C = M, k = 5).

    The paper's baseline (Koohpayegani et al. 2021). Table 1, ImageNet, ResNet-50, 200 epochs:
    72.2 linear, 62.1 1-NN, 65.1 20-NN with a bank of 256,000 (--bank-size 256000; the scale's own is 128,000).
    """
    return replace(scale, constraint="none", k=5, unconstrained_weight=0.0)


def byol(scale: Recipe) -> Recipe:
    """BYOL, asymmetric: every image is pulled to its own other view alone (C = M, k = 1).

    Table 1, ImageNet, ResNet-50, 200 epochs: 69.3 linear, 55.0 1-NN, 59.2 20-NN.
    """
    return replace(msf(scale), k=1)


def cmsf_self(scale: Recipe) -> Recipe:
    """Constrained mean shift, self-supervised: neighbours by last epoch's view of the same images.

    Half the loss is mean shift (k = 5). The other half pulls to rows whose previous-epoch embeddings are the k' = 5
    nearest to this image's own previous-epoch embedding. Section 2.1.
    Table 1, ImageNet, ResNet-50, 200 epochs, bank 128,000: 73.0 linear, 63.2 1-NN, 66.4 20-NN.
    k' = 5, 10, 20, 40, 80: 66.4, 66.1, 65.9, 65.6, 65.0 20-NN (ablation table).
    """
    return replace(msf(scale), constraint="companion", companion_k=5, unconstrained_weight=0.5)


def cmsf_sup(scale: Recipe) -> Recipe:
    """Constrained mean shift with labels: every image is pulled to the ten nearest of its own class.

    Section 2.2. ImageNet, ResNet-50, 200 epochs: 76.4 linear, 80.1 mean transfer over ten data sets (Table 2).
    An image without a label is pulled to its nearest in the whole bank.
    """
    return replace(msf(scale), constraint="label", k=10)


def cmsf_sup_all(scale: Recipe) -> Recipe:
    """Constrained mean shift with labels, top-all: every image is pulled to the mean of its whole class.

    ImageNet, ResNet-50, 200 epochs: 75.7 linear, 80.1 mean transfer (Table 2).
    """
    return replace(cmsf_sup(scale), k="all", keep="last")  # no label can be held out


def cmsf_semi(scale: Recipe) -> Recipe:
    """Constrained mean shift with few labels: every image is pulled to the ten nearest of its class, as far as known.

    A classifier on the target's embeddings of the labelled images, trained twice an epoch, gives the others a
    pseudo-label where it is confident (0.85); an image it is not sure of is pulled to its nearest in the whole bank.
    Section 2.3. ImageNet with 10 % of the labels, ResNet-50, 200 epochs, then fine-tuned: 69.9 top-1,
    and 70.5 with mixed precision and batches of 768. On ImageNet-100 the paper's threshold is 0.9; there 0, 0.7 and 0.9
    give 71.2, 72.3 and 72.7 20-NN (supplement).
    """
    return replace(cmsf_sup(scale), pseudo_labels="mlp-2", pseudo_threshold=0.85)


def cmsf_semi_basic(scale: Recipe) -> Recipe:
    """cmsf-semi without pseudo-labels: labelled images are pulled to their class, others to their nearest.

    It is cmsf-sup with few labels, and cmsf-semi that is never sure. ImageNet with 10 % of the labels: 68.6 top-1.
    """
    return cmsf_sup(scale)


def by_name(*methods: Callable[[Recipe], Recipe]) -> dict[str, Callable[[Recipe], Recipe]]:
    """Returns methods by their names on the command line: those of their functions, with dashes."""
    return {method.__name__.replace("_", "-"): method for method in methods}


OURS = by_name(byol, msf, cmsf_self, cmsf_sup, cmsf_sup_all, cmsf_semi, cmsf_semi_basic)
