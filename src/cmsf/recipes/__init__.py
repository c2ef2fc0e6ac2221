"""Recipes: what a run computes, by name or from a file."""

from cmsf.recipes.baselines import BASELINES
from cmsf.recipes.lookup import METHODS, NAMES, check_recipe_name, explain, get_recipe, has_scale, scale_of
from cmsf.recipes.methods import OURS
from cmsf.recipes.scales import ADAPT, SCALES
from cmsf.recipes.variants import VARIANTS

__all__ = [
    "ADAPT",
    "BASELINES",
    "METHODS",
    "NAMES",
    "OURS",
    "SCALES",
    "VARIANTS",
    "check_recipe_name",
    "explain",
    "get_recipe",
    "has_scale",
    "scale_of",
]
