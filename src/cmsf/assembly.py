"""From a recipe's words to the objects that train: what `auto` means for these images, and one learner."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.amp import GradScaler

from cmsf.backbones import feature_width, make_backbone
from cmsf.bank import MemoryBank
from cmsf.constraints import Constraint, NearCompanion, SameLabel, Unconstrained
from cmsf.data import Dataset
from cmsf.encoders import Encoders
from cmsf.errors import BadInput
from cmsf.knowledge import GivenLabels, Knowledge, Nothing, PreviousEpoch, PseudoLabels, ThirdView
from cmsf.learner import Learner
from cmsf.objectives import MeanShift, Term
from cmsf.precision import Precision
from cmsf.pseudo_classifiers import Layers, PseudoClassifier, PseudoCourse, Vote
from cmsf.recipe import AUTO, Recipe, Resolved
from cmsf.rows import UNKNOWN
from cmsf.views import Augmentation, RandomCrop
from cmsf.weights import StartingWeights, starting_weights

LARGEST_SMALL_IMAGE = 64
_LARGEST_AUTO_BANK = 128_000
_MANY_IMAGES = 20_000
_PAPERS_CROP, _SWAV_CROP = 0.2, 0.14
_VOTES = 20


def resolve(recipe: Recipe, data: Dataset, typical_side: int) -> Resolved:
    """The recipe with a number for every `auto`, or one message that says what does not fit the data."""
    images = len(data.train)
    if images < 2:
        raise BadInput(f"{data.name} has {images} training images; two are the least to learn from")
    bank = min(_LARGEST_AUTO_BANK, images) if recipe.bank_size == AUTO else recipe.bank_size
    if bank > images:
        raise BadInput(
            f"--bank-size {bank} exceeds the {images} images, and a row per image is all a bank can hold; "
            f"use {images} or less, or auto"
        )
    batch = _auto_batch(images, bank) if recipe.batch_size == AUTO else recipe.batch_size
    if batch > images:
        raise BadInput(f"--batch-size {batch} exceeds the {images} images; use {_auto_batch(images, bank)}, or auto")
    if batch > bank:
        raise BadInput(f"--batch-size {batch} exceeds --bank-size {bank}, which must hold a batch; use {bank} or less")
    _check_neighbours(recipe, bank)
    if recipe.constraint == "label":
        _check_labels(recipe, data)
    if recipe.pseudo_labels != "none" or recipe.name.startswith("cmsf-semi"):
        _check_few_labels(recipe, data)
    if recipe.warmup_epochs >= recipe.epochs:
        raise BadInput(f"--warmup-epochs {recipe.warmup_epochs} leaves nothing of --epochs {recipe.epochs}; use fewer")
    size = view_size(recipe, typical_side)
    extra_size = max(8, round(size * 3 / 7)) if recipe.extra_size == AUTO else recipe.extra_size
    with torch.random.fork_rng(devices=[]):
        backbone = make_backbone(recipe.backbone, recipe.stem, size)
        width = feature_width(backbone, recipe.backbone, size)
        if recipe.extra_crops:  # a network for one size alone cannot have them
            feature_width(backbone, recipe.backbone, extra_size)
    if recipe.extra_crop_least > recipe.extra_crop_most:
        raise BadInput(
            f"--extra-crop-least {recipe.extra_crop_least} exceeds --extra-crop-most {recipe.extra_crop_most}; "
            "swap them"
        )
    least = _SWAV_CROP if recipe.extra_crops else _PAPERS_CROP
    numbers = {
        "size": size,
        "weak_crop": least if recipe.weak_crop == AUTO else recipe.weak_crop,
        "strong_crop": least if recipe.strong_crop == AUTO else recipe.strong_crop,
        "extra_size": extra_size,
        "cache": "ram" if data.in_memory else "off",
        "bank_size": bank,
        "batch_size": batch,
        "projection_hidden": 2 * width if recipe.projection_hidden == AUTO else recipe.projection_hidden,
        "projection_dim": max(2, width // 4) if recipe.projection_dim == AUTO else recipe.projection_dim,
    }
    return Resolved(**(asdict(recipe) | numbers))


def view_size(recipe: Recipe, typical_side: int) -> int:
    if recipe.size != AUTO:
        return recipe.size
    return max(8, typical_side) if typical_side <= LARGEST_SMALL_IMAGE else 128


def empty_backbone(recipe: Resolved) -> nn.Module:
    """The recipe's network, to load weights into."""
    backbone = make_backbone(recipe.backbone, recipe.stem, recipe.size)
    return backbone.to(memory_format=torch.channels_last)


