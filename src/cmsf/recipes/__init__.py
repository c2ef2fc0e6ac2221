"""Recipes by name: METHOD-SCALE, METHOD alone, or a saved file."""

from __future__ import annotations

from dataclasses import replace
from inspect import cleandoc
from pathlib import Path

from cmsf.errors import BadInput, did_you_mean
from cmsf.recipe import Recipe
from cmsf.recipes.methods import METHODS
from cmsf.recipes.scales import SCALES

NAMES = tuple(f"{method}-{scale}" for method in METHODS for scale in SCALES)


def named(name: str) -> Recipe:
    """The recipe of a METHOD-SCALE."""
    method, _, scale = name.rpartition("-")
    if name not in NAMES:
        everything = [*METHODS, *NAMES]
        raise BadInput(f"no recipe is called {name!r}; {did_you_mean(name, everything, 'cmsf recipes lists them all')}")
    return replace(METHODS[method](SCALES[scale]()), name=name)


def find(name: str, small_images: bool) -> Recipe:
    """The recipe of a METHOD-SCALE, a bare METHOD (whose scale the images decide), or a YAML file."""
    if name in METHODS:
        return named(f"{name}-{'small' if small_images else 'standard'}")
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise BadInput(f"there is no recipe file {path}")
        return Recipe.from_yaml(path.read_text(encoding="utf-8"), name)
    return named(name)


def explain(name: str) -> str:
    """What a method does and where the paper has it."""
    method = name if name in METHODS else named(name).name.rpartition("-")[0]
    return cleandoc(METHODS[method].__doc__ or "")


__all__ = ["METHODS", "NAMES", "SCALES", "explain", "find", "named"]
