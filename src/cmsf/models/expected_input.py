"""What weights expect of images: by the recipe of a run, the metadata of a file, or timm's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from safetensors import safe_open
from torch import nn

from cmsf.models.backbones import patch_size
from cmsf.models.weights import is_timm_name
from cmsf.recipes.recipe import AUTO, INPUT_SETTINGS, Recipe, ResolvedRecipe, format_channels
from cmsf.utils.constants import BACKBONE_FILE, RECIPE_FILE
from cmsf.utils.errors import BadInput

METADATA = "preprocessing"
"""The entry of a .safetensors file: settings of a recipe as JSON."""
_SETTINGS = {"size", *INPUT_SETTINGS}


@dataclass(frozen=True)
class ExpectedInput:
    """The settings of a recipe that weights were trained with, and where they stand."""

    origin: str
    settings: dict[str, Any]

    def fit(self, recipe: Recipe, median_side: int) -> Recipe:
        """Returns the recipe with these settings for its `auto` ones; views are no larger than images mostly are."""
        settings = self.settings
        if recipe.size == AUTO:
            size, patch = max(8, min(settings["size"], median_side)), patch_size(recipe.backbone)
            settings = settings | {"size": max(patch, size - size % patch)}
        return recipe.filled(settings)


def expected_input(init: str, backbone: str) -> ExpectedInput | None:
    """Returns what the weights of --init expect; None where nothing is known of them."""
    if is_timm_name(init):
        return _from_timm(init)
    path = Path(init)
    if (path / RECIPE_FILE).exists():
        return _from_recipe(f"the recipe of {path}", ResolvedRecipe.read(path / RECIPE_FILE))
    file = path / BACKBONE_FILE if path.is_dir() else path
    return _from_metadata(file) or _from_timm(backbone)


def input_metadata(recipe: ResolvedRecipe) -> dict[str, str]:
    """Returns the metadata of a .safetensors file of a run's weights."""
    settings = {name: getattr(recipe, name) for name in ("backbone", "stem", "size", *INPUT_SETTINGS)}
    return {METADATA: json.dumps(settings)}  # one entry, for several would lie in another order in every process


def _from_recipe(origin: str, recipe: Recipe) -> ExpectedInput:
    return ExpectedInput(origin, {name: getattr(recipe, name) for name in _SETTINGS})


def network_of_file(file: Path) -> dict[str, Any]:
    """Returns the backbone, with its stem, that a file of a run's weights names; nothing of others."""
    written = _read_metadata(file)
    named = {name: written[name] for name in ("backbone", "stem") if isinstance(written.get(name), str)}
    return named if "backbone" in named else {}


def _from_metadata(file: Path) -> ExpectedInput | None:
    """Returns what a file says itself; None if it is silent, or says something else."""
    settings = _read_metadata(file)
    if not settings.keys() >= _SETTINGS:
        return None
    try:
        recipe = Recipe().changed({name: settings[name] for name in _SETTINGS})
    except BadInput:
        return None
    found = _from_recipe(f"the metadata of {file}", recipe)
    return None if AUTO in found.settings.values() else found


def _read_metadata(file: Path) -> dict[str, Any]:
    """Returns what a run wrote into its file of weights; nothing of others, and of those that cannot be read."""
    if file.suffix != ".safetensors" or not file.is_file():
        return {}
    try:
        with safe_open(file, framework="pt") as opened:
            written = (opened.metadata() or {}).get(METADATA)
        settings = {} if written is None else json.loads(written)
    except Exception:  # of a damaged or hostile file, which cannot be loaded either; to load it says so
        return {}
    return settings if isinstance(settings, dict) else {}


def _from_timm(name: str) -> ExpectedInput | None:
    """Returns timm's configuration of weights, or of the default ones of an architecture."""
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError:  # a tag that it does not know
        return None
    if config is None or len(config.mean) != 3:
        return None
    but = f", but for its crop mode, {config.crop_mode}" if config.crop_mode != "center" else ""
    return ExpectedInput(f"timm's configuration of {name}{but}", _settings_of(vars(config)))


def network_metadata(network: nn.Module, backbone: str) -> dict[str, str]:
    """Returns the metadata of a file of a network of timm's, by the configuration that it carries."""
    config = getattr(network, "pretrained_cfg", None) or {}
    known = config.keys() >= {"input_size", "mean", "std", "interpolation", "crop_pct"} and len(config["mean"]) == 3
    return {METADATA: json.dumps({"backbone": backbone, "stem": "standard"} | (_settings_of(config) if known else {}))}


def _settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "size": min(config["input_size"][1:]),
        "mean": format_channels(config["mean"]),
        "std": format_channels(config["std"]),
        "interpolation": "bilinear" if config["interpolation"] == "bilinear" else "bicubic",
        "crop_pct": config["crop_pct"],
        "clean_crop": "standard",
    }
