"""Resolves every `auto` of a recipe for given images, or says in one message what does not fit them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from cmsf.data import Dataset
from cmsf.method.build import embeds_third_view, has_companions, make_loss
from cmsf.method.losses import Loss
from cmsf.models.backbones import feature_width, make_backbone, without_weights
from cmsf.models.precision import Precision
from cmsf.recipes.recipe import AUTO, CONSTRAINED, Recipe, ResolvedRecipe
from cmsf.utils.errors import BadInput
from cmsf.utils.memory import available_memory

LARGEST_SMALL_IMAGE = 64
_LARGEST_AUTO_BANK = 128_000
_MANY_IMAGES = 20_000
_PAPERS_CROP, _SWAV_CROP = 0.2, 0.14
_AUTO_LABELLED, _AUTO_SUPPORT = 64, 640
"""Labelled images beside a batch: FixMatch's and PAWS's on CIFAR-10."""
_MOST_SUPPORT_CLASSES = 200
_EXPECTED_CLASSES = 10
_PLENTY = 2**31
"""Labelled images of each class, where their number is not known."""
_COPIES = 4
"""Of each weight: online, target, gradient and momentum."""
_ONLY_FOR: dict[str, tuple[str, ...]] = {
    "temperature": ("constrained-nce", "supcon", "prototypes", "info-nce", "nnclr", "simclr", "isd", "paws"),
    "target_temperature": ("isd",),
    **dict.fromkeys(
        ("constraint", "companions", "companion_k", "companion_coverage", "k", "unconstrained_weight"), CONSTRAINED
    ),
    **dict.fromkeys(("spread", "spread_weight"), CONSTRAINED),
    **dict.fromkeys(("pseudo_labels", "pseudo_cache", "pseudo_epochs", "pseudo_lr"), CONSTRAINED),
    "include_query": (*CONSTRAINED, "supcon"),
    "pseudo_threshold": (*CONSTRAINED, "fixmatch"),
    "support_classes": ("paws",),
    "support_images": ("paws", "fixmatch"),
    "sharpening": ("paws",),
    "unlabelled_weight": ("fixmatch",),
    "extra_crops": ("mean-shift", "paws"),
}
"""Settings that not every loss uses."""


def resolve(
    recipe: Recipe, data: Dataset, median_side: int, processes: int = 1, bank_shares: int = 1, cache_shares: int = 1
) -> ResolvedRecipe:
    """Returns the recipe with a number for every `auto`, or one message that says what does not fit.

    processes: on this machine; bank_shares, cache_shares: between how many processes bank and cache are divided.
    """
    images, loss_fn = len(data.train), make_loss(recipe)
    _check_settings_used(recipe)
    if images < 2:
        raise BadInput(f"{data.name} has {images} training images; at least two are needed")
    bank, batch = _bank_and_batch(recipe, loss_fn, images)
    _check_labels(recipe, loss_fn, data)
    support = 0, 0
    if loss_fn.needs_support:
        present, count = data.train.label[data.train.labelled].unique(return_counts=True)
        support = _support(recipe, count.tolist(), [data.label_names[label] for label in present.tolist()])
    resolved, width = _with_numbers(recipe, bank, batch, support, median_side, data.in_memory)
    _check_memory(resolved, width, -(-bank // bank_shares), -(-images // cache_shares), processes)
    return resolved


def expected(recipe: Recipe, images: int, median_side: int) -> ResolvedRecipe:
    """Returns what `resolve` would for so many images of this size, not in memory, with labels of ten classes."""
    loss_fn = make_loss(recipe)
    _check_settings_used(recipe)
    bank, batch = _bank_and_batch(recipe, loss_fn, images)
    support = 0, 0
    if loss_fn.needs_support:
        classes = _EXPECTED_CLASSES if recipe.support_classes == AUTO else max(1, recipe.support_classes)
        support = _support(recipe, [_PLENTY] * classes, [""] * classes)
    return _with_numbers(recipe, bank, batch, support, median_side, in_memory=False)[0]


def _with_numbers(
    recipe: Recipe, bank: int, batch: int, support: tuple[int, int], median_side: int, in_memory: bool
) -> tuple[ResolvedRecipe, int]:
    """Returns the recipe with these numbers and those that follow from its network, and the network's width."""
    warmup = recipe.epochs // 20 if recipe.warmup_epochs == AUTO else recipe.warmup_epochs
    if warmup >= max(1, recipe.epochs):
        raise BadInput(f"--warmup-epochs {warmup} leaves nothing of --epochs {recipe.epochs}; use fewer, or auto")
    if recipe.freeze_epochs >= recipe.epochs > 0:
        raise BadInput(
            f"--freeze-epochs {recipe.freeze_epochs} leaves none of --epochs {recipe.epochs} to train the backbone; "
            "use fewer, or more --epochs"
        )
    if recipe.accumulate > 1 and not make_loss(recipe).linear_in_predictions:
        other = f"--spread {recipe.spread}" if recipe.objective == "mean-shift" else recipe.objective
        raise BadInput(
            f"--accumulate {recipe.accumulate} is for losses that are linear in the predictions, as mean shift is, and "
            f"{other} is not; leave one of them out"
        )
    if recipe.accumulate > 1 and (batch % recipe.accumulate or batch // recipe.accumulate < 2):
        raise BadInput(
            f"--accumulate {recipe.accumulate} does not divide --batch-size {batch} into equal parts of two images or "
            "more; choose numbers that do"
        )
    if recipe.backbone == AUTO:  # api.train has looked at the weights before
        raise BadInput(f"{recipe.name} has the network of its starting weights; name one with --backbone")
    size = view_size(recipe, median_side)
    extra_size = max(8, round(size * 3 / 7)) if recipe.extra_size == AUTO else recipe.extra_size
    width = _width(recipe, size, extra_size)
    if recipe.extra_crop_least > recipe.extra_crop_most:
        raise BadInput(
            f"--extra-crop-least {recipe.extra_crop_least} exceeds --extra-crop-most {recipe.extra_crop_most}; "
            "swap them"
        )
    smallest_crop = _SWAV_CROP if recipe.extra_crops else _PAPERS_CROP
    hidden = 2 * width if recipe.projection_hidden == AUTO else recipe.projection_hidden
    numbers = {
        "size": size,
        "weak_crop": smallest_crop if recipe.weak_crop == AUTO else recipe.weak_crop,
        "strong_crop": smallest_crop if recipe.strong_crop == AUTO else recipe.strong_crop,
        "extra_size": extra_size,
        "cache": "ram" if in_memory else "off",
        "bank_size": bank,
        "support_classes": support[0],
        "support_images": support[1],
        "batch_size": batch,
        "warmup_epochs": warmup,
        "projection_hidden": hidden,
        "projection_dim": max(2, width // 4) if recipe.projection_dim == AUTO else recipe.projection_dim,
        "prediction_hidden": hidden if recipe.prediction_hidden == AUTO else recipe.prediction_hidden,
    }
    # What is still open: api.train has asked the device and the weights before.
    numbers |= {name: value for name, value in ResolvedRecipe.usual().items() if getattr(recipe, name) == AUTO}
    return ResolvedRecipe(**(asdict(recipe) | numbers)), width


def _width(recipe: Recipe, size: int, extra_size: int) -> int:
    """Returns the number of features of the recipe's network, without its weights where that is possible."""

    def measure() -> int:
        backbone = make_backbone(recipe.backbone, recipe.stem, size)
        if recipe.extra_crops:  # a network for one size alone cannot have them
            feature_width(backbone, recipe.backbone, extra_size)
        return feature_width(backbone, recipe.backbone, size)

    return without_weights(measure)  # method/build.py draws them, once


def _check_memory(recipe: ResolvedRecipe, width: int, rows: int, images: int, processes: int) -> None:
    """Refuses heads, a bank and a cache that exceed the memory; rows, images: of bank and cache, in each process."""
    hidden, dim, between = recipe.projection_hidden, recipe.projection_dim, recipe.prediction_hidden
    weights = width * hidden + max(0, recipe.projection_layers - 2) * hidden**2 + hidden * dim + 2 * dim * between
    precision, companions = Precision(recipe.precision), has_companions(recipe)
    numbers = _COPIES * weights + rows * dim * (2 if companions else 1)  # a companion is a second row
    needed = numbers * precision.dtype.itemsize
    cached = images if companions and not embeds_third_view(recipe) else 0
    needed = processes * (needed + cached * dim * precision.cache_dtype.itemsize)
    free = available_memory()
    if needed > free:
        each = f" in {processes} processes" if processes > 1 else ""
        cache = f" with companions of {cached} images" if cached else " with companions" if companions else ""
        raise BadInput(
            f"heads of --projection-hidden {hidden} and --projection-dim {dim} and {rows} rows of a bank{cache} take "
            f"{needed / 1e9:.1f} GB of memory{each}, and {free / 1e9:.1f} GB are free; use smaller ones"
        )


def view_size(recipe: Recipe, median_side: int) -> int:
    if recipe.size != AUTO:
        return recipe.size
    return max(8, median_side) if median_side <= LARGEST_SMALL_IMAGE else 128


def _check_settings_used(recipe: Recipe) -> None:
    usual = Recipe(support_images=0) if recipe.support_images == 0 else Recipe()  # 0: none, in a run's own recipe
    for name, objectives in _ONLY_FOR.items():
        value = getattr(recipe, name)
        if recipe.objective not in objectives and value != getattr(usual, name):
            flag = f"--{name.replace('_', '-')} {value}"
            raise BadInput(f"{recipe.objective} does not use {flag}; leave it out (it is for {', '.join(objectives)})")
    if recipe.companion_coverage and recipe.constraint != "companion":
        raise BadInput(f"--companion-coverage {recipe.companion_coverage} is for --constraint companion; leave it out")
    if recipe.spread == "none" and recipe.spread_weight != usual.spread_weight:
        raise BadInput(f"--spread-weight {recipe.spread_weight} is for --spread uniformity or koleo; add it")
    if recipe.optimiser == "lars" and recipe.layer_decay != usual.layer_decay:
        raise BadInput(f"lars does not use --layer-decay {recipe.layer_decay}; use 1, or another --optimiser")
    if recipe.optimiser == "adamw" and recipe.sgd_momentum != usual.sgd_momentum:
        raise BadInput(f"adamw does not use --sgd-momentum {recipe.sgd_momentum}; leave it out, or use --optimiser sgd")
    if recipe.objective == "paws" and recipe.support_classes in (0, 1):
        raise BadInput(
            f"paws tells classes apart, so --support-classes {recipe.support_classes} is invalid; use 2 or more"
        )


def _bank_and_batch(recipe: Recipe, loss_fn: Loss, images: int) -> tuple[int, int]:
    bank = 0 if loss_fn.bank == "none" else min(_LARGEST_AUTO_BANK, images)
    if recipe.bank_size != AUTO:
        if bool(recipe.bank_size) != bool(bank):
            kept = "needs a bank" if bank else "keeps no bank"
            raise BadInput(f"{recipe.objective} {kept}, so --bank-size {recipe.bank_size} is invalid; use auto")
        bank = recipe.bank_size
    if bank > images:
        raise BadInput(
            f"--bank-size {bank} exceeds the {images} images, and a row per image is all a bank can hold; "
            f"use {images} or less, or auto"
        )
    most = bank or images
    batch = _auto_batch(images, most) if recipe.batch_size == AUTO else recipe.batch_size
    if batch > images:
        raise BadInput(f"--batch-size {batch} exceeds the {images} images; use {_auto_batch(images, most)}, or auto")
    if batch > most:
        raise BadInput(f"--batch-size {batch} exceeds --bank-size {bank}, which must hold a batch; use {bank} or less")
    if recipe.objective in CONSTRAINED:
        _check_neighbours(recipe, bank)
    return bank, batch


def _auto_batch(images: int, bank: int) -> int:
    """The paper's 256; 128 where an epoch is short; for few images the power of two that leaves four steps an epoch."""
    batch = 256 if images >= _MANY_IMAGES else 128
    while batch > 2 and batch > min(bank, images // 4):
        batch //= 2
    return batch


def _check_neighbours(recipe: Recipe, bank: int) -> None:
    if recipe.k == "all":
        if recipe.constraint == "none" or recipe.unconstrained_weight > 0:
            raise BadInput("--k all without a constraint pulls every image to the mean of the bank; use a number")
        if recipe.objective == "constrained-nce" and recipe.constraint != "label":
            raise BadInput(
                "--k all with a contrast is for --constraint label, which says what is related; use a number"
            )
    elif recipe.k > bank:
        raise BadInput(f"--k {recipe.k} exceeds the bank's {bank} rows; use {bank} or less")
    if recipe.constraint == "companion" and recipe.companion_k > bank:
        raise BadInput(f"--companion-k {recipe.companion_k} exceeds the bank's {bank} rows; use {bank} or less")


def _check_labels(recipe: Recipe, loss_fn: Loss, data: Dataset) -> None:
    images, labelled = len(data.train), len(data.train.labelled)
    if recipe.pseudo_labels != "none" and recipe.constraint != "label":
        raise BadInput(
            f"--pseudo-labels {recipe.pseudo_labels} needs --constraint label; use it, or --pseudo-labels none"
        )
    if not loss_fn.learns_from_labels:
        return
    if not labelled:
        raise BadInput(
            f"{recipe.name} learns from labels, and none of the {images} images has one; "
            "put each class into a folder of its own, give a list with --labels, or use cmsf-self"
        )
    present = data.train.label[data.train.labelled].unique()
    if len(present) < 2:
        only = data.label_names[int(present[0])]
        raise BadInput(
            f"{recipe.name} needs two classes or more, and all {labelled} labels are {only!r}; use cmsf-self"
        )
    if recipe.k == "all" and labelled < images:
        raise BadInput(
            f"--k all pulls an image to its whole class, and {images - labelled} of {images} have none; use --k 10"
        )
    if loss_fn.needs_support or recipe.pseudo_labels != "none" or recipe.name.startswith("cmsf-semi"):
        _check_few_labels(recipe, data)


def _support(recipe: Recipe, counts: Sequence[int], names: Sequence[str]) -> tuple[int, int]:
    """Returns how many classes, and how many labelled images of each, come beside a batch; 0 classes: of all together.

    counts: of labelled images by class; names: of these classes.
    """
    if recipe.support_classes == 0:
        total = sum(counts)
        images = min(_AUTO_LABELLED, total) if recipe.support_images == AUTO else recipe.support_images
        if not 0 < images <= total:
            raise BadInput(f"--support-images {images} is invalid: there are {total} labelled images; use 1 to {total}")
        return 0, images
    classes = min(_MOST_SUPPORT_CLASSES, len(counts)) if recipe.support_classes == AUTO else recipe.support_classes
    if classes > len(counts):
        raise BadInput(f"--support-classes {classes} exceeds the {len(counts)} classes with labels; use fewer")
    fewest = min(counts)
    rarest = names[counts.index(fewest)]
    images = min(max(2, _AUTO_SUPPORT // classes), fewest) if recipe.support_images == AUTO else recipe.support_images
    if not 0 < images <= fewest:
        raise BadInput(
            f"--support-images {images} is invalid: {rarest!r} has {fewest} labelled images; use 1 to {fewest}, "
            "or label more"
        )
    return classes, images


def _check_few_labels(recipe: Recipe, data: Dataset) -> None:
    images = len(data.train)
    if len(data.train.labelled) == images:
        raise BadInput(
            f"every one of the {images} images has a label, so {recipe.name} has no unlabelled ones to use; "
            "use cmsf-sup, or fewer labels with --label-share 0.1 or --labels"
        )
    data.check_every_class_labelled()
