"""What a run leaves on the disk, and how it is read again."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from cmsf.data import DataRequest, Dataset
from cmsf.data.labels import Labels
from cmsf.data.prepare import SeenImages
from cmsf.data.sources.table import read_columns, write_csv
from cmsf.method.build import recipe_backbone
from cmsf.models.precision import Precision
from cmsf.models.weights import PretrainedWeights, load_strict, read_safetensors, save_weights
from cmsf.recipes.recipe import Resolved
from cmsf.runs import checkpoint
from cmsf.runs.environment import BIT_FOR_BIT, INIT_SHA256
from cmsf.utils.errors import BadInput, first_few
from cmsf.utils.files import (
    atomic_folder,
    atomic_write,
    check_not_symlink,
    check_regular_file,
    make_folder,
    open_regular_file,
    read_json,
    write_text,
)

_LISTED: dict[str, Any] = {"path": str, "index": int, "label": str | None, "truth": str | None, "split": str}
"""The columns of data.parquet."""
_PATIENCE = 10.0
"""Seconds that those whom a killed process has left behind have to end."""


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def environment_file(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def data_file(self) -> Path:
        return self.path / "data.parquet"

    @property
    def broken_file(self) -> Path:
        """What was left out because it could not be read; there with --skip-broken alone."""
        return self.path / "broken.csv"

    @property
    def backbone_file(self) -> Path:
        return self.path / "backbone.safetensors"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def results(self) -> Path:
        return self.path / "results"

    @property
    def features(self) -> Path:
        """What evaluations have computed once; it may be removed at any time."""
        return self.path / "features"

    @property
    def divergence_file(self) -> Path:
        """Where and how the numbers of a run ceased to be some; there for a run that stopped so."""
        return self.path / "diverged.json"

    @property
    def neighbours_picture(self) -> Path:
        return self.path / "neighbours.png"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    def exists(self) -> bool:
        return os.path.exists(self.recipe_file)  # False where its folder cannot be read

    def complete(self) -> bool:
        """The picture is drawn last."""
        return self.backbone_file.exists() and self.neighbours_picture.exists()

    def started(self) -> bool:
        """Whether there is a checkpoint to go on from; what the run began with is then not needed any more."""
        return checkpoint.latest(self.checkpoints) is not None

    def check_free(self) -> None:
        """Refuse a place that holds something else than a run."""
        try:
            if self.exists() or not self.path.exists():
                return
            if not self.path.is_dir():
                raise BadInput(f"--out {self.path} is a file; give a folder")
            if any(self.path.iterdir()):
                raise BadInput(f"--out {self.path} is not empty and holds no run; choose another folder")
        except OSError as error:
            raise BadInput(f"--out {str(self.path)[:80]} will not do: {error.strerror}") from None

    def check_new(self) -> None:
        """Refuse a place where no new folder can be made, before anything is computed for it."""
        self.check_free()
        if self.exists():
            raise BadInput(f"--out {self.path} holds a run already; choose another folder, or remove it")
        above = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise BadInput(f"--out {self.path} cannot be made below {above}; choose another folder")

    def recipe(self) -> Resolved:
        if not os.path.exists(self.path):  # nor does a name too long for a path
            raise BadInput(f"there is no run {self.path}")
        if not os.access(self.path, os.R_OK | os.X_OK):
            raise BadInput(f"{self.path} cannot be read; make it readable")
        if not self.exists():
            raise BadInput(f"{self.path} is no run: it has no recipe.yaml; give a folder that cmsf train wrote")
        return Resolved.read(self.recipe_file)

    def environment(self) -> dict[str, Any]:
        environment = read_json(self.environment_file)
        known = isinstance(environment, dict) and isinstance(environment.get("data"), str)
        if not known or not all(isinstance(environment.get(name), str | None) for name in ("labels", "val")):
            raise BadInput(f"{self.environment_file} is not what cmsf train wrote")
        return dict(environment)

    def create(self, recipe: Resolved, environment: dict[str, Any], data: Dataset) -> None:
        """Lay down what is known before training, under another name first: a run folder is never half there."""
        with self.drafted() as draft:
            RunFolder(draft).describe(recipe, environment, data)

    @contextmanager
    def drafted(self) -> Iterator[Path]:
        """A folder to fill, which then becomes this one; the recipe makes it a run, and comes last."""
        try:
            with atomic_folder(self.path, last=self.recipe_file.name) as draft:
                yield draft
        except OSError as error:
            raise BadInput(f"cannot make the run folder {self.path}: {error.strerror}; choose another --out") from None

    def describe(self, recipe: Resolved, environment: dict[str, Any], data: Dataset) -> None:
        """Write what a run is."""
        write_text(self.environment_file, json.dumps(environment, indent=2) + "\n")
        with atomic_write(self.data_file) as temporary:
            pq.write_table(_listing(data), temporary)
        if recipe.skip_broken:
            rows = [(split, one.path, one.reason) for split, one in data.broken]
            write_csv(self.broken_file, ("split", "path", "reason"), rows)
        write_text(self.recipe_file, recipe.to_yaml())

    def request(self) -> DataRequest:
        """The images that the run was given."""
        environment = self.environment()
        return DataRequest(environment["data"], environment.get("labels"), environment.get("val"))

    def known_broken(self) -> set[tuple[str, str]] | None:
        """Splits and paths that were left out; None where all are in, or nothing is known yet."""
        if not self.broken_file.exists():
            return None
        check_regular_file(self.broken_file)
        columns = read_columns(self.broken_file)
        if not {"split", "path"} <= columns.keys():
            raise BadInput(f"{self.broken_file} is not what cmsf train wrote")
        return set(zip(columns["split"], columns["path"], strict=True))

    def check_same_recipe(self, recipe: Resolved, environment: dict[str, Any]) -> list[str]:
        """Refuse a run of another recipe or other data; name what keeps a resume from being bit for bit."""
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
        """Refuse weights that are not those the run began with, though they are in the same place."""
        before = self.environment().get(INIT_SHA256)
        if before != start.sha256:
            raise BadInput(
                f"the weights of {start.origin} have changed since {self.path} began (sha256 {str(before)[:12]} then, "
                f"{start.sha256[:12]} now); put them back, or start another run"
            )

    def images(self) -> list[dict[str, Any]]:
        """What data.parquet says of each image."""
        columns = self.columns()
        rows = zip(*(columns[name] for name in _LISTED), strict=True)
        return [dict(zip(_LISTED, row, strict=True)) for row in rows]

    def columns(self) -> dict[str, list[Any]]:
        """The same by column."""
        columns = read_columns(self.data_file)
        if not columns.keys() >= _LISTED.keys() or not all(
            isinstance(value, kind) for name, kind in _LISTED.items() for value in columns[name]
        ):
            raise BadInput(f"{self.data_file} is not what cmsf train wrote")
        return columns

    def seen(self) -> SeenImages:
        """What the run has made of its images."""
        listed = self.images()
        taught = {row["path"] for row in listed if row["split"] == "train" and row["label"] is not None}
        test = {row["path"] for row in listed if row["split"] == "test"}
        return SeenImages(test | {path for split, path in self.known_broken() or () if split == "test"}, taught)

    def check_same_paths(self, data: Dataset, otherwise: str = "give them with --data") -> None:
        """Refuse other images than the run's, whatever their labels: what it was trained on would be tested on."""
        before = {row["path"] for row in self.images()}
        now = {path for split in (data.train, data.test) if split is not None for path in split.paths}
        if before != now:
            raise BadInput(
                f"the images of {self.path} have changed since ({len(before)} then, {len(now)} now, the first that "
                f"differs is {min(before ^ now)}); put them back, or {otherwise}"
            )

    def check_same_images(self, data: Dataset) -> None:
        """Refuse images that are not those of the run: its cache and its test split go by their order."""
        before, now = self.images(), _listing(data).to_pylist()
        if before != now:
            old, new = (
                {(row["split"], row["path"], row["label"], row["truth"]) for row in rows} for rows in (before, now)
            )
            changed = sorted(path for _, path, _, _ in old ^ new) or [now[0]["path"]]
            same_images = [row["path"] for row in before] == [row["path"] for row in now]
            what = "labels" if same_images else "images"
            raise BadInput(
                f"the {what} of {self.path} have changed since ({len(before)} then, {len(now)} now, the first that "
                f"differs is {changed[0]}); put them back, or start another run"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process from training the same run, and any from being led out of its folder."""
        self.check_own()
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise BadInput(f"nothing can be written to {self.path}; make it writable, or choose another --out")
        file = open_regular_file(self.path / ".lock")
        try:
            self._lock(file)
            with suppress(OSError):  # no room on the disk; the lock holds without a name
                os.ftruncate(file, 0)
                os.pwrite(file, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(file)

    def in_training(self) -> bool:
        """Whether a process holds the lock at this moment."""
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
        """Refuse a run with links in it, for what is written or tidied up there would be so elsewhere."""
        for folder, subfolders, files in os.walk(self.path):
            for name in (*subfolders, *files):
                check_not_symlink(Path(folder, name))

    def _lock(self, file: int) -> None:
        """Where the one that has it was killed, its children may have it for a moment longer."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                holder = os.pread(file, 20, 0).decode("ascii", "replace").strip() or "unknown"
                if not _is_gone(holder) or time.monotonic() > deadline:
                    raise BadInput(
                        f"{self.path} is being trained by process {holder}; wait for it, or stop it"
                    ) from None
            time.sleep(0.05)

    def save_backbone(self, backbone: nn.Module) -> None:
        save_weights(backbone, self.backbone_file)

    def load_backbone(self, device: torch.device | str = "cpu") -> nn.Module:
        """The trained network, in eval mode."""
        recipe = self.recipe()
        precision = Precision(recipe.precision)
        precision.check(torch.device(device))
        backbone = recipe_backbone(recipe).to(precision.dtype)
        if not self.backbone_file.exists():
            raise BadInput(
                f"{self.path} has no backbone.safetensors yet; give the same cmsf train command again to finish it"
            )
        load_strict(backbone, read_safetensors(self.backbone_file), self.backbone_file)
        return backbone.to(device).eval()

    def save_divergence(self, about: dict[str, Any]) -> None:
        write_text(self.divergence_file, json.dumps(about, indent=1, ensure_ascii=False) + "\n")

    def save_result(self, path: Path, result: dict[str, Any]) -> None:
        make_folder(path.parent)
        write_text(path, json.dumps(result, indent=2) + "\n")


def _is_gone(holder: str) -> bool:
    try:
        os.kill(int(holder), 0)
    except ProcessLookupError:
        return True
    except (ValueError, OverflowError, PermissionError):
        return False
    return False


def _listing(data: Dataset) -> pa.Table:
    rows: dict[str, list[Any]] = {"path": [], "index": [], "label": [], "truth": [], "split": []}
    for name, split in (("train", data.train), ("test", data.test)):
        if split is not None:
            rows["path"] += split.paths
            rows["index"] += range(len(split))
            rows["label"] += Labels(split.label, data.label_names).to_names()
            rows["truth"] += Labels(split.truth, data.classes).to_names()
            rows["split"] += [name] * len(split)
    types = {name: pa.int64() if name == "index" else pa.string() for name in rows}
    return pa.table(rows, schema=pa.schema(list(types.items())))
