"""The library's front door: train, load, evaluate."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cmsf.assembly import LARGEST_SMALL_IMAGE, make_encoders, make_learner, resolve, view_size
from cmsf.data import (
    Dataset,
    Request,
    Source,
    default_workers,
    open_source,
)
from cmsf.data import (
    load as load_images,
)
from cmsf.environment import describe_environment
from cmsf.errors import BadInput, did_you_mean
from cmsf.evaluation import Result, evaluate_knn, evaluate_linear, evaluate_pixels, evaluate_retrieval
from cmsf.recipe import AUTO, Recipe
from cmsf.recipes import METHODS, find
from cmsf.run_folder import RunFolder
from cmsf.screen import Screen
from cmsf.training import Training

METRICS: dict[str, Callable[[nn.Module, Dataset, int, torch.device, int], Result]] = {
    "knn": evaluate_knn,
    "linear": evaluate_linear,
    "retrieval": evaluate_retrieval,
}


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
        if data is not None:
            as_they_are = Recipe(seed=self.recipe.seed, skip_broken=self.recipe.skip_broken, cache=self.recipe.cache)
            return load_images(open_source(data), as_they_are, self.recipe.size)
        request = self.folder.request()
        if request.runs_a_command:  # the folder may be somebody else's
            raise BadInput(
                f"the data of {self.path} is a shell command, {request.data}; to run it, give it with --data"
            )
        images = _load(open_source(request.data), request, self.recipe, self.recipe.size, self.folder)
        self.folder.check_same_images(images)
        return images

    def evaluate(
        self,
        metric: str = "knn",
        data: str | Path | None = None,
        device: str = "auto",
        workers: int | None = None,
    ) -> dict[str, float]:
        """Per cent by name, e.g. {"1-nn": 81.2, "20-nn": 83.0, …}; written with intervals and protocol to results/.

        metric: knn, linear (a linear layer on frozen features) or retrieval (R@1, 5 and 10).
        """
        evaluate = evaluation(metric)
        images, where = self.data(data), pick_device(device)
        result = evaluate(self.backbone(where), images, self.recipe.size, where, _workers(workers))
        weights = hashlib.sha256(self.folder.backbone_file.read_bytes()).hexdigest()
        self._save(metric, result, data, {"weights_sha256": weights})
        return result.accuracy

    def references(
        self,
        metric: str = "knn",
        data: str | Path | None = None,
        device: str = "auto",
        workers: int | None = None,
    ) -> dict[str, dict[str, float]]:
        """The same of the network before training and, for knn, of raw pixels: what learning has to beat."""
        evaluate = evaluation(metric)
        images, where = self.data(data), pick_device(device)
        untrained = make_encoders(self.recipe).online.backbone.to(where)
        results: dict[str, Result] = {}
        if metric == "knn":
            results["raw pixels"] = evaluate_pixels(images, self.recipe.size, _workers(workers))
        results["untrained encoder"] = evaluate(untrained, images, self.recipe.size, where, _workers(workers))
        for name, result in results.items():
            self._save(metric, result, data, {"of": name})
        return {name: result.accuracy for name, result in results.items()}

    def result_file(self, metric: str = "knn", data: str | Path | None = None, of: str = "") -> Path:
        """Where an evaluation is written: results/knn.json, with the names of other data and of a reference added."""
        other = "" if data is None else re.sub(r"[^\w.-]+", "-", Path(data).expanduser().absolute().stem)
        names = filter(None, [metric, other, of.replace(" ", "-")])
        return self.path / "results" / f"{'-'.join(names)}.json"

    def result(self, metric: str = "knn", data: str | Path | None = None, of: str = "") -> dict[str, Any]:
        """The evaluation that was written last: accuracy, measures with their intervals, protocol."""
        found: dict[str, Any] = json.loads(self.result_file(metric, data, of).read_text(encoding="utf-8"))
        return found

    def _save(self, metric: str, result: Result, data: str | Path | None, about: dict[str, str]) -> None:
        spec = (self.folder.request() if data is None else Request.of(data)).data
        known = {"metric": metric, "data": spec, "recipe": self.recipe.name} | about
        self.folder.save_result(self.result_file(metric, data, about.get("of", "")), known | result.report())


def train(
    recipe: str | Recipe = "cmsf-self",
    data: str | Path | None = None,
    out: str | Path | None = None,
    *,
    labels: str | Path | None = None,
    val: str | Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    quiet: bool = False,
    screen: Screen | None = None,
    **changes: Any,
) -> Run:
    """Train a recipe on a source of images; the same call again goes on where it was stopped.

    recipe: METHOD, METHOD-SCALE, a saved recipe.yaml, or a Recipe.
    data: a folder of images, a .csv or .parquet list, an .npz, torchvision:NAME, hf:NAME or wds:SHARDS; None for the
        embedded sample.
    labels: a list of path (or index) and label that replaces the training labels; the source's own are then used for
        purity and evaluation alone.
    val: a source to test on; without it, a split of the data, or a tenth of its labelled images.
    workers: processes that decode images which are not held in memory; by default one a core.
    out: the run folder, by default runs/ and the recipe's or the file's name.
    changes: any field of the recipe, e.g. epochs=100.
    """
    screen = screen or Screen(quiet=quiet)
    where = pick_device(device)
    request = Request.of(data, labels, val)
    source = open_source(data)
    side = source.typical_side()
    if isinstance(recipe, str):
        name, recipe = recipe, find(recipe, small_images=side <= LARGEST_SMALL_IMAGE)
        out = Path("runs") / (recipe.name if name in METHODS else Path(name).stem) if out is None else out
        if name in METHODS:
            screen.say(f"{name} is {recipe.name} here: the images are {side} px on their shorter side")
    recipe = _with_lasting_paths(recipe.changed(changes))
    folder = RunFolder(Path("runs") / recipe.name if out is None else Path(out).expanduser())
    folder.check_free()

    images = _load(source, request, recipe, view_size(recipe, side), folder)
    resolved = resolve(recipe, images, side)
    for line in _describe(images):
        screen.say(line)
    environment = describe_environment(request, resolved, str(where))
    differences = folder.check_same_recipe(resolved, environment) if folder.exists() else []
    learner = make_learner(resolved, images.train.label, where)  # what cannot be built leaves no folder behind
    if not folder.exists():
        folder.create(resolved, environment, images)
    with folder.locked():
        folder.check_same_images(images)
        if folder.complete():
            screen.say(f"{folder.path} is complete already; remove it to train again")
            return Run(folder.path)
        for difference in differences:
            screen.say(f"{difference}: the run will not equal an uninterrupted one bit for bit")
        Training(resolved, learner, images, folder, screen, _workers(workers)).run()
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


def _load(source: Source, request: Request, recipe: Recipe, size: int, folder: RunFolder) -> Dataset:
    """The images of a run; one that exists says what it left out, and how it keeps them."""
    if folder.exists() and recipe.cache == AUTO:
        recipe = replace(recipe, cache=folder.recipe().cache)
    return load_images(
        source,
        recipe,
        size,
        labels=None if request.labels is None else Path(request.labels),
        val=None if request.val is None else open_source(request.val),
        known_broken=folder.known_broken(),
    )


def _describe(images: Dataset) -> list[str]:
    """What a run says of its images before it starts."""
    train = images.train
    known = f", {len(images.classes)} classes" if images.classes else ", no labels"
    lines = [f"{images.name}: {len(train)} training images{known}; test: {images.test_origin}", *images.notes]
    if not torch.equal(train.label, train.truth) or images.label_names != images.classes:
        names = len(train.label[train.labelled].unique())
        lines.append(f"labels to learn from: {len(train.labelled)} of {len(train)} images, {names} classes")
    if not images.in_memory:
        lines.append("images are decoded as they are read (--cache off)")
    if images.broken:
        lines.append(f"left out, for they cannot be read: {len(images.broken)} (broken.csv lists them)")
    return lines


def _with_lasting_paths(recipe: Recipe) -> Recipe:
    """A mapping by its full path, so that the recipe will find it from another working directory."""
    if recipe.coarse_labels in ("none", "wordnet"):
        return recipe
    return replace(recipe, coarse_labels=str(Path(recipe.coarse_labels).expanduser().absolute()))


def evaluation(metric: str) -> Callable[[nn.Module, Dataset, int, torch.device, int], Result]:
    if metric not in METRICS:
        hint = did_you_mean(metric, METRICS, f"use {', '.join(METRICS)}")
        raise BadInput(f"there is no evaluation {metric!r}; {hint}")
    return METRICS[metric]


def _workers(asked: int | None) -> int:
    return default_workers() if asked is None else asked
