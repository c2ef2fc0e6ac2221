"""A recipe: everything that decides what a run computes, as one frozen dataclass.

The same checks serve flags, YAML files and keyword arguments.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
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


def setting(
    default: Any, help: str, above: float | None = None, least: float | None = None, most: float | None = None
) -> Any:
    """A field with its explanation and its bounds; `above` is exclusive."""
    return field(default=default, metadata={"help": help, "above": above, "least": least, "most": most})


@dataclass(frozen=True)
class Recipe:
    name: str = setting("cmsf-self", "the recipe this one came from")

    # What is minimised
    objective: Literal[
        "mean-shift", "cross-entropy", "supcon", "prototypes", "info-nce", "nnclr",
        "byol", "simsiam", "simclr", "isd", "paws", "fixmatch",
    ] = setting("mean-shift", "the loss; the others are baselines, with the settings that suit them")  # fmt: skip
    temperature: float = setting(0.1, "of the softmax in a contrastive objective", above=0)
    target_temperature: float | Auto = setting(AUTO, "of the target's in isd; auto: the same", above=0)
    constraint: Literal["none", "label", "companion"] = setting(
        "none", "which rows are related: all of them, those of the same label, or those with the nearest companions"
    )
    companions: Literal["previous-epoch", "third-view"] = setting(
        "previous-epoch", "what a companion is: the cached embedding of the epoch before, or a third augmentation"
    )
    companion_k: int = setting(5, "how many nearest companions make the constraint set (k')", least=1)
    k: int | Literal["all"] = setting(
        5, "how many neighbours an image is pulled to; all: the whole constraint set", least=1
    )
    include_query: bool = setting(True, "whether an image's own embedding may be among its neighbours")
    unconstrained_weight: float = setting(
        0.0, "weight of plain mean shift beside the constrained one, which has the rest", least=0, most=1
    )
    bank_size: int | Auto = setting(
        AUTO, "rows of the memory bank; auto: sized to the data; 0: none, for an objective that keeps none", least=0
    )
    support_classes: int | Auto = setting(
        0, "classes of the labelled images beside each batch; auto: all, up to 200; 0: whatever their class", least=0
    )
    support_images: int | Auto = setting(
        AUTO, "labelled images of each of these classes, or of all together; auto: 640 and 64 in all, or fewer", least=0
    )
    sharpening: float = setting(0.25, "temperature that sharpens the targets of paws", above=0)
    unlabelled_weight: float = setting(1.0, "weight of fixmatch's loss on pseudo-labels", least=0)

    # The network
    backbone: str = setting("resnet50", "small-residual, or any timm name")
    stem: Literal["standard", "small"] = setting("standard", "a ResNet's first layers; small: for images up to 64 px")
    init: str = setting(
        "none",
        "weights to start from: a timm pretrained name, a .safetensors or state-dict file, or another run; none: "
        "random ones",
    )
    projection_hidden: int | Auto = setting(
        AUTO, "hidden width of the projector; auto: twice the features", least=1, most=65_536
    )
    projection_dim: int | Auto = setting(
        AUTO, "width of the embedding; auto: a quarter of the features", least=2, most=65_536
    )
    projection_layers: int = setting(2, "linear layers of the projector", least=1, most=8)
    projection_norm: bool = setting(False, "whether BatchNorm follows the projector's last layer")
    prediction_hidden: int | Auto = setting(
        AUTO, "hidden width of the predictor; auto: the projector's", least=1, most=65_536
    )
    target_momentum: float = setting(0.99, "momentum of the target encoder", least=0, most=1)
    target_momentum_end: float = setting(0.99, "its value at the end, reached by a cosine", least=0, most=1)

    # Views
    size: int | Auto = setting(
        AUTO, "pixels of a view; auto: the images' own size up to 64, else 128", least=8, most=1024
    )
    weak_crop: float | Auto = setting(
        AUTO, "smallest share of the image in a weak view; auto: 0.2, or 0.14 beside extra crops", above=0, most=1
    )
    strong_crop: float | Auto = setting(
        AUTO, "smallest share of the image in a strong view; auto: 0.2, or 0.14 beside extra crops", above=0, most=1
    )
    first_view: Literal["weak", "strong"] = setting(
        "weak", "what the target encoder sees, or the first of two views alike: cropped and mirrored, or distorted too"
    )
    second_view: Literal["weak", "strong", "rand-augment"] = setting(
        "strong", "what the online encoder sees; rand-augment: the weak view after two random operations, and cutout"
    )
    flip: float = setting(0.5, "probability of mirroring", least=0, most=1)
    jitter: float = setting(0.8, "probability of colour jitter in a strong view", least=0, most=1)
    brightness: float = setting(0.4, "strength of brightness jitter", least=0, most=1)
    contrast: float = setting(0.4, "strength of contrast jitter", least=0, most=1)
    saturation: float = setting(0.4, "strength of saturation jitter", least=0, most=1)
    hue: float = setting(0.1, "strength of hue jitter", least=0, most=0.5)
    greyscale: float = setting(0.2, "probability of a grey strong view", least=0, most=1)
    blur: float = setting(0.5, "probability of blur in a strong view", least=0, most=1)
    solarise: float = setting(0.0, "probability of solarising in a strong view", least=0, most=1)
    extra_crops: int = setting(
        0, "multi-crop: so many more strong views, to the online encoder alone", least=0, most=64
    )
    extra_size: int | Auto = setting(
        AUTO, "pixels of an extra crop; auto: 3/7 of a view, the paper's 96 beside 224", least=8, most=1024
    )
    extra_crop_least: float = setting(0.05, "smallest share of the image in an extra crop", above=0, most=1)
    extra_crop_most: float = setting(0.14, "largest share of the image in an extra crop", above=0, most=1)

    # What training may know of the images
    label_share: float = setting(1.0, "share of each class whose labels are used", above=0, most=1)
    labels_per_class: int = setting(0, "labels of each class that are used; 0: all", least=0)
    label_noise: float = setting(0.0, "probability of each label of being replaced by another class", least=0, most=1)
    coarse_labels: str = setting("none", "wordnet, or a CSV of class,group: join classes into groups; none: do not")

    # Pseudo-labels of images that have none
    pseudo_labels: Literal["none", "mlp-2", "mlp-3", "linear", "knn"] = setting(
        "none",
        "the classifier that gives unlabelled images a label: a perceptron of 2 or 3 layers, a linear layer, or the "
        "vote of the 20 nearest labelled images (of as many as the smallest class has, if fewer)",
    )
    pseudo_threshold: float = setting(0.85, "how probable a pseudo-label must be to be used", least=0, most=1)
    pseudo_cache: Literal["online", "offline"] = setting(
        "online", "what the classifier learns from: embeddings as they pass in training, or a pass over clean views"
    )
    pseudo_epochs: int = setting(10, "passes over them, twice an epoch; twenty steps at least", least=1)
    pseudo_lr: float = setting(0.01, "learning rate of the classifier", above=0)

    # How images are read
    cache: Literal["auto", "ram", "off"] = setting(
        AUTO, "keep decoded images in memory; off: decode at every read; auto: by what fits"
    )
    skip_broken: bool = setting(False, "leave out images that cannot be read, and list them in the run folder")

    # Optimisation
    epochs: int = setting(200, "passes over the images", least=1)
    batch_size: int | Auto = setting(
        AUTO, "images a step; auto: 256, or 128 below 20,000 images, or fewer for few", least=2
    )
    optimiser: Literal["sgd", "lars"] = setting(
        "sgd", "lars: each layer's step in proportion to its weights, for batches of thousands"
    )
    lr: float = setting(0.05, "learning rate", above=0)
    lr_schedule: Literal["cosine", "step"] = setting(
        "cosine", "how the learning rate falls: to zero by a cosine, or to a tenth after each third of the epochs"
    )
    warmup_epochs: int | Auto = setting(
        0, "epochs over which the learning rate rises from zero; auto: a twentieth of them", least=0
    )
    sgd_momentum: float = setting(0.9, "momentum of SGD", least=0, most=1)
    weight_decay: float = setting(
        1e-4, "weight decay, on all parameters; with lars, not on biases and BatchNorm", least=0
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = setting(
        "fp32", "of the network; bf16 and fp16 are mixed, with bank, losses and search in fp32"
    )

    batch_norm: Literal["sync", "shuffle"] = setting(
        "sync",
        "with several processes, BatchNorm sees the whole batch; shuffle: each process's share alone, and other shares "
        "in the target encoder than in the online one (ShuffleBN)",
    )

    # The run
    seed: int = setting(0, "decides weights, order, views and splits", least=0, most=2**32 - 1)
    evaluate_every: int = setting(10, "epochs between k-NN evaluations; 0: at the end alone", least=0)
    checkpoint_every: int = setting(1, "epochs between checkpoints", least=1)
    log_every: int = setting(10, "steps between lines of metrics.jsonl", least=1)

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            _check(name, getattr(self, name), kind)
        if not re.fullmatch(r"\w[\w.+-]*", self.name):
            raise BadInput(
                f"a recipe cannot be called {short_repr(self.name)!r}; use letters, digits, dots, dashes and +"
            )

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """This recipe with other values; an unknown name is refused with the nearest one."""
        changes = british(changes)
        for name in changes:
            if name not in _kinds():
                raise BadInput(
                    f"a recipe has no {short_repr(name)!r}; {did_you_mean(name, _kinds(), 'see cmsf recipes NAME')}"
                )
        return replace(self, **changes)

    def differences(self, other: Recipe) -> list[str]:
        mine, theirs = asdict(self), asdict(other)
        return [f"{name}: {mine[name]} against {theirs[name]}" for name in mine if mine[name] != theirs[name]]

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.of(read_yaml(path)[0], str(path))

    @classmethod
    def from_yaml(cls, text: str, origin: str) -> Self:
        return cls.of(parse_yaml(text, origin)[0], origin)

    @classmethod
    def of(cls, values: Any, origin: str) -> Self:
        """The recipe of what a file says."""
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise BadInput(f"{origin} is no recipe: it must be a list of `name: value` lines")
        missing = set() if cls is Recipe else cls.__annotations__.keys() - values.keys()
        if missing:  # of what a run has settled
            raise BadInput(f"{origin} says nothing of {min(missing)}: another version of cmsf wrote it; train it again")
        try:
            return cls(**asdict(Recipe().changed(values)))
        except BadInput as error:
            raise BadInput(f"{origin}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Resolved(Recipe):
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


def british(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values by the names that fields have; both spellings of one with different values are refused."""
    for american, name in AMERICAN.items():
        if american in values and name in values and values[american] != values[name]:
            given = f"{american}={short_repr(values[american])} and {name}={short_repr(values[name])}"
            raise BadInput(f"{given} are the same setting; give one of them")
    return {AMERICAN.get(name, name): value for name, value in values.items()}


