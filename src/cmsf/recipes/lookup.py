"""Recipes by name: METHOD, METHOD+VARIANT, either with -SCALE, or a saved file."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import cleandoc
from os.path import exists, isfile  # which a name too long for a path does not trouble

from cmsf.recipes.baselines import AT_PAPER_SCALE, BASELINES
from cmsf.recipes.methods import OURS
from cmsf.recipes.recipe import Recipe
from cmsf.recipes.scales import ADAPT, SCALES
from cmsf.recipes.variants import VARIANTS
from cmsf.utils.errors import BadInput, did_you_mean
from cmsf.utils.files import expand_user
from cmsf.utils.text import short_repr

METHODS = OURS | BASELINES
NAMES = tuple(f"{method}-{scale}" for method in METHODS for scale in SCALES)
_PAPER = "imagenet"


@dataclass(frozen=True)
class RecipeName:
    """The parts of METHOD+VARIANT+VARIANT-SCALE."""

    method: str
    variants: tuple[str, ...]
    scale: str | None

    @classmethod
    def parse(cls, name: str) -> RecipeName:
        scale = next((scale for scale in SCALES if name.endswith(f"-{scale}")), None)
        method, *variants = (name if scale is None else name.removesuffix(f"-{scale}")).split("+")
        return cls(method, tuple(variants), scale)

    def check(self, name: str) -> None:
        if self.method not in METHODS:
            hint = self._with_scale_last() or did_you_mean(name, [*METHODS, *NAMES], "cmsf recipes lists them all")
            if exists(name):
                hint = f"to learn from what is there: cmsf train cmsf-self --data {name}"
            raise BadInput(f"unknown recipe {short_repr(name)!r}; {hint}")
        set_by: dict[str, str] = {}
        for variant in self.variants:
            if variant not in VARIANTS:
                hint = did_you_mean(variant, VARIANTS, "cmsf recipes lists them all")
                raise BadInput(f"unknown variant {variant!r}; {hint} (any other value is a flag)")
            for setting in VARIANTS[variant].changes:
                if set_by.setdefault(setting, variant) != variant:
                    raise BadInput(f"+{set_by[setting]} and +{variant} both set {setting}; use one of them")
            methods = VARIANTS[variant].methods
            if self.method not in methods:
                raise BadInput(f"{self.method} does not use +{variant}; it is for {', '.join(methods)}")

    def _with_scale_last(self) -> str | None:
        """Suggests the name that was meant where the scale stands before the variants."""
        for scale in SCALES:
            if self.scale is None and self.method.removesuffix(f"-{scale}") in METHODS:
                return f"did you mean {'+'.join((self.method.removesuffix(f'-{scale}'), *self.variants))}-{scale}?"
        return None

    def recipe(self, scale: str) -> Recipe:
        made = METHODS[self.method](SCALES[scale]())
        if scale == _PAPER:
            made = made.changed(AT_PAPER_SCALE.get(self.method, {}))
        for variant in self.variants:
            made = made.changed(VARIANTS[variant].changes)
            if scale == _PAPER:
                made = made.changed(VARIANTS[variant].at_paper_scale)
        return made.changed({"name": f"{'+'.join((self.method, *self.variants))}-{scale}"})


def check_recipe_name(name: str) -> None:
    """Refuses a name that `get_recipe` does not know, without looking at any image."""
    if not _is_file(name):
        RecipeName.parse(name).check(name)
    elif not isfile(expand_user(name)):
        raise BadInput(f"no such recipe file: {name}")


def scale_of(name: str) -> str | None:
    """Returns the scale that a name says."""
    return RecipeName.parse(name).scale


def has_scale(name: str) -> bool:
    """Whether the name says its scale; otherwise the size of the images decides."""
    return _is_file(name) or RecipeName.parse(name).scale is not None


def get_recipe(name: str, small_images: bool | None = None, pretrained: bool = False) -> Recipe:
    """Returns the recipe of a name or of a YAML file.

    small_images: whether a name without a scale means `small` or `standard`; None: it must have a scale.
    pretrained: whether it means `adapt` instead.
    """
    check_recipe_name(name)
    if _is_file(name):
        return Recipe.read(expand_user(name))
    parsed = RecipeName.parse(name)
    if parsed.scale is None and small_images is None:
        raise BadInput(f"{name} has no scale; use {' or '.join(f'{name}-{scale}' for scale in SCALES)}")
    return parsed.recipe(parsed.scale or (ADAPT if pretrained else "small" if small_images else "standard"))


def explain(name: str) -> str:
    """Describes a method, where the paper has it, and what its variants change."""
    check_recipe_name(name)
    if _is_file(name):
        return name
    parsed = RecipeName.parse(name)
    about = cleandoc(METHODS[parsed.method].__doc__ or "")
    lines = [about, *(f"+{variant}: {VARIANTS[variant].about}." for variant in parsed.variants)]
    if parsed.method in AT_PAPER_SCALE and parsed.scale not in (None, _PAPER):
        lines.append(f"These are the settings of -{_PAPER}; those of -{parsed.scale} follow.")
    return "\n".join(lines)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))
