"""A recipe: everything that decides what a run computes, as one frozen dataclass.

The same checks serve flags, YAML files and keyword arguments.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from operator import ge, gt, le
from pathlib import Path
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import yaml

from cmsf.utils.errors import BadInput, did_you_mean
from cmsf.utils.numbers import is_integer, is_number, parse_number
from cmsf.utils.text import short_repr
from cmsf.utils.yaml import parse_yaml, read_yaml

Auto = Literal["auto"]
AUTO: Auto = "auto"

AMERICAN = {
    "optimizer": "optimiser",
    "grayscale": "greyscale",
    "solarize": "solarise",
    "unlabeled_weight": "unlabelled_weight",
}
"""Fields that are taken in American spelling too; files are written in the British one."""
CONSTRAINED = ("mean-shift", "constrained-nce")
"""The losses whose neighbours a constraint chooses."""
INPUT_SETTINGS = ("mean", "std", "interpolation", "crop_pct", "clean_crop")
"""What is done to images before a network sees them, beside their size: weights expect what they were trained with."""


def option(default: Any, help: str, metavar: str = "", **bounds: float) -> Any:
    """Returns a field with its help and its bounds: `above` (exclusive), `minimum` and `maximum`."""
    return field(default=default, metadata={"help": help, "metavar": metavar, **bounds})


@dataclass(frozen=True)
class Recipe:
    name: str = option("cmsf-self", "the recipe this one came from")

    # The loss
    objective: Literal[
        "mean-shift", "constrained-nce", "cross-entropy", "supcon", "prototypes", "info-nce", "nnclr",
        "byol", "simsiam", "simclr", "isd", "paws", "fixmatch",
    ] = option("mean-shift", "the loss; the others are baselines, with the settings that suit them")  # fmt: skip
    temperature: float = option(0.1, "softmax temperature of a contrastive loss", above=0)
    target_temperature: float | Auto = option(
        AUTO, "softmax temperature of the target (isd only); auto: equal to --temperature", above=0
    )
    constraint: Literal["none", "label", "companion"] = option(
        "none", "which rows are related: all of them, those of the same label, or those with the nearest companions"
    )
    companions: Literal["previous-epoch", "third-view"] = option(
        "previous-epoch", "what a companion is: the cached embedding of the epoch before, or a third augmentation"
    )
    companion_k: int = option(5, "how many nearest companions make the constraint set (k')", minimum=1)
    companion_coverage: float = option(
        0.0,
        "share of the bank's rows that must have a companion before companions constrain; until then any row is "
        "related",
        minimum=0,
        maximum=1,
    )
    k: int | Literal["all"] = option(
        5, "how many neighbours an image is pulled to; all: the whole constraint set", minimum=1
    )
    include_query: bool = option(True, "whether an image's own embedding may be among its neighbours")
    unconstrained_weight: float = option(
        0.0, "weight of plain mean shift; the constrained term has 1 minus this", minimum=0, maximum=1
    )
    spread: Literal["none", "uniformity", "koleo"] = option(
        "none", "a term that keeps the predictions of a batch apart: uniformity (Wang and Isola), or KoLeo"
    )
    spread_weight: float = option(0.5, "its weight", minimum=0)
    bank_size: int | Auto = option(
        AUTO, "rows of the memory bank; auto: sized to the data; 0: none, for an objective that keeps none", minimum=0
    )
    support_classes: int | Auto = option(
        0, "classes of the labelled images beside each batch; auto: all, up to 200; 0: whatever their class", minimum=0
    )
    support_images: int | Auto = option(
        AUTO,
        "labelled images per class, or in total if --support-classes is 0; auto: 640 in total (paws), 64 (fixmatch)",
        minimum=0,
    )
    sharpening: float = option(0.25, "temperature that sharpens the targets of paws", above=0)
    unlabelled_weight: float = option(1.0, "weight of fixmatch's loss on pseudo-labels", minimum=0)

    # The network
    backbone: str = option("resnet50", "small-residual, or any timm name; auto: the network of --init")
    stem: Literal["standard", "small"] = option("standard", "a ResNet's first layers; small: for images up to 64 px")
    init: str = option(
        "none",
        "weights to start from: a timm pretrained name, a .safetensors or state-dict file, or another run; none: "
        "random ones",
    )
    init_by_order: bool = option(
        False, "whether the tensors of an --init file are taken one after the other, whatever their names"
    )
    projection_hidden: int | Auto = option(
        AUTO, "hidden width of the projector; auto: twice the features", minimum=1, maximum=65_536
    )
    projection_dim: int | Auto = option(
        AUTO, "width of the embedding; auto: a quarter of the features", minimum=2, maximum=65_536
    )
    projection_layers: int = option(2, "linear layers of the projector", minimum=1, maximum=8)
    projection_norm: bool = option(False, "whether BatchNorm follows the projector's last layer")
    prediction_hidden: int | Auto = option(
        AUTO, "hidden width of the predictor; auto: the projector's", minimum=1, maximum=65_536
    )
    target_momentum: float = option(0.99, "momentum of the target encoder", minimum=0, maximum=1)
    target_momentum_end: float = option(0.99, "its value at the end, reached by a cosine", minimum=0, maximum=1)

    # Views
    size: int | Auto = option(
        AUTO,
        "pixels of a view; auto: the images' own size up to 64, else 128; with --init, the smaller of the images' and "
        "the weights' own",
        minimum=8,
        maximum=1024,
    )
    mean: str = option(
        AUTO,
        "mean of red, green and blue that images are normalised by, from 0 to 1; auto: what --init was trained with, "
        "else ImageNet's",
        "R,G,B",
    )
    std: str = option(AUTO, "their standard deviation; auto: likewise", "R,G,B")
    interpolation: Literal["bilinear", "bicubic"] | Auto = option(
        AUTO, "how images are resized; auto: as --init was trained, else bilinear"
    )
    crop_pct: float | Auto = option(
        AUTO,
        "share of the shorter side that a clean view shows, as timm has it; auto: as --init was evaluated, else 0.875",
        above=0,
        maximum=1,
    )
    clean_crop: Literal["standard", "small-whole"] | Auto = option(
        AUTO,
        "standard: a clean view is resized, then cropped, as in torchvision and timm; small-whole: cropped, then "
        "resized, and of an image whose shorter side is at most --size nothing is cropped from that side; auto: "
        "standard with --init, else small-whole",
    )
    weak_crop: float | Auto = option(
        AUTO, "smallest share of the image in a weak view; auto: 0.2, or 0.14 beside extra crops", above=0, maximum=1
    )
    strong_crop: float | Auto = option(
        AUTO, "smallest share of the image in a strong view; auto: 0.2, or 0.14 beside extra crops", above=0, maximum=1
    )
    first_view: Literal["weak", "strong"] = option(
        "weak", "what the target encoder sees, or the first of two views alike: cropped and mirrored, or distorted too"
    )
    second_view: Literal["weak", "strong", "rand-augment"] = option(
        "strong", "what the online encoder sees; rand-augment: the weak view after two random operations, and cutout"
    )
    flip: float = option(0.5, "probability of mirroring", minimum=0, maximum=1)
    jitter: float = option(0.8, "probability of colour jitter in a strong view", minimum=0, maximum=1)
    brightness: float = option(0.4, "strength of brightness jitter", minimum=0, maximum=1)
    contrast: float = option(0.4, "strength of contrast jitter", minimum=0, maximum=1)
    saturation: float = option(0.4, "strength of saturation jitter", minimum=0, maximum=1)
    hue: float = option(0.1, "strength of hue jitter", minimum=0, maximum=0.5)
    greyscale: float = option(0.2, "probability of a grey strong view", minimum=0, maximum=1)
    blur: float = option(0.5, "probability of blur in a strong view", minimum=0, maximum=1)
    solarise: float = option(0.0, "probability of solarising in a strong view", minimum=0, maximum=1)
    extra_crops: int = option(
        0, "multi-crop: so many more strong views, to the online encoder alone", minimum=0, maximum=64
    )
    extra_size: int | Auto = option(
        AUTO, "pixels of an extra crop; auto: 3/7 of a view, the paper's 96 beside 224", minimum=8, maximum=1024
    )
    extra_crop_least: float = option(0.05, "smallest share of the image in an extra crop", above=0, maximum=1)
    extra_crop_most: float = option(0.14, "largest share of the image in an extra crop", above=0, maximum=1)

    # Labels that training uses
    label_share: float = option(1.0, "share of each class whose labels are used", above=0, maximum=1)
    labels_per_class: int = option(0, "labels of each class that are used; 0: all", minimum=0)
    label_noise: float = option(
        0.0, "probability of each label of being replaced by another class", minimum=0, maximum=1
    )
    coarse_labels: str = option("none", "wordnet, or a CSV of class,group: join classes into groups; none: do not")

    # Pseudo-labels of images that have none
    pseudo_labels: Literal["none", "mlp-2", "mlp-3", "linear", "knn"] = option(
        "none",
        "the classifier that gives unlabelled images a label: a perceptron of 2 or 3 layers, a linear layer, or the "
        "vote of the 20 nearest labelled images (of as many as the smallest class has, if fewer)",
    )
    pseudo_threshold: float = option(0.85, "how probable a pseudo-label must be to be used", minimum=0, maximum=1)
    pseudo_cache: Literal["online", "offline"] = option(
        "online", "what the classifier learns from: embeddings as they pass in training, or a pass over clean views"
    )
    pseudo_epochs: int = option(10, "passes over them, twice an epoch; twenty steps at least", minimum=1)
    pseudo_lr: float = option(0.01, "learning rate of the classifier", above=0)

    # Reading images
    cache: Literal["auto", "ram", "off"] = option(
        AUTO, "keep decoded images in memory; off: decode at every read; auto: by what fits"
    )
    skip_broken: bool = option(False, "leave out images that cannot be read, and list them in the run folder")

    # Optimisation
    epochs: int = option(200, "passes over the images; 0: none, for a run of the starting weights", minimum=0)
    freeze_epochs: int = option(0, "first so many epochs train the heads alone, on a frozen backbone", minimum=0)
    batch_size: int | Auto = option(
        AUTO, "images a step; auto: 256, or 128 below 20,000 images, or fewer for few", minimum=2
    )
    accumulate: int = option(
        1,
        "parts in which a batch goes through the network, for less memory: the same step, but that BatchNorm sees a "
        "part at a time",
        minimum=1,
    )
    optimiser: Literal["sgd", "lars", "adamw"] = option(
        "sgd", "lars: each layer's step in proportion to its weights, for batches of thousands; adamw: for --init"
    )
    lr: float = option(0.05, "learning rate", minimum=0)
    lr_schedule: Literal["cosine", "step"] = option(
        "cosine", "how the learning rate falls: to zero by a cosine, or to a tenth after each third of the epochs"
    )
    layer_decay: float = option(
        1.0, "the learning rate of each layer of the backbone, as a share of that of the next one", above=0, maximum=1
    )
    clip_grad: float = option(0.0, "largest norm of the gradient; 0: any", minimum=0)
    warmup_epochs: int | Auto = option(
        0, "epochs over which the learning rate rises from zero; auto: a twentieth of them", minimum=0
    )
    sgd_momentum: float = option(0.9, "momentum of SGD", minimum=0, maximum=1)
    weight_decay: float = option(
        1e-4,
        "weight decay, on all parameters; with lars, adamw or --layer-decay, not on biases and BatchNorm",
        minimum=0,
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64", "auto"] = option(
        "fp32",
        "of the network; bf16 and fp16 are mixed, with bank, losses and search in fp32; auto: bf16 where the device "
        "has instructions for it",
    )

    batch_norm: Literal["sync", "shuffle", "frozen"] = option(
        "sync",
        "with several processes, BatchNorm sees the whole batch; shuffle: each process's share alone, and other shares "
        "in the target encoder than in the online one (ShuffleBN); frozen: the backbone normalises by the statistics "
        "of its starting weights",
    )

    # The run
    seed: int = option(0, "decides weights, order, views and splits", minimum=0, maximum=2**32 - 1)
    keep: Literal["last", "best"] = option(
        "last",
        "which epoch's weights the run ends with, of those evaluated; best: by k-NN on labels, by a fifth of them held "
        "out where training learns from labels, or by the agreement of views where labels are few",
    )
    evaluate_every: int = option(10, "epochs between k-NN evaluations; 0: at the end alone", minimum=0)
    checkpoint_every: int = option(1, "epochs between checkpoints", minimum=1)
    log_every: int = option(10, "steps between lines of metrics.jsonl", minimum=1)

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            _check(name, getattr(self, name), kind)
        if not re.fullmatch(r"\w[\w.+-]*", self.name):
            raise BadInput(
                f"a recipe cannot be called {short_repr(self.name)!r}; use letters, digits, dots, dashes and +"
            )
        for name, least in (("mean", 0.0), ("std", _LEAST_STD)):
            value = getattr(self, name)
            if value == AUTO and type(self) is Recipe:
                continue
            if not all(least <= number <= 1 for number in parse_channels(f"--{name}", value)):
                raise BadInput(f"--{name} {short_repr(value)} is out of range; use numbers from {least:g} to 1")

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Returns the recipe with other values; an unknown name is refused with the nearest one."""
        changes = british(changes)
        for name in changes:
            if name not in _field_types():
                hint = did_you_mean(name, _field_types(), "see cmsf recipes NAME")
                raise BadInput(f"a recipe has no {short_repr(name)!r}; {hint}")
        return replace(self, **changes)

    def filled(self, settings: Mapping[str, Any]) -> Self:
        """Returns the recipe with values for those of these settings that are `auto`."""
        return self.changed({name: value for name, value in settings.items() if getattr(self, name) == AUTO})

    def differences(self, other: Recipe) -> list[str]:
        mine, theirs = asdict(self), asdict(other)
        return [f"{name}: {mine[name]} against {theirs[name]}" for name in mine if mine[name] != theirs[name]]

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.from_values(read_yaml(path)[0], str(path))

    @classmethod
    def from_yaml(cls, text: str, origin: str) -> Self:
        return cls.from_values(parse_yaml(text, origin)[0], origin)

    @classmethod
    def from_values(cls, values: Any, origin: str) -> Self:
        """Returns the recipe with the values of a file."""
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise BadInput(f"{origin} is not a recipe: it must be a list of `name: value` lines")
        usual = ResolvedRecipe.usual()
        missing = ResolvedRecipe.__annotations__.keys() - values.keys() - usual.keys()  # of what a run has settled
        if missing and cls is not Recipe:
            raise BadInput(f"{origin} lacks {min(missing)}: another version of cmsf wrote it; train it again")
        try:
            return cls(**asdict(Recipe().changed(values if missing else usual | values)))
        except BadInput as error:
            raise BadInput(f"{origin}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class ResolvedRecipe(Recipe):
    """A recipe with a number for every `auto`: what a run trains, and what its recipe.yaml holds."""

    bank_size: int
    support_classes: int
    support_images: int
    projection_hidden: int
    projection_dim: int
    prediction_hidden: int
    size: int
    batch_size: int
    weak_crop: float
    strong_crop: float
    extra_size: int
    cache: Literal["ram", "off"]
    warmup_epochs: int
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    mean: str = "0.485,0.456,0.406"
    std: str = "0.229,0.224,0.225"
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    crop_pct: float = 0.875
    clean_crop: Literal["standard", "small-whole"] = "small-whole"

    @classmethod
    def usual(cls) -> dict[str, Any]:
        """Returns what `auto` is if nothing says otherwise: also what runs did that are older than the setting."""
        return {name: value for name, value in vars(cls).items() if name in cls.__annotations__}


def british(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values by the names that fields have; both spellings of one with different values are refused."""
    for american, name in AMERICAN.items():
        if american in values and name in values and values[american] != values[name]:
            given = f"{american}={short_repr(values[american])} and {name}={short_repr(values[name])}"
            raise BadInput(f"{given} are the same setting; give one of them")
    return {AMERICAN.get(name, name): value for name, value in values.items()}


def parse_value(name: str, text: str) -> Any:
    """Returns the value of a flag's text; a text that is none is left for the check to refuse."""
    types_, number = _alternatives(_field_types()[name]), parse_number(text)
    if int in types_ and is_integer(number):
        return number
    if float in types_ and not isinstance(number, str):
        return float(number)
    return text.lower() == "true" if bool in types_ and text.lower() in ("true", "false") else text


def parse_channels(name: str, text: str) -> tuple[float, float, float]:
    """Returns the numbers of red, green and blue, as "0.485,0.456,0.406" has them."""
    numbers = [parse_number(part.strip()) for part in text.split(",")]
    if len(numbers) != 3 or not all(is_number(number) for number in numbers):
        raise BadInput(f"invalid value {name} {short_repr(text)}; expected red, green and blue, as 0.485,0.456,0.406")
    red, green, blue = map(float, numbers)
    return red, green, blue


def format_channels(numbers: Sequence[float]) -> str:
    return ",".join(map(str, numbers))


def metavar(name: str) -> str:
    """Returns what a help page shows for the value of a field."""
    if own := Recipe.__dataclass_fields__[name].metadata["metavar"]:
        return str(own)
    short = {int: "N", float: "X", bool: "true|false", str: "NAME"}
    return "|".join(short.get(type_, str(type_)) for type_ in _alternatives(_field_types()[name]))


@cache
def _field_types() -> dict[str, Any]:
    return get_type_hints(Recipe)


_BOUNDS = {"above": ("above", gt), "minimum": ("at least", ge), "maximum": ("at most", le)}
"""The bounds of an option in words, and the comparison that a value has to pass."""
_LEAST_STD = 1e-3
_MAX_INT = 2**63 - 1
"""The limit of whole numbers that have no other: what tensors hold, and what can be written out."""


def _check(name: str, value: Any, kind: Any) -> None:
    if not any(_is_valid(value, type_) for type_ in _alternatives(kind)):
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}
        own = Recipe.__dataclass_fields__[name].metadata["metavar"]
        wanted = own or " or ".join(names.get(type_, str(type_)) for type_ in _alternatives(kind))
        raise BadInput(f"invalid value --{name.replace('_', '-')} {short_repr(value)}; expected {wanted}")
    if isinstance(value, bool | str):
        return
    bounds = {"maximum": _MAX_INT} if isinstance(value, int) else {}
    bounds |= Recipe.__dataclass_fields__[name].metadata
    limits = [(words, test, bounds[key]) for key, (words, test) in _BOUNDS.items() if key in bounds]
    if not all(test(value, bound) for _, test, bound in limits):
        expected = ", ".join(f"{words} {bound}" for words, _, bound in limits)
        raise BadInput(f"--{name.replace('_', '-')} {short_repr(value)} is out of range; use {expected}")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(type_ for part in get_args(kind) for type_ in _alternatives(part))
    if get_origin(kind) is Literal:
        return get_args(kind)
    return (kind,)


def _is_valid(value: Any, type_: Any) -> bool:
    if not isinstance(type_, type):
        return bool(value == type_) and type(value) is type(type_)
    if type_ is float:
        return is_number(value)
    if type_ is int:
        return is_integer(value) and abs(value) < 2**53
    return isinstance(value, type_)
