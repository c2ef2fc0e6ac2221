"""A run folder: the names of its files, and how they are written and read."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cmsf.data import DataConfig, Dataset, Source, load_dataset, open_source
from cmsf.data.sources.table import read_columns, write_csv
from cmsf.evaluation.finetune import FINE_TUNE_MODES, make_head
from cmsf.method.build import make_loss, recipe_backbone
from cmsf.models.backbones import feature_width
from cmsf.models.precision import Precision
from cmsf.models.state_dicts import read_safetensors
from cmsf.models.weights import PretrainedWeights, load_strict, save_weights
from cmsf.recipes.recipe import AUTO, Recipe, ResolvedRecipe
from cmsf.runs import checkpoint
from cmsf.runs.environment import BIT_FOR_BIT, INIT_SHA256
from cmsf.runs.listing import Listing
from cmsf.runs.requests import check_run
from cmsf.utils.constants import BACKBONE_FILE, ENVIRONMENT_FILE, RECIPE_FILE
from cmsf.utils.errors import BadInput, first_few
from cmsf.utils.files import (
    atomic_folder,
    check_not_symlink,
    check_regular_file,
    make_folder,
    read_json,
    write_json,
    write_text,
)
from cmsf.utils.locks import hold_lock
from cmsf.utils.numbers import is_integer
from cmsf.utils.text import is_encodable

ALONG = "along"
"""How a classifier was made that was trained along with the features: one linear layer."""


class _Entry:
    """A file or folder of a run, by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    path: Path

    recipe_file = _Entry(RECIPE_FILE)
    environment_file = _Entry(ENVIRONMENT_FILE)
    metrics_file = _Entry("metrics.jsonl")
    data_file = _Entry("data.parquet")
    broken_file = _Entry("broken.csv")
    """The images that could not be read; written with --skip-broken only."""
    backbone_file = _Entry(BACKBONE_FILE)
    start_file = _Entry("start.safetensors")
    """Which test images k-NN classified right before the first step, or the agreement of views of each image."""
    best_file = _Entry("best.safetensors")
    """The network of the best epoch, of a run that diverged."""
    checkpoints = _Entry("checkpoints")
    tensorboard = _Entry("tensorboard")
    results = _Entry("results")
    features = _Entry("features")
    """The cache of evaluations; it may be removed at any time."""
    divergence_file = _Entry("diverged.json")
    """The diagnosis of a run that stopped because its loss or weights were NaN or inf."""
    neighbours_picture = _Entry("neighbours.png")
    head_file = _Entry("head.safetensors")
    classifier_file = _Entry("classifier.json")
    """The classes of a classifier, and how it was trained."""
    confusion_file = _Entry("confusion.csv")
    confusion_picture = _Entry("confusion.png")
    calibration_picture = _Entry("calibration.png")
    report_file = _Entry("report.html")

    def exists(self) -> bool:
        return os.path.exists(self.recipe_file)  # False where its folder cannot be read

    def is_complete(self) -> bool:
        """Returns whether training has ended; the picture is drawn last."""
        return self.backbone_file.exists() and self.neighbours_picture.exists()

    def has_checkpoint(self) -> bool:
        return checkpoint.latest(self.checkpoints) is not None

    def check_free(self) -> None:
        """Refuses a folder that holds something other than a run."""
        try:
            if self.exists() or not self.path.exists():
                return
            if not self.path.is_dir():
                raise BadInput(f"--out {self.path} is a file; give a folder")
            if any(self.path.iterdir()):
                raise BadInput(f"--out {self.path} is not empty and is not a run; choose another folder")
        except OSError as error:
            raise BadInput(f"--out {str(self.path)[:80]} cannot be used: {error.strerror}") from None

    def check_new(self) -> None:
        """Refuses a path where no new folder can be made, before anything is computed for it."""
        self.check_free()
        if self.exists():
            raise BadInput(f"--out {self.path} holds a run already; choose another folder, or remove it")
        above = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise BadInput(f"--out {self.path} cannot be made below {above}; choose another folder")

    def recipe(self) -> ResolvedRecipe:
        check_run(self.path)
        return ResolvedRecipe.read(self.recipe_file)

    def environment(self) -> dict[str, Any]:
        environment = read_json(self.environment_file)
        known = isinstance(environment, dict) and isinstance(environment.get("data"), str)
        if not known or not all(isinstance(environment.get(name), str | None) for name in ("labels", "val")):
            raise BadInput(f"{self.environment_file} is not what cmsf train wrote")
        return dict(environment)

    def create(self, recipe: ResolvedRecipe, environment: dict[str, Any], data: Dataset) -> None:
        """Writes what is known before training, atomically."""
        with self.draft() as draft:
            draft.describe(recipe, environment, data)

    @contextmanager
    def draft(self) -> Iterator[RunFolder]:
        """Yields a temporary folder to fill, which then becomes this one; recipe.yaml comes last."""
        try:
            with atomic_folder(self.path, last=self.recipe_file.name) as path:
                yield RunFolder(path)
        except OSError as error:
            raise BadInput(f"cannot make the run folder {self.path}: {error.strerror}; choose another --out") from None

    def describe(self, recipe: ResolvedRecipe, environment: dict[str, Any], data: Dataset) -> None:
        """Writes recipe, environment and listing of the images."""
        write_json(self.environment_file, environment)
        Listing.from_dataset(data).write(self.data_file)
        if recipe.skip_broken:
            rows = [(split, image.path, image.reason) for split, image in data.broken]
            write_csv(self.broken_file, ("split", "path", "reason"), rows)
        write_text(self.recipe_file, recipe.to_yaml())

    def data_config(self) -> DataConfig:
        """Returns the data, labels and val that the run was started with."""
        environment = self.environment()
        return DataConfig(environment["data"], environment.get("labels"), environment.get("val"))

    def known_broken(self) -> set[tuple[str, str]] | None:
        """Returns split and path of the images that were left out; None where nothing is recorded."""
        if not self.broken_file.exists():
            return None
        check_regular_file(self.broken_file)
        columns = read_columns(self.broken_file)
        if not {"split", "path"} <= columns.keys():
            raise BadInput(f"{self.broken_file} is not what cmsf train wrote")
        return set(zip(columns["split"], columns["path"], strict=True))

    def check_same_recipe(self, recipe: ResolvedRecipe, environment: dict[str, Any]) -> list[str]:
        """Refuses another recipe or other data; returns what keeps a resume from being bit for bit."""
        before = self.environment()
        differences = recipe.differences(self.recipe())
        differences[:0] = [
            f"{name}: {environment[name]} against {before.get(name)}"
            for name in ("data", "labels", "val")
            if before.get(name) != environment[name]
        ]
        if differences:
            shown = first_few(differences)
            raise BadInput(f"{self.path} already holds another run ({shown}); choose another --out, or remove it")
        return [
            f"{name} was {before.get(name)} and is {environment[name]}"
            for name in BIT_FOR_BIT
            if before.get(name, environment[name]) != environment[name]
        ]

    def check_same_start(self, start: PretrainedWeights) -> None:
        """Refuses starting weights other than those the run began with."""
        before = self.environment().get(INIT_SHA256)
        if before != start.sha256:
            raise BadInput(
                f"the weights of {start.origin} have changed since {self.path} began (sha256 {str(before)[:12]} then, "
                f"{start.sha256[:12]} now); restore them, or start another run"
            )

    def listing(self) -> Listing:
        """Returns path, index, label, truth and split of each image."""
        return Listing.read(self.data_file)

    def load_images(self, source: Source, data_config: DataConfig, recipe: Recipe, size: int) -> Dataset:
        """Loads the images of a run; one that exists knows how they are split and cached, and which are broken."""
        seen, broken = None, self.known_broken()
        if self.exists():
            if recipe.cache == AUTO:
                recipe = replace(recipe, cache=self.recipe().cache)
            seen = self.listing().seen()
            seen = replace(seen, test=seen.test | {path for split, path in broken or () if split == "test"})
        labels = None if data_config.labels is None else Path(data_config.labels)
        val = None if data_config.val is None else open_source(data_config.val)
        return load_dataset(source, recipe, size, labels=labels, val=val, known_broken=broken, seen=seen)

    def check_same_paths(self, data: Dataset, otherwise: str = "give them with --data") -> None:
        self.listing().check_same_paths(data, self.path, otherwise)

    def check_same_images(self, data: Dataset) -> None:
        self.listing().check_same(data, self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of the run, so that no second process trains it."""
        self.check_own()
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise BadInput(f"nothing can be written to {self.path}; make it writable, or choose another --out")
        with hold_lock(self.path / ".lock", f"{self.path} is being trained"):
            yield

    def in_training(self) -> bool:
        """Returns whether a process holds the lock at this moment."""
        try:
            file = os.open(self.path / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(file)
        return False

    def check_own(self) -> None:
        """Refuses a run with symbolic links in it: files would be written or removed elsewhere."""
        for folder, subfolders, files in os.walk(self.path):
            for name in (*subfolders, *files):
                check_not_symlink(Path(folder, name))

    def load_backbone(self, device: torch.device | str = "cpu") -> nn.Module:
        """Returns the trained network, in eval mode."""
        recipe = self.recipe()
        precision = Precision(recipe.precision)
        precision.check(torch.device(device))
        backbone = recipe_backbone(recipe).to(precision.dtype)
        if not self.backbone_file.exists():
            raise BadInput(
                f"{self.path} has no {BACKBONE_FILE} yet; give the same cmsf train command again to finish it"
            )
        load_strict(backbone, read_safetensors(self.backbone_file), self.backbone_file)
        return backbone.to(device).eval()

    def classifier(self) -> dict[str, Any]:
        """Returns the content of classifier.json: classes, width of the features, how it was tuned."""
        recipe = self.recipe()  # says so if it is not a run
        if not self.classifier_file.exists():
            if "classifier" in make_loss(recipe).heads:
                raise BadInput(f"{self.path} is not finished; give the same cmsf train command again to finish it")
            raise BadInput(f"{self.path} is not a classifier; make one: cmsf finetune {self.path}")
        about = read_json(self.classifier_file)
        classes, width, tune = (
            about.get(name) if isinstance(about, dict) else None for name in ("classes", "features", "tune")
        )
        named = isinstance(classes, list) and len(classes) > 1 and all(map(_is_class_name, classes))
        if not named or not is_integer(width) or not 0 < width < 2**20 or tune not in (*FINE_TUNE_MODES, ALONG):
            raise BadInput(f"{self.classifier_file} is not what cmsf wrote")
        return dict(about)

    def save_classifier(self, head: nn.Module, about: dict[str, Any]) -> None:
        save_weights(head, self.head_file)
        write_json(self.classifier_file, about, ensure_ascii=False)

    def load_classifier(self, device: torch.device | str = "cpu") -> nn.Sequential:
        """Returns backbone and head in eval mode: images in, a score for each class out."""
        about = self.classifier()
        width, classes = about["features"], len(about["classes"])
        backbone = self.load_backbone()
        features = feature_width(backbone, self.recipe().backbone, self.recipe().size)
        if width != features:  # before a head of such a width takes memory
            raise BadInput(f"{self.classifier_file} is for {width} features, and the network has {features}")
        head = nn.Linear(width, classes) if about["tune"] == ALONG else make_head(width, classes, mode=about["tune"])
        head.to(next(backbone.parameters()).dtype)
        load_strict(head, read_safetensors(self.head_file), self.head_file)
        return nn.Sequential(backbone, head).to(device).eval()

    def save_confusion(self, counts: Tensor, names: Sequence[str]) -> None:
        """Writes a row for each true class, a column for each predicted one."""
        rows = [(name, *map(str, row)) for name, row in zip(names, counts.tolist(), strict=True)]
        write_csv(self.confusion_file, ("true \\ predicted", *names), rows)

    def save_result(self, path: Path, result: dict[str, Any]) -> None:
        make_folder(path.parent)
        write_json(path, result)


def _is_class_name(name: Any) -> bool:
    """Returns whether this is text that can be written; JSON can spell halves of letters."""
    return isinstance(name, str) and is_encodable(name)
