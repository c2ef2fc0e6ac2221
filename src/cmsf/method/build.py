"""Builds the objects that train from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from timm.optim._param_groups import param_groups_layer_decay
from timm.optim.lars import Lars
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer

from cmsf.data.transforms import Augmentation, Preprocessing, RandAugment
from cmsf.method.bank import MemoryBank
from cmsf.method.constraints import NearCompanion, SameLabel, Unconstrained
from cmsf.method.distributed_bank import ReplicatedBank, ShardedBank
from cmsf.method.learner import Learner
from cmsf.method.losses import (
    EXTRA,
    FIRST,
    ISD,
    NNCLR,
    PAWS,
    SECOND,
    SPREADS,
    SUPPORT,
    THIRD,
    ConstrainedNCE,
    CrossEntropy,
    FixMatch,
    InfoNCE,
    Loss,
    MeanShift,
    Prototypes,
    SimCLR,
    SimSiam,
    Spread,
    SupCon,
    SymmetricBYOL,
    Term,
)
from cmsf.method.pseudo_labels import VOTES, KNNClassifier, MLPClassifier, PseudoClassifier, PseudoLabelSGD
from cmsf.method.supervision import GivenLabels, NoSupervision, PreviousEpoch, PseudoLabels, Supervision, ThirdView
from cmsf.models.backbones import feature_width, make_backbone
from cmsf.models.encoders import Encoders
from cmsf.models.heads import mlp
from cmsf.models.precision import Precision
from cmsf.models.sync_batchnorm import synchronize_batchnorm
from cmsf.models.weights import PretrainedWeights, load_pretrained
from cmsf.recipes.recipe import AUTO, CONSTRAINED, Recipe, ResolvedRecipe
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.distributed import World
from cmsf.utils.errors import BadInput

_LARS_TRUST = 0.001


def make_learner(
    recipe: ResolvedRecipe,
    label: Int[Tensor, " n"],
    device: torch.device | str,
    pretrained: PretrainedWeights | None = None,
    world: World = World(),
    bank_sharded: bool = False,
) -> Learner:
    """Builds the learner of a resolved recipe, for as many images as there are labels.

    pretrained: the backbone's initial weights; None: drawn from the seed.
    world: the processes that train together; bank_sharded: whether each of them holds a share of the bank alone.
    """
    device, precision, loss_fn = torch.device(device), Precision(recipe.precision), make_loss(recipe)
    precision.check(device)
    encoders = make_encoders(recipe, loss_fn, _count_classes(label), pretrained).to(device)
    if recipe.batch_norm != "shuffle":  # of the heads too, where the backbone's is frozen
        synchronize_batchnorm(encoders, world, device)
        encoders.train()  # which freezes what is to be frozen, in layers that were replaced too
    supervision = _supervision(recipe, loss_fn, label.to(device), encoders.dim, world)
    return Learner(
        encoders=encoders,
        bank=_bank(loss_fn, world, bank_sharded)(
            recipe.bank_size, encoders.dim, supervision.companion_dim, device=device, dtype=precision.dtype
        ),
        supervision=supervision,
        loss_fn=loss_fn,
        views=_views(recipe),
        optimizer=_optimizer(recipe, encoders),
        scaler=GradScaler(device.type, enabled=precision.uses_loss_scaling),
        world=world,
        shuffle_batchnorm=recipe.batch_norm == "shuffle",
        clip_grad=recipe.clip_grad,
        accumulate=recipe.accumulate,
    )


def _bank(loss_fn: Loss, world: World, sharded: bool) -> Callable[..., MemoryBank]:
    if sharded and loss_fn.bank != "none" and not loss_fn.selects_neighbours:
        raise BadInput(
            "--bank-sharded is for methods that choose neighbours; this one compares with every row; leave it out"
        )
    if world.alone:
        return MemoryBank
    return partial(ShardedBank if sharded else ReplicatedBank, world)


def make_loss(recipe: Recipe) -> Loss:
    temperature = recipe.temperature
    made: dict[str, Callable[[], Loss]] = {
        "mean-shift": lambda: MeanShift(_terms(recipe), recipe.extra_crops, recipe.companion_coverage, _spread(recipe)),
        "constrained-nce": lambda: ConstrainedNCE(
            _terms(recipe),
            companion_coverage=recipe.companion_coverage,
            spread=_spread(recipe),
            temperature=temperature,
        ),
        "cross-entropy": CrossEntropy,
        "supcon": lambda: SupCon(temperature, recipe.include_query),
        "prototypes": lambda: Prototypes(temperature),
        "info-nce": lambda: InfoNCE(temperature),
        "nnclr": lambda: NNCLR(temperature),
        "byol": SymmetricBYOL,
        "simsiam": SimSiam,
        "simclr": lambda: SimCLR(temperature),
        "isd": lambda: ISD(
            temperature, temperature if recipe.target_temperature == AUTO else recipe.target_temperature
        ),
        "paws": lambda: PAWS(temperature, recipe.sharpening, extra_crops=recipe.extra_crops),
        "fixmatch": lambda: FixMatch(recipe.pseudo_threshold, recipe.unlabelled_weight),
    }
    return made[recipe.objective]()


def _terms(recipe: Recipe) -> tuple[Term, ...]:
    k = None if recipe.k == "all" else recipe.k
    constraint = {"none": Unconstrained(), "label": SameLabel(), "companion": NearCompanion(recipe.companion_k)}
    plain_weight = 1.0 if recipe.constraint == "none" else recipe.unconstrained_weight
    plain = Term("unconstrained", Unconstrained(), k, plain_weight, recipe.include_query)
    constrained = Term("constrained", constraint[recipe.constraint], k, 1 - plain_weight, recipe.include_query)
    return tuple(term for term in (plain, constrained) if term.weight > 0)


def _spread(recipe: Recipe) -> Spread | None:
    return None if recipe.spread == "none" else Spread(SPREADS[recipe.spread], recipe.spread_weight)


def recipe_backbone(recipe: ResolvedRecipe) -> nn.Module:
    """Builds the recipe's backbone, to load weights into."""
    backbone = make_backbone(recipe.backbone, recipe.stem, recipe.size)
    return backbone.to(memory_format=torch.channels_last)


