"""The library's front door: train, load, evaluate."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cmsf.assembly import LARGEST_SMALL_IMAGE, make_encoders, number, resolve, view_size
from cmsf.data import SAMPLE, Dataset, open_source
from cmsf.errors import BadInput
from cmsf.evaluation import KnnResult, evaluate_knn, evaluate_pixels
from cmsf.recipe import Recipe
from cmsf.recipes import METHODS, find
from cmsf.run_folder import RunFolder, describe_environment
from cmsf.screen import Screen
from cmsf.training import Training

_STORED = 2
"""Decoded images are kept with a shorter side of at most this many times the view."""


class Run:
    """A finished or unfinished run on the disk."""

    def __init__(self, path: str | Path) -> None:
        self.folder = RunFolder(Path(path))
        self.recipe = self.folder.recipe()

    @property
    def path(self) -> Path:
        return self.folder.path

    def backbone(self, device: torch.device | str = "cpu") -> nn.Module:
        """The trained network in eval mode: images in, pooled features out."""
        return self.folder.load_backbone(device)

    def data(self, data: str | Path | None = None) -> Dataset:
        """The images of the run, or others, as the run sees them."""
        spec = self.folder.environment().get("data", SAMPLE) if data is None else data
        return open_source(spec).load(_STORED * number(self.recipe.size), self.recipe.seed)

    def evaluate(self, metric: str = "knn", data: str | Path | None = None, device: str = "auto") -> dict[str, float]:
        """Per cent by vote, e.g. {"1-nn": 81.2, "20-nn": 83.0, …}; written with its protocol to results/knn.json."""
        if metric != "knn":
            raise BadInput(f"there is no evaluation {metric!r}; use knn")
        where = pick_device(device)
        result = evaluate_knn(self.backbone(where), self.data(data), number(self.recipe.size), where)
        self._save(result, self.folder.environment()["data"] if data is None else str(data))
        return result.accuracy

    def references(self, data: str | Path | None = None, device: str = "auto") -> dict[str, dict[str, float]]:
        """The same evaluation of raw pixels and of the network before training: what learning has to beat."""
        images, size = self.data(data), number(self.recipe.size)
        where = pick_device(device)
        untrained = make_encoders(self.recipe).online.backbone.to(where)
        return {
            "raw pixels": evaluate_pixels(images, size).accuracy,
            "untrained encoder": evaluate_knn(untrained, images, size, where).accuracy,
        }

    def _save(self, result: KnnResult, data: str) -> None:
        weights = hashlib.sha256(self.folder.backbone_file.read_bytes()).hexdigest()
        about = {"metric": "knn", "data": data, "recipe": self.recipe.name, "weights_sha256": weights}
        self.folder.save_result("knn", about | asdict(result))


def train(
    recipe: str | Recipe = "cmsf-self",
    data: str | Path | None = None,
    out: str | Path | None = None,
    *,
    device: str = "auto",
    quiet: bool = False,
    screen: Screen | None = None,
    **changes: Any,
) -> Run:
    """Train a recipe on a source of images; the same call again goes on where it was stopped.

    recipe: METHOD, METHOD-SCALE, a saved recipe.yaml, or a Recipe.
    data: a folder of images or an .npz; None for the embedded sample.
    out: the run folder, by default runs/RECIPE.
    changes: any field of the recipe, e.g. epochs=100.
    """
    screen = screen or Screen(quiet=quiet)
    # A name nobody knows is refused before any image is read.
    if isinstance(recipe, str) and recipe not in METHODS:
        recipe = find(recipe, small_images=True)
    source = open_source(data)
    side = source.typical_side()
    if isinstance(recipe, str):
        bare, recipe = recipe, find(recipe, small_images=side <= LARGEST_SMALL_IMAGE)
        screen.say(f"{bare} is {recipe.name} here: the images are {side} px on their shorter side")
    recipe = recipe.changed(changes)
    if not isinstance(out, str | Path):
        out = Path("runs") / recipe.name
    folder = RunFolder(Path(out).expanduser())
    _check_free(folder)

    chosen_device = pick_device(device)
    images = source.load(_STORED * view_size(recipe, side), recipe.seed)
    recipe = resolve(recipe, images, side)
    screen.say(
        f"{images.name}: {len(images.train)} training images"
        f"{f', {len(images.classes)} classes' if images.classes else ', no labels'}; test: {images.test_origin}"
    )
    environment = describe_environment(_lasting_name(data), recipe, str(chosen_device))
    if folder.exists():
        for difference in folder.check_same(recipe, environment):
            screen.say(f"{difference}: the run will not equal an uninterrupted one bit for bit")
        if folder.backbone_file.exists():
            screen.say(f"{folder.path} is complete already")
            return Run(folder.path)
    else:
        _create(folder, recipe, environment, images)
    Training(recipe, images, folder, chosen_device, screen).run()
    return Run(folder.path)


def load(run: str | Path, device: str = "cpu") -> nn.Module:
    """The trained backbone of a run: a plain torch module in eval mode, images in, pooled features out."""
    return Run(run).backbone(device)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(best)
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadInput(f"--device {name} is not to be had: {str(error).splitlines()[0]}; use auto or cpu") from None
    return device


def _lasting_name(data: str | Path | None) -> str:
    """The data's name as it will be found from another working directory."""
    return SAMPLE if data is None or str(data) == SAMPLE else str(Path(data).expanduser().resolve())


def _check_free(folder: RunFolder) -> None:
    if folder.path.exists() and not folder.exists():
        if not folder.path.is_dir():
            raise BadInput(f"--out {folder.path} is a file; give a folder")
        if any(folder.path.iterdir()):
            raise BadInput(f"--out {folder.path} is not empty and holds no run; choose another folder")


def _create(folder: RunFolder, recipe: Recipe, environment: dict[str, Any], images: Dataset) -> None:
    """Make the folder under another name first, so that a run folder is never half there."""
    draft = RunFolder(folder.path.with_name(f".{folder.path.name}.part"))
    shutil.rmtree(draft.path, ignore_errors=True)
    draft.create(recipe, environment, images)
    draft.path.replace(folder.path)
