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


def check_name(name: str) -> None:
    """Refuse what `find` will not find, without looking at any image."""
    if _is_file(name):
        if not Path(name).is_file():
            raise BadInput(f"there is no recipe file {name}")
    elif name not in METHODS and name not in NAMES:
        hint = did_you_mean(name, [*METHODS, *NAMES], "cmsf recipes lists them all")
        if Path(name).exists():
            hint = f"to learn from what is there: cmsf train cmsf-self --data {name}"
        raise BadInput(f"no recipe is called {name!r}; {hint}")


def find(name: str, small_images: bool) -> Recipe:
    """The recipe of a METHOD-SCALE, a bare METHOD (whose scale the images decide), or a YAML file."""
    check_name(name)
    if _is_file(name):
        return Recipe.read(Path(name))
    return named(f"{name}-{'small' if small_images else 'standard'}" if name in METHODS else name)


def named(name: str) -> Recipe:
    """The recipe of a METHOD-SCALE."""
    check_name(name)
    method, _, scale = name.rpartition("-")
    return replace(METHODS[method](SCALES[scale]()), name=name)


def explain(name: str) -> str:
    """What a method does and where the paper has it."""
    check_name(name)
    method = name if name in METHODS else name.rpartition("-")[0]
    return cleandoc(METHODS[method].__doc__ or "")


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


__all__ = ["METHODS", "NAMES", "SCALES", "check_name", "explain", "find", "named"]