def parse_value(name: str, text: str) -> Any:
    """The value that a flag's text stands for; a text that stands for none is left for the check to refuse."""
    options, number = _alternatives(_kinds()[name]), parse_number(text)
    if int in options and is_integer(number):
        return number
    if float in options and not isinstance(number, str):
        return float(number)
    return text.lower() == "true" if bool in options and text.lower() in ("true", "false") else text


def metavar(name: str) -> str:
    """What a help page shows for a setting's value."""
    short = {int: "N", float: "X", bool: "true|false", str: "NAME"}
    return "|".join(short.get(option, str(option)) for option in _alternatives(_kinds()[name]))


@cache
def _kinds() -> dict[str, Any]:
    return get_type_hints(Recipe)


_LARGEST = 2**63 - 1
"""Of whole numbers that have no other limit: what tensors hold, and what can be written out."""


def _check(name: str, value: Any, kind: Any) -> None:
    if not any(_is_valid(value, option) for option in _alternatives(kind)):
        wanted = " or ".join(_describe(option) for option in _alternatives(kind))
        raise BadInput(f"invalid value --{name.replace('_', '-')} {short_repr(value)}; expected {wanted}")
    bounds = next(f.metadata for f in fields(Recipe) if f.name == name)
    if isinstance(value, bool | str):
        return
    above, least, most = bounds["above"], bounds["least"], bounds["most"]
    if most is None and isinstance(value, int):
        most = _LARGEST
    if not ((above is None or value > above) and (least is None or value >= least) and (most is None or value <= most)):
        limits = [f"above {above}" if above is not None else "", f"at least {least}" if least is not None else ""]
        limits.append(f"at most {most}" if most is not None else "")
        raise BadInput(
            f"--{name.replace('_', '-')} {short_repr(value)} is out of range; use {', '.join(filter(None, limits))}"
        )


def _alternatives(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(option for part in get_args(kind) for option in _alternatives(part))
    if get_origin(kind) is Literal:
        return get_args(kind)
    return (kind,)


def _is_valid(value: Any, option: Any) -> bool:
    if not isinstance(option, type):
        return bool(value == option) and type(value) is type(option)
    if option is float:
        return is_number(value)
    if option is int:
        return is_integer(value) and abs(value) < 2**53
    return isinstance(value, option)


def _describe(option: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}
    return names.get(option, str(option)) if isinstance(option, type) else str(option)