def initial_backbone(recipe: ResolvedRecipe, pretrained: PretrainedWeights | None = None) -> nn.Module:
    """Builds the backbone that training starts from, with pretrained weights or those drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        return _seeded_backbone(recipe, pretrained).to(Precision(recipe.precision).dtype)


def make_encoders(
    recipe: ResolvedRecipe, loss_fn: Loss, classes: int, pretrained: PretrainedWeights | None = None
) -> Encoders:
    """Builds the encoders that a loss needs, with weights drawn from the seed unless the backbone is pretrained."""
    hidden, dim = recipe.projection_hidden, recipe.projection_dim
    with torch.random.fork_rng(devices=[]):
        backbone = _seeded_backbone(recipe, pretrained)
        width = feature_width(backbone, recipe.backbone, recipe.size)
        projector = predictor = classifier = None
        if "projector" in loss_fn.heads:
            between = recipe.projection_layers - 1
            projector = mlp(width, hidden, dim, between, bias=True, output_norm=recipe.projection_norm)
        if "predictor" in loss_fn.heads:
            predictor = mlp(dim, recipe.prediction_hidden, dim, bias=True)
        if "classifier" in loss_fn.heads:
            classifier = nn.Linear(width, classes)
        return Encoders(
            backbone,
            dim if projector else width,
            projector,
            predictor,
            classifier,
            target=bool(loss_fn.target),
            precision=Precision(recipe.precision),
            frozen_statistics=recipe.batch_norm == "frozen",
        )


def _seeded_backbone(recipe: ResolvedRecipe, pretrained: PretrainedWeights | None) -> nn.Module:
    torch.manual_seed(recipe.seed)  # before pretrained weights too, so that the heads are drawn alike
    backbone = recipe_backbone(recipe)
    if pretrained is not None:
        pretrained.load_into(backbone)
    return backbone


def pretrained_weights(recipe: ResolvedRecipe) -> PretrainedWeights | None:
    """Loads the weights that the recipe names; None: random ones."""
    if recipe.init == "none":
        if recipe.init_by_order:
            raise BadInput("--init-by-order is for a file of weights, and --init is none; give a file, or leave it out")
        return None
    return load_pretrained(recipe.init, recipe.backbone, recipe.size, recipe.stem, recipe.init_by_order)


def _views(recipe: ResolvedRecipe) -> dict[int, Augmentation]:
    preprocessing = Preprocessing.from_recipe(recipe)
    mean, std = preprocessing.mean, preprocessing.std
    weak = Augmentation(preprocessing.random_crop((recipe.weak_crop, 1.0), recipe.flip), mean=mean, std=std)
    strong = Augmentation(
        preprocessing.random_crop((recipe.strong_crop, 1.0), recipe.flip),
        mean=mean,
        std=std,
        jitter=recipe.jitter,
        brightness=recipe.brightness,
        contrast=recipe.contrast,
        saturation=recipe.saturation,
        hue=recipe.hue,
        greyscale=recipe.greyscale,
        blur=recipe.blur,
        solarise=recipe.solarise,
    )
    kinds = {"weak": weak, "strong": strong, "rand-augment": RandAugment(weak.crop, mean=mean, std=std)}
    first, second = kinds[recipe.first_view], kinds[recipe.second_view]
    small = replace(strong.crop, size=recipe.extra_size, scale=(recipe.extra_crop_least, recipe.extra_crop_most))
    extra = {EXTRA + number: replace(strong, crop=small) for number in range(recipe.extra_crops)}
    return {FIRST: first, SECOND: second, THIRD: first, SUPPORT: first, **extra}


def _optimizer(recipe: ResolvedRecipe, encoders: Encoders) -> Optimizer:
    lr, momentum, decay = recipe.lr, recipe.sgd_momentum, recipe.weight_decay
    parameters = encoders.trainable_parameters()
    if recipe.optimiser == "adamw":
        return AdamW(_layer_groups(recipe, encoders), lr, weight_decay=decay)
    if recipe.optimiser == "sgd":
        groups = parameters if recipe.layer_decay == 1 else _layer_groups(recipe, encoders)
        return SGD(groups, lr, momentum, weight_decay=decay)
    # Biases and BatchNorm are neither decayed nor adapted (You et al. 2017).
    plain = {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}
    adapted = {
        "params": [p for p in parameters if p.ndim > 1],
        "weight_decay": recipe.weight_decay,
        "always_adapt": True,  # without decay too, where timm's would be plain SGD
    }
    lars: Optimizer = Lars([adapted, plain], lr, momentum, trust_coeff=_LARS_TRUST)
    return lars


def _layer_groups(recipe: ResolvedRecipe, encoders: Encoders) -> list[dict[str, Any]]:
    """Returns parameter groups with `lr_scale`, the share of the learning rate: 1 in the heads and the backbone's last
    layer, less in each layer than in the one above it. Biases and norms are not decayed."""
    backbone = encoders.online.backbone
    skip: Collection[str] = getattr(backbone, "no_weight_decay", tuple)()
    groups: list[dict[str, Any]] = param_groups_layer_decay(
        backbone, recipe.weight_decay, tuple(skip), layer_decay=recipe.layer_decay
    )
    # timm's groups are of the backbone, with 1 in its last layer; the heads come beside them.
    in_backbone = {id(parameter) for parameter in backbone.parameters()}
    heads = [parameter for parameter in encoders.trainable_parameters() if id(parameter) not in in_backbone]
    for decay, chosen in (
        (recipe.weight_decay, [p for p in heads if p.ndim > 1]),
        (0.0, [p for p in heads if p.ndim < 2]),
    ):
        if chosen:
            groups.append({"params": chosen, "weight_decay": decay, "lr_scale": 1.0})
    return groups


def _supervision(
    recipe: ResolvedRecipe, loss_fn: Loss, label: Int[Tensor, " n"], dim: int, world: World
) -> Supervision:
    precision = Precision(recipe.precision)
    if _has_pseudo_labels(recipe, loss_fn):
        classifier, offline = _pseudo_classifier(recipe, label, dim), embeds_clean_views(recipe, loss_fn)
        return PseudoLabels(label, dim, classifier, recipe.pseudo_threshold, offline, precision.dtype, world)
    if loss_fn.learns_from_labels:
        return GivenLabels(label)
    if embeds_third_view(recipe):
        return ThirdView(dim)
    if has_companions(recipe):
        return PreviousEpoch(len(label), dim, precision.cache_dtype, world)
    return NoSupervision()


def embeds_third_view(recipe: Recipe) -> bool:
    """Returns whether a third view of every image goes through the target."""
    return has_companions(recipe) and recipe.companions == "third-view"


def embeds_clean_views(recipe: Recipe, loss_fn: Loss) -> bool:
    """Returns whether clean views of the labelled images go through the target twice an epoch."""
    return _has_pseudo_labels(recipe, loss_fn) and recipe.pseudo_cache == "offline"


def has_companions(recipe: Recipe) -> bool:
    return recipe.objective in CONSTRAINED and recipe.constraint == "companion"


def _has_pseudo_labels(recipe: Recipe, loss_fn: Loss) -> bool:
    return loss_fn.learns_from_labels and recipe.pseudo_labels != "none"


def _count_classes(label: Int[Tensor, " n"]) -> int:
    return int(label.max()) + 1


def _pseudo_classifier(recipe: ResolvedRecipe, label: Tensor, dim: int) -> PseudoClassifier:
    dtype, known = Precision(recipe.precision).dtype, label[label != UNKNOWN]
    classes, count = _count_classes(label), known.bincount()
    if recipe.pseudo_labels == "knn":
        made: PseudoClassifier = KNNClassifier(len(known), dim, classes, min(VOTES, int(count[count > 0].min())), dtype)
    else:
        hidden = {"linear": 0, "mlp-2": 1, "mlp-3": 2}[recipe.pseudo_labels]
        sgd = PseudoLabelSGD(epochs=recipe.pseudo_epochs, lr=recipe.pseudo_lr)
        made = MLPClassifier(dim, classes, hidden, sgd, recipe.seed)
    return made.to(label.device, dtype)
