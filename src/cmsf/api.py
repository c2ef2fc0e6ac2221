"""The library's front door: train, load, evaluate."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cmsf.assembly import LARGEST_SMALL_IMAGE, make_encoders, make_learner, resolve, view_size
from cmsf.data import SAMPLE, Dataset, open_source
from cmsf.environment import describe_environment
from cmsf.errors import BadInput
from cmsf.evaluation import KnnResult, evaluate_knn, evaluate_pixels
from cmsf.recipe import Recipe
from cmsf.recipes import METHODS, find
from cmsf.run_folder import RunFolder
from cmsf.screen import Screen
from cmsf.training import Training

_STORED = 2
"""Decoded images are kept with a shorter side of at most this many times the view."""


class Run:
    """A finished or unfinished run on the disk."""

    def __init__(self, path: str | Path) -> None:
        self.folder = RunFolder(Path(path).expanduser())
        self.recipe = self.folder.recipe()

    @property
    def path(self) -> Path:
        return self.folder.path

    def backbone(self, device: torch.device | str = "cpu") -> nn.Module:
        """The trained network in eval mode: images in, pooled features out."""
        return self.folder.load_backbone(device)

    def data(self, data: str | Path | None = None) -> Dataset:
        """The images of the run, which must not have changed since, or others; as the run sees them."""
        spec = self.folder.environment()["data"] if data is None else data
        images = open_source(spec).load(_STORED * self.recipe.size, self.recipe.seed)
        if data is None:
            self.folder.check_same_images(images)
        return images

    def evaluate(self, metric: str = "knn", data: str | Path | None = None, device: str = "auto") -> dict[str, float]:
        """Per cent by vote, e.g. {"1-nn": 81.2, "20-nn": 83.0, …}; written with its protocol to results/."""
        if metric != "knn":
            raise BadInput(f"there is no evaluation {metric!r}; use knn")
        images, where = self.data(data), pick_device(device)
        result = evaluate_knn(self.backbone(where), images, self.recipe.size, where)
        weights = hashlib.sha256(self.folder.backbone_file.read_bytes()).hexdigest()
        self._save(result, data, {"weights_sha256": weights})
        return result.accuracy

    def references(self, data: str | Path | None = None, device: str = "auto") -> dict[str, dict[str, float]]:
        """The same evaluation of raw pixels and of the network before training: what learning has to beat."""
        images, where = self.data(data), pick_device(device)
        untrained = make_encoders(self.recipe).online.backbone.to(where)
        results = {
            "raw pixels": evaluate_pixels(images, self.recipe.size),
            "untrained encoder": evaluate_knn(untrained, images, self.recipe.size, where),
        }
        for name, result in results.items():
            self._save(result, data, {"of": name})
        return {name: result.accuracy for name, result in results.items()}

    def result_file(self, data: str | Path | None = None, of: str = "") -> Path:
        """Where an evaluation is written: results/knn.json, with the names of other data and of a reference added."""
        names = ["knn", "" if data is None else Path(data).expanduser().resolve().stem, of.replace(" ", "-")]
        return self.path / "results" / f"{'-'.join(filter(None, names))}.json"

    def test_images(self, data: str | Path | None = None) -> int:
        """How many images the evaluation that was written last has judged."""
        return int(json.loads(self.result_file(data).read_text(encoding="utf-8"))["protocol"]["test images"])

    def _save(self, result: KnnResult, data: str | Path | None, about: dict[str, str]) -> None:
        spec = self.folder.environment()["data"] if data is None else _lasting_name(data)
        known = {"metric": "knn", "data": spec, "recipe": self.recipe.name} | about
        self.folder.save_result(self.result_file(data, about.get("of", "")), known | asdict(result))


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
    out: the run folder, by default runs/ and the recipe's or the file's name.
    changes: any field of the recipe, e.g. epochs=100.
    """
    screen = screen or Screen(quiet=quiet)
    where = pick_device(device)
    source = open_source(data)
    side = source.typical_side()
    if isinstance(recipe, str):
        name, recipe = recipe, find(recipe, small_images=side <= LARGEST_SMALL_IMAGE)
        out = Path("runs") / (recipe.name if name in METHODS else Path(name).stem) if out is None else out
        if name in METHODS:
            screen.say(f"{name} is {recipe.name} here: the images are {side} px on their shorter side")
    recipe = recipe.changed(changes)
    folder = RunFolder(Path("runs") / recipe.name if out is None else Path(out).expanduser())
    folder.check_free()

    images = source.load(_STORED * view_size(recipe, side), recipe.seed)
    resolved = resolve(recipe, images, side)
    screen.say(
        f"{images.name}: {len(images.train)} training images"
        f"{f', {len(images.classes)} classes' if images.classes else ', no labels'}; test: {images.test_origin}"
    )
    for note in images.notes:
        screen.say(note)
    environment = describe_environment(_lasting_name(data), resolved, str(where))
    differences = folder.check_same_recipe(resolved, environment) if folder.exists() else []
    learner = make_learner(resolved, images.train.truth, where)  # what cannot be built leaves no folder behind
    if not folder.exists():
        folder.create(resolved, environment, images)
    with folder.locked():
        folder.check_same_images(images)
        if folder.complete():
            screen.say(f"{folder.path} is complete already; remove it to train again")
            return Run(folder.path)
        for difference in differences:
            screen.say(f"{difference}: the run will not equal an uninterrupted one bit for bit")
        Training(resolved, learner, images, folder, screen).run()
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
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadInput(f"--device {name} is not to be had: {str(error).splitlines()[0]}; use auto or cpu") from None
    return device


def _lasting_name(data: str | Path | None) -> str:
    """The data's name as it will be found from another working directory."""
    return SAMPLE if data is None or str(data) == SAMPLE else str(Path(data).expanduser().resolve())