def make_encoders(recipe: Resolved, start: StartingWeights | None = None) -> Encoders:
    """Encoders with weights that the seed decides, but for a backbone that is given its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        backbone = empty_backbone(recipe)
        width = feature_width(backbone, recipe.backbone, recipe.size)
        if start is not None:
            start.put_into(backbone)
        precision = Precision(recipe.precision)
        return Encoders(backbone, width, recipe.projection_hidden, recipe.projection_dim, precision)


def starts_from(recipe: Resolved) -> StartingWeights | None:
    """The weights that the recipe names; None: random ones."""
    return None if recipe.init == "none" else starting_weights(recipe.init, recipe.backbone, recipe.size)


def make_learner(
    recipe: Resolved, label: Int[Tensor, " n"], device: torch.device | str, start: StartingWeights | None = None
) -> Learner:
    """The learner of a resolved recipe, for as many images as there are labels; `start` as for make_encoders."""
    device, precision = torch.device(device), Precision(recipe.precision)
    precision.check(device)
    encoders = make_encoders(recipe, start).to(device)
    strong = Augmentation(
        RandomCrop(recipe.size, (recipe.strong_crop, 1.0), flip=recipe.flip),
        jitter=recipe.jitter,
        brightness=recipe.brightness,
        contrast=recipe.contrast,
        saturation=recipe.saturation,
        hue=recipe.hue,
        greyscale=recipe.greyscale,
        blur=recipe.blur,
        solarise=recipe.solarise,
    )
    extra = RandomCrop(recipe.extra_size, (recipe.extra_crop_least, recipe.extra_crop_most), flip=recipe.flip)
    constraint, knowledge = _constraint_and_knowledge(recipe, label.to(device), encoders.dim)
    return Learner(
        encoders=encoders,
        bank=MemoryBank(recipe.bank_size, encoders.dim, knowledge.companion_dim, device=device, dtype=precision.dtype),
        knowledge=knowledge,
        objective=_objective(recipe, constraint),
        weak=Augmentation(RandomCrop(recipe.size, (recipe.weak_crop, 1.0), flip=recipe.flip)),
        strong=strong,
        extra=replace(strong, crop=extra) if recipe.extra_crops else None,
        extra_crops=recipe.extra_crops,
        optimiser=torch.optim.SGD(
            encoders.learning(), lr=recipe.lr, momentum=recipe.sgd_momentum, weight_decay=recipe.weight_decay
        ),
        scaler=GradScaler(device.type, enabled=precision.scales_loss),
    )


def _constraint_and_knowledge(recipe: Recipe, label: Tensor, dim: int) -> tuple[Constraint, Knowledge]:
    precision = Precision(recipe.precision)
    if recipe.constraint == "label" and recipe.pseudo_labels != "none":
        classifier, offline = _pseudo_classifier(recipe, label, dim), recipe.pseudo_cache == "offline"
        return SameLabel(), PseudoLabels(label, dim, classifier, recipe.pseudo_threshold, offline, precision.dtype)
    if recipe.constraint == "label":
        return SameLabel(), GivenLabels(label)
    if recipe.constraint == "companion":
        constraint = NearCompanion(recipe.companion_k)
        if recipe.companions == "third-view":
            return constraint, ThirdView(dim)
        return constraint, PreviousEpoch(len(label), dim, precision.resting)
    return Unconstrained(), Nothing()


def _pseudo_classifier(recipe: Recipe, label: Tensor, dim: int) -> PseudoClassifier:
    dtype, known = Precision(recipe.precision).dtype, label[label != UNKNOWN]
    classes, count = int(known.max()) + 1, known.bincount()
    if recipe.pseudo_labels == "knn":
        made: PseudoClassifier = Vote(len(known), dim, classes, min(_VOTES, int(count[count > 0].min())), dtype)
    else:
        hidden = {"linear": 0, "mlp-2": 1, "mlp-3": 2}[recipe.pseudo_labels]
        course = PseudoCourse(epochs=recipe.pseudo_epochs, lr=recipe.pseudo_lr)
        made = Layers(dim, classes, hidden, course, recipe.seed)
    return made.to(label.device, dtype)


def _objective(recipe: Recipe, constraint: Constraint) -> MeanShift:
    k = None if recipe.k == "all" else recipe.k
    plain_weight = 1.0 if recipe.constraint == "none" else recipe.unconstrained_weight
    plain = Term("unconstrained", Unconstrained(), k, plain_weight, recipe.include_query)
    constrained = Term("constrained", constraint, k, 1 - plain_weight, recipe.include_query)
    return MeanShift(tuple(term for term in (plain, constrained) if term.weight > 0))


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
    elif recipe.k > bank:
        raise BadInput(f"--k {recipe.k} exceeds the bank's {bank} rows; use {bank} or less")
    if recipe.constraint == "companion" and recipe.companion_k > bank:
        raise BadInput(f"--companion-k {recipe.companion_k} exceeds the bank's {bank} rows; use {bank} or less")


def _check_labels(recipe: Recipe, data: Dataset) -> None:
    images, labelled = len(data.train), len(data.train.labelled)
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


def _check_few_labels(recipe: Recipe, data: Dataset) -> None:
    images = len(data.train)
    if recipe.constraint != "label":
        raise BadInput(
            f"--pseudo-labels {recipe.pseudo_labels} needs --constraint label; use it, or --pseudo-labels none"
        )
    if len(data.train.labelled) == images:
        raise BadInput(
            f"every one of the {images} images has a label, so {recipe.name} has nothing to learn without; "
            "use cmsf-sup, or fewer labels with --label-share 0.1 or --labels"
        )
    check_every_class_labelled(data)


def check_every_class_labelled(data: Dataset) -> None:
    """A class without labels could never be guessed, and its images would all be taken for others."""
    missing = data.unlabelled_classes()
    if missing:
        first = f"{missing[0]!r}" if len(missing) == 1 else f"{len(missing)} classes, the first {missing[0]!r},"
        raise BadInput(
            f"no training image of {first} in {data.name} is labelled; label one of each class at least, "
            "or leave the images of such classes out"
        )
